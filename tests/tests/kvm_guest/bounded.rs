//! The guest of the probe: its answer, and that no guest keeps its host.

use super::runs_here;
use anyhow::{Result, ensure};
use fpr_host_agent::kvm::guest::{Exit, Guest};
use fpr_host_agent::kvm::{self, Ability};
use kvm_ioctls::Kvm;
use nix::sys::signal::SigSet;
use std::time::{Duration, Instant};
use vm_memory::{GuestAddress, GuestMemoryMmap};

fn start(code: &[u8]) -> Result<(Guest, kvm::guest::Vcpu)> {
    let kvm = Kvm::new()?;
    let guest = Guest::new(&kvm, GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)])?, code)?;
    let vcpu = guest.vcpu(&kvm, 0)?;
    Ok((guest, vcpu))
}

#[test]
fn the_probe_is_quick_and_agrees_with_the_device_node() {
    let start = Instant::now();
    let ability = kvm::probe();
    println!("{ability} ({}), {:?}", ability.name(), start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(ability == Ability::Absent, !std::path::Path::new("/dev/kvm").exists());
    assert_eq!(ability.remedy().is_none(), ability == Ability::Able);
}

#[test]
fn a_guest_that_hangs_is_stopped_and_can_go_on() -> Result<()> {
    if !runs_here("a_guest_that_hangs_is_stopped_and_can_go_on") {
        return Ok(());
    }
    let before = SigSet::thread_get_mask()?;
    // 1: jmp 1b
    let (_guest, mut vcpu) = start(&[0xeb, 0xfe])?;
    for patience in [Duration::ZERO, Duration::from_millis(50), Duration::from_millis(50)] {
        let start = Instant::now();
        let exit = vcpu.run(start + patience)?;
        ensure!(exit == Exit::TimedOut, "{exit:?}");
        ensure!((patience..patience + Duration::from_secs(20)).contains(&start.elapsed()), "{:?}", start.elapsed());
    }
    ensure!(SigSet::thread_get_mask()? == before, "the thread blocks other signals than before");
    Ok(())
}

#[test]
fn what_a_guest_does_is_told() -> Result<()> {
    if !runs_here("what_a_guest_does_is_told") {
        return Ok(());
    }
    // mov $0x12345678, %eax; out %eax, $0x20; out %ax, $0x21; out %al, $0x22; hlt; ud2
    let (_guest, mut vcpu) =
        start(&[0xb8, 0x78, 0x56, 0x34, 0x12, 0xe7, 0x20, 0x66, 0xe7, 0x21, 0xe6, 0x22, 0xf4, 0x0f, 0x0b])?;
    let deadline = Instant::now() + Duration::from_secs(60);
    for expected in [
        Exit::Out { port: 0x20, value: 0x1234_5678 },
        Exit::Out { port: 0x21, value: 0x5678 },
        Exit::Out { port: 0x22, value: 0x78 },
        Exit::Halted,
        Exit::Shutdown,
    ] {
        assert_eq!(vcpu.run(deadline)?, expected);
    }
    Ok(())
}
