//! Both agents as shipped, end to end.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fpr_tests::artifacts;
use fpr_tests::poll;
use fpr_tests::reporting::{Reporting, ReportingVm, VM_NAME};
use fpr_tests::units::{GIB, MIB};
use fpr_tests::vm::Vm;

/// Generous for a busy machine; how fast it is, the benchmark says.
const RETURNED: Duration = Duration::from_secs(90);
/// What the guest's own bookkeeping may keep of a program's memory: parts of memory blocks with other pages in them.
const KEPT: u64 = 96 * MIB;

#[test]
#[ignore = "boots a VM"]
fn memory_of_an_ended_program_comes_back_by_offlining() -> Result<()> {
    let guest = Reporting::Agent.boot(Vm::builder().memory(GIB))?;
    memhog_comes_back(&guest)?;
    assert!(guest.settled_counter("huge_pages_offlined", RETURNED)? > 0);
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn memory_of_an_ended_program_comes_back_by_claims() -> Result<()> {
    let guest = Reporting::AgentClaims.boot(Vm::builder().memory(GIB))?;
    memhog_comes_back(&guest)?;
    assert_eq!(guest.settled_counter("huge_pages_offlined", RETURNED)?, 0);
    assert!(guest.counter("huge_pages_claimed")? > 0);
    Ok(())
}

fn memhog_comes_back(guest: &ReportingVm) -> Result<()> {
    let before = guest.vm.host_memory()?.allocated_bytes()?;
    guest.vm.run("memhog 600m")?;
    let look = || guest.vm.host_memory()?.allocated_bytes();
    poll::until("memhog's memory to come back", RETURNED, look, |bytes| *bytes < before + KEPT)?;
    assert_eq!(guest.vm.trouble(), Vec::<String>::new());
    Ok(())
}

#[test]
#[ignore = "boots a VM; takes minutes"]
fn pages_in_use_keep_their_content_through_20000_dropped_huge_pages() -> Result<()> {
    const WANTED: u64 = 20_000;
    // Debian's kernel zeroes huge pages twice, once for the program and once by init_on_alloc, and a translated guest is slow at it.
    let mut guest = Reporting::Agent.boot(Vm::builder().memory(2 * GIB).kernel_argument("init_on_alloc=0"))?;
    // Memory that is used again at once would make the agent slow down, rightly; here it must not.
    let fearless = r#"[policy]\nmin_free_age = "100ms"\nmax_free_age = "100ms"\n"#;
    guest.vm.run(&format!("printf '{fearless}' > /run/guest.toml; kill {}", guest.guest_pid()?))?;
    poll::until("the agent's end", RETURNED, || Ok(guest.guest_agent_cpu_time().is_err()), |ended| *ended)?;
    guest.start_guest_agent("--config /run/guest.toml")?;
    let hold = guest.vm.spawn("exec fpr-hold --mib 256 --for 3600")?;
    hold.wait_for_output("holding", Duration::from_secs(120))?;
    let churn = guest.vm.spawn("exec fpr-hold --churn --mib 128 --for 30 --seed 20000")?;
    let end = Instant::now() + Duration::from_secs(600);
    while guest.counter("huge_pages_dropped")? < WANTED && Instant::now() < end {
        let dropped = guest.counter("huge_pages_dropped")?;
        // One per virtual CPU.
        guest.vm.run("memhog 600m & memhog 600m && wait $!")?;
        // Most of the 600 huge pages; the next round need not wait for the rest, nor for an agent that steps back for the other programs.
        let look = || guest.counter("huge_pages_dropped");
        let _ = poll::until("a round's drops", Duration::from_secs(4), look, |now| *now >= dropped + 500);
    }
    let dropped = guest.counter("huge_pages_dropped")?;
    assert!(dropped >= WANTED, "{dropped} huge pages dropped in ten minutes");
    let churned = churn.wait(Duration::from_secs(120))?;
    assert!(churned.stdout.contains("mismatches 0 words "), "{}", churned.stdout);
    let words = 256 * MIB / 8;
    hold.ask("verify", &format!("mismatches 0 words {words}\n"), Duration::from_secs(120))?;
    // A program that starts between the last look at a block and its offlining may get a page of it; the kernel then
    // refuses and dumps the page. It costs nothing but the log lines, and the agent rests from offlining after each.
    let (dumps, trouble): (Vec<String>, Vec<String>) =
        guest.vm.trouble().into_iter().partition(|line| line.contains("page dumped because: unmovable page"));
    println!("{dropped} huge pages dropped, {} page dumps", dumps.len());
    assert_eq!(trouble, Vec::<String>::new());
    assert!(dumps.len() <= 3, "{dumps:?}");
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn idle_agents_are_small_and_quiet() -> Result<()> {
    // The limit on the guest agent is 6 ticks of the clock that counts it.
    const WINDOW: Duration = Duration::from_secs(30);
    const WINDOWS: u32 = 4;
    const SHARE: f64 = 0.002;
    let guest = Reporting::Agent.boot(Vm::builder().memory(GIB))?;
    let host = guest.host_agent().context("no host agent")?;
    // What the boot left free is reported first.
    let (mut dropped, mut since) = (0, Instant::now());
    let look = || {
        let now = guest.counter("huge_pages_dropped")?;
        if now != dropped {
            (dropped, since) = (now, Instant::now());
        }
        Ok(since.elapsed())
    };
    poll::until("the first reports to end", Duration::from_secs(180), look, |quiet| *quiet >= Duration::from_secs(10))?;
    // The guest's clock goes on while the host runs somebody else on its CPU, and whoever is interrupted there pays for it. That can only
    // add, so the first window that is quiet enough says what the agents take.
    let mut shares = (f64::MAX, f64::MAX);
    for _ in 0..WINDOWS {
        let (start, guest_before, host_before) = (Instant::now(), guest.guest_agent_cpu_time()?, host.cpu_time()?);
        std::thread::sleep(WINDOW);
        let share = |used: Duration| used.as_secs_f64() / start.elapsed().as_secs_f64();
        let guest_share = share(guest.guest_agent_cpu_time()?.saturating_sub(guest_before));
        let host_share = share(host.cpu_time()?.saturating_sub(host_before));
        shares = (shares.0.min(guest_share), shares.1.min(host_share));
        if shares.0 <= SHARE && shares.1 <= SHARE {
            break;
        }
    }
    let (guest_share, host_share) = shares;
    let (guest_bytes, host_bytes) = (guest.guest_agent_resident_bytes()?, host.resident_bytes()?);
    println!(
        "guest agent {guest_bytes} bytes, {guest_share:.4} CPU; host agent {host_bytes} bytes, {host_share:.4} CPU"
    );
    assert!(guest_bytes <= 8 * MIB, "guest agent: {guest_bytes} bytes resident");
    assert!(host_bytes <= 16 * MIB, "host agent: {host_bytes} bytes resident");
    assert!(guest_share <= SHARE, "guest agent: {guest_share} of a CPU");
    assert!(host_share <= SHARE, "host agent: {host_share} of a CPU");
    Ok(())
}

#[test]
#[ignore = "builds the shipped guest agent"]
fn the_guest_agent_is_one_small_static_binary() -> Result<()> {
    let binary = artifacts::guest_agent()?;
    let size = std::fs::metadata(&binary)?.len();
    assert!(size <= 4 * MIB, "{size} bytes");
    let elf = std::fs::read(&binary)?;
    assert_eq!(
        program_header_types(&elf).context("not an ELF file")?.iter().filter(|&&kind| kind == PT_INTERP).count(),
        0
    );
    Ok(())
}

/// The program header that names a dynamic loader (elf(5)).
const PT_INTERP: u32 = 3;

/// `p_type` of each program header of a 64-bit little-endian ELF file; offsets from elf(5).
fn program_header_types(elf: &[u8]) -> Option<Vec<u32>> {
    let half = |at: usize| Some(usize::from(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?)));
    let table = usize::try_from(u64::from_le_bytes(elf.get(32..40)?.try_into().ok()?)).ok()?;
    let (size, count) = (half(54)?, half(56)?);
    (0..count)
        .map(|index| Some(u32::from_le_bytes(elf.get(table + index * size..)?.get(..4)?.try_into().ok()?)))
        .collect()
}

#[test]
#[ignore = "boots a VM"]
fn a_guest_that_writes_to_freed_pages_is_refused_by_name() -> Result<()> {
    let guest = Reporting::Agent.boot(Vm::builder().memory(GIB).kernel_argument("init_on_free=1"))?;
    let host = guest.host_agent().context("no host agent")?;
    let gates = host.wait_for_gates(VM_NAME, &["write-on-free"], RETURNED)?;
    assert!(gates.values().any(|detail| detail.contains("init_on_free")), "{gates:?}");
    guest.vm.run("memhog 400m")?;
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(guest.counter("huge_pages_dropped")?, 0);
    Ok(())
}
