//! The guest of a balloon device: its VMM, and a driver that does what Linux does, or anything else.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;

use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::queue::{Queue, WRITE};
use super::{HIGH, REGIONS, guest_memory, memfd, negotiate, region};

pub const STATS_VQ: u64 = 1 << 1;
pub const PAGE_POISON: u64 = 1 << 4;
pub const REPORTING: u64 = 1 << 5;
/// Transport features: VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES.
const TRANSPORT: u64 = (1 << 32) | (1 << 30);

pub const INFLATE: usize = 0;
pub const DEFLATE: usize = 1;
pub const STATS: usize = 2;
const QUEUES: u64 = 5;
const ENTRIES: u16 = 64;
/// Where the driver keeps what it sends in buffers of its own, away from those of a vsock device.
pub const BUFFER: GuestAddress = GuestAddress(HIGH + 0x2f_0000);

pub struct Balloon {
    pub front_end: Frontend,
    pub memory: GuestMemoryMmap,
    pub file: File,
    pub queues: Vec<Queue>,
    features: u64,
}

impl Balloon {
    /// Connects for a guest in `file` whose driver wants `features` of the device, as far as a VMM goes before its
    /// guest has a driver.
    pub fn connect(socket: &Path, file: File, features: u64) -> Self {
        let (front_end, offered) = negotiate(socket);
        assert_eq!(offered & features, features, "offered {offered:#x}");
        let memory = guest_memory(&file);
        let queues = (0..QUEUES).map(|queue| Queue::new(HIGH + queue * 0x1_0000, ENTRIES)).collect();
        Self { front_end, memory, file, queues, features: features | TRANSPORT }
    }

    /// Takes the place of one whose connection ends.
    pub fn unconnected() -> Self {
        let (stream, _) = UnixStream::pair().unwrap();
        let file = memfd();
        let memory = guest_memory(&file);
        Self { front_end: Frontend::from_stream(stream, QUEUES), memory, file, queues: Vec::new(), features: 0 }
    }

    pub fn write_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        let written = self.front_end.set_config(offset, VhostUserConfigFlags::WRITABLE, bytes);
        written.map_err(|error| error.to_string())
    }

    pub fn read_config(&mut self, offset: u32, size: u32) -> Vec<u8> {
        let buffer = vec![0; size as usize];
        self.front_end.get_config(offset, size, VhostUserConfigFlags::WRITABLE, &buffer).unwrap().1
    }

    /// DRIVER_OK: features, memory, then the queues, each where its used index says, as QEMU does after it has lost a
    /// back end.
    pub fn start(&mut self, queues: &[usize]) {
        self.front_end.set_features(self.features).unwrap();
        self.set_memory();
        for &queue in queues {
            let next = self.queues[queue].used_index(&self.memory);
            self.queues[queue].start(&mut self.front_end, queue, next);
        }
    }

    pub fn set_memory(&mut self) {
        let regions = REGIONS.map(|(guest, size, offset)| region(&self.file, guest, size, offset));
        self.front_end.set_mem_table(&regions).unwrap();
    }

    /// `virtballoon_free_page_report`: one writable buffer per range.
    pub fn report(&mut self, queue: usize, ranges: &[(u64, u32)]) {
        let chain: Vec<_> = ranges.iter().map(|&(start, bytes)| (GuestAddress(start), bytes, WRITE)).collect();
        self.queues[queue].offer(&self.memory, &chain);
    }

    /// `tell_host`: one readable buffer of page frame numbers.
    pub fn tell(&mut self, queue: usize, pfns: &[u32]) {
        let bytes: Vec<u8> = pfns.iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
        self.send(queue, &bytes);
    }

    /// One readable buffer.
    pub fn send(&mut self, queue: usize, bytes: &[u8]) {
        self.memory.write_slice(bytes, BUFFER).unwrap();
        self.queues[queue].offer(&self.memory, &[(BUFFER, bytes.len() as u32, 0)]);
    }

    pub fn wait_returned(&mut self, queue: usize) {
        let (_, len) = self.queues[queue].wait_used(&self.memory);
        assert_eq!(len, 0, "the device writes nothing into a buffer");
    }
}
