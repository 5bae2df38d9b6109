//! A metric that nothing sets is no metric: a guest does everything that is counted, and each field of the registry has to
//! show it. The built daemon serves the guest; only the refault minute is shortened, in a VM's task of this process.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use fpr_host_agent::accounting::books::{Asked, Books};
use fpr_host_agent::accounting::{Roots, Subject};
use fpr_host_agent::control;
use fpr_host_agent::fields::{DAEMON, Field, VM};
use fpr_host_agent::session::Config;
use fpr_host_agent::vm::{self, Request, VmConfig};
use fpr_protocol::message::{Stats, Survey};
use fpr_protocol::{CloseReason, Message};
use vhost::VhostBackend;
use vm_memory::GuestAddress;

use super::daemon::{Daemon, poll};
use super::mock_guest::agent::{Agent, Reading, Session, claimed, hello, offlined, range};
use super::mock_guest::balloon::{Balloon, DEFLATE, INFLATE, REPORTING, STATS, STATS_VQ};
use super::mock_guest::queue::{NEXT, Queue, WRITE};
use super::mock_guest::{HIGH, UPPER, UPPER_OFFSET, UPPER_SIZE, memfd};
use super::scrape::{daemon, scrape};

const HUGE: u64 = 2 << 20;
/// With statistics Linux numbers the reporting queue 3, without 2.
const REPORTS: usize = 3;
/// The agent's look is 10 s after the drop; the rest is for a busy machine.
const LATEST: Duration = Duration::from_secs(60);

/// Metrics that no scenario here can set, and why. One that is set nevertheless has to go from the list.
const EXCEPTIONS: &[(&str, &str)] = &[];

/// Names of the metrics that are there and not 0.
#[derive(Default)]
struct Seen(BTreeSet<&'static str>);

impl Seen {
    fn look(&mut self, status: &serde_json::Value) {
        let vms = status["vms"].as_array().unwrap();
        let places = DAEMON.iter().map(|field| (field, status));
        let places = places.chain(vms.iter().flat_map(|vm| VM.iter().map(move |field| (field, vm))));
        for (field, status) in places {
            field.samples(status, &mut |_, number| {
                if number.as_f64() != 0.0 {
                    self.0.insert(field.name);
                }
            });
        }
    }

    fn missing(&self) -> Vec<&'static str> {
        let excepted = |name: &str| EXCEPTIONS.iter().any(|(exception, _)| *exception == name);
        let all = DAEMON.iter().chain(VM).map(|field| field.name);
        all.filter(|name| !self.0.contains(name) && !excepted(name)).collect()
    }
}

fn fill(file: &File) {
    file.write_all_at(&vec![0xaa; UPPER_SIZE as usize], UPPER_OFFSET).unwrap();
}

/// Everything a balloon driver does, and some of what it should not.
fn use_balloon(balloon: &mut Balloon) {
    balloon.report(REPORTS, &[(UPPER + 4 * HUGE, HUGE as u32), (UPPER + UPPER_SIZE - 4096, 8192)]);
    balloon.wait_returned(REPORTS);
    // A loop: the chain's only descriptor says that it is followed by itself.
    let queue = &mut balloon.queues[REPORTS];
    let ring_of_one: Vec<_> = (0..queue.entries).map(|_| (GuestAddress(0x7000_0000), 4096, WRITE | NEXT)).collect();
    queue.offer(&balloon.memory, &ring_of_one);
    balloon.wait_returned(REPORTS);
    balloon.tell(INFLATE, &[((UPPER + 6 * HUGE) / 4096) as u32]);
    balloon.wait_returned(INFLATE);
    balloon.tell(DEFLATE, &[((UPPER + 6 * HUGE) / 4096) as u32]);
    balloon.wait_returned(DEFLATE);
    balloon.write_config(0, &[1, 0, 0, 0]).unwrap();
}

/// Lists of scattered pages that are no memory, each as dear as 32 reports.
fn flood(balloon: &mut Balloon) {
    let nowhere: Vec<u32> = (0..1024).map(|page| 0x7_0000 + 2 * page).collect();
    for _ in 0..16 {
        balloon.tell(INFLATE, &nowhere);
        balloon.wait_returned(INFLATE);
    }
}

/// The first buffer comes back at once, the second is the answer to a question.
fn send_statistics(balloon: &mut Balloon) {
    let all: Vec<u8> = (0..16u16).flat_map(|tag| [&tag.to_le_bytes()[..], &77_u64.to_le_bytes()].concat()).collect();
    balloon.send(STATS, &all);
    balloon.wait_returned(STATS);
    balloon.send(STATS, &all);
}

/// Everything an agent does.
fn use_session(agent: &mut Agent, session: &mut Session) {
    agent.prove(session, &[UPPER]);
    fill(&agent.guest.file);
    agent.survey(session, vec![range(UPPER, 12)]);
    agent.report(session, vec![offlined(UPPER, 2), claimed(UPPER + 8 * HUGE, 1)]);
    // A workload takes some of it back.
    agent.guest.file.write_all_at(&vec![0x55; HUGE as usize], UPPER_OFFSET).unwrap();
    let stats = Stats {
        memory_total_bytes: 1,
        memory_free_bytes: 2,
        memory_available_bytes: 3,
        page_cache_bytes: 4,
        psi_some_avg10_centipercent: 5,
        psi_full_avg10_centipercent: 6,
        huge_pages_offlined: 7,
        huge_pages_claimed: 8,
        agent_cpu_ms: 9,
    };
    agent.send(session.port, &Message::Stats(stats));
}

/// Says `Hello` while surveys of the session before it are still being worked on.
fn hurry(agent: &mut Agent) {
    let mut first = agent.start_session(hello());
    let second = agent.connect();
    for _ in 0..10 {
        let sequence = first.next_sequence();
        agent.send(first.port, &Message::Survey(Survey { sequence, ranges: vec![range(UPPER, 12)] }));
    }
    agent.send(first.port, &Message::Goodbye { reason: CloseReason::Shutdown });
    agent.send(second, &Message::Hello(hello()));
    while !matches!(agent.next(second), Some(Message::Welcome(_)) | None) {}
    agent.close(second);
}

/// A VM whose minute is short, with a guest that takes back what it gave.
fn short_minute() -> serde_json::Value {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("balloon.sock");
    let session = Config { refault_minute: Duration::from_secs(2), ..Config::default() };
    let config = VmConfig { balloon: Some(socket.clone()), session, ..VmConfig::new("short") };
    let (vm, task) = runtime.block_on(async { vm::spawn(config).unwrap() });
    let file = memfd();
    fill(&file);
    let mut balloon = Balloon::connect(&socket, file.try_clone().unwrap(), REPORTING);
    balloon.start(&[INFLATE, 2]);
    balloon.report(2, &[(UPPER, 4 * HUGE as u32)]);
    balloon.wait_returned(2);
    file.write_all_at(&vec![0x55; HUGE as usize], UPPER_OFFSET).unwrap();
    let status = poll("the look after a minute", || {
        let status = serde_json::to_value(runtime.block_on(vm.ask(Request::Status)).unwrap()).unwrap();
        if status["counters"]["refault_minute_watched_bytes"] == 0 { Err(status) } else { Ok(status) }
    });
    let counted = ["watched", "returned"].map(|what| &status["counters"][format!("refault_minute_{what}_bytes")]);
    assert_eq!(counted, [&serde_json::json!(4 * HUGE), &serde_json::json!(HUGE)], "all of it was looked at");
    drop(balloon);
    runtime.block_on(async {
        vm.shut_down().await;
        task.await.unwrap();
    });
    status
}

/// Accounting of a VM over its budget, on a kernel that says by how much it may be wrong: made of files, since this
/// machine's may be exact.
fn over_budget() -> serde_json::Value {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (name, text) in [
        ("proc/sys/kernel/osrelease", "6.6.0"),
        ("sys/devices/system/cpu/possible", "0-1"),
        ("proc/7/cgroup", "0::/"),
        ("proc/7/maps", ""),
        ("proc/7/statm", "9999 5000 0 1 0 1 0"),
        ("proc/7/status", "VmRSS:\t20000 kB\nRssAnon:\t20000 kB\nVmSwap:\t0 kB\nThreads:\t1\n"),
        ("proc/7/smaps_rollup", "Pss_Anon:\t19000 kB\nSwapPss:\t0 kB\n"),
    ] {
        std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        std::fs::write(at(name), text).unwrap();
    }
    let mut books = Books::new(Roots { proc: at("proc"), sys: at("sys"), cgroup: at("cgroup") });
    let asked = || {
        let subject = Some(Subject { pid: Some(7), ..Subject::default() });
        vec![Asked { name: "over".into(), budget_bytes: Some(1 << 20), subject }]
    };
    let slow = books.tick(asked(), Duration::ZERO).1.pop().unwrap();
    books.confirmed(slow.read(), Duration::from_secs(1)).unwrap();
    let (mut figures, _) = books.tick(asked(), Duration::from_secs(5));
    serde_json::json!({ "accounting": figures.pop().unwrap().1 })
}

#[test]
fn every_metric_is_set_by_something() {
    let daemon = daemon(&["vm"], &["vm", "rude"]);
    let mut seen = Seen::default();

    let mut agent = Agent::boot(&daemon.socket("vm"));
    agent.send_stray_packet();
    let garbage = agent.free_port();
    assert!(agent.connect_as(garbage, Reading::Yes));
    agent.send_bytes(garbage, &[0xff; 64]);
    agent.wait_end(garbage);
    poll("a session that has to wait for jobs of the one before", || {
        hurry(&mut agent);
        let waited = daemon.vm("vm")["counters"]["fences_waited"].clone();
        if waited == 0 { Err(waited) } else { Ok(()) }
    });

    let mut session = agent.start_session(hello());
    let mut balloon =
        Balloon::connect(&daemon.balloon("vm"), agent.guest.file.try_clone().unwrap(), STATS_VQ | REPORTING);
    balloon.queues = (0..5).map(|queue| Queue::new(HIGH + 0x20_0000 + queue * 0x1_0000, 64)).collect();
    balloon.start(&[INFLATE, DEFLATE, STATS, REPORTS]);
    use_session(&mut agent, &mut session);
    use_balloon(&mut balloon);
    poll("a chain that has to wait", || {
        flood(&mut balloon);
        let delayed = daemon.vm("vm")["balloon"]["chains_delayed"].clone();
        if delayed == 0 { Err(delayed) } else { Ok(()) }
    });
    // Last, for the buffer is read when the guest has been asked, and lies where the other queues' do.
    send_statistics(&mut balloon);
    let rude = Balloon::connect(&daemon.balloon("rude"), memfd(), REPORTING);
    rude.front_end.set_vring_num(7, 64).expect_err("there is no such queue");
    let inhibit = control::Command::Inhibit { vm: "vm".into(), reason: "test".into() };
    control::ask(&daemon.control(), &inhibit).unwrap();
    std::fs::write(daemon.dir.path().join("host.toml"), "nonsense = 1\n").unwrap();
    control::ask(&daemon.control(), &control::Command::Reload).unwrap_err();
    seen.look(&serde_json::json!({"version": "", "vms": [short_minute(), over_budget()]}));

    let deadline = Instant::now() + LATEST;
    loop {
        // The host pings; a guest that is silent loses its session.
        agent.survey(&mut session, vec![range(UPPER, 1)]);
        seen.look(&daemon.status());
        let missing = seen.missing();
        if missing.is_empty() {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "nothing sets {missing:?}: let a scenario do it (see host-agent/src/fields)"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    let superfluous: Vec<_> = EXCEPTIONS.iter().filter(|(name, _)| seen.0.contains(name)).collect();
    assert!(superfluous.is_empty(), "set after all: {superfluous:?}");
    as_the_status_says(&daemon);
}

/// What a scraper reads is what the status says, for each field and label.
fn as_the_status_says(daemon: &Daemon) {
    let status = daemon.status();
    let scraped = scrape(daemon);
    let mut counters = 0;
    for (vm, field) in status["vms"].as_array().unwrap().iter().flat_map(|vm| VM.iter().map(move |field| (vm, field))) {
        field.samples(vm, &mut |labels, number| {
            let labels: String =
                labels.iter().map(|(name, value)| format!(",{name}=\"{value}\"")).collect::<Vec<_>>().concat();
            let name = format!("{}{{vm=\"{}\"{labels}}}", field.name, vm["name"].as_str().unwrap());
            let value = scraped.get(&name).unwrap_or_else(|| panic!("no {name} in {scraped:#?}"));
            // Time passes between the two; what guests gave away does not change any more.
            if field.name.contains("dropped_bytes") {
                counters += 1;
                assert_eq!(*value, number.as_f64(), "{name}");
            }
        });
    }
    assert!(counters > 5, "{counters}");
    assert!(Field::named("fpr_build_info").is_some());
}
