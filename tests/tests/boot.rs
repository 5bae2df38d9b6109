//! The harness itself: a stock guest boots, runs commands, and host memory is measured by what the memory file holds.

#![allow(clippy::expect_used)]

use std::time::Duration;

use anyhow::Result;
use fpr_tests::poll;
use fpr_tests::units::MIB;
use fpr_tests::vm::{Device, Vm};

/// For a command in the guest, on a busy machine.
const COMMAND: Duration = Duration::from_secs(120);
/// What memhog takes in these tests.
const HOGGED: u64 = 200 * MIB;
/// What the guest's own bookkeeping may blur of it.
const BLUR: u64 = 32 * MIB;

#[test]
#[ignore = "boots a VM"]
fn without_reporting_nothing_comes_back() -> Result<()> {
    let vm = Vm::builder().memory(512 * MIB).boot()?;
    let before = vm.host_memory()?.allocated_bytes()?;
    vm.run("memhog 200m")?;
    let after = vm.host_memory()?.allocated_bytes()?;
    assert!(after >= before + HOGGED - BLUR, "before {before}, after {after}");
    // Stock reporting would have shown by now: it makes a pass every 2 s.
    std::thread::sleep(Duration::from_secs(5));
    let later = vm.host_memory()?.allocated_bytes()?;
    assert!(later >= after, "after {after}, later {later}");
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn stock_reporting_returns_what_memhog_had() -> Result<()> {
    let vm = Vm::builder().memory(512 * MIB).device(Device::FreePageReporting).boot()?;
    let before = vm.host_memory()?.allocated_bytes()?;
    vm.run("memhog 200m")?;
    let look = || vm.host_memory()?.allocated_bytes();
    poll::until("memhog's memory to come back", COMMAND, look, |bytes| *bytes < before + BLUR)?;
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn commands_report_status_output_and_signals() -> Result<()> {
    let vm = Vm::builder().memory(256 * MIB).boot()?;
    assert_eq!(vm.run("echo one; echo two >&2")?.stdout, "one\ntwo\n");
    let failure = format!("{:#}", vm.run("echo why; exit 3").expect_err("status 3 is a failure"));
    assert!(failure.contains("status 3") && failure.contains("why"), "{failure}");

    let cat = vm.spawn("cat")?;
    cat.ask("to the command", "to the command", COMMAND)?;
    cat.signal(nix::sys::signal::Signal::SIGTERM)?;
    assert_eq!(cat.wait(COMMAND)?.status, 128 + 15);

    assert!(vm.read("/proc/version")?.starts_with("Linux version"));
    assert!(vm.read("/proc/no-such-file").is_err());
    for module in ["vsock", "virtio_balloon", "virtio_blk"] {
        assert!(vm.read("/proc/modules")?.contains(module), "{module} is not loaded");
    }
    assert!(!vm.console().contains("Invalid ELF"), "{}", vm.console());
    assert_eq!(vm.trouble(), Vec::<String>::new());
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn qemu_takes_and_drops_an_assigned_device() -> Result<()> {
    let vm = Vm::builder().memory(256 * MIB).boot()?;
    let holds = || -> Result<bool> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", vm.pid()))?;
        Ok(fds.flatten().any(|fd| {
            std::fs::read_link(fd.path()).is_ok_and(|target| target.to_string_lossy() == "anon_inode:kvm-vfio")
        }))
    };
    let device = match fpr_tests::vfio::KvmVfioDevice::create() {
        Ok(device) => device,
        Err(error) => {
            fpr_tests::skip::skip("qemu_takes_and_drops_an_assigned_device", &format!("{error:#}"));
            return Ok(());
        }
    };
    let set = vm.qmp().add_fd(&device)?;
    assert!(holds()?);
    vm.qmp().remove_fd(set)?;
    assert!(!holds()?);
    Ok(())
}

#[test]
#[ignore = "boots a VM"]
fn held_memory_is_verified_while_other_memory_churns() -> Result<()> {
    let disk = tempfile::NamedTempFile::new()?;
    disk.as_file().set_len(16 * MIB)?;
    let vm = Vm::builder().memory(512 * MIB).device(Device::Disk(disk.path().to_owned())).boot()?;
    let hold = vm.spawn("exec fpr-hold --mib 64 --for 600 --disk /dev/vda")?;
    hold.wait_for_output("holding", COMMAND)?;
    let churn = vm.run("fpr-hold --churn --mib 128 --for 3 --seed 7")?.stdout;
    assert!(churn.contains("mismatches 0 words "), "{churn}");

    let words = (64 + 16) * MIB / 8;
    hold.ask("verify", &format!("mismatches 0 words {words}\n"), COMMAND)?;
    // It would notice: a page of the tmpfs file is overwritten behind its back.
    vm.run("dd if=/dev/zero of=/dev/shm/fpr-hold bs=4096 seek=100 count=1 conv=notrunc")?;
    hold.ask("verify", &format!("mismatches 512 words {words}\n"), COMMAND)?;
    hold.signal(nix::sys::signal::Signal::SIGKILL)?;
    assert_eq!(hold.wait(COMMAND)?.status, 128 + 9);
    Ok(())
}
