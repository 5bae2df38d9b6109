//! The balloon device spoken to over real vhost-user by a front end in the test: socket, memfd, queues, eventfds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation, unreachable_pub)]

mod config;
mod front_ends;
mod hostile;
#[allow(dead_code)] // Each test uses another part of it.
#[path = "../mock_guest/mod.rs"]
mod mock_guest;
#[path = "../mock_owner/mod.rs"]
mod mock_owner;
mod owner;
mod pace;
mod reports;
mod statistics;
mod stops;

use std::os::unix::fs::MetadataExt;

use fpr_host_agent::device::DeviceEvent;
use fpr_host_agent::reporting::GuestRange;
use mock_guest::balloon::Balloon;
use mock_guest::{UPPER, memfd};
use owner::Owner;
use vm_memory::{Bytes, GuestAddress};

const MIB: u64 = 1 << 20;
/// Two ranges that no ring and no buffer is in.
const RANGES: [(u64, u32); 2] = [(0x40_0000, 2 << 20), (UPPER + (4 << 20), 4 << 20)];

struct Rig {
    dir: tempfile::TempDir,
    owner: Owner,
    guest: Balloon,
}

impl Rig {
    /// A device and a guest whose driver wants `features` and is not yet started.
    fn new(features: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let owner = owner::start(&dir.path().join("balloon.sock"));
        let guest = Balloon::connect(&dir.path().join("balloon.sock"), memfd(), features);
        Self { dir, owner, guest }
    }

    /// Same memory, new connection.
    fn reconnect(&mut self, features: u64) {
        let file = self.guest.file.try_clone().unwrap();
        // The device serves one front end at a time.
        self.guest = Balloon::unconnected();
        self.guest = Balloon::connect(&self.dir.path().join("balloon.sock"), file, features);
    }

    /// The ranges of the next report, settled or not.
    fn next_report(&self) -> Vec<GuestRange> {
        self.owner.find(|event| match event {
            DeviceEvent::Reported { ranges, .. } => Some(ranges),
            _ => None,
        })
    }

    fn fill(&self, (start, bytes): (u64, u32)) {
        self.guest.memory.write_slice(&vec![0xaa; bytes as usize], GuestAddress(start)).unwrap();
    }

    /// The byte that the whole range holds.
    fn content(&self, (start, bytes): (u64, u32)) -> u8 {
        let mut content = vec![0; bytes as usize];
        self.guest.memory.read_slice(&mut content, GuestAddress(start)).unwrap();
        assert!(content.iter().all(|byte| *byte == content[0]), "{start:#x} holds more than one value");
        content[0]
    }

    fn allocated(&self) -> u64 {
        self.guest.file.metadata().unwrap().blocks() * 512
    }
}
