//! The time limit of offlining. A FIFO stands in for a `state` file whose write does not come back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use fpr_guest_agent::isolate::claim::HugePageClaims;
use fpr_guest_agent::isolate::hugetlb::HugePageRoots;
use fpr_guest_agent::isolate::journal::Journal;
use fpr_guest_agent::isolate::offline::{BlockNumber, MemoryBlocks, OfflineOutcome};
use fpr_guest_agent::isolate::worker::{Command, Completion, Worker};
use fpr_protocol::HugePageSize;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const NO_LIMIT: Duration = Duration::from_secs(3600);

struct Rig {
    dir: tempfile::TempDir,
    worker: Worker,
}

fn rig() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(&dir.path().join("run"), "boot").unwrap();
    let roots = HugePageRoots {
        sys: dir.path().into(),
        proc: dir.path().into(),
        mount_point: dir.path().join("hugepages"),
        huge_page: HugePageSize::new(4096, 9).unwrap(),
    };
    let blocks = MemoryBlocks::new(dir.path(), journal.clone());
    let worker = Worker::spawn("blocks", blocks, HugePageClaims::new(roots, journal)).unwrap();
    Rig { dir, worker }
}

/// To the brim: reading the state makes room, and a write needs a whole free page of the pipe.
fn fill(fifo: &mut File) {
    while fifo.write(&b"online\n\n".repeat(512)).is_ok() {}
}

impl Rig {
    fn block(&self, number: u64) -> std::path::PathBuf {
        let dir = self.dir.path().join(format!("devices/system/memory/memory{number}"));
        fs::create_dir_all(&dir).unwrap();
        dir.join("state")
    }

    /// A block whose write blocks: a FIFO full of "online", so that reading the state works.
    fn stuck_block(&self, number: u64) -> File {
        let path = self.block(number);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let flags = OFlag::O_NONBLOCK.bits();
        let mut fifo = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path).unwrap();
        fill(&mut fifo);
        fifo
    }

    fn offline(&mut self, block: u64, limit: Duration) {
        self.worker.submit(Command::Offline { block: BlockNumber(block), limit }).unwrap();
    }

    fn wait(&mut self) -> Vec<(u64, OfflineOutcome, Duration)> {
        let mut fds = [PollFd::new(self.worker.wake_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(60_000u16)).unwrap();
        let completions = self.worker.completions();
        assert!(!completions.is_empty(), "no completion");
        let outcome = |completion| match completion {
            Completion::Offline { block, outcome, took } => (block.0, outcome, took),
            other => panic!("{other:?}"),
        };
        completions.into_iter().map(outcome).collect()
    }

    fn journalled(&self) -> usize {
        fs::read_dir(self.dir.path().join("run/offline")).unwrap().count()
    }
}

#[test]
fn the_time_limit_ends_an_offlining_that_hangs() {
    let mut rig = rig();
    let _fifo = rig.stuck_block(1);
    for _ in 0..5 {
        rig.offline(1, Duration::from_millis(40));
        let completions = rig.wait();
        let [(1, OfflineOutcome::Interrupted, took)] = completions.as_slice() else { panic!("{completions:?}") };
        assert!(*took >= Duration::from_millis(40), "{took:?}");
        assert!(*took < Duration::from_secs(30), "{took:?}");
        assert_eq!(rig.journalled(), 0);
    }
}

#[test]
fn a_limit_that_is_over_at_once_still_ends_it() {
    // The signals start before the write does: only that they come again makes this end.
    let mut rig = rig();
    let mut fifo = rig.stuck_block(1);
    for _ in 0..200 {
        fill(&mut fifo);
        rig.offline(1, Duration::ZERO);
        let completions = rig.wait();
        assert!(matches!(completions.as_slice(), [(1, OfflineOutcome::Interrupted, _)]), "{completions:?}");
    }
}

#[test]
fn cancel_ends_the_running_one_and_skips_the_queued() {
    let mut rig = rig();
    let _fifo = rig.stuck_block(1);
    fs::write(rig.block(2), "online\n").unwrap();
    fs::write(rig.block(3), "online\n").unwrap();
    rig.offline(1, NO_LIMIT);
    rig.offline(2, NO_LIMIT);
    let start = Instant::now();
    rig.worker.cancel().unwrap();
    rig.offline(3, NO_LIMIT);
    let mut completions = Vec::new();
    while completions.len() < 3 {
        completions.extend(rig.wait());
    }
    assert!(start.elapsed() < Duration::from_secs(30));
    let [(1, OfflineOutcome::Interrupted, _), (2, OfflineOutcome::Interrupted, _), (3, OfflineOutcome::Offlined, _)] =
        completions.as_slice()
    else {
        panic!("{completions:?}")
    };
    assert_eq!(fs::read_to_string(rig.block(2)).unwrap(), "online\n");
    assert_eq!(rig.journalled(), 1);
}

#[test]
fn dropping_the_worker_does_not_wait_for_the_kernel() {
    let mut rig = rig();
    let _fifo = rig.stuck_block(1);
    rig.offline(1, NO_LIMIT);
    let start = Instant::now();
    let (claims, completions) = rig.worker.finish();
    assert!(claims.is_some());
    assert!(start.elapsed() < Duration::from_secs(30));
    assert!(matches!(completions.front(), Some(Completion::Offline { outcome: OfflineOutcome::Interrupted, .. })));
}

/// Not a test of its own: an agent that takes blocks offline and online for ever, until it is killed.
#[test]
#[ignore = "run by an_agent_killed_at_any_moment_leaves_no_block_behind"]
fn agent_that_gets_killed() {
    let Some(root) = std::env::var_os("FPR_TEST_ROOT") else { return };
    let root = Path::new(&root);
    let blocks = MemoryBlocks::new(root, Journal::open(&root.join("run"), "boot").unwrap());
    loop {
        assert!(matches!(blocks.offline(BlockNumber(7)), OfflineOutcome::Offlined));
        blocks.online(BlockNumber(7)).unwrap();
    }
}

#[test]
fn an_agent_killed_at_any_moment_leaves_no_block_behind() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("devices/system/memory/memory7/state");
    fs::create_dir_all(state.parent().unwrap()).unwrap();
    let journal = Journal::open(&dir.path().join("run"), "boot").unwrap();
    let blocks = MemoryBlocks::new(dir.path(), journal.clone());
    let (mut offline_at_death, mut round) = (0, 0u64);
    // On a busy machine it may take more of them to meet the block offline.
    while round < 40 || (offline_at_death == 0 && round < 1000) {
        round += 1;
        fs::write(&state, "online\n").unwrap();
        let mut agent = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "agent_that_gets_killed", "--ignored"])
            .env("FPR_TEST_ROOT", dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while fs::read_to_string(&state).unwrap() == "online\n" {
            assert!(Instant::now() < deadline, "the agent did nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Not a wait for anything: the moment of death varies on purpose.
        std::thread::sleep(Duration::from_micros(round % 40 * 37));
        agent.kill().unwrap();
        agent.wait().unwrap();

        let text = fs::read_to_string(&state).unwrap();
        // The fake file is truncated before it is written, which a sysfs file is not.
        if text.is_empty() {
            fs::write(&state, "offline").unwrap();
        }
        if text.starts_with("offline") {
            offline_at_death += 1;
            assert_eq!(blocks.leftovers().unwrap(), [BlockNumber(7)], "round {round}");
        }
        let recovered = blocks.recover().unwrap();
        assert!(recovered.failed.is_empty(), "{:?}", recovered.failed);
        assert_eq!(fs::read_to_string(&state).unwrap().trim(), "online", "round {round}");
        assert_eq!(journal.blocks().unwrap(), []);
        assert_eq!(fs::read_dir(dir.path().join("run/offline")).unwrap().count(), 0);
    }
    assert!(offline_at_death > 0, "no round killed the agent while the block was offline");
}
