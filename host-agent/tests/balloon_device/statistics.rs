//! The statistics queue: one buffer that goes to and fro.

use std::time::{Duration, Instant};

use fpr_host_agent::device::balloon::{Fault, Received};

use super::Rig;
use super::mock_guest::balloon::{REPORTING, STATS, STATS_VQ};
use super::mock_guest::{WAIT, queue::WRITE};
use vm_memory::GuestAddress;

fn stats(pairs: &[(u16, u64)]) -> Vec<u8> {
    pairs
        .iter()
        .flat_map(|(tag, value)| [tag.to_le_bytes().as_slice(), value.to_le_bytes().as_slice()].concat())
        .collect()
}

fn received(rig: &Rig, fits: impl Fn(&Received) -> bool) -> Received {
    let deadline = Instant::now() + WAIT;
    loop {
        let latest = rig.owner.device.statistics();
        if let Some(latest) = latest.filter(&fits) {
            return latest;
        }
        assert!(Instant::now() < deadline, "not in time, last: {latest:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_buffer_is_read_when_asked_for_and_returned_for_the_next() {
    let mut rig = Rig::new(STATS_VQ | REPORTING);
    rig.guest.start(&[STATS, 3]);
    // Nobody asked for these.
    rig.guest.send(STATS, &stats(&[(4, 1)]));
    rig.guest.wait_returned(STATS);
    assert_eq!(rig.owner.device.statistics(), None);

    rig.guest.send(STATS, &stats(&[(4, 2), (5, 3), (99, 4)]));
    let first = received(&rig, |_| true);
    assert_eq!((first.statistics.free_bytes, first.statistics.total_bytes), (Some(2), Some(3)));
    assert!(rig.guest.queues[STATS].take_used(&rig.guest.memory).is_none(), "kept until somebody asks");

    rig.owner.device.request_stats();
    rig.guest.wait_returned(STATS);
    rig.guest.send(STATS, &stats(&[(4, 5)]));
    let second = received(&rig, |latest| latest.statistics.free_bytes == Some(5));
    assert_eq!(second.statistics.total_bytes, None);
    assert!(second.at > first.at);
}

/// A VM that was paused: the buffer in the ring is served again, but what is in it is as old as the pause.
#[test]
fn after_a_stop_the_buffer_is_still_there_and_is_asked_for_anew() {
    let mut rig = Rig::new(STATS_VQ);
    rig.guest.start(&[STATS]);
    rig.guest.send(STATS, &stats(&[]));
    rig.guest.wait_returned(STATS);
    rig.guest.send(STATS, &stats(&[(4, 1)]));
    received(&rig, |_| true);

    let base = vhost::VhostBackend::get_vring_base(&rig.guest.front_end, STATS).unwrap();
    assert_eq!(base, 1, "the buffer that is kept is not lost");
    rig.guest.queues[STATS].start(&mut rig.guest.front_end, STATS, base as u16);
    rig.guest.wait_returned(STATS);
    assert_eq!(rig.owner.device.counters().statistics_received, 1);
}

#[test]
fn what_is_no_list_of_statistics_is_counted_and_does_not_stop_the_queue() {
    let mut rig = Rig::new(STATS_VQ);
    rig.guest.start(&[STATS]);
    rig.guest.send(STATS, &stats(&[]));
    rig.guest.wait_returned(STATS);
    let bad = |rig: &Rig| rig.owner.device.counters().refused(Fault::BadStatistics);
    let chains = [
        (GuestAddress(0x40_0000), 0, 0),
        (GuestAddress(0x40_0000), 9, 0),
        (GuestAddress(0x40_0000), 10, WRITE),
        (GuestAddress(u64::MAX - 3), 10, 0),
        (GuestAddress(0x7fff_0000), 10, 0),
    ];
    for (count, chain) in chains.into_iter().enumerate() {
        rig.guest.queues[STATS].offer(&rig.guest.memory, &[chain]);
        let deadline = Instant::now() + WAIT;
        while bad(&rig) <= count as u64 {
            assert!(Instant::now() < deadline, "{chain:?}: {} faults", bad(&rig));
            std::thread::sleep(Duration::from_millis(1));
        }
        rig.owner.device.request_stats();
        rig.guest.wait_returned(STATS);
    }
    assert_eq!(rig.owner.device.statistics(), None);
    rig.guest.send(STATS, &stats(&[(0, 7)]));
    assert_eq!(received(&rig, |_| true).statistics.swap_in_bytes, Some(7));
}
