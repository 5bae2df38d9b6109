//! Chains that no honest driver builds. What is inside a chain is tested with the queue core; here, that they pass through
//! the device, come back, and leave the next one its way.

use std::time::{Duration, Instant};

use fpr_host_agent::device::balloon::Fault;
use vm_memory::GuestAddress;

use super::mock_guest::balloon::{DEFLATE, INFLATE, REPORTING};
use super::mock_guest::queue::{Descriptor, INDIRECT, NEXT, WRITE};
use super::mock_guest::{LOW_SIZE, UPPER, WAIT};
use super::{RANGES, Rig};

/// A good report, to see that the queue is alive.
fn still_serves(rig: &mut Rig, queue: usize, name: &str) {
    rig.fill(RANGES[0]);
    rig.guest.report(queue, &RANGES[..1]);
    rig.guest.wait_returned(queue);
    assert_eq!(rig.content(RANGES[0]), 0, "{name}");
}

fn refused_once(rig: &Rig, fault: Fault, times: u64) {
    let deadline = Instant::now() + WAIT;
    let refused = || rig.owner.device.counters().refused(fault);
    while refused() < times {
        assert!(Instant::now() < deadline, "{fault}: {} times", refused());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn hostile_chains_come_back_and_the_queue_goes_on() {
    let untouched = (UPPER, 1 << 20);
    let at = GuestAddress;
    let cases: &[(&str, &[Descriptor])] = &[
        ("empty", &[(at(UPPER), 0, WRITE)]),
        ("outside of memory", &[(at(0x7000_0000), 1 << 21, WRITE)]),
        ("across a hole", &[(at(LOW_SIZE - 4096), 1 << 20, WRITE)]),
        ("past the end of the address space", &[(at(u64::MAX - 4096), 1 << 21, WRITE)]),
        ("4 GiB", &[(at(UPPER), u32::MAX, WRITE)]),
        ("readable, so not given away", &[(at(UPPER), 1 << 20, 0)]),
        ("a loop", &[(at(0x7000_0000), 4096, WRITE | NEXT)]),
        ("an indirect table that is none", &[(at(UPPER), 16, INDIRECT)]),
    ];
    let mut rig = Rig::new(REPORTING);
    rig.guest.start(&[INFLATE, DEFLATE, 2]);
    for (name, chain) in cases {
        rig.fill(untouched);
        for queue in [INFLATE, DEFLATE, 2] {
            rig.guest.queues[queue].offer(&rig.guest.memory, chain);
            rig.guest.wait_returned(queue);
        }
        assert_eq!(rig.content(untouched), 0xaa, "{name}");
        still_serves(&mut rig, 2, name);
    }
}

#[test]
fn a_broken_ring_is_counted_and_mended_by_a_restart() {
    let mut rig = Rig::new(REPORTING);
    rig.guest.start(&[2]);
    rig.guest.queues[2].offer_head(&rig.guest.memory, 1000);
    refused_once(&rig, Fault::BadChainHead, 1);
    let jumped = rig.guest.queues[2].avail.wrapping_add(5000);
    rig.guest.queues[2].set_avail(&rig.guest.memory, jumped);
    refused_once(&rig, Fault::BadAvailIndex, 1);

    vhost::VhostBackend::get_vring_base(&rig.guest.front_end, 2).unwrap();
    rig.guest.queues[2].clear(&rig.guest.memory);
    rig.guest.queues[2].start(&mut rig.guest.front_end, 2, 0);
    still_serves(&mut rig, 2, "after the restart");
}

#[test]
fn a_queue_that_does_not_exist_gives_everything_back() {
    let mut rig = Rig::new(0);
    rig.guest.start(&[2, 3, 4]);
    rig.fill(RANGES[0]);
    for (count, queue) in [2, 3, 4].into_iter().enumerate() {
        rig.guest.report(queue, &RANGES[..1]);
        rig.guest.wait_returned(queue);
        refused_once(&rig, Fault::UnusedQueue, count as u64 + 1);
    }
    assert_eq!(rig.content(RANGES[0]), 0xaa);
}

/// Kicked before it is enabled, and enabled before it is kicked: the chain is served when both are true.
#[test]
fn a_kick_before_the_queue_is_enabled_is_not_lost() {
    let mut rig = Rig::new(REPORTING);
    rig.guest.start(&[]);
    rig.fill(RANGES[0]);
    rig.guest.report(2, &RANGES[..1]);
    assert_eq!(rig.content(RANGES[0]), 0xaa);
    rig.guest.queues[2].start(&mut rig.guest.front_end, 2, 0);
    rig.guest.wait_returned(2);
    assert_eq!(rig.content(RANGES[0]), 0);
}
