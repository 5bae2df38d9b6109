//! Did dropping help? Measured on the ranges themselves, some time after each report was answered.
//!
//! Called by the session with what the backing says. Two verdicts close a gate:
//! * `ineffective`: right after a drop that succeeded, with the guest still locked out, the range is still backed;
//! * `write-on-free`: soon after the guest had the memory back, practically all of it is backed again and holds zeros,
//!   report after report. That is what `init_on_free` does; a workload that reuses memory leaves gaps or fills it.
//!
//! The third figure, the refault ratio, goes to the guest: how much came back within [`REFAULT_AFTER`].

use std::collections::VecDeque;
use std::time::Duration;

/// When dropped ranges are first looked at for `write-on-free`. Onlining a 128 MiB block with `init_on_free` takes about
/// 0.2 s in an emulated guest.
pub const RETURN_AFTER: Duration = Duration::from_millis(400);

/// When they are looked at for the last time, if the first look found gaps: a busy guest takes longer to zero a block.
pub const RETURN_AT_LAST: Duration = Duration::from_secs(3);

/// When they are looked at for the refault ratio.
pub const REFAULT_AFTER: Duration = Duration::from_secs(10);

/// Share of a report, in percent, that must be back to count against the guest.
const RETURNED_PERCENT: u64 = 90;

/// Share of a report, in percent, that must still be backed right after its drop to count against the host.
const STILL_BACKED_PERCENT: u64 = 50;

/// Reports in a row that must say the same before a gate closes. One could be chance.
const STRIKES: u32 = 3;

/// Reports waiting for a look, at most; beyond that some are not looked at.
const MAX_WATCHED: usize = 256;

/// How long a gate closed by measurement stays closed before the next attempt.
pub const RETRY_AFTER: Duration = Duration::from_secs(600);

/// What to look at, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched<R> {
    /// The ranges that were dropped.
    pub ranges: R,
    /// Bytes dropped there.
    pub dropped_bytes: u64,
    /// Which question the look answers.
    pub question: Question,
}

/// Which question a look answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Did the guest's kernel write to it when it took it back? Gaps may still be filled.
    WriteOnFree,
    /// The same, and gaps are gaps.
    WriteOnFreeAtLast,
    /// Did a workload need it soon?
    Refault,
}

/// Keeps the strikes and the ranges to look at.
#[derive(Debug)]
pub struct Effect<R> {
    watched: VecDeque<(Duration, Watched<R>)>,
    returned_strikes: u32,
    backed_strikes: u32,
}

impl<R> Default for Effect<R> {
    fn default() -> Self {
        Self { watched: VecDeque::new(), returned_strikes: 0, backed_strikes: 0 }
    }
}

impl<R: Clone> Effect<R> {
    /// A drop ended; the guest is about to have the memory back.
    pub fn dropped(&mut self, ranges: &R, dropped_bytes: u64, kernel_returned: KernelReturned, now: Duration) {
        let mut watch = |after, question| {
            if self.watched.len() < MAX_WATCHED {
                self.watched.push_back((now + after, Watched { ranges: ranges.clone(), dropped_bytes, question }));
            }
        };
        if kernel_returned == KernelReturned::ToTail {
            watch(RETURN_AFTER, Question::WriteOnFree);
            watch(REFAULT_AFTER, Question::Refault);
        }
    }

    /// Takes out what is due.
    pub fn due(&mut self, now: Duration) -> Vec<Watched<R>> {
        let mut due = Vec::new();
        self.watched.retain(|(at, watched)| {
            let wait = *at > now;
            if !wait {
                due.push(watched.clone());
            }
            wait
        });
        due
    }

    /// When the next look is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Duration> {
        self.watched.iter().map(|(at, _)| *at).min()
    }

    /// Bytes still backed right after a successful drop. True when the gate `ineffective` should close.
    pub fn still_backed(&mut self, dropped_bytes: u64, backed_bytes: u64) -> bool {
        dropped_bytes > 0
            && strike(&mut self.backed_strikes, is_share(dropped_bytes, backed_bytes, STILL_BACKED_PERCENT))
    }

    /// So much of what was watched is backed again, with this content. True when the gate `write-on-free` should close.
    pub fn returned(&mut self, watched: Watched<R>, backed_bytes: u64, content: Content, now: Duration) -> bool {
        let all = is_share(watched.dropped_bytes, backed_bytes, RETURNED_PERCENT);
        if content == Content::Used {
            // A workload was quick to reuse it; a kernel that zeroes what it frees leaves zeros.
            return strike(&mut self.returned_strikes, false);
        }
        if watched.question == Question::WriteOnFree && !all {
            if self.watched.len() < MAX_WATCHED {
                let last = Watched { question: Question::WriteOnFreeAtLast, ..watched };
                self.watched.push_back((now + (RETURN_AT_LAST - RETURN_AFTER), last));
            }
            return false;
        }
        strike(&mut self.returned_strikes, all)
    }

    /// A new session, or a new attempt: what was to be looked at is no longer what it was.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

/// What samples of the ranges hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros, or nothing.
    Zeros,
    /// Something else.
    Used,
}

/// How the guest's kernel takes isolated memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelReturned {
    /// Onlined blocks go to the tail of the free lists: nobody needs them soon.
    ToTail,
    /// Freed pages go to the head: the next allocation takes them, be it the agent's own next claim. That proves nothing.
    ToHead,
}

fn is_share(of_bytes: u64, bytes: u64, percent: u64) -> bool {
    u128::from(bytes) * 100 >= u128::from(of_bytes) * u128::from(percent)
}

/// Counts `struck` in a row; true when it is the last one needed.
fn strike(strikes: &mut u32, struck: bool) -> bool {
    *strikes = if struck { *strikes + 1 } else { 0 };
    let out = *strikes >= STRIKES;
    if out {
        *strikes = 0;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn returned(effect: &mut Effect<()>, question: Question, backed_bytes: u64) -> bool {
        let watched = Watched { ranges: (), dropped_bytes: 100, question };
        effect.returned(watched, backed_bytes, Content::Zeros, Duration::ZERO)
    }

    #[test]
    fn a_workload_that_fills_the_memory_again_is_no_write_on_free() {
        let mut effect: Effect<()> = Effect::default();
        for question in [Question::WriteOnFree, Question::WriteOnFreeAtLast] {
            for _ in 0..10 {
                let watched = Watched { ranges: (), dropped_bytes: 100, question };
                assert!(!effect.returned(watched, 100, Content::Used, Duration::ZERO));
            }
        }
        assert_eq!(effect.next_due(), None);
    }

    #[test]
    fn three_full_returns_in_a_row_close_the_gate() {
        let mut effect: Effect<()> = Effect::default();
        assert!(!returned(&mut effect, Question::WriteOnFree, 95));
        assert!(!returned(&mut effect, Question::WriteOnFree, 95));
        assert!(!returned(&mut effect, Question::WriteOnFreeAtLast, 50), "a gap clears the strikes");
        assert!(!returned(&mut effect, Question::WriteOnFree, 100));
        assert!(!returned(&mut effect, Question::WriteOnFreeAtLast, 100));
        assert!(returned(&mut effect, Question::WriteOnFree, 100));
    }

    #[test]
    fn gaps_at_the_first_look_are_looked_at_again() {
        let mut effect: Effect<()> = Effect::default();
        assert!(!returned(&mut effect, Question::WriteOnFree, 95));
        assert!(!returned(&mut effect, Question::WriteOnFree, 10));
        assert!(!returned(&mut effect, Question::WriteOnFree, 95));
        let due = effect.due(RETURN_AT_LAST);
        assert!(matches!(due[..], [Watched { question: Question::WriteOnFreeAtLast, .. }]), "{due:?}");
        assert!(returned(&mut effect, Question::WriteOnFreeAtLast, 95), "it was no gap, only slow");
    }

    #[test]
    fn claims_are_not_judged() {
        let mut effect = Effect::default();
        effect.dropped(&1, 10, KernelReturned::ToHead, Duration::ZERO);
        effect.dropped(&2, 10, KernelReturned::ToTail, Duration::ZERO);
        assert_eq!(effect.next_due(), Some(RETURN_AFTER));
        let due = effect.due(RETURN_AFTER);
        assert_eq!(due, [Watched { ranges: 2, dropped_bytes: 10, question: Question::WriteOnFree }]);
        assert_eq!(effect.due(REFAULT_AFTER).len(), 1);
        assert_eq!(effect.next_due(), None);
    }

    #[test]
    fn a_guest_cannot_make_the_watch_list_grow() {
        let mut effect = Effect::default();
        for i in 0..100_000 {
            effect.dropped(&i, 1, KernelReturned::ToTail, Duration::ZERO);
        }
        assert!(effect.due(REFAULT_AFTER).len() <= MAX_WATCHED);
    }
}
