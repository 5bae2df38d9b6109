//! Locked and pinned memory, by `/proc/PID/status`. Pure: text in, findings out.

use super::{Finding, uninspectable};
use fpr_protocol::Gate;

/// Locked memory closes the gate from this fraction of guest memory on.
///
/// `mem-lock=on` and mlockall lock all of it, a VMM that binds memory may lock one NUMA node, a device of VFIO type 1 is
/// accounted as locked memory, too. What VMMs lock otherwise (keys, rings) is well below a mebibyte. `smaps` would tell
/// mapping by mapping, but takes seconds for large guests.
const LOCKED_FRACTION: u64 = 16;

/// Looks at `VmLck` and `VmPin`, which count kibibytes (`task_mem` in the kernel's `fs/proc/task_mmu.c`).
pub(super) fn check(status: &str, guest_bytes: u64) -> Vec<Finding> {
    let (Some(locked), Some(pinned)) = (kibibytes(status, "VmLck:"), kibibytes(status, "VmPin:")) else {
        // A process that has exited and was not yet reaped has no memory and no descriptors either.
        return vec![uninspectable("its status shows no VmLck and VmPin: the VMM has exited".to_owned())];
    };
    let mut findings = Vec::new();
    if pinned > 0 {
        let detail =
            format!("VmPin is {pinned} kB: something holds pinned pages; detach the device to resume reporting");
        findings.push(Finding { gate: Gate::AssignedDevice, detail });
    }
    if locked > 0 && locked.saturating_mul(1024) >= guest_bytes / LOCKED_FRACTION {
        let guest = guest_bytes / 1024;
        let detail = format!("VmLck is {locked} kB of {guest} kB of guest memory: set -overcommit mem-lock=off");
        findings.push(Finding { gate: Gate::MemoryLocked, detail });
    }
    findings
}

/// The value of one line, such as `VmLck:`, in KiB.
pub(crate) fn kibibytes(status: &str, key: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().strip_suffix("kB")?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn gates(locked: u64, pinned: u64, guest_bytes: u64) -> Vec<Gate> {
        let status =
            format!("Name:\tqemu\nVmPeak:\t  100 kB\nVmLck:\t{locked:8} kB\nVmPin:\t{pinned:8} kB\nThreads:\t4\n");
        check(&status, guest_bytes).into_iter().map(|finding| finding.gate).collect()
    }

    #[test]
    fn locked_memory_is_measured_against_guest_memory() {
        assert_eq!(gates(0, 0, 2 << 30), []);
        assert_eq!(gates(0, 0, 0), []);
        assert_eq!(gates(64, 0, 2 << 30), []);
        assert_eq!(gates((128 << 10) - 1, 0, 2 << 30), []);
        assert_eq!(gates(128 << 10, 0, 2 << 30), [Gate::MemoryLocked]);
        assert_eq!(gates(u64::MAX, 0, 2 << 30), [Gate::MemoryLocked]);
    }

    #[test]
    fn one_pinned_page_is_enough() {
        assert_eq!(gates(0, 4, 2 << 30), [Gate::AssignedDevice]);
        assert_eq!(gates(2 << 20, 4, 2 << 30), [Gate::AssignedDevice, Gate::MemoryLocked]);
    }

    #[test]
    fn a_status_without_memory_is_not_innocent() {
        for status in ["", "Name:\tqemu\nState:\tZ (zombie)\n", "VmLck:\t0 kB\n", "VmLck:\t0 kB\nVmPin:\tnone\n"] {
            let findings = check(status, 1 << 30);
            assert_eq!(findings.first().unwrap().gate, Gate::Uninspectable, "{status:?}");
        }
    }
}
