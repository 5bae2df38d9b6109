//! What the host agent may do: see VMMs, look into them, arm the drop deadline, open descriptors.
//!
//! The process looked at is the running daemon; without one it is doctor's own, whose rights a daemon started the same
//! way would have.

use super::daemon::Daemon;
use super::{Check, Line};
use crate::backing::{DropGuard, boot_time};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Inode of the first pid namespace: `PROC_PID_INIT_INO` in the kernel's `include/linux/proc_ns.h`.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// `include/uapi/linux/capability.h`.
const CAP_SYS_PTRACE: u32 = 19;
/// `/proc/PID/fd` has mode 0500 and the VMM's owner, which comes before any question of ptrace.
const CAP_DAC_READ_SEARCH: u32 = 2;
/// Either reads and searches everything.
const CAP_DAC_OVERRIDE: u32 = 1;

/// Fewer pending signals than this left to the user is a warning: each VM's drops hold one timer at a time, and each
/// timer holds one (`RLIMIT_SIGPENDING`, setrlimit(2)).
const FEW_SIGNALS: u64 = 64;

/// Descriptors that the daemon itself needs, and those of one VM with both devices: listeners, connections, memory
/// regions, and a kick, a call and an error descriptor per queue.
const DAEMON_DESCRIPTORS: u64 = 64;
const VM_DESCRIPTORS: u64 = 48;

/// The process whose rights are looked at.
struct Subject {
    directory: PathBuf,
    name: String,
}

pub(super) fn lines(proc: &Path, daemon: &Daemon) -> Vec<Line> {
    let subject = match daemon.pid() {
        Some(pid) => Subject { directory: proc.join(pid.to_string()), name: format!("the daemon (pid {pid})") },
        None => Subject { directory: proc.join("self"), name: "this process".to_owned() },
    };
    let status_path = subject.directory.join("status");
    let status = fs::read_to_string(&status_path);
    let about = |check, look: &dyn Fn(&str) -> Line| match &status {
        Ok(status) => look(status),
        Err(error) => Line::unreadable(check, &status_path, error),
    };
    vec![
        pid_namespace(&subject),
        about(Check::Inspect, &|status| inspect(&subject, status)),
        about(Check::DropGuard, &|status| drop_guard(&subject, status)),
        descriptors(&subject, daemon.vms().len() as u64),
    ]
}

fn pid_namespace(subject: &Subject) -> Line {
    let path = subject.directory.join("ns/pid");
    match fs::read_link(&path) {
        Ok(namespace) if namespace.as_os_str() == FIRST_PID_NAMESPACE => {
            Line::ok(Check::PidNamespace, format!("{} is in the host's and sees every VMM", subject.name))
        }
        Ok(namespace) => Line::warn(
            Check::PidNamespace,
            format!(
                "{} is in {}, not in the host's {FIRST_PID_NAMESPACE}: VMMs outside cannot be looked into, and the \
                 gate `uninspectable` closes for them",
                subject.name,
                namespace.display()
            ),
            "run the host agent in the host's pid namespace (containers: --pid=host; systemd: no PrivatePIDs=)",
        ),
        Err(error) => Line::unreadable(Check::PidNamespace, &path, &error),
    }
}

fn inspect(subject: &Subject, status: &str) -> Line {
    let Some(capabilities) = field(status, "CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok()) else {
        return unclear(Check::Inspect, subject, "CapEff");
    };
    // Real, effective, saved and file system uid; what ptrace rights go by is the file system one.
    let Some(uid) = field(status, "Uid:").and_then(|ids| ids.split_whitespace().nth(3)?.parse::<u32>().ok()) else {
        return unclear(Check::Inspect, subject, "Uid");
    };
    let has = |capability: u32| capabilities >> capability & 1 == 1;
    let (ptrace, search) = (has(CAP_SYS_PTRACE), has(CAP_DAC_READ_SEARCH) || has(CAP_DAC_OVERRIDE));
    let line = if ptrace && search {
        Line::ok(
            Check::Inspect,
            format!("{} has CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH: any VMM can be looked into", subject.name),
        )
    } else {
        let missing = match (ptrace, search) {
            (false, false) => "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
            (false, true) => "CAP_SYS_PTRACE",
            _ => "CAP_DAC_READ_SEARCH",
        };
        Line::warn(
            Check::Inspect,
            format!(
                "{} runs as uid {uid} without {missing}: only VMMs of that user with no more capabilities can be \
                 looked into; for all others the gate `uninspectable` closes",
                subject.name
            ),
            "run the host agent as root or give it both capabilities (pkg/systemd/fpr-host-agent.service does)",
        )
    };
    line.figure("uid", uid).figure("cap_sys_ptrace", ptrace).figure("cap_dac_read_search", search)
}

fn drop_guard(subject: &Subject, status: &str) -> Line {
    // "queued/limit", for all processes of the user.
    let signals = field(status, "SigQ:").and_then(|field| {
        let (queued, limit) = field.split_once('/')?;
        Some((queued.parse::<u64>().ok()?, limit.parse::<u64>().ok()?))
    });
    let Some((queued, limit)) = signals else { return unclear(Check::DropGuard, subject, "SigQ") };
    let free = limit.saturating_sub(queued);
    let remedy = "raise it: LimitSIGPENDING= of the unit, or ulimit -i";
    // Far away, and disarmed at once: only whether the kernel gives a timer is of interest.
    let armed = boot_time().and_then(|now| DropGuard::arm(now + Duration::from_secs(3600)));
    let line = match armed {
        Err(error) => Line::no(Check::DropGuard, crate::error_chain(&error), remedy),
        Ok(_) if free < FEW_SIGNALS => Line::warn(
            Check::DropGuard,
            format!(
                "RLIMIT_SIGPENDING of {} leaves {free} of {limit} timers: each VM's drop needs one, and nothing is \
                 dropped without",
                subject.name
            ),
            remedy,
        ),
        Ok(_) => Line::ok(
            Check::DropGuard,
            format!(
                "the deadline of a drop can be armed; RLIMIT_SIGPENDING of {} leaves {free} of {limit}",
                subject.name
            ),
        ),
    };
    line.figure("sigpending_limit", limit).figure("sigpending_queued", queued)
}

fn descriptors(subject: &Subject, vms: u64) -> Line {
    let path = subject.directory.join("limits");
    let limits = match fs::read_to_string(&path) {
        Ok(limits) => limits,
        Err(error) => return Line::unreadable(Check::Descriptors, &path, &error),
    };
    // "Max open files  SOFT  HARD  files" (`proc_pid_limits` in the kernel's fs/proc/base.c).
    let numbers = field(&limits, "Max open files").map(|rest| rest.split_whitespace().collect::<Vec<_>>());
    let Some([soft, hard, ..]) = numbers.as_deref() else {
        return unclear(Check::Descriptors, subject, "Max open files");
    };
    let soft_limit = if *soft == "unlimited" { Some(u64::MAX) } else { soft.parse().ok() };
    let Some(soft_limit) = soft_limit else { return unclear(Check::Descriptors, subject, "Max open files") };
    let room = soft_limit.saturating_sub(DAEMON_DESCRIPTORS) / VM_DESCRIPTORS;
    let reason = format!("RLIMIT_NOFILE of {} is {soft} (hard {hard}): enough for about {room} VMs", subject.name);
    let line = if room >= vms.max(1) {
        Line::ok(Check::Descriptors, reason)
    } else {
        Line::warn(Check::Descriptors, reason, "raise it: LimitNOFILE= of the unit, or ulimit -n")
    };
    line.figure("nofile_soft", soft_limit).figure("nofile_vms", room)
}

fn unclear(check: Check, subject: &Subject, key: &str) -> Line {
    let error = io::Error::new(io::ErrorKind::InvalidData, format!("no {key} that doctor understands"));
    Line::unreadable(check, &subject.directory, &error)
}

fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim)
}
