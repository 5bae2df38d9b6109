//! How many messages a guest may send. A hostile guest can keep its own worker busy, nothing more.

use std::time::Duration;

/// Units a session may save up: a burst of this many cheap messages passes.
const CAPACITY: u64 = 2_000;

/// Units that come back per second. A pass over a large guest needs a few hundred messages per second.
const PER_SECOND: u64 = 1_000;

/// A token bucket over monotonic time.
#[derive(Debug)]
pub struct RateLimit {
    /// Millionths of a unit, so that refills of a microsecond count.
    micro_units: u64,
    refilled_at: Duration,
}

impl RateLimit {
    /// A full bucket.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        Self { micro_units: CAPACITY * 1_000_000, refilled_at: now }
    }

    /// Takes `units` out, or says that there are not enough.
    pub fn take(&mut self, units: u64, now: Duration) -> bool {
        let micros = u64::try_from(now.saturating_sub(self.refilled_at).as_micros()).unwrap_or(u64::MAX);
        self.micro_units = self.micro_units.saturating_add(micros.saturating_mul(PER_SECOND)).min(CAPACITY * 1_000_000);
        self.refilled_at = now;
        let wanted = units.saturating_mul(1_000_000);
        if wanted > self.micro_units {
            return false;
        }
        self.micro_units -= wanted;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_a_flood_does_not() {
        let mut limit = RateLimit::new(Duration::ZERO);
        assert!((0..CAPACITY).all(|_| limit.take(1, Duration::ZERO)));
        assert!(!limit.take(1, Duration::ZERO));
        assert!(limit.take(1, Duration::from_millis(1)));
        assert!(!limit.take(PER_SECOND, Duration::from_millis(500)));
        assert!(limit.take(PER_SECOND / 4, Duration::from_millis(500)));
    }
}
