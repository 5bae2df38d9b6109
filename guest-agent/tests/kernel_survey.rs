//! The survey on the machine the test runs on, with its cost. Skipped where `/proc/kpageflags` cannot be read.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use fpr_guest_agent::kernel::buddyinfo::BuddyInfoReader;
use fpr_guest_agent::kernel::kpageflags::{Depth, PageFlags, Survey};
use fpr_guest_agent::kernel::memory_blocks::MemoryBlocks;
use fpr_guest_agent::kernel::zoneinfo::ZoneInfoReader;
use fpr_guest_agent::kernel::{PfnRange, Roots, identity};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

fn timed<T>(what: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = what();
    (result, start.elapsed())
}

/// Online memory: the blocks, or the zones where the kernel has no blocks.
fn online(roots: &Roots, page_bytes: u64) -> Vec<PfnRange> {
    if let Some(blocks) = MemoryBlocks::read(roots).unwrap() {
        return blocks.online_pfns(page_bytes).collect();
    }
    ZoneInfoReader::open(roots).unwrap().read().unwrap().iter().map(|zone| zone.span.clone()).collect()
}

#[test]
fn free_memory_is_found_and_its_price_is_known() {
    let roots = Roots::default();
    let size = identity::huge_page_size(&roots, identity::page_size().unwrap()).unwrap();
    let mut flags = match PageFlags::open(&roots, size) {
        Ok(flags) => flags,
        Err(error) => {
            eprintln!("skipped: {error}");
            return;
        }
    };
    let (ranges, list_time) = timed(|| online(&roots, size.page_bytes()));
    println!("{} ranges listed in {list_time:?}", ranges.len());

    // Others allocate meanwhile, so one of several attempts has to agree with what the allocator counts.
    let mut buddyinfo = BuddyInfoReader::open(&roots).unwrap();
    let mut survey = Survey::new(size);
    let mut seen = Vec::new();
    for _ in 0..10 {
        let cost = flags.cost();
        let before = buddyinfo.free_huge_pages(size.order()).unwrap();
        let (result, time) = timed(|| flags.survey(ranges.iter().cloned(), Depth::Full, &mut survey));
        result.unwrap();
        let after = buddyinfo.free_huge_pages(size.order()).unwrap();
        let entries = flags.cost().entries - cost.entries;
        println!("full: {} free in {time:?}, {entries} entries; buddyinfo {before} to {after}", survey.free_count());
        seen.push((before, survey.free_count(), after));
        let slack = before.abs_diff(after) + before / 50 + 2;
        if survey.free_count().abs_diff(before.min(after)) <= slack {
            let full: BTreeSet<_> = survey.free().collect();
            let (result, time) = timed(|| flags.survey(ranges.iter().cloned(), Depth::Probed, &mut survey));
            result.unwrap();
            let more = survey.free().filter(|address| !full.contains(address)).count();
            println!("probed: {} free in {time:?}, {more} of them not in the full survey", survey.free_count());
            let (wholly, time) = timed(|| ranges.iter().filter(|range| flags.wholly_free(range).unwrap()).count());
            println!("{wholly} of {} ranges wholly free, found in {time:?}", ranges.len());
            return;
        }
    }
    panic!("the survey never agreed with /proc/buddyinfo (before, survey, after): {seen:?}");
}
