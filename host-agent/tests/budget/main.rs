//! Accounting in the built daemon: figures in `status`, budgets and their alarms, and the choice of the VM to ask.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation, unreachable_pub)]
#![allow(dead_code)] // Of what the tests share, each uses another part.

#[path = "../daemon/mod.rs"]
mod daemon;
#[path = "../mock_guest/mod.rs"]
mod mock_guest;

use daemon::{Daemon, poll};
use fpr_protocol::Message;
use fpr_protocol::message::Stats;
use mock_guest::REGIONS;
use mock_guest::agent::{Agent, hello};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Any VM costs more than `tight` allows, and none as much as `wide` does.
fn start() -> Daemon {
    let config = |dir: &std::path::Path| {
        let socket = |vm: &str| dir.join(vm).display().to_string();
        format!(
            "[vm.tight]\nsocket = \"{}\"\nbudget = \"4K\"\n[vm.wide]\nsocket = \"{}\"\nbudget = \"100T\"\n",
            socket("tight"),
            socket("wide")
        )
    };
    Daemon::start_configured(config, &["free"], &[])
}

/// Until the VM's budget is in that state.
fn budget(daemon: &Daemon, vm: &str, state: &str) -> Value {
    poll(&format!("budget of {vm} {state}"), || {
        let accounting = daemon.vm(vm)["accounting"].clone();
        if accounting["budget"]["state"] == state { Ok(accounting) } else { Err(accounting) }
    })
}

#[test]
fn a_crossed_budget_is_an_alarm_with_a_precise_figure() {
    let daemon = start();
    let [tight, wide, _free] = ["tight", "wide", "free"].map(|vm| Agent::boot(&daemon.socket(vm)));
    let over = budget(&daemon, "tight", "over");
    let (cost, alarms) = (over["budget"]["cost_bytes"].as_u64().unwrap(), over["budget"]["alarms"].as_u64().unwrap());
    assert!(cost > 4096 && alarms == 1, "{over}");
    // The first tick may come before the guest has touched its memory, the alarm then being about the process.
    let over = poll("the guest's memory counts", || {
        let accounting = daemon.vm("tight")["accounting"].clone();
        let touched = accounting["figures"]["backing"]["bytes"].as_u64() > Some(0);
        if touched { Ok(accounting) } else { Err(accounting) }
    });
    assert_eq!(over["budget"]["state"], "over", "{over}");
    assert_eq!(over["figures"]["backing"]["precision"], "precise");
    assert!(over["figures"]["rss"]["read_ns"].as_u64().unwrap() > 0, "{over}");
    poll("the alarm in the log", || {
        let log = daemon.log();
        if log.contains("over budget") && log.contains("tight") { Ok(()) } else { Err(log) }
    });
    let below = budget(&daemon, "wide", "below");
    assert_eq!(below["budget"]["alarms"], 0, "{below}");
    assert_eq!(below["budget"]["budget_bytes"], 100u64 << 40);
    let free = poll("figures of the third", || {
        let accounting = daemon.vm("free")["accounting"].clone();
        if accounting["cost"]["high_bytes"].is_u64() { Ok(accounting) } else { Err(accounting) }
    });
    assert!(free["budget"].is_null(), "{free}");

    // The end of the VM is the end of its alarm.
    drop((tight, wide));
    let idle = budget(&daemon, "tight", "idle");
    assert_eq!(idle["cost"]["absent"]["reason"], "no-process", "{idle}");
    assert_eq!(idle["budget"]["alarms"], 1, "{idle}");
}

fn say_free(agent: &mut Agent, port: u32, memory_free_bytes: u64) {
    let stats = Stats {
        memory_total_bytes: 31 * MIB,
        memory_free_bytes,
        memory_available_bytes: memory_free_bytes,
        page_cache_bytes: 0,
        psi_some_avg10_centipercent: 0,
        psi_full_avg10_centipercent: 0,
        huge_pages_offlined: 0,
        huge_pages_claimed: 0,
        agent_cpu_ms: 0,
    };
    agent.send(port, &Message::Stats(stats));
}

fn rank(daemon: &Daemon, arguments: &[&str]) -> Value {
    let output = daemon.client(&[&["rank", "--json"], arguments].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn order(ranking: &Value) -> Vec<(String, u64, String)> {
    let word = |vm: &Value| vm["obstacle"]["reason"].as_str().unwrap_or("").to_owned();
    let vms = ranking["vms"].as_array().unwrap().iter();
    vms.map(|vm| (vm["name"].as_str().unwrap().into(), vm["reclaimable_bytes"].as_u64().unwrap(), word(vm))).collect()
}

#[test]
fn rank_orders_by_what_is_held_and_not_used() {
    let daemon = start();
    let nobody = order(&rank(&daemon, &[]));
    assert_eq!(nobody.iter().map(|vm| vm.2.as_str()).collect::<Vec<_>>(), ["no-agent"; 3], "{nobody:?}");

    let size: u64 = REGIONS.iter().map(|(_, size, _)| size).sum();
    let mut agents = Vec::new();
    // Backed all through; one guest says that it uses 4 MiB, the other 12 MiB.
    for (vm, used_mib) in [("tight", 12), ("wide", 4)] {
        let mut agent = Agent::boot(&daemon.socket(vm));
        let length = agent.guest.file.metadata().unwrap().len().cast_signed();
        nix::fcntl::fallocate(&agent.guest.file, nix::fcntl::FallocateFlags::empty(), 0, length).unwrap();
        let session = agent.start_session(hello());
        say_free(&mut agent, session.port, size - used_mib * MIB);
        agents.push((agent, session));
    }
    let wanted = ["wide", "tight", "free"];
    let ranking = poll("the guests' claims count", || {
        let ranking = rank(&daemon, &[]);
        let complete = ranking["vms"][1]["reclaimable_bytes"].as_u64() > Some(0);
        if complete { Ok(ranking) } else { Err(ranking) }
    });
    let ranked = order(&ranking);
    assert_eq!(ranked.iter().map(|vm| vm.0.as_str()).collect::<Vec<_>>(), wanted, "{ranking}");
    let held = ranking["vms"][0]["held_bytes"].as_u64().unwrap();
    assert_eq!(ranked[0].1, held - 4 * MIB, "{ranking}");
    assert_eq!(ranking["vms"][0]["guest_claimed_used_bytes"], 4 * MIB, "{ranking}");
    assert_eq!((&ranking["vms_total"], &ranking["precise_reads"]), (&3.into(), &0.into()), "{ranking}");
    assert_eq!(order(&rank(&daemon, &["--top", "1"])), ranked[..1]);

    // A closed gate leaves nothing to reclaim, and is named.
    assert!(daemon.client(&["inhibit", "wide", "--reason", "test"]).status.success());
    let gated = order(&rank(&daemon, &[]));
    assert_eq!((gated[0].0.as_str(), gated[2].0.as_str(), gated[2].1), ("tight", "wide", 0), "{gated:?}");
    let table = String::from_utf8(daemon.client(&["rank"]).stdout).unwrap();
    assert!(table.lines().any(|line| line.starts_with("wide") && line.contains("closed: operator")), "{table}");
}
