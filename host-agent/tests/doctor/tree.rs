//! A host made of files, on which everything is as it should be, and a VM on it. Tests break one thing at a time.

use fpr_host_agent::doctor::{Check, Line, Report, Surroundings, examine};
use fpr_host_agent::kvm::Ability;
use nix::unistd::Pid;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

pub const PID: i32 = 4242;

/// 2 GiB, as QEMU maps it.
pub const SHARED: &str = "7f0000000000-7f0080000000 rw-s 00000000 00:01 4711  /memfd:pc.ram (deleted)";

/// What `-device help` of QEMU 7.2 and of 11.1 list.
pub const OLD_QEMU: &[&str] = &["e1000", "vhost-user-vsock-pci", "virtio-balloon-pci"];
pub const NEW_QEMU: &[&str] = &["e1000", "vhost-user-vsock-pci", "virtio-balloon-pci", "vhost-user-test-device-pci"];

pub struct Host {
    pub dir: TempDir,
    pub surroundings: Surroundings,
}

impl Host {
    /// Kernel 6.12, control groups version 2, KVM, a QEMU 11.1, doctor as root, no daemon.
    pub fn ordinary() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let surroundings = Surroundings {
            proc: at("proc"),
            sys: at("sys"),
            cgroup: at("cgroup"),
            kvm: || Ability::Able,
            path: at("bin").into(),
            control: at("host.sock"),
            qemu_limit: Duration::from_secs(20),
        };
        let host = Self { dir, surroundings };
        host.write("proc/sys/kernel/osrelease", "6.12.1-amd64\n");
        host.write(
            "proc/pressure/memory",
            "some avg10=1.50 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=0\n",
        );
        host.write("proc/swaps", "Filename Type Size Used Priority\n/dev/zram0  partition 1048576 2048 100\n/swap\\040file  file 2048 0 -2\n/dev/sda2 partition 4096 1024 -3\n");
        host.write("proc/self/status", "Uid:\t0\t0\t0\t0\nSigQ:\t3/1000\nCapEff:\t000001ffffffffff\n");
        host.write(
            "proc/self/limits",
            "Limit  Soft Limit  Hard Limit  Units\nMax open files            4096   524288  files\n",
        );
        host.write("proc/self/ksm_stat", "");
        host.link("proc/self/ns/pid", "pid:[4026531836]");
        for (name, value) in [
            ("nr_hugepages", 8),
            ("free_hugepages", 6),
            ("resv_hugepages", 1),
            ("surplus_hugepages", 0),
            ("nr_overcommit_hugepages", 4),
        ] {
            host.write(&format!("sys/kernel/mm/hugepages/hugepages-2048kB/{name}"), &value.to_string());
        }
        host.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        host.write(
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always within_size [advise] never deny force\n",
        );
        for (name, value) in [("run", 1), ("pages_shared", 10), ("pages_sharing", 40)] {
            host.write(&format!("sys/kernel/mm/ksm/{name}"), &value.to_string());
        }
        host.write("cgroup/cgroup.controllers", "cpuset cpu io memory pids\n");
        host.qemu("bin", &says("QEMU emulator version 11.1.0", NEW_QEMU));
        host
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub fn link(&self, name: &str, target: impl AsRef<Path>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    pub fn remove(&self, name: &str) {
        let path = self.path(name);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    /// A shell script in the place of QEMU. Written by another process: a descriptor that a fork of another test's
    /// thread inherits would make it "busy".
    pub fn qemu(&self, directory: &str, script: &str) -> PathBuf {
        self.write("script", &format!("#!/bin/sh\n{script}"));
        let name = format!("qemu-system-{}", std::env::consts::ARCH);
        let path = self.path(directory).join(name);
        let installed = Command::new("install").args(["-D", "-m", "755"]).arg(self.path("script")).arg(&path).status();
        assert!(installed.unwrap().success());
        path
    }

    /// A QEMU with these words after its name, these mappings and these descriptors.
    pub fn vm(&self, words: &[&str], maps: &[&str], descriptors: &[&str]) {
        let name = format!("qemu-system-{}", std::env::consts::ARCH);
        let file = |name: &str| format!("proc/{PID}/{name}");
        self.write(&file("comm"), "qemu-system-x86\n");
        let command_line: String = [name.as_str()].iter().chain(words).map(|word| format!("{word}\0")).collect();
        self.write(&file("cmdline"), &command_line);
        self.write(
            &file("status"),
            "Name:\tqemu-system-x86\nUid:\t64055\t64055\t64055\t64055\nVmLck:\t 64 kB\nVmPin:\t 0 kB\n",
        );
        let code = "55d000000000-55d020000000 r-xp 00000000 fd:01 99  /usr/bin/qemu-system-x86_64";
        let translated = "7e0000000000-7e0100000000 rwxp 00000000 00:00 0 ";
        let reserved = "7d0000000000-7d0200000000 ---p 00000000 00:00 0 ";
        let maps: Vec<&str> = [code, reserved, translated].iter().chain(maps).copied().collect();
        self.write(&file("maps"), &format!("{}\n", maps.join("\n")));
        self.write(&file("cgroup"), "0::/machine.slice/vm.scope\n");
        self.write("cgroup/machine.slice/vm.scope/memory.max", "max\n");
        self.write("cgroup/machine.slice/vm.scope/memory.current", "1073741824\n");
        self.link(&file("fd/0"), "/dev/null");
        for (number, target) in descriptors.iter().enumerate() {
            self.link(&file(&format!("fd/{}", number + 3)), target);
        }
        self.link(&file("exe"), self.path("bin").join(name));
    }

    pub fn examine(&self) -> Report {
        examine(&self.surroundings, None)
    }

    pub fn examine_vm(&self) -> Report {
        examine(&self.surroundings, Some(Pid::from_raw(PID)))
    }
}

/// A script that answers as QEMU does.
pub fn says(version: &str, devices: &[&str]) -> String {
    let help: String = devices.iter().map(|name| format!("name \"{name}\", bus PCI\n")).collect();
    format!("case $1 in --version) echo '{version}' ;; -device) printf '%s' '{help}' ;; *) exit 1 ;; esac\n")
}

pub fn line(report: &Report, check: Check) -> &Line {
    let line = report.lines.iter().find(|line| line.check == check);
    line.unwrap_or_else(|| panic!("no {} in {:#?}", check.word(), report.lines))
}

/// Asserts verdict and words of one line; what is not ok must say what to do.
pub fn says_line(report: &Report, check: Check, verdict: fpr_host_agent::doctor::Verdict, words: &[&str]) {
    let line = line(report, check);
    assert_eq!(line.verdict, verdict, "{line:?}");
    assert_eq!(line.remedy.is_none(), verdict == fpr_host_agent::doctor::Verdict::Ok, "{line:?}");
    let said = format!("{} {}", line.reason, line.remedy.as_deref().unwrap_or_default());
    for word in words {
        assert!(said.contains(word), "{said:?} lacks {word:?}");
    }
}
