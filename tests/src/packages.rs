//! QEMU, the guest's kernel with its modules, busybox and memhog, taken from Debian packages.
//!
//! QEMU is installed (as root) because it needs its firmware at fixed paths; everything that runs in the guest is only unpacked into the
//! cache, so the guest does not depend on what the running machine has. `FPR_TEST_KERNEL` (an image `…/boot/vmlinuz-RELEASE` with
//! `…/lib/modules/RELEASE` beside it, or the name of a Debian package) overrides.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{self, run};
use crate::qemu::Qemu;

/// What a VM is made of.
#[derive(Debug, Clone)]
pub struct Packages {
    /// The machine's QEMU.
    pub qemu: Qemu,
    /// The guest's kernel.
    pub kernel: Kernel,
    /// A statically linked busybox.
    pub busybox: PathBuf,
    /// memhog, its libraries and the dynamic loader: path in the guest, file on the host.
    pub memhog: Vec<(&'static str, PathBuf)>,
}

/// A kernel image and its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The image, as QEMU's `-kernel` wants it.
    pub image: PathBuf,
    /// What `uname -r` says in the guest.
    pub release: String,
    /// `lib/modules/RELEASE/kernel`.
    pub modules: PathBuf,
}

/// Newest first: the one with the wanted kernel may be missing from older mirrors.
const KERNEL_PACKAGES: [&str; 2] = ["linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64"];

impl Packages {
    /// Finds or fetches everything. The first call on a machine downloads about 70 MB.
    ///
    /// # Errors
    /// A package is missing and cannot be fetched; the message holds the command that would.
    pub fn obtain() -> Result<Self> {
        let qemu = Qemu::stock()?;
        let kernel = kernel()?;
        let busybox = unpacked("busybox-static")?.join("bin/busybox");
        let (numactl, numa, libc) = (unpacked("numactl")?, unpacked("libnuma1")?, unpacked("libc6")?);
        let memhog = vec![
            ("bin/memhog", numactl.join("usr/bin/memhog")),
            (
                "lib/libnuma.so.1",
                find(&numa, &["usr/lib/x86_64-linux-gnu/libnuma.so.1", "lib/x86_64-linux-gnu/libnuma.so.1"])?,
            ),
            ("lib/libc.so.6", find(&libc, &["usr/lib/x86_64-linux-gnu/libc.so.6", "lib/x86_64-linux-gnu/libc.so.6"])?),
            (
                "lib64/ld-linux-x86-64.so.2",
                find(
                    &libc,
                    &[
                        "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
                        "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
                        "lib64/ld-linux-x86-64.so.2",
                    ],
                )?,
            ),
        ];
        Ok(Self { qemu, kernel, busybox, memhog })
    }
}

/// Where downloads and built initramfs images are kept: `FPR_TEST_CACHE`, else `.cache` in the workspace (ignored by git).
#[must_use]
pub fn cache() -> PathBuf {
    std::env::var_os("FPR_TEST_CACHE").map_or_else(|| process::workspace().join(".cache"), PathBuf::from)
}

fn kernel() -> Result<Kernel> {
    match std::env::var("FPR_TEST_KERNEL") {
        Ok(path) if path.contains('/') => {
            kernel_at(Path::new(&path)).with_context(|| format!("FPR_TEST_KERNEL={path}"))
        }
        Ok(package) => kernel_package(&package).with_context(|| format!("FPR_TEST_KERNEL={package}")),
        Err(_) => {
            let mut failures = Vec::new();
            for package in KERNEL_PACKAGES {
                match kernel_package(package) {
                    Ok(kernel) => return Ok(kernel),
                    Err(error) => failures.push(format!("{package}: {error:#}")),
                }
            }
            bail!(
                "no Debian cloud kernel to be had; set FPR_TEST_KERNEL to an image …/boot/vmlinuz-RELEASE ({})",
                failures.join("; ")
            )
        }
    }
}

fn kernel_at(image: &Path) -> Result<Kernel> {
    ensure!(image.is_file(), "{}: no such file", image.display());
    let name = image.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let release = name
        .strip_prefix("vmlinuz-")
        .with_context(|| format!("{name} is not named vmlinuz-RELEASE, so its modules cannot be found"))?;
    let root = image.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let modules =
        find(root, &[&format!("lib/modules/{release}/kernel"), &format!("usr/lib/modules/{release}/kernel")])?;
    Ok(Kernel { image: image.to_owned(), release: release.to_owned(), modules })
}

/// `package` is an image package, or one that depends on the current image.
fn kernel_package(package: &str) -> Result<Kernel> {
    // A kernel that is already unpacked is good enough; asking apt on every run would need package lists on every run.
    let resolved = cache().join("kernels").join(package);
    let image_package = match fs::read_to_string(&resolved) {
        Ok(name) => name,
        Err(_) => {
            ensure_package_lists(package)?;
            let depends = run(Command::new("apt-cache").args(["depends", "--important", package]))?;
            let image = depends
                .lines()
                .filter_map(|line| line.trim().strip_prefix("Depends: "))
                .find(|name| name.starts_with("linux-image-"));
            let image = image.unwrap_or(package).to_owned();
            unpacked(&image)?;
            fs::create_dir_all(cache().join("kernels"))?;
            fs::write(&resolved, &image)?;
            image
        }
    };
    let boot = unpacked(&image_package)?.join("boot");
    let images =
        fs::read_dir(&boot).with_context(|| boot.display().to_string())?.filter_map(|entry| Some(entry.ok()?.path()));
    let image = images
        .into_iter()
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")));
    kernel_at(&image.with_context(|| format!("{image_package} holds no boot/vmlinuz-*"))?)
}

/// The directory with the unpacked content of a Debian package.
fn unpacked(package: &str) -> Result<PathBuf> {
    let done = cache().join("unpacked").join(package);
    if done.is_dir() {
        return Ok(done);
    }
    eprintln!("fetching {package} …");
    ensure_package_lists(package)?;
    fs::create_dir_all(cache().join("unpacked"))?;
    let work = tempfile::tempdir_in(cache())?;
    // apt drops its rights to the user _apt for downloads, which must be able to write here.
    run(Command::new("chmod").arg("a+rwx").arg(work.path()))?;
    run(apt_get().current_dir(work.path()).args(["download", package]))?;
    let deb = fs::read_dir(work.path())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"));
    let deb = deb.with_context(|| format!("`apt-get download {package}` left no .deb in {}", work.path().display()))?;
    let tree = work.path().join("tree");
    run(Command::new("dpkg").arg("-x").arg(&deb).arg(&tree))?;
    fs::rename(&tree, &done).with_context(|| format!("moving the content of {package} to {}", done.display()))?;
    Ok(done)
}

/// A fresh container has no package lists; then nothing has a candidate version.
pub(crate) fn ensure_package_lists(package: &str) -> Result<()> {
    let known = || run(Command::new("apt-cache").args(["show", "--no-all-versions", package])).is_ok();
    if known() {
        return Ok(());
    }
    if !nix::unistd::geteuid().is_root() {
        bail!("the package {package} is unknown; run `sudo apt-get update`");
    }
    run(apt_get().arg("update"))?;
    ensure!(known(), "no configured package source has {package}; Debian 12 or later is needed");
    Ok(())
}

/// A program in `PATH`. As root, its package is installed if it is missing.
///
/// # Errors
/// It is missing and cannot be installed; the message holds the command that would.
pub(crate) fn installed(program: &str, package: &str) -> Result<PathBuf> {
    if let Some(path) = process::in_path(program) {
        return Ok(path);
    }
    let install = ["install", "-y", "--no-install-recommends", package];
    if !nix::unistd::geteuid().is_root() {
        bail!("{program} is not installed; run `sudo apt-get {}`", install.join(" "));
    }
    eprintln!("installing {package} …");
    ensure_package_lists(package)?;
    run(apt_get().env("DEBIAN_FRONTEND", "noninteractive").args(install))?;
    process::in_path(program).with_context(|| format!("{package} is installed but {program} is not in PATH"))
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.args(["-q", "-o", "DPkg::Lock::Timeout=120"]);
    command
}

fn find(root: &Path, candidates: &[&str]) -> Result<PathBuf> {
    let found = candidates.iter().map(|candidate| root.join(candidate)).find(|path| path.exists());
    found.with_context(|| format!("{} holds none of {candidates:?}", root.display()))
}
