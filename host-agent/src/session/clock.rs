//! What the host knows of the guest's clock.
//!
//! Called by the session for each `Pong` and each `Report`. The guest may lie about its clock: it then gets its own
//! reports refused, or loses the lease's protection for its own memory.
//!
//! A `Ping` sent at host time `s` and answered with guest time `p`, received at host time `r`, says that the guest's
//! clock showed `p` somewhere between `s` and `r`. A report stamped `g` was therefore sent between `s + (g - p)` and
//! `r + (g - p)`, as long as both clocks run at the same rate. The lower bound makes the report as old as it can be;
//! that is the age the lease is held against.

use fpr_protocol::Refusal;
use std::collections::VecDeque;
use std::time::Duration;

/// Samples kept. The newest few give the tightest bounds; more only cost.
const MAX_SAMPLES: usize = 8;

/// A sample older than this says nothing: at 500 ppm, the drift NTP still tolerates, two clocks part by 30 ms in it.
const MAX_SAMPLE_AGE: Duration = Duration::from_secs(60);

/// How far bounds may contradict each other before samples count as stale: rate difference over `MAX_SAMPLE_AGE`.
const TOLERANCE_NS: i128 = 30_000_000;

#[derive(Clone, Copy, Debug)]
struct Sample {
    sent: Duration,
    received: Duration,
    guest_ns: u64,
}

impl Sample {
    /// Host time, in nanoseconds, at which the guest's clock showed `guest_ns`: earliest and latest.
    fn bounds(&self, guest_ns: u64) -> (i128, i128) {
        let offset = i128::from(guest_ns) - i128::from(self.guest_ns);
        (nanos(self.sent) + offset, nanos(self.received) + offset)
    }
}

fn nanos(time: Duration) -> i128 {
    // A Duration of u64 seconds always fits.
    i128::try_from(time.as_nanos()).unwrap_or(i128::MAX)
}

/// The next multiple of `grid`: what many VMs do now and then they do at the same moment, since each wake-up of a thread
/// costs more than what it does then.
pub(crate) fn on_grid(time: Duration, grid: Duration) -> Duration {
    let nanos = grid.as_nanos().max(1);
    u32::try_from(time.as_nanos().div_ceil(nanos)).map_or(time, |steps| grid * steps)
}

/// Bounds on the guest's clock, from `Ping` and `Pong`.
#[derive(Debug, Default)]
pub struct GuestClock {
    samples: VecDeque<Sample>,
}

impl GuestClock {
    /// A `Ping` went out at `sent`, its `Pong` came at `received` and said `guest_ns`.
    pub fn sample(&mut self, sent: Duration, received: Duration, guest_ns: u64) {
        let new = Sample { sent, received, guest_ns };
        // The guest was paused, or its clock jumped: what was known before is wrong from here on.
        self.samples.retain(|old| {
            let (old_earliest, old_latest) = old.bounds(guest_ns);
            old_earliest <= nanos(received) + TOLERANCE_NS && old_latest + TOLERANCE_NS >= nanos(sent)
        });
        if self.samples.len() == MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(new);
    }

    /// Earliest host time at which a report stamped `guest_ns` can have been sent, or why it cannot be judged.
    pub fn sent_at(&self, guest_ns: u64, now: Duration) -> Result<Duration, Refusal> {
        let fresh = self.samples.iter().filter(|sample| now.saturating_sub(sample.received) <= MAX_SAMPLE_AGE);
        let earliest = fresh.map(|sample| sample.bounds(guest_ns).0).max().ok_or(Refusal::ClockUnknown)?;
        if earliest > nanos(now) + TOLERANCE_NS {
            return Err(Refusal::FromFuture);
        }
        // Before the host's boot: as old as can be.
        let clamped = u64::try_from(earliest.max(0)).unwrap_or(u64::MAX);
        Ok(Duration::from_nanos(clamped).min(now))
    }

    /// Whether any report can be judged at `now`.
    #[must_use]
    pub fn is_known(&self, now: Duration) -> bool {
        self.samples.back().is_some_and(|sample| now.saturating_sub(sample.received) <= MAX_SAMPLE_AGE)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn nothing_is_judged_without_a_sample() {
        assert_eq!(GuestClock::default().sent_at(1, ms(1)), Err(Refusal::ClockUnknown));
    }

    #[test]
    fn a_report_is_as_old_as_it_can_be() {
        let mut clock = GuestClock::default();
        clock.sample(ms(1000), ms(1010), 50 * MS);
        assert_eq!(clock.sent_at(60 * MS, ms(1020)), Ok(ms(1010)));
        clock.sample(ms(1100), ms(1101), 145 * MS);
        assert_eq!(clock.sent_at(145 * MS, ms(1200)), Ok(ms(1100)));
    }

    #[test]
    fn a_stamp_to_come_is_refused() {
        let mut clock = GuestClock::default();
        clock.sample(ms(1000), ms(1001), 50 * MS);
        assert_eq!(clock.sent_at(500 * MS, ms(1002)), Err(Refusal::FromFuture));
    }

    #[test]
    fn a_paused_guest_is_judged_by_the_newest_sample() {
        let mut clock = GuestClock::default();
        clock.sample(ms(1000), ms(1001), 50 * MS);
        // The guest stood still for ten seconds: its report from before is refused by age …
        assert_eq!(clock.sent_at(60 * MS, ms(11_012)), Ok(ms(1010)));
        // … and after a new sample its fresh reports are fresh again.
        clock.sample(ms(11_020), ms(11_021), 70 * MS);
        assert_eq!(clock.sent_at(80 * MS, ms(11_031)), Ok(ms(11_030)));
    }

    proptest! {
        /// Whatever the delays, the bound is never later than the truth: the lease errs on the safe side.
        #[test]
        fn the_bound_is_never_later_than_the_truth(
            offset in 0u64..1 << 40,
            steps in proptest::collection::vec((0u64..50, 0u64..50, 1u64..2000), 1..20),
            delay in 0u64..3000,
        ) {
            let mut clock = GuestClock::default();
            let mut now = 1_000;
            for (there, back, pause) in steps {
                let (sent, seen) = (now, now + there);
                now = seen + back;
                clock.sample(ms(sent), ms(now), offset + seen * MS);
                now += pause;
            }
            let truly_sent = now;
            let judged = clock.sent_at(offset + truly_sent * MS, ms(truly_sent + delay)).unwrap();
            prop_assert!(judged <= ms(truly_sent), "{judged:?} after {truly_sent} ms");
        }
    }
}
