//! The running daemon, by its control socket.

use super::{Check, Line};
use crate::control::{self, ClientError, Command};
use serde_json::Value;
use std::io;
use std::path::Path;

/// What the daemon answered to `status`.
pub(super) enum Daemon {
    /// It runs.
    Running {
        /// Its process.
        pid: i32,
        /// As in `status --json`.
        status: Value,
    },
    /// No daemon, or none that answers.
    Silent {
        /// How that is reported.
        line: Line,
    },
}

impl Daemon {
    pub(super) fn ask(control: &Path) -> Self {
        let path = control.display();
        let (reason, remedy) = match control::ask(control, &Command::Status) {
            Ok(status) => match status["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()) {
                Some(pid) => return Self::Running { pid, status },
                None => (format!("who listens on {path} is no fpr-host-agent"), "name its socket with --control"),
            },
            Err(ClientError::Unreachable { source, .. }) => match source.kind() {
                io::ErrorKind::NotFound => (
                    format!("none: there is no control socket {path}"),
                    "start `fpr-host-agent serve`, or name its socket with --control",
                ),
                io::ErrorKind::ConnectionRefused => (
                    format!("none: nobody listens on {path} any more"),
                    "start `fpr-host-agent serve` again; it replaces the dead socket",
                ),
                io::ErrorKind::PermissionDenied => {
                    (format!("unknown: {path}: {source}"), "run doctor as root or as a member of the socket's group")
                }
                _ => (format!("unknown: {path}: {source}"), "see the daemon's log"),
            },
            Err(error) => (format!("{path}: {}", crate::error_chain(&error)), "see the daemon's log"),
        };
        Self::Silent { line: Line::warn(Check::Daemon, reason, remedy) }
    }

    pub(super) fn pid(&self) -> Option<i32> {
        match self {
            Self::Running { pid, .. } => Some(*pid),
            Self::Silent { .. } => None,
        }
    }

    /// Its VMs as `status` shows them.
    pub(super) fn vms(&self) -> &[Value] {
        match self {
            Self::Running { status, .. } => status["vms"].as_array().map_or(&[], Vec::as_slice),
            Self::Silent { .. } => &[],
        }
    }

    pub(super) fn line(&self) -> Line {
        let (pid, status) = match self {
            Self::Running { pid, status } => (*pid, status),
            Self::Silent { line } => return line.clone(),
        };
        let (ours, theirs) = (env!("CARGO_PKG_VERSION"), status["version"].as_str().unwrap_or("unknown"));
        let vms = self.vms().len();
        let serves = if vms == 1 { "1 VM".to_owned() } else { format!("{vms} VMs") };
        let line = if ours == theirs {
            Line::ok(Check::Daemon, format!("version {theirs} runs as pid {pid} and serves {serves}"))
        } else {
            Line::warn(
                Check::Daemon,
                format!("version {theirs} runs as pid {pid} and serves {serves}; this program is version {ours}"),
                "restart the daemon when its VMs allow it (docs/host-agent.md, Restarting the daemon)",
            )
        };
        line.figure("pid", pid).figure("version", theirs).figure("vms", vms)
    }
}
