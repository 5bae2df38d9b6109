//! The QEMUs that VMs run on: the machine's own, and one with a device that takes any vhost-user back end.
//!
//! Called by [`crate::environment`]. Debian 12's QEMU has no such device, so a newer one is unpacked from Debian sid into the cache, with
//! its own C library, and started through a script there; nothing is installed on the machine. `FPR_TEST_QEMU` and
//! `FPR_TEST_GENERIC_QEMU` name other binaries.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::other_release::OtherRelease;
use crate::packages;
use crate::process::run;

/// The device by the name it has since QEMU 11; before it was not for users to create.
pub const GENERIC_DEVICE: &str = "vhost-user-test-device-pci";
/// Its name as a package, in every release.
const PACKAGE: &str = "qemu-system-x86";
/// Where Debian's amd64 packages put libraries, the dynamic loader among them.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// A QEMU binary, or a script that starts one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qemu {
    /// What to run.
    pub binary: PathBuf,
    /// First line of `qemu --version`.
    pub version: String,
}

impl Qemu {
    fn at(binary: PathBuf) -> Result<Self> {
        let version = run(Command::new(&binary).arg("--version"))?.lines().next().unwrap_or_default().to_owned();
        Ok(Self { binary, version })
    }

    /// The machine's own QEMU, installed if it is missing.
    ///
    /// # Errors
    /// It is missing and cannot be installed; the message holds the command that would.
    pub(crate) fn stock() -> Result<Self> {
        Self::at(stock_binary()?)
    }

    /// A QEMU with [`GENERIC_DEVICE`]: `stock` if it has the device, else one unpacked from Debian sid. The first call on a machine downloads
    /// about 55 MB.
    ///
    /// # Errors
    /// It cannot be fetched, or does not run here.
    pub(crate) fn generic(stock: &Self) -> Result<Self> {
        if let Some(path) = overridden("FPR_TEST_GENERIC_QEMU")? {
            let qemu = Self::at(path)?;
            ensure!(qemu.has_generic_device(), "FPR_TEST_GENERIC_QEMU: {} has no {GENERIC_DEVICE}", qemu.version);
            return Ok(qemu);
        }
        if stock.has_generic_device() {
            return Ok(stock.clone());
        }
        let qemu = Self::at(unpacked_from_sid()?)?;
        ensure!(qemu.has_generic_device(), "{} of Debian sid has no {GENERIC_DEVICE}", qemu.version);
        Ok(qemu)
    }

    fn has_generic_device(&self) -> bool {
        // For an unknown device QEMU prints nothing and ends with status 0.
        run(Command::new(&self.binary).args(["-device", &format!("{GENERIC_DEVICE},help")]))
            .is_ok_and(|properties| properties.contains("num_vqs"))
    }
}

fn overridden(variable: &str) -> Result<Option<PathBuf>> {
    let Some(path) = std::env::var_os(variable).map(PathBuf::from) else { return Ok(None) };
    ensure!(path.is_file(), "{variable}={}: no such file", path.display());
    Ok(Some(path))
}

fn stock_binary() -> Result<PathBuf> {
    if let Some(path) = overridden("FPR_TEST_QEMU")? {
        return Ok(path);
    }
    packages::installed("qemu-system-x86_64", PACKAGE).context("or set FPR_TEST_QEMU to a QEMU binary")
}

/// The script that starts sid's QEMU.
fn unpacked_from_sid() -> Result<PathBuf> {
    let done = packages::cache().join("qemu-sid");
    let script = done.join("qemu-system-x86_64");
    if script.is_file() {
        return Ok(script);
    }
    eprintln!("fetching a QEMU with {GENERIC_DEVICE} from Debian sid (about 55 MB) …");
    let work = tempfile::tempdir_in(packages::cache())?;
    let (apt, root) = (work.path().join("apt"), work.path().join("qemu-sid"));
    OtherRelease::open("sid", &apt)?.unpack_with_dependencies(PACKAGE, &root.join("root"))?;
    let staged = root.join("qemu-system-x86_64");
    fs::write(&staged, start_script(&done.join("root")))?;
    fs::set_permissions(&staged, fs::Permissions::from_mode(0o755))?;
    fs::rename(&root, &done).with_context(|| format!("moving {PACKAGE} of sid to {}", done.display()))?;
    Ok(script)
}

/// Everything of sid comes from `root`, by an absolute path, for the machine's own QEMU has its firmware and its modules at the places this
/// one would look. `exec` keeps the pid, which the harness and the host agent look at.
fn start_script(root: &Path) -> String {
    let path = |inside: &str| root.join(inside).display().to_string();
    let (libraries, modules) = (path(LIBRARIES), path(&format!("{LIBRARIES}/qemu")));
    format!(
        "#!/bin/sh\nexport QEMU_MODULE_DIR='{modules}'\nexec '{libraries}/ld-linux-x86-64.so.2' --library-path '{libraries}' '{}' -L '{}' -L '{}' \"$@\"\n",
        path("usr/bin/qemu-system-x86_64"),
        path("usr/share/qemu"),
        path("usr/share/seabios"),
    )
}
