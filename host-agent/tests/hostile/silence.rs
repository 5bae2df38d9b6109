//! Peers that stop reading, stop writing or never begin. In the test's own process, because the daemon's times are long.

use std::time::Duration;

use fpr_host_agent::session::Config;
use fpr_host_agent::vm::status::VmStatus;
use fpr_host_agent::vm::{Request, VmConfig, VmHandle, spawn};
use fpr_protocol::message::{Hello, Survey};
use fpr_protocol::{CloseReason, Message};
use tokio::runtime::Runtime;

use crate::mock_guest::UPPER;
use crate::mock_guest::agent::{Agent, Reading, hello, range};
use crate::witness::{Witness, allocated, contents, fill};

struct Vm {
    runtime: Runtime,
    handle: VmHandle,
    agent: Agent,
    _dir: tempfile::TempDir,
}

impl Vm {
    fn new(session: Config) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let socket = Some(dir.path().join("vm.sock"));
        let config = VmConfig { session, socket, ..VmConfig::new("silent") };
        let (handle, _task) = runtime.block_on(async { spawn(config) }).unwrap();
        let agent = Agent::boot(&dir.path().join("vm.sock"));
        fill(&agent);
        Self { runtime, handle, agent, _dir: dir }
    }

    fn status(&self) -> VmStatus {
        self.runtime.block_on(self.handle.ask(Request::Status)).unwrap()
    }

    fn closed(&self, reason: CloseReason) -> u64 {
        self.status().counters.closed_by_reason.get(&reason).copied().unwrap_or(0)
    }
}

/// Short for a test, long for an answer on a busy machine.
const SHORT: Duration = Duration::from_secs(1);

#[test]
fn a_connection_without_hello_is_closed_in_time() {
    let mut vm = Vm::new(Config { hello_timeout: SHORT, ..Config::default() });
    for (count, bytes) in [(1, &b""[..]), (2, b"FPRP")] {
        let port = vm.agent.connect();
        vm.agent.send_bytes(port, bytes);
        assert_eq!(vm.agent.wait_end(port), Some(Message::Goodbye { reason: CloseReason::HelloTimeout }));
        assert_eq!(vm.closed(CloseReason::HelloTimeout), count);
    }
    let session = vm.agent.start_session(hello());
    assert!(!vm.agent.has_ended(session.port));
}

#[test]
fn a_session_that_answers_no_ping_is_closed_in_time() {
    let mut vm = Vm::new(Config { ping_interval: SHORT / 3, pong_timeout: SHORT, ..Config::default() });
    let (before, blocks) = (contents(&vm.agent), allocated(&vm.agent));
    let session = vm.agent.start_session_without_clock(hello());

    assert_eq!(vm.agent.wait_end(session.port), Some(Message::Goodbye { reason: CloseReason::PingTimeout }));

    assert_eq!(vm.closed(CloseReason::PingTimeout), 1);
    assert!(contents(&vm.agent) == before && allocated(&vm.agent) == blocks, "something was dropped");
    vm.agent.start_session(hello());
    assert_eq!(vm.closed(CloseReason::PingTimeout), 1);
}

#[test]
fn a_peer_that_does_not_read_is_reset() {
    let mut witness = Witness::new();
    // The smallest huge pages make the longest answers: 18 KiB each, of which 256 KiB may wait.
    let port = witness.bad.free_port();
    assert!(witness.bad.connect_as(port, Reading::Never));
    witness.bad.send(port, &Message::Hello(Hello { huge_page_order: 1, ..hello() }));
    let ranges: Vec<_> = (0..1536).map(|i| range(UPPER + i * 2 * 8192, 1)).collect();
    for sequence in 1..=30 {
        if witness.bad.has_ended(port) {
            break;
        }
        witness.bad.send(port, &Message::Survey(Survey { sequence, ranges: ranges.clone() }));
    }
    witness.wait_count("not reading", "/vsock/refused_by_reason/peer_not_reading", 1);
    witness.wait_count("not reading", "/counters/closed_by_reason/slow-reader", 1);
    witness.bad.wait_end(port);
    witness.wait_absent("not reading");
    witness.check("not reading");
    let log = witness.daemon.log();
    assert!(log.contains("guest does not read its answers"), "{log}");

    let mut session = witness.bad.start_session(hello());
    assert_eq!(witness.bad.survey(&mut session, vec![range(UPPER, 1)]).backed.len(), 1);
}
