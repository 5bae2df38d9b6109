//! Gates the host sees by itself: a real QEMU in the state that closes each of them.

use std::time::Duration;

use anyhow::{Context, Result};
use fpr_tests::daemon::HostAgent;
use fpr_tests::poll;
use fpr_tests::reporting::ReportingVm;
use fpr_tests::skip::skip;
use fpr_tests::units::{GIB, MIB};
use fpr_tests::vfio::KvmVfioDevice;
use fpr_tests::vm::{Device, MemoryBackend, Vm};

/// The host agent looks into the VMM's process every few seconds at most; the rest is for a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

#[test]
#[ignore = "boots a VM"]
fn a_vm_with_nothing_special_has_no_closed_gate() -> Result<()> {
    let host = HostAgent::start(&["plain"], &[])?;
    let _vm = Vm::builder().memory(256 * MIB).device(Device::VhostUserVsock(host.socket("plain"))).boot()?;
    host.wait_for_gates("plain", &[], DEADLINE).map(drop)
}

#[test]
#[ignore = "boots a VM"]
fn locked_memory_closes_a_gate() -> Result<()> {
    let host = HostAgent::start(&["locked"], &[])?;
    let _vm = Vm::builder()
        .memory(256 * MIB)
        .qemu_arguments(&["-overcommit", "mem-lock=on"])
        .device(Device::VhostUserVsock(host.socket("locked")))
        .boot()?;
    host.wait_for_gates("locked", &["memory-locked"], DEADLINE).map(drop)
}

#[test]
#[ignore = "boots a VM"]
fn private_memory_closes_a_gate_and_the_remedy_is_named() -> Result<()> {
    let host = HostAgent::start(&["private"], &[])?;
    let _vm = Vm::builder()
        .memory(256 * MIB)
        .backend(MemoryBackend::PrivateMemfd)
        .device(Device::VhostUserVsock(host.socket("private")))
        .boot()?;
    let gates = host.wait_for_gates("private", &["backing-unsuitable"], DEADLINE)?;
    let detail = gates.get("backing-unsuitable").context("the gate has no detail")?;
    assert!(detail.contains("share=on"), "{detail}");
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn an_assigned_device_stops_reporting_while_it_is_there() -> Result<()> {
    let device = match KvmVfioDevice::create() {
        Ok(device) => device,
        Err(error) => {
            skip("an_assigned_device_stops_reporting_while_it_is_there", &format!("{error:#}"));
            return Ok(());
        }
    };
    let guest = ReportingVm::boot_with_agents(Vm::builder().memory(GIB), &[], "")?;
    let host = guest.host_agent().context("no host agent")?;
    let name = fpr_tests::reporting::VM_NAME;
    host.wait_for_gates(name, &[], DEADLINE)?;

    let set = guest.vm.qmp().add_fd(&device)?;
    host.wait_for_gates(name, &["assigned-device"], DEADLINE)?;
    let dropped = guest.settled_counter("huge_pages_dropped", DEADLINE)?;
    guest.vm.run("memhog 400m")?;
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(guest.counter("huge_pages_dropped")?, dropped, "dropped with an assigned device present");

    guest.vm.qmp().remove_fd(set)?;
    host.wait_for_gates(name, &[], DEADLINE)?;
    poll::until("reporting to resume", DEADLINE, || guest.counter("huge_pages_dropped"), |now| *now >= dropped + 150)?;
    Ok(())
}
