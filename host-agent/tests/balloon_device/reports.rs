//! Memory that the guest gives away, under every numbering of the queues, and what the poison value does to it.

use std::time::Instant;

use fpr_host_agent::device::DeviceEvent;
use fpr_host_agent::reporting::Source;
use fpr_protocol::Refusal;

use super::mock_guest::balloon::{DEFLATE, INFLATE, PAGE_POISON, REPORTING, STATS, STATS_VQ};
use super::mock_guest::{UPPER, WAIT};
use super::{MIB, RANGES, Rig};

#[test]
fn reported_memory_is_dropped_before_it_returns_under_both_numberings() {
    // Features, queue: Linux alone, Linux with statistics, the specification.
    for (features, queue) in [(REPORTING, 2), (REPORTING | STATS_VQ, 3), (REPORTING, 4), (REPORTING | STATS_VQ, 4)] {
        let mut rig = Rig::new(features);
        rig.guest.start(&[INFLATE, DEFLATE, queue]);
        let beside = (RANGES[1].0 + u64::from(RANGES[1].1), 1 << 20);
        [RANGES[0], RANGES[1], beside].into_iter().for_each(|range| rig.fill(range));
        let before = rig.allocated();

        rig.guest.report(queue, &RANGES);
        rig.guest.wait_returned(queue);

        assert_eq!(RANGES.map(|range| rig.content(range)), [0, 0], "queue {queue}");
        assert_eq!(rig.content(beside), 0xaa);
        // Reading a hole of a memfd through a mapping fills it again, so what was freed is in the counters only.
        assert!(before >= 7 * MIB);
        let counters = rig.owner.device.counters().reporting;
        assert_eq!((counters.chains, counters.ranges_dropped, counters.dropped_bytes), (1, 2, 6 * MIB));
    }
}

#[test]
fn the_host_gets_the_memory() {
    let mut rig = Rig::new(REPORTING);
    // The rings get their pages here and not while it is measured.
    rig.guest.queues[2].clear(&rig.guest.memory);
    rig.guest.start(&[2]);
    RANGES.into_iter().for_each(|range| rig.fill(range));
    let before = rig.allocated();
    rig.guest.report(2, &RANGES);
    rig.guest.wait_returned(2);
    assert_eq!(before - rig.allocated(), 6 * MIB);
}

#[test]
fn inflated_pages_are_dropped_as_runs_and_deflated_ones_only_return() {
    let mut rig = Rig::new(0);
    rig.guest.start(&[INFLATE, DEFLATE]);
    let start = UPPER + 4 * MIB;
    rig.fill((start, 1 << 20));
    let pfns: Vec<u32> = (0..256).map(|page| (start / 4096) as u32 + page).collect();

    rig.guest.tell(INFLATE, &pfns);
    rig.guest.wait_returned(INFLATE);
    let (source, ranges) = rig.owner.find(|event| match event {
        DeviceEvent::Reported { source, ranges, .. } => Some((source, ranges)),
        _ => None,
    });
    assert_eq!((source, ranges.len(), ranges[0].bytes), (Source::Inflated, 1, MIB));
    assert_eq!(rig.content((start, 1 << 20)), 0);

    rig.fill((start, 1 << 20));
    rig.guest.tell(DEFLATE, &pfns);
    rig.guest.wait_returned(DEFLATE);
    assert_eq!(rig.content((start, 1 << 20)), 0xaa);
    // A chain that is only passed back is counted when the guest has it.
    let deadline = Instant::now() + WAIT;
    while rig.owner.device.counters().deflate_chains == 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let counters = rig.owner.device.counters();
    assert_eq!((counters.inflate.dropped_bytes, counters.deflate_chains, counters.reporting.chains), (MIB, 1, 0));
}

#[test]
fn a_poison_value_other_than_zero_drops_nothing_and_returns_everything() {
    let mut rig = Rig::new(REPORTING | PAGE_POISON | STATS_VQ);
    let poison = || Some(0xaaaa_aaaa_u32);
    // As Linux does it: before DRIVER_OK.
    rig.guest.write_config(12, &poison().unwrap().to_le_bytes()).unwrap();
    rig.guest.start(&[STATS, 3]);
    rig.fill(RANGES[0]);
    let next_poison = |rig: &Rig| {
        rig.owner.find(|event| match event {
            DeviceEvent::PagePoison { poison_val } => Some(poison_val),
            DeviceEvent::Reported { .. } => panic!("a report before the owner knew of the poison value"),
            _ => None,
        })
    };

    rig.guest.report(3, &RANGES[..1]);
    rig.guest.wait_returned(3);
    assert_eq!(next_poison(&rig), poison());
    assert_eq!(rig.content(RANGES[0]), 0xaa);
    let refused = rig.owner.device.counters().reporting.refused_by_reason;
    assert_eq!(refused[&Refusal::Gated].ranges, 1);
    rig.next_report();

    rig.guest.write_config(12, &[0; 4]).unwrap();
    rig.guest.report(3, &RANGES[..1]);
    rig.guest.wait_returned(3);
    // Byte by byte would be legal too; one write is one change.
    assert_eq!(next_poison(&rig), Some(0));
    assert_eq!(rig.content(RANGES[0]), 0);
}

/// A driver must write it before DRIVER_OK: if it did not, it did to the daemon that died.
#[test]
fn a_poison_value_that_was_never_written_counts_as_poison() {
    let mut rig = Rig::new(REPORTING | PAGE_POISON);
    rig.guest.start(&[2]);
    rig.fill(RANGES[0]);
    rig.guest.report(2, &RANGES[..1]);
    rig.guest.wait_returned(2);
    assert_eq!(rig.content(RANGES[0]), 0xaa);

    // The next one negotiates without, and has nothing to do with what the last one wrote.
    rig.reconnect(REPORTING);
    rig.guest.queues[2].clear(&rig.guest.memory);
    rig.guest.start(&[2]);
    rig.guest.report(2, &RANGES[..1]);
    rig.guest.wait_returned(2);
    assert_eq!(rig.content(RANGES[0]), 0);
}
