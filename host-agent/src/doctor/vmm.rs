//! The process of `--pid`: what it is and what its part of /proc says.
//!
//! Read once, so that all lines speak of the same moment. Assigned devices and locked memory are judged by
//! [`crate::process`], the same code that closes the gates of the daemon.

use super::{Check, Line};
use crate::process::{DescriptorLink, Finding, ProcessDir};
use nix::unistd::Pid;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// libvirt's command lines for QEMU have some 10 KB.
const MAX_COMMAND_LINE: u64 = 256 << 10;

/// How much of the command line the report shows, in characters.
const SHOWN_COMMAND_LINE: usize = 120;

/// A loader has a few options before the program (ld.so(8)).
const MAX_LOADER_WORDS: usize = 8;

/// Which VMM, as far as advice differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Qemu,
    CloudHypervisor,
    Firecracker,
    Other,
}

/// A process.
pub(super) struct Vmm {
    pub(super) pid: Pid,
    /// `/proc/PID`.
    pub(super) directory: PathBuf,
    /// `status`; an error if there is no such process.
    pub(super) status: io::Result<String>,
    /// Words of the command line; empty for a kernel thread.
    pub(super) arguments: Vec<String>,
    pub(super) descriptors: Result<Vec<DescriptorLink>, Finding>,
    pub(super) maps: Result<String, Finding>,
    name: String,
    exe: Option<PathBuf>,
}

impl Vmm {
    pub(super) fn look(proc: &Path, pid: Pid) -> Self {
        let directory = proc.join(pid.as_raw().to_string());
        let process = ProcessDir::new(proc, pid);
        let descriptors = process.as_ref().map_err(Clone::clone).and_then(ProcessDir::descriptors);
        let maps = process.as_ref().map_err(Clone::clone).and_then(|process| process.read("maps"));
        Self {
            pid,
            status: fs::read(directory.join("status")).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
            arguments: arguments(&directory.join("cmdline")),
            descriptors,
            maps,
            name: fs::read(directory.join("comm"))
                .map(|bytes| String::from_utf8_lossy(&bytes).trim_end().to_owned())
                .unwrap_or_default(),
            exe: fs::read_link(directory.join("exe")).ok(),
            directory,
        }
    }

    /// `/proc/PID/exe`.
    pub(super) fn exe_link(&self) -> PathBuf {
        self.directory.join("exe")
    }

    /// By the name of its executable, of the program as it was called, and of the process.
    pub(super) fn kind(&self) -> Kind {
        let base = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        let names = [
            self.exe.as_ref().map(|exe| base(&exe.to_string_lossy())),
            self.arguments.first().map(|program| base(program)),
            Some(self.name.clone()),
        ];
        let any = |test: &dyn Fn(&str) -> bool| names.iter().flatten().any(|name| test(name));
        // Proxmox calls it `kvm`, NixOS `.qemu-system-x86_64-wrapped`; a process's name is cut to 15 bytes.
        let is_qemu = |name: &str| {
            let name = name.trim_start_matches('.');
            name.starts_with("qemu-system") || name.starts_with("qemu-kvm") || name == "kvm"
        };
        // Started through another C library's loader, all three names are the loader's.
        let loaded = any(&|name| name.starts_with("ld-linux"))
            && self.arguments.iter().take(MAX_LOADER_WORDS).any(|word| is_qemu(&base(word)));
        if loaded || any(&is_qemu) {
            Kind::Qemu
        } else if any(&|name| name.starts_with("cloud-hyperviso")) {
            Kind::CloudHypervisor
        } else if any(&|name| name.starts_with("firecracker")) {
            Kind::Firecracker
        } else {
            Kind::Other
        }
    }

    /// Whether it holds a VM of KVM (`kvm_create_vm` in `virt/kvm/kvm_main.c`); `None` if that cannot be seen.
    pub(super) fn on_kvm(&self) -> Option<bool> {
        let links = self.descriptors.as_ref().ok()?;
        Some(links.iter().any(|link| link.target.as_os_str() == "anon_inode:kvm-vm"))
    }

    pub(super) fn line(&self) -> Line {
        let pid = self.pid;
        let status = match &self.status {
            Ok(status) => status,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Line::no(
                    Check::Process,
                    format!("there is no process {pid}"),
                    "take the pid of the VMM: `fpr-host-agent status` shows that of each front end, or pgrep qemu",
                )
                .figure("exists", false);
            }
            Err(error) => return Line::unreadable(Check::Process, &self.directory.join("status"), error),
        };
        let uid =
            status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next()?.parse::<u32>().ok());
        let accelerator = match self.on_kvm() {
            Some(true) => "holds a KVM VM",
            Some(false) => "holds no KVM VM (emulation, or no VMM)",
            None => "descriptors not readable",
        };
        let command_line = self.arguments.join(" ");
        let mut shown: String = command_line.chars().take(SHOWN_COMMAND_LINE).collect();
        if shown.len() < command_line.len() {
            shown.push('…');
        }
        let uid_shown = uid.map_or("?".to_owned(), |uid| uid.to_string());
        let reason = format!("{} of uid {uid_shown} {accelerator}: {shown}", self.name);
        let line = if self.kind() == Kind::Other && self.on_kvm() == Some(false) {
            Line::warn(Check::Process, reason, "is this the VMM? Take the pid of the process that runs the guest")
        } else {
            Line::ok(Check::Process, reason)
        };
        line.figure("exists", true).figure("name", self.name.as_str()).figure("uid", uid).figure("kvm", self.on_kvm())
    }

    /// The values of QEMU's options `option` on the command line; hot-plugged devices are not on it.
    pub(super) fn options<'a>(&'a self, option: &'a str) -> impl Iterator<Item = &'a str> {
        let is_option = move |word: &str| word.strip_prefix("--").or(word.strip_prefix('-')) == Some(option);
        self.arguments.windows(2).filter(move |words| is_option(&words[0])).map(|words| words[1].as_str())
    }
}

fn arguments(path: &Path) -> Vec<String> {
    let mut bytes = Vec::new();
    // One that cannot be read gives no words, and the kind of VMM stays unknown; the other files say why.
    let read = fs::File::open(path).and_then(|file| file.take(MAX_COMMAND_LINE).read_to_end(&mut bytes));
    if read.is_err() {
        return Vec::new();
    }
    let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let mut words: Vec<String> = words.collect();
    // Each word ends with a zero byte.
    if words.last().is_some_and(String::is_empty) {
        words.pop();
    }
    words
}
