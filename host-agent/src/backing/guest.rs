//! The memory of one VM: its map, and the backing of each file in it.
//!
//! The VM's owner builds one per memory table and calls it from one thread.

use super::file::check_page_size;
use super::punch::{drop_extents, round_inward};
use super::{Backing, DropOutcome, FileId, MemoryMap, Span, Unsuitable, choose};
use fpr_protocol::{BackedRange, GuestAddress, HugePageRange, HugePageSize, Refusal};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

/// Why the host could not look at guest memory: its own fault, not the guest's.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} guest memory: the memory file must stay open and keep its size")]
pub struct BackingError {
    /// What was tried.
    action: &'static str,
    #[source]
    source: io::Error,
}

/// Why guest memory could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The guest named an address that it has no memory at, or not in one region.
    #[error("no such guest memory: {0}")]
    Refused(Refusal),
    /// The host's fault.
    #[error(transparent)]
    Backing(#[from] BackingError),
}

impl From<Refusal> for ReadError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The backing of one VM's memory.
pub struct GuestBacking {
    map: MemoryMap,
    files: Vec<(FileId, Box<dyn Backing>)>,
    /// For each region its index in `files`.
    file_of_region: Vec<usize>,
}

impl GuestBacking {
    /// Chooses a backing for every file of `map`. Regions with the same file share one.
    pub fn new(map: MemoryMap) -> Result<Self, Unsuitable> {
        let mut files: Vec<(FileId, Box<dyn Backing>)> = Vec::new();
        let mut file_of_region = Vec::new();
        let mut extents: BTreeMap<(FileId, u64), u64> = BTreeMap::new();
        for region in map.regions() {
            let inspect = |source| Unsuitable::Inspect { call: "fstat", source };
            let id = FileId::of(&region.file).map_err(inspect)?;
            // Each region may come with a descriptor of its own, and each must be fit.
            let backing = choose(&region.file)?;
            let extent = region.extent();
            let file_bytes = region.file.metadata().map_err(inspect)?.len();
            if extent.end > file_bytes {
                return Err(Unsuitable::PastEnd { end: extent.end, file_bytes });
            }
            let before = extents.range((id, 0)..(id, extent.end)).next_back();
            if before.is_some_and(|(_, &end)| end > extent.start) {
                return Err(Unsuitable::Aliased { offset: extent.start });
            }
            extents.insert((id, extent.start), extent.end);
            let known = files.iter().position(|(known, _)| *known == id);
            file_of_region.push(known.unwrap_or(files.len()));
            if known.is_none() {
                files.push((id, backing));
            }
        }
        Ok(Self { map, files, file_of_region })
    }

    /// Refuses huge pages that are smaller than a page of the backing. The size is known from `Hello` on.
    pub fn check_huge_page_size(&self, size: HugePageSize) -> Result<(), Unsuitable> {
        self.files.iter().try_for_each(|(_, backing)| check_page_size(backing.as_ref(), size))
    }

    /// The memory map, for translation.
    #[must_use]
    pub fn map(&self) -> &MemoryMap {
        &self.map
    }

    /// The distinct files, for [`crate::process`] and to see that no two VMs share one.
    pub fn file_ids(&self) -> impl Iterator<Item = FileId> + '_ {
        self.files.iter().map(|(id, _)| *id)
    }

    /// One descriptor of each distinct file, to account for it.
    pub fn files(&self) -> Vec<Arc<File>> {
        let regions = self.map.regions();
        let first = |file: usize| self.file_of_region.iter().position(|of| *of == file);
        (0..self.files.len())
            .filter_map(first)
            .filter_map(|region| regions.get(region))
            .map(|region| Arc::clone(&region.file))
            .collect()
    }

    /// Whether [`GuestBacking::backed`] can tell holes from memory in every file.
    #[must_use]
    pub fn sees_holes(&self) -> bool {
        self.files.iter().all(|(_, backing)| backing.sees_holes())
    }

    /// Bytes that the memory files cost the host, each file counted once, resident or swapped out. Exact, one fstat
    /// per file.
    pub fn allocated_bytes(&self) -> Result<u64, BackingError> {
        self.files.iter().try_fold(0u64, |sum, (_, backing)| {
            let bytes = backing.allocated_bytes().map_err(|source| BackingError { action: "measure", source })?;
            Ok(sum.saturating_add(bytes))
        })
    }

    /// Drops spans that the [`MemoryMap`] located for one report, so they are disjoint; one outcome per span, in order.
    ///
    /// `keep_going` is asked before every system call: the place to look at the deadline, the lease and cancellation.
    pub fn drop_spans(&self, spans: &[Span], keep_going: &mut dyn FnMut() -> ControlFlow<()>) -> Vec<DropOutcome> {
        let mut outcomes = vec![DropOutcome::Stopped { bytes: 0 }; spans.len()];
        let mut stopped = false;
        for (index, (_, backing)) in self.files.iter().enumerate() {
            let mine: Vec<usize> = (0..spans.len())
                .filter(|&i| spans.get(i).and_then(|span| self.file_of_region.get(span.region)) == Some(&index))
                .collect();
            let extents: Vec<Range<u64>> = mine.iter().filter_map(|&i| Some(spans.get(i)?.extent.clone())).collect();
            let mut ask = || {
                // A refusal holds for the files that follow, too.
                stopped |= keep_going().is_break();
                if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            for (i, outcome) in mine.into_iter().zip(drop_extents(backing.as_ref(), &extents, &mut ask)) {
                if let Some(slot) = outcomes.get_mut(i) {
                    *slot = outcome;
                }
            }
            if stopped {
                break;
            }
        }
        outcomes
    }

    /// Which huge pages of `span` are backed, at least in part, as runs in ascending order. `span` is whole huge pages
    /// of `size`. Where holes are invisible, all of them.
    ///
    /// Takes 40 to 100 ns per backed page of 4 KiB, 10 to 30 ms per GiB; holes and huge pages cost a hundredth of that.
    /// `keep_going` is asked before every huge page; what was found until it said no is the answer.
    pub fn backed(
        &self,
        span: &Span,
        size: HugePageSize,
        keep_going: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<BackedRange>, BackingError> {
        let mut runs: Vec<BackedRange> = Vec::new();
        let Some(backing) = self.backing_of(span) else { return Ok(runs) };
        let mut page = span.extent.start..span.extent.start.saturating_add(size.bytes());
        while page.end <= span.extent.end && keep_going().is_continue() {
            let backed_bytes = backing
                .backed_bytes(page.clone())
                .map_err(|source| BackingError { action: "find the holes of", source })?;
            let start = GuestAddress(span.guest.start + (page.start - span.extent.start));
            page = page.end..page.end.saturating_add(size.bytes());
            if backed_bytes == 0 {
                continue;
            }
            match runs.last_mut() {
                Some(BackedRange { range, backed_bytes: sum }) if range.start.0 + range.bytes(size) == start.0 => {
                    range.count += 1;
                    *sum += backed_bytes;
                }
                _ => runs.push(BackedRange { range: HugePageRange { start, count: 1 }, backed_bytes }),
            }
        }
        Ok(runs)
    }

    /// How many bytes of the whole backing pages in `span` are backed; all of them where holes are invisible.
    pub fn whole_pages_backed(&self, span: &Span) -> Result<u64, BackingError> {
        let Some(backing) = self.backing_of(span) else { return Ok(0) };
        let whole = round_inward(&span.extent, backing.page_bytes());
        if whole.is_empty() {
            return Ok(0);
        }
        backing.backed_bytes(whole).map_err(|source| BackingError { action: "find the holes of", source })
    }

    /// Reads guest memory without faulting anything in.
    pub fn read_at(&self, address: GuestAddress, buf: &mut [u8]) -> Result<(), ReadError> {
        let bytes = u64::try_from(buf.len()).map_err(|_| Refusal::Overflow)?;
        let span = self.map.locate_bytes(address, bytes)?;
        let backing = self.backing_of(&span).ok_or(Refusal::OutsideMemory)?;
        let read = backing.read_at(span.extent.start, buf);
        Ok(read.map_err(|source| BackingError { action: "read", source })?)
    }

    /// The distinct backings, and for each region of the map its index in them.
    pub(crate) fn into_parts(self) -> (MemoryMap, Vec<Box<dyn Backing>>, Vec<usize>) {
        (self.map, self.files.into_iter().map(|(_, backing)| backing).collect(), self.file_of_region)
    }

    fn backing_of(&self, span: &Span) -> Option<&dyn Backing> {
        let index = *self.file_of_region.get(span.region)?;
        self.files.get(index).map(|(_, backing)| backing.as_ref())
    }
}
