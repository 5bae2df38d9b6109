//! When it pays to look, and how long memory must have been free: the agent's adaptive numbers.
//!
//! Pure arithmetic over times and sizes; `agent` asks, nobody else.

use std::time::Duration;

/// Bounds and thresholds of the agent. The defaults are the documented ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// A rise of free memory by this many bytes since the last pass starts the next one.
    pub trigger_bytes: u64,
    /// A pass goes on only if the host still backs at least this much of the free memory.
    pub min_reclaim_bytes: u64,
    /// A memory block is taken offline only for at least this much backing.
    pub min_block_bytes: u64,
    /// Shortest time between the two looks at free memory.
    pub min_free_age: Duration,
    /// Longest, when what was dropped keeps coming back.
    pub max_free_age: Duration,
    /// Longest time between two passes when nothing changes.
    pub max_interval: Duration,
    /// Beside a kernel that reports by itself: one part in so many of the guest's memory is a big free.
    pub big_free_share: u64,
    /// Memory that stays free for the guest's workload, whatever the agent holds.
    pub floor_bytes: u64,
    /// Blocks out of service at the same time.
    pub max_blocks: usize,
    /// Huge pages claimed at a time.
    pub claim_slice: u32,
    /// Claimed slices waiting for their answer.
    pub max_slices_in_flight: usize,
    /// Added to lease and grace before unanswered memory is taken back: one system call of the host that was running
    /// when its process was killed, and the drift between the clocks.
    pub margin: Duration,
    /// How long the first block stays offline to see whether somebody else brings it back.
    pub self_test: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            trigger_bytes: 32 << 20,
            min_reclaim_bytes: 8 << 20,
            min_block_bytes: 4 << 20,
            min_free_age: Duration::from_millis(100),
            max_free_age: Duration::from_secs(30),
            max_interval: Duration::from_secs(300),
            // The kernel has that much out within seconds of its first pass; above it offlining is an order quicker.
            big_free_share: 8,
            floor_bytes: 96 << 20,
            max_blocks: 3,
            claim_slice: 32,
            max_slices_in_flight: 3,
            margin: Duration::from_secs(5),
            self_test: Duration::from_millis(300),
        }
    }
}

/// How long memory must be free before it is worth dropping. What comes back soon costs the guest a fault, about
/// eighty times what the drop cost the host, so the age doubles when much comes back and halves when little does.
#[derive(Debug)]
pub struct FreeAge {
    age: Duration,
    min: Duration,
    max: Duration,
}

/// More than this share of the dropped bytes back within seconds: too eager.
const REFAULT_HIGH_PERCENT: u64 = 25;
/// Less than this share: could be quicker.
const REFAULT_LOW_PERCENT: u64 = 5;

impl FreeAge {
    /// Starts at the shortest age.
    #[must_use]
    pub fn new(min: Duration, max: Duration) -> Self {
        Self { age: min, min, max }
    }

    /// The age that counts now.
    #[must_use]
    pub fn current(&self) -> Duration {
        self.age
    }

    /// The host measured how much of what was dropped is backed again.
    pub fn refaults(&mut self, dropped_bytes: u64, returned_bytes: u64) {
        let returned = u128::from(returned_bytes) * 100;
        if returned > u128::from(dropped_bytes) * u128::from(REFAULT_HIGH_PERCENT) {
            // From a zero minimum doubling would stay at zero.
            self.age = (self.age * 2).clamp(Duration::from_millis(100).min(self.max), self.max);
        } else if returned < u128::from(dropped_bytes) * u128::from(REFAULT_LOW_PERCENT) {
            self.age = (self.age / 2).max(self.min);
        }
    }
}

/// Share of `trigger` by which free memory must have moved since the last pass to make another one worth while. A pass
/// looks at every huge page of the guest; where nothing moves there is nothing new to find.
const MOVED_SHARE: u64 = 4;

/// First pause after a pass that gave something back; more may have become free meanwhile.
const FOLLOW_UP: Duration = Duration::from_millis(500);
/// Shortest pause between passes that free memory triggers.
const MIN_GAP: Duration = Duration::from_millis(100);
/// Longest, when passes keep finding nothing although free memory keeps rising.
const MAX_GAP: Duration = Duration::from_secs(10);

/// Decides when the next pass starts.
#[derive(Debug)]
pub struct Pace {
    interval: Duration,
    max_interval: Duration,
    gap: Duration,
    ended: Option<Duration>,
    lowest_free: u64,
    trigger_bytes: u64,
    /// The guest's kernel does the rest: only a rise by this much starts a pass, and time alone starts none.
    big_free_bytes: Option<u64>,
    free: u64,
    asked: bool,
    /// What the pass held is on its way back, so that free memory rises by itself.
    returning: bool,
    /// Free memory after the last pass.
    baseline: u64,
    /// There may be something new to find.
    moved: bool,
}

impl Pace {
    /// The first pass may start at once.
    #[must_use]
    pub fn new(policy: &Policy) -> Self {
        Self {
            interval: FOLLOW_UP,
            max_interval: policy.max_interval,
            gap: MIN_GAP,
            ended: None,
            lowest_free: u64::MAX,
            trigger_bytes: policy.trigger_bytes,
            big_free_bytes: None,
            free: 0,
            asked: false,
            returning: false,
            baseline: 0,
            moved: false,
        }
    }

    /// The guest's kernel reports by itself, so that only a rise by this much matters; or it does not.
    pub fn big_free_only(&mut self, bytes: Option<u64>) {
        self.big_free_bytes = bytes;
    }

    fn trigger(&self) -> u64 {
        self.big_free_bytes.unwrap_or(self.trigger_bytes)
    }

    /// Free memory right now, while the agent holds some or none.
    pub fn free(&mut self, bytes: u64, holding: Holding) {
        self.free = bytes;
        match holding {
            // Less is free because of the agent, not of the workload.
            Holding::Some => {}
            Holding::None if self.returning => {
                self.returning = false;
                self.lowest_free = bytes;
                self.baseline = bytes;
            }
            Holding::None => {
                self.lowest_free = self.lowest_free.min(bytes);
                self.moved |= bytes.abs_diff(self.baseline) >= self.trigger() / MOVED_SHARE;
            }
        }
    }

    /// Whether free memory is below where it was, so that it can rise soon. Where it is not, looking at it now and then is
    /// enough.
    #[must_use]
    pub fn is_low(&self) -> bool {
        self.ended.is_none() || self.baseline.saturating_sub(self.free) >= self.trigger() / MOVED_SHARE
    }

    /// Somebody wants a pass now: the host, or a gate that opened.
    pub fn ask(&mut self) {
        self.asked = true;
        self.gap = MIN_GAP;
    }

    /// A pass ended.
    pub fn passed(&mut self, outcome: PassOutcome, now: Duration) {
        self.ended = Some(now);
        self.lowest_free = self.free;
        self.returning = true;
        self.moved = outcome != PassOutcome::FoundNothing;
        match outcome {
            PassOutcome::GaveBack => {
                self.interval = FOLLOW_UP;
                self.gap = MIN_GAP;
            }
            PassOutcome::FoundNothing | PassOutcome::Refused => {
                self.interval = (self.interval * 2).min(self.max_interval);
                self.gap = (self.gap * 2).min(MAX_GAP);
            }
            PassOutcome::Pressed => {
                self.interval = MAX_GAP.min(self.max_interval);
                self.gap = MAX_GAP;
            }
        }
        self.asked = false;
    }

    /// Whether a pass should start, and why.
    #[must_use]
    pub fn due(&self, now: Duration) -> Option<Occasion> {
        let Some(ended) = self.ended else { return Some(Occasion::Change) };
        let since = now.saturating_sub(ended);
        let rose = !self.returning && self.free.saturating_sub(self.lowest_free) >= self.trigger();
        if (rose || self.asked) && since >= self.gap {
            return Some(Occasion::Change);
        }
        (self.big_free_bytes.is_none() && since >= self.pause()).then_some(Occasion::Interval)
    }

    /// When the pause ends that holds even if free memory does not rise.
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        self.ended.filter(|_| self.big_free_bytes.is_none()).map(|ended| ended + self.pause())
    }

    fn pause(&self) -> Duration {
        if self.moved { self.interval } else { self.max_interval }
    }
}

/// Pause of offlining after the kernel refused a block, doubled up to the second value while refusals go on.
const REST: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// Keeps offlining off while the guest is too busy for it.
#[derive(Debug)]
pub struct Rest {
    until: Duration,
    next: Duration,
}

impl Default for Rest {
    fn default() -> Self {
        Self { until: Duration::ZERO, next: REST.0 }
    }
}

impl Rest {
    /// The kernel refused a block.
    pub fn begin(&mut self, now: Duration) {
        self.until = now + self.next;
        self.next = (self.next * 2).min(REST.1);
    }

    /// It took one.
    pub fn succeeded(&mut self) {
        self.next = REST.0;
    }

    /// Whether offlining may be tried.
    #[must_use]
    pub fn is_over(&self, now: Duration) -> bool {
        now >= self.until
    }
}

/// Whether the agent holds memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// It does.
    Some,
    /// It does not.
    None,
}

/// Why a pass starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// Free memory rose, or somebody asked.
    Change,
    /// It is time to look whether anything is left.
    Interval,
}

/// What a pass achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassOutcome {
    /// The host dropped something.
    GaveBack,
    /// Nothing free was backed, or nothing of it could be isolated.
    FoundNothing,
    /// The host refused what was reported; another time it may not.
    Refused,
    /// The workload needed the memory: the pass ended early.
    Pressed,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_age_follows_the_refaults_within_its_bounds() {
        let mut age = FreeAge::new(ms(100), ms(1000));
        for _ in 0..10 {
            age.refaults(100, 60);
        }
        assert_eq!(age.current(), ms(1000));
        age.refaults(100, 10);
        assert_eq!(age.current(), ms(1000), "in between nothing changes");
        for _ in 0..10 {
            age.refaults(100, 0);
        }
        assert_eq!(age.current(), ms(100));
    }

    #[test]
    fn a_rise_starts_a_pass_and_silence_stretches_the_pause() {
        let policy = Policy::default();
        let mut pace = Pace::new(&policy);
        pace.free(1 << 30, Holding::None);
        assert_eq!(pace.due(ms(0)), Some(Occasion::Change));
        pace.passed(PassOutcome::FoundNothing, ms(0));
        pace.free(1 << 30, Holding::None);
        assert_eq!(pace.due(ms(900)), None);
        pace.free((1 << 30) + policy.trigger_bytes, Holding::None);
        assert_eq!(pace.due(ms(900)), Some(Occasion::Change));
        let mut now = ms(1000);
        pace.passed(PassOutcome::FoundNothing, now);
        pace.free(1 << 30, Holding::None);
        assert_eq!(pace.next(), Some(now + policy.max_interval), "nothing moved");
        for _ in 0..20 {
            pace.free(900 << 20, Holding::None);
            now = pace.next().unwrap_or_default();
            pace.passed(PassOutcome::FoundNothing, now);
            pace.free(1 << 30, Holding::None);
        }
        assert_eq!(pace.next(), Some(now + policy.max_interval));
        pace.ask();
        assert_eq!(pace.due(now + ms(100)), Some(Occasion::Change));
    }

    #[test]
    fn memory_that_was_used_and_freed_again_counts_as_a_rise() {
        let mut pace = Pace::new(&Policy::default());
        pace.free(1 << 30, Holding::None);
        pace.free(500 << 20, Holding::Some);
        pace.passed(PassOutcome::GaveBack, ms(0));
        pace.free(700 << 20, Holding::Some);
        pace.free(1 << 30, Holding::None);
        assert_eq!(pace.due(ms(200)), None, "what the agent returns is no rise");
        pace.free(900 << 20, Holding::None);
        assert_eq!(pace.due(ms(200)), None);
        pace.free(1 << 30, Holding::None);
        assert_eq!(pace.due(ms(200)), Some(Occasion::Change));
    }
}
