//! What the guest's own kernel reports to the host agent's balloon device, with a stock kernel and no patch anywhere.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fpr_tests::daemon::Devices;
use fpr_tests::environment::Environment;
use fpr_tests::poll;
use fpr_tests::reporting::{Reporting, ReportingVm, VM_NAME};
use fpr_tests::shell::Job;
use fpr_tests::skip::skip;
use fpr_tests::units::{GIB, MIB};
use fpr_tests::vm::{Vm, VmBuilder};

/// The kernel makes a pass every 2 s and takes 12 s for 1.5 GiB; this is for a busy machine.
const RETURNED: Duration = Duration::from_secs(120);
const COMMAND: Duration = Duration::from_secs(120);
const KERNEL: &str = "kernel-reported";
/// What memhog takes.
const HOGGED: u64 = 600 * MIB;
/// What is held meanwhile.
const HELD: u64 = 64 * MIB;
/// What the guest's own bookkeeping may blur of it.
const BLUR: u64 = 32 * MIB;
/// Far below what the kernel takes by itself (120 s), so that a report that is not answered makes it complain (kernel/hung_task.c).
const COMPLAIN_SOON: &str = "echo 8 > /proc/sys/kernel/hung_task_timeout_secs";

/// False, with a skip recorded, where no QEMU for these tests is to be had.
fn can_run(test: &str) -> Result<bool> {
    let qemu = Environment::get()?.generic_qemu();
    if let Err(error) = &qemu {
        skip(test, &format!("{error:#}"));
    }
    Ok(qemu.is_ok())
}

fn builder() -> VmBuilder {
    Vm::builder().memory(GIB)
}

/// Runs memhog and returns at the moment the host has begun to drop what it left: the guest's kernel then has a report under way, or is
/// about to make the next.
fn report_under_way(guest: &ReportingVm) -> Result<()> {
    let memory = guest.vm.host_memory()?;
    guest.vm.run("memhog 600m")?;
    let full = memory.allocated_bytes()?;
    poll::until("the first drop", RETURNED, || memory.allocated_bytes(), |bytes| *bytes < full - 8 * MIB).map(drop)
}

fn wait_for_floor(guest: &ReportingVm, floor: u64) -> Result<()> {
    let look = || guest.vm.host_memory()?.allocated_bytes();
    poll::until("memhog's memory to come back", RETURNED, look, |bytes| *bytes < floor + BLUR)
        .map(drop)
        .with_context(|| format!("{:?}", guest.host_status()))
}

/// The daemon has dropped more than `before` for the guest's kernel. What it has taken but not answered is not counted, so the floor
/// alone says nothing: where it was reached before, the first report may still be under way.
fn wait_for_drops(guest: &ReportingVm, before: u64) -> Result<u64> {
    poll::until(
        "reports of the guest's kernel to be dropped",
        RETURNED,
        || guest.source_bytes(KERNEL, "dropped_bytes"),
        |bytes| *bytes > before,
    )
    .with_context(|| format!("{:?}", guest.host_status()))
}

/// Keeps patterns in the guest's memory.
fn hold(vm: &Vm) -> Result<Job<'_>> {
    let hold = vm.spawn(&format!("exec fpr-hold --mib {} --for 3600", HELD / MIB))?;
    hold.wait_for_output("holding", COMMAND)?;
    Ok(hold)
}

/// Every word that is held is what it was.
fn verify(hold: &Job<'_>) -> Result<()> {
    hold.ask("verify", &format!("mismatches 0 words {}\n", HELD / 8), COMMAND)
}

#[test]
#[ignore = "boots a VM"]
fn the_kernels_reports_return_memory_and_outlive_a_reset_and_a_new_daemon() -> Result<()> {
    if !can_run("the_kernels_reports_return_memory_and_outlive_a_reset_and_a_new_daemon")? {
        return Ok(());
    }
    let mut guest = Reporting::Kernel.boot(builder().rebooting())?;
    let before = guest.vm.host_memory()?.allocated_bytes()?;
    guest.vm.run(COMPLAIN_SOON)?;
    guest.vm.run("memhog 600m")?;
    wait_for_floor(&guest, before)?;
    wait_for_drops(&guest, HOGGED - BLUR)?;
    assert_eq!(guest.source_bytes(KERNEL, "refused_bytes")?, 0);
    assert_eq!(guest.counter("huge_pages_dropped")?, 0, "there is no agent in the guest");
    assert_eq!(guest.host_status()?["balloon"]["kernel_reporting"], true);
    assert_eq!(guest.host_status()?["balloon"]["chains_delayed"], 0, "no stock kernel reports too fast");

    // The machine is reset in the middle of it; what runs there next is given back no page of the past.
    report_under_way(&guest)?;
    guest.vm.reset()?;
    guest.vm.run(COMPLAIN_SOON)?;
    let hold = hold(&guest.vm)?;
    let holding = guest.vm.host_memory()?.allocated_bytes()?;
    let dropped = guest.source_bytes(KERNEL, "dropped_bytes")?;
    guest.vm.run("memhog 600m")?;
    wait_for_floor(&guest, holding)?;
    wait_for_drops(&guest, dropped)?;

    // QEMU 11.1 cannot connect the device to a new daemon, but plug it again (docs/vmm/qemu.md).
    guest.vm.unplug_balloon()?;
    let host = guest.host.as_mut().context("no host agent")?;
    host.kill_and_restart()?;
    guest.vm.plug_balloon(&host.balloon_socket(VM_NAME))?;
    guest.vm.run("memhog 600m")?;
    wait_for_floor(&guest, holding)?;
    wait_for_drops(&guest, 0)?;
    verify(&hold)?;
    assert_eq!(guest.vm.trouble(), Vec::<String>::new());

    // The daemon dies in the middle of it. Nobody reports any more, and everything else goes on.
    report_under_way(&guest)?;
    guest.host.as_mut().context("no host agent")?.kill_and_restart()?;
    guest.vm.run("memhog 100m")?;
    verify(&hold)?;
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn a_guest_that_writes_to_freed_pages_reports_by_its_kernel_though_not_by_its_agent() -> Result<()> {
    if !can_run("a_guest_that_writes_to_freed_pages_reports_by_its_kernel_though_not_by_its_agent")? {
        return Ok(());
    }
    let builder = builder().kernel_argument("init_on_free=1");
    let mut guest = ReportingVm::boot_with_devices(Devices::VsockAndBalloon, builder, &[])?;
    guest.start_guest_agent("")?;
    let host = guest.host_agent().context("no host agent")?;
    host.wait_for_gates(VM_NAME, &["write-on-free"], RETURNED)?;
    // Such a kernel has written to all of its memory when it boots.
    let floor = GIB / 4;
    wait_for_floor(&guest, floor)?;
    let dropped = guest.source_bytes(KERNEL, "dropped_bytes")?;
    guest.vm.run("memhog 600m")?;
    wait_for_floor(&guest, floor)?;
    wait_for_drops(&guest, dropped + HOGGED - floor)?;
    assert_eq!(guest.source_bytes(KERNEL, "refused_bytes")?, 0, "{}", guest.host_status()?);
    assert_eq!(guest.counter("huge_pages_dropped")?, 0, "{}", guest.host_status()?);
    host.wait_for_gates(VM_NAME, &["write-on-free"], RETURNED)?;
    assert_eq!(guest.vm.trouble(), Vec::<String>::new());
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn what_the_kernel_and_what_the_agent_returned_is_told_apart() -> Result<()> {
    if !can_run("what_the_kernel_and_what_the_agent_returned_is_told_apart")? {
        return Ok(());
    }
    let mut guest = ReportingVm::boot_with_devices(Devices::VsockAndBalloon, builder(), &[])?;
    guest.start_guest_agent("")?;
    let hold = hold(&guest.vm)?;
    let before = guest.vm.host_memory()?.allocated_bytes()?;
    let returned = |sources: [&str; 2]| -> Result<u64> {
        sources.into_iter().map(|source| guest.source_bytes(source, "dropped_bytes")).sum()
    };
    let by_agent = ["agent-offlined", "agent-claimed"];
    let (agent_before, kernel_before) = (returned(by_agent)?, guest.source_bytes(KERNEL, "dropped_bytes")?);

    // The kernel has begun, and would take a dozen seconds; the agent, which may have begun by itself, is asked for the rest.
    report_under_way(&guest)?;
    wait_for_drops(&guest, kernel_before)?;
    let drained = guest.host_agent().context("no host agent")?.command(&["drain", VM_NAME])?;
    wait_for_floor(&guest, before)?;
    let by_kernel = || guest.source_bytes(KERNEL, "dropped_bytes");
    let since = || Ok((returned(by_agent)? - agent_before, by_kernel()? - kernel_before));
    // What is under way is counted when it is answered.
    let enough = |(agent, kernel): &(u64, u64)| agent + kernel >= HOGGED - BLUR;
    let (agent, kernel) = poll::until("what came back to be counted", RETURNED, since, enough)?;
    println!("{drained}agent {agent} bytes, kernel {kernel} bytes");
    ensure!(agent > 0 && kernel > 0, "agent {agent}, kernel {kernel} bytes; drain said {drained}");
    verify(&hold)?;
    assert_eq!(guest.vm.trouble(), Vec::<String>::new());
    Ok(())
}
