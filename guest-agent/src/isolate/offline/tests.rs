#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
//! On a fake tree, where a write to `state` is just a write: whatever is written is what the next read says.
use super::*;
use std::fs;

struct Tree {
    dir: tempfile::TempDir,
    journal: Journal,
    blocks: MemoryBlocks,
}

fn tree(states: &[(u64, &str)]) -> Tree {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(&dir.path().join("run"), "boot").unwrap();
    let blocks = MemoryBlocks::new(dir.path(), journal.clone());
    for (block, state) in states {
        let file = blocks.file(BlockNumber(*block), "state");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, state).unwrap();
    }
    Tree { dir, journal, blocks }
}

impl Tree {
    fn raw(&self, block: u64) -> String {
        fs::read_to_string(self.blocks.file(BlockNumber(block), "state")).unwrap()
    }
}

#[test]
fn offline_and_online_again() {
    let tree = tree(&[(5, "online\n")]);
    assert!(matches!(tree.blocks.offline(BlockNumber(5)), OfflineOutcome::Offlined));
    assert_eq!(tree.blocks.state(BlockNumber(5)).unwrap(), BlockState::Offline);
    assert_eq!(tree.journal.blocks().unwrap(), [BlockNumber(5)]);

    tree.blocks.online(BlockNumber(5)).unwrap();
    assert_eq!(tree.blocks.state(BlockNumber(5)).unwrap(), BlockState::Online);
    assert_eq!(tree.journal.blocks().unwrap(), []);
}

#[test]
fn blocks_that_are_not_ours_are_left_alone() {
    let tree = tree(&[(1, "offline\n"), (2, "online\n")]);
    assert!(matches!(tree.blocks.offline(BlockNumber(1)), OfflineOutcome::AlreadyOffline));
    assert!(matches!(tree.blocks.offline(BlockNumber(9)), OfflineOutcome::NotThere));
    assert_eq!(tree.journal.blocks().unwrap(), []);

    tree.blocks.online(BlockNumber(1)).unwrap();
    assert_eq!(tree.raw(1), "offline\n");
    assert!(tree.blocks.recover().unwrap().brought_online.is_empty());
    assert_eq!(tree.raw(1), "offline\n");
}

#[test]
fn without_a_journal_nothing_goes_offline() {
    let tree = tree(&[(1, "online\n")]);
    fs::remove_dir_all(tree.dir.path().join("run/offline")).unwrap();
    let outcome = tree.blocks.offline(BlockNumber(1));
    assert!(matches!(outcome, OfflineOutcome::Failed(BlockError::Journal { .. })), "{outcome:?}");
    assert_eq!(tree.raw(1), "online\n");
}

#[test]
fn a_movable_block_returns_to_its_zone() {
    let tree = tree(&[(3, "online\n")]);
    fs::write(tree.blocks.file(BlockNumber(3), "valid_zones"), "Movable\n").unwrap();
    assert!(matches!(tree.blocks.offline(BlockNumber(3)), OfflineOutcome::Offlined));
    let _ = tree.blocks.online(BlockNumber(3));
    assert_eq!(tree.raw(3), "online_movable");
}

#[test]
fn recover_brings_back_what_the_journal_says_and_keeps_what_fails() {
    let tree = tree(&[(1, "offline\n"), (2, "online\n"), (3, "offline\n"), (4, "broken\n")]);
    for block in [1, 2, 4, 9] {
        tree.journal.record_block(BlockNumber(block), OnlineType::Default).unwrap();
    }
    assert_eq!(tree.blocks.leftovers().unwrap(), [1, 4, 9].map(BlockNumber));
    let recovered = tree.blocks.recover().unwrap();
    assert_eq!(recovered.brought_online, [BlockNumber(1)]);
    assert!(matches!(recovered.failed.as_slice(), [BlockError::UnknownState { block: BlockNumber(4), .. }]));
    assert_eq!(tree.journal.blocks().unwrap(), [BlockNumber(4)], "what failed is tried again next time");
    assert_eq!(tree.raw(3), "offline\n");
}
