//! What must survive the agent: which memory blocks it took offline and which kernel setting it changed.
//!
//! Written before the thing is done and removed after it is undone, one small file each, so that the agent may be
//! killed between any two instructions: what a dead agent left behind is at most what the journal says, never more.
//! Used by [`super::offline`] and [`super::hugetlb`]; the state machine holds the [`RunLock`].
//!
//! The run directory is expected on tmpfs (`/run/fpr-guest`). Entries carry the boot id, so those of an earlier boot are
//! dropped where it is not. Trusts the directory: only root may write there.

use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::offline::{BlockNumber, OnlineType};

/// Why the run directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file operation failed.
    #[error("cannot {operation} {path}", path = path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Another agent holds the lock.
    #[error(
        "another guest agent ({}) is running with {path}: stop it, or use another run directory",
        pid.map_or_else(|| "of unknown pid".to_owned(), |pid| format!("pid {pid}")), path = path.display()
    )]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// Its holder, if it has written its pid yet.
        pid: Option<u32>,
    },
}

fn error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError {
    let path = path.to_owned();
    move |source| JournalError::Io { operation, path, source }
}

fn make_directory(path: &Path) -> Result<(), JournalError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(error("create directory", path))
}

/// Removes a file that may be gone already.
fn remove(path: &Path) -> Result<(), JournalError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(error("remove", path)(source)),
        _ => Ok(()),
    }
}

/// Proof that no other agent uses the run directory. Ends with the process, however that ends.
#[derive(Debug)]
pub struct RunLock(#[allow(dead_code)] Flock<File>);

impl RunLock {
    /// Takes the lock of `run_dir` (`lock` in it), making the directory if need be.
    pub fn acquire(run_dir: &Path) -> Result<Self, JournalError> {
        make_directory(run_dir)?;
        let path = run_dir.join("lock");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(error("open", &path))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut lock) => {
                let write_pid = |lock: &mut Flock<File>| {
                    lock.set_len(0)?;
                    lock.rewind()?;
                    writeln!(lock, "{}", std::process::id())
                };
                write_pid(&mut lock).map_err(error("write", &path))?;
                Ok(Self(lock))
            }
            Err((mut file, nix::errno::Errno::EWOULDBLOCK)) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                Err(JournalError::Locked { path, pid: pid.trim().parse().ok() })
            }
            Err((_, errno)) => Err(error("lock", &path)(errno.into())),
        }
    }
}

/// The journal of one run directory. Cheap to clone; all state is in the files.
#[derive(Clone, Debug)]
pub struct Journal {
    run_dir: PathBuf,
    boot_id: String,
}

impl Journal {
    /// Opens the journal in `run_dir`, making it if need be. `boot_id` is `/proc/sys/kernel/random/boot_id`.
    pub fn open(run_dir: &Path, boot_id: &str) -> Result<Self, JournalError> {
        let journal = Self { run_dir: run_dir.to_owned(), boot_id: boot_id.trim().to_owned() };
        make_directory(&journal.blocks_dir())?;
        Ok(journal)
    }

    fn blocks_dir(&self) -> PathBuf {
        self.run_dir.join("offline")
    }

    fn block_path(&self, block: BlockNumber) -> PathBuf {
        self.blocks_dir().join(block.0.to_string())
    }

    fn overcommit_path(&self) -> PathBuf {
        self.run_dir.join("overcommit")
    }

    /// Writes that `block` is about to be taken offline and how it has to be brought back.
    pub fn record_block(&self, block: BlockNumber, online_type: OnlineType) -> Result<(), JournalError> {
        self.put(&self.block_path(block), online_type.keyword())
    }

    /// Forgets `block`: it is online again, or never went offline.
    pub fn forget_block(&self, block: BlockNumber) -> Result<(), JournalError> {
        remove(&self.block_path(block))
    }

    /// How `block` has to be brought back, if it is in the journal.
    pub fn block(&self, block: BlockNumber) -> Result<Option<OnlineType>, JournalError> {
        let value = self.get(&self.block_path(block))?;
        // An entry that says something else is still an entry of ours; `online` lets the kernel choose the zone.
        Ok(value.map(|keyword| OnlineType::from_keyword(&keyword).unwrap_or_default()))
    }

    /// All blocks in the journal, ascending. Entries of an earlier boot and unfinished ones are removed on the way.
    pub fn blocks(&self) -> Result<Vec<BlockNumber>, JournalError> {
        let dir = self.blocks_dir();
        let mut blocks = Vec::new();
        for entry in fs::read_dir(&dir).map_err(error("list", &dir))? {
            let path = entry.map_err(error("list", &dir))?.path();
            let number = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
            match number {
                Some(number) if self.get(&path)?.is_some() => blocks.push(BlockNumber(number)),
                _ => remove(&path)?,
            }
        }
        blocks.sort_unstable();
        Ok(blocks)
    }

    /// Writes the value of `nr_overcommit_hugepages` that has to be restored.
    pub fn record_overcommit(&self, original: u64) -> Result<(), JournalError> {
        self.put(&self.overcommit_path(), &original.to_string())
    }

    /// Forgets the value: it is restored.
    pub fn forget_overcommit(&self) -> Result<(), JournalError> {
        remove(&self.overcommit_path())
    }

    /// The value of `nr_overcommit_hugepages` that has to be restored, if any.
    pub fn overcommit(&self) -> Result<Option<u64>, JournalError> {
        Ok(self.get(&self.overcommit_path())?.and_then(|value| value.parse().ok()))
    }

    /// An entry is complete or not there: it is written beside its place and renamed.
    fn put(&self, path: &Path, value: &str) -> Result<(), JournalError> {
        let unfinished = path.with_extension("new");
        fs::write(&unfinished, format!("{}\n{value}\n", self.boot_id)).map_err(error("write", &unfinished))?;
        fs::rename(&unfinished, path).map_err(error("write", path))
    }

    /// Value of an entry of this boot.
    fn get(&self, path: &Path) -> Result<Option<String>, JournalError> {
        let text = match fs::read_to_string(path) {
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(error("read", path))?,
        };
        let (boot_id, value) = text.split_once('\n').unwrap_or_default();
        Ok((boot_id == self.boot_id).then(|| value.trim().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn entries_come_back_until_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path(), "boot-a\n").unwrap();
        journal.record_block(BlockNumber(12), OnlineType::Movable).unwrap();
        journal.record_block(BlockNumber(7), OnlineType::Default).unwrap();
        journal.record_overcommit(3).unwrap();

        let journal = Journal::open(dir.path(), "boot-a").unwrap();
        assert_eq!(journal.blocks().unwrap(), [BlockNumber(7), BlockNumber(12)]);
        assert_eq!(journal.block(BlockNumber(12)).unwrap(), Some(OnlineType::Movable));
        assert_eq!(journal.overcommit().unwrap(), Some(3));

        journal.forget_block(BlockNumber(7)).unwrap();
        journal.forget_block(BlockNumber(7)).unwrap();
        journal.forget_overcommit().unwrap();
        assert_eq!(journal.blocks().unwrap(), [BlockNumber(12)]);
        assert_eq!(journal.block(BlockNumber(7)).unwrap(), None);
        assert_eq!(journal.overcommit().unwrap(), None);
    }

    #[test]
    fn entries_of_an_earlier_boot_and_unfinished_ones_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        Journal::open(dir.path(), "boot-a").unwrap().record_block(BlockNumber(1), OnlineType::Default).unwrap();
        Journal::open(dir.path(), "boot-a").unwrap().record_overcommit(9).unwrap();
        let journal = Journal::open(dir.path(), "boot-b").unwrap();
        journal.record_block(BlockNumber(2), OnlineType::Default).unwrap();
        fs::write(dir.path().join("offline/3.new"), "boot-b\nonl").unwrap();
        fs::write(dir.path().join("offline/4"), "").unwrap();

        assert_eq!(journal.blocks().unwrap(), [BlockNumber(2)]);
        assert_eq!(journal.overcommit().unwrap(), None);
        let left: Vec<_> = fs::read_dir(dir.path().join("offline")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["2"]);
    }

    #[test]
    fn a_second_agent_is_told_who_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let first = RunLock::acquire(dir.path()).unwrap();
        let refused = RunLock::acquire(dir.path()).unwrap_err().to_string();
        assert!(refused.contains(&format!("pid {}", std::process::id())), "{refused}");
        drop(first);
        RunLock::acquire(dir.path()).unwrap();
    }
}
