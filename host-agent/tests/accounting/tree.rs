//! Fake kernel trees.

use fpr_host_agent::accounting::{Roots, Subject};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// The VMM's process in every test.
pub(crate) const PID: i32 = 4242;

pub(crate) struct Tree {
    directory: TempDir,
}

/// A process to be.
pub(crate) struct Process<'a> {
    pub(crate) pid: i32,
    pub(crate) name: &'a str,
    pub(crate) parent: i32,
    /// `None` for one without memory of its own, as a kernel thread.
    pub(crate) rss_kib: Option<u64>,
}

impl<'a> Process<'a> {
    pub(crate) fn new(pid: i32, name: &'a str) -> Self {
        Self { pid, name, parent: 1, rss_kib: Some(8192) }
    }
}

impl Tree {
    /// A machine with 4 CPUs and a kernel that sums precisely; nothing in it.
    pub(crate) fn new() -> Self {
        let tree = Self { directory: tempfile::tempdir().unwrap() };
        tree.write("proc/sys/kernel/osrelease", "6.18.0\n");
        tree.write("sys/devices/system/cpu/possible", "0-3\n");
        fs::create_dir_all(tree.path("cgroup")).unwrap();
        tree
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn remove(&self, path: &str) {
        let path = self.path(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    pub(crate) fn roots(&self) -> Roots {
        Roots { proc: self.path("proc"), sys: self.path("sys"), cgroup: self.path("cgroup") }
    }

    /// The VMM with 100 MiB resident, in the cgroups of this text.
    pub(crate) fn vmm(&self, cgroup: &str) -> Subject {
        self.process(&Process { rss_kib: Some(100 << 10), ..Process::new(PID, "qemu-system-x86") });
        self.write(&format!("proc/{PID}/cgroup"), cgroup);
        Subject { pid: Some(PID), ..Subject::default() }
    }

    pub(crate) fn process(&self, process: &Process<'_>) {
        let Process { pid, name, parent, rss_kib } = process;
        let memory = rss_kib.map_or(String::new(), |rss| format!("VmRSS:\t{rss:8} kB\nVmSwap:\t      12 kB\n"));
        self.write(&format!("proc/{pid}/status"), &format!("Name:\t{name}\nPPid:\t{parent}\n{memory}Threads:\t3\n"));
        let pages = rss_kib.unwrap_or(0) * 1024 / page_bytes();
        self.write(&format!("proc/{pid}/statm"), &format!("{} {pages} 1 1 0 1 0\n", pages * 2));
    }

    /// A cgroup below one of the mounts, with its usage and its processes.
    pub(crate) fn cgroup(&self, path: &str, file: &str, usage: u64, pids: &[i32]) {
        self.write(&format!("cgroup/{path}/{file}"), &format!("{usage}\n"));
        self.procs(path, pids);
    }

    pub(crate) fn procs(&self, path: &str, pids: &[i32]) {
        let text: String = pids.iter().map(|pid| format!("{pid}\n")).collect();
        self.write(&format!("cgroup/{path}/cgroup.procs"), &text);
    }

    /// The v2 tree is the only one.
    pub(crate) fn v2(&self) {
        self.write("cgroup/cgroup.controllers", "cpuset cpu io memory hugetlb pids\n");
    }
}

pub(crate) fn page_bytes() -> u64 {
    let bytes = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).unwrap().unwrap();
    u64::try_from(bytes).unwrap()
}
