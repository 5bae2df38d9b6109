//! `/proc/vmstat`: events that show whether the agent hurt the guest (`mm/vmstat.c`).
//!
//! About 60 µs. A pass that moved one of the stall counters did harm; `pgalloc` tells whether the guest is busy.

use super::text::{Fault, TextFile};
use super::{ReadError, Roots};

/// Counters since boot. A counter that the kernel was built without stays 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmEvents {
    /// `compact_stall`: allocations that compacted memory themselves.
    pub compact_stall: u64,
    /// `allocstall_*`, all zones: allocations that reclaimed memory themselves.
    pub allocstall: u64,
    /// `pgscan_kswapd`: pages looked at by background reclaim.
    pub pgscan_kswapd: u64,
    /// `pgscan_direct`: pages looked at by allocations that reclaimed.
    pub pgscan_direct: u64,
    /// `oom_kill`: processes killed for want of memory.
    pub oom_kill: u64,
    /// `pgalloc_*`, all zones: base pages allocated.
    pub pgalloc: u64,
}

impl VmEvents {
    /// What happened since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            compact_stall: self.compact_stall.saturating_sub(earlier.compact_stall),
            allocstall: self.allocstall.saturating_sub(earlier.allocstall),
            pgscan_kswapd: self.pgscan_kswapd.saturating_sub(earlier.pgscan_kswapd),
            pgscan_direct: self.pgscan_direct.saturating_sub(earlier.pgscan_direct),
            oom_kill: self.oom_kill.saturating_sub(earlier.oom_kill),
            pgalloc: self.pgalloc.saturating_sub(earlier.pgalloc),
        }
    }
}

/// Reader of `/proc/vmstat`.
#[derive(Debug)]
pub struct VmEventsReader(TextFile);

impl VmEventsReader {
    /// Opens the file.
    pub fn open(roots: &Roots) -> Result<Self, ReadError> {
        TextFile::open(roots.proc.join("vmstat")).map(Self)
    }

    /// The counters of now.
    pub fn read(&mut self) -> Result<VmEvents, ReadError> {
        self.0.parse(parse)
    }
}

fn parse(text: &str) -> Result<VmEvents, Fault> {
    let mut events = VmEvents::default();
    for (index, line) in text.lines().enumerate() {
        let fault = || Fault::at(index, "a counter's name and its value", line);
        let (name, value) = line.split_once(' ').ok_or_else(fault)?;
        let slot = match name {
            "compact_stall" => &mut events.compact_stall,
            "pgscan_kswapd" => &mut events.pgscan_kswapd,
            "pgscan_direct" => &mut events.pgscan_direct,
            "oom_kill" => &mut events.oom_kill,
            // `allocstall` without a zone before Linux 4.10.
            _ if name.starts_with("allocstall") => &mut events.allocstall,
            _ if name.starts_with("pgalloc_") => &mut events.pgalloc,
            _ => continue,
        };
        *slot = slot.saturating_add(value.parse().map_err(|_| fault())?);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::fake::Tree;
    use proptest::prelude::*;

    #[test]
    fn a_real_file() {
        let text = "nr_free_pages 464356\npgalloc_dma32 2\npgalloc_normal 3\nallocstall_dma 0\nallocstall_dma32 2\nallocstall_normal 3\nallocstall_movable 4\n\
            pgscan_kswapd 17\npgscan_direct 5\npgscan_direct_throttle 99\noom_kill 1\ncompact_stall 6\ncompact_fail 7\n";
        let tree = Tree::new(&[("proc/vmstat", text)]);
        let mut reader = VmEventsReader::open(&tree.roots()).unwrap();
        let before = reader.read().unwrap();
        let expected =
            VmEvents { compact_stall: 6, allocstall: 9, pgscan_kswapd: 17, pgscan_direct: 5, oom_kill: 1, pgalloc: 5 };
        assert_eq!(before, expected);
        tree.write("proc/vmstat", text.replace("compact_stall 6", "compact_stall 8").as_bytes());
        assert_eq!(reader.read().unwrap().since(before), VmEvents { compact_stall: 2, ..VmEvents::default() });
    }

    #[test]
    fn wrong_lines() {
        assert!(matches!(parse("nr_x 1\noom_kill one\n"), Err(Fault::Line { line: 2, .. })));
        assert!(matches!(parse("oom_kill\n"), Err(Fault::Line { line: 1, .. })));
    }

    #[test]
    fn this_machine() {
        assert!(VmEventsReader::open(&Roots::default()).unwrap().read().is_ok());
    }

    proptest! {
        #[test]
        fn never_panics(text in "((allocstall_x|oom_kill|[a-z]*) ?[0-9]{0,25}\n){0,8}|\\PC*") {
            let _ = parse(&text);
        }
    }
}
