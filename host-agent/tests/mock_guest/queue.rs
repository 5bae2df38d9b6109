//! The driver's side of one virtqueue: rings in guest memory, eventfds to kick and to be called.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VringConfigData};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{USER, WAIT};

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;

/// Address, length, flags; NEXT is added where another follows.
pub type Descriptor = (GuestAddress, u32, u16);

pub struct Queue {
    base: u64,
    pub entries: u16,
    kick: EventFd,
    call: EventFd,
    /// Waits for `call`.
    called: Epoll,
    /// Where the next chain's descriptors go; they are used in order.
    descriptor: u16,
    pub avail: u16,
    used: u16,
}

impl Queue {
    pub fn new(base: u64, entries: u16) -> Self {
        let eventfd = || EventFd::new(EFD_NONBLOCK).unwrap();
        let (call, called) = (eventfd(), Epoll::new().unwrap());
        called.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0)).unwrap();
        Self { base, entries, kick: eventfd(), call, called, descriptor: 0, avail: 0, used: 0 }
    }

    /// As a driver leaves it when it has just been loaded.
    pub fn clear(&mut self, memory: &GuestMemoryMmap) {
        memory.write_slice(&[0; 0x3000], GuestAddress(self.base)).unwrap();
        (self.descriptor, self.avail, self.used) = (0, 0, 0);
    }

    /// What a VMM sends to start queue `index`; the device goes on at chain `next`.
    pub fn start(&mut self, front_end: &mut Frontend, index: usize, next: u16) {
        let config = VringConfigData {
            queue_max_size: self.entries,
            queue_size: self.entries,
            flags: 0,
            desc_table_addr: USER + self.base,
            avail_ring_addr: USER + self.base + AVAIL,
            used_ring_addr: USER + self.base + USED,
            log_addr: None,
        };
        front_end.set_vring_num(index, self.entries).unwrap();
        front_end.set_vring_addr(index, &config).unwrap();
        front_end.set_vring_base(index, next).unwrap();
        front_end.set_vring_kick(index, &self.kick).unwrap();
        front_end.set_vring_call(index, &self.call).unwrap();
        front_end.set_vring_enable(index, true).unwrap();
    }

    /// One chain of these descriptors, which are written as they are.
    pub fn offer(&mut self, memory: &GuestMemoryMmap, chain: &[Descriptor]) {
        let head = self.descriptor;
        for (index, (address, len, flags)) in chain.iter().enumerate() {
            let slot = self.descriptor % self.entries;
            let next = (slot + 1) % self.entries;
            let flags = flags | if index + 1 < chain.len() { NEXT } else { 0 };
            let mut bytes = Vec::new();
            bytes.extend(address.0.to_le_bytes());
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            memory.write_slice(&bytes, GuestAddress(self.base + u64::from(slot) * 16)).unwrap();
            self.descriptor = next;
        }
        self.offer_head(memory, head);
    }

    /// Whatever is in the table from `head` on.
    pub fn offer_head(&mut self, memory: &GuestMemoryMmap, head: u16) {
        let slot = u64::from(self.avail % self.entries);
        memory.write_obj(head, GuestAddress(self.base + AVAIL + 4 + slot * 2)).unwrap();
        self.set_avail(memory, self.avail.wrapping_add(1));
    }

    /// The available index, whatever lies in the ring.
    pub fn set_avail(&mut self, memory: &GuestMemoryMmap, index: u16) {
        self.avail = index;
        memory.store(index, GuestAddress(self.base + AVAIL + 2), Ordering::SeqCst).unwrap();
        self.kick.write(1).unwrap();
    }

    /// The device's index of the used ring.
    pub fn used_index(&self, memory: &GuestMemoryMmap) -> u16 {
        memory.load(GuestAddress(self.base + USED + 2), Ordering::SeqCst).unwrap()
    }

    /// Whether a chain came back.
    pub fn has_used(&self, memory: &GuestMemoryMmap) -> bool {
        self.used_index(memory) != self.used
    }

    /// Head and length of the next chain that came back.
    pub fn take_used(&mut self, memory: &GuestMemoryMmap) -> Option<(u16, u32)> {
        if self.used_index(memory) == self.used {
            return None;
        }
        let entry = self.base + USED + 4 + u64::from(self.used % self.entries) * 8;
        let id: u32 = memory.read_obj(GuestAddress(entry)).unwrap();
        let len: u32 = memory.read_obj(GuestAddress(entry + 4)).unwrap();
        self.used = self.used.wrapping_add(1);
        Some((id as u16, len))
    }

    /// The next chain that comes back, in time.
    pub fn wait_used(&mut self, memory: &GuestMemoryMmap) -> (u16, u32) {
        let deadline = Instant::now() + WAIT;
        loop {
            if let Some(used) = self.take_used(memory) {
                return used;
            }
            assert!(Instant::now() < deadline, "nothing used in {WAIT:?}, index still {}", self.used);
            // Until the device signals, or shortly: the ring is looked at either way.
            if self.call.read().is_err() {
                let _ = self.called.wait(5, &mut [EpollEvent::default()]);
            }
        }
    }
}
