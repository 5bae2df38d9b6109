//! The safety rule under answers that are late, lost or out of order.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Late {
    Deliver,
    Kernel(usize),
    LinkDown,
    LinkUp,
    Gate(bool),
    Wait(u64),
    Free(u64),
    HostWorks(usize),
}

/// Random order of everything that can be late or lost: kernel answers, frames in both directions, links, gates. The
/// host may drop a report from the moment it was sent until it answered, was fenced, or its time is over.
fn steps() -> impl Strategy<Value = Vec<Late>> {
    proptest::collection::vec(
        prop_oneof![
            Just(Late::Deliver),
            Just(Late::Deliver),
            (0usize..4).prop_map(Late::HostWorks),
            (0usize..4).prop_map(Late::HostWorks),
            (0usize..4).prop_map(Late::Kernel),
            (0usize..4).prop_map(Late::Kernel),
            (0usize..4).prop_map(Late::Kernel),
            Just(Late::LinkDown),
            Just(Late::LinkUp),
            any::<bool>().prop_map(Late::Gate),
            (1u64..3000).prop_map(Late::Wait),
            (1u64..300).prop_map(Late::Wait),
            (0u64..1000).prop_map(|mib| Late::Free(mib << 20)),
        ],
        0..250,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn nothing_the_host_may_still_drop_is_ever_returned(steps in steps()) {
        let mut world = World::new(facts());
        world.agent.self_test = SelfTest::Passed;
        let mut linked = false;
        let mut nonce = 0;
        // Kernel work ordered and not done; frames to the host, to the guest; reports the host may act on.
        let mut kernel: Vec<Action> = Vec::new();
        let mut to_host: Vec<Message> = Vec::new();
        let mut to_guest: Vec<Message> = Vec::new();
        // sequence -> (pages, sent at)
        let mut live: BTreeMap<u64, (Vec<u64>, Duration)> = BTreeMap::new();
        let last = steps.len();
        // In the end everything is answered, so that everything held must be back.
        let settle = (0..200).map(|n| match n % 4 {
            0 => Late::Kernel(0),
            1 => Late::HostWorks(0),
            2 => Late::Deliver,
            _ => Late::Wait(100),
        });
        let end = [Late::LinkDown, Late::Wait(60_000), Late::Kernel(0)];
        for (index, step) in steps.into_iter().chain(settle).chain(end.clone()).chain((0..100).map(|_| Late::Kernel(0))).enumerate() {
            let event = match step {
                Late::Kernel(n) if kernel.is_empty() || n >= kernel.len() => continue,
                Late::Kernel(n) => {
                    let action = kernel.remove(n);
                    match world.act(action) { Some(event) => event, None => continue }
                }
                Late::HostWorks(n) if to_host.is_empty() || n >= to_host.len() => continue,
                Late::HostWorks(_) => {
                    let message = to_host.remove(0);
                    match message {
                        Message::Hello(_) => {
                            // The fence: nothing of before is dropped any more.
                            live.clear();
                            nonce += 1;
                            to_guest.push(welcome(nonce));
                            to_guest.push(Message::Ping { id: nonce });
                        }
                        Message::Report(report) => {
                            let (pages, at) = live.get(&report.sequence).cloned().unwrap();
                            // A report older than the lease is refused; else it is dropped now.
                            let expired = world.now > at + ms(2000);
                            for n in &pages {
                                if !expired {
                                    prop_assert!(!world.free.contains(n), "huge page {n} dropped while in use");
                                    world.backed.remove(n);
                                }
                            }
                            let result = if expired { RangeResult::Refused(Refusal::LeaseExpired) }
                                else { RangeResult::Dropped { bytes: HP } };
                            live.remove(&report.sequence);
                            let results = vec![result; report.ranges.len()];
                            to_guest.push(Message::Ack(Ack { sequence: report.sequence, results }));
                        }
                        other => to_guest.extend(world.host(other)),
                    }
                    continue;
                }
                Late::Deliver if to_guest.is_empty() || !linked => continue,
                Late::Deliver => Event::Message(to_guest.remove(0)),
                Late::LinkDown if !linked => continue,
                Late::LinkDown => {
                    linked = false;
                    to_guest.clear();
                    // What is on its way may still reach the host.
                    Event::LinkDown
                }
                Late::LinkUp if linked || index >= last + 200 => continue,
                Late::LinkUp => {
                    linked = true;
                    to_host.retain(|message| matches!(message, Message::Report(_)));
                    Event::LinkUp
                }
                Late::Gate(closed) if linked => {
                    to_guest.push(if closed { Message::Inhibit(vec![Gate::Operator]) } else { Message::Resume });
                    continue;
                }
                Late::Gate(_) => continue,
                Late::Wait(time) => {
                    world.now += ms(time);
                    Event::Tick
                }
                Late::Free(free_bytes) => Event::Watch { free_bytes, stalled: false },
            };
            for action in world.agent.handle(event, world.now) {
                match action {
                    Action::Send(message) => {
                        if let Message::Report(report) = &message {
                            let pages = report.ranges.iter().flat_map(|reported| {
                                let first = reported.range.start.0 / HP;
                                first..first + u64::from(reported.range.count)
                            });
                            live.insert(report.sequence, (pages.collect(), ms(report.sent_at_ns / 1_000_000)));
                        }
                        to_host.push(message);
                    }
                    Action::Disconnect(_) => {}
                    Action::Note(_) => {}
                    Action::Online(block) => {
                        for (pages, at) in live.values() {
                            let over = world.now >= *at + ms(5000);
                            prop_assert!(over || pages.iter().all(|n| n / 64 != block.0), "block returned too early");
                        }
                        kernel.push(Action::Online(block));
                    }
                    Action::Release(batch) => {
                        for (pages, at) in live.values() {
                            let over = world.now >= *at + ms(5000);
                            prop_assert!(over || world.batches[&batch].iter().all(|page| !pages.contains(page)), "batch released too early");
                        }
                        world.act(Action::Release(batch));
                    }
                    cookies @ Action::WriteCookies(..) => { world.act(cookies); }
                    other => kernel.push(other),
                }
            }
            let deadline = world.agent.next_deadline();
            prop_assert!(deadline.is_none_or(|at| at > world.now), "the main loop would spin: {deadline:?}");
        }
        prop_assert!(world.agent.is_clear(), "left isolated: {:?}", world.agent.held);
        prop_assert!(world.offline.is_empty() && world.batches.is_empty());
    }
}
