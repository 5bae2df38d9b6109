#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_possible_truncation)]

use std::sync::Mutex;

use super::*;
use crate::device::serve::Control;
use crate::device::vsock::muxer::Muxer;
use crate::device::vsock::packet::{HOST_CID, Operation, TYPE_STREAM};
use proptest::prelude::*;
use tokio::sync::mpsc;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use vm_memory::{Bytes, GuestAddress as Address};

const PORT: u32 = 0x66_7072;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const SIZE: u64 = 0x20_0000;
const RX_RING: u64 = 0;
const TX_RING: u64 = 0x1_0000;
const BUFFERS: u64 = 0x10_0000;
const ENTRIES: u16 = 16;

/// Address, length, flags, next.
type Raw = (u64, u32, u16, u16);

/// A backend whose queues lie in memory that the test plays the driver of.
struct Rig {
    backend: VsockBackend,
    events: mpsc::Receiver<DeviceEvent>,
    memory: &'static GuestMemoryMmap,
    /// The driver's side of the rx and the tx queue.
    driver: [MockSplitQueue<'static, GuestMemoryMmap>; 2],
    vrings: Vec<VringMutex>,
}

impl Rig {
    fn new() -> Self {
        // The mock borrows its memory; a test process can afford never to free it.
        let memory: &'static GuestMemoryMmap =
            Box::leak(Box::new(GuestMemoryMmap::from_ranges(&[(Address(0), SIZE as usize)]).unwrap()));
        let atomic = GuestMemoryAtomic::new(memory.clone());
        let shared = Arc::new(Shared {
            control: Arc::new(Control::new("test".into()).unwrap()),
            rings: Arc::default(),
            guest_cid: 3,
            muxer: Mutex::new(Muxer::new(3, PORT)),
        });
        let (sender, events) = mpsc::channel(1000);
        let vrings: Vec<_> = (0..QUEUES).map(|_| VringMutex::new(atomic.clone(), ENTRIES).unwrap()).collect();
        let driver = [RX_RING, TX_RING].map(|base| MockSplitQueue::create(memory, Address(base), ENTRIES));
        for (vring, mock) in vrings.iter().zip(&driver) {
            vring.set_queue_size(ENTRIES);
            let [desc, avail, used] = [mock.desc_table_addr(), mock.avail_addr(), mock.used_addr()];
            vring.set_queue_info(desc.0, avail.0, used.0).unwrap();
            vring.set_queue_ready(true);
            vring.set_enabled(true);
        }
        Self { backend: VsockBackend::new(shared, Events::new(sender), atomic), events, memory, driver, vrings }
    }

    /// Puts chains into a queue, `descriptors` as they are from entry 0 on, and serves both queues.
    fn offer(&mut self, queue: u16, descriptors: &[Raw]) {
        let raw: Vec<_> = descriptors
            .iter()
            .map(|&(addr, len, flags, next)| RawDescriptor::from(Descriptor::new(addr, len, flags, next)))
            .collect();
        self.driver[usize::from(queue)].add_desc_chains(&raw, 0).unwrap();
        self.serve();
    }

    fn serve(&mut self) {
        self.backend.handle_event(TX, EventSet::IN, &self.vrings, 0).unwrap();
    }

    fn used(&self, queue: u16) -> Vec<(u32, u32)> {
        let used = self.driver[usize::from(queue)].used();
        let element = |i| used.ring().ref_at(usize::from(i)).unwrap().load();
        (0..u16::from_le(used.idx().load())).map(|i| (element(i).id(), element(i).len())).collect()
    }

    fn refused(&self, fault: Fault) -> u64 {
        self.backend.shared.muxer().counters().refused(fault)
    }

    fn write(&self, at: u64, header: &Header, payload: &[u8]) {
        self.memory.write_slice(&header.to_bytes(), Address(at)).unwrap();
        self.memory.write_slice(payload, Address(at + HEADER_LEN as u64)).unwrap();
    }
}

fn packet(op: Operation, len: u32) -> Header {
    Header {
        src_cid: 3,
        dst_cid: HOST_CID,
        src_port: 1023,
        dst_port: PORT,
        len,
        kind: TYPE_STREAM,
        op: op as u16,
        buf_alloc: 1 << 16,
        ..Header::default()
    }
}

#[test]
fn hostile_chains_go_back_and_are_counted() {
    let cases: &[(&str, &[Raw], Fault)] = &[
        ("header outside of memory", &[(SIZE, 44, 0, 0)], Fault::BadDescriptor),
        ("header across the end of memory", &[(SIZE - 10, 44, 0, 0)], Fault::BadDescriptor),
        ("address overflow", &[(u64::MAX - 3, 44, 0, 0)], Fault::BadDescriptor),
        ("huge length", &[(BUFFERS, u32::MAX, 0, 0)], Fault::BadDescriptor),
        ("short header", &[(BUFFERS, 43, 0, 0)], Fault::BadLength),
        ("empty descriptor", &[(BUFFERS, 0, 0, 0)], Fault::BadLength),
        ("only writable", &[(BUFFERS, 44, WRITE, 0)], Fault::BadLength),
        ("next out of the table", &[(BUFFERS, 4, NEXT, 500)], Fault::BadLength),
        ("indirect without the feature", &[(SIZE, 16, INDIRECT, 0)], Fault::BadLength),
        ("payload missing", &[(BUFFERS, 44, 0, 0)], Fault::BadLength),
        ("payload short", &[(BUFFERS, 44, NEXT, 1), (BUFFERS + 44, 99, 0, 0)], Fault::BadLength),
    ];
    for (name, descriptors, fault) in cases {
        let mut rig = Rig::new();
        rig.write(BUFFERS, &packet(Operation::Rw, 100), &[0; 200]);

        rig.offer(TX, descriptors);

        assert_eq!(rig.used(TX), [(0, 0)], "{name}: goes back once");
        assert_eq!(rig.refused(*fault), 1, "{name}");
        assert!(rig.events.try_recv().is_err(), "{name}");
    }
}

#[test]
fn a_chain_that_loops_ends() {
    let mut rig = Rig::new();
    rig.write(BUFFERS, &packet(Operation::Rw, 65_536), &[]);
    rig.offer(TX, &[(BUFFERS, 44, NEXT, 0)]);
    assert_eq!(rig.used(TX).len(), 1);
}

#[test]
fn a_head_outside_of_the_ring_is_counted_and_the_rest_is_served() {
    let mut rig = Rig::new();
    let avail = rig.driver[usize::from(TX)].avail_addr().0;
    rig.memory.write_slice(&[1, 0, 0x34, 0x12, 0, 0], Address(avail + 2)).unwrap();
    rig.serve();
    assert!(rig.refused(Fault::BadDescriptor) >= 1);

    rig.write(BUFFERS, &packet(Operation::Request, 0), &[]);
    rig.offer(TX, &[(BUFFERS, 44, 0, 0)]);
    assert!(matches!(rig.events.try_recv(), Ok(DeviceEvent::Connected { .. })));
}

#[test]
fn an_index_that_jumps_stops_nobody_but_the_guest() {
    let mut rig = Rig::new();
    let avail = rig.driver[usize::from(TX)].avail_addr().0;
    rig.memory.write_obj(5000_u16, Address(avail + 2)).unwrap();
    rig.serve();
    assert_eq!(rig.refused(Fault::BadDescriptor), 1);
    assert_eq!(rig.used(TX), []);
}

#[test]
fn a_payload_in_fragments_arrives_whole() {
    let mut rig = Rig::new();
    rig.write(BUFFERS, &packet(Operation::Request, 0), &[]);
    rig.write(BUFFERS + 0x1000, &packet(Operation::Rw, 6), b"abXXcdXXef");
    let data = BUFFERS + 0x1000 + 44;
    rig.offer(
        TX,
        &[
            (BUFFERS, 44, 0, 0),
            (BUFFERS + 0x1000, 44, NEXT, 2),
            (data, 2, NEXT, 3),
            (data + 4, 2, NEXT, 4),
            (data + 8, 2, 0, 0),
        ],
    );
    assert!(matches!(rig.events.try_recv(), Ok(DeviceEvent::Connected { .. })));
    let Ok(DeviceEvent::Data { bytes, .. }) = rig.events.try_recv() else { panic!("no data") };
    assert_eq!(bytes, b"abcdef");
}

#[test]
fn receive_buffers_that_cannot_take_a_packet_go_back_empty() {
    let mut rig = Rig::new();
    rig.write(BUFFERS, &packet(Operation::Request, 0), &[]);
    rig.offer(TX, &[(BUFFERS, 44, 0, 0)]);

    let bad: &[Raw] = &[(BUFFERS, 43, WRITE, 0), (BUFFERS, 44, 0, 0), (SIZE, 100, WRITE, 0)];
    let good = (BUFFERS + 0x2000, 4096, WRITE, 0);
    rig.offer(RX, &[bad, &[good]].concat());

    assert_eq!(rig.used(RX), [(0, 0), (1, 0), (2, 0), (3, 44)]);
    let mut bytes = [0; HEADER_LEN];
    rig.memory.read_slice(&mut bytes, Address(good.0)).unwrap();
    assert_eq!(Header::parse(&bytes).op, Operation::Response as u16);
}

#[test]
fn a_stopped_queue_is_not_touched() {
    let mut rig = Rig::new();
    rig.vrings[usize::from(TX)].set_queue_ready(false);
    rig.write(BUFFERS, &packet(Operation::Request, 0), &[]);
    rig.offer(TX, &[(BUFFERS, 44, 0, 0)]);
    assert_eq!(rig.used(TX), []);
    assert!(rig.events.try_recv().is_err());
}

#[test]
fn the_config_space_is_the_cid_and_nothing_more() {
    let rig = Rig::new();
    assert_eq!(rig.backend.get_config(0, 8), [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.backend.get_config(4, 4), [0, 0, 0, 0]);
    for (offset, size) in [(0, 9), (8, 1), (u32::MAX, u32::MAX)] {
        assert!(rig.backend.get_config(offset, size).is_empty(), "{offset} {size}");
    }
}

#[test]
fn a_stop_waits_for_the_owner() {
    let mut rig = Rig::new();
    let (backend, mut events) = (rig.backend, rig.events);
    rig.vrings.clear();
    let stopping = std::thread::spawn(move || {
        let mut backend = backend;
        backend.stop_vring(0)
    });
    let Some(DeviceEvent::Stopped { done }) = events.blocking_recv() else { panic!("stopped") };
    assert!(!stopping.is_finished());
    done.signal();
    stopping.join().unwrap().unwrap();
}

#[test]
fn an_owner_that_is_gone_holds_nothing_up() {
    let mut rig = Rig::new();
    drop(rig.events);
    rig.backend.stop_vring(0).unwrap();
    rig.backend.reset_device();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    /// Any descriptor table: every chain the driver offers comes back exactly once, on both queues.
    #[test]
    fn every_chain_comes_back(
        descriptors in proptest::collection::vec((0..SIZE + 0x1000, 0..0x2_0000_u32, 0..8_u16, 0..20_u16), 1..16),
        seed in proptest::collection::vec(any::<u8>(), 512),
        rx in any::<bool>(),
    ) {
        let mut rig = Rig::new();
        rig.memory.write_slice(&seed, Address(BUFFERS)).unwrap();
        rig.write(BUFFERS, &packet(Operation::Request, 0), &[]);
        if rx {
            rig.offer(TX, &[(BUFFERS, 44, 0, 0)]);
        }
        let ring = if rx { RX } else { TX };
        // Buffers near the rings would let the device itself rewrite them; that is legal but proves nothing here.
        let descriptors: Vec<_> = descriptors.iter().map(|&(a, l, f, n)| (BUFFERS + a, l, f, n)).collect();
        let heads = 1 + descriptors.windows(2).filter(|pair| pair[0].2 & NEXT == 0).count();
        rig.offer(ring, &descriptors);
        // A receive buffer stays with the device until there is something to put into it.
        if rx {
            prop_assert!(!rig.used(ring).is_empty() && rig.used(ring).len() <= heads);
        } else {
            prop_assert_eq!(rig.used(ring).len(), heads);
        }
    }
}
