//! Runs of huge pages, the unit of every hint.

use crate::reason::Refusal;
use crate::units::{GuestAddress, HugePageSize};
use bincode::{Decode, Encode};

/// Whole huge pages, run-length coded. What a peer sent may be anything: see [`HugePageRange::check`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct HugePageRange {
    /// Guest-physical address of the first huge page.
    pub start: GuestAddress,
    /// Number of huge pages.
    pub count: u32,
}

/// Why a range is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// Not aligned to the huge page size.
    #[error("start {start} is not aligned to {huge_page_bytes:#x} bytes")]
    Unaligned {
        /// Where it starts.
        start: GuestAddress,
        /// What it should be aligned to.
        huge_page_bytes: u64,
    },
    /// No huge pages in it.
    #[error("range at {start} holds no huge page")]
    Empty {
        /// Where it starts.
        start: GuestAddress,
    },
    /// It runs past the end of the address space.
    #[error("{count} huge pages from {start} run past the end of the address space")]
    Overflow {
        /// Where it starts.
        start: GuestAddress,
        /// Its huge pages.
        count: u32,
    },
}

impl From<RangeError> for Refusal {
    fn from(error: RangeError) -> Self {
        match error {
            RangeError::Unaligned { .. } => Self::Unaligned,
            RangeError::Empty { .. } => Self::Empty,
            RangeError::Overflow { .. } => Self::Overflow,
        }
    }
}

impl HugePageRange {
    /// The range as bytes `[start, end)`, if it is one.
    pub fn check(self, size: HugePageSize) -> Result<std::ops::Range<u64>, RangeError> {
        let Self { start, count } = self;
        if count == 0 {
            return Err(RangeError::Empty { start });
        }
        if start.0 % size.bytes() != 0 {
            return Err(RangeError::Unaligned { start, huge_page_bytes: size.bytes() });
        }
        let end = u64::from(count)
            .checked_mul(size.bytes())
            .and_then(|bytes| start.0.checked_add(bytes))
            .ok_or(RangeError::Overflow { start, count })?;
        Ok(start.0..end)
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(self, size: HugePageSize) -> u64 {
        u64::from(self.count).saturating_mul(size.bytes())
    }
}

/// How the guest keeps everybody else off a reported range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Isolation {
    /// It lies in memory blocks that are offline. Nobody can write there, so there is no cookie.
    Offlined,
    /// The agent owns the pages; each starts with its [`crate::Cookie`].
    Claimed,
}

/// One range of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ReportedRange {
    /// Which huge pages.
    pub range: HugePageRange,
    /// How they are kept.
    pub isolation: Isolation,
}

/// What the host still backs of a surveyed range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct BackedRange {
    /// Huge pages of which at least one base page is backed.
    pub range: HugePageRange,
    /// Bytes of backing in them.
    pub backed_bytes: u64,
}

/// Run-length codes huge pages given in ascending order of address.
#[must_use]
pub fn runs(pages: impl IntoIterator<Item = GuestAddress>, size: HugePageSize) -> Vec<HugePageRange> {
    let mut runs: Vec<HugePageRange> = Vec::new();
    for page in pages {
        if let Some(last) = runs.last_mut()
            && last.count < u32::MAX
            && last.start.0.checked_add(last.bytes(size)) == Some(page.0)
        {
            last.count += 1;
            continue;
        }
        runs.push(HugePageRange { start: page, count: 1 });
    }
    runs
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used)]
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn size() -> HugePageSize {
        HugePageSize::new(4096, 9).unwrap()
    }

    #[test]
    fn what_is_no_range() {
        let check =
            |start, count| HugePageRange { start: GuestAddress(start), count }.check(size()).map_err(Refusal::from);
        assert_eq!(check(0, 0), Err(Refusal::Empty));
        assert_eq!(check(4096, 1), Err(Refusal::Unaligned));
        assert_eq!(check(u64::MAX - (2 << 20) + 1, 1), Err(Refusal::Overflow));
        assert_eq!(check(u64::MAX - (2 << 20) + 1, u32::MAX), Err(Refusal::Overflow));
        assert_eq!(check(2 << 20, 3), Ok(2 << 20..8 << 20));
    }

    proptest! {
        #[test]
        fn runs_name_every_page_once(numbers in proptest::collection::btree_set(0u64..2000, 0..200)) {
            let bytes = size().bytes();
            let runs = runs(numbers.iter().map(|n| GuestAddress(n * bytes)), size());
            let mut named = BTreeSet::new();
            for run in &runs {
                for i in 0..u64::from(run.count) {
                    prop_assert!(named.insert(run.start.0 / bytes + i));
                }
            }
            prop_assert_eq!(named, numbers);
            for pair in runs.windows(2) {
                prop_assert!(pair[0].start.0 + pair[0].bytes(size()) < pair[1].start.0);
            }
        }
    }
}
