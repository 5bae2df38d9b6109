//! What the service manager is told.

use std::os::unix::net::UnixDatagram;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::daemon::{DEADLINE, host_agent};

struct Manager(UnixDatagram);

impl Manager {
    /// Waits for the message with this in it, and returns it.
    fn told(&self, wanted: &str) -> String {
        loop {
            let mut message = [0; 4096];
            let length = self.0.recv(&mut message).unwrap_or_else(|error| panic!("no {wanted}: {error}"));
            let text = String::from_utf8_lossy(&message[..length]).into_owned();
            if text.contains(wanted) {
                return text;
            }
        }
    }

    /// In any order: the fleet's own line and the end of a reload come from two tasks.
    fn told_both(&self, one: &str, other: &str) -> [String; 2] {
        let mut found = [one, other].map(|wanted| (wanted, None));
        while found.iter().any(|(_, message)| message.is_none()) {
            let message = self.told("=");
            for (wanted, found) in &mut found {
                if found.is_none() && message.contains(*wanted) {
                    *found = Some(message.clone());
                }
            }
        }
        found.map(|(_, message)| message.unwrap())
    }
}

#[test]
fn readiness_status_reload_watchdog_and_the_end_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let manager = Manager(UnixDatagram::bind(dir.path().join("notify")).unwrap());
    manager.0.set_read_timeout(Some(DEADLINE)).unwrap();
    let config = dir.path().join("host.toml");
    let vm = |name: &str| format!("[vm.{name}]\nsocket = \"{}\"\n", dir.path().join(name).display());
    std::fs::write(&config, vm("a")).unwrap();
    let mut command = host_agent();
    command.arg("serve").arg("--config").arg(&config).arg("--control").arg(dir.path().join("control"));
    command.env("NOTIFY_SOCKET", dir.path().join("notify")).env("WATCHDOG_USEC", "600000");
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let signal = |signal| kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();

    manager.told("STATUS=serving 1 VM");
    manager.told("READY=1");
    assert!(dir.path().join("a").exists() && dir.path().join("control").exists());
    (0..3).for_each(|_| drop(manager.told("WATCHDOG=1")));

    std::fs::write(&config, vm("a") + &vm("b")).unwrap();
    signal(Signal::SIGHUP);
    assert!(manager.told("RELOADING=1").contains("MONOTONIC_USEC="));
    manager.told_both("STATUS=serving 2 VMs", "READY=1");
    std::fs::write(&config, "nonsense = 1\n").unwrap();
    signal(Signal::SIGHUP);
    let [line, _] = manager.told_both("old configuration in force", "READY=1");
    assert!(line.contains("nonsense") && line.trim_end().lines().count() == 1, "{line}");

    signal(Signal::SIGTERM);
    manager.told("STOPPING=1");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
