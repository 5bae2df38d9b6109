//! What the core has to do, written down as simply as possible: byte by byte, from the specification.
//!
//! Knows virtio 1.2 (2.7, split virtqueues; 5.5.6, the balloon) and the documented rules of
//! `fpr_host_agent::reporting`, shares no code with it but the words of its results.

use fpr_host_agent::reporting::{MAX_CHAINS_PER_CALL, MAX_RANGES, Processed, QueueCounters, QueueFault, Source};
use fpr_protocol::Refusal;

pub(crate) const PAGE: u64 = 4096;
/// First address and bytes of the guest's regions: two that touch, a gap, one more.
pub(crate) const REGIONS: [(u64, u64); 3] = [(0, 16 * PAGE), (16 * PAGE, 8 * PAGE), (32 * PAGE, 8 * PAGE)];

/// A descriptor: address, length, flags, next.
type Descriptor = (u64, u32, u16, u16);
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Guest memory and the device's side of one queue.
pub(crate) struct Model {
    source: Source,
    pub(crate) size: u16,
    pub(crate) table: u64,
    pub(crate) available: u64,
    used: u64,
    next_available: u16,
    next_used: u16,
    pub(crate) gated: bool,
    pub(crate) counters: QueueCounters,
    memory: Vec<Vec<u8>>,
}

impl Model {
    pub(crate) fn new(source: Source, size: u16, table: u64, available: u64, used: u64) -> Self {
        let memory = REGIONS.iter().map(|(_, bytes)| vec![0; *bytes as usize]).collect();
        let counters = QueueCounters::default();
        Self { source, size, table, available, used, next_available: 0, next_used: 0, gated: false, counters, memory }
    }

    /// Region and offset of an address.
    fn place(at: u64) -> Option<(usize, usize)> {
        let region = REGIONS.iter().position(|(start, bytes)| (*start..start + bytes).contains(&at))?;
        Some((region, (at - REGIONS[region].0) as usize))
    }

    /// Regions are whole pages, so one look per page is enough.
    fn is_memory(start: u64, bytes: u64) -> bool {
        let Some(end) = start.checked_add(bytes) else { return false };
        let mut pages = (start - start % PAGE..end).step_by(PAGE as usize);
        pages.all(|page| Self::place(page).is_some())
    }

    fn bytes<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        for (i, byte) in bytes.iter_mut().enumerate() {
            let (region, offset) = Self::place(at.checked_add(i as u64)?)?;
            *byte = self.memory[region][offset];
        }
        Some(bytes)
    }

    pub(crate) fn load(&self, at: u64) -> Option<u16> {
        self.bytes(at).map(u16::from_le_bytes)
    }

    /// All or nothing.
    pub(crate) fn store(&mut self, at: u64, bytes: &[u8]) -> bool {
        let memory = Self::is_memory(at, bytes.len() as u64);
        if let (true, Some((region, offset))) = (memory, Self::place(at)) {
            let (first, rest) = bytes.split_at(bytes.len().min(self.memory[region].len() - offset));
            self.memory[region][offset..offset + first.len()].copy_from_slice(first);
            if !rest.is_empty() {
                self.store(at + first.len() as u64, rest);
            }
        }
        memory
    }

    /// The page of memory at an address.
    pub(crate) fn page(&self, at: u64) -> &[u8] {
        let (region, offset) = Self::place(at).unwrap();
        &self.memory[region][offset..offset + PAGE as usize]
    }

    pub(crate) fn process(&mut self) -> Processed {
        let mut processed = Processed::default();
        let size = u64::from(self.size);
        // Each ring has a u16 for event suppression at its end (2.7.6, 2.7.8).
        let rings = [(self.table, 16 * size), (self.available, 6 + 2 * size), (self.used, 6 + 8 * size)];
        if rings.iter().any(|(start, bytes)| !Self::is_memory(*start, *bytes)) {
            return Processed { fault: Some(QueueFault::NotUsable), ..processed };
        }
        loop {
            let (index, next) = (self.load(self.available + 2).unwrap(), self.next_available);
            if index.wrapping_sub(next) > self.size {
                let fault = QueueFault::AvailIndex { index, next, size: self.size };
                return Processed { fault: Some(fault), ..processed };
            }
            if index == next {
                return processed;
            }
            if processed.chains_returned == MAX_CHAINS_PER_CALL {
                return Processed { more: true, ..processed };
            }
            let head = self.load(self.available + 4 + 2 * u64::from(next % self.size)).unwrap();
            self.next_available = next.wrapping_add(1);
            if head >= self.size {
                return Processed { fault: Some(QueueFault::Head { head, size: self.size }), ..processed };
            }
            self.chain(head);
            self.counters.chains += 1;
            let slot = self.used + 4 + 8 * u64::from(self.next_used % self.size);
            // Device-written length 0.
            self.store(slot, &[head.to_le_bytes()[0], head.to_le_bytes()[1], 0, 0, 0, 0, 0, 0]);
            self.next_used = self.next_used.wrapping_add(1);
            self.store(self.used + 2, &self.next_used.to_le_bytes());
            processed.chains_returned += 1;
        }
    }

    fn chain(&mut self, head: u16) {
        let (descriptors, mut whole) = self.walk(head);
        self.counters.descriptors += descriptors.len() as u64;
        let mut ranges = Vec::new();
        match self.source {
            Source::Reported => {
                for (start, bytes, flags, _) in descriptors {
                    let bytes = u64::from(bytes);
                    if flags & WRITE == 0 {
                        self.refuse(Refusal::WrongDirection, bytes);
                    } else if ranges.len() == MAX_RANGES {
                        self.refuse(Refusal::TooManyRanges, bytes);
                    } else {
                        ranges.push((start, bytes));
                    }
                }
            }
            Source::Inflated => whole &= self.page_frame_numbers(descriptors, &mut ranges),
        }
        self.counters.chains_malformed += u64::from(!whole);
        self.drop_ranges(&ranges);
    }

    /// The descriptors of a chain, and whether it has an end (2.7.5).
    fn walk(&self, head: u16) -> (Vec<Descriptor>, bool) {
        let mut found: Vec<Descriptor> = Vec::new();
        let (mut table, mut entries, mut index, mut indirect) =
            (self.table, u64::from(self.size), u64::from(head), false);
        let (mut steps, mut total) = (0, 0);
        loop {
            // A chain of more descriptors than its table has entries is a loop.
            if index >= entries || steps == entries {
                return (found, false);
            }
            let Some(raw) = table.checked_add(16 * index).and_then(|at| self.bytes::<16>(at)) else {
                return (found, false);
            };
            let address = u64::from_le_bytes(raw[0..8].try_into().unwrap());
            let length = u32::from_le_bytes(raw[8..12].try_into().unwrap());
            let flags = u16::from_le_bytes(raw[12..14].try_into().unwrap());
            let next = u16::from_le_bytes(raw[14..16].try_into().unwrap());
            if flags & INDIRECT != 0 {
                if indirect || length % 16 != 0 || length / 16 > 0xffff {
                    return (found, false);
                }
                (table, entries, index, indirect, steps) = (address, u64::from(length / 16), 0, true, 0);
                continue;
            }
            total += u64::from(length);
            if total > u64::from(u32::MAX) {
                return (found, false);
            }
            found.push((address, length, flags, next));
            if flags & NEXT == 0 {
                return (found, true);
            }
            (index, steps) = (next.into(), steps + 1);
        }
    }

    /// Reads the list as a stream; false if it cannot be read to its end or its end is torn.
    fn page_frame_numbers(&mut self, descriptors: Vec<Descriptor>, ranges: &mut Vec<(u64, u64)>) -> bool {
        let (mut pages, mut number, mut readable) = (Vec::new(), Vec::new(), true);
        for (start, bytes, flags, _) in descriptors {
            if flags & WRITE != 0 {
                self.refuse(Refusal::WrongDirection, 0);
                continue;
            }
            for i in 0..u64::from(bytes) {
                if !readable {
                    break;
                }
                if pages.len() == MAX_RANGES {
                    self.refuse(Refusal::TooManyRanges, (u64::from(bytes) - i) / 4 * PAGE);
                    break;
                }
                let Some([byte]) = start.checked_add(i).and_then(|at| self.bytes::<1>(at)) else {
                    self.refuse(Refusal::OutsideMemory, 0);
                    readable = false;
                    break;
                };
                number.push(byte);
                if let [a, b, c, d] = number[..] {
                    pages.push(u64::from(u32::from_le_bytes([a, b, c, d])));
                    number.clear();
                }
            }
        }
        pages.sort_unstable();
        for (i, page) in pages.iter().enumerate() {
            if i > 0 && pages[i - 1] == *page {
                self.refuse(Refusal::Overlapping, PAGE);
            } else if i > 0 && pages[i - 1] + 1 == *page {
                ranges.last_mut().unwrap().1 += PAGE;
            } else {
                ranges.push((page * PAGE, PAGE));
            }
        }
        readable && number.is_empty()
    }

    fn drop_ranges(&mut self, ranges: &[(u64, u64)]) {
        // Which bytes of guest memory may be dropped, and what became of each range.
        let mut named: Vec<Vec<bool>> = REGIONS.iter().map(|(_, bytes)| vec![false; *bytes as usize]).collect();
        let mut accepted = Vec::new();
        for &(start, bytes) in ranges {
            let refusal = if self.gated {
                Some(Refusal::Gated)
            } else if bytes == 0 {
                Some(Refusal::Empty)
            } else if start.checked_add(bytes).is_none() {
                Some(Refusal::Overflow)
            } else if accepted.iter().any(|&(other, length)| start < other + length && other < start + bytes) {
                Some(Refusal::Overlapping)
            } else if !Self::is_memory(start, bytes) {
                Some(Refusal::OutsideMemory)
            } else {
                None
            };
            match refusal {
                Some(reason) => self.refuse(reason, bytes),
                None => {
                    accepted.push((start, bytes));
                    for at in start..start + bytes {
                        let (region, offset) = Self::place(at).unwrap();
                        named[region][offset] = true;
                    }
                }
            }
        }
        if accepted.is_empty() {
            return;
        }
        let mut dropped = named;
        for region in &mut dropped {
            for page in region.chunks_mut(PAGE as usize) {
                let whole = page.iter().all(|named| *named);
                page.fill(whole);
            }
        }
        for (start, bytes) in accepted {
            self.counters.ranges += 1;
            self.counters.named_bytes += bytes;
            self.counters.ranges_dropped += 1;
            for at in start..start + bytes {
                let (region, offset) = Self::place(at).unwrap();
                if dropped[region][offset] {
                    self.counters.dropped_bytes += 1;
                    self.memory[region][offset] = 0;
                }
            }
        }
    }

    fn refuse(&mut self, reason: Refusal, bytes: u64) {
        self.counters.ranges += 1;
        self.counters.named_bytes += bytes;
        let refused = self.counters.refused_by_reason.entry(reason).or_default();
        refused.ranges += 1;
        refused.bytes += bytes;
    }
}
