//! A guest and its VMM in one: the front end of the vhost-user device and the driver of its queues.
//!
//! The memory is one memfd in three regions, as QEMU sends it: same descriptor, different offsets, with a hole after the
//! first. The third follows the second without a gap, so that a range can begin in one and end in the other. Used by
//! every test that needs a real device. [`Guest`] has a vsock device, and [`agent`] is what runs inside it; [`balloon`] has
//! a balloon device.

pub mod agent;
pub mod balloon;
pub mod queue;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use queue::{Queue, WRITE};

pub const LOW: u64 = 0;
pub const LOW_SIZE: u64 = 0xa_0000;
pub const HIGH: u64 = 0x10_0000;
pub const HIGH_SIZE: u64 = 0x70_0000;
pub const HIGH_OFFSET: u64 = 0xc_0000;
pub const UPPER: u64 = HIGH + HIGH_SIZE;
pub const UPPER_SIZE: u64 = 0x180_0000;
pub const UPPER_OFFSET: u64 = 0x80_0000;
/// Guest address, size, offset in the file.
pub const REGIONS: [(u64, u64, u64); 3] =
    [(LOW, LOW_SIZE, 0), (HIGH, HIGH_SIZE, HIGH_OFFSET), (UPPER, UPPER_SIZE, UPPER_OFFSET)];
/// From here on guest memory holds no ring and no buffer of the driver.
pub const UNUSED: u64 = 0x40_0000;
/// The front end's own addresses of guest memory, which vhost-user uses for the rings; any number will do.
const USER: u64 = 0x7000_0000_0000;

pub const RX: usize = 0;
pub const TX: usize = 1;
pub const ENTRIES: u16 = 16;
const BUFFER: u64 = 4096;
const RING_BASE: [u64; 2] = [HIGH, HIGH + 0x1_0000];
const BUFFER_BASE: [u64; 2] = [HIGH + 0x10_0000, HIGH + 0x18_0000];

pub const REQUEST: u16 = 1;
pub const RESPONSE: u16 = 2;
pub const RST: u16 = 3;
pub const RW: u16 = 5;
pub const CREDIT_UPDATE: u16 = 6;

/// For what takes milliseconds, on a busy machine.
pub const WAIT: Duration = Duration::from_secs(60);

/// A packet as the driver sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    pub src: (u64, u32),
    pub dst: (u64, u32),
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
    pub payload: Vec<u8>,
}

impl Packet {
    pub fn new(op: u16, guest_port: u32, payload: &[u8]) -> Self {
        Self {
            src: (3, guest_port),
            dst: (2, fpr_protocol::PORT),
            kind: 1,
            op,
            flags: 0,
            buf_alloc: 1 << 18,
            fwd_cnt: 0,
            payload: payload.to_vec(),
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.src.0.to_le_bytes());
        bytes.extend(self.dst.0.to_le_bytes());
        bytes.extend(self.src.1.to_le_bytes());
        bytes.extend(self.dst.1.to_le_bytes());
        bytes.extend((self.payload.len() as u32).to_le_bytes());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.op.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.buf_alloc.to_le_bytes());
        bytes.extend(self.fwd_cnt.to_le_bytes());
        bytes.extend(&self.payload);
        bytes
    }

    fn parse(bytes: &[u8]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(bytes.len(), 44 + u32_at(24) as usize, "used length and header agree");
        Self {
            src: (u64_at(0), u32_at(16)),
            dst: (u64_at(8), u32_at(20)),
            kind: u16_at(28),
            op: u16_at(30),
            flags: u32_at(32),
            buf_alloc: u32_at(36),
            fwd_cnt: u32_at(40),
            payload: bytes[44..].to_vec(),
        }
    }
}

pub struct Guest {
    pub front_end: Frontend,
    pub memory: GuestMemoryMmap,
    pub file: File,
    queues: [Queue; 2],
}

pub fn memfd() -> File {
    let fd = nix::sys::memfd::memfd_create("guest", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(UPPER_OFFSET + UPPER_SIZE).unwrap();
    file
}

pub fn region(file: &File, guest: u64, size: u64, offset: u64) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: guest,
        memory_size: size,
        userspace_addr: USER + guest,
        mmap_offset: offset,
        mmap_handle: file.as_raw_fd(),
    }
}

/// Connects and negotiates everything but the features, which come back.
pub fn negotiate(socket: &Path) -> (Frontend, u64) {
    let mut front_end = Frontend::connect(socket, 8).unwrap();
    front_end.set_owner().unwrap();
    let features = front_end.get_features().unwrap();
    assert_eq!(features & (1 << 29), 0, "EVENT_IDX must not be offered");
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    let offered = front_end.get_protocol_features().unwrap();
    assert!(offered.contains(wanted), "{offered:?}");
    front_end.set_protocol_features(wanted).unwrap();
    front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    (front_end, features)
}

/// The guest's memory as the guest sees it.
pub fn guest_memory(file: &File) -> GuestMemoryMmap {
    let share = |offset| Some(FileOffset::new(file.try_clone().unwrap(), offset));
    let ranges = REGIONS.map(|(guest, size, offset)| (GuestAddress(guest), size as usize, share(offset)));
    GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
}

impl Guest {
    /// Connects and negotiates, as far as a VMM goes before its guest has a driver.
    pub fn connect(socket: &Path) -> Self {
        let (front_end, features) = negotiate(socket);
        front_end.set_features(features).unwrap();
        let file = memfd();
        let memory = guest_memory(&file);
        Self { front_end, memory, file, queues: RING_BASE.map(|base| Queue::new(base, ENTRIES)) }
    }

    pub fn guest_cid(&mut self) -> u64 {
        let (_, bytes) = self.front_end.get_config(0, 8, VhostUserConfigFlags::WRITABLE, &[0; 8]).unwrap();
        u64::from_le_bytes(bytes.try_into().unwrap())
    }

    pub fn set_memory(&mut self) {
        let regions = REGIONS.map(|(guest, size, offset)| region(&self.file, guest, size, offset));
        self.front_end.set_mem_table(&regions).unwrap();
    }

    /// Sets up and enables both queues and fills the receive queue.
    pub fn start(&mut self) {
        for (index, queue) in self.queues.iter_mut().enumerate() {
            queue.clear(&self.memory);
            queue.start(&mut self.front_end, index, 0);
        }
        for _ in 0..ENTRIES {
            self.offer(RX, BUFFER as u32, WRITE);
        }
    }

    /// Backs all memory that rings and buffers use, so that it is constant from here on.
    pub fn allocate_rings(&self) {
        let flags = nix::fcntl::FallocateFlags::empty();
        let [offset, length] = [HIGH_OFFSET, UNUSED - HIGH].map(|bytes| i64::try_from(bytes).unwrap());
        nix::fcntl::fallocate(&self.file, flags, offset, length).unwrap();
    }

    /// GET_VRING_BASE of both queues, as a VMM does at a reset, a stop or its end.
    pub fn stop(&mut self) {
        for queue in [RX, TX] {
            self.front_end.set_vring_enable(queue, false).unwrap();
            self.front_end.get_vring_base(queue).unwrap();
        }
    }

    pub fn send(&mut self, packet: &Packet) {
        self.send_bytes(&packet.to_bytes());
    }

    /// Whatever the bytes are; returns when the device has given the descriptor back.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= BUFFER);
        let address = buffer(TX, self.queues[TX].avail);
        self.memory.write_slice(bytes, address).unwrap();
        self.send_at(address, bytes.len() as u32);
    }

    /// A descriptor of any address and length.
    pub fn send_at(&mut self, address: GuestAddress, len: u32) {
        self.queues[TX].offer(&self.memory, &[(address, len, 0)]);
        self.queues[TX].wait_used(&self.memory);
    }

    pub fn has_packet(&self) -> bool {
        self.queues[RX].has_used(&self.memory)
    }

    pub fn receive(&mut self) -> Packet {
        let (index, len) = self.queues[RX].wait_used(&self.memory);
        let mut bytes = vec![0; len as usize];
        self.memory.read_slice(&mut bytes, buffer(RX, index)).unwrap();
        self.offer(RX, BUFFER as u32, WRITE);
        Packet::parse(&bytes)
    }

    /// Descriptor, avail entry and buffer of the same number; entries are used in order.
    fn offer(&mut self, queue: usize, len: u32, flags: u16) {
        let address = buffer(queue, self.queues[queue].avail);
        self.queues[queue].offer(&self.memory, &[(address, len, flags)]);
    }
}

fn buffer(queue: usize, index: u16) -> GuestAddress {
    GuestAddress(BUFFER_BASE[queue] + u64::from(index % ENTRIES) * BUFFER)
}
