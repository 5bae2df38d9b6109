//! From ranges to system calls: merging, rounding, bounded calls and the accounting per range.
//!
//! One algorithm for every backing, called by [`super::GuestBacking::drop_spans`]. Trusts its caller that nobody
//! uses the bytes; trusts the backing only for what a call returns.

use super::Backing;
use nix::errno::Errno;
use std::ops::{ControlFlow, Range};

/// Most bytes in one system call, unless one page of the backing is larger.
///
/// `keep_going` is asked between calls, so a call bounds how late a deadline or a cancellation is seen. Punching 2 MiB
/// of 4 KiB pages takes 160 to 300 µs: about 1 ms per call.
pub const MAX_CALL_BYTES: u64 = 8 << 20;

/// What became of one range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropOutcome {
    /// Every page of the backing that lies wholly inside the range is dropped. A page that was a hole before counts.
    Dropped {
        /// Bytes of those pages: the length of the range, unless it is not aligned to the backing's pages.
        bytes: u64,
    },
    /// `keep_going` said no before the range was finished.
    Stopped {
        /// Bytes dropped until then.
        bytes: u64,
    },
    /// A system call failed.
    Failed {
        /// Bytes dropped by the calls that did not fail.
        bytes: u64,
        /// Why the last failed one did.
        errno: Errno,
    },
}

/// How far one range has come.
#[derive(Clone, Copy, Default)]
struct Progress {
    bytes: u64,
    errno: Option<Errno>,
    finished: bool,
}

impl Progress {
    fn outcome(self) -> DropOutcome {
        let Self { bytes, errno, finished } = self;
        match errno {
            Some(errno) => DropOutcome::Failed { bytes, errno },
            None if finished => DropOutcome::Dropped { bytes },
            None => DropOutcome::Stopped { bytes },
        }
    }
}

/// Drops disjoint extents of one file. Adjacent ones are merged before they are rounded inward to the backing's pages,
/// so that a page two of them share is dropped too. `keep_going` is asked before every system call.
pub(crate) fn drop_extents(
    backing: &dyn Backing,
    extents: &[Range<u64>],
    keep_going: &mut dyn FnMut() -> ControlFlow<()>,
) -> Vec<DropOutcome> {
    let mut progress = vec![Progress::default(); extents.len()];
    let page = backing.page_bytes();
    // Both are powers of two, so calls that start aligned stay aligned.
    let step = MAX_CALL_BYTES.max(page);
    'runs: for run in merge(extents) {
        let whole = round_inward(&run.extent, page);
        let mut at = whole.start;
        loop {
            let call = at..at.saturating_add(step).min(whole.end);
            let mut result = Ok(());
            if !call.is_empty() {
                if keep_going().is_break() {
                    break 'runs;
                }
                result = backing.punch(call.clone());
            }
            for &index in &run.members {
                let (Some(extent), Some(progress)) = (extents.get(index), progress.get_mut(index)) else { continue };
                let bytes = extent.end.min(call.end).saturating_sub(extent.start.max(call.start));
                match result {
                    Ok(()) => progress.bytes += bytes,
                    Err(errno) if bytes > 0 => progress.errno = Some(errno),
                    Err(_) => {}
                }
                progress.finished |= call.end >= extent.end.min(whole.end);
            }
            at = call.end;
            if at >= whole.end {
                break;
            }
        }
    }
    progress.into_iter().map(Progress::outcome).collect()
}

/// Adjacent extents as one.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    extent: Range<u64>,
    /// Indices of the extents it is made of.
    members: Vec<usize>,
}

fn merge(extents: &[Range<u64>]) -> Vec<Run> {
    let mut sorted: Vec<(usize, &Range<u64>)> = extents.iter().enumerate().collect();
    sorted.sort_by_key(|(_, extent)| extent.start);
    let mut runs: Vec<Run> = Vec::new();
    for (index, extent) in sorted {
        match runs.last_mut() {
            Some(run) if extent.start <= run.extent.end => {
                run.extent.end = run.extent.end.max(extent.end);
                run.members.push(index);
            }
            _ => runs.push(Run { extent: extent.clone(), members: vec![index] }),
        }
    }
    runs
}

/// The whole pages inside `extent`; empty when there is none. A page that is dropped in part would be zeroed in part
/// and stay allocated.
pub(crate) fn round_inward(extent: &Range<u64>, page: u64) -> Range<u64> {
    let start = extent.start.checked_next_multiple_of(page).unwrap_or(u64::MAX);
    let end = extent.end - extent.end % page;
    start..end.max(start)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]
    use super::*;
    use proptest::prelude::*;
    use std::io;
    use std::sync::Mutex;

    const PAGE: u64 = 4096;

    /// Notes the calls; fails those that begin at or above `broken_from`.
    struct Recorder {
        page: u64,
        broken_from: u64,
        calls: Mutex<Vec<Range<u64>>>,
    }

    impl Recorder {
        fn new(page: u64) -> Self {
            Self { page, broken_from: u64::MAX, calls: Mutex::default() }
        }

        fn calls(&self) -> Vec<Range<u64>> {
            self.calls.lock().unwrap().clone()
        }
    }

    impl Backing for Recorder {
        fn page_bytes(&self) -> u64 {
            self.page
        }

        fn punch(&self, extent: Range<u64>) -> Result<(), Errno> {
            let broken = extent.start >= self.broken_from;
            self.calls.lock().unwrap().push(extent);
            if broken { Err(Errno::EPERM) } else { Ok(()) }
        }

        fn backed_bytes(&self, _: Range<u64>) -> io::Result<u64> {
            unreachable!()
        }

        fn sees_holes(&self) -> bool {
            false
        }

        fn allocated_bytes(&self) -> io::Result<u64> {
            unreachable!()
        }

        fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            unreachable!()
        }
    }

    fn always() -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    #[test]
    fn merges_adjacent_ranges_and_bounds_each_call() {
        let backing = Recorder::new(PAGE);
        let mib = 1 << 20;
        let outcomes = drop_extents(&backing, &[8 * mib..12 * mib, 40 * mib..42 * mib, 0..8 * mib], &mut always);
        assert_eq!(backing.calls(), [0..8 * mib, 8 * mib..12 * mib, 40 * mib..42 * mib]);
        let bytes = [4 * mib, 2 * mib, 8 * mib];
        assert_eq!(outcomes, bytes.map(|bytes| DropOutcome::Dropped { bytes }));
    }

    #[test]
    fn a_page_larger_than_the_bound_is_one_call() {
        let backing = Recorder::new(1 << 30);
        drop_extents(&backing, &[0..2 << 30, 2 << 30..(3 << 30) - 1], &mut always);
        assert_eq!(backing.calls(), [0..1 << 30, 1 << 30..2 << 30]);
    }

    #[test]
    fn rounds_inward_after_merging() {
        let backing = Recorder::new(PAGE);
        let outcomes = drop_extents(&backing, &[1000..6000, 6000..9000, 20000..20001], &mut always);
        assert_eq!(backing.calls(), vec![4096..8192]);
        let dropped = |bytes| DropOutcome::Dropped { bytes };
        assert_eq!(outcomes, [dropped(6000 - 4096), dropped(8192 - 6000), dropped(0)]);
    }

    #[test]
    fn stops_between_calls_and_says_what_was_finished() {
        let backing = Recorder::new(PAGE);
        let mut left = 2;
        let mut twice = || {
            left -= 1;
            if left < 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let mib = 1 << 20;
        let outcomes = drop_extents(&backing, &[0..10 * mib, 10 * mib..16 * mib, 16 * mib..20 * mib], &mut twice);
        assert_eq!(backing.calls().len(), 2);
        let dropped = |bytes| DropOutcome::Dropped { bytes };
        assert_eq!(outcomes, [dropped(10 * mib), dropped(6 * mib), DropOutcome::Stopped { bytes: 0 }]);
    }

    #[test]
    fn a_failed_call_is_told_to_its_ranges_only() {
        let backing = Recorder { broken_from: 8 << 20, ..Recorder::new(PAGE) };
        let mib = 1 << 20;
        let outcomes = drop_extents(&backing, &[0..2 * mib, 2 * mib..12 * mib, 1 << 30..(1 << 30) + PAGE], &mut always);
        let failed = |bytes| DropOutcome::Failed { bytes, errno: Errno::EPERM };
        assert_eq!(outcomes, [DropOutcome::Dropped { bytes: 2 * mib }, failed(6 * mib), failed(0)]);
    }

    proptest! {
        #[test]
        fn drops_exactly_the_pages_of_which_every_byte_is_named(
            pieces in prop::collection::vec((0u64..6000, 1u64..30_000), 0..20),
            page_shift in 10u32..14,
        ) {
            let page = 1u64 << page_shift;
            let mut at = 0;
            let mut extents = Vec::new();
            for (gap, bytes) in pieces {
                // Half of them adjacent.
                at += if gap < 3000 { 0 } else { gap };
                extents.push(at..at + bytes);
                at += bytes;
            }
            let mut named = vec![false; usize::try_from(at.next_multiple_of(page)).unwrap()];
            for extent in &extents {
                named[extent.start as usize..extent.end as usize].fill(true);
            }
            extents.reverse();
            let backing = Recorder::new(page);
            let outcomes = drop_extents(&backing, &extents, &mut always);
            let mut dropped = vec![false; named.len()];
            for call in backing.calls() {
                dropped[call.start as usize..call.end as usize].fill(true);
            }
            for (page_named, page_dropped) in named.chunks(page as usize).zip(dropped.chunks(page as usize)) {
                prop_assert_eq!(page_named.iter().all(|b| *b), page_dropped.iter().all(|b| *b));
                prop_assert_eq!(page_dropped.iter().all(|b| *b), page_dropped.iter().any(|b| *b));
            }
            for (outcome, extent) in outcomes.iter().zip(&extents) {
                let bytes = dropped[extent.start as usize..extent.end as usize].iter().filter(|b| **b).count() as u64;
                prop_assert_eq!(*outcome, DropOutcome::Dropped { bytes });
            }
        }
    }
}
