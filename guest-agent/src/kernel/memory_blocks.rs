//! Memory blocks, Linux's unit of memory hot-plug (`drivers/base/memory.c`), and what reacts when one changes state.
//!
//! The survey takes its ranges from them, offlining its candidates. The list is kept and read again on demand: a reading
//! costs one open per block, about 3 ms for 192 of them. Whether a reading is due shows in `MemTotal`, which changes
//! with every block that goes offline or online. States are changed by others too (udev, operators), so a state is what
//! was true when it was read.

use super::text::{Fault, read_once, read_value};
use super::zone::ZoneName;
use super::{Pfn, PfnRange, ReadError, Roots};
use std::fs;
use std::path::{Path, PathBuf};

/// Number of a memory block: its first address divided by the block size. The N of `memoryN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockNumber(pub u64);

impl std::fmt::Display for BlockNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// `memoryN/state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// The allocator has it.
    Online,
    /// Nobody has it.
    Offline,
    /// On its way.
    GoingOffline,
}

/// One memory block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBlock {
    /// Which one.
    pub number: BlockNumber,
    /// Its state when it was last read.
    pub state: BlockState,
    /// First entry of `valid_zones` when the block was first read. The zone of an online block, or the zone that `online`
    /// would put it into. `None` if it lies in several zones: such a block cannot go offline.
    pub zone: Option<ZoneName>,
    /// `removable`: since Linux 5.10 only says whether the kernel has memory hot-remove at all.
    pub removable: bool,
}

/// What the kernel does with memory that is added (`auto_online_blocks`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoOnline {
    /// `offline`: leaves it to user space, so there probably is a rule that onlines whatever is offline.
    LeftToUserSpace,
    /// `online`, `online_kernel` or `online_movable`.
    ByKernel,
}

/// Crash kernel (kdump), which has to know the memory layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kdump {
    /// No crash kernel is loaded, or the kernel has no kexec.
    NotLoaded,
    /// Loaded, and the kernel updates it by itself when a block changes (`crash_hotplug`, Linux 6.5).
    UpdatedByKernel,
    /// Loaded, and udev rules of some distributions load it anew at every change of a block.
    ReloadedByUserSpace,
}

/// The memory blocks of the guest, ascending.
#[derive(Debug)]
pub struct MemoryBlocks {
    directory: PathBuf,
    block_bytes: u64,
    blocks: Vec<MemoryBlock>,
}

fn directory(roots: &Roots) -> PathBuf {
    roots.sys.join("devices/system/memory")
}

impl MemoryBlocks {
    /// Reads the list, `None` if the kernel has no memory hot-plug.
    pub fn read(roots: &Roots) -> Result<Option<Self>, ReadError> {
        let directory = directory(roots);
        let parse = |text: &str| u64::from_str_radix(text, 16).ok().filter(|bytes| bytes.is_power_of_two());
        let wanted = "a power of two in hexadecimal";
        let Some(block_bytes) = read_value(directory.join("block_size_bytes"), wanted, parse)? else {
            return Ok(None);
        };
        let mut blocks = Self { directory, block_bytes, blocks: Vec::new() };
        blocks.refresh()?;
        Ok(Some(blocks))
    }

    /// Size of every block in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// The blocks as last read.
    #[must_use]
    pub fn blocks(&self) -> &[MemoryBlock] {
        &self.blocks
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, number: BlockNumber) -> Option<&MemoryBlock> {
        let index = self.blocks.binary_search_by_key(&number, |block| block.number).ok()?;
        self.blocks.get(index)
    }

    /// Frames of a block, where the base page has `page_bytes` bytes.
    #[must_use]
    pub fn pfns(&self, number: BlockNumber, page_bytes: u64) -> PfnRange {
        let pages = self.block_bytes / page_bytes.max(1);
        Pfn(number.0.saturating_mul(pages))..Pfn(number.0.saturating_add(1).saturating_mul(pages))
    }

    /// Frames of the blocks that were online when last read: what a survey may look at.
    pub fn online_pfns(&self, page_bytes: u64) -> impl Iterator<Item = PfnRange> + '_ {
        let online = self.blocks.iter().filter(|block| block.state == BlockState::Online);
        online.map(move |block| self.pfns(block.number, page_bytes))
    }

    /// Reads which blocks there are and the state of each. Zone and `removable` are read of new blocks only.
    pub fn refresh(&mut self) -> Result<(), ReadError> {
        let io = |source| ReadError::io(&self.directory, source);
        let mut found = Vec::with_capacity(self.blocks.len());
        for entry in fs::read_dir(&self.directory).map_err(io)? {
            let name = entry.map_err(io)?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("memory")).and_then(|n| n.parse().ok());
            let Some(number) = number.map(BlockNumber) else { continue };
            let block = match self.get(number) {
                Some(known) => self.read_state(number)?.map(|state| MemoryBlock { state, ..*known }),
                None => self.read_block(number)?,
            };
            found.extend(block);
        }
        found.sort_unstable_by_key(|block| block.number);
        self.blocks = found;
        Ok(())
    }

    /// Reads one block anew, zone included. `None` if it is gone.
    pub fn refresh_block(&mut self, number: BlockNumber) -> Result<Option<MemoryBlock>, ReadError> {
        let block = self.read_block(number)?;
        match (self.blocks.binary_search_by_key(&number, |block| block.number), block) {
            (Ok(index), Some(block)) => {
                if let Some(slot) = self.blocks.get_mut(index) {
                    *slot = block;
                }
            }
            (Ok(index), None) => {
                self.blocks.remove(index);
            }
            (Err(index), Some(block)) => self.blocks.insert(index, block),
            (Err(_), None) => {}
        }
        Ok(block)
    }

    /// Reads the state of one block from the kernel, without touching the list. `None` if it is gone.
    pub fn read_state(&self, number: BlockNumber) -> Result<Option<BlockState>, ReadError> {
        read_value(self.path(number).join("state"), "online, offline or going-offline", |text| match text {
            "online" => Some(BlockState::Online),
            "offline" => Some(BlockState::Offline),
            "going-offline" => Some(BlockState::GoingOffline),
            _ => None,
        })
    }

    fn read_block(&self, number: BlockNumber) -> Result<Option<MemoryBlock>, ReadError> {
        let Some(state) = self.read_state(number)? else { return Ok(None) };
        let path = self.path(number);
        let zone = read_once(path.join("valid_zones"), first_zone);
        let zone = match zone {
            Err(error) if error.is_not_found() => None,
            zone => zone?,
        };
        let removable = read_value(path.join("removable"), "0 or 1", flag)?.unwrap_or(false);
        Ok(Some(MemoryBlock { number, state, zone, removable }))
    }

    fn path(&self, number: BlockNumber) -> PathBuf {
        self.directory.join(format!("memory{}", number.0))
    }
}

fn flag(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// `Normal Movable`, `DMA32` or `none`.
fn first_zone(text: &str) -> Result<Option<ZoneName>, Fault> {
    match text.split_ascii_whitespace().next() {
        Some("none") | None => Ok(None),
        Some(word) => ZoneName::from_kernel(word).map(Some).ok_or_else(|| Fault::at(0, "zones or none", text)),
    }
}

/// Who brings added memory online, `None` if the kernel has no memory hot-plug.
pub fn auto_online(roots: &Roots) -> Result<Option<AutoOnline>, ReadError> {
    read_value(
        directory(roots).join("auto_online_blocks"),
        "offline or online, online_kernel, online_movable",
        |text| match text {
            "offline" => Some(AutoOnline::LeftToUserSpace),
            "online" | "online_kernel" | "online_movable" => Some(AutoOnline::ByKernel),
            _ => None,
        },
    )
}

/// Whether a crash kernel is loaded, and who keeps it up to date.
pub fn kdump(roots: &Roots) -> Result<Kdump, ReadError> {
    let read = |path: &Path| read_value(path.to_owned(), "0 or 1", flag).map(|value| value.unwrap_or(false));
    if !read(&roots.sys.join("kernel/kexec_crash_loaded"))? {
        return Ok(Kdump::NotLoaded);
    }
    let by_kernel = read(&directory(roots).join("crash_hotplug"))?;
    Ok(if by_kernel { Kdump::UpdatedByKernel } else { Kdump::ReloadedByUserSpace })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::fake::Tree;
    use proptest::prelude::*;

    const BLOCKS: &str = "sys/devices/system/memory";

    fn add(tree: &Tree, number: u64, state: &str, zones: &str) {
        for (file, text) in [("state", state), ("valid_zones", zones), ("removable", "1")] {
            tree.write(&format!("{BLOCKS}/memory{number}/{file}"), format!("{text}\n").as_bytes());
        }
    }

    fn three_blocks() -> Tree {
        let tree = Tree::new(&[(&format!("{BLOCKS}/block_size_bytes"), "8000000\n")]);
        tree.write(&format!("{BLOCKS}/auto_online_blocks"), b"online\n");
        add(&tree, 10, "offline", "Normal Movable");
        add(&tree, 0, "online", "none");
        add(&tree, 2, "online", "DMA32");
        tree
    }

    #[test]
    fn a_tree() {
        let blocks = MemoryBlocks::read(&three_blocks().roots()).unwrap().unwrap();
        assert_eq!(blocks.block_bytes(), 128 << 20);
        let block = |number, state, zone| MemoryBlock { number: BlockNumber(number), state, zone, removable: true };
        let expected = [
            block(0, BlockState::Online, None),
            block(2, BlockState::Online, Some(ZoneName::Dma32)),
            block(10, BlockState::Offline, Some(ZoneName::Normal)),
        ];
        assert_eq!(blocks.blocks(), expected);
        assert_eq!(blocks.pfns(BlockNumber(2), 4096), Pfn(65536)..Pfn(98304));
        let online: Vec<PfnRange> = blocks.online_pfns(4096).collect();
        assert_eq!(online, [Pfn(0)..Pfn(32768), Pfn(65536)..Pfn(98304)]);
    }

    #[test]
    fn the_list_changes_when_it_is_read_again() {
        let tree = three_blocks();
        let mut blocks = MemoryBlocks::read(&tree.roots()).unwrap().unwrap();
        add(&tree, 2, "offline", "DMA32");
        add(&tree, 11, "going-offline", "Movable");
        tree.remove(&format!("{BLOCKS}/memory0"));
        assert_eq!(blocks.get(BlockNumber(2)).unwrap().state, BlockState::Online);
        assert_eq!(blocks.read_state(BlockNumber(2)).unwrap(), Some(BlockState::Offline));
        blocks.refresh().unwrap();
        let states: Vec<_> = blocks.blocks().iter().map(|block| (block.number.0, block.state)).collect();
        assert_eq!(states, [(2, BlockState::Offline), (10, BlockState::Offline), (11, BlockState::GoingOffline)]);
        add(&tree, 10, "online", "Movable");
        assert_eq!(blocks.refresh_block(BlockNumber(10)).unwrap().unwrap().zone, Some(ZoneName::Movable));
        assert_eq!(blocks.get(BlockNumber(10)).unwrap().state, BlockState::Online);
        assert_eq!(blocks.refresh_block(BlockNumber(99)).unwrap(), None);
        tree.remove(&format!("{BLOCKS}/memory11"));
        assert_eq!(blocks.refresh_block(BlockNumber(11)).unwrap(), None);
        assert_eq!(blocks.blocks().len(), 2);
    }

    #[test]
    fn wrong_values_name_the_file() {
        let tree = three_blocks();
        tree.write(&format!("{BLOCKS}/memory2/state"), b"sleeping\n");
        let error = MemoryBlocks::read(&tree.roots()).unwrap_err().to_string();
        assert!(error.contains("memory2/state, line 1: wanted online, offline or going-offline"), "{error}");
        tree.write(&format!("{BLOCKS}/block_size_bytes"), b"8000001\n");
        let error = MemoryBlocks::read(&tree.roots()).unwrap_err().to_string();
        assert!(error.contains("block_size_bytes, line 1: wanted a power of two"), "{error}");
    }

    #[test]
    fn no_memory_hotplug() {
        let tree = Tree::new(&[]);
        assert!(MemoryBlocks::read(&tree.roots()).unwrap().is_none());
        assert_eq!(auto_online(&tree.roots()).unwrap(), None);
    }

    #[test]
    fn who_reacts() {
        let tree = three_blocks();
        assert_eq!(auto_online(&tree.roots()).unwrap(), Some(AutoOnline::ByKernel));
        assert_eq!(kdump(&tree.roots()).unwrap(), Kdump::NotLoaded);
        tree.write("sys/kernel/kexec_crash_loaded", b"1\n");
        assert_eq!(kdump(&tree.roots()).unwrap(), Kdump::ReloadedByUserSpace);
        tree.write(&format!("{BLOCKS}/crash_hotplug"), b"1\n");
        assert_eq!(kdump(&tree.roots()).unwrap(), Kdump::UpdatedByKernel);
    }

    proptest! {
        #[test]
        fn blocks_lie_side_by_side(text: String, number: u64, page_bytes: u64) {
            let _ = first_zone(&text);
            let blocks = MemoryBlocks { directory: PathBuf::new(), block_bytes: 128 << 20, blocks: Vec::new() };
            let next = BlockNumber(number.saturating_add(1));
            prop_assert_eq!(blocks.pfns(BlockNumber(number), page_bytes).end, blocks.pfns(next, page_bytes).start);
        }
    }
}
