//! The [`Discard`] of a VMM that uses this crate in process: its own guest memory, its own gates.
//!
//! Made once per memory map and used by the thread that serves the balloon's queues; [`Gates`] are set from anywhere.
//! Trusts the VMM that the regions it passes are its guest's memory and that it closes `assigned-device` before memory is
//! mapped for a device: from inside nobody else can know. Trusts nothing that the guest names.

use super::{Discard, Gates, GuestRange, Source};
use crate::backing::{
    Backing, DropOutcome, GuestBacking, MapError, MemoryMap, NotPrivate, PrivateMemory, Region, Unsuitable,
    drop_extents, round_inward,
};
use fpr_protocol::{Gate, GuestAddress, Refusal};
use std::collections::BTreeMap;
use std::io;
use std::ops::{ControlFlow, Range};
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Every so many reports it is looked at whether the memory is really gone.
const LOOK_EVERY: u32 = 64;
/// As many failed looks in a row close the gate `ineffective`; after a failed one the next report is looked at.
const FAILED_LOOKS: u32 = 3;
/// A look costs one read of pagemap or one cachestat, 2 to 10 µs.
const LOOK_BYTES: u64 = 2 << 20;

/// Why guest memory cannot be dropped in process.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// Anonymous memory that is not private.
    #[error("guest memory at {start} cannot be dropped")]
    NotPrivate {
        /// First address of the region.
        start: GuestAddress,
        /// Why.
        #[source]
        source: NotPrivate,
    },
    /// A file that is mapped private or read-only.
    #[error(
        "guest memory at {start} is a private or read-only mapping of a file, where dropped pages would show the file's \
         old bytes: map the file MAP_SHARED with PROT_READ | PROT_WRITE, and leave firmware out"
    )]
    FileMapping {
        /// First address of the region.
        start: GuestAddress,
    },
    /// A file that cannot be punched.
    #[error("guest memory backed by a file cannot be dropped")]
    Unsuitable(#[from] Unsuitable),
    /// The regions are no memory map.
    #[error("the regions of guest memory do not fit together")]
    Map(#[from] MapError),
}

/// A guest's memory that this process has mapped.
///
/// Private anonymous regions are dropped by `MADV_DONTNEED`, shared file mappings (memfd, hugetlbfs) by punching a hole
/// into the file; adjacent ranges become one system call of at most [`crate::backing::MAX_CALL_BYTES`].
pub struct LocalMemory {
    /// In ascending order of address.
    regions: Vec<LocalRegion>,
    backings: Vec<Box<dyn Backing>>,
    gates: Gates,
    looks: Looks,
}

struct LocalRegion {
    guest: Range<u64>,
    /// Index in the backings.
    backing: usize,
    /// Where in the backing the region starts.
    offset: u64,
}

/// A part of a range that lies in one region.
struct Piece {
    /// Index of the range.
    range: usize,
    backing: usize,
    extent: Range<u64>,
}

impl LocalMemory {
    /// Chooses a backing for every region and keeps their mappings alive. The gates are open.
    pub fn new<B: Bitmap + Send + Sync + 'static>(memory: &GuestMemoryMmap<B>) -> Result<Self, LocalError> {
        Self::with_gates(memory, Gates::default())
    }

    /// As [`LocalMemory::new`], with the gates of an earlier memory map: memory that is plugged or unplugged makes
    /// another map of the same guest.
    pub fn with_gates<B: Bitmap + Send + Sync + 'static>(
        memory: &GuestMemoryMmap<B>,
        gates: Gates,
    ) -> Result<Self, LocalError> {
        let mut files = Vec::new();
        let mut regions = Vec::new();
        let mut private: Vec<Box<dyn Backing>> = Vec::new();
        for region in memory.iter() {
            let (start, bytes) = (GuestAddress(region.start_addr().0), region.len());
            let mapping = region.get_mmap();
            let Some(file) = mapping.file_offset() else {
                let end = start.checked_add(bytes).ok_or(MapError::NotAddressable { start, bytes, file_offset: 0 })?;
                regions.push(LocalRegion { guest: start.0..end.0, backing: private.len(), offset: 0 });
                let memory = PrivateMemory::new(mapping).map_err(|source| LocalError::NotPrivate { start, source })?;
                private.push(Box::new(memory));
                continue;
            };
            let shared = matches!(mapping.flags() & libc::MAP_TYPE, libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
            if !shared || mapping.flags() & libc::MAP_ANONYMOUS != 0 || mapping.prot() & libc::PROT_WRITE == 0 {
                return Err(LocalError::FileMapping { start });
            }
            let file_offset = file.start();
            files.push(Region { guest_address: start, bytes, file: file.arc().clone(), file_offset });
        }
        let (map, shared, backing_of_region) = GuestBacking::new(MemoryMap::new(files)?)?.into_parts();
        for (region, backing) in map.regions().iter().zip(backing_of_region) {
            let guest = region.guest_address.0..region.guest_address.0.saturating_add(region.bytes);
            regions.push(LocalRegion { guest, backing: private.len() + backing, offset: region.file_offset });
        }
        regions.sort_by_key(|region| region.guest.start);
        let backings = private.into_iter().chain(shared).collect();
        Ok(Self { regions, backings, gates, looks: Looks::default() })
    }

    /// The gates of this guest.
    #[must_use]
    pub fn gates(&self) -> Gates {
        self.gates.clone()
    }

    /// Bytes that the guest's memory costs the host, resident or swapped out: exact and O(1) for memory files, one look
    /// at every page for private memory (10 to 40 ms per GiB).
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        self.backings.iter().try_fold(0u64, |sum, backing| Ok(sum.saturating_add(backing.allocated_bytes()?)))
    }

    /// Cuts ranges at the borders of regions. What comes back in `pieces` is disjoint.
    fn locate(&self, ranges: &[GuestRange], pieces: &mut Vec<Piece>) -> Vec<Result<u64, Refusal>> {
        let mut accepted: BTreeMap<u64, u64> = BTreeMap::new();
        let mut locate_one = |(index, range): (usize, &GuestRange)| {
            if range.bytes == 0 {
                return Err(Refusal::Empty);
            }
            let guest = range.start.0..range.start.checked_add(range.bytes).ok_or(Refusal::Overflow)?.0;
            // The accepted ranges are disjoint, so the last one that starts before our end also ends last.
            if accepted.range(..guest.end).next_back().is_some_and(|(_, &end)| end > guest.start) {
                return Err(Refusal::Overlapping);
            }
            let before = pieces.len();
            if self.cut(index, &guest, pieces).is_none() {
                pieces.truncate(before);
                return Err(Refusal::OutsideMemory);
            }
            accepted.insert(guest.start, guest.end);
            Ok(0)
        };
        ranges.iter().enumerate().map(&mut locate_one).collect()
    }

    /// None if a byte of `guest` is in no region.
    fn cut(&self, range: usize, guest: &Range<u64>, pieces: &mut Vec<Piece>) -> Option<()> {
        let mut at = guest.start;
        let mut index = self.regions.partition_point(|region| region.guest.end <= at);
        while at < guest.end {
            let region = self.regions.get(index).filter(|region| region.guest.contains(&at))?;
            let end = guest.end.min(region.guest.end);
            let offset = region.offset + (at - region.guest.start);
            pieces.push(Piece { range, backing: region.backing, extent: offset..offset + (end - at) });
            (at, index) = (end, index + 1);
        }
        Some(())
    }

    fn drop_pieces(&self, pieces: &[Piece], results: &mut [Result<u64, Refusal>]) {
        let mut always = || ControlFlow::Continue(());
        for (index, backing) in self.backings.iter().enumerate() {
            let (ranges, extents): (Vec<usize>, Vec<Range<u64>>) = pieces
                .iter()
                .filter(|piece| piece.backing == index)
                .map(|piece| (piece.range, piece.extent.clone()))
                .unzip();
            let outcomes = drop_extents(backing.as_ref(), &extents, &mut always);
            for (range, outcome) in ranges.into_iter().zip(outcomes) {
                let Some(result) = results.get_mut(range) else { continue };
                *result = match (outcome, *result) {
                    (DropOutcome::Failed { bytes: 0, .. }, Ok(0) | Err(_)) => Err(Refusal::DropFailed),
                    (
                        DropOutcome::Dropped { bytes }
                        | DropOutcome::Stopped { bytes }
                        | DropOutcome::Failed { bytes, .. },
                        before,
                    ) => before.map_or_else(|why| if bytes > 0 { Ok(bytes) } else { Err(why) }, |sum| Ok(sum + bytes)),
                };
            }
        }
    }

    /// How much of what was just dropped is still backed. The guest waits, so it should be nothing. None if that cannot
    /// be seen.
    fn still_backed(&self, pieces: &[Piece]) -> Option<Share> {
        pieces.iter().find_map(|piece| {
            let backing = self.backings.get(piece.backing).filter(|backing| backing.sees_holes())?;
            let looked_at = piece.extent.start..piece.extent.end.min(piece.extent.start.saturating_add(LOOK_BYTES));
            let extent = round_inward(&looked_at, backing.page_bytes());
            let bytes = extent.end - extent.start;
            let backed = if bytes == 0 { None } else { backing.backed_bytes(extent).ok() }?;
            Some(Share { backed, bytes })
        })
    }
}

impl Discard for LocalMemory {
    fn discard(&mut self, _: Source, ranges: &[GuestRange]) -> Vec<Result<u64, Refusal>> {
        let Some(passage) = self.gates.pass() else { return vec![Err(Refusal::Gated); ranges.len()] };
        let mut pieces = Vec::with_capacity(ranges.len());
        let mut results = self.locate(ranges, &mut pieces);
        self.drop_pieces(&pieces, &mut results);
        drop(passage);
        if self.looks.due() && results.iter().any(|result| result.is_ok_and(|bytes| bytes > 0)) {
            let share = self.still_backed(&pieces);
            if self.looks.result(share) {
                let detail = "dropped memory is still backed after the call: look for what maps or restores it";
                self.gates.close(Gate::Ineffective, detail);
            }
        }
        results
    }
}

#[derive(Clone, Copy)]
struct Share {
    backed: u64,
    bytes: u64,
}

/// When to look whether drops help, and what the looks say.
#[derive(Default)]
struct Looks {
    reports: u32,
    failed: u32,
}

impl Looks {
    fn due(&mut self) -> bool {
        let due = self.failed > 0 || self.reports.is_multiple_of(LOOK_EVERY);
        self.reports = self.reports.wrapping_add(1);
        due
    }

    /// Whether it is certain now that drops do not help.
    fn result(&mut self, share: Option<Share>) -> bool {
        match share {
            // Half of it: khugepaged may have filled a huge page that was dropped in part.
            Some(Share { backed, bytes }) if backed >= bytes / 2 => self.failed += 1,
            _ => self.failed = 0,
        }
        self.failed >= FAILED_LOOKS
    }
}

#[cfg(test)]
mod tests;
