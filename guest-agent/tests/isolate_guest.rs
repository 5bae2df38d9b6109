//! Isolation on real memory blocks. These tests take memory offline, so they run only where `FPR_TEST_GUEST` says
//! that the machine is a throw-away guest: Linux with memory hot-remove, root, and most of its memory free.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use fpr_guest_agent::isolate::claim::{Batch, HugePageClaims};
use fpr_guest_agent::isolate::hugetlb::HugePageRoots;
use fpr_guest_agent::isolate::journal::{Journal, RunLock};
use fpr_guest_agent::isolate::offline::{BlockNumber, BlockState, MemoryBlocks, OfflineOutcome};
use fpr_guest_agent::isolate::worker::{Command, Completion, Worker};
use fpr_protocol::HugePageSize;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const MEMORY: &str = "/sys/devices/system/memory";
const RUN: &str = "/run/fpr-isolate-test";

fn is_throw_away_guest() -> bool {
    let is = std::env::var_os("FPR_TEST_GUEST").is_some();
    if !is {
        println!("skipped: FPR_TEST_GUEST is not set");
    }
    is
}

struct Rig {
    _lock: RunLock,
    blocks: MemoryBlocks,
    worker: Worker,
}

fn rig() -> Rig {
    let run = Path::new(RUN);
    let lock = RunLock::acquire(run).unwrap();
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let journal = Journal::open(run, &boot_id).unwrap();
    let roots = HugePageRoots {
        sys: "/sys".into(),
        proc: "/proc".into(),
        mount_point: run.join("hugepages"),
        huge_page: HugePageSize::new(4096, 9).unwrap(),
    };
    let blocks = MemoryBlocks::new(Path::new("/sys"), journal.clone());
    let worker = Worker::spawn("isolate", blocks.clone(), HugePageClaims::new(roots, journal)).unwrap();
    Rig { _lock: lock, blocks, worker }
}

impl Rig {
    fn run(&mut self, command: Command) -> Completion {
        self.worker.submit(command).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(completion) = self.worker.completions().pop_front() {
                return completion;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no completion of {command:?}");
            let mut fds = [PollFd::new(self.worker.wake_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::try_from(left).unwrap()).unwrap();
        }
    }

    fn offline(&mut self, block: BlockNumber, limit: Duration) -> (OfflineOutcome, Duration) {
        match self.run(Command::Offline { block, limit }) {
            Completion::Offline { outcome, took, .. } => (outcome, took),
            other => panic!("{other:?}"),
        }
    }

    fn online(&mut self, block: BlockNumber) -> Duration {
        match self.run(Command::Online { block }) {
            Completion::Online { result: Ok(()), took, .. } => took,
            other => panic!("{other:?}"),
        }
    }

    fn claim(&mut self, pages: u32) -> Batch {
        match self.run(Command::Claim { pages }) {
            Completion::Claim { result: Ok(batch), took } => {
                println!("claim of {}: {took:?}", batch.pages().len());
                batch
            }
            other => panic!("{other:?}"),
        }
    }
}

fn block_bytes() -> u64 {
    let text = fs::read_to_string(Path::new(MEMORY).join("block_size_bytes")).unwrap();
    u64::from_str_radix(text.trim(), 16).unwrap()
}

fn meminfo(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn surplus() -> u64 {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages";
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
fn free_blocks_go_offline_and_come_back_to_their_zone() {
    if !is_throw_away_guest() {
        return;
    }
    let mut rig = rig();
    let total = meminfo("MemTotal");
    let mut offlined = Vec::new();
    for number in 0..1024 {
        let block = BlockNumber(number);
        let zone_file = Path::new(MEMORY).join(format!("memory{number}/valid_zones"));
        let Ok(zone) = fs::read_to_string(&zone_file) else { continue };
        match rig.offline(block, Duration::from_millis(200)) {
            (OfflineOutcome::Offlined, took) => {
                println!("block {block}: offline after {took:?}");
                assert_eq!(rig.blocks.state(block).unwrap(), BlockState::Offline);
                offlined.push((block, zone, zone_file));
            }
            (outcome, took) => println!("block {block}: {outcome:?} after {took:?}"),
        }
        if offlined.len() == 4 {
            break;
        }
    }
    assert_eq!(offlined.len(), 4, "a guest with most of its memory free has four free blocks");
    let missing = total - meminfo("MemTotal");
    assert_eq!(missing, 4 * block_bytes());
    assert_eq!(rig.blocks.leftovers().unwrap().len(), 4);
    for (block, zone, zone_file) in offlined {
        println!("block {block}: online after {:?}", rig.online(block));
        assert_eq!(fs::read_to_string(zone_file).unwrap(), zone);
    }
    assert_eq!(meminfo("MemTotal"), total);
    assert!(rig.blocks.leftovers().unwrap().is_empty());
}

#[test]
fn a_pinned_claim_cannot_be_moved_away_from_its_address() {
    if !is_throw_away_guest() {
        return;
    }
    let mut rig = rig();
    let mut files = 0;
    let mut moved = 0;
    for (block, batch) in claims_in_different_blocks(&mut rig) {
        let (outcome, took) = rig.offline(block, Duration::from_millis(300));
        println!("block {block} with pinned claims: {outcome:?} after {took:?}");
        assert!(!matches!(outcome, OfflineOutcome::Offlined), "a pinned page was moved");
        assert_eq!(rig.blocks.state(block).unwrap(), BlockState::Online);

        // The control: without the pins (a dead agent's claim) the kernel moves the pages and the block goes,
        // unless something else in it cannot be moved.
        drop(batch);
        files += 1;
        let (outcome, took) = rig.offline(block, Duration::from_secs(5));
        println!("block {block} without pins: {outcome:?} after {took:?}");
        if matches!(outcome, OfflineOutcome::Offlined) {
            moved += 1;
            rig.online(block);
        }
    }
    assert!(moved >= 2, "only {moved} blocks could be taken offline without the pins: this shows nothing");

    let (claims, _) = rig.worker.finish();
    assert_eq!(claims.unwrap().recover().unwrap().files, files);
    assert_eq!(surplus(), 0);
}

/// One batch in each of some blocks; all others are free again. Not in the first blocks, where the kernel lives.
fn claims_in_different_blocks(rig: &mut Rig) -> BTreeMap<BlockNumber, Batch> {
    let mut kept = BTreeMap::new();
    let mut others = Vec::new();
    while kept.len() < 4 {
        let batch = rig.claim(16);
        let block = BlockNumber(batch.pages()[0].0 / block_bytes());
        if block.0 < 2 || kept.contains_key(&block) {
            others.push(batch);
        } else {
            kept.insert(block, batch);
        }
    }
    others.into_iter().for_each(|batch| batch.release().unwrap());
    kept
}

#[test]
fn what_one_gib_of_claims_costs() {
    if !is_throw_away_guest() {
        return;
    }
    let mut rig = rig();
    let stalls = || {
        let vmstat = fs::read_to_string("/proc/vmstat").unwrap();
        vmstat.lines().filter(|line| line.contains("stall")).map(str::to_owned).collect::<Vec<_>>()
    };
    let (start, stalls_before) = (Instant::now(), stalls());
    let batches: Vec<_> = (0..32).map(|_| rig.claim(16)).collect();
    println!("512 huge pages in batches of 16: {:?}", start.elapsed());
    assert_eq!(stalls(), stalls_before);
    let start = Instant::now();
    batches.into_iter().for_each(|batch| batch.release().unwrap());
    println!("released in {:?}", start.elapsed());
    assert_eq!(surplus(), 0);
    let (claims, _) = rig.worker.finish();
    claims.unwrap().close().unwrap();
}
