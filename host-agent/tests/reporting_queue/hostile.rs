//! Chains that no driver builds, one by one: each is returned exactly once, counted by name, and harms nobody.

use fpr_host_agent::reporting::{
    Discard, GuestRange, LocalMemory, MAX_CHAINS_PER_CALL, MAX_RANGES, Processed, QueueFault, Refused, ReportingQueue,
    Source,
};
use fpr_protocol::{GuestAddress as Address, Refusal};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::{AvailRing, DescriptorTable, UsedRing};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MIB: u64 = 1 << 20;
/// The rings are below, what is reported is above.
const DATA: u64 = 4 * MIB;
const END: u64 = 8 * MIB;
/// Flags of a descriptor (virtio 1.2, 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn memory() -> GuestMemoryMmap<()> {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), END as usize)]).unwrap();
    memory.write_slice(&vec![0xa5; (END - DATA) as usize], GuestAddress(DATA)).unwrap();
    memory
}

/// Notes what it is asked to drop, and whether the driver still waits then.
struct Witness<'a> {
    memory: &'a GuestMemoryMmap<()>,
    used_index: GuestAddress,
    asked: Vec<(u16, Vec<GuestRange>)>,
    /// Results beyond these are missing.
    results: usize,
}

impl Discard for Witness<'_> {
    fn discard(&mut self, _: Source, ranges: &[GuestRange]) -> Vec<Result<u64, Refusal>> {
        let used: u16 = self.memory.read_obj(self.used_index).unwrap();
        self.asked.push((used, ranges.to_vec()));
        ranges.iter().take(self.results).map(|range| Ok(range.bytes)).collect()
    }
}

/// A queue of a driver that writes what it likes.
struct Driver<'a> {
    table: DescriptorTable<'a, GuestMemoryMmap<()>>,
    avail: AvailRing<'a, GuestMemoryMmap<()>>,
    used: UsedRing<'a, GuestMemoryMmap<()>>,
    memory: &'a GuestMemoryMmap<()>,
    queue: Queue,
    size: u16,
    available: u16,
}

impl<'a> Driver<'a> {
    fn new(memory: &'a GuestMemoryMmap<()>, size: u16) -> Self {
        // Not MockSplitQueue, whose used ring begins inside its available ring.
        let [table, avail, used] = [MIB, 2 * MIB, 2 * MIB + MIB / 2];
        let mut queue = Queue::new(size).unwrap();
        queue.set_desc_table_address(Some(table as u32), None);
        queue.set_avail_ring_address(Some(avail as u32), None);
        queue.set_used_ring_address(Some(used as u32), None);
        queue.set_ready(true);
        Self {
            table: DescriptorTable::new(memory, GuestAddress(table), size),
            avail: AvailRing::new(memory, GuestAddress(avail), size),
            used: UsedRing::new(memory, GuestAddress(used), size),
            memory,
            queue,
            size,
            available: 0,
        }
    }

    fn descriptor(&self, index: u16, address: u64, bytes: u32, flags: u16, next: u16) {
        self.table.store(index, raw(address, bytes, flags, next)).unwrap();
    }

    fn publish(&mut self, head: u16) {
        self.avail.ring().ref_at(usize::from(self.available % self.size)).unwrap().store(head);
        self.available = self.available.wrapping_add(1);
        self.avail.idx().store(self.available);
    }

    /// Heads the device has returned, in order; each must have a length of 0.
    fn returned(&self) -> Vec<u16> {
        let count = self.used.idx().load();
        (0..count)
            .map(|i| {
                let element = self.used.ring().ref_at(usize::from(i % self.size)).unwrap().load();
                assert_eq!(element.len(), 0);
                u16::try_from(element.id()).unwrap()
            })
            .collect()
    }

    fn witness(&self, results: usize) -> Witness<'a> {
        let used_index = GuestAddress(self.queue.used_ring() + 2);
        Witness { memory: self.memory, used_index, asked: Vec::new(), results }
    }
}

fn raw(address: u64, bytes: u32, flags: u16, next: u16) -> RawDescriptor {
    Descriptor::new(address, bytes, flags, next).into()
}

fn next_if(more: bool) -> u16 {
    if more { NEXT } else { 0 }
}

fn range(start: u64, bytes: u64) -> GuestRange {
    GuestRange { start: Address(start), bytes }
}

/// Plays one chain that starts at descriptor 0 and returns what was asked for and the malformed chains counted.
fn ask(memory: &GuestMemoryMmap<()>, source: Source, build: impl FnOnce(&Driver<'_>)) -> (Vec<GuestRange>, u64) {
    let mut driver = Driver::new(memory, 16);
    build(&driver);
    driver.publish(0);
    let mut witness = driver.witness(usize::MAX);
    let mut core = ReportingQueue::new(source);
    let processed = core.process(memory, &mut driver.queue, &mut witness);
    assert_eq!(processed, Processed { chains_returned: 1, more: false, fault: None });
    assert_eq!(driver.returned(), [0]);
    (witness.asked.into_iter().flat_map(|(_, ranges)| ranges).collect(), core.counters().chains_malformed)
}

#[test]
fn each_chain_is_returned_after_its_own_drop() {
    let memory = memory();
    let mut driver = Driver::new(&memory, 16);
    for (head, next) in [(3, 4), (7, 1), (0, 2)] {
        driver.descriptor(head, DATA, 4096, NEXT | WRITE, next);
        driver.descriptor(next, DATA + u64::from(head) * 4096, 4096, WRITE, 0);
        driver.publish(head);
    }
    let mut witness = driver.witness(usize::MAX);
    let mut core = ReportingQueue::new(Source::Reported);
    assert_eq!(core.process(&memory, &mut driver.queue, &mut witness).chains_returned, 3);
    assert_eq!(driver.returned(), [3, 7, 0]);
    let second = |head: u64| vec![range(DATA, 4096), range(DATA + head * 4096, 4096)];
    assert_eq!(witness.asked, [(0, second(3)), (1, second(7)), (2, second(0))]);
    assert_eq!(core.process(&memory, &mut driver.queue, &mut witness), Processed::default());
    assert_eq!(witness.asked.len(), 3);
}

#[test]
fn one_call_is_bounded_and_the_rest_is_not_lost() {
    let memory = memory();
    let mut driver = Driver::new(&memory, 64);
    for head in 0..40 {
        driver.descriptor(head, DATA, 4096, WRITE, 0);
        driver.publish(head);
    }
    let mut core = ReportingQueue::new(Source::Reported);
    let mut witness = driver.witness(usize::MAX);
    let calls: Vec<_> = (0..3).map(|_| core.process(&memory, &mut driver.queue, &mut witness)).collect();
    let call = |chains_returned, more| Processed { chains_returned, more, fault: None };
    assert_eq!(calls, [call(MAX_CHAINS_PER_CALL, true), call(MAX_CHAINS_PER_CALL, true), call(8, false)]);
    assert_eq!(driver.returned(), (0..40).collect::<Vec<_>>());
}

#[test]
fn loops_and_bad_links_end() {
    let memory = memory();
    // 0 -> 1 -> 0: as many descriptors as the queue has.
    let (asked, malformed) = ask(&memory, Source::Reported, |driver| {
        driver.descriptor(0, DATA, 4096, NEXT | WRITE, 1);
        driver.descriptor(1, DATA + 4096, 4096, NEXT | WRITE, 0);
    });
    assert_eq!((asked.len(), malformed), (16, 1));
    // A link out of the table.
    let (asked, malformed) =
        ask(&memory, Source::Reported, |driver| driver.descriptor(0, DATA, 4096, NEXT | WRITE, 16));
    assert_eq!((asked, malformed), (vec![range(DATA, 4096)], 1));
    // Eight blocks of 512 MiB, as arm64 with pages of 64 KiB reports them: more than 2^32 bytes.
    let (asked, malformed) = ask(&memory, Source::Reported, |driver| {
        (0..8).for_each(|i| driver.descriptor(i, u64::from(i) << 29, 1 << 29, next_if(i < 7) | WRITE, i + 1));
    });
    assert_eq!((asked.len(), malformed), (7, 1));
}

#[test]
fn indirect_tables_are_followed_once_and_bounded() {
    let memory = memory();
    let table = 3 * MIB;
    let store =
        |index: u64, descriptor| memory.write_obj::<RawDescriptor>(descriptor, GuestAddress(table + index * 16));
    store(0, raw(DATA, 4096, NEXT | WRITE, 1)).unwrap();
    store(1, raw(DATA + 8192, 4096, WRITE, 0)).unwrap();
    let indirect = |bytes| ask(&memory, Source::Reported, |driver| driver.descriptor(0, table, bytes, INDIRECT, 0));
    assert_eq!(indirect(32), (vec![range(DATA, 4096), range(DATA + 8192, 4096)], 0));
    assert_eq!(indirect(31), (vec![], 1), "not whole descriptors");
    assert_eq!(indirect(16), (vec![range(DATA, 4096)], 1), "a link out of the table");
    assert_eq!(indirect(0), (vec![], 1));
    assert_eq!(indirect(!15), (vec![], 1), "more than 65,535 descriptors");
    store(1, raw(table, 32, INDIRECT, 0)).unwrap();
    assert_eq!(indirect(32), (vec![range(DATA, 4096)], 1), "a table in a table");
    // 65,535 descriptors in a loop.
    store(1, raw(DATA, 0, NEXT | WRITE, 1)).unwrap();
    let (asked, malformed) = indirect(65_535 * 16);
    assert_eq!((asked.len(), malformed), (MAX_RANGES, 1));
}

#[test]
fn thousands_of_descriptors_are_bounded_and_counted() {
    let memory = memory();
    let mut driver = Driver::new(&memory, 8192);
    (0..8192).for_each(|i| driver.descriptor(i, DATA, 16, next_if(i < 8191) | WRITE, i + 1));
    driver.publish(0);
    let mut core = ReportingQueue::new(Source::Reported);
    let mut witness = driver.witness(usize::MAX);
    assert_eq!(core.process(&memory, &mut driver.queue, &mut witness).chains_returned, 1);
    assert_eq!(witness.asked[0].1.len(), MAX_RANGES);
    let counters = core.counters();
    assert_eq!((counters.descriptors, counters.ranges, counters.chains_malformed), (8192, 8192, 0));
    let surplus = 8192 - MAX_RANGES as u64;
    assert_eq!(counters.refused_by_reason[&Refusal::TooManyRanges], Refused { ranges: surplus, bytes: surplus * 16 });
}

#[test]
fn every_refusal_has_its_name() {
    let memory = memory();
    let mut driver = Driver::new(&memory, 16);
    let bad = [
        (DATA, 4096, 0, Refusal::WrongDirection),
        (DATA, 0, WRITE, Refusal::Empty),
        (END, 4096, WRITE, Refusal::OutsideMemory),
        (END - 4096, 8192, WRITE, Refusal::OutsideMemory),
        (1 << 40, u32::MAX - (64 << 10), WRITE, Refusal::OutsideMemory),
        (u64::MAX - 4095, 8192, WRITE, Refusal::Overflow),
        (DATA + 2048, 4096, WRITE, Refusal::Overlapping),
    ];
    // One good one in front.
    driver.descriptor(0, DATA, 8192, NEXT | WRITE, 1);
    for (i, (address, bytes, flags, _)) in (1..).zip(bad) {
        driver.descriptor(i, address, bytes, next_if(i < 7) | flags, i + 1);
    }
    driver.publish(0);
    let mut core = ReportingQueue::new(Source::Reported);
    let mut local = LocalMemory::new(&memory).unwrap();
    assert_eq!(core.process(&memory, &mut driver.queue, &mut local).chains_returned, 1);
    let counters = core.counters();
    assert_eq!((counters.ranges_dropped, counters.dropped_bytes), (1, 8192));
    for (_, _, _, reason) in bad {
        let wanted = bad.iter().filter(|other| other.3 == reason);
        let (ranges, bytes) = (wanted.clone().count() as u64, wanted.map(|other| u64::from(other.1)).sum());
        assert_eq!(counters.refused_by_reason[&reason], Refused { ranges, bytes }, "{reason}");
    }
    let mut seen = vec![0; (END - DATA) as usize];
    memory.read_slice(&mut seen, GuestAddress(DATA)).unwrap();
    assert!(seen[..8192].iter().all(|byte| *byte == 0) && seen[8192..].iter().all(|byte| *byte == 0xa5));
}

#[test]
fn a_broken_ring_is_a_fault_by_name() {
    let memory = memory();
    let mut core = ReportingQueue::new(Source::Reported);
    let fault = |core: &mut ReportingQueue, driver: &mut Driver<'_>| {
        let mut witness = driver.witness(usize::MAX);
        let processed = core.process(&memory, &mut driver.queue, &mut witness);
        (processed.chains_returned, processed.fault)
    };
    let mut driver = Driver::new(&memory, 16);
    driver.descriptor(0, DATA, 4096, WRITE, 0);
    driver.publish(0);
    driver.publish(16);
    assert_eq!(fault(&mut core, &mut driver), (1, Some(QueueFault::Head { head: 16, size: 16 })));

    let mut driver = Driver::new(&memory, 16);
    for index in [17, 0x8000, 0xffff] {
        driver.avail.idx().store(index);
        assert_eq!(fault(&mut core, &mut driver), (0, Some(QueueFault::AvailIndex { index, next: 0, size: 16 })));
    }
    driver.queue.set_used_ring_address(Some(END as u32 - 64), None);
    assert_eq!(fault(&mut core, &mut driver), (0, Some(QueueFault::NotUsable)));
    driver.queue.set_ready(false);
    assert_eq!(fault(&mut core, &mut driver), (0, Some(QueueFault::NotUsable)));
}

#[test]
fn a_discard_that_answers_too_little_dropped_nothing() {
    let memory = memory();
    let mut driver = Driver::new(&memory, 16);
    driver.descriptor(0, DATA, 4096, NEXT | WRITE, 1);
    driver.descriptor(1, DATA + 4096, 4096, WRITE, 0);
    driver.publish(0);
    let mut core = ReportingQueue::new(Source::Reported);
    let mut witness = driver.witness(1);
    assert_eq!(core.process(&memory, &mut driver.queue, &mut witness).chains_returned, 1);
    assert_eq!(core.counters().dropped_bytes, 4096);
    assert_eq!(core.counters().refused_by_reason[&Refusal::Cancelled], Refused { ranges: 1, bytes: 4096 });
    let json = serde_json::to_value(core.counters()).unwrap();
    assert_eq!(json["refused_by_reason"]["cancelled"]["bytes"], 4096);
}

#[test]
fn page_frame_numbers_become_ranges_however_they_are_cut() {
    let memory = memory();
    let list = 3 * MIB;
    // Out of order, as a balloon allocates them; one twice; 1026 is alone.
    let numbers = [1028u32, 1030, 1029, 1026, 1029];
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    memory.write_slice(&bytes, GuestAddress(list)).unwrap();
    let wanted = vec![range(1026 * 4096, 4096), range(1028 * 4096, 3 * 4096)];
    let whole = ask(&memory, Source::Inflated, |driver| driver.descriptor(0, list, 20, 0, 0));
    assert_eq!(whole, (wanted.clone(), 0));
    let cut = ask(&memory, Source::Inflated, |driver| {
        driver.descriptor(0, list, 7, NEXT, 1);
        // Not a list: the device may write here, not read.
        driver.descriptor(1, DATA, 64, NEXT | WRITE, 2);
        driver.descriptor(2, list + 7, 13, 0, 0);
    });
    assert_eq!(cut, (wanted, 0));
    let torn = ask(&memory, Source::Inflated, |driver| driver.descriptor(0, list, 6, 0, 0));
    assert_eq!(torn, (vec![range(1028 * 4096, 4096)], 1));
    // A list that leaves memory; what precedes its end counts.
    memory.write_slice(&1024u32.to_le_bytes(), GuestAddress(END - 4)).unwrap();
    let outside = ask(&memory, Source::Inflated, |driver| driver.descriptor(0, END - 4, u32::MAX, 0, 0));
    assert_eq!(outside, (vec![range(1024 * 4096, 4096)], 1));
    // 512 KiB of numbers.
    let long = ask(&memory, Source::Inflated, |driver| driver.descriptor(0, DATA, 512 << 10, 0, 0));
    assert_eq!(long, (vec![range(0xa5a5_a5a5 * 4096, 4096)], 0));
}
