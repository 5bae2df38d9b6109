//! Child processes and what /proc says about processes.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// The root of the workspace.
#[must_use]
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// The first file of that name in `PATH`.
#[must_use]
pub fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
/// The command cannot be started or fails; the message holds it and what it wrote to standard error.
pub fn run(command: &mut Command) -> Result<String> {
    let line = command_line(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("`{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A command as one would type it.
#[must_use]
pub fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// A child that is killed, by its own pid, when its owner drops it.
#[derive(Debug)]
pub struct OwnedChild(pub(crate) Child);

impl OwnedChild {
    /// The child's pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        // A stopped process is killed too; both calls fail only when the child is already reaped.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// User plus system time a process has consumed: fields 14 and 15 of `/proc/PID/stat` (proc_pid_stat(5)), in units of 10 ms.
///
/// # Errors
/// The process is gone.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| path.clone())?;
    cpu_time_of(&stat).with_context(|| format!("{path} is malformed: {stat}"))
}

/// The same from the text of a `stat` file, for instance one read in the guest.
#[must_use]
pub fn cpu_time_of(stat: &str) -> Option<Duration> {
    // The command name, field 2, may hold spaces and parentheses.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let (user, system): (u64, u64) = (fields.nth(11)?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Duration::from_millis((user + system) * MILLIS_PER_TICK))
}

/// Linux reports times to user space in ticks of 1/100 s on every architecture of today (`USER_HZ`, include/asm-generic/param.h).
pub const MILLIS_PER_TICK: u64 = 10;

/// A field of `/proc/PID/status` that is given in kB, in bytes: `VmRSS`, `VmLck`, `VmPin`.
///
/// # Errors
/// The process is gone or has no such field.
pub fn status_bytes(pid: u32, field: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| path.clone())?;
    status_bytes_of(&status, field).with_context(|| format!("{path} has no field {field} in kB"))
}

/// The same from the text of a `status` file.
#[must_use]
pub fn status_bytes_of(status: &str, field: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn cpu_time_survives_a_hostile_command_name() {
        let stat = "17 (a) b (c) S 1 17 17 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 100 0 0";
        assert_eq!(cpu_time_of(stat), Some(Duration::from_secs(3)));
        assert_eq!(cpu_time_of("17 (a) S 1"), None);
    }

    #[test]
    fn own_memory_is_not_zero() {
        assert!(status_bytes(std::process::id(), "VmRSS").unwrap() > 0);
        assert!(status_bytes(std::process::id(), "VmNonsense").is_err());
    }

    #[test]
    fn a_failing_command_is_named_with_its_stderr() {
        let error = run(Command::new("sh").args(["-c", "echo broken >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("sh -c") && error.contains("broken"), "{error}");
    }
}
