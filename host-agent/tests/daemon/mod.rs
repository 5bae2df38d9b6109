//! The built daemon, run as an operator would, and its control socket. Ends with the test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use fpr_host_agent::control;

/// Everything here takes milliseconds; this is for a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// The binary, ready for arguments.
pub fn host_agent() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fpr-host-agent"));
    command.stdin(Stdio::null());
    command
}

/// Until `look` finds something; the last thing seen goes into the panic.
pub fn poll<T, L: std::fmt::Debug>(what: &str, mut look: impl FnMut() -> Result<T, L>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match look() {
            Ok(found) => return found,
            Err(last) => assert!(Instant::now() < deadline, "{what}: not within {DEADLINE:?}, last: {last:?}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub struct Daemon {
    pub dir: tempfile::TempDir,
    child: Child,
}

impl Daemon {
    /// Serves the named VMs, each with a vsock device whose socket is in the daemon's directory, and answers on its
    /// control socket.
    pub fn start(vms: &[&str]) -> Self {
        Self::start_with(vms, &[])
    }

    /// The same, and these VMs have a balloon device ([`balloon`](Self::balloon)), besides or only.
    pub fn start_with(vms: &[&str], balloons: &[&str]) -> Self {
        Self::start_configured(|_| String::new(), vms, balloons)
    }

    /// The same with a configuration file, which may name what is in the daemon's directory.
    pub fn start_configured(config: impl FnOnce(&Path) -> String, vms: &[&str], balloons: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let mut command = host_agent();
        command.arg("serve").arg("--control").arg(dir.path().join("control.sock"));
        // A file even if it is empty, so that the test does not depend on what the machine has in /etc.
        std::fs::write(dir.path().join("host.toml"), config(dir.path())).unwrap();
        command.arg("--config").arg(dir.path().join("host.toml"));
        for vm in vms {
            command.arg("--vm").arg(format!("{vm}={}", dir.path().join(vm).display()));
        }
        for vm in balloons {
            command.arg("--balloon").arg(format!("{vm}={}-balloon", dir.path().join(vm).display()));
        }
        let child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let mut daemon = Self { dir, child };
        poll("the daemon serves", || {
            let ended = daemon.child.try_wait().unwrap();
            assert!(ended.is_none(), "the daemon has ended: {ended:?}\n{}", daemon.log());
            control::ask(&daemon.control(), &control::Command::Status).map_err(|error| error.to_string())
        });
        daemon
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("control.sock")
    }

    pub fn socket(&self, vm: &str) -> PathBuf {
        self.dir.path().join(vm)
    }

    pub fn balloon(&self, vm: &str) -> PathBuf {
        self.dir.path().join(format!("{vm}-balloon"))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    pub fn status(&self) -> serde_json::Value {
        control::ask(&self.control(), &control::Command::Status).unwrap()
    }

    pub fn vm(&self, name: &str) -> serde_json::Value {
        let status = self.status();
        let mut vms = status["vms"].as_array().unwrap().iter();
        vms.find(|vm| vm["name"] == name).unwrap_or_else(|| panic!("no {name} in {status}")).clone()
    }

    /// A client command against this daemon.
    pub fn client(&self, arguments: &[&str]) -> Output {
        host_agent().args(arguments).arg("--control").arg(self.control()).output().unwrap()
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.pid()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    pub fn wait(&mut self) -> ExitStatus {
        poll("the daemon ends", || self.child.try_wait().unwrap().ok_or("running"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the daemon\n{}", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
