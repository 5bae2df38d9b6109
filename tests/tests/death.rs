//! What an agent had isolated when it died comes back, and nothing before the host can no longer drop it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fpr_tests::poll;
use fpr_tests::reporting::{Reporting, ReportingVm, VM_NAME};
use fpr_tests::units::GIB;
use fpr_tests::vm::Vm;
use nix::sys::signal::Signal;

/// Service resumes within 5 s of both sides being up; the rest is for a busy machine.
const RESUMED: Duration = Duration::from_secs(20);
/// For a command in the guest, on a busy machine.
const COMMAND: Duration = Duration::from_secs(120);
/// Longer than the agent counts as soon (`REFAULT_AFTER` of the host agent's session).
const PAUSE: Duration = Duration::from_secs(20);
/// A kill may come a moment after the block is back; then it is tried again.
const ATTEMPTS: u32 = 16;

/// Waits until a memory block is offline. Built-in commands of the shell only: the block is back within milliseconds, and a process takes
/// longer to start.
const UNTIL_OFFLINE: &str = r#"set -- /sys/devices/system/memory/memory*/state
until for block; do read -r state < $block; [ "$state" = offline ] && break; done; [ "$state" = offline ]; do :; done"#;
/// Waits until a huge page is claimed.
const UNTIL_CLAIMED: &str = r#"pages=/sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages
until read -r count < $pages; [ "$count" -gt 0 ]; do :; done"#;

const OFFLINE: &str = "grep -l offline /sys/devices/system/memory/memory*/state | wc -l";
const CLAIMS: &str = "ls /run/fpr-guest/hugepages 2>/dev/null | wc -l";
/// Huge pages in them: a file is there before its first page is.
const CLAIMED: &str = "grep HugePages_Surp /proc/meminfo | tr -dc 0-9";

fn count(guest: &ReportingVm, command: &str) -> Result<u64> {
    let output = guest.vm.run(command)?.stdout;
    output.trim().parse().with_context(|| format!("`{command}` printed {output:?}"))
}

/// Kills the guest agent with SIGKILL right after `until_held` has ended in the guest, and returns how many pieces of memory it left, as
/// `held` counts them.
fn kill_while_holding(guest: &mut ReportingVm, until_held: &str, held: &str, arguments: &str) -> Result<u64> {
    for _ in 0..ATTEMPTS {
        let pid = guest.guest_pid()?;
        // One that is killed while it takes a block offline lives on, and holds its lock, until the kernel is done with that.
        let gone = format!("while [ -e /proc/{pid} ]; do sleep 0.02; done");
        let watcher = format!("{until_held}\nkill -9 {pid}; {gone}; echo killed");
        let watcher = guest.vm.spawn(&watcher)?;
        // A moment that was missed is not the last. Memory that is needed again within seconds makes the agent leave it alone for longer
        // (its policy's age), so memhog runs again only after a pause.
        let free_memory = || {
            guest.vm.run("memhog 600m")?;
            Ok(poll::until("the kill", PAUSE, || Ok(watcher.exited_at()), Option::is_some).is_ok())
        };
        poll::until("the agent to be killed", COMMAND, free_memory, |killed| *killed)?;
        watcher.wait(COMMAND)?;
        let left = count(guest, held)?;
        if left > 0 {
            return Ok(left);
        }
        guest.start_guest_agent(arguments)?;
    }
    anyhow::bail!("the agent never died while it held memory, in {ATTEMPTS} attempts")
}

#[test]
#[ignore = "boots a VM"]
fn blocks_of_a_killed_agent_come_back_at_the_next_start() -> Result<()> {
    let mut guest = Reporting::Agent.boot(Vm::builder().memory(GIB))?;
    kill_while_holding(&mut guest, UNTIL_OFFLINE, OFFLINE, "")?;
    guest.start_guest_agent("")?;
    let started = Instant::now();
    poll::until("all blocks online again", RESUMED, || count(&guest, OFFLINE), |left| *left == 0)?;
    let dropped = guest.counter("huge_pages_dropped")?;
    guest.vm.run("memhog 500m")?;
    poll::until("reports to go on", COMMAND, || guest.counter("huge_pages_dropped"), |now| *now > dropped + 100)?;
    println!("blocks online again within {:?} of the start", started.elapsed());
    assert_eq!(guest.vm.trouble(), Vec::<String>::new());
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn claims_of_a_killed_agent_come_back_by_recover() -> Result<()> {
    let mut guest = Reporting::AgentClaims.boot(Vm::builder().memory(GIB))?;
    kill_while_holding(&mut guest, UNTIL_CLAIMED, CLAIMED, "--no-offline")?;
    assert!(count(&guest, CLAIMS)? > 0, "claims outlive the agent");
    let recover = guest.vm.run_within("fpr-guest-agent recover", COMMAND)?;
    ensure!(recover.status == 0, "recover: {recover:?}");
    assert_eq!(count(&guest, CLAIMS)?, 0);
    assert_eq!(count(&guest, CLAIMED)?, 0);
    assert_eq!(count(&guest, "cat /proc/sys/vm/nr_overcommit_hugepages")?, 0);
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn a_killed_host_agent_leaves_no_block_offline() -> Result<()> {
    let guest = Reporting::Agent.boot(Vm::builder().memory(GIB))?;
    let host = guest.host_agent().context("no host agent")?;
    let watcher = guest.vm.spawn(&format!("{UNTIL_OFFLINE}\necho held"))?;
    let memhog = guest.vm.spawn("memhog 700m")?;
    watcher.wait_for_output("held", COMMAND)?;
    host.signal(Signal::SIGKILL)?;
    // Between two blocks of a pass none may be offline for a moment, so all must stay online.
    let mut since = Instant::now();
    let all_online_for = || {
        if count(&guest, OFFLINE)? > 0 {
            since = Instant::now();
        }
        Ok(since.elapsed())
    };
    // Lease, grace and margin are 10 s; the rest is for a busy machine.
    poll::until("unanswered blocks to come back", COMMAND, all_online_for, |quiet| *quiet >= Duration::from_secs(3))?;
    memhog.wait(COMMAND)?;
    guest.vm.read(&format!("/proc/{}/stat", guest.guest_pid()?)).context("the guest agent must go on")?;
    assert_eq!(guest.vm.trouble(), Vec::<String>::new());
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn a_guest_that_writes_to_freed_pages_is_found_by_measurement() -> Result<()> {
    let blind = "--skip-check command-line --skip-check boot-log --skip-check kernel-config";
    let builder = Vm::builder().memory(GIB).kernel_argument("init_on_free=1");
    let guest = ReportingVm::boot_with_agents(builder, &[], blind)?;
    let host = guest.host_agent().context("no host agent")?;
    let gates = |deadline| host.wait_for_gates(VM_NAME, &["write-on-free"], deadline);
    let mut rounds = 0;
    let found = loop {
        guest.vm.run("memhog 600m")?;
        rounds += 1;
        match gates(Duration::from_secs(20)) {
            Ok(found) => break found,
            Err(error) if rounds == 5 => return Err(error),
            Err(_) => {}
        }
    };
    assert!(found.values().any(|detail| detail.contains("backed again at once")), "{found:?}");
    let dropped = guest.settled_counter("huge_pages_dropped", COMMAND)?;
    println!("gate closed after {dropped} huge pages in {rounds} rounds");
    guest.vm.run("memhog 600m")?;
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(guest.counter("huge_pages_dropped")?, dropped, "dropped in vain behind a closed gate");
    Ok(())
}
