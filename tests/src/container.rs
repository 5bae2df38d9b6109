//! A Debian machine in a container: systemd is its process 1, so packages and units do there what they do on a host.
//!
//! Called by the tests of the packages. systemd-nspawn boots it from a directory in the cache, below an overlay that goes with
//! the container: the machine the tests run on is not changed, and every container starts from the same files. It has no
//! kernel of its own and is no place for what needs one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};

use crate::other_release::mirror;
use crate::process::{OwnedChild, run};
use crate::{packages, poll};

/// Debian 12: the oldest release that the units are meant for, so the one that knows fewest of their settings.
const SUITE: &str = "bookworm";
/// Beside what every Debian has: systemd as process 1, and a linter for man pages.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,mandoc";
/// It takes 3 s on an idle machine.
const BOOT_DEADLINE: Duration = Duration::from_secs(120);
/// Where [`Container::boot`]'s directory of packages is seen inside.
pub const SHARED: &str = "/shared";

/// A booted container. It is killed, with all its processes, when dropped.
#[derive(Debug)]
pub struct Container {
    nspawn: OwnedChild,
    name: String,
    init: u32,
}

impl Container {
    /// Whether this machine can have containers, or why not.
    ///
    /// # Errors
    /// It cannot; the message is a reason to skip.
    pub fn possible() -> Result<()> {
        ensure!(nix::unistd::geteuid().is_root(), "containers need root");
        Ok(())
    }

    /// Downloads and installs what the first call of [`boot`](Self::boot) on a machine would, which takes a minute.
    ///
    /// # Errors
    /// Something is missing and cannot be installed.
    pub fn prepare() -> Result<()> {
        Self::possible()?;
        image()?;
        packages::installed("systemd-nspawn", "systemd-container").map(drop)
    }

    /// Boots one in which `shared` can be read at [`SHARED`]. The first call on a machine downloads about 60 MB, which takes a
    /// minute.
    ///
    /// # Errors
    /// Something is missing and cannot be installed, or systemd does not come up; the message holds what the container printed.
    pub fn boot(shared: &Path) -> Result<Self> {
        Self::possible()?;
        let image = image()?;
        let nspawn = packages::installed("systemd-nspawn", "systemd-container")?;
        let name = format!("fpr-test-{}", std::process::id());
        let log = tempfile::NamedTempFile::new()?;
        let mut command = Command::new(nspawn);
        // Not registered: there may be no systemd outside. Read-only console: it prints and asks nothing.
        command.args(["--register=no", "--keep-unit", "--boot", "--volatile=overlay", "--console=read-only"]);
        command.arg(format!("--machine={name}")).arg("--directory").arg(image);
        command.arg(format!("--bind-ro={}:{SHARED}", shared.canonicalize()?.display()));
        // Its own network: nothing in it may reach out.
        command.args(["--private-network", "--link-journal=no"]);
        command.stdin(Stdio::null()).stdout(log.reopen()?).stderr(log.reopen()?);
        let nspawn = OwnedChild(command.spawn().context("systemd-nspawn")?);
        let printed = || fs::read_to_string(log.path()).unwrap_or_default();
        let mut container = Self { nspawn, name, init: 0 };
        container.wait_until_up().with_context(|| format!("the container does not boot: {}", printed()))?;
        Ok(container)
    }

    fn wait_until_up(&mut self) -> Result<()> {
        poll::until(
            "the container to be up",
            BOOT_DEADLINE,
            || {
                if let Some(status) = self.nspawn.0.try_wait()? {
                    bail!("systemd-nspawn ended ({status})");
                }
                self.init = child_of(self.nspawn.pid()).unwrap_or_default();
                // It says `running`, or `degraded` with a failing status, when it has started all it wants to.
                Ok(self.init != 0 && self.run("systemctl is-system-running | grep -E '^(running|degraded)$'").is_ok())
            },
            |up| *up,
        )
        .map(drop)
    }

    /// Runs a line of shell as root inside and returns its standard output.
    ///
    /// # Errors
    /// It fails; the message holds the line and what it wrote to standard error.
    pub fn run(&self, line: &str) -> Result<String> {
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--target", &self.init.to_string(), "--all", "--", "/usr/bin/env", "-i"]);
        nsenter.args(["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8"]);
        run(nsenter.args(["/bin/sh", "-c", line]))
    }

    /// Writes a file inside, whose directory is made if need be.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, path: &str, content: &str) -> Result<()> {
        let file = PathBuf::from(format!("/proc/{}/root{path}", self.init));
        if let Some(directory) = file.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(&file, content).with_context(|| format!("{path} in the container"))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Process 1 of the container goes with systemd-nspawn (its parent-death signal), and all others with process 1.
        let _ = self.nspawn.0.kill();
        let _ = self.nspawn.0.wait();
        // Left behind by a systemd-nspawn that was killed, or whose /run is no tmpfs. Both are empty directories.
        let _ = fs::remove_dir(format!("/run/systemd/nspawn/propagate/{}", self.name));
    }
}

fn child_of(pid: u32) -> Option<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

/// The directory with an installed Debian.
fn image() -> Result<PathBuf> {
    let cache = packages::cache();
    fs::create_dir_all(&cache)?;
    let lock = fs::File::create(cache.join("container.lock"))?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    let done = cache.join(format!("container-{SUITE}"));
    if done.is_dir() {
        return Ok(done);
    }
    eprintln!("installing Debian {SUITE} for a container …");
    let mmdebstrap = packages::installed("mmdebstrap", "mmdebstrap")?;
    let work = cache.join("container-work");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| work.display().to_string())?;
    }
    let mut command = Command::new(mmdebstrap);
    command.args(["--quiet", "--mode=root", "--variant=minbase", &format!("--include={PACKAGES}"), SUITE]);
    run(command.arg(&work).arg(mirror()))?;
    // systemd makes one at the first boot; without the file it would ask.
    fs::write(work.join("etc/machine-id"), "")?;
    fs::rename(&work, &done).with_context(|| done.display().to_string())?;
    Ok(done)
}
