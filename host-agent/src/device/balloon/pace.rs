//! How much of the host's CPU a guest may take by giving memory away.
//!
//! A chain costs the host about the same whether its memory is backed or not, and the guest next to nothing if it is not:
//! without a limit a hostile kernel keeps one or two host CPUs busy for ever. So chains are paid for, by the ranges in
//! them, from what comes back with time.
//!
//! What cannot be paid for now stays **in its ring**: it is not taken. So nothing of it is in flight while it waits, no
//! deadline runs, and a stop, a reset or a new memory map is answered as fast as ever. The guest's kernel waits as it does
//! for any report, its pages isolated.
//!
//! Linux never gets there. A pass of its page reporting takes 1/16 of each free list, in reports of 32 blocks of 2 MiB or
//! more, and passes begin at least 2 s apart (`page_reporting_cycle` in mm/page_reporting.c): that is one report per GiB of
//! free memory at once and half as many per second, and half of that in blocks of 4 MiB.
//!
//! Pure: time is an argument.

use std::time::Duration;

/// Units that can be saved up: one pass of Linux over 2 TiB of free memory.
pub(super) const CAPACITY: u32 = 2_000;

/// Units that come back per second. One costs the host about half a millisecond, so it is an eighth of a CPU.
pub(super) const PER_SECOND: u32 = 250;

/// A unit pays for so many ranges, Linux's largest report (`PAGE_REPORTING_CAPACITY` in include/linux/page_reporting.h).
const RANGES: usize = 32;

/// The dearest chain, so that no debt keeps the next one waiting for more than an eighth of a second.
const MOST: u32 = 32;

const MICRO: i64 = 1_000_000;

/// What a chain costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cost {
    /// Of memory: by its ranges.
    Ranges(usize),
    /// It only went back: the owner is not asked and the kernel is not called.
    PassedBack,
}

impl Cost {
    fn micro_units(self) -> i64 {
        match self {
            Self::Ranges(ranges) => {
                let units = u32::try_from(ranges.div_ceil(RANGES)).unwrap_or(MOST).clamp(1, MOST);
                i64::from(units) * MICRO
            }
            Self::PassedBack => MICRO / 16,
        }
    }
}

/// A token bucket that may go into debt: what a chain costs is known only when it has been read.
#[derive(Debug)]
pub(super) struct Pace {
    micro_units: i64,
    refilled_at: Duration,
}

impl Pace {
    /// A full bucket.
    pub(super) fn new(now: Duration) -> Self {
        Self { micro_units: i64::from(CAPACITY) * MICRO, refilled_at: now }
    }

    /// How long the next chain has to wait; `None` if it may be taken now. Time is monotonic.
    pub(super) fn wait(&mut self, now: Duration) -> Option<Duration> {
        let micros = i64::try_from(now.saturating_sub(self.refilled_at).as_micros()).unwrap_or(i64::MAX);
        let most = i64::from(CAPACITY) * MICRO;
        self.micro_units = self.micro_units.saturating_add(micros.saturating_mul(i64::from(PER_SECOND))).min(most);
        self.refilled_at = self.refilled_at.max(now);
        let debt = u64::try_from(-self.micro_units).ok()?;
        // Rounded up, so that nobody is woken a moment too early.
        Some(Duration::from_micros(debt / u64::from(PER_SECOND) + 1))
    }

    /// A chain was served.
    pub(super) fn charge(&mut self, cost: Cost) {
        self.micro_units -= cost.micro_units();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves chains as fast as they may be taken, each in `serve_us` microseconds, until `end`.
    fn served(pace: &mut Pace, mut now: Duration, end: Duration, cost: Cost, serve_us: u64) -> u32 {
        let mut served = 0;
        while now < end {
            match pace.wait(now) {
                Some(wait) => now += wait,
                None => {
                    pace.charge(cost);
                    served += 1;
                    now += Duration::from_micros(serve_us);
                }
            }
        }
        served
    }

    #[test]
    fn a_flood_is_served_at_the_pace_and_never_waits_long() {
        let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
        for (cost, per_unit) in [(Cost::Ranges(1), 1), (Cost::Ranges(32), 1), (Cost::PassedBack, 16)] {
            let mut pace = Pace::new(Duration::ZERO);
            let all = served(&mut pace, Duration::ZERO, minute, cost, 1);
            let paid = (CAPACITY + 60 * PER_SECOND) * per_unit;
            assert!((paid - per_unit..=paid + per_unit).contains(&all), "{cost:?}: {all} served, {paid} paid for");
        }
        for ranges in [1, 33, 1024, usize::MAX] {
            let mut pace = Pace::new(Duration::ZERO);
            served(&mut pace, Duration::ZERO, second * 10, Cost::Ranges(ranges), 1);
            pace.charge(Cost::Ranges(ranges));
            let wait = pace.wait(second * 10).unwrap_or_default();
            assert!(wait <= Duration::from_millis(300), "{ranges}: {wait:?}");
        }
    }

    /// `page_reporting_cycle` with all of a guest free: every 2 s, 1/16 of it in reports of 32 blocks, a report in 100 µs.
    #[test]
    fn linux_never_waits() {
        for (guest_gib, block_mib) in [(2, 2), (64, 4), (512, 2), (1024, 4)] {
            let reports = guest_gib * 1024 / 16 / (32 * block_mib) + 8;
            let mut pace = Pace::new(Duration::ZERO);
            for pass in 0..50 {
                for report in 0..reports {
                    let now = Duration::from_secs(2 * pass) + Duration::from_micros(100 * report);
                    assert_eq!(pace.wait(now), None, "{guest_gib} GiB in blocks of {block_mib} MiB, pass {pass}");
                    pace.charge(Cost::Ranges(32));
                }
            }
        }
    }
}
