//! What all VMs of a process share: packages, built binaries, the initramfs and the accelerator. Prepared once, at the first use.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow};
use nix::fcntl::{Flock, FlockArg};

use crate::accel::Accelerator;
use crate::packages::{self, Packages};
use crate::qemu::Qemu;
use crate::{artifacts, initramfs};

/// Everything a VM needs.
#[derive(Debug)]
pub struct Environment {
    /// QEMU, kernel, busybox, memhog.
    pub packages: Packages,
    /// The guest's root file system, with the shipped guest agent inside.
    pub initramfs: PathBuf,
    /// KVM or TCG.
    pub accelerator: Accelerator,
    generic_qemu: OnceLock<Result<Qemu, String>>,
}

static ENVIRONMENT: OnceLock<Result<Environment, String>> = OnceLock::new();

impl Environment {
    /// Prepares everything, or returns what is prepared. Takes minutes on a new machine, otherwise a second.
    ///
    /// # Errors
    /// Something is missing and cannot be fetched or built; the message says what to do.
    pub fn get() -> Result<&'static Self> {
        ENVIRONMENT
            .get_or_init(|| Self::prepare().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|error| anyhow!(error.clone()))
    }

    fn prepare() -> Result<Self> {
        let _lock = lock_cache()?;
        let packages = Packages::obtain()?;
        let mut binaries = artifacts::guest_binaries()?;
        binaries.push(("fpr-guest-agent", artifacts::guest_agent()?));
        let initramfs = initramfs::build(&packages, &binaries)?;
        let accelerator = Accelerator::choose(&packages, &initramfs)?;
        Ok(Self { packages, initramfs, accelerator, generic_qemu: OnceLock::new() })
    }

    /// A QEMU with a device that takes any vhost-user back end. Fetched at the first use on a machine, which takes some 20 s.
    ///
    /// # Errors
    /// It is not to be had here; whoever needs it can only be left out.
    pub fn generic_qemu(&self) -> Result<&Qemu> {
        let obtain = || {
            let _lock = lock_cache()?;
            Qemu::generic(&self.packages.qemu)
        };
        self.generic_qemu
            .get_or_init(|| obtain().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|error| anyhow!("no QEMU with a generic vhost-user device: {error}"))
    }
}

/// Test processes prepare one after the other; the second finds everything done.
fn lock_cache() -> Result<Flock<fs::File>> {
    let cache = packages::cache();
    fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
    let lock = fs::File::create(cache.join("lock"))?;
    Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno).context("locking the cache")
}
