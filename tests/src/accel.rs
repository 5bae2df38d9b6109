//! How the guest's CPU is run: KVM where a stock kernel really boots on it, QEMU's own translator otherwise.
//!
//! `/dev/kvm` alone proves nothing: a nested, software-only KVM creates VMs and then dies inside a distribution's kernel. The host agent's
//! probe finds that out within milliseconds. Where it says "able", this QEMU may still not get along with this KVM (`-cpu host` names what
//! the KVM then refuses), so the kernel of the tests is booted on it once; that answer is cached per host kernel, guest kernel and QEMU.
//! `FPR_TEST_ACCEL=kvm` or `tcg` overrides.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use fpr_host_agent::kvm::{self, Ability};

use crate::packages::{self, Packages};
use crate::units::MIB;
use crate::vm::{Platform, Vm};

/// A working KVM boots the kernel in well under two seconds; slow machines get some more.
const PROBE_DEADLINE: Duration = Duration::from_secs(15);

/// QEMU's `-accel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// Hardware virtualisation.
    Kvm,
    /// Translation, one thread per virtual CPU.
    Tcg,
}

impl Accelerator {
    /// The argument of `-accel`.
    #[must_use]
    pub fn qemu_argument(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }

    /// The argument of `-cpu`: all that the accelerator can do, except what makes translation slow. `rep stosb` (erms) is translated
    /// byte by byte, which makes zeroing and filling memory six times slower than the loop the kernel and glibc otherwise choose.
    /// A fifth page-table level (la57) only lengthens the software page walk.
    #[must_use]
    pub fn qemu_cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max,erms=off,la57=off",
        }
    }

    /// Decides by override, by the probe, by an earlier answer, or by booting the kernel.
    ///
    /// # Errors
    /// The override is neither `kvm` nor `tcg`.
    pub fn choose(packages: &Packages, initramfs: &Path) -> Result<Self> {
        match std::env::var("FPR_TEST_ACCEL").as_deref() {
            Ok("kvm") => return Ok(Self::Kvm),
            Ok("tcg") => return Ok(Self::Tcg),
            Ok(other) => bail!("FPR_TEST_ACCEL={other}: must be kvm or tcg"),
            Err(_) => {}
        }
        if kvm::probe() != Ability::Able {
            return Ok(Self::Tcg);
        }
        let host = fs::read_to_string("/proc/sys/kernel/version").unwrap_or_default();
        let host_release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let question =
            format!("{} {} {} {}", host_release.trim(), host.trim(), packages.kernel.release, packages.qemu.version);
        let cache = packages::cache().join("accelerator");
        if let Some(answer) =
            fs::read_to_string(&cache).ok().as_deref().and_then(|text| text.strip_prefix(&question)).map(str::trim)
        {
            return Ok(if answer == "kvm" { Self::Kvm } else { Self::Tcg });
        }
        eprintln!("probing whether {} boots on KVM …", packages.kernel.release);
        let platform = Platform { accelerator: Self::Kvm, qemu: &packages.qemu, kernel: &packages.kernel, initramfs };
        let booted = Vm::builder().memory(256 * MIB).boot_on(platform, PROBE_DEADLINE);
        let chosen = if booted.is_ok() { Self::Kvm } else { Self::Tcg };
        // Without the cached answer the next run probes again, no more.
        let _ = fs::write(&cache, format!("{question} {chosen}\n"));
        Ok(chosen)
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}
