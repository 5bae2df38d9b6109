//! A daemon with two VMs, one for bad input and one that must not notice, and what has to stay as it was.

use std::os::unix::fs::{FileExt, MetadataExt};

use crate::daemon::{Daemon, poll};
use crate::mock_guest::agent::{Agent, Session, hello, range};
use crate::mock_guest::{HIGH, HIGH_OFFSET, UNUSED, UPPER, UPPER_OFFSET, UPPER_SIZE};

pub const HUGE: u64 = 2 << 20;
const BAD: &str = "bad";
const OTHER: &str = "other";

pub struct Witness {
    pub daemon: Daemon,
    pub bad: Agent,
    other: Agent,
    session: Session,
    before: Vec<u8>,
    blocks: u64,
}

impl Witness {
    /// Both VMs run, the other one's agent has a session, the bad one's memory is full of a pattern.
    pub fn new() -> Self {
        let daemon = Daemon::start(&[BAD, OTHER]);
        let bad = Agent::boot(&daemon.socket(BAD));
        let mut other = Agent::boot(&daemon.socket(OTHER));
        fill(&bad);
        fill(&other);
        let session = other.start_session(hello());
        let mut witness = Self { daemon, bad, other, session, before: Vec::new(), blocks: 0 };
        witness.remember();
        witness
    }

    /// What the bad VM's memory holds now is what it has to hold at the next check.
    pub fn remember(&mut self) {
        self.before = contents(&self.bad);
        self.blocks = allocated(&self.bad);
    }

    pub fn status(&self) -> serde_json::Value {
        self.daemon.vm(BAD)
    }

    /// A counter of the bad VM, by JSON pointer; one that was never counted is 0.
    pub fn count(&self, pointer: &str) -> u64 {
        self.status().pointer(pointer).and_then(serde_json::Value::as_u64).unwrap_or(0)
    }

    /// Waits for a counter, because a packet that is not answered is counted some time after it was sent.
    pub fn wait_count(&self, case: &str, pointer: &str, wanted: u64) {
        poll(&format!("{case}: {pointer} is {wanted}"), || match self.count(pointer) {
            count if count == wanted => Ok(()),
            count => Err(count),
        });
    }

    /// Waits until the bad VM has no session.
    pub fn wait_absent(&self, case: &str) {
        poll(&format!("{case}: no session"), || match self.status()["agent"]["state"].as_str() {
            Some("absent") => Ok(()),
            state => Err(state.map(str::to_owned)),
        });
    }

    /// Nothing of the bad VM was dropped, and the other VM gets answers.
    pub fn check(&mut self, case: &str) {
        assert_eq!(self.count("/counters/huge_pages_dropped"), 0, "{case}: dropped");
        assert_eq!(allocated(&self.bad), self.blocks, "{case}: allocated bytes");
        assert!(contents(&self.bad) == self.before, "{case}: memory has changed");
        self.check_other(case);
    }

    pub fn check_other(&mut self, case: &str) {
        let backed = self.other.survey(&mut self.session, vec![range(UPPER, 1)]).backed;
        assert_eq!(backed.iter().map(|run| run.backed_bytes).collect::<Vec<_>>(), [HUGE], "{case}: the other VM");
    }
}

/// Bytes of the memory file from [`UNUSED`] on: what the driver's rings do not change.
pub fn contents(agent: &Agent) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (start, len) in pieces() {
        let mut piece = vec![0; len as usize];
        agent.guest.file.read_exact_at(&mut piece, start).unwrap();
        bytes.extend(piece);
    }
    bytes
}

pub fn fill(agent: &Agent) {
    for (start, len) in pieces() {
        // Every page differs from its neighbours.
        let mut pattern = vec![0; len as usize];
        for (number, page) in pattern.chunks_exact_mut(4096).enumerate() {
            page.fill((number % 251) as u8 + 1);
        }
        agent.guest.file.write_all_at(&pattern, start).unwrap();
    }
    // The driver's rings and buffers allocate nothing later.
    agent.guest.allocate_rings();
}

/// Allocated bytes of the memory file: what the host pays, never RSS.
pub fn allocated(agent: &Agent) -> u64 {
    agent.guest.file.metadata().unwrap().blocks() * 512
}

/// Where guest memory from [`UNUSED`] on is in the file.
fn pieces() -> [(u64, u64); 2] {
    [(HIGH_OFFSET + UNUSED - HIGH, UPPER - UNUSED), (UPPER_OFFSET, UPPER_SIZE)]
}
