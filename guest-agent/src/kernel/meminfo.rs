//! `/proc/meminfo`: totals of the whole guest (`fs/proc/meminfo.c`), and the quick look at free memory.
//!
//! The agent reads it for its floor, its statistics and its huge page pool. Reading and parsing costs about 20 µs; the
//! watch during a pass uses [`free_memory_bytes`], which costs less than 1 µs.

use super::text::{Fault, TextFile};
use super::{ReadError, Roots};
use nix::errno::Errno;
use nix::sys::sysinfo::sysinfo;

/// Persistent hugetlb pages of the default size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePagePool {
    /// `HugePages_Total`, surplus pages included.
    pub total: u64,
    /// `HugePages_Free`.
    pub free: u64,
    /// `HugePages_Rsvd`: promised to mappings, not handed out yet.
    pub reserved: u64,
    /// `HugePages_Surp`: above `nr_hugepages`, allowed by `nr_overcommit_hugepages`.
    pub surplus: u64,
    /// `Hugepagesize` in bytes.
    pub page_bytes: u64,
}

/// What the agent uses of `/proc/meminfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemInfo {
    /// `MemTotal` in bytes. Taking a memory block offline lowers it.
    pub total_bytes: u64,
    /// `MemFree` in bytes.
    pub free_bytes: u64,
    /// `MemAvailable` in bytes: the kernel's estimate of what can be used without swapping.
    pub available_bytes: u64,
    /// `Cached` in bytes: page cache, shared memory included.
    pub cached_bytes: u64,
    /// The hugetlb pool, `None` if the kernel has no hugetlb.
    pub huge_pages: Option<HugePagePool>,
}

/// Reader of `/proc/meminfo`.
#[derive(Debug)]
pub struct MemInfoReader(TextFile);

impl MemInfoReader {
    /// Opens the file.
    pub fn open(roots: &Roots) -> Result<Self, ReadError> {
        TextFile::open(roots.proc.join("meminfo")).map(Self)
    }

    /// The figures of now.
    pub fn read(&mut self) -> Result<MemInfo, ReadError> {
        self.0.parse(parse)
    }
}

/// Free memory of the guest in bytes (`sysinfo(2)`, `freeram`): the sum of `NR_FREE_PAGES` over all zones, as in
/// `MemFree`, without text between. 0.7 µs.
pub fn free_memory_bytes() -> Result<u64, Errno> {
    sysinfo().map(|info| info.ram_unused())
}

fn parse(text: &str) -> Result<MemInfo, Fault> {
    let (mut total, mut free, mut available, mut cached) = (None, None, None, None);
    let (mut pool_total, mut pool_free, mut pool_reserved, mut pool_surplus) = (None, None, None, None);
    let mut page_bytes = None;
    for (index, line) in text.lines().enumerate() {
        let Some((key, rest)) = line.split_once(':') else {
            return Err(Fault::at(index, "a name and a colon", line));
        };
        let (slot, wanted_unit) = match key {
            "MemTotal" => (&mut total, Some("kB")),
            "MemFree" => (&mut free, Some("kB")),
            "MemAvailable" => (&mut available, Some("kB")),
            "Cached" => (&mut cached, Some("kB")),
            "Hugepagesize" => (&mut page_bytes, Some("kB")),
            "HugePages_Total" => (&mut pool_total, None),
            "HugePages_Free" => (&mut pool_free, None),
            "HugePages_Rsvd" => (&mut pool_reserved, None),
            "HugePages_Surp" => (&mut pool_surplus, None),
            _ => continue,
        };
        let mut words = rest.split_ascii_whitespace();
        let scale = if wanted_unit.is_some() { 1024 } else { 1 };
        let number = words.next().and_then(|word| word.parse::<u64>().ok()).and_then(|n| n.checked_mul(scale));
        let Some(number) = number.filter(|_| words.next() == wanted_unit) else {
            let wanted = if wanted_unit.is_some() { "a number of kB" } else { "a number of huge pages" };
            return Err(Fault::at(index, wanted, line));
        };
        *slot = Some(number);
    }
    let huge_pages = match (pool_total, pool_free, pool_reserved, pool_surplus, page_bytes) {
        (Some(total), Some(free), Some(reserved), Some(surplus), Some(page_bytes)) => {
            Some(HugePagePool { total, free, reserved, surplus, page_bytes })
        }
        _ => None,
    };
    Ok(MemInfo {
        total_bytes: total.ok_or(Fault::Missing { wanted: "MemTotal" })?,
        free_bytes: free.ok_or(Fault::Missing { wanted: "MemFree" })?,
        available_bytes: available.ok_or(Fault::Missing { wanted: "MemAvailable (Linux 3.14)" })?,
        cached_bytes: cached.ok_or(Fault::Missing { wanted: "Cached" })?,
        huge_pages,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::fake::Tree;
    use proptest::prelude::*;

    const TEXT: &str = "MemTotal:        2014152 kB\nMemFree:         1857424 kB\nMemAvailable:    1820392 kB\n\
        Buffers:               0 kB\nCached:            50636 kB\nHugePages_Total:       3\nHugePages_Free:        2\n\
        HugePages_Rsvd:        1\nHugePages_Surp:        3\nHugepagesize:       2048 kB\nHugetlb:            6144 kB\n";

    #[test]
    fn a_real_file() {
        let tree = Tree::new(&[("proc/meminfo", TEXT)]);
        let pool = HugePagePool { total: 3, free: 2, reserved: 1, surplus: 3, page_bytes: 2 << 20 };
        assert_eq!(
            MemInfoReader::open(&tree.roots()).unwrap().read().unwrap(),
            MemInfo {
                total_bytes: 2_014_152 << 10,
                free_bytes: 1_857_424 << 10,
                available_bytes: 1_820_392 << 10,
                cached_bytes: 50_636 << 10,
                huge_pages: Some(pool),
            }
        );
    }

    #[test]
    fn no_hugetlb() {
        let text: String =
            TEXT.lines().filter(|line| !line.starts_with("Huge")).fold(String::new(), |t, l| t + l + "\n");
        assert_eq!(parse(&text).unwrap().huge_pages, None);
    }

    #[test]
    fn wrong_lines() {
        let fault = parse(&TEXT.replace("1857424 kB", "1857424 MB")).unwrap_err();
        assert_eq!(fault, Fault::at(1, "a number of kB", "MemFree:         1857424 MB"));
        let fault = parse(&TEXT.replace("Cached", "cached")).unwrap_err();
        assert_eq!(fault, Fault::Missing { wanted: "Cached" });
    }

    #[test]
    fn this_machine() {
        let info = MemInfoReader::open(&Roots::default()).unwrap().read().unwrap();
        assert!(info.free_bytes <= info.total_bytes);
        // Both come from NR_FREE_PAGES; other processes run between the two readings.
        assert!(free_memory_bytes().unwrap().abs_diff(info.free_bytes) < info.total_bytes / 4);
    }

    proptest! {
        #[test]
        fn never_panics(text in "((MemTotal|MemFree|HugePages_Free|[a-zA-Z]*):? *[0-9]{0,25} ?(kB)?\n){0,8}|\\PC*") {
            let _ = parse(&text);
        }
    }
}
