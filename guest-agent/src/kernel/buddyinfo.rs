//! `/proc/buddyinfo`: free blocks of each zone and order (`frag_show_print`, `mm/vmstat.c`).
//!
//! The cheap gate before a survey: about 15 µs tell how many free huge pages there are, not where.

use super::text::{Fault, TextFile};
use super::zone::{ZoneId, heading};
use super::{ReadError, Roots};

/// Most orders a kernel has: 14 on arm64 with 64 KiB pages (`ARCH_FORCE_MAX_ORDER`), and some to spare.
const MAX_ORDERS: usize = 20;

/// Free blocks of one zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeBlocks {
    /// Which zone.
    pub zone: ZoneId,
    orders: usize,
    counts: [u64; MAX_ORDERS],
}

impl FreeBlocks {
    /// Number of free blocks of each order, from order 0.
    #[must_use]
    pub fn by_order(&self) -> &[u64] {
        self.counts.get(..self.orders).unwrap_or_default()
    }

    /// Free huge pages of `order`: larger blocks hold several.
    #[must_use]
    pub fn huge_pages(&self, order: u8) -> u64 {
        let order = usize::from(order);
        let larger = self.by_order().iter().enumerate().skip(order);
        larger.fold(0, |sum, (block_order, count)| sum.saturating_add(count.saturating_mul(1 << (block_order - order))))
    }
}

/// Reader of `/proc/buddyinfo`.
#[derive(Debug)]
pub struct BuddyInfoReader {
    file: TextFile,
    zones: Vec<FreeBlocks>,
}

impl BuddyInfoReader {
    /// Opens the file.
    pub fn open(roots: &Roots) -> Result<Self, ReadError> {
        Ok(Self { file: TextFile::open(roots.proc.join("buddyinfo"))?, zones: Vec::new() })
    }

    /// The zones of now.
    pub fn read(&mut self) -> Result<&[FreeBlocks], ReadError> {
        let zones = &mut self.zones;
        self.file.parse(|text| parse(text, zones))?;
        Ok(&self.zones)
    }

    /// Free huge pages of `order` in the whole guest.
    pub fn free_huge_pages(&mut self, order: u8) -> Result<u64, ReadError> {
        Ok(self.read()?.iter().fold(0, |sum, zone| sum.saturating_add(zone.huge_pages(order))))
    }
}

/// `Node 0, zone   Normal    216     55 …`
fn parse(text: &str, zones: &mut Vec<FreeBlocks>) -> Result<(), Fault> {
    zones.clear();
    for (index, line) in text.lines().enumerate() {
        let fault = || Fault::at(index, "node, zone and a number per order", line);
        let (zone, rest) = heading(line).ok_or_else(fault)?;
        let mut blocks = FreeBlocks { zone, orders: 0, counts: [0; MAX_ORDERS] };
        for word in rest.split_ascii_whitespace() {
            *blocks.counts.get_mut(blocks.orders).ok_or_else(fault)? = word.parse().map_err(|_| fault())?;
            blocks.orders += 1;
        }
        zones.push(blocks);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::fake::Tree;
    use crate::kernel::zone::ZoneName;
    use proptest::prelude::*;

    const TEXT: &str = "Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3 \n\
        Node 0, zone    DMA32      2      3      0      2      3      2      1      4      4      2    752 \n";

    #[test]
    fn a_real_file() {
        let tree = Tree::new(&[("proc/buddyinfo", TEXT)]);
        let mut reader = BuddyInfoReader::open(&tree.roots()).unwrap();
        let zones = reader.read().unwrap();
        assert_eq!(zones.len(), 2);
        assert_eq!(zones[1].zone, ZoneId { node: 0, name: ZoneName::Dma32 });
        assert_eq!(zones[1].by_order(), [2, 3, 0, 2, 3, 2, 1, 4, 4, 2, 752]);
        assert_eq!(reader.free_huge_pages(9).unwrap(), (1 + 2 * 3) + (2 + 2 * 752));
        assert_eq!(reader.free_huge_pages(5).unwrap(), (8 + 16 + 32 * 3) + (2 + 2 + 4 * 4 + 8 * 4 + 16 * 2 + 32 * 752));
        assert_eq!(reader.free_huge_pages(11).unwrap(), 0);
    }

    #[test]
    fn wrong_lines() {
        let mut zones = Vec::new();
        for line in ["Node x, zone DMA 1", "Node 0, zone Red 1", "Node 0, zone DMA -1", "zone DMA 1"] {
            let text = format!("Node 0, zone DMA 1 2\n{line}\n");
            assert!(matches!(parse(&text, &mut zones), Err(Fault::Line { line: 2, .. })), "{line}");
        }
        let text = format!("Node 0, zone DMA {}\n", "1 ".repeat(MAX_ORDERS + 1));
        assert!(parse(&text, &mut zones).is_err());
    }

    #[test]
    fn this_machine() {
        assert!(!BuddyInfoReader::open(&Roots::default()).unwrap().read().unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn never_panics(text in "(Node [0-9]{0,12}, zone +(DMA|Normal|X) ([0-9]{0,22} ){0,24}\n){0,4}|\\PC*", order: u8) {
            let mut zones = Vec::new();
            let _ = parse(&text, &mut zones);
            for zone in &zones {
                let _ = zone.huge_pages(order);
            }
        }
    }
}
