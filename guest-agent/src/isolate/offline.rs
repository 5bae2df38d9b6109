//! Taking memory blocks offline and online through /sys/devices/system/memory.
//!
//! Called by [`super::worker`], because the kernel retries an offlining for ever unless a signal interrupts it
//! (`offline_pages` in mm/memory_hotplug.c): [`MemoryBlocks::offline`] returns early when its thread gets a signal.
//! Which block to take is not decided here. Only wholly free blocks should be tried: the kernel migrates pages in
//! use, or refuses and prints a page dump.
//!
//! Trusts sysfs; trusts nobody to leave an offline block alone, so every answer is re-read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::journal::{Journal, JournalError};
pub use crate::kernel::memory_blocks::{BlockNumber, BlockState};

/// What to write to bring a block back to the zone it came from (`online_type_to_str` in drivers/base/memory.c).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnlineType {
    /// `online`: the kernel chooses the zone next to it, which is the one it came from unless that was Movable.
    #[default]
    Default,
    /// `online_movable`.
    Movable,
}

impl OnlineType {
    /// Word that sysfs understands.
    #[must_use]
    pub fn keyword(self) -> &'static str {
        match self {
            Self::Default => "online",
            Self::Movable => "online_movable",
        }
    }

    /// Reads [`OnlineType::keyword`].
    #[must_use]
    pub fn from_keyword(keyword: &str) -> Option<Self> {
        [Self::Default, Self::Movable].into_iter().find(|online_type| online_type.keyword() == keyword)
    }
}

/// What became of an attempt to take a block offline.
#[derive(Debug)]
pub enum OfflineOutcome {
    /// It is offline and in the journal.
    Offlined,
    /// Somebody else had taken it offline before: not ours, hands off.
    AlreadyOffline,
    /// The kernel took it offline and it is online again: somebody onlines whatever is offline.
    StolenOnline,
    /// The check right before found a page in use; nothing was tried.
    InUse,
    /// A page of it is in use, says the kernel (EBUSY, EAGAIN).
    Busy,
    /// The time limit ran out or the command was cancelled (EINTR). The block is online.
    Interrupted,
    /// There is no such block.
    NotThere,
    /// Anything else. EINVAL is a block with holes, which can never be taken offline.
    Failed(BlockError),
}

/// Why a memory block could not be handled.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// There is no such block (any more).
    #[error("memory block {block} does not exist")]
    NotThere {
        /// Which block.
        block: BlockNumber,
    },
    /// A file of the block could not be used.
    #[error("cannot {operation} memory block {block} ({path})", path = path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// With which block.
        block: BlockNumber,
        /// Through which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The state is none this agent knows.
    #[error("memory block {block} is in the unknown state {state:?}")]
    UnknownState {
        /// Which block.
        block: BlockNumber,
        /// What sysfs says.
        state: String,
    },
    /// The kernel accepted `online`, and yet the block is offline.
    #[error("memory block {block} stays offline although the kernel accepted to bring it online")]
    StaysOffline {
        /// Which block.
        block: BlockNumber,
    },
    /// The timer of the time limit cannot be set, and nothing is taken offline without it.
    #[error("cannot limit the time for taking memory block {block} offline")]
    Timer {
        /// Which block.
        block: BlockNumber,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The journal cannot be written, and nothing is taken offline without it.
    #[error("cannot keep the journal for memory block {block}")]
    Journal {
        /// Which block.
        block: BlockNumber,
        /// What is wrong with it.
        #[source]
        source: JournalError,
    },
}

impl BlockError {
    /// The block that could not be handled.
    #[must_use]
    pub fn block(&self) -> BlockNumber {
        match self {
            Self::NotThere { block }
            | Self::Io { block, .. }
            | Self::UnknownState { block, .. }
            | Self::StaysOffline { block }
            | Self::Timer { block, .. }
            | Self::Journal { block, .. } => *block,
        }
    }
}

/// Result of [`MemoryBlocks::recover`].
#[derive(Debug, Default)]
pub struct RecoveredBlocks {
    /// Blocks a dead agent had left offline and which are online now.
    pub brought_online: Vec<BlockNumber>,
    /// Blocks that could not be brought back; they stay in the journal.
    pub failed: Vec<BlockError>,
}

/// The memory blocks of this guest.
#[derive(Clone, Debug)]
pub struct MemoryBlocks {
    directory: PathBuf,
    journal: Journal,
}

impl MemoryBlocks {
    /// The blocks under `sys` (normally `/sys`); what is taken offline is written to `journal`.
    #[must_use]
    pub fn new(sys: &Path, journal: Journal) -> Self {
        Self { directory: sys.join("devices/system/memory"), journal }
    }

    fn file(&self, block: BlockNumber, name: &str) -> PathBuf {
        self.directory.join(format!("memory{block}")).join(name)
    }

    /// Current state of `block`. While the host may drop a block, anything but [`BlockState::Offline`] means that
    /// somebody else brought it online.
    pub fn state(&self, block: BlockNumber) -> Result<BlockState, BlockError> {
        let path = self.file(block, "state");
        match first_line(&path).map_err(|source| block_error("read", block, &path, source))?.as_str() {
            "online" => Ok(BlockState::Online),
            "offline" => Ok(BlockState::Offline),
            "going-offline" => Ok(BlockState::GoingOffline),
            state => Err(BlockError::UnknownState { block, state: state.to_owned() }),
        }
    }

    /// Takes `block` offline. Blocks until the kernel is done, gives up, or a signal interrupts this thread.
    #[must_use]
    pub fn offline(&self, block: BlockNumber) -> OfflineOutcome {
        match self.try_offline(block) {
            Ok(outcome) => outcome,
            Err(BlockError::NotThere { .. }) => OfflineOutcome::NotThere,
            Err(error) => OfflineOutcome::Failed(error),
        }
    }

    fn try_offline(&self, block: BlockNumber) -> Result<OfflineOutcome, BlockError> {
        let journal_error = |source| BlockError::Journal { block, source };
        if self.state(block)? != BlockState::Online {
            return Ok(OfflineOutcome::AlreadyOffline);
        }
        self.journal.record_block(block, self.online_type(block)).map_err(journal_error)?;
        let written = self.write_state(block, "offline", "take offline");
        // Whatever the write said: an entry goes only when the block is known to be online.
        match self.state(block) {
            Ok(BlockState::Online) => self.journal.forget_block(block).map_err(journal_error)?,
            Ok(BlockState::Offline) => return Ok(OfflineOutcome::Offlined),
            Ok(BlockState::GoingOffline) => {
                return Err(BlockError::UnknownState { block, state: "going-offline".to_owned() });
            }
            Err(error) => return Err(error),
        }
        match written {
            Ok(()) => Ok(OfflineOutcome::StolenOnline),
            Err(BlockError::Io { source, .. }) if source.kind() == io::ErrorKind::Interrupted => {
                Ok(OfflineOutcome::Interrupted)
            }
            Err(BlockError::Io { source, .. }) if matches!(source.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                Ok(OfflineOutcome::Busy)
            }
            Err(error) => Err(error),
        }
    }

    /// Brings `block` online and forgets it. A block that is online already, or that is not in the journal, is left
    /// as it is.
    pub fn online(&self, block: BlockNumber) -> Result<(), BlockError> {
        let journal_error = |source| BlockError::Journal { block, source };
        let Some(online_type) = self.journal.block(block).map_err(journal_error)? else { return Ok(()) };
        match self.state(block) {
            Ok(BlockState::Online) | Err(BlockError::NotThere { .. }) => {}
            Ok(BlockState::Offline | BlockState::GoingOffline) => {
                self.write_state(block, online_type.keyword(), "bring online")?;
                if self.state(block)? != BlockState::Online {
                    return Err(BlockError::StaysOffline { block });
                }
            }
            Err(error) => return Err(error),
        }
        self.journal.forget_block(block).map_err(journal_error)
    }

    /// Blocks that a dead agent left offline. Only blocks of the journal are looked at.
    pub fn leftovers(&self) -> Result<Vec<BlockNumber>, JournalError> {
        let mut blocks = self.journal.blocks()?;
        blocks.retain(|&block| !matches!(self.state(block), Ok(BlockState::Online)));
        Ok(blocks)
    }

    /// Brings back every block of the journal. The host must have fenced the dead agent's session before.
    pub fn recover(&self) -> Result<RecoveredBlocks, JournalError> {
        let mut recovered = RecoveredBlocks::default();
        for block in self.journal.blocks()? {
            let was_offline = matches!(self.state(block), Ok(BlockState::Offline | BlockState::GoingOffline));
            match self.online(block) {
                Ok(()) if was_offline => recovered.brought_online.push(block),
                Ok(()) => {}
                Err(error) => recovered.failed.push(error),
            }
        }
        Ok(recovered)
    }

    /// While a block is online, `valid_zones` names the zone it is in.
    fn online_type(&self, block: BlockNumber) -> OnlineType {
        match first_line(&self.file(block, "valid_zones")).as_deref() {
            Ok("Movable") => OnlineType::Movable,
            _ => OnlineType::Default,
        }
    }

    fn write_state(&self, block: BlockNumber, keyword: &str, operation: &'static str) -> Result<(), BlockError> {
        let path = self.file(block, "state");
        let error = |source| block_error(operation, block, &path, source);
        let mut file = OpenOptions::new().write(true).truncate(true).open(&path).map_err(error)?;
        // Not `write_all`: that would try again after the signal that is meant to end it.
        let written = file.write(keyword.as_bytes()).map_err(error)?;
        if written == keyword.len() { Ok(()) } else { Err(error(io::ErrorKind::WriteZero.into())) }
    }
}

fn block_error(operation: &'static str, block: BlockNumber, path: &Path, source: io::Error) -> BlockError {
    if source.kind() == io::ErrorKind::NotFound {
        return BlockError::NotThere { block };
    }
    BlockError::Io { operation, block, path: path.to_owned(), source }
}

/// First line of a sysfs file. One read gets all of it (`sysfs_kf_seq_show` gives at most a page).
fn first_line(path: &Path) -> io::Result<String> {
    let mut buffer = [0; 64];
    let mut file = File::open(path)?;
    let length = loop {
        match file.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

#[cfg(test)]
mod tests;
