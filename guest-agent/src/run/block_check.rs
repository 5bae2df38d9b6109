//! The second look at a memory block, on the block worker's thread right before it goes offline.
//!
//! A page in use in it makes the kernel move the page, or refuse and print a page dump into the guest's log; memory is
//! not lost either way. So the whole block is read, unless the first look was exact and the guest has hardly
//! allocated anything since.

use crate::kernel::kpageflags::{Depth, PageFlags, Survey};
use crate::kernel::memory_blocks::BlockNumber;
use crate::kernel::vmstat::VmEventsReader;
use crate::kernel::{Pfn, ReadError, Roots};
use crate::run::facts::Guest;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Base pages that the guest may allocate between the looks before all pages are read again: 4 MiB of small allocations,
/// which the kernel serves from what is split already. Reading a 128 MiB block in full takes up to 50 ms in an
/// emulated guest, 3 ms elsewhere; probing a tenth of that.
const QUIET_PAGES: u64 = 1024;

/// Base pages that the guest may allocate while a block is read. More means that somebody allocates in earnest, as a
/// program that starts does, and its page tables may take pages that were read already: better another time.
const CALM_PAGES: u64 = 512;

/// What the first look found: whether it was exact, and the kernel's count of allocated pages then.
#[derive(Debug)]
pub(super) struct Looked(AtomicU64);

impl Default for Looked {
    fn default() -> Self {
        Self(AtomicU64::new(NOT_EXACT))
    }
}

/// No count of pages gets there.
const NOT_EXACT: u64 = u64::MAX;

impl Looked {
    /// `pgalloc` at an exact look; `None` after one that was not.
    pub(super) fn set(&self, allocated: Option<u64>) {
        self.0.store(allocated.unwrap_or(NOT_EXACT), Ordering::Relaxed);
    }
}

/// Reads what the check needs. Lives on the worker's thread.
pub(super) struct BlockCheck {
    flags: PageFlags,
    survey: Survey,
    events: VmEventsReader,
    pages_per_block: u64,
    looked: Arc<Looked>,
}

impl BlockCheck {
    pub(super) fn new(roots: &Roots, guest: &Guest, looked: Arc<Looked>) -> Result<Self, ReadError> {
        let size = guest.facts.size;
        Ok(Self {
            flags: PageFlags::open(roots, size)?,
            survey: Survey::new(size),
            events: VmEventsReader::open(roots)?,
            pages_per_block: guest.facts.block_bytes.unwrap_or(0) / size.page_bytes(),
            looked,
        })
    }

    /// Whether every page of the block is free. What cannot be read is in use.
    pub(super) fn is_free(&mut self, block: BlockNumber) -> bool {
        let first = block.0.saturating_mul(self.pages_per_block);
        let pages = Pfn(first)..Pfn(first.saturating_add(self.pages_per_block));
        let Some(before) = self.allocated() else { return false };
        let looked = self.looked.0.load(Ordering::Relaxed);
        let quiet = looked != NOT_EXACT && before.saturating_sub(looked) <= QUIET_PAGES;
        if !quiet && !self.flags.wholly_free(&pages).unwrap_or(false) {
            return false;
        }
        // Also after the full look: whoever allocated from a free block meanwhile got its lowest pages (`expand`,
        // mm/page_alloc.c), and these are probed.
        let probed = self.flags.survey([pages], Depth::Probed, &mut self.survey);
        probed.is_ok()
            && self.survey.ranges().all(|range| range.all_free())
            && self.allocated().is_some_and(|after| after.saturating_sub(before) <= CALM_PAGES)
    }

    /// The kernel's count of base pages allocated so far.
    fn allocated(&mut self) -> Option<u64> {
        self.events.read().ok().map(|events| events.pgalloc)
    }
}
