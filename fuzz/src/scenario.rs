//! One run of the reporting-queue core against a hostile guest, decoded from bytes and judged by a naive model.
//!
//! Used by the fuzz target `reporting_queue` and by the ordinary test `host-agent/tests/reporting_queue`, which replays
//! the committed corpus and random bytes. Any bytes are a scenario: a set-up, then operations of a guest that writes
//! descriptors, tables, lists of page frame numbers and garbage, and rings the doorbell. After every doorbell all guest
//! memory, the counters and the outcome must be what [`Model`] says, and the mappings between and around the guest's
//! regions must hold their pattern.

use super::model::{Model, PAGE, REGIONS};
use fpr_host_agent::reporting::{Gates, LocalMemory, ReportingQueue, Source};
use fpr_protocol::Gate;
use std::sync::Arc;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion, VolatileMemory};

/// No run takes more operations, so that a fuzzer does not grow inputs for nothing.
const MAX_OPERATIONS: usize = 256;
const CANARY: u8 = 0xc5;

/// Plays the scenario. Panics if the core does anything but what the model does.
pub(crate) fn play(input: &[u8]) {
    let mut input = Input(input);
    let source = if input.byte() % 4 == 0 { Source::Inflated } else { Source::Reported };
    let mut guest = Guest::new(source, &mut input);
    for _ in 0..MAX_OPERATIONS {
        if input.0.is_empty() {
            break;
        }
        guest.operation(&mut input);
    }
    guest.doorbell();
}

/// Bytes that are read to their end, and zeros after it.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn number(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    /// Mostly in or near guest memory, on or near a page boundary.
    fn address(&mut self) -> u64 {
        let page = u64::from(self.byte());
        let offset = self.pick(&[0, 0, 0, 0, 1, 8, 2048, PAGE - 1]);
        match page {
            250.. => u64::MAX - (page - 250) * PAGE - offset,
            // Regions and gaps together are 40 pages.
            _ => page % 42 * PAGE + offset,
        }
    }

    fn length(&mut self) -> u32 {
        let page = PAGE as u32;
        match self.byte() {
            pages @ 0..128 => u32::from(pages % 16) * page,
            128..160 => self.byte().into(),
            160..192 => page * 4 - 1 + u32::from(self.byte() % 3),
            192..224 => u32::from(self.number()) * 16,
            _ => self.pick(&[u32::MAX, 1 << 31, u32::MAX - page + 1, 16 * 65536, 1 << 20]),
        }
    }

    /// NEXT 1, WRITE 2, INDIRECT 4 (virtio 1.2, 2.7.5): often those that make sense.
    fn flags(&mut self) -> u16 {
        self.pick(&[2, 3, 3, 3, 1, 0, 4, 5, 6, 7, 2, 3, 0xffff])
    }
}

/// The machine: real memory and the real core on one side, the model on the other.
struct Guest {
    memory: GuestMemoryMmap<()>,
    canaries: Vec<MmapRegion<()>>,
    discard: LocalMemory,
    gates: Gates,
    queue: Queue,
    core: ReportingQueue,
    model: Model,
}

impl Guest {
    fn new(source: Source, input: &mut Input<'_>) -> Self {
        let canary = || {
            let mapping = MmapRegion::new(4 * PAGE as usize).unwrap();
            mapping.as_volatile_slice().write_slice(&[CANARY; 4 * PAGE as usize], 0).unwrap();
            mapping
        };
        // The kernel puts new mappings next to each other, so canaries and regions alternate in this process.
        let mut canaries = vec![canary()];
        let mut regions = Vec::new();
        for (start, bytes) in REGIONS {
            let mapping = Arc::new(MmapRegion::new(bytes as usize).unwrap());
            regions.push(GuestRegionMmap::with_arc(mapping, GuestAddress(start)).unwrap());
            canaries.push(canary());
        }
        let memory = GuestMemoryMmap::from_regions(regions).unwrap();
        let discard = LocalMemory::new(&memory).unwrap();
        let size = 1 << (input.byte() % 5);
        // In order, overlapping, across a border of regions, at a gap, outside.
        let placements = [
            (PAGE, 2 * PAGE, 3 * PAGE),
            (PAGE, PAGE + 256, PAGE + 512),
            (PAGE, PAGE, PAGE),
            (16 * PAGE - 16, 16 * PAGE - 4, 16 * PAGE - 8),
            (24 * PAGE - 16, 2 * PAGE, 3 * PAGE),
            (2 * PAGE, 3 * PAGE, 1 << 40),
        ];
        let (table, available, used) = placements[usize::from(input.byte().saturating_sub(200)) % placements.len()];
        let mut queue = Queue::new(size).unwrap();
        let halves = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
        queue.set_desc_table_address(halves(table).0, halves(table).1);
        queue.set_avail_ring_address(halves(available).0, halves(available).1);
        queue.set_used_ring_address(halves(used).0, halves(used).1);
        queue.set_ready(true);
        let model = Model::new(source, size, table, available, used);
        let mut guest =
            Self { memory, canaries, gates: discard.gates(), discard, queue, core: ReportingQueue::new(source), model };
        guest.paint();
        guest
    }

    fn operation(&mut self, input: &mut Input<'_>) {
        let size = self.model.size;
        match input.byte() % 16 {
            0..=4 => {
                let index = u16::from(input.byte()) % size;
                self.descriptor(self.model.table, index, input);
            }
            5 | 6 => {
                // An entry of an indirect table, wherever one may be.
                let (table, index) = (input.address(), u16::from(input.byte() % 32));
                self.descriptor(table, index, input);
            }
            7..=9 => self.publish(u16::from(input.byte()) % size),
            10 => {
                let head = input.number();
                self.publish(head);
            }
            11 => {
                let index = input.number();
                self.write(self.model.available + 2, &index.to_le_bytes());
            }
            12 => {
                let (mut at, count, step) = (input.address(), input.byte(), input.pick(&[1u32, 1, 2, 0, u32::MAX]));
                let mut page = u32::from(input.byte());
                for _ in 0..u32::from(count) * 8 {
                    self.write(at, &page.to_le_bytes());
                    (at, page) = (at.wrapping_add(4), page.wrapping_add(step));
                }
            }
            13 => match input.byte() % 4 {
                0 => self.gate(Gate::Operator, true),
                1 => self.gate(Gate::WriteOnFree, true),
                2 => self.gate(Gate::Operator, false),
                _ => self.paint(),
            },
            14 => {
                let (at, value) = (input.address(), input.byte());
                self.write(at, &[value]);
            }
            _ => self.doorbell(),
        }
    }

    fn descriptor(&mut self, table: u64, index: u16, input: &mut Input<'_>) {
        let mut bytes = Vec::from(input.address().to_le_bytes());
        bytes.extend(input.length().to_le_bytes());
        bytes.extend(input.flags().to_le_bytes());
        bytes.extend((u16::from(input.byte()) % 20).to_le_bytes());
        self.write(table.wrapping_add(u64::from(index) * 16), &bytes);
    }

    /// Makes a chain available as a driver does.
    fn publish(&mut self, head: u16) {
        let Some(index) = self.model.load(self.model.available + 2) else { return };
        let slot = self.model.available + 4 + u64::from(index % self.model.size) * 2;
        self.write(slot, &head.to_le_bytes());
        self.write(self.model.available + 2, &index.wrapping_add(1).to_le_bytes());
    }

    /// Fills what is no ring, so that a drop can be seen.
    fn paint(&mut self) {
        for (start, bytes) in REGIONS {
            let first = if start == 0 { 4 } else { 0 };
            for page in first..bytes / PAGE {
                let pattern = (start / PAGE + page + 1) as u8;
                self.write(start + page * PAGE, &[pattern; PAGE as usize]);
            }
        }
    }

    /// Writes to both sides. What is not memory stays away on both.
    fn write(&mut self, at: u64, bytes: &[u8]) {
        if self.model.store(at, bytes) {
            self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        }
    }

    fn gate(&mut self, gate: Gate, close: bool) {
        if close {
            self.gates.close(gate, "test");
        } else {
            self.gates.open(gate);
        }
        self.model.gated = self.gates.closed().keys().any(|gate| *gate != Gate::WriteOnFree);
    }

    fn doorbell(&mut self) {
        let got = self.core.process(&self.memory, &mut self.queue, &mut self.discard);
        let wanted = self.model.process();
        assert_eq!(got, wanted);
        assert_eq!(*self.core.counters(), self.model.counters);
        let mut seen = [0; PAGE as usize];
        for (start, bytes) in REGIONS {
            for at in (start..start + bytes).step_by(PAGE as usize) {
                self.memory.read_slice(&mut seen, GuestAddress(at)).unwrap();
                assert!(self.model.page(at) == seen, "page {at:#x} differs from the model");
            }
        }
        for canary in &self.canaries {
            let mut seen = [0; 4 * PAGE as usize];
            canary.as_volatile_slice().read_slice(&mut seen, 0).unwrap();
            assert!(seen == [CANARY; 4 * PAGE as usize], "memory that is not the guest's was touched");
        }
    }
}
