//! What this host's KVM can do, and the tiny guest that finds out.
//!
//! [`probe`] is for `doctor` and for the test harness; [`guest`] also runs the programs of the tests that need a real
//! KVM guest. The daemon's `serve` uses neither.
//!
//! That `/dev/kvm` opens proves little: a software KVM for nested guests creates VMs and then fails to emulate what
//! every distribution's kernel does early in its boot. So the probe lets a guest of a few instructions do it: enable the
//! extended state (XCR0) and execute an instruction with a VEX prefix. It takes a few milliseconds and 2 MiB.
//!
//! Trusted: the kernel behind `/dev/kvm`, to return from KVM_RUN when a signal is pending. Nothing else is: every guest
//! runs against a deadline.

#[cfg(target_arch = "x86_64")]
pub mod guest;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod sys;

use kvm_ioctls::Kvm;
use nix::errno::Errno;
use std::fmt;

/// `KVM_API_VERSION` of `linux/kvm.h`; "it should not change" (`Documentation/virt/kvm/api.rst`).
const API_VERSION: i32 = 12;

/// What this host's KVM can do, from nothing to everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ability {
    /// There is no `/dev/kvm`.
    Absent,
    /// `/dev/kvm` is there, and this user may not open it.
    NotPermitted,
    /// `/dev/kvm` opens, and no VM of a few instructions can be run: what was tried and what became of it.
    Unusable(String),
    /// Small guests run, an instruction that every stock kernel executes does not: what became of it.
    NoStockKernel(String),
    /// Can run a stock kernel.
    Able,
}

impl Ability {
    /// The name under which machine-readable output knows it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::NotPermitted => "not-permitted",
            Self::Unusable(_) => "unusable",
            Self::NoStockKernel(_) => "no-stock-kernel",
            Self::Able => "able",
        }
    }

    /// What to do about it; `None` if there is nothing to do.
    #[must_use]
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Absent => Some(
                "load kvm_intel or kvm_amd; if that fails, switch virtualisation on in the firmware, or nested \
                 virtualisation on the host of this VM",
            ),
            Self::NotPermitted => Some("join the group that owns /dev/kvm (usually kvm), or run as root"),
            Self::Unusable(_) => Some("see the kernel's log for messages of kvm"),
            Self::NoStockKernel(_) => Some("use a host with hardware virtualisation; here, QEMU needs -accel tcg"),
            Self::Able => None,
        }
    }

    /// Whether a guest made of a few plain instructions runs, as [`guest`] makes them.
    #[must_use]
    pub fn runs_small_guests(&self) -> bool {
        matches!(self, Self::NoStockKernel(_) | Self::Able)
    }
}

/// The reason, for people.
impl fmt::Display for Ability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("there is no /dev/kvm"),
            Self::NotPermitted => f.write_str("this user may not open /dev/kvm"),
            Self::Unusable(why) => write!(f, "/dev/kvm cannot be used: {why}"),
            Self::NoStockKernel(why) => {
                write!(f, "KVM runs small guests, but no stock kernel: an instruction with a VEX prefix {why}")
            }
            Self::Able => f.write_str("KVM can run a stock kernel"),
        }
    }
}

/// Asks `/dev/kvm`. Milliseconds; at worst a second or so, if a guest hangs.
#[must_use]
pub fn probe() -> Ability {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => return not_opened(Errno::from_raw(error.errno())),
    };
    match kvm.get_api_version() {
        API_VERSION => runs(&kvm),
        version => Ability::Unusable(format!("its API has version {version}, not {API_VERSION}")),
    }
}

fn not_opened(errno: Errno) -> Ability {
    match errno {
        // A device node without a driver behind it gives one of the other two.
        Errno::ENOENT | Errno::ENODEV | Errno::ENXIO => Ability::Absent,
        Errno::EACCES | Errno::EPERM => Ability::NotPermitted,
        other => Ability::Unusable(format!("open: {}", other.desc())),
    }
}

#[cfg(target_arch = "x86_64")]
fn runs(kvm: &Kvm) -> Ability {
    use guest::{Incomplete, program};
    if let Err(why) = guest::completes(kvm, program::PLAIN) {
        return Ability::Unusable(format!("a guest of one instruction {why}"));
    }
    match guest::completes(kvm, program::VEX) {
        Ok(()) => Ability::Able,
        // A processor without AVX raises an exception, and no kernel makes it do so.
        Err(Incomplete::Faulted) if !guest::offers_avx(kvm) => Ability::Able,
        Err(why) => Ability::NoStockKernel(why.to_string()),
    }
}

/// No KVM is known on other architectures that creates VMs and cannot run a kernel.
#[cfg(not(target_arch = "x86_64"))]
fn runs(kvm: &Kvm) -> Ability {
    match kvm.create_vm() {
        Ok(_) => Ability::Able,
        Err(error) => Ability::Unusable(format!("KVM_CREATE_VM: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_open_says_is_told_apart() {
        assert_eq!(not_opened(Errno::ENOENT), Ability::Absent);
        assert_eq!(not_opened(Errno::ENODEV), Ability::Absent);
        assert_eq!(not_opened(Errno::EACCES), Ability::NotPermitted);
        assert_eq!(not_opened(Errno::EMFILE).to_string(), "/dev/kvm cannot be used: open: Too many open files");
    }
}
