//! Figures of a real process with memory of known size. The process is another one: this test's binary, run again.

use crate::tree::page_bytes;
use fpr_host_agent::accounting::{AbsentReason, Method, Precision, Reader, Roots, Subject};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use vm_memory::{FileOffset, MmapRegion};

const ROLE: &str = "FPR_ACCOUNTING_ROLE";
const PRIVATE: u64 = 96 << 20;
const SHARED: u64 = 32 << 20;
/// What is touched of the shared file: the rest is a hole.
const TOUCHED: u64 = 24 << 20;
/// Binary, libraries, heap and stacks of a test.
const SLACK: u64 = 24 << 20;

/// Kills the child when the test is over.
struct Held(Child);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process: holds memory and waits. No test of its own.
#[test]
fn holder() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let mut private = vec![0_u8; usize::try_from(PRIVATE).unwrap()];
    private.iter_mut().step_by(1024).for_each(|byte| *byte = 1);
    let file = File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(SHARED).unwrap();
    file.write_all_at(&vec![1; usize::try_from(TOUCHED).unwrap()], 0).unwrap();
    let mapping = (role == "shared").then(|| {
        let at = FileOffset::from_arc(Arc::new(file), 0);
        MmapRegion::<()>::from_file(at, usize::try_from(SHARED).unwrap()).unwrap()
    });
    println!("ready");
    std::io::stdout().flush().unwrap();
    let mut line = Vec::new();
    std::io::stdin().read_to_end(&mut line).unwrap();
    assert!(private[1024] == 1 && mapping.is_some() == (role == "shared"));
}

fn hold(role: &str) -> (Held, Subject) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["real::holder", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut output = child.stdout.take().unwrap();
    let mut byte = [0];
    while !said.contains("ready") {
        assert_eq!(output.read(&mut byte).unwrap(), 1, "the holder ended: {said}");
        said.push(char::from(byte[0]));
    }
    let pid = i32::try_from(child.id()).unwrap();
    (Held(child), Subject { pid: Some(pid), ..Subject::default() })
}

fn within(name: &str, got: u64, wanted: u64, slack: u64) {
    assert!(got >= wanted && got <= wanted + slack, "{name}: {got}, wanted {wanted} to {}", wanted + slack);
}

#[test]
fn figures_of_known_memory() {
    let (child, subject) = hold("shared");
    let mut reader = Reader::new(&Roots::default(), &subject);
    for reading in reader.read_all(Method::Rss) {
        let figure = reading.unwrap();
        let bound = match figure.precision {
            Precision::Precise => 0,
            Precision::Approximate { error_bound_bytes } => error_bound_bytes,
        };
        // Written through the descriptor, the shared pages are not mapped yet.
        within(&figure.source, figure.bytes + bound, PRIVATE, SLACK + 2 * bound);
    }
    let figure = reader.read(Method::Pss).unwrap();
    within(&figure.source, figure.bytes, PRIVATE, SLACK);
    let backing = reader.read(Method::Backing).unwrap();
    assert_eq!((backing.bytes, backing.precision), (TOUCHED, Precision::Precise));
    assert_eq!(backing.source, "fstat st_blocks of 1 memory file");
    assert!(reader.read(Method::Swap).unwrap().bytes < PRIVATE);
    assert!(reader.read(Method::Thp).unwrap().bytes <= PRIVATE + SLACK);
    if let Ok(figure) = reader.read(Method::Ksm) {
        assert_eq!(figure.bytes, 0, "nothing of it is mergeable");
    }
    drop(child);
    for method in Method::ALL {
        let absent = reader.read(method).expect_err("the process is gone");
        let reasons = [AbsentReason::NoProcess, AbsentReason::NoCgroup];
        assert!(reasons.contains(&absent.reason), "{method:?}: {absent:?}");
    }
}

#[test]
fn private_memory_has_no_backing() {
    let (_child, subject) = hold("private");
    let mut reader = Reader::new(&Roots::default(), &subject);
    let absent = reader.read(Method::Backing).unwrap_err();
    assert_eq!(absent.reason, AbsentReason::NotShared);
    assert!(absent.detail.contains("share=on"), "{absent}");
}

/// Exited and not reaped: its files are there and say nothing.
#[test]
fn a_zombie_has_no_figures() {
    let mut child = Command::new("true").spawn().unwrap();
    let subject = Subject { pid: Some(i32::try_from(child.id()).unwrap()), ..Subject::default() };
    let mut reader = Reader::new(&Roots::default(), &subject);
    crate::daemon::poll("it exits", || reader.read(Method::Rss).map_or_else(Ok, Err));
    // Pid, and so the zombie, is there until it is waited for.
    for method in [Method::Rss, Method::Swap, Method::Pss, Method::Thp] {
        for reading in [reader.read(method), Reader::new(&Roots::default(), &subject).read(method)] {
            assert_eq!(reading.unwrap_err().reason, AbsentReason::NoProcess, "{method:?}");
        }
    }
    child.wait().unwrap();
}

/// A reader must not keep the memory of a VM alive that is gone.
#[test]
fn memory_files_are_not_held() {
    let file = Arc::new(File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap()));
    file.write_all_at(&vec![1; usize::try_from(page_bytes()).unwrap()], 0).unwrap();
    let subject = Subject { files: vec![Arc::clone(&file)], ..Subject::default() };
    let mut reader = Reader::new(&Roots::default(), &subject);
    drop(subject);
    assert_eq!(reader.read(Method::Backing).unwrap().bytes, page_bytes());
    drop(file);
    assert_eq!(reader.read(Method::Backing).unwrap_err().reason, AbsentReason::NoProcess);
}
