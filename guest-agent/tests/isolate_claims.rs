//! Huge-page claims with the real kernel: needs root and a few free huge pages; says so and passes otherwise.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use fpr_guest_agent::isolate::claim::{Batch, ClaimError, HugePageClaims, MAX_BATCH};
use fpr_guest_agent::isolate::hugetlb::HugePageRoots;
use fpr_guest_agent::isolate::journal::Journal;
use fpr_guest_agent::isolate::offline::MemoryBlocks;
use fpr_guest_agent::isolate::worker::{Command, Completion, Worker};
use fpr_protocol::HugePageSize;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::BTreeSet;
use std::collections::VecDeque;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const KNOBS: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
const HUGE_PAGE: u64 = 2 << 20;

/// The counters are the machine's, so one test at a time; also between the child of one and the next, and whoever else on
/// this machine changes its pool of huge pages in a test: this file in the directory for temporary files is locked then.
const POOL_LOCK: &str = "fpr-test-huge-page-pool.lock";

struct Rig {
    dir: tempfile::TempDir,
    surplus_before: u64,
    overcommit_before: u64,
    _turn: Flock<fs::File>,
}

fn knob(name: &str) -> u64 {
    fs::read_to_string(Path::new(KNOBS).join(name)).unwrap().trim().parse().unwrap()
}

fn roots(run: &Path) -> HugePageRoots {
    HugePageRoots {
        sys: "/sys".into(),
        proc: "/proc".into(),
        mount_point: run.join("hugepages"),
        huge_page: HugePageSize::new(4096, 9).unwrap(),
    }
}

fn rig() -> Option<Rig> {
    let turn = fs::File::create(std::env::temp_dir().join(POOL_LOCK)).unwrap();
    let turn = Flock::lock(turn, FlockArg::LockExclusive).unwrap();
    let dir = tempfile::tempdir().unwrap();
    if let Err(reason) = roots(dir.path()).available() {
        println!("skipped: {reason}");
        return None;
    }
    let (surplus_before, overcommit_before) = (knob("surplus_hugepages"), knob("nr_overcommit_hugepages"));
    Some(Rig { dir, surplus_before, overcommit_before, _turn: turn })
}

impl Rig {
    fn journal(&self) -> Journal {
        Journal::open(&self.dir.path().join("run"), "boot").unwrap()
    }

    fn claims(&self) -> HugePageClaims {
        HugePageClaims::new(roots(self.dir.path()), self.journal())
    }

    fn surplus(&self) -> u64 {
        knob("surplus_hugepages") - self.surplus_before
    }

    fn assert_as_before(&self) {
        assert_eq!(self.surplus(), 0);
        assert_eq!(knob("nr_overcommit_hugepages"), self.overcommit_before);
        assert_eq!(self.journal().overcommit().unwrap(), None);
    }
}

/// The content of physical memory as the kernel itself sees it: /proc/kcore is an ELF file (64 bit, little-endian)
/// whose segments name the physical addresses of the direct map. `None` where the kernel does not show it.
fn physical(address: u64, length: usize) -> Option<Vec<u8>> {
    let kcore = fs::File::open("/proc/kcore").ok()?;
    let read = |at: u64, length: usize| {
        let mut bytes = vec![0; length];
        kcore.read_exact_at(&mut bytes, at).ok().map(|()| bytes)
    };
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let header = read(0, 64)?;
    let headers = u64::from(u16::from_le_bytes([header[56], header[57]]));
    let mut segments = (0..headers).filter_map(|i| read(word(&header, 32) + i * 56, 56));
    let segment = segments.find(|segment| {
        let (start, size) = (word(segment, 24), word(segment, 40));
        segment[0] == 1 && start != u64::MAX && (start..start.saturating_add(size)).contains(&address)
    })?;
    read(word(&segment, 8) + address - word(&segment, 24), length)
}

#[test]
fn a_claim_is_allocated_addressed_written_and_released() {
    let Some(rig) = rig() else { return };
    let mut claims = rig.claims();
    let mut batch = claims.claim(8, || false).unwrap();
    let pages = batch.pages().to_vec();
    assert_eq!(pages.len(), 8);
    assert_eq!(pages.iter().collect::<BTreeSet<_>>().len(), 8, "{pages:?}");
    assert!(pages.iter().all(|page| page.0 % HUGE_PAGE == 0 && page.0 != 0), "{pages:?}");
    assert_eq!((rig.surplus(), claims.held()), (8, 8));

    for page in 0..8 {
        batch.write_cookie(page, format!("cookie {page}").as_bytes()).unwrap();
    }
    for (page, address) in pages.iter().enumerate() {
        let cookie = format!("cookie {page}");
        match physical(address.0, cookie.len()) {
            Some(found) => assert_eq!(found, cookie.as_bytes(), "at {address}"),
            None => println!("skipped: no /proc/kcore to compare the cookie with"),
        }
    }
    assert!(matches!(batch.write_cookie(8, b"x"), Err(ClaimError::CookieOutOfBounds { page: 8, pages: 8, .. })));
    let too_long = vec![0; (2 << 20) + 1];
    assert!(matches!(batch.write_cookie(7, &too_long), Err(ClaimError::CookieOutOfBounds { .. })));

    batch.release().unwrap();
    assert_eq!((rig.surplus(), claims.held()), (0, 0));
    claims.close().unwrap();
    rig.assert_as_before();
    assert!(!fs::read_to_string("/proc/mounts").unwrap().contains(rig.dir.path().to_str().unwrap()));
}

#[test]
fn held_batches_are_all_different_pages() {
    let Some(rig) = rig() else { return };
    let mut claims = rig.claims();
    let batches: Vec<Batch> = (0..6).map(|_| claims.claim(16, || false).unwrap()).collect();
    let pages: BTreeSet<_> = batches.iter().flat_map(|batch| batch.pages()).collect();
    assert_eq!(pages.len(), 96);
    for batch in batches {
        batch.release().unwrap();
    }
    claims.close().unwrap();
    rig.assert_as_before();
}

#[test]
fn a_stopped_claim_keeps_what_came() {
    let Some(rig) = rig() else { return };
    let mut claims = rig.claims();
    let asked = std::cell::Cell::new(0);
    let batch = claims.claim(MAX_BATCH, || asked.replace(asked.get() + 1) == 3).unwrap();
    assert_eq!((batch.pages().len(), rig.surplus()), (3, 3));
    batch.release().unwrap();
    assert!(matches!(claims.claim(5, || true), Err(ClaimError::Cancelled)));
    assert_eq!(claims.leftovers().unwrap().len(), 0, "a failed claim leaves no file");
    claims.close().unwrap();
    rig.assert_as_before();
}

#[test]
fn the_largest_batch_fits() {
    let Some(rig) = rig() else { return };
    let mut claims = rig.claims();
    let batch = claims.claim(u32::MAX, || false).unwrap();
    assert_eq!(batch.pages().len(), MAX_BATCH as usize);
    let start = Instant::now();
    batch.release().unwrap();
    println!("release of {MAX_BATCH} huge pages: {:?}", start.elapsed());
    claims.close().unwrap();
    rig.assert_as_before();
}

#[test]
fn a_worker_claims_beside_the_main_loop_and_can_be_cancelled() {
    let Some(rig) = rig() else { return };
    let blocks = MemoryBlocks::new(rig.dir.path(), rig.journal());
    let mut worker = Worker::spawn("claims", blocks, rig.claims()).unwrap();
    let mut done = VecDeque::new();
    worker.submit(Command::Claim { pages: 8 }).unwrap();
    // More than one, should this thread be late with its cancellation.
    let cancelled = 3;
    for _ in 0..cancelled {
        worker.submit(Command::Claim { pages: MAX_BATCH }).unwrap();
    }
    let first = wait(&mut worker, &mut done);
    worker.cancel().unwrap();
    let Completion::Claim { result: Ok(first), took } = first else { panic!("{first:?}") };
    println!("8 huge pages: {took:?}");
    assert_eq!(first.pages().len(), 8);
    let mut claimed = 0;
    for _ in 0..cancelled {
        match wait(&mut worker, &mut done) {
            Completion::Claim { result: Ok(batch), .. } => {
                claimed += batch.pages().len();
                batch.release().unwrap();
            }
            Completion::Claim { result: Err(ClaimError::Cancelled), .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(claimed < cancelled * MAX_BATCH as usize, "{claimed}");
    first.release().unwrap();
    worker.submit(Command::SettleClaims).unwrap();
    assert!(matches!(wait(&mut worker, &mut done), Completion::SettleClaims { result: Ok(()) }));
    assert_eq!(knob("nr_overcommit_hugepages"), rig.overcommit_before);
    let (claims, rest) = worker.finish();
    assert!(rest.is_empty());
    claims.unwrap().close().unwrap();
    rig.assert_as_before();
}

/// The next of them. `done` keeps those that came with it.
fn wait(worker: &mut Worker, done: &mut VecDeque<Completion>) -> Completion {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        done.extend(worker.completions());
        if let Some(completion) = done.pop_front() {
            return completion;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "no completion");
        let mut fds = [PollFd::new(worker.wake_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::try_from(left).unwrap()).unwrap();
    }
}

/// Not a test of its own: the body of the agent that gets killed.
#[test]
#[ignore = "run by a_killed_agent_leaves_its_claims_and_recover_frees_them"]
fn agent_that_gets_killed() {
    let Some(run) = std::env::var_os("FPR_TEST_RUN_DIR") else { return };
    let run = Path::new(&run);
    let mut claims = HugePageClaims::new(roots(run), Journal::open(&run.join("run"), "boot").unwrap());
    let batches: Vec<_> = (0..3).map(|_| claims.claim(8, || false).unwrap()).collect();
    println!("ready {}", batches.len());
    loop {
        std::thread::park();
    }
}

struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_agent_leaves_its_claims_and_recover_frees_them() {
    let Some(rig) = rig() else { return };
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "agent_that_gets_killed", "--ignored", "--nocapture"])
        .env("FPR_TEST_RUN_DIR", rig.dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut agent = Agent(child);
    let output = std::io::BufReader::new(agent.0.stdout.take().unwrap());
    let ready = std::io::BufRead::lines(output).map_while(Result::ok).any(|line| line.contains("ready 3"));
    assert!(ready, "the agent made no claims");
    drop(agent);

    assert_eq!(rig.surplus(), 24, "claims outlive the agent");
    assert_eq!(knob("nr_overcommit_hugepages"), rig.overcommit_before + 24);
    let mut claims = rig.claims();
    assert_eq!(claims.leftovers().unwrap().len(), 3);
    let recovered = claims.recover().unwrap();
    assert_eq!((recovered.files, recovered.overcommit), (3, Some(rig.overcommit_before)));
    assert_eq!(rig.surplus(), 0);
    claims.close().unwrap();
    rig.assert_as_before();
}
