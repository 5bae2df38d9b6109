//! The built daemon with a VM that has a vsock and a balloon device: one guest, whose agent and whose kernel report.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation, unreachable_pub)]
#![allow(dead_code)] // Of what the tests share, each uses another part.

#[path = "../daemon/mod.rs"]
mod daemon;
#[path = "../mock_guest/mod.rs"]
mod mock_guest;

use std::os::unix::fs::FileExt;

use daemon::{Daemon, poll};
use fpr_host_agent::control;
use fpr_host_agent::session::counters::MemorySource;
use fpr_host_agent::vm::{self, Request, VmConfig};
use fpr_protocol::message::RangeResult;
use fpr_protocol::{Gate, Message, PassEnd, Refusal};
use mock_guest::agent::{Agent, Session, hello, offlined};
use mock_guest::balloon::{Balloon, INFLATE, PAGE_POISON, REPORTING};
use mock_guest::queue::Queue;
use mock_guest::{HIGH, HIGH_OFFSET, UNUSED, UPPER, UPPER_OFFSET, UPPER_SIZE, memfd};
use vhost::VhostBackend;

const MIB: u64 = 1 << 20;
const HUGE: u64 = 2 * MIB;
/// With REPORTING alone Linux numbers the reporting queue 2.
const REPORTS: usize = 2;

/// Where memory of the two upper regions, which are neighbours in the guest, is in the file.
fn offset(guest: u64) -> u64 {
    if guest < UPPER { guest - HIGH + HIGH_OFFSET } else { guest - UPPER + UPPER_OFFSET }
}

/// Fills the upper region and the 2 MiB below it with 0xaa; neither rings nor buffers are there.
fn fill(file: &std::fs::File) {
    file.write_all_at(&vec![0xaa; HUGE as usize], offset(UPPER - HUGE)).unwrap();
    file.write_all_at(&vec![0xaa; UPPER_SIZE as usize], offset(UPPER)).unwrap();
}

/// Whether memory at a guest address from there on, in one region, is gone: all zero, or all as it was filled.
fn is_gone(file: &std::fs::File, guest: u64, bytes: u64) -> bool {
    let mut content = vec![0; bytes as usize];
    file.read_exact_at(&mut content, offset(guest)).unwrap();
    assert!(content.iter().all(|byte| *byte == content[0]), "{guest:#x} was dropped in part");
    content[0] == 0
}

/// The kernel of the agent's guest: the same memory, rings of its own.
fn balloon_of(daemon: &Daemon, agent: &Agent, features: u64) -> Balloon {
    let file = agent.guest.file.try_clone().unwrap();
    let mut balloon = Balloon::connect(&daemon.balloon("vm"), file, features);
    balloon.queues = (0..5).map(|queue| Queue::new(HIGH + 0x20_0000 + queue * 0x1_0000, 64)).collect();
    balloon.start(&[INFLATE, REPORTS]);
    balloon
}

/// Both devices, and an agent whose addresses are proved.
fn both() -> (Daemon, Agent, Session, Balloon) {
    let daemon = Daemon::start_with(&["vm"], &["vm"]);
    let mut agent = Agent::boot(&daemon.socket("vm"));
    let mut session = agent.start_session(hello());
    agent.prove(&mut session, &[UPPER]);
    fill(&agent.guest.file);
    let balloon = balloon_of(&daemon, &agent, REPORTING);
    (daemon, agent, session, balloon)
}

fn report(balloon: &mut Balloon, ranges: &[(u64, u32)]) {
    balloon.report(REPORTS, ranges);
    balloon.wait_returned(REPORTS);
}

fn source(daemon: &Daemon, name: &str) -> serde_json::Value {
    daemon.vm("vm")["counters"]["sources"][name].clone()
}

#[test]
fn agent_and_kernel_return_memory_of_one_guest_and_status_says_who() {
    let (daemon, mut agent, mut session, mut balloon) = both();
    // Across the border of two regions, and one that is not memory at all.
    report(&mut balloon, &[(UPPER - MIB, HUGE as u32), (UPPER + UPPER_SIZE - 4096, 8192)]);
    let file = agent.guest.file.try_clone().unwrap();
    assert!(is_gone(&file, UPPER - MIB, MIB) && is_gone(&file, UPPER, MIB));
    assert!(!is_gone(&file, UPPER - HUGE, MIB) && !is_gone(&file, UPPER + MIB, UPPER_SIZE - MIB));
    assert_eq!(agent.next(session.port), Some(Message::KernelReporting { active: true }));

    let results = agent.report(&mut session, vec![offlined(UPPER + HUGE, 1)]);
    assert_eq!(results, [RangeResult::Dropped { bytes: HUGE }]);
    let page = ((UPPER + 3 * HUGE) / 4096) as u32;
    balloon.tell(INFLATE, &[page]);
    balloon.wait_returned(INFLATE);

    let vm = daemon.vm("vm");
    let dropped = |name: &str| source(&daemon, name)["dropped_bytes"].clone();
    assert_eq!((dropped("kernel-reported"), dropped("kernel-inflated")), (HUGE.into(), 4096.into()));
    assert_eq!((dropped("agent-offlined"), dropped("agent-claimed")), (HUGE.into(), 0.into()));
    assert_eq!(source(&daemon, "kernel-reported")["refused_bytes_by_reason"]["outside-memory"], 8192);
    assert_eq!((&vm["balloon"]["kernel_reporting"], vm["gates"].as_array().unwrap().len()), (&true.into(), 0));
    for device in ["vsock", "balloon"] {
        assert_eq!(vm[device]["front_end"]["pid"], std::process::id(), "{device}");
    }
    let table = String::from_utf8(daemon.client(&["status"]).stdout).unwrap();
    for line in ["reporting", "vm: kernel-reported: dropped 2M of 2M", "vm: agent-offlined: dropped 2M of 2M"] {
        assert!(table.contains(line), "{table}");
    }
}

#[test]
fn gates_hold_for_both_and_a_balloon_that_stops_leaves_the_agent_alone() {
    let (daemon, mut agent, mut session, mut balloon) = both();
    let file = agent.guest.file.try_clone().unwrap();
    let inhibit = control::Command::Inhibit { vm: "vm".into(), reason: "test".into() };
    control::ask(&daemon.control(), &inhibit).unwrap();
    report(&mut balloon, &[(UPPER, HUGE as u32)]);
    assert!(!is_gone(&file, UPPER, HUGE), "dropped behind a closed gate");
    assert_eq!(source(&daemon, "kernel-reported")["refused_bytes_by_reason"]["gated"], HUGE);
    control::ask(&daemon.control(), &control::Command::Resume { vm: "vm".into() }).unwrap();
    report(&mut balloon, &[(UPPER, HUGE as u32)]);
    assert!(is_gone(&file, UPPER, HUGE));

    for queue in [INFLATE, REPORTS] {
        balloon.front_end.get_vring_base(queue).unwrap();
    }
    assert_eq!(daemon.vm("vm")["balloon"]["kernel_reporting"], false);
    let told = |active| Message::KernelReporting { active };
    let mut heard = Vec::new();
    while heard.last() != Some(&told(false)) {
        heard.push(agent.next(session.port).unwrap());
    }
    assert!(heard.contains(&told(true)), "{heard:?}");
    let results = agent.report(&mut session, vec![offlined(UPPER + HUGE, 1)]);
    assert_eq!(results, [RangeResult::Dropped { bytes: HUGE }], "in the same session");

    // A driver that wants to find a pattern closes the gate for the agent, too.
    drop(balloon);
    poll("the front end is gone", || match &daemon.vm("vm")["balloon"]["front_end"] {
        serde_json::Value::Null => Ok(()),
        there => Err(there.clone()),
    });
    let mut balloon = Balloon::connect(&daemon.balloon("vm"), file.try_clone().unwrap(), REPORTING | PAGE_POISON);
    balloon.queues = (0..5).map(|queue| Queue::new(HIGH + 0x20_0000 + queue * 0x1_0000, 64)).collect();
    balloon.write_config(12, &0xaaaa_aaaa_u32.to_le_bytes()).unwrap();
    balloon.start(&[INFLATE, REPORTS]);
    report(&mut balloon, &[(UPPER + 4 * HUGE, HUGE as u32)]);
    assert!(!is_gone(&file, UPPER + 4 * HUGE, HUGE));
    assert_eq!(agent.next(session.port), Some(Message::Inhibit(vec![Gate::PagePoison])));
    let results = agent.report(&mut session, vec![offlined(UPPER + 5 * HUGE, 1)]);
    assert_eq!(results, [RangeResult::Refused(Refusal::Gated)]);
    let gate = || daemon.vm("vm")["gates"][0].clone();
    assert_eq!((&gate()["gate"], &gate()["source"]), (&"page-poison".into(), &"balloon".into()));

    // It still does when the device is pulled out, and no longer when a driver says so.
    drop(balloon);
    let gone = || daemon.vm("vm")["balloon"]["front_end"].is_null();
    poll("the front end is gone", || if gone() { Ok(()) } else { Err("it is there") });
    assert_eq!(gate()["gate"], "page-poison");
    let results = agent.report(&mut session, vec![offlined(UPPER + 5 * HUGE, 1)]);
    assert_eq!(results, [RangeResult::Refused(Refusal::Gated)]);
    let _balloon = balloon_of(&daemon, &agent, REPORTING);
    poll("the gate is open", || if gate().is_null() { Ok(()) } else { Err(gate()) });
    let results = agent.report(&mut session, vec![offlined(UPPER + 5 * HUGE, 1)]);
    assert_eq!(results, [RangeResult::Dropped { bytes: HUGE }]);
}

#[test]
fn a_vm_with_a_balloon_alone_needs_no_agent_and_shares_its_memory_with_nobody() {
    let daemon = Daemon::start_with(&[], &["vm", "thief"]);
    let file = memfd();
    fill(&file);
    let connect = |vm: &str| {
        let mut balloon = Balloon::connect(&daemon.balloon(vm), file.try_clone().unwrap(), REPORTING);
        balloon.start(&[INFLATE, REPORTS]);
        balloon
    };
    let mut balloon = connect("vm");
    report(&mut balloon, &[(UPPER, HUGE as u32)]);
    assert!(is_gone(&file, UPPER, HUGE));

    let mut thief = connect("thief");
    report(&mut thief, &[(UPPER + HUGE, HUGE as u32)]);
    assert!(!is_gone(&file, UPPER + HUGE, HUGE), "dropped another VM's memory");
    let gate = daemon.vm("thief")["gates"][0].clone();
    assert_eq!(gate["gate"], "backing-unsuitable");
    assert!(gate["detail"].as_str().unwrap().contains("VM vm has the same memory file"), "{gate}");
    report(&mut balloon, &[(UPPER + 2 * HUGE, HUGE as u32)]);
    assert!(is_gone(&file, UPPER + 2 * HUGE, HUGE), "the owner goes on");

    let output = daemon.client(&["drain", "vm"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.contains("the guest's agent is not connected"), "{stderr}");
}

/// Where tmpfs or the pool of huge pages is exhausted, the daemon would die when it next touches the ring.
#[test]
fn nobody_gives_away_the_rings_of_the_devices() {
    let (daemon, mut agent, mut session, mut balloon) = both();
    agent.prove(&mut session, &[UNUSED]);
    let file = agent.guest.file.try_clone().unwrap();
    // The kernel names the vsock device's rings, and those of the queue it speaks on.
    for ring in [HIGH, HIGH + 0x1_0000, HIGH + 0x22_0000, HIGH + 0x22_2000] {
        report(&mut balloon, &[(ring, 4096)]);
    }
    report(&mut balloon, &[(HIGH, 7 << 20)]);
    let refused = source(&daemon, "kernel-reported")["refused_bytes_by_reason"]["device-ring"].clone();
    assert_eq!(refused, 4 * 4096 + (7 << 20));
    // The agent names the balloon's.
    let results = agent.report(&mut session, vec![offlined(HIGH + MIB, 1), offlined(UPPER, 1)]);
    assert_eq!(results, [RangeResult::Refused(Refusal::DeviceRing), RangeResult::Dropped { bytes: HUGE }]);
    assert!(is_gone(&file, UPPER, HUGE) && !is_gone(&file, UPPER - HUGE, HUGE));
    report(&mut balloon, &[(UPPER + HUGE, HUGE as u32)]);
    assert!(is_gone(&file, UPPER + HUGE, HUGE), "both devices go on");
}

#[test]
fn a_drain_asks_the_agent_and_prints_what_came_back() {
    let (daemon, mut agent, mut session, _balloon) = both();
    let output = std::thread::scope(|scope| {
        let client = scope.spawn(|| daemon.client(&["drain", "vm", "--wait", "10"]));
        let id = loop {
            match agent.next(session.port) {
                Some(Message::Reclaim { id }) => break id,
                Some(_) => {}
                None => panic!("the session has ended"),
            }
        };
        agent.report(&mut session, vec![offlined(UPPER, 3)]);
        agent.send(session.port, &Message::Reclaimed { id, end: PassEnd::GaveBack });
        client.join().unwrap()
    });
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.starts_with("vm: came back: agent-offlined 6M; pass ended: gave-back; backed "), "{stdout}");

    // An agent that takes longer than anybody waits.
    let output = daemon.client(&["drain", "vm", "--wait", "1"]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(stdout.starts_with("vm: came back: nothing; the pass goes on; "), "{stdout}");
}

/// `/proc/PID/maps` waits for a lock of the VMM's process, and a VMM that is short of memory can hold it for long. Here the file is a pipe
/// that says nothing until it is written to.
#[test]
fn the_owner_of_a_vm_does_not_wait_for_the_vmms_process() {
    let dir = tempfile::tempdir().unwrap();
    let process = dir.path().join("proc").join(std::process::id().to_string());
    std::fs::create_dir_all(process.join("fd")).unwrap();
    std::fs::write(process.join("status"), "VmLck:\t0 kB\nVmPin:\t0 kB\n").unwrap();
    nix::unistd::mkfifo(&process.join("maps"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let socket = dir.path().join("balloon.sock");
    let config =
        VmConfig { balloon: Some(socket.clone()), proc_root: dir.path().join("proc"), ..VmConfig::new("slow") };
    let (vm, task) = runtime.block_on(async { vm::spawn(config).unwrap() });
    let mut balloon = Balloon::connect(&socket, memfd(), REPORTING);
    balloon.start(&[INFLATE, REPORTS]);
    balloon.report(REPORTS, &[(UPPER, HUGE as u32)]);

    let status = runtime.block_on(async { tokio::time::timeout(daemon::DEADLINE, vm.ask(Request::Status)).await });
    let status = status.expect("the owner answers").unwrap();
    assert!(status.memory.is_some() && status.balloon.is_some(), "{status:?}");
    assert_eq!(status.counters.dropped_bytes(MemorySource::KernelReported), 0, "nothing before the look");

    std::fs::write(process.join("maps"), std::fs::read("/proc/self/maps").unwrap()).unwrap();
    balloon.wait_returned(REPORTS);
    drop(balloon);
    runtime.block_on(async {
        vm.shut_down().await;
        task.await.unwrap();
    });
}
