//! `doctor`: what this host can do, and what the process of a given VM would allow.
//!
//! Called by the command of that name. [`examine`] only reads: /proc, /sys, cgroups, the daemon's `status`, and it runs
//! the installed QEMU to ask it for its devices. It needs no root; what it may not read is a line of its own with the
//! remedy. Every root is a parameter ([`Surroundings`]), so that tests use trees of files. Nothing is trusted but the
//! kernel's files: names and command lines of processes are cut short and cannot move a terminal's cursor.
//!
//! One line per question ([`Check`]); its answer is a [`Verdict`] with what was seen and what to do. `docs/host-agent.md`
//! documents each check and its figures.

mod daemon;
mod guest_memory;
mod host;
mod memory;
mod qemu;
mod render;
mod rights;
mod vm;
mod vmm;

pub use render::{Colour, Style, text};

use crate::kvm::Ability;
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Version of the JSON's shape: raised when a field changes its meaning or goes; new ones may come without.
pub const FORMAT: u32 = 1;

/// Longest reason or remedy in characters: a process chooses its own name and command line.
const MAX_TEXT: usize = 600;

/// Where to look.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
    /// `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
    /// Asks KVM what it can do.
    pub kvm: fn() -> Ability,
    /// `PATH`, in which QEMU is looked for.
    pub path: OsString,
    /// The daemon's control socket.
    pub control: PathBuf,
    /// How long QEMU may take to answer a question.
    pub qemu_limit: Duration,
}

impl Surroundings {
    /// This host, with the daemon that has the control socket `control`.
    #[must_use]
    pub fn real(control: &Path) -> Self {
        Self {
            proc: "/proc".into(),
            sys: "/sys".into(),
            cgroup: "/sys/fs/cgroup".into(),
            kvm: crate::kvm::probe,
            path: std::env::var_os("PATH").unwrap_or_default(),
            control: control.to_owned(),
            // 0.15 s here; a cold cache and a busy host take longer.
            qemu_limit: Duration::from_secs(10),
        }
    }
}

/// The answer to one question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Works.
    Ok,
    /// Works with a limit, or could not be found out.
    Warn,
    /// Does not work as it is.
    No,
}

impl Verdict {
    /// As in the JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::No => "no",
        }
    }
}

/// What belongs together in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Kernel and memory of the host.
    Host,
    /// The QEMU that is installed, or the VM's own.
    Qemu,
    /// What the host agent may do.
    Agent,
    /// The process of `--pid`.
    Vm,
}

/// A question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// Can guests run on KVM?
    Kvm,
    /// Is the kernel new enough?
    Kernel,
    /// Pages set aside for hugetlbfs.
    Hugetlb,
    /// Transparent huge pages, for shared memory too.
    Thp,
    /// Which version of control groups.
    Cgroup,
    /// Pressure stall information.
    Psi,
    /// Swap space.
    Swap,
    /// Kernel samepage merging.
    Ksm,
    /// Which QEMU.
    Qemu,
    /// Its vhost-user vsock device.
    QemuVsock,
    /// Its device for any vhost-user back end.
    QemuGeneric,
    /// Its own balloon.
    QemuBalloon,
    /// Does a daemon answer?
    Daemon,
    /// Are the VMMs' processes visible?
    PidNamespace,
    /// May they be looked into?
    Inspect,
    /// Can the drop deadline be armed?
    DropGuard,
    /// How many descriptors?
    Descriptors,
    /// Which process is it?
    Process,
    /// What backs its guest's memory?
    Memory,
    /// Is it locked?
    MemoryLocked,
    /// Can a device reach it?
    AssignedDevice,
    /// Its control group and limit.
    VmCgroup,
    /// Is it a VM of the daemon?
    Connected,
    /// Reports of the guest agent.
    AgentChannel,
    /// Reports of the guest's kernel.
    KernelChannel,
    /// All in all.
    Usable,
}

impl Check {
    /// All, in the order of the table.
    pub const ALL: [Self; 26] = [
        Self::Kvm,
        Self::Kernel,
        Self::Hugetlb,
        Self::Thp,
        Self::Cgroup,
        Self::Psi,
        Self::Swap,
        Self::Ksm,
        Self::Qemu,
        Self::QemuVsock,
        Self::QemuGeneric,
        Self::QemuBalloon,
        Self::Daemon,
        Self::PidNamespace,
        Self::Inspect,
        Self::DropGuard,
        Self::Descriptors,
        Self::Process,
        Self::Memory,
        Self::MemoryLocked,
        Self::AssignedDevice,
        Self::VmCgroup,
        Self::Connected,
        Self::AgentChannel,
        Self::KernelChannel,
        Self::Usable,
    ];

    /// As in the JSON and the table.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Kernel => "kernel",
            Self::Hugetlb => "hugetlb",
            Self::Thp => "thp",
            Self::Cgroup => "cgroup",
            Self::Psi => "psi",
            Self::Swap => "swap",
            Self::Ksm => "ksm",
            Self::Qemu => "qemu",
            Self::QemuVsock => "qemu-vsock",
            Self::QemuGeneric => "qemu-generic",
            Self::QemuBalloon => "qemu-balloon",
            Self::Daemon => "daemon",
            Self::PidNamespace => "pid-namespace",
            Self::Inspect => "inspect",
            Self::DropGuard => "drop-guard",
            Self::Descriptors => "descriptors",
            Self::Process => "process",
            Self::Memory => "memory",
            Self::MemoryLocked => "memory-locked",
            Self::AssignedDevice => "assigned-device",
            Self::VmCgroup => "vm-cgroup",
            Self::Connected => "connected",
            Self::AgentChannel => "agent-channel",
            Self::KernelChannel => "kernel-channel",
            Self::Usable => "usable",
        }
    }

    const fn group(self) -> Group {
        match self {
            Self::Kvm
            | Self::Kernel
            | Self::Hugetlb
            | Self::Thp
            | Self::Cgroup
            | Self::Psi
            | Self::Swap
            | Self::Ksm => Group::Host,
            Self::Qemu | Self::QemuVsock | Self::QemuGeneric | Self::QemuBalloon => Group::Qemu,
            Self::Daemon | Self::PidNamespace | Self::Inspect | Self::DropGuard | Self::Descriptors => Group::Agent,
            Self::Process
            | Self::Memory
            | Self::MemoryLocked
            | Self::AssignedDevice
            | Self::VmCgroup
            | Self::Connected
            | Self::AgentChannel
            | Self::KernelChannel
            | Self::Usable => Group::Vm,
        }
    }
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Where it stands in the table.
    pub group: Group,
    /// The question.
    pub check: Check,
    /// The answer.
    pub verdict: Verdict,
    /// What was seen.
    pub reason: String,
    /// What to do about it.
    pub remedy: Option<String>,
    /// The figures behind it; names carry their unit.
    pub figures: BTreeMap<&'static str, Value>,
}

impl Line {
    fn new(check: Check, verdict: Verdict, reason: &str, remedy: Option<&str>) -> Self {
        Self {
            group: check.group(),
            check,
            verdict,
            reason: printable(reason),
            remedy: remedy.map(printable),
            figures: BTreeMap::new(),
        }
    }

    fn ok(check: Check, reason: impl AsRef<str>) -> Self {
        Self::new(check, Verdict::Ok, reason.as_ref(), None)
    }

    fn warn(check: Check, reason: impl AsRef<str>, remedy: impl AsRef<str>) -> Self {
        Self::new(check, Verdict::Warn, reason.as_ref(), Some(remedy.as_ref()))
    }

    fn no(check: Check, reason: impl AsRef<str>, remedy: impl AsRef<str>) -> Self {
        Self::new(check, Verdict::No, reason.as_ref(), Some(remedy.as_ref()))
    }

    /// What could not be read is never a silent ok.
    fn unreadable(check: Check, path: &Path, error: &io::Error) -> Self {
        let remedy = match error.kind() {
            io::ErrorKind::PermissionDenied => "run doctor as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
            io::ErrorKind::NotFound => "mount /proc and /sys of the host here, or run doctor outside the container",
            _ => "ask the host's kernel log",
        };
        Self::warn(check, format!("unknown: cannot read {}: {error}", path.display()), remedy)
    }

    fn figure(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.figures.insert(name, value.into());
        self
    }
}

/// Everything `doctor` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: u32,
    /// Version of the host agent.
    pub version: &'static str,
    /// The worst answer of all lines.
    pub verdict: Verdict,
    /// The process of `--pid`.
    pub pid: Option<i32>,
    /// In the order of [`Check::ALL`].
    pub lines: Vec<Line>,
}

/// Looks at the host and, if one is given, at the process of a VM.
#[must_use]
pub fn examine(surroundings: &Surroundings, pid: Option<Pid>) -> Report {
    let mut lines = host::lines(surroundings);
    lines.extend(memory::lines(surroundings));
    let vmm = pid.map(|pid| vmm::Vmm::look(&surroundings.proc, pid));
    let qemu = qemu::Qemu::ask(surroundings, vmm.as_ref());
    lines.extend(qemu.lines());
    let daemon = daemon::Daemon::ask(&surroundings.control);
    lines.push(daemon.line());
    lines.extend(rights::lines(&surroundings.proc, &daemon));
    if let Some(vmm) = &vmm {
        lines.extend(vm::lines(surroundings, vmm, &qemu, &daemon));
    }
    lines.sort_by_key(|line| line.check);
    let verdict = lines.iter().map(|line| line.verdict).max().unwrap_or(Verdict::Ok);
    Report { format: FORMAT, version: env!("CARGO_PKG_VERSION"), verdict, pid: pid.map(Pid::as_raw), lines }
}

/// Bounded, and without control characters: what a process says of itself must not steer the reader's terminal.
fn printable(text: &str) -> String {
    let mut cut: String =
        text.chars().take(MAX_TEXT).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect();
    if text.chars().nth(MAX_TEXT).is_some() {
        cut.push('…');
    }
    cut
}

/// Mebibytes or gibibytes where it is a whole number of them, as in a size on a command line.
fn size(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        bytes if bytes % (1 << 30) == 0 => format!("{}G", bytes >> 30),
        bytes if bytes >= 1 << 20 => format!("{}M", bytes >> 20),
        bytes => format!("{}K", bytes >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_says_cannot_steer_a_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\nc\u{9b}d"), "a\u{fffd}[2Jb\u{fffd}c\u{fffd}d");
        let long = printable(&"ä".repeat(MAX_TEXT + 1));
        assert_eq!((long.chars().count(), long.chars().last()), (MAX_TEXT + 1, Some('…')));
    }

    #[test]
    fn checks_are_listed_in_their_order_and_words_are_those_of_the_json() {
        assert!(Check::ALL.is_sorted());
        for check in Check::ALL {
            assert_eq!(serde_json::to_value(check).ok(), Some(check.word().into()));
        }
        for verdict in [Verdict::Ok, Verdict::Warn, Verdict::No] {
            assert_eq!(serde_json::to_value(verdict).ok(), Some(verdict.word().into()));
        }
    }
}
