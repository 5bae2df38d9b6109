//! Zones: parts of a node's memory from which the kernel allocates for different needs.
//!
//! Shared by the readers of `buddyinfo`, `zoneinfo` and memory blocks.

use serde::Serialize;
use std::fmt;

/// Name of a zone (`zone_names`, `mm/page_alloc.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum ZoneName {
    /// Below 16 MiB on x86-64.
    Dma,
    /// Below 4 GiB.
    Dma32,
    /// All other memory.
    Normal,
    /// Memory without a kernel mapping, 32-bit machines.
    HighMem,
    /// Memory for movable pages only.
    Movable,
    /// Memory of devices.
    Device,
}

impl ZoneName {
    /// From the kernel's spelling.
    #[must_use]
    pub fn from_kernel(name: &str) -> Option<Self> {
        Some(match name {
            "DMA" => Self::Dma,
            "DMA32" => Self::Dma32,
            "Normal" => Self::Normal,
            "HighMem" => Self::HighMem,
            "Movable" => Self::Movable,
            "Device" => Self::Device,
            _ => return None,
        })
    }
}

impl fmt::Display for ZoneName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dma => "DMA",
            Self::Dma32 => "DMA32",
            Self::Normal => "Normal",
            Self::HighMem => "HighMem",
            Self::Movable => "Movable",
            Self::Device => "Device",
        })
    }
}

/// A zone of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ZoneId {
    /// NUMA node.
    pub node: u32,
    /// Zone of it.
    pub name: ZoneName,
}

/// Splits `Node 0, zone   Normal …` into the zone and what follows.
pub(crate) fn heading(line: &str) -> Option<(ZoneId, &str)> {
    let (node, rest) = line.strip_prefix("Node ")?.split_once(", zone")?;
    let rest = rest.trim_start();
    let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((ZoneId { node: node.parse().ok()?, name: ZoneName::from_kernel(name)? }, rest))
}
