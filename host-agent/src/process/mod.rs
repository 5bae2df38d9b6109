//! What the process of a VMM says about its guest's memory: assigned devices, locked memory, private mappings.
//!
//! The session asks before it lets anything be dropped. Two checks with two prices: [`check_holdings`] (descriptors
//! and `status`) runs before every report, since a device can be plugged in at any time; [`check_mappings`] (`maps`)
//! runs once per memory map, before its first drop.
//!
//! Both fail closed: a process that cannot be looked at is a finding itself. The root of /proc is a parameter, and
//! nothing is trusted but the kernel's files below it. A check is a snapshot; what the VMM does a moment later is seen
//! by the next one.

mod descriptors;
pub(crate) mod maps;
pub(crate) mod status;

use crate::backing::FileId;
use fpr_protocol::Gate;
use nix::errno::Errno;
use nix::fcntl::readlinkat;
use nix::unistd::Pid;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// One reason to close a gate, with what was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The gate it closes.
    pub gate: Gate,
    /// What was seen, for `status`: "descriptor 23 is anon_inode:kvm-vfio".
    pub detail: String,
}

/// Most findings of one check; a VMM may hold thousands of device descriptors, and one closes the gate.
pub const MAX_FINDINGS: usize = 8;

/// Checks descriptors, locked and pinned memory of process `pid` below `proc_root` (`/proc`).
///
/// `guest_bytes` is the size of guest memory, against which locked memory is measured. An empty answer means that
/// nothing speaks against dropping.
#[must_use]
pub fn check_holdings(proc_root: &Path, pid: Pid, guest_bytes: u64) -> Vec<Finding> {
    let process = match ProcessDir::new(proc_root, pid) {
        Ok(process) => process,
        Err(finding) => return vec![finding],
    };
    let mut findings = match process.descriptors() {
        Ok(links) => descriptors::assigned_devices(&links),
        Err(finding) => vec![finding],
    };
    // After the descriptors: if the process died in between, this is what notices.
    match process.read("status") {
        Ok(status) => findings.extend(status::check(&status, guest_bytes)),
        Err(finding) => findings.push(finding),
    }
    findings.truncate(MAX_FINDINGS);
    findings
}

/// Checks how process `pid` maps the memory files `files`.
///
/// A process that maps none of them is not the VMM, whatever its socket says: then the other check would look at the
/// wrong process, so that is a finding too.
#[must_use]
pub fn check_mappings(proc_root: &Path, pid: Pid, files: &[FileId]) -> Vec<Finding> {
    let maps = ProcessDir::new(proc_root, pid).and_then(|process| process.read("maps"));
    let mut findings = match maps {
        Ok(maps) => maps::check(&maps, files),
        Err(finding) => vec![finding],
    };
    findings.truncate(MAX_FINDINGS);
    findings
}

fn uninspectable(detail: String) -> Finding {
    Finding { gate: Gate::Uninspectable, detail }
}

/// One descriptor and what it refers to.
#[derive(Debug)]
pub(crate) struct DescriptorLink {
    pub(crate) number: OsString,
    pub(crate) target: PathBuf,
}

/// `/proc/PID`.
pub(crate) struct ProcessDir {
    path: PathBuf,
}

impl ProcessDir {
    pub(crate) fn new(proc_root: &Path, pid: Pid) -> Result<Self, Finding> {
        // SO_PEERCRED says 0 for a peer outside our pid namespace.
        if pid.as_raw() <= 0 {
            return Err(uninspectable(
                "the VMM's process is in another pid namespace: run the host agent in the host's".to_owned(),
            ));
        }
        Ok(Self { path: proc_root.join(pid.as_raw().to_string()) })
    }

    pub(crate) fn read(&self, name: &str) -> Result<String, Finding> {
        let path = self.path.join(name);
        // Names of files and processes need not be UTF-8.
        let bytes = fs::read(&path).map_err(|error| unreadable(&path, &error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(crate) fn descriptors(&self) -> Result<Vec<DescriptorLink>, Finding> {
        let path = self.path.join("fd");
        let unreadable = |error: io::Error| unreadable(&path, &error);
        // Links are read relative to it: a third cheaper than by path.
        let directory = File::open(&path).map_err(unreadable)?;
        let mut links = Vec::new();
        for entry in fs::read_dir(&path).map_err(unreadable)? {
            let number = entry.map_err(unreadable)?.file_name();
            match readlinkat(&directory, number.as_os_str()) {
                Ok(target) => links.push(DescriptorLink { number, target: target.into() }),
                // Closed since the directory was read.
                Err(Errno::ENOENT) => {}
                Err(errno) => return Err(unreadable(errno.into())),
            }
        }
        Ok(links)
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Finding {
    let path = path.display();
    uninspectable(match error.kind() {
        io::ErrorKind::PermissionDenied => format!(
            "cannot read {path}: {error}; run the host agent as the VMM's user with the same capabilities, or give it \
             CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
        ),
        // ESRCH: the process died while the file was open.
        io::ErrorKind::NotFound => format!("{path} is gone: the VMM has exited and must connect again"),
        _ if error.raw_os_error() == Some(libc::ESRCH) => {
            format!("{path} is gone: the VMM has exited and must connect again")
        }
        _ => format!("cannot read {path}: {error}"),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn what_cannot_be_read_names_the_remedy() {
        for (errno, remedy) in [
            (libc::EACCES, "CAP_SYS_PTRACE"),
            (libc::EPERM, "CAP_SYS_PTRACE"),
            (libc::ENOENT, "connect again"),
            (libc::ESRCH, "connect again"),
            (libc::EIO, "cannot read /proc/1/fd"),
        ] {
            let finding = unreadable(Path::new("/proc/1/fd"), &io::Error::from_raw_os_error(errno));
            assert_eq!(finding.gate, Gate::Uninspectable);
            assert!(finding.detail.contains(remedy), "{finding:?}");
        }
    }
}
