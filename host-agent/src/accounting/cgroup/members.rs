//! Who is in a cgroup and below it, and whether that is one VM.
//!
//! What others in the cgroup use is charged to it as well, so a cgroup that two VMs share says nothing about either.

use super::super::process::{Process, read_text};
use super::super::{Absent, AbsentReason, Roots, parse};
use super::place::{Cgroup, Version, is_named_for_a_vm};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// More cgroups than libvirt makes for the largest VM: one per vCPU and I/O thread.
const MAX_CGROUPS: usize = 4096;
/// More processes than any VM's helpers are.
const MAX_PROCESSES: usize = 4096;

/// A cgroup's directory and those below it.
pub(super) fn subtree(top: &Path) -> Result<Vec<PathBuf>, Absent> {
    let mut directories = vec![top.to_owned()];
    let mut next = 0;
    while let Some(directory) = directories.get(next).cloned() {
        next += 1;
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            // A child that was removed meanwhile; the top itself must be there.
            Err(error) if next > 1 && error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(Absent::unreadable(&directory, &error, removed())),
        };
        let children = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        directories.extend(children.map(|entry| entry.path()));
        if directories.len() > MAX_CGROUPS {
            let detail = format!("{} has more than {MAX_CGROUPS} cgroups below it: it is no VM's", top.display());
            return Err(Absent::new(AbsentReason::NoCgroup, detail));
        }
    }
    Ok(directories)
}

pub(super) fn removed() -> (AbsentReason, &'static str) {
    (AbsentReason::NoCgroup, "the cgroup is gone; a running VM has another")
}

/// The processes in a cgroup and below it.
pub(super) fn processes(directories: &[PathBuf]) -> Result<Vec<i32>, Absent> {
    let mut pids = Vec::new();
    for (index, directory) in directories.iter().enumerate() {
        let path = directory.join("cgroup.procs");
        let text = match fs::File::open(&path) {
            Ok(file) => match io::read_to_string(file) {
                Ok(text) => text,
                // A threaded cgroup: its threads belong to processes listed above (cgroup-v2.rst, "Threads").
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => continue,
                Err(error) if index > 0 && is_gone(&error) => continue,
                Err(error) => return Err(Absent::unreadable(&path, &error, removed())),
            },
            Err(error) if index > 0 && is_gone(&error) => continue,
            Err(error) => return Err(Absent::unreadable(&path, &error, removed())),
        };
        for line in text.lines() {
            let pid = line.parse::<i32>().map_err(|_| {
                let shown: String = line.chars().take(32).collect();
                Absent::new(AbsentReason::Malformed, format!("{}: {shown:?} is no pid", path.display()))
            })?;
            // That is what the kernel shows for one outside of the reader's pid namespace.
            if pid == 0 {
                let detail =
                    format!("{} holds a process of another pid namespace: run this in the host's", path.display());
                return Err(Absent::new(AbsentReason::NoCgroup, detail));
            }
            pids.push(pid);
        }
        if pids.len() > MAX_PROCESSES {
            let detail = format!("{} holds more than {MAX_PROCESSES} processes: it is no VM's", directory.display());
            return Err(Absent::new(AbsentReason::NoCgroup, detail));
        }
    }
    Ok(pids)
}

/// Checks that processes without a directory in /proc have exited: a mount of /proc with `hidepid` hides others' as well,
/// and then nobody can say what they are or have.
pub(super) fn check_exited(directories: &[PathBuf], missing: &[i32]) -> Result<(), Absent> {
    if missing.is_empty() {
        return Ok(());
    }
    let now = processes(directories)?;
    match missing.iter().find(|pid| now.contains(pid)) {
        Some(pid) => {
            let detail = format!(
                "process {pid} of the cgroup is not shown in /proc, which is mounted with hidepid: run as root or in the \
                 group of its option gid"
            );
            Err(Absent::new(AbsentReason::NotPermitted, detail))
        }
        None => Ok(()),
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

/// What matters of another process in the cgroup.
struct Member {
    parent: Option<i32>,
    name: String,
    has_memory: bool,
}

impl Member {
    /// `None` if it has exited meanwhile.
    fn look(roots: &Roots, pid: i32) -> Result<Option<Self>, Absent> {
        let status = match Process::open(roots, pid).and_then(|process| process.status()) {
            Ok(status) => status,
            Err(absent) if absent.reason == AbsentReason::NoProcess => return Ok(None),
            Err(absent) => return Err(absent),
        };
        let parent = parse::count(&status, "PPid", 1).ok().and_then(|pid| i32::try_from(pid).ok());
        // A kernel thread, such as vhost's before Linux 6.4, has none.
        let has_memory = parse::kib(&status, "VmRSS").is_ok();
        Ok(Some(Self { parent, name: parse::name(&status).to_owned(), has_memory }))
    }

    fn is_vmm(&self) -> bool {
        // A process's name is cut to 15 bytes. Proxmox calls QEMU `kvm`.
        let name = self.name.trim_start_matches('.');
        ["qemu-system", "qemu-kvm", "cloud-hyperviso", "firecracker", "crosvm"].iter().any(|vmm| name.starts_with(vmm))
            || name == "kvm"
    }
}

/// Checks that the cgroup holds the process `pid`, and nothing but what belongs to it.
pub(super) fn check_is_of(roots: &Roots, cgroup: &Cgroup, pid: i32) -> Result<(), Absent> {
    let directories = subtree(&cgroup.directory())?;
    let pids = processes(&directories)?;
    let shown = cgroup.path.display();
    if !pids.contains(&pid) {
        let detail =
            format!("the process is not listed in its cgroup {shown}: it has just moved or exited; read again");
        return Err(Absent::new(AbsentReason::NoCgroup, detail));
    }
    let (mut members, mut missing) = (BTreeMap::new(), Vec::new());
    for other in pids.into_iter().filter(|other| *other != pid) {
        match Member::look(roots, other)? {
            Some(member) => drop(members.insert(other, member)),
            None => missing.push(other),
        }
    }
    check_exited(&directories, &missing)?;
    let helpers_are_its_own = is_named_for_a_vm(cgroup);
    for (other, member) in members.iter().filter(|(_, member)| member.has_memory) {
        if descends(&members, *other, pid) || (helpers_are_its_own && !member.is_vmm()) {
            continue;
        }
        let detail = format!(
            "its cgroup {shown} is shared with {} (pid {other}): start the VM in a cgroup of its own, or name the cgroup \
             with --cgroup if all in it belongs to the VM",
            member.name
        );
        return Err(Absent::new(AbsentReason::NoCgroup, detail));
    }
    Ok(())
}

/// Whether `pid` is a child of `ancestor`, or a child's child.
fn descends(members: &BTreeMap<i32, Member>, pid: i32, ancestor: i32) -> bool {
    let mut current = pid;
    for _ in 0..=members.len() {
        match members.get(&current).and_then(|member| member.parent) {
            Some(parent) if parent == ancestor => return true,
            Some(parent) => current = parent,
            None => return false,
        }
    }
    false
}

/// Whether usage of children is in the parent's: always in v2, in v1 unless switched off (before Linux 5.11).
pub(super) fn is_hierarchical(cgroup: &Cgroup) -> bool {
    let path = cgroup.directory().join("memory.use_hierarchy");
    let switched_off = || fs::File::open(&path).ok().and_then(|file| read_text(file, &path).ok());
    cgroup.version == Version::V2 || switched_off().is_none_or(|text| text.trim() != "0")
}
