//! The host agent as an operator runs it: the release binary, one process, its command line.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::process::{self, OwnedChild, run};
use crate::{artifacts, poll, sys};

/// The daemon has nothing to load; this is for a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// A running `fpr-host-agent serve`. It is killed when dropped and when the thread that started it ends.
#[derive(Debug)]
pub struct HostAgent {
    child: OwnedChild,
    binary: PathBuf,
    vms: Vec<String>,
    arguments: Vec<String>,
    dir: TempDir,
}

/// The devices that a daemon offers to each of its VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// A vsock device, for the guest agent.
    Vsock,
    /// A balloon device, for the guest's kernel.
    Balloon,
    /// Both.
    VsockAndBalloon,
}

impl Devices {
    /// Whether a vsock device is among them.
    #[must_use]
    pub fn vsock(self) -> bool {
        matches!(self, Self::Vsock | Self::VsockAndBalloon)
    }

    /// Whether a balloon device is among them.
    #[must_use]
    pub fn balloon(self) -> bool {
        matches!(self, Self::Balloon | Self::VsockAndBalloon)
    }
}

impl HostAgent {
    /// Serves the named VMs with a vsock device each, with further words for the command line, and returns when it takes connections.
    ///
    /// # Errors
    /// The binary cannot be built, or it ends at once; the message holds its log.
    pub fn start(vms: &[&str], arguments: &[&str]) -> Result<Self> {
        Self::start_with(Devices::Vsock, vms, arguments)
    }

    /// [`HostAgent::start`] with the choice of devices.
    ///
    /// # Errors
    /// As there.
    pub fn start_with(devices: Devices, vms: &[&str], arguments: &[&str]) -> Result<Self> {
        let binary = artifacts::host_agent()?;
        let dir = tempfile::Builder::new().prefix("fpr-host-").tempdir()?;
        let mut words =
            vec!["serve".to_owned(), "--control".to_owned(), dir.path().join("control").display().to_string()];
        for name in vms {
            let mut offer = |option: &str, socket: PathBuf| {
                words.extend([option.to_owned(), format!("{name}={}", socket.display())]);
            };
            if devices.vsock() {
                offer("--vm", socket(dir.path(), name));
            }
            if devices.balloon() {
                offer("--balloon", balloon_socket(dir.path(), name));
            }
        }
        words.extend(arguments.iter().map(|&word| word.to_owned()));
        let child = spawn(&binary, &words, dir.path())?;
        let vms = vms.iter().map(|&name| name.to_owned()).collect();
        let mut agent = Self { child, binary, vms, arguments: words, dir };
        agent.wait_until_it_serves()?;
        Ok(agent)
    }

    /// Kills the daemon with SIGKILL and starts another one in its place, with the same sockets.
    ///
    /// # Errors
    /// The new one does not start.
    pub fn kill_and_restart(&mut self) -> Result<()> {
        self.signal(Signal::SIGKILL)?;
        self.child.0.wait()?;
        self.child = spawn(&self.binary, &self.arguments, self.dir.path())?;
        self.wait_until_it_serves()
    }

    fn wait_until_it_serves(&mut self) -> Result<()> {
        poll::until(
            "the host agent to serve its VMs",
            START_DEADLINE,
            || {
                if let Some(status) = self.child.0.try_wait()? {
                    bail!("fpr-host-agent ended ({status}): {}", self.log().trim());
                }
                // Sockets say nothing: those of a daemon that was killed are still there. An answer that names the VMs comes from one
                // whose devices listen.
                Ok(self.vms.iter().all(|vm| self.vm_status(vm).is_ok()))
            },
            |serves| *serves,
        )
        .map(drop)
        .with_context(|| format!("log of the host agent: {}", self.log().trim()))
    }

    /// The vhost-user socket of a VM's vsock device.
    #[must_use]
    pub fn socket(&self, vm: &str) -> PathBuf {
        socket(self.dir.path(), vm)
    }

    /// The vhost-user socket of a VM's balloon device.
    #[must_use]
    pub fn balloon_socket(&self, vm: &str) -> PathBuf {
        balloon_socket(self.dir.path(), vm)
    }

    /// The control socket.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    /// What `fpr-host-agent status --json` prints.
    ///
    /// # Errors
    /// The command fails or prints no JSON.
    pub fn status(&self) -> Result<Value> {
        let text = self.command(&["status", "--json"])?;
        serde_json::from_str(&text).with_context(|| format!("status --json printed {text}"))
    }

    /// The part of the status that is about one VM.
    ///
    /// # Errors
    /// As [`HostAgent::status`], or the daemon does not know the VM.
    pub fn vm_status(&self, name: &str) -> Result<Value> {
        let status = self.status()?;
        let vms = status.get("vms").and_then(Value::as_array);
        let vm = vms.and_then(|vms| vms.iter().find(|vm| vm.get("name").and_then(Value::as_str) == Some(name)));
        vm.cloned().with_context(|| format!("no VM {name} in {status}"))
    }

    /// Waits until a front end is connected to a VM and exactly these gates of it are closed, and returns their details: gate and what the
    /// daemon says about it.
    ///
    /// # Errors
    /// `deadline` passed; the message holds the last status.
    pub fn wait_for_gates(&self, vm: &str, gates: &[&str], deadline: Duration) -> Result<BTreeMap<String, String>> {
        let status = poll::until(
            &format!("the closed gates {gates:?}"),
            deadline,
            || self.vm_status(vm),
            |status| {
                status.get("front_end").is_some_and(|front_end| !front_end.is_null())
                    && closed_gates(status).keys().map(String::as_str).eq(gates.iter().copied())
            },
        )?;
        Ok(closed_gates(&status))
    }

    /// Runs a subcommand of the host agent against this daemon and returns what it prints.
    ///
    /// # Errors
    /// It fails.
    pub fn command(&self, words: &[&str]) -> Result<String> {
        run(Command::new(&self.binary).args(words).arg("--control").arg(self.control()))
    }

    /// All it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The daemon's pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Sends a signal: SIGKILL, SIGSTOP, SIGCONT.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).with_context(|| format!("{signal} to the host agent"))
    }

    /// CPU time consumed so far, in steps of 10 ms.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn cpu_time(&self) -> Result<Duration> {
        process::cpu_time(self.pid())
    }

    /// Resident bytes of the daemon itself, without guest memory it has mapped: `RssAnon` plus `RssFile` of `/proc/PID/status`.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn resident_bytes(&self) -> Result<u64> {
        Ok(process::status_bytes(self.pid(), "RssAnon")? + process::status_bytes(self.pid(), "RssFile")?)
    }
}

fn socket(dir: &Path, vm: &str) -> PathBuf {
    dir.join(format!("{vm}.sock"))
}

fn balloon_socket(dir: &Path, vm: &str) -> PathBuf {
    dir.join(format!("{vm}-balloon.sock"))
}

fn spawn(binary: &Path, arguments: &[String], dir: &Path) -> Result<OwnedChild> {
    let log = fs::File::options().create(true).append(true).open(dir.join("log"))?;
    let mut command = Command::new(binary);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let child = sys::die_with_spawning_thread(&mut command).spawn().with_context(|| binary.display().to_string())?;
    Ok(OwnedChild(child))
}

/// Closed gates in alphabetical order and what the daemon says about them.
fn closed_gates(vm: &Value) -> BTreeMap<String, String> {
    let text = |gate: &Value, field| gate.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let gates = vm.get("gates").and_then(Value::as_array).into_iter().flatten();
    gates.map(|gate| (text(gate, "gate"), text(gate, "detail"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_are_read_from_the_status() {
        let vm = serde_json::json!({ "gates": [
            { "gate": "memory-locked", "source": "process", "detail": "VmLck" },
            { "gate": "assigned-device", "source": "process", "detail": "fd 7" },
        ] });
        let gates = closed_gates(&vm);
        assert!(gates.keys().eq(["assigned-device", "memory-locked"]));
        assert_eq!(gates.get("memory-locked").map(String::as_str), Some("VmLck"));
        assert!(closed_gates(&serde_json::json!({ "gates": [] })).is_empty());
    }
}
