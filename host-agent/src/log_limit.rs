//! A limit for log lines that somebody outside can cause.
//!
//! Used wherever a guest or a front end decides how often a line is written. A line that is held back is counted, and
//! the next line that passes says how many were, so that a flood shows as a number and not as a full disk.

use std::time::{Duration, Instant};

/// Lets `burst` lines through per `period` and counts the rest. Time is an argument, monotonic.
#[derive(Debug)]
pub struct RateLimited {
    burst: u32,
    period: Duration,
    window: Option<Instant>,
    passed: u32,
    suppressed: u64,
}

impl RateLimited {
    /// A limit of `burst` lines per `period`.
    #[must_use]
    pub const fn new(burst: u32, period: Duration) -> Self {
        Self { burst, period, window: None, passed: 0, suppressed: 0 }
    }

    /// Five lines per ten seconds: enough to see what happens, at most 43,200 lines a day.
    #[must_use]
    pub const fn guest_caused() -> Self {
        Self::new(5, Duration::from_secs(10))
    }

    /// `Some(number of lines held back since the last one that passed)` if a line may be written now.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        let expired = self.window.is_none_or(|start| now.saturating_duration_since(start) >= self.period);
        if expired {
            self.window = Some(now);
            self.passed = 0;
        }
        if self.passed == self.burst {
            self.suppressed = self.suppressed.saturating_add(1);
            return None;
        }
        self.passed += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_a_burst_and_says_later_what_it_held_back() {
        let start = Instant::now();
        let mut limit = RateLimited::new(2, Duration::from_secs(10));

        assert_eq!(limit.admit(start), Some(0));
        assert_eq!(limit.admit(start), Some(0));
        assert_eq!(limit.admit(start), None);
        assert_eq!(limit.admit(start + Duration::from_millis(9_999)), None);
        assert_eq!(limit.admit(start + Duration::from_secs(10)), Some(2));
        assert_eq!(limit.admit(start + Duration::from_secs(10)), Some(0));
        assert_eq!(limit.admit(start + Duration::from_secs(10)), None);
    }
}
