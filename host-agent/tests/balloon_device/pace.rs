//! A kernel that gives memory away as fast as it can.

use std::time::Instant;

use vhost::VhostBackend;

use super::Rig;
use super::mock_guest::balloon::{INFLATE, REPORTING};
use super::mock_guest::{UNUSED, UPPER};

/// What a guest has saved up when it starts, and what comes back per second: chains of at most 32 ranges
/// (`device/balloon/pace.rs`).
const SAVED_UP: u64 = 2_000;
const PER_SECOND: u64 = 250;
/// Reports that Linux makes in one go for 1 TiB of free memory in blocks of 4 MiB.
const ONE_PASS: u64 = 512;
const REPORTS: usize = 2;

#[test]
fn a_flood_is_served_at_its_pace_and_a_stop_does_not_wait_for_it() {
    const BATCH: u64 = 32;
    const FLOOD: u64 = SAVED_UP + 2 * PER_SECOND;
    let mut rig = Rig::new(REPORTING);
    rig.guest.start(&[INFLATE, REPORTS]);
    let started = Instant::now();
    let mut served = 0;
    while served < FLOOD {
        // Memory that was never backed: to name it costs the guest nothing.
        (0..BATCH).for_each(|_| rig.guest.report(REPORTS, &[(UNUSED, 4096)]));
        (0..BATCH).for_each(|_| rig.guest.wait_returned(REPORTS));
        served += BATCH;
        if served == ONE_PASS {
            assert_eq!(rig.owner.device.counters().chains_delayed, 0, "Linux would have had to wait");
        }
    }
    let paid = SAVED_UP as f64 + PER_SECOND as f64 * started.elapsed().as_secs_f64();
    assert!(served as f64 <= paid + BATCH as f64, "{served} chains, {paid} paid for");
    assert!(rig.owner.device.counters().chains_delayed > 0);

    // A list of scattered pages costs as much as 32 reports, an eighth of a second.
    let scattered: Vec<u32> = (0..1024).map(|page| (UPPER / 4096) as u32 + 2 * page).collect();
    const LISTS: u64 = 20;
    (0..LISTS).for_each(|_| rig.guest.tell(INFLATE, &scattered));
    let base = u64::from(rig.guest.front_end.get_vring_base(INFLATE).unwrap());
    assert!(base < LISTS, "the stop waited for chains that wait");
    assert_eq!(u64::from(rig.guest.queues[INFLATE].used_index(&rig.guest.memory)), base);
    // What was not taken is served when the queue goes on.
    rig.guest.queues[INFLATE].start(&mut rig.guest.front_end, INFLATE, base as u16);
    (0..=base).for_each(|_| rig.guest.wait_returned(INFLATE));
}
