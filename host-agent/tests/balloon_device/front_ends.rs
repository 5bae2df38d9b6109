//! Front ends that break off or send what they must not: the next one is served all the same.

use std::os::fd::AsRawFd;

use fpr_host_agent::device::DeviceEvent;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use super::Rig;
use super::mock_guest::balloon::{Balloon, PAGE_POISON, REPORTING};
use super::mock_guest::{HIGH, memfd, region};

/// VERSION_1, PROTOCOL_FEATURES and VIRTIO_BALLOON_F_FREE_PAGE_HINT.
const HINTS: u64 = (1 << 32) | (1 << 30) | (1 << 3);

/// Ends the connection and waits until the owner knows.
fn hang_up(rig: &mut Rig) {
    rig.guest = Balloon::unconnected();
    rig.owner.find(|event| matches!(event, DeviceEvent::FrontEndGone { .. }).then_some(()));
}

#[test]
fn a_peer_may_close_between_any_two_messages() {
    type Step = fn(&mut Balloon);
    let steps: [Step; 7] = [
        |guest| guest.write_config(12, &[0; 4]).unwrap(),
        |guest| guest.front_end.set_features((1 << 32) | (1 << 30) | REPORTING | PAGE_POISON).unwrap(),
        Balloon::set_memory,
        |guest| guest.front_end.set_vring_num(2, 64).unwrap(),
        |guest| guest.start(&[0, 1, 2]),
        |guest| guest.report(2, &super::RANGES),
        |guest| assert!(guest.front_end.get_vring_base(2).is_ok()),
    ];
    let mut rig = Rig::new(REPORTING | PAGE_POISON);
    for end in 0..=steps.len() {
        for step in &steps[..end] {
            step(&mut rig.guest);
        }
        hang_up(&mut rig);
        rig.guest = Balloon::connect(&rig.dir.path().join("balloon.sock"), memfd(), REPORTING | PAGE_POISON);
    }
    assert_eq!(rig.owner.device.counters().front_ends_broken_off, 0);
}

#[test]
fn a_front_end_that_asks_for_the_impossible_is_disconnected_and_counted() {
    type Step = fn(&mut Balloon) -> bool;
    let cases: [(&str, Step); 4] = [
        ("a feature that is not offered", |guest| guest.front_end.set_features(HINTS).is_err()),
        ("a queue that does not exist", |guest| guest.front_end.set_vring_num(7, 64).is_err()),
        ("memory that may only be read", |guest| {
            let path = format!("/proc/self/fd/{}", guest.file.as_raw_fd());
            let file = std::fs::File::open(path).unwrap();
            guest.front_end.set_mem_table(&[region(&file, HIGH, 1 << 20, 0)]).is_err()
        }),
        ("more regions than a guest may have", |guest| {
            let page = |index: u64| region(&guest.file, index << 20, 4096, 0);
            let added = (0..600).take_while(|index| guest.front_end.add_mem_region(&page(*index)).is_ok());
            added.count() == 509
        }),
    ];
    let mut rig = Rig::new(REPORTING);
    for (count, (name, step)) in cases.into_iter().enumerate() {
        assert!(step(&mut rig.guest), "{name}: accepted");
        hang_up(&mut rig);
        assert_eq!(rig.owner.device.counters().front_ends_broken_off, count as u64 + 1, "{name}");
        rig.guest = Balloon::connect(&rig.dir.path().join("balloon.sock"), memfd(), REPORTING);
    }
    rig.guest.start(&[2]);
    rig.fill(super::RANGES[0]);
    rig.guest.report(2, &super::RANGES[..1]);
    rig.guest.wait_returned(2);
    assert_eq!(rig.content(super::RANGES[0]), 0);
}
