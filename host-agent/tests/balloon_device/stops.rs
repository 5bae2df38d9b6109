//! Requests that end what is under way: they are answered when nothing is.

use std::time::{Duration, Instant};

use fpr_host_agent::device::{Answer, DeviceEvent, Done};
use vhost::VhostBackend;

use super::mock_guest::WAIT;
use super::mock_guest::balloon::{Balloon, INFLATE, REPORTING};
use super::{RANGES, Rig};

/// A guest whose report is with the test.
fn reporting() -> (Rig, Answer) {
    let mut rig = Rig::new(REPORTING);
    rig.guest.start(&[INFLATE, 2]);
    rig.owner.hold(true);
    rig.guest.report(2, &RANGES);
    let answer = rig.owner.find(|event| match event {
        DeviceEvent::Reported { answer, .. } => Some(answer),
        _ => None,
    });
    (rig, answer)
}

fn fence(rig: &Rig) -> Done {
    rig.owner.find(|event| match event {
        DeviceEvent::Stopped { done } | DeviceEvent::MemoryMap { done, .. } | DeviceEvent::FrontEndGone { done } => {
            Some(done)
        }
        _ => None,
    })
}

/// Runs `request` beside a report in flight: it waits for the report's answer, then for the fence, and when it is over
/// the report's buffers have been returned.
fn waits_for_the_report(request: impl FnOnce(&mut Balloon) + Send + 'static) {
    let (mut rig, answer) = reporting();
    let memory = rig.guest.memory.clone();
    let mut guest = std::mem::replace(&mut rig.guest, Balloon::unconnected());
    let requesting = std::thread::spawn(move || {
        request(&mut guest);
        guest
    });
    std::thread::sleep(Duration::from_millis(200));
    assert!(!requesting.is_finished(), "answered while a report was in flight");
    answer.send(vec![Ok(0), Ok(0)]);
    let done = fence(&rig);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!requesting.is_finished(), "answered before the owner was done");
    done.signal();
    let guest = requesting.join().unwrap();
    assert_eq!(guest.queues[2].used_index(&memory), 1, "the buffers were not returned first");
}

#[test]
fn get_vring_base_waits_for_the_report_and_says_that_it_was_served() {
    waits_for_the_report(|guest| assert_eq!(guest.front_end.get_vring_base(2).unwrap(), 1));
}

#[test]
fn get_vring_base_of_another_queue_waits_too() {
    waits_for_the_report(|guest| assert_eq!(guest.front_end.get_vring_base(INFLATE).unwrap(), 0));
}

#[test]
fn a_new_memory_map_waits_for_the_report() {
    waits_for_the_report(Balloon::set_memory);
}

#[test]
fn after_a_disconnect_nothing_is_returned_and_the_next_front_end_waits_for_the_owner() {
    let (mut rig, answer) = reporting();
    let socket = rig.dir.path().join("balloon.sock");
    let file = rig.guest.file.try_clone().unwrap();
    let lost = std::mem::replace(&mut rig.guest, Balloon::unconnected());
    let (memory, queues) = (lost.memory.clone(), lost.queues);
    drop(lost.front_end);
    let connecting = std::thread::spawn(move || Balloon::connect(&socket, file, REPORTING));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!connecting.is_finished(), "accepted while a report was in flight");

    answer.send(vec![Ok(0), Ok(0)]);
    let done = fence(&rig);
    assert_eq!(queues[2].used_index(&memory), 0, "the front end has read the index; what comes after is served twice");
    assert!(!connecting.is_finished(), "accepted before the owner was done");
    done.signal();
    rig.owner.hold(false);
    rig.guest = connecting.join().unwrap();
}

/// A daemon that died took a chain and never returned it: the used index is where the next one goes on.
#[test]
fn a_chain_that_was_never_returned_is_served_after_the_reconnect() {
    let mut rig = Rig::new(REPORTING);
    rig.guest.start(&[2]);
    rig.guest.report(2, &RANGES[..1]);
    rig.guest.wait_returned(2);
    rig.fill(RANGES[1]);
    // Its kick reaches nobody: the queue is stopped.
    rig.guest.front_end.get_vring_base(2).unwrap();
    rig.guest.report(2, &RANGES[1..]);
    let queues = std::mem::take(&mut rig.guest.queues);

    rig.reconnect(REPORTING);
    rig.guest.queues = queues;
    assert_eq!(rig.content(RANGES[1]), 0xaa);
    rig.guest.start(&[2]);
    rig.guest.wait_returned(2);
    assert_eq!(rig.content(RANGES[1]), 0);
    assert_eq!(rig.owner.device.counters().reporting.chains, 2);
}

#[test]
fn an_owner_that_is_gone_drops_nothing_and_holds_nothing_up() {
    let (mut rig, answer) = reporting();
    rig.fill(RANGES[0]);
    drop(answer);
    rig.guest.wait_returned(2);
    assert_eq!(rig.content(RANGES[0]), 0xaa);
    rig.owner.hold(false);
    rig.owner.shutdown();
    assert!(!rig.dir.path().join("balloon.sock").exists());
}

/// The queue thread gives way between two chains, however many wait.
#[test]
fn a_guest_that_never_pauses_cannot_hold_up_a_request() {
    const CHAINS: u64 = 60;
    let mut rig = Rig::new(REPORTING);
    rig.owner.hold(true);
    for _ in 0..CHAINS {
        rig.guest.report(2, &RANGES[..1]);
    }
    // The fence of the memory map is the test's too.
    let mut guest = std::mem::replace(&mut rig.guest, Balloon::unconnected());
    let starting = std::thread::spawn(move || {
        guest.start(&[2]);
        guest
    });
    fence(&rig).signal();
    let mut guest = starting.join().unwrap();
    let mut answered = 0;
    let answer_next = || {
        let answer = rig.owner.find(|event| match event {
            DeviceEvent::Reported { answer, .. } => Some(answer),
            _ => None,
        });
        answer.send(vec![Ok(0)]);
    };
    let asking = std::thread::spawn(move || {
        guest.read_config(0, 16);
        guest
    });
    while !asking.is_finished() && answered < CHAINS {
        answer_next();
        answered += 1;
        // Time for the request to be answered, on a busy machine: by now the next report waits for the test.
        let deadline = Instant::now() + Duration::from_millis(300);
        while !asking.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(answered < CHAINS, "answered after {answered} of {CHAINS} chains");
    rig.owner.hold(false);
    // The one that was passed on before that.
    answer_next();
    rig.guest = asking.join().unwrap();
}

/// The end of the daemon cuts the connection when the report is back, not before: a front end reads the used index then.
#[test]
fn a_daemon_that_ends_returns_the_report_before_it_cuts_the_connection() {
    let (rig, answer) = reporting();
    rig.owner.device.shutdown();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!hung_up(&rig), "cut with a report under way");
    answer.send(vec![Ok(0), Ok(0)]);
    let deadline = Instant::now() + WAIT;
    while !hung_up(&rig) {
        assert!(Instant::now() < deadline, "never cut");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(rig.guest.queues[2].used_index(&rig.guest.memory), 1);
    rig.owner.hold(false);
}

fn hung_up(rig: &Rig) -> bool {
    use nix::sys::socket::{MsgFlags, recv};
    use std::os::fd::AsRawFd;
    recv(rig.guest.front_end.as_raw_fd(), &mut [0], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) == Ok(0)
}

/// A front end that read the used index a moment too early names a chain that the guest has back and uses.
#[test]
fn a_chain_that_was_returned_is_never_taken_again() {
    let mut rig = Rig::new(REPORTING);
    rig.guest.start(&[2]);
    rig.guest.report(2, &RANGES[..1]);
    rig.guest.wait_returned(2);
    rig.fill(RANGES[0]);
    rig.guest.front_end.get_vring_base(2).unwrap();
    let guest = &mut rig.guest;
    guest.queues[2].start(&mut guest.front_end, 2, 0);
    rig.guest.report(2, &RANGES[1..]);
    rig.guest.wait_returned(2);
    assert_eq!(rig.content(RANGES[0]), 0xaa, "memory in use was dropped");
    assert_eq!(rig.guest.queues[2].used_index(&rig.guest.memory), 2);
}
