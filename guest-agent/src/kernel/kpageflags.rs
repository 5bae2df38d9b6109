//! `/proc/kpageflags`: which huge pages are free (`fs/proc/page.c`, 8 bytes per page frame, host byte order).
//!
//! The survey of the agent. The file is read without the zone lock, so a free page may be in use a moment later: this
//! says what is worth isolating, and never that a page may be dropped. The caller passes the ranges of online memory
//! blocks, or the spans of the zones where there are no blocks; frames without a page count as not free.
//!
//! Costs on x86-64, natively: 0.3 to 0.7 µs for one entry alone, 30 to 40 µs for all 512 of a huge page, however they are
//! cut into reads: the kernel's work per entry is what costs, so the art is to read few. In a guest under TCG about ten
//! times that: 0.4 to 0.9 s for a full survey of 1.9 GiB of free memory, 0.07 s for a probed one. See [`Depth`].

use super::{Pfn, PfnRange, ReadError, Roots};
use fpr_protocol::{GuestAddress, HugePageSize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Bytes per page frame.
const ENTRY_BYTES: usize = 8;

/// Most entries in one read: few, so that a huge page in use is left soon; larger reads are no faster.
const CHUNK: usize = 128;

/// Places in a huge page that a probed survey looks at, the first page among them.
const PROBES: u64 = 4;

// include/uapi/linux/kernel-page-flags.h
const KPF_BUDDY: u64 = 1 << 10;
const KPF_HWPOISON: u64 = 1 << 19;
const KPF_NOPAGE: u64 = 1 << 20;
const KPF_OFFLINE: u64 = 1 << 23;

/// Whether the page lies in a free block of the buddy allocator. The kernel sets `KPF_BUDDY` on each page of a block.
fn is_free(flags: u64) -> bool {
    flags & (KPF_BUDDY | KPF_HWPOISON | KPF_NOPAGE | KPF_OFFLINE) == KPF_BUDDY
}

/// How well a survey looks at a huge page whose first page is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// At 4 pages spread evenly over it: about 2 µs. A single page in use goes unnoticed, so this never finds too few. If
    /// it finds just as many as `/proc/buddyinfo` counts ([`super::buddyinfo::BuddyInfoReader::free_huge_pages`]), all of
    /// them are right; otherwise ask [`PageFlags::wholly_free`] before a memory block goes offline.
    Probed,
    /// At all its pages.
    Full,
}

/// What reading has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanCost {
    /// System calls.
    pub reads: u64,
    /// Entries read.
    pub entries: u64,
}

/// The open file.
#[derive(Debug)]
pub struct PageFlags {
    path: PathBuf,
    file: File,
    size: HugePageSize,
    buffer: [u8; CHUNK * ENTRY_BYTES],
    cost: ScanCost,
}

impl PageFlags {
    /// Opens the file, to look for huge pages of `size`. Needs root.
    pub fn open(roots: &Roots, size: HugePageSize) -> Result<Self, ReadError> {
        let path = roots.proc.join("kpageflags");
        match File::open(&path) {
            Ok(file) => {
                let buffer = [0; CHUNK * ENTRY_BYTES];
                Ok(Self { path, file, size, buffer, cost: ScanCost::default() })
            }
            Err(source) => Err(ReadError::io(&path, source)),
        }
    }

    /// What reading has cost since the file was opened.
    #[must_use]
    pub fn cost(&self) -> ScanCost {
        self.cost
    }

    /// Looks for free huge pages in `ranges` (ascending) and puts them into `survey`, whose memory is used again.
    /// A huge page that a range holds only in part is left out.
    pub fn survey(
        &mut self,
        ranges: impl IntoIterator<Item = PfnRange>,
        depth: Depth,
        survey: &mut Survey,
    ) -> Result<(), ReadError> {
        survey.clear();
        for range in ranges {
            let (first, huge_pages) = whole_huge_pages(&range, self.size);
            survey.begin_range(first, huge_pages);
            for number in 0..huge_pages {
                if self.is_huge_page_free(first.0 + number * self.size.pages(), depth)? {
                    survey.set(number);
                }
            }
        }
        Ok(())
    }

    /// Whether every page of `range` is free: a memory block that can go offline without a page being moved.
    /// The first page of each huge page is looked at before all others, so a block in use costs little.
    pub fn wholly_free(&mut self, range: &PfnRange) -> Result<bool, ReadError> {
        let step = usize::try_from(self.size.pages()).unwrap_or(usize::MAX);
        for pfn in (range.start.0..range.end.0).step_by(step) {
            if !self.are_free(pfn, 1)? {
                return Ok(false);
            }
        }
        self.are_free(range.start.0, range.end.0.saturating_sub(range.start.0))
    }

    fn is_huge_page_free(&mut self, first: u64, depth: Depth) -> Result<bool, ReadError> {
        let pages = self.size.pages();
        match depth {
            Depth::Probed => {
                let step = (pages / PROBES).max(1);
                for offset in (0..pages).step_by(usize::try_from(step).unwrap_or(1)) {
                    if !self.are_free(first + offset, 1)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Depth::Full => Ok(self.are_free(first, 1)? && self.are_free(first + 1, pages - 1)?),
        }
    }

    /// Whether `count` pages from `pfn` are free; stops at the first chunk that has one in use.
    fn are_free(&mut self, mut pfn: u64, mut count: u64) -> Result<bool, ReadError> {
        while count > 0 {
            let chunk = count.min(CHUNK as u64);
            let Some(entries) = self.read(pfn, chunk)? else { return Ok(false) };
            if !entries
                .chunks_exact(ENTRY_BYTES)
                .all(|entry| entry.try_into().is_ok_and(|e| is_free(u64::from_ne_bytes(e))))
            {
                return Ok(false);
            }
            pfn += chunk;
            count -= chunk;
        }
        Ok(true)
    }

    /// `None` if the file ends before the last of `count` entries: there are no such pages.
    fn read(&mut self, pfn: u64, count: u64) -> Result<Option<&[u8]>, ReadError> {
        let length = usize::try_from(count).unwrap_or(usize::MAX).saturating_mul(ENTRY_BYTES);
        let Some(offset) = pfn.checked_mul(ENTRY_BYTES as u64) else { return Ok(None) };
        let buffer = self.buffer.get_mut(..length).unwrap_or_default();
        self.cost.reads += 1;
        self.cost.entries += count;
        match self.file.read_exact_at(buffer, offset) {
            Ok(()) => Ok(Some(buffer)),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(source) => Err(ReadError::io(&self.path, source)),
        }
    }
}

/// First frame and number of the huge pages that lie in `range` as a whole.
fn whole_huge_pages(range: &PfnRange, size: HugePageSize) -> (Pfn, u64) {
    let pages = size.pages();
    let first = range.start.0.div_ceil(pages);
    let end = range.end.0 / pages;
    (Pfn(first.saturating_mul(pages)), end.saturating_sub(first))
}

/// Free huge pages as a bitmap per range, in the order in which the ranges were given.
#[derive(Clone, Debug)]
pub struct Survey {
    size: HugePageSize,
    ranges: Vec<Bits>,
    words: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Bits {
    first: Pfn,
    huge_pages: u64,
    first_word: usize,
}

impl Survey {
    /// A survey without ranges.
    #[must_use]
    pub fn new(size: HugePageSize) -> Self {
        Self { size, ranges: Vec::new(), words: Vec::new() }
    }

    /// The ranges, as they were passed to [`PageFlags::survey`].
    pub fn ranges(&self) -> impl Iterator<Item = SurveyedRange<'_>> {
        self.ranges.iter().map(|bits| self.view(*bits))
    }

    /// Free huge pages, ascending if the ranges were.
    pub fn free(&self) -> impl Iterator<Item = GuestAddress> + '_ {
        self.ranges().flat_map(SurveyedRange::free)
    }

    /// Number of free huge pages.
    #[must_use]
    pub fn free_count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Keeps only what was free in `earlier` too: memory that is free for a while. Ranges that `earlier` does not have
    /// count as in use.
    pub fn retain_free_in(&mut self, earlier: &Self) {
        let mut candidates = earlier.ranges.iter();
        for bits in &self.ranges {
            // Both lists usually are the same; a range that is not at hand is looked for.
            let same = |other: &&Bits| other.first == bits.first && other.huge_pages == bits.huge_pages;
            let old = candidates.next().filter(same).or_else(|| earlier.ranges.iter().find(same));
            let old = old.map(|old| earlier.view(*old).words).unwrap_or_default();
            let new = self.words.get_mut(bits.first_word..bits.first_word + word_count(bits.huge_pages));
            for (index, word) in new.unwrap_or_default().iter_mut().enumerate() {
                *word &= old.get(index).copied().unwrap_or(0);
            }
        }
    }

    fn view(&self, bits: Bits) -> SurveyedRange<'_> {
        let words = self.words.get(bits.first_word..bits.first_word + word_count(bits.huge_pages));
        SurveyedRange {
            size: self.size,
            first: bits.first,
            huge_pages: bits.huge_pages,
            words: words.unwrap_or_default(),
        }
    }

    fn clear(&mut self) {
        self.ranges.clear();
        self.words.clear();
    }

    fn begin_range(&mut self, first: Pfn, huge_pages: u64) {
        let first_word = self.words.len();
        self.ranges.push(Bits { first, huge_pages, first_word });
        self.words.resize(first_word + word_count(huge_pages), 0);
    }

    /// Marks huge page `number` of the last range.
    fn set(&mut self, number: u64) {
        if let Some(last) = self.ranges.last()
            && let Some(word) = usize::try_from(number / 64).ok().and_then(|n| self.words.get_mut(last.first_word + n))
        {
            *word |= 1 << (number % 64);
        }
    }
}

fn word_count(huge_pages: u64) -> usize {
    usize::try_from(huge_pages.div_ceil(64)).unwrap_or(usize::MAX)
}

/// What a survey found in one range.
#[derive(Clone, Copy, Debug)]
pub struct SurveyedRange<'a> {
    size: HugePageSize,
    first: Pfn,
    huge_pages: u64,
    words: &'a [u64],
}

impl<'a> SurveyedRange<'a> {
    /// First frame of the first whole huge page.
    #[must_use]
    pub fn first(self) -> Pfn {
        self.first
    }

    /// Number of whole huge pages, free or not.
    #[must_use]
    pub fn huge_pages(self) -> u64 {
        self.huge_pages
    }

    /// Number of free ones.
    #[must_use]
    pub fn free_count(self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether all are free. Before a memory block goes offline, ask [`PageFlags::wholly_free`] again.
    #[must_use]
    pub fn all_free(self) -> bool {
        self.huge_pages > 0 && self.free_count() == self.huge_pages
    }

    /// Whether huge page `number`, counted from 0, is free.
    #[must_use]
    pub fn is_free(self, number: u64) -> bool {
        let word = usize::try_from(number / 64).ok().and_then(|index| self.words.get(index));
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// Addresses of the free ones, ascending.
    pub fn free(self) -> impl Iterator<Item = GuestAddress> + 'a {
        let page_bytes = self.size.page_bytes();
        (0..self.huge_pages)
            .filter(move |number| self.is_free(*number))
            .map(move |number| Pfn(self.first.0 + number * self.size.pages()).address(page_bytes))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::fake::Tree;
    use proptest::prelude::*;

    /// Huge pages of 16 base pages keep the generated files small.
    fn small() -> HugePageSize {
        HugePageSize::new(4096, 4).unwrap()
    }

    fn flags(tree: &Tree, flags: &[u64]) -> PageFlags {
        let bytes: Vec<u8> = flags.iter().flat_map(|entry| entry.to_ne_bytes()).collect();
        tree.write("proc/kpageflags", &bytes);
        PageFlags::open(&tree.roots(), small()).unwrap()
    }

    fn survey(file: &mut PageFlags, ranges: &[PfnRange], depth: Depth) -> Survey {
        let mut survey = Survey::new(small());
        file.survey(ranges.iter().cloned(), depth, &mut survey).unwrap();
        survey
    }

    #[test]
    fn special_pages_are_not_free() {
        for bit in [KPF_HWPOISON, KPF_NOPAGE, KPF_OFFLINE] {
            assert!(!is_free(KPF_BUDDY | bit));
        }
        assert!(is_free(KPF_BUDDY));
        assert!(!is_free(0));
    }

    #[test]
    fn huge_pages_in_use_cost_one_entry() {
        let tree = Tree::new(&[]);
        let mut entries = vec![0; 16];
        entries.extend([KPF_BUDDY; 16]);
        let mut file = flags(&tree, &entries);
        let all = Pfn(0)..Pfn(32);
        assert_eq!(survey(&mut file, &[all], Depth::Full).free().collect::<Vec<_>>(), [GuestAddress(16 * 4096)]);
        assert_eq!(file.cost(), ScanCost { reads: 3, entries: 1 + 1 + 15 });
    }

    #[test]
    fn memory_past_the_end_of_the_file_is_not_there() {
        let tree = Tree::new(&[]);
        let mut file = flags(&tree, &[KPF_BUDDY; 24]);
        let range = Pfn(0)..Pfn(64);
        assert_eq!(survey(&mut file, std::slice::from_ref(&range), Depth::Full).free_count(), 1);
        assert!(!file.wholly_free(&range).unwrap());
        assert!(!file.wholly_free(&(Pfn(u64::MAX - 1)..Pfn(u64::MAX))).unwrap());
    }

    #[test]
    fn a_block_in_use_is_given_up_at_its_first_used_head() {
        let tree = Tree::new(&[]);
        let mut entries = vec![KPF_BUDDY; 64];
        entries[48] = 0;
        let mut file = flags(&tree, &entries);
        assert!(!file.wholly_free(&(Pfn(0)..Pfn(64))).unwrap());
        assert_eq!(file.cost(), ScanCost { reads: 4, entries: 4 });
        assert!(file.wholly_free(&(Pfn(0)..Pfn(48))).unwrap());
    }

    #[test]
    fn age_keeps_what_was_free_before() {
        let tree = Tree::new(&[]);
        let mut entries = vec![KPF_BUDDY; 64];
        entries[20] = 0;
        let (low, high) = (Pfn(0)..Pfn(32), Pfn(32)..Pfn(64));
        let earlier = survey(&mut flags(&tree, &entries), &[low.clone(), high.clone()], Depth::Full);
        let mut file = flags(&tree, &[KPF_BUDDY; 96]);
        let mut now = survey(&mut file, &[low, high.clone(), Pfn(64)..Pfn(96)], Depth::Full);
        now.retain_free_in(&earlier);
        let kept = |survey: &Survey| survey.free().map(|address| address.0 / 65536).collect::<Vec<_>>();
        assert_eq!(kept(&now), [0, 2, 3]);
        let mut now = survey(&mut file, &[high], Depth::Full);
        now.retain_free_in(&earlier);
        assert_eq!(kept(&now), [2, 3]);
    }

    fn entry() -> impl Strategy<Value = u64> {
        prop_oneof![40 => Just(KPF_BUDDY), 1 => Just(0), 1 => Just(KPF_NOPAGE), 1 => Just(KPF_BUDDY | KPF_HWPOISON), 1 => any::<u64>()]
    }

    proptest! {
        #[test]
        fn agrees_with_a_naive_model(
            entries in proptest::collection::vec(entry(), 0..600),
            cuts in proptest::collection::btree_set(0u64..700, 2..8),
        ) {
            let tree = Tree::new(&[]);
            let mut file = flags(&tree, &entries);
            let cuts: Vec<u64> = cuts.into_iter().collect();
            let ranges: Vec<PfnRange> = cuts.windows(2).map(|pair| Pfn(pair[0])..Pfn(pair[1])).collect();
            let free = |pfn: u64| entries.get(usize::try_from(pfn).unwrap()).is_some_and(|flags| {
                flags >> 10 & 1 == 1 && flags >> 19 & 1 == 0 && flags >> 20 & 1 == 0 && flags >> 23 & 1 == 0
            });
            let whole = |h: u64| ranges.iter().any(|r| r.start.0 <= h * 16 && h * 16 + 16 <= r.end.0);
            let expected: Vec<u64> = (0..44).filter(|h| whole(*h) && (h * 16..h * 16 + 16).all(free)).collect();

            let full = survey(&mut file, &ranges, Depth::Full);
            prop_assert_eq!(full.free().map(|a| a.0 / 65536).collect::<Vec<_>>(), &expected[..]);
            prop_assert_eq!(full.free_count(), expected.len() as u64);
            let probed = survey(&mut file, &ranges, Depth::Probed);
            prop_assert!(expected.iter().all(|h| probed.free().any(|a| a.0 / 65536 == *h)));
            for (range, found) in ranges.iter().zip(full.ranges()) {
                let wholly = (range.start.0..range.end.0).all(free);
                prop_assert_eq!(file.wholly_free(range).unwrap(), wholly);
                prop_assert!(!wholly || found.free_count() == found.huge_pages());
            }
        }
    }
}
