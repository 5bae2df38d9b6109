//! From a descriptor chain to ranges: two ways to read one.
//!
//! On the reporting queue each descriptor *is* the memory that is reported. On the inflate queue the descriptors hold a
//! list of page frame numbers. Called by [`super::ReportingQueue`] for every chain, trusts nothing in it.
//!
//! [`DescriptorChain`] bounds the walk: it yields at most as many descriptors as the queue has, plus 65,535 of one
//! indirect table, and stops when the lengths exceed 2^32 bytes (virtio 1.2, 2.7.5.2). It does not say why it stopped,
//! but a chain that was read to its end has a last descriptor without NEXT.

use super::{GuestRange, QueueCounters, Source};
use fpr_protocol::{GuestAddress, Refusal};
use std::ops::Deref;
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestMemory};

/// Most ranges that are taken from one chain; more are refused as `too-many-ranges`.
///
/// Linux reports 32 ranges at a time (`PAGE_REPORTING_CAPACITY` in `include/linux/page_reporting.h`) and inflates by 256
/// page frame numbers (`VIRTIO_BALLOON_ARRAY_PFNS_MAX` in `drivers/virtio/virtio_balloon.c`), Windows by 1,024.
pub const MAX_RANGES: usize = 1024;

/// Bytes of the page that a page frame number of the balloon names, whatever the guest's own page size
/// (`VIRTIO_BALLOON_PFN_SHIFT` in `include/uapi/linux/virtio_balloon.h`; virtio 1.2, 5.5.6).
pub const PFN_BYTES: u64 = 4096;

/// Bytes of a page frame number on the queue: le32 (virtio 1.2, 5.5.6).
const PFN_LEN: usize = 4;

/// Reads the ranges of `chain` into `ranges`, which holds at most [`MAX_RANGES`] afterwards, and counts what it refuses.
pub(super) fn read<M>(
    source: Source,
    chain: DescriptorChain<M>,
    ranges: &mut Vec<GuestRange>,
    counters: &mut QueueCounters,
) where
    M: Deref,
    M::Target: GuestMemory,
{
    ranges.clear();
    let mut walk = Walk { chain, last_has_next: true, descriptors: 0 };
    let whole = match source {
        Source::Reported => {
            read_reported(&mut walk, ranges, counters);
            true
        }
        Source::Inflated => read_inflated(&mut walk, ranges, counters),
    };
    counters.descriptors += walk.descriptors;
    // An empty chain has no last descriptor, and that is no end either.
    if !whole || walk.last_has_next {
        counters.chains_malformed += 1;
    }
}

/// A chain that remembers how it ended.
struct Walk<M> {
    chain: DescriptorChain<M>,
    last_has_next: bool,
    descriptors: u64,
}

impl<M> Iterator for Walk<M>
where
    M: Deref,
    M::Target: GuestMemory,
{
    type Item = Descriptor;

    fn next(&mut self) -> Option<Descriptor> {
        let descriptor = self.chain.next()?;
        self.last_has_next = descriptor.has_next();
        self.descriptors += 1;
        Some(descriptor)
    }
}

/// What precedes a break in the chain is taken: the driver gave each of these buffers to the device. It is more than
/// kindness, for Linux on arm64 with pages of 64 KiB reports blocks of 512 MiB, and eight of them exceed 2^32 bytes.
fn read_reported<M>(walk: &mut Walk<M>, ranges: &mut Vec<GuestRange>, counters: &mut QueueCounters)
where
    M: Deref,
    M::Target: GuestMemory,
{
    for descriptor in walk {
        let range = GuestRange { start: GuestAddress(descriptor.addr().0), bytes: descriptor.len().into() };
        if !descriptor.is_write_only() {
            counters.refused(Refusal::WrongDirection, range.bytes);
        } else if ranges.len() == MAX_RANGES {
            counters.refused(Refusal::TooManyRanges, range.bytes);
        } else {
            ranges.push(range);
        }
    }
}

/// Reads the list as one stream of bytes, for a device must not care how the driver cut it into buffers (virtio 1.2,
/// 2.7.4.1). False if the list cannot be read to its end or ends within a number.
fn read_inflated<M>(walk: &mut Walk<M>, ranges: &mut Vec<GuestRange>, counters: &mut QueueCounters) -> bool
where
    M: Deref,
    M::Target: GuestMemory,
{
    let mut pages = Vec::new();
    let mut torn = 0;
    let mut number = [0; PFN_LEN];
    let mut readable = true;
    while let Some(descriptor) = walk.next() {
        if descriptor.is_write_only() {
            counters.refused(Refusal::WrongDirection, 0);
            continue;
        }
        let mut list = Unread { start: descriptor.addr(), bytes: descriptor.len() };
        while readable && list.bytes > 0 {
            let full = pages.len() == MAX_RANGES;
            if full {
                break;
            }
            // One chunk never holds more numbers than are still wanted.
            let wanted = (MAX_RANGES - pages.len()) * PFN_LEN - torn;
            let mut chunk = [0; 1024];
            let Some(chunk) = list.read(walk.chain.memory(), &mut chunk, wanted) else {
                counters.refused(Refusal::OutsideMemory, 0);
                readable = false;
                break;
            };
            for byte in chunk {
                if let Some(slot) = number.get_mut(torn) {
                    *slot = *byte;
                }
                torn += 1;
                if torn == PFN_LEN {
                    pages.push(u64::from(u32::from_le_bytes(number)));
                    torn = 0;
                }
            }
        }
        if readable && list.bytes > 0 {
            // Counted as one, like the descriptor it is.
            counters.refused(Refusal::TooManyRanges, u64::from(list.bytes) / PFN_LEN as u64 * PFN_BYTES);
        }
    }
    merge(&mut pages, ranges, counters);
    readable && torn == 0
}

/// What is left of a buffer.
struct Unread {
    start: vm_memory::GuestAddress,
    bytes: u32,
}

impl Unread {
    /// The next bytes: at most as many as are left, wanted and fit, at least one. None where there is no memory.
    fn read<'a>(
        &mut self,
        memory: &(impl GuestMemory + ?Sized),
        chunk: &'a mut [u8],
        wanted: usize,
    ) -> Option<&'a [u8]> {
        let count = chunk.len().min(wanted).min(usize::try_from(self.bytes).unwrap_or(usize::MAX));
        let count = memory.read(chunk.get_mut(..count)?, self.start).ok().filter(|count| *count > 0)?;
        let chunk = chunk.get(..count)?;
        self.bytes -= u32::try_from(count).ok()?;
        // The address after the last byte that can be read may not exist; nothing is left then.
        self.start = vm_memory::GuestAddress(self.start.0.wrapping_add(count as u64));
        Some(chunk)
    }
}

/// Adjacent pages become one range: only whole runs free huge pages of the backing.
fn merge(pages: &mut [u64], ranges: &mut Vec<GuestRange>, counters: &mut QueueCounters) {
    pages.sort_unstable();
    let mut last = None;
    for &page in pages.iter() {
        let start = page * PFN_BYTES;
        if last == Some(page) {
            counters.refused(Refusal::Overlapping, PFN_BYTES);
            continue;
        }
        last = Some(page);
        match ranges.last_mut() {
            Some(range) if range.start.0 + range.bytes == start => range.bytes += PFN_BYTES,
            _ => ranges.push(GuestRange { start: GuestAddress(start), bytes: PFN_BYTES }),
        }
    }
}
