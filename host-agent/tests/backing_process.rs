//! The checks of a VMM's process on fake trees of /proc and on real processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use fpr_host_agent::backing::FileId;
use fpr_host_agent::process::{Finding, MAX_FINDINGS, check_holdings, check_mappings};
use fpr_protocol::Gate;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;
use tempfile::TempDir;
use vm_memory::{FileOffset, MmapRegion};

const GUEST_BYTES: u64 = 2 << 30;
const PID: i32 = 4242;

/// `/proc` with one process in it that holds these descriptors and this much locked and pinned memory.
fn fake(descriptors: &[&str], locked_kib: u64, pinned_kib: u64) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let process = root.path().join(PID.to_string());
    fs::create_dir_all(process.join("fd")).unwrap();
    for (number, target) in descriptors.iter().enumerate() {
        symlink(target, process.join("fd").join(number.to_string())).unwrap();
    }
    let status = format!("Name:\tqemu\nVmLck:\t{locked_kib:8} kB\nVmPin:\t{pinned_kib:8} kB\n");
    fs::write(process.join("status"), status).unwrap();
    root
}

fn holdings(root: &Path) -> Vec<Finding> {
    check_holdings(root, Pid::from_raw(PID), GUEST_BYTES)
}

fn gates(findings: &[Finding]) -> Vec<Gate> {
    findings.iter().map(|finding| finding.gate).collect()
}

#[test]
fn an_ordinary_vmm_has_no_findings() {
    let root = fake(&["/dev/null", "/dev/kvm", "anon_inode:kvm-vm", "/memfd:pc.ram (deleted)"], 0, 0);
    assert_eq!(holdings(root.path()), []);
}

#[test]
fn the_descriptor_of_a_device_is_named() {
    let root = fake(&["/dev/null", "anon_inode:kvm-vfio"], 0, 0);
    let findings = holdings(root.path());
    assert_eq!(gates(&findings), [Gate::AssignedDevice]);
    assert!(findings[0].detail.starts_with("descriptor 1 is anon_inode:kvm-vfio"), "{findings:?}");
    fs::remove_file(root.path().join(PID.to_string()).join("fd/1")).unwrap();
    assert_eq!(holdings(root.path()), [], "the device is gone");
}

#[test]
fn locked_and_pinned_memory_close_their_gates() {
    assert_eq!(gates(&holdings(fake(&[], 2 << 20, 0).path())), [Gate::MemoryLocked]);
    assert_eq!(gates(&holdings(fake(&[], 0, 4).path())), [Gate::AssignedDevice]);
}

#[test]
fn findings_are_bounded() {
    let root = fake(&["/dev/vfio/1"; 100], 0, 4);
    assert_eq!(holdings(root.path()).len(), MAX_FINDINGS);
}

#[test]
fn a_process_that_cannot_be_seen_is_a_finding() {
    let root = tempfile::tempdir().unwrap();
    for pid in [PID, 0, -1] {
        let pid = Pid::from_raw(pid);
        let holdings = check_holdings(root.path(), pid, GUEST_BYTES);
        assert!(gates(&holdings).iter().all(|gate| *gate == Gate::Uninspectable) && !holdings.is_empty());
        assert_eq!(gates(&check_mappings(root.path(), pid, &[])), [Gate::Uninspectable]);
    }
    let unreadable = fake(&["/dev/null"], 0, 0);
    fs::remove_file(unreadable.path().join(PID.to_string()).join("status")).unwrap();
    assert_eq!(gates(&holdings(unreadable.path())), [Gate::Uninspectable]);
}

const CHILD: &str = "FPR_TEST_PROCESS_CHILD";

/// This test again as a process of its own that locks all its memory and waits for its stdin to end.
struct LockedChild(Child);

impl LockedChild {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_process_that_locks_its_memory_is_found", "--nocapture"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0];
        child.stderr.as_mut().unwrap().read_exact(&mut said).unwrap();
        assert_eq!(&said, b"L", "the child says when it has locked");
        Self(child)
    }
}

impl Drop for LockedChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_that_locks_its_memory_is_found() {
    if std::env::var_os(CHILD).is_some() {
        // An unprivileged process may lock up to its hard limit only.
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, u64::MAX, u64::MAX);
        let said: &[u8] = if mlockall(MlockAllFlags::MCL_CURRENT).is_ok() { b"L" } else { b"?" };
        std::io::stderr().write_all(said).unwrap();
        let _ = std::io::stdin().read(&mut [0]);
        return;
    }
    let child = LockedChild::start();
    let pid = Pid::from_raw(i32::try_from(child.0.id()).unwrap());
    let proc = Path::new("/proc");
    // It has a few MiB, so that is the guest memory it can cover.
    assert_eq!(gates(&check_holdings(proc, pid, 4 << 20)), [Gate::MemoryLocked]);
    assert_eq!(check_holdings(proc, pid, 64 << 30), [], "little against a large guest");
    drop(child);
    let findings = check_holdings(proc, pid, 4 << 20);
    assert!(gates(&findings).contains(&Gate::Uninspectable), "{findings:?}");
}

#[test]
fn a_process_that_has_exited_and_is_not_reaped_is_a_finding() {
    let mut child = Command::new("true").spawn().unwrap();
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    let deadline = Instant::now() + std::time::Duration::from_secs(60);
    let mut findings = Vec::new();
    while findings.is_empty() && Instant::now() < deadline {
        findings = check_holdings(Path::new("/proc"), pid, GUEST_BYTES);
    }
    assert!(gates(&findings).contains(&Gate::Uninspectable), "{findings:?}");
    child.wait().unwrap();
}

#[test]
fn real_mappings_are_judged() {
    let map = |flags, prot| {
        let file = File::from(memfd_create(c"guest-memory", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(4096).unwrap();
        let file = Arc::new(file);
        let mapping = MmapRegion::<()>::build(Some(FileOffset::from_arc(Arc::clone(&file), 0)), 4096, prot, flags);
        (FileId::of(&file).unwrap(), mapping.unwrap())
    };
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let (shared, _shared) = map(libc::MAP_SHARED, both);
    let (private, _private) = map(libc::MAP_PRIVATE, both);
    let (read_only, _read_only) = map(libc::MAP_SHARED, libc::PROT_READ);
    let (unmapped, _) = map(libc::MAP_SHARED, both);
    let check = |files: &[FileId]| check_mappings(Path::new("/proc"), Pid::this(), files);
    assert_eq!(check(&[shared]), []);
    for (file, gate, remedy) in [
        (private, Gate::BackingUnsuitable, "share=on"),
        (read_only, Gate::BackingUnsuitable, "readonly=off"),
        (unmapped, Gate::Uninspectable, "opened by the VMM itself"),
    ] {
        let findings = check(&[shared, file]);
        assert_eq!(gates(&findings), [gate]);
        assert!(findings[0].detail.contains(remedy), "{findings:?}");
    }
}

/// Not a benchmark, a bound: an accidental walk of `smaps` or the like would break it. Best of many, as the machine is
/// shared.
#[test]
fn holdings_are_cheap_enough_for_every_report() {
    let _files: Vec<File> = (0..60).map(|_| File::open("/dev/null").unwrap()).collect();
    let best = (0..200)
        .map(|_| {
            let started = Instant::now();
            let _ = check_holdings(Path::new("/proc"), Pid::this(), GUEST_BYTES);
            started.elapsed()
        })
        .min()
        .unwrap();
    writeln!(std::io::stderr(), "check_holdings with 60 descriptors: {best:?}").unwrap();
    assert!(best.as_micros() <= 2000, "{best:?}");
}
