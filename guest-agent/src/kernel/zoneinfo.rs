//! `/proc/zoneinfo`: where each zone lies and which watermarks it keeps (`zoneinfo_show_print`, `mm/vmstat.c`).
//!
//! Read at start, after memory was added or removed, and for the floor. About 90 µs and some kilobytes per CPU, so not
//! on every tick.

use super::text::{Fault, TextFile};
use super::zone::{ZoneId, heading};
use super::{Pfn, PfnRange, ReadError, Roots};

/// One populated zone. All figures are base pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Which zone.
    pub id: ZoneId,
    /// Free pages.
    pub free: u64,
    /// Watermark below which only urgent allocations succeed.
    pub min: u64,
    /// Watermark below which background reclaim starts. The agent must stay well above it.
    pub low: u64,
    /// Watermark at which background reclaim stops.
    pub high: u64,
    /// Pages the zone has, holes left out.
    pub present: u64,
    /// Pages the allocator manages.
    pub managed: u64,
    /// From the first page to the last, holes included. Zones of one node may overlap.
    pub span: PfnRange,
}

/// Reader of `/proc/zoneinfo`.
#[derive(Debug)]
pub struct ZoneInfoReader {
    file: TextFile,
    zones: Vec<Zone>,
}

impl ZoneInfoReader {
    /// Opens the file.
    pub fn open(roots: &Roots) -> Result<Self, ReadError> {
        Ok(Self { file: TextFile::open(roots.proc.join("zoneinfo"))?, zones: Vec::new() })
    }

    /// The populated zones of now.
    pub fn read(&mut self) -> Result<&[Zone], ReadError> {
        let zones = &mut self.zones;
        self.file.parse(|text| parse(text, zones))?;
        Ok(&self.zones)
    }
}

#[derive(Clone, Copy, Default)]
struct Fields {
    free: Option<u64>,
    min: Option<u64>,
    low: Option<u64>,
    high: Option<u64>,
    spanned: Option<u64>,
    present: Option<u64>,
    managed: Option<u64>,
    start_pfn: Option<u64>,
}

impl Fields {
    fn zone(self, id: ZoneId) -> Result<Zone, &'static str> {
        let start = self.start_pfn.ok_or("start_pfn")?;
        let spanned = self.spanned.ok_or("spanned")?;
        Ok(Zone {
            id,
            free: self.free.ok_or("pages free")?,
            min: self.min.ok_or("min")?,
            low: self.low.ok_or("low")?,
            high: self.high.ok_or("high")?,
            present: self.present.ok_or("present")?,
            managed: self.managed.ok_or("managed")?,
            span: Pfn(start)..Pfn(start.saturating_add(spanned)),
        })
    }

    /// The kernel prints only the first lines of a zone without pages, and no `start_pfn`.
    fn is_populated(self) -> bool {
        self.present != Some(0)
    }
}

fn parse(text: &str, zones: &mut Vec<Zone>) -> Result<(), Fault> {
    zones.clear();
    let mut current: Option<(ZoneId, Fields)> = None;
    for (index, line) in text.lines().enumerate() {
        if line.starts_with("Node ") {
            let (id, _) = heading(line).ok_or_else(|| Fault::at(index, "node and zone", line))?;
            finish(current.replace((id, Fields::default())), zones)?;
            continue;
        }
        let mut words = line.split_ascii_whitespace();
        // The watermarks have no colon; `high:` belongs to the per-CPU lists.
        let (key, value) = match (words.next(), words.next(), words.next()) {
            (Some("pages"), Some("free"), Some(value)) => ("free", value),
            (Some(key), Some(value), None) => (key, value),
            _ => continue,
        };
        let Some((_, fields)) = &mut current else { continue };
        let slot = match key {
            "free" => &mut fields.free,
            "min" => &mut fields.min,
            "low" => &mut fields.low,
            "high" => &mut fields.high,
            "spanned" => &mut fields.spanned,
            "present" => &mut fields.present,
            "managed" => &mut fields.managed,
            "start_pfn:" => &mut fields.start_pfn,
            _ => continue,
        };
        *slot = Some(value.parse().map_err(|_| Fault::at(index, "a number of pages", line))?);
    }
    finish(current, zones)
}

fn finish(zone: Option<(ZoneId, Fields)>, zones: &mut Vec<Zone>) -> Result<(), Fault> {
    if let Some((id, fields)) = zone
        && fields.is_populated()
    {
        zones.push(fields.zone(id).map_err(|wanted| Fault::Missing { wanted })?);
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

    const TEXT: &str = "Node 0, zone      DMA\n  per-node stats\n      nr_inactive_anon 2085\n  pages free     3840\n        boost    0\n        \
        min      46\n        low      57\n        high     68\n        promo    79\n        spanned  4095\n        present  3998\n        \
        managed  3840\n        cma      0\n        protection: (0, 3018, 5450, 5450, 5450)\n      nr_free_pages 3840\n  pagesets\n    \
        cpu: 0\n              count:    0\n              high:     14\n              batch:    1\n  vm stats threshold: 4\n  \
        node_unreclaimable:  0\n  start_pfn:           1\nNode 0, zone  Movable\n  pages free     0\n        boost    0\n        \
        min      32\n        low      32\n        high     32\n        promo    32\n        spanned  0\n        present  0\n        \
        managed  0\n        cma      0\n        protection: (0, 0, 0, 0, 0)\n";

    #[test]
    fn a_real_file() {
        let tree = Tree::new(&[("proc/zoneinfo", TEXT)]);
        let zone = Zone {
            id: ZoneId { node: 0, name: ZoneName::Dma },
            free: 3840,
            min: 46,
            low: 57,
            high: 68,
            present: 3998,
            managed: 3840,
            span: Pfn(1)..Pfn(4096),
        };
        assert_eq!(ZoneInfoReader::open(&tree.roots()).unwrap().read().unwrap(), [zone]);
    }

    #[test]
    fn wrong_lines() {
        let mut zones = Vec::new();
        let fault = parse(&TEXT.replace("low      57", "low      many"), &mut zones).unwrap_err();
        assert_eq!(fault, Fault::at(6, "a number of pages", "        low      many"));
        let fault = parse(&TEXT.replace("start_pfn", "pfn"), &mut zones).unwrap_err();
        assert_eq!(fault, Fault::Missing { wanted: "start_pfn" });
    }

    #[test]
    fn this_machine() {
        let mut reader = ZoneInfoReader::open(&Roots::default()).unwrap();
        let zones = reader.read().unwrap();
        assert!(!zones.is_empty());
        for zone in zones {
            assert!(zone.min <= zone.low && zone.low <= zone.high, "{zone:?}");
            assert!(zone.span.start < zone.span.end, "{zone:?}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "(Node 0, zone +DMA\n( *(pages free|min|low|high|spanned|present|managed|start_pfn:) +[0-9]{0,25}\n){0,12}){0,3}|\\PC*") {
            let mut zones = Vec::new();
            let _ = parse(&text, &mut zones);
        }
    }
}
