//! Translation of guest-physical ranges to bytes of backing files.
//!
//! Built from the memory table of the VMM (vhost-user `SET_MEM_TABLE`, `ADD_MEM_REG`), asked by the session for every
//! range a guest names. Pure: no system call. Trusts the VMM for what its regions are, checks that they are
//! consistent, and trusts nothing that the guest says.

use crate::reporting::GuestRange;
use fpr_protocol::{GuestAddress, HugePageRange, HugePageSize, MAX_REGIONS, Refusal};
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// A run of guest-physical memory, backed by consecutive bytes of one file.
///
/// Several regions may share a file, and none needs to be huge-page aligned: QEMU cuts its memory at 0xa0000.
#[derive(Clone, Debug)]
pub struct Region {
    /// First guest-physical address.
    pub guest_address: GuestAddress,
    /// Length in bytes.
    pub bytes: u64,
    /// The file that backs it.
    pub file: Arc<File>,
    /// Where in the file the first byte is.
    pub file_offset: u64,
}

impl Region {
    /// Guest-physical addresses `[start, end)`. [`MemoryMap::new`] has ruled out overflow.
    fn guest(&self) -> Range<u64> {
        self.guest_address.0..self.guest_address.0.saturating_add(self.bytes)
    }

    /// Bytes of the file `[start, end)`.
    pub(crate) fn extent(&self) -> Range<u64> {
        self.file_offset..self.file_offset.saturating_add(self.bytes)
    }
}

/// Where bytes of guest-physical memory are: wholly inside one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index into [`MemoryMap::regions`].
    pub region: usize,
    /// Guest-physical addresses `[start, end)`.
    pub guest: Range<u64>,
    /// Bytes of the region's file `[start, end)`.
    pub extent: Range<u64>,
}

/// Why a VMM's regions are no memory map. The VMM's fault, never the guest's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// More regions than the protocol can name.
    #[error("{regions} memory regions, at most {MAX_REGIONS} are possible: use fewer or larger memory devices")]
    TooManyRegions {
        /// How many.
        regions: usize,
    },
    /// A region is empty or runs past the end of the address space or of the largest file offset (2^63 - 1).
    #[error("memory region at {start} with {bytes:#x} bytes from file offset {file_offset:#x} is not addressable")]
    NotAddressable {
        /// Where it starts.
        start: GuestAddress,
        /// Its length.
        bytes: u64,
        /// Where it starts in the file.
        file_offset: u64,
    },
    /// Two regions share guest-physical addresses.
    #[error("memory regions at {first} and {second} overlap in guest-physical memory")]
    Overlap {
        /// The lower one.
        first: GuestAddress,
        /// The higher one.
        second: GuestAddress,
    },
}

/// The memory of one VM: regions that do not overlap, in ascending order of address.
#[derive(Clone, Debug, Default)]
pub struct MemoryMap {
    regions: Vec<Region>,
}

impl MemoryMap {
    /// Sorts and checks the regions.
    pub fn new(mut regions: Vec<Region>) -> Result<Self, MapError> {
        if regions.len() > MAX_REGIONS {
            return Err(MapError::TooManyRegions { regions: regions.len() });
        }
        for &Region { guest_address: start, bytes, file_offset, .. } in &regions {
            // off_t is signed: no file has bytes above 2^63 - 1.
            let in_file = file_offset.checked_add(bytes).is_some_and(|end| i64::try_from(end).is_ok());
            if bytes == 0 || start.checked_add(bytes).is_none() || !in_file {
                return Err(MapError::NotAddressable { start, bytes, file_offset });
            }
        }
        regions.sort_by_key(|region| region.guest_address);
        for pair in regions.windows(2) {
            if let [low, high] = pair
                && low.guest().end > high.guest_address.0
            {
                return Err(MapError::Overlap { first: low.guest_address, second: high.guest_address });
            }
        }
        Ok(Self { regions })
    }

    /// The regions in ascending order of address; `Welcome` names them in this order.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Bytes of guest memory in all regions.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).fold(0, u64::saturating_add)
    }

    /// Translates whole huge pages.
    pub fn locate(&self, range: HugePageRange, size: HugePageSize) -> Result<Span, Refusal> {
        self.locate_guest(range.check(size)?)
    }

    /// Translates `bytes` bytes from `start`, which need no alignment.
    pub fn locate_bytes(&self, start: GuestAddress, bytes: u64) -> Result<Span, Refusal> {
        if bytes == 0 {
            return Err(Refusal::Empty);
        }
        let end = start.checked_add(bytes).ok_or(Refusal::Overflow)?;
        self.locate_guest(start.0..end.0)
    }

    fn locate_guest(&self, guest: Range<u64>) -> Result<Span, Refusal> {
        let index = self.index_of(guest.start).ok_or(Refusal::OutsideMemory)?;
        let region = self.regions.get(index).ok_or(Refusal::OutsideMemory)?;
        if guest.end > region.guest().end {
            // `end` is past the last byte, and `guest` is never empty.
            let ends_in_memory = self.index_of(guest.end - 1).is_some();
            return Err(if ends_in_memory { Refusal::CrossesRegions } else { Refusal::OutsideMemory });
        }
        let start = region.file_offset + (guest.start - region.guest_address.0);
        let extent = start..start + (guest.end - guest.start);
        Ok(Span { region: index, guest, extent })
    }

    fn index_of(&self, address: u64) -> Option<usize> {
        let index = self.regions.partition_point(|region| region.guest_address.0 <= address).checked_sub(1)?;
        self.regions.get(index)?.guest().contains(&address).then_some(index)
    }

    /// Translates what a guest's kernel gave away: any bytes, cut at the borders of regions. One result per range, in
    /// order.
    ///
    /// A range that shares a byte with one accepted before it is refused as `overlapping`, so all spans are disjoint and
    /// no more than ranges and regions together. O(n log n).
    #[must_use]
    pub fn locate_kernel_report(&self, ranges: &[GuestRange]) -> Vec<Result<Vec<Span>, Refusal>> {
        let mut accepted: BTreeMap<u64, u64> = BTreeMap::new();
        let mut locate_one = |range: &GuestRange| {
            if range.bytes == 0 {
                return Err(Refusal::Empty);
            }
            let guest = range.start.0..range.start.checked_add(range.bytes).ok_or(Refusal::Overflow)?.0;
            if accepted.range(..guest.end).next_back().is_some_and(|(_, &end)| end > guest.start) {
                return Err(Refusal::Overlapping);
            }
            let spans = self.cut(&guest)?;
            accepted.insert(guest.start, guest.end);
            Ok(spans)
        };
        ranges.iter().map(&mut locate_one).collect()
    }

    /// One span per region that `guest` touches; every byte of it must be memory.
    fn cut(&self, guest: &Range<u64>) -> Result<Vec<Span>, Refusal> {
        let mut spans = Vec::new();
        let mut at = guest.start;
        while at < guest.end {
            let index = self.index_of(at).ok_or(Refusal::OutsideMemory)?;
            let region = self.regions.get(index).ok_or(Refusal::OutsideMemory)?;
            let end = guest.end.min(region.guest().end);
            let start = region.file_offset + (at - region.guest_address.0);
            spans.push(Span { region: index, guest: at..end, extent: start..start + (end - at) });
            at = end;
        }
        Ok(spans)
    }

    /// Translates the ranges of one report, one result per range, in order.
    ///
    /// A range that shares a huge page with one accepted before it is refused as `overlapping`, so the spans that
    /// come back are disjoint. O(n log n).
    #[must_use]
    pub fn locate_report(&self, ranges: &[HugePageRange], size: HugePageSize) -> Vec<Result<Span, Refusal>> {
        let mut accepted: BTreeMap<u64, u64> = BTreeMap::new();
        let mut locate_one = |range: &HugePageRange| {
            let span = self.locate(*range, size)?;
            // The accepted ranges are disjoint, so the last one that starts before our end also ends last.
            if accepted.range(..span.guest.end).next_back().is_some_and(|(_, &end)| end > span.guest.start) {
                return Err(Refusal::Overlapping);
            }
            accepted.insert(span.guest.start, span.guest.end);
            Ok(span)
        };
        ranges.iter().map(&mut locate_one).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    const HUGE: u64 = 2 << 20;

    fn size() -> HugePageSize {
        HugePageSize::new(4096, 9).unwrap()
    }

    fn file() -> Arc<File> {
        Arc::new(tempfile::tempfile().unwrap())
    }

    fn region(start: u64, bytes: u64, file_offset: u64, file: &Arc<File>) -> Region {
        Region { guest_address: GuestAddress(start), bytes, file: Arc::clone(file), file_offset }
    }

    fn range(start: u64, count: u32) -> HugePageRange {
        HugePageRange { start: GuestAddress(start), count }
    }

    /// As QEMU's q35 with 4 GiB tells it: one memfd, a hole for VGA memory, the rest above 4 GiB.
    fn q35() -> MemoryMap {
        let file = file();
        MemoryMap::new(vec![
            region(4 << 30, 2 << 30, 2 << 30, &file),
            region(0, 0xa0000, 0, &file),
            region(0xc0000, (2 << 30) - 0xc0000, 0xc0000, &file),
        ])
        .unwrap()
    }

    #[test]
    fn translates_a_qemu_memory_map() {
        let map = q35();
        assert_eq!(map.bytes(), (4 << 30) - 0x20000);
        let locate = |start, count| map.locate(range(start, count), size());
        let high = (4 << 30) + 3 * HUGE;
        let offset = (2 << 30) + 3 * HUGE;
        assert_eq!(
            locate(high, 2),
            Ok(Span { region: 2, guest: high..high + 2 * HUGE, extent: offset..offset + 2 * HUGE })
        );
        assert_eq!(locate(HUGE, 1023).unwrap().extent, HUGE..2 << 30);
        assert_eq!(locate(0, 1), Err(Refusal::CrossesRegions));
        assert_eq!(locate(HUGE, 1024), Err(Refusal::OutsideMemory));
        assert_eq!(locate(2 << 30, 1), Err(Refusal::OutsideMemory));
        assert_eq!(locate((2 << 30) - HUGE, 2048), Err(Refusal::CrossesRegions));
        assert_eq!(locate(6 << 30, 1), Err(Refusal::OutsideMemory));
        assert_eq!(locate(HUGE + 4096, 1), Err(Refusal::Unaligned));
        assert_eq!(locate(HUGE, 0), Err(Refusal::Empty));
        assert_eq!(locate(0u64.wrapping_sub(HUGE), 2), Err(Refusal::Overflow));
        assert_eq!(map.locate_bytes(GuestAddress(0x9fff0), 16).unwrap().region, 0);
        assert_eq!(map.locate_bytes(GuestAddress(0x9fff0), 17), Err(Refusal::OutsideMemory));
        assert_eq!(map.locate_bytes(GuestAddress(u64::MAX), 2), Err(Refusal::Overflow));
        assert_eq!(map.locate_bytes(GuestAddress(0), 0), Err(Refusal::Empty));
    }

    #[test]
    fn a_kernel_report_is_cut_at_the_borders_of_regions() {
        let file = file();
        let map = MemoryMap::new(vec![
            region(0, 0xa0000, 0, &file),
            region(0x10_0000, 0x10_0000, 0x70_0000, &file),
            region(0x20_0000, HUGE, 0, &file),
        ]);
        let map = map.unwrap();
        let range = |start, bytes| GuestRange { start: GuestAddress(start), bytes };
        let span = |region, guest: Range<u64>, at| Span { region, extent: at..at + guest.end - guest.start, guest };
        let located = map.locate_kernel_report(&[
            range(0x1f_f000, 0x3000),
            range(0x9_f001, 0x1000),
            range(0x9_f001, 0xfff),
            range(0x20_0fff, 1),
            range(0x20_2000, HUGE),
            range(u64::MAX, 2),
            range(0, 0),
            range(0x20_2000, 0x1000),
        ]);
        assert_eq!(
            located,
            [
                Ok(vec![span(1, 0x1f_f000..0x20_0000, 0x7f_f000), span(2, 0x20_0000..0x20_2000, 0)]),
                Err(Refusal::OutsideMemory),
                Ok(vec![span(0, 0x9_f001..0xa_0000, 0x9_f001)]),
                Err(Refusal::Overlapping),
                Err(Refusal::OutsideMemory),
                Err(Refusal::Overflow),
                Err(Refusal::Empty),
                Ok(vec![span(2, 0x20_2000..0x20_3000, 0x2000)]),
            ]
        );
    }

    #[test]
    fn duplicates_and_overlaps_are_refused_after_the_first() {
        let refusals: Vec<_> = q35()
            .locate_report(
                &[range(4 * HUGE, 4), range(4 * HUGE, 4), range(2 * HUGE, 3), range(2 * HUGE, 2), range(7 * HUGE, 1)],
                size(),
            )
            .into_iter()
            .map(Result::err)
            .collect();
        let overlapping = Some(Refusal::Overlapping);
        assert_eq!(refusals, [None, overlapping, overlapping, None, overlapping]);
    }

    #[test]
    fn refuses_regions_that_are_no_map() {
        let file = file();
        let new = |regions: Vec<Region>| MemoryMap::new(regions).map(|_| ());
        assert!(matches!(
            new(vec![region(HUGE, HUGE, HUGE, &file), region(0, HUGE + 1, 0, &file)]),
            Err(MapError::Overlap { first: GuestAddress(0), second: GuestAddress(HUGE) })
        ));
        for (start, bytes, offset) in [(0, 0, 0), (u64::MAX, 1, 0), (0, HUGE, u64::MAX - 1), (0, HUGE, 1 << 63)] {
            let result = new(vec![region(start, bytes, offset, &file)]);
            assert!(matches!(result, Err(MapError::NotAddressable { .. })), "{start:#x} {bytes:#x} {offset:#x}");
        }
        let many = |count: u64| (0..count).map(|i| region(i * HUGE, HUGE, i * HUGE, &file)).collect::<Vec<_>>();
        assert_eq!(new(many(512)), Ok(()));
        assert_eq!(new(many(513)), Err(MapError::TooManyRegions { regions: 513 }));
    }

    /// The rule of `locate_report`, huge page by huge page and byte by byte of a tiny machine.
    fn naive(map: &MemoryMap, ranges: &[HugePageRange], unit: u64) -> Vec<Result<(usize, u64), Refusal>> {
        let owner = |at: u64| map.regions().iter().position(|r| r.guest().contains(&at));
        let mut taken = std::collections::HashSet::new();
        let mut results = Vec::new();
        for range in ranges {
            let pages: Vec<u64> = (0..u64::from(range.count)).map(|i| range.start.0 + i * unit).collect();
            let (first, last) = (range.start.0, range.start.0 + u64::from(range.count) * unit - 1);
            results.push(match (owner(first), owner(last)) {
                (Some(a), Some(b)) if a == b => {
                    if pages.iter().any(|page| taken.contains(page)) {
                        Err(Refusal::Overlapping)
                    } else {
                        taken.extend(pages);
                        let region = &map.regions()[a];
                        Ok((a, region.file_offset + first - region.guest_address.0))
                    }
                }
                (Some(_), Some(_)) => Err(Refusal::CrossesRegions),
                _ => Err(Refusal::OutsideMemory),
            });
        }
        results
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_model(
            // Gaps and lengths of the regions and their file offsets in 4 KiB pages; huge pages of 8 KiB.
            layout in prop::collection::vec((0u64..4, 1u64..9, 0u64..99), 1..8),
            wanted in prop::collection::vec((0u64..40, 1u32..6), 0..24),
        ) {
            let size = HugePageSize::new(4096, 1).unwrap();
            let file = file();
            let mut at = 0;
            let mut regions = Vec::new();
            for (gap, pages, offset) in layout {
                at += gap * 4096;
                regions.push(region(at, pages * 4096, offset * 4096, &file));
                at += pages * 4096;
            }
            regions.reverse();
            let map = MemoryMap::new(regions).unwrap();
            let ranges: Vec<_> = wanted.iter().map(|&(page, count)| range(page * 8192, count)).collect();
            let got = map.locate_report(&ranges, size);
            for (span, range) in got.iter().zip(&ranges) {
                if let Ok(span) = span {
                    prop_assert_eq!(&span.guest, &range.check(size).unwrap());
                    prop_assert_eq!(span.extent.end - span.extent.start, range.bytes(size));
                }
            }
            let got: Vec<_> = got.into_iter().map(|r| r.map(|span| (span.region, span.extent.start))).collect();
            prop_assert_eq!(got, naive(&map, &ranges, 8192));
        }
    }
}
