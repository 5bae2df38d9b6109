//! Random events in any order against what must always hold.

use super::*;
use crate::session::drain::DrainId;
use fpr_protocol::PassEnd;
use proptest::prelude::*;

/// What a random driver may do.
#[derive(Clone, Debug)]
enum Step {
    Connect(u64),
    Hello(u64),
    Pong(u64),
    Report(u64, u8, u8, bool, u16),
    Prove(u64),
    Survey(u64),
    Finish(usize),
    Disconnect(u64),
    Stop(DeviceKind),
    NewMap(DeviceKind),
    Gate(bool),
    KernelReport(bool, u8),
    Poison(Option<u32>),
    Drain(u16),
    Reclaimed(u64),
    Wait(u16),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let connection = 1u64..4;
    let device = prop_oneof![Just(DeviceKind::Vsock), Just(DeviceKind::Balloon)];
    proptest::collection::vec(
        prop_oneof![
            connection.clone().prop_map(Step::Connect),
            connection.clone().prop_map(Step::Hello),
            connection.clone().prop_map(Step::Pong),
            (connection.clone(), 0u8..66, 0u8..8, any::<bool>(), 0u16..4000)
                .prop_map(|(c, first, count, offlined, age)| Step::Report(c, first, count, offlined, age)),
            connection.clone().prop_map(Step::Prove),
            connection.clone().prop_map(Step::Survey),
            (0usize..8).prop_map(Step::Finish),
            connection.prop_map(Step::Disconnect),
            device.clone().prop_map(Step::Stop),
            device.prop_map(Step::NewMap),
            any::<bool>().prop_map(Step::Gate),
            (any::<bool>(), 0u8..4).prop_map(|(inflated, ranges)| Step::KernelReport(inflated, ranges)),
            prop_oneof![Just(None), Just(Some(0)), Just(Some(0xaa))].prop_map(Step::Poison),
            (0u16..3000).prop_map(Step::Drain),
            (0u64..6).prop_map(Step::Reclaimed),
            (0u16..3000).prop_map(Step::Wait),
        ],
        0..120,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The invariants the safety argument rests on, whatever the order of events.
    #[test]
    fn invariants_hold_in_any_order(steps in steps()) {
        let mut session = Session::new(Config { max_jobs: 6, ..Config::default() }, 1);
        session.set_layout(Some(Box::new(TwoRegions)));
        let mut now = ms(0);
        let mut sequence = 0;
        let mut running: Vec<(JobId, Job, bool)> = Vec::new();
        let mut open_fences: Vec<(DeviceKind, u64)> = Vec::new();
        let mut fences = 0;
        let (mut inhibited, mut poisoned) = (false, false);
        // Kernel reports and drains that are not answered, with the number of their ranges.
        let (mut kernel_reports, mut drains): (BTreeMap<u64, usize>, Vec<u64>) = (BTreeMap::new(), Vec::new());
        let (mut next_report, mut next_drain) = (0, 0);
        let mut last_ping: BTreeMap<u64, u64> = BTreeMap::new();
        // Reports of the live session that are not answered.
        let mut unanswered: Vec<(u64, usize)> = Vec::new();
        for step in steps {
            let event = match step.clone() {
                Step::Connect(c) => Event::Connected(ConnectionId(c)),
                Step::Hello(c) => Event::Message(ConnectionId(c), hello()),
                Step::Pong(c) => {
                    let id = last_ping.get(&c).copied().unwrap_or(0);
                    Event::Message(ConnectionId(c), Message::Pong { id, now_ns: now.as_nanos() as u64 })
                }
                Step::Report(c, first, count, offlined, age) => {
                    sequence += 1;
                    let isolation = if offlined { Isolation::Offlined } else { Isolation::Claimed };
                    if matches!(&session.phase, Phase::Active(active) if active.connection.0 == c) {
                        unanswered.push((sequence, 1));
                    }
                    let sent = now.saturating_sub(ms(age.into()));
                    let ranges = [range(first.into(), count.into(), isolation)];
                    Event::Message(ConnectionId(c), report(sequence, sent, &ranges))
                }
                Step::Prove(c) => {
                    sequence += 1;
                    let pages = vec![GuestAddress(0)];
                    Event::Message(ConnectionId(c), Message::Prove(Prove { sequence, pages }))
                }
                Step::Survey(c) => {
                    sequence += 1;
                    Event::Message(ConnectionId(c), Message::Survey(Survey { sequence, ranges: vec![] }))
                }
                Step::Finish(n) if running.is_empty() || n >= running.len() => continue,
                Step::Finish(n) => {
                    let (id, job, _) = running.remove(n);
                    let output = match &job {
                        Job::Drop { .. } => all_dropped(&job),
                        Job::Discard { ranges, .. } => JobOutput::Drop(DropOutput {
                            results: ranges.iter().map(|range| Ok(range.bytes)).collect(),
                            ..DropOutput::default()
                        }),
                        Job::Prove { pages, .. } => JobOutput::Prove(vec![true; pages.len()]),
                        Job::Survey { .. } => JobOutput::Survey(vec![]),
                        Job::LookBack { .. } => JobOutput::LookedBack { looked_bytes: 1, backed_bytes: 1 },
                        Job::Look { .. } => JobOutput::Look(0, effect::Content::Zeros),
                    };
                    Event::JobFinished(id, output)
                }
                Step::Disconnect(c) => Event::Disconnected(ConnectionId(c)),
                Step::Stop(device) => {
                    fences += 1;
                    open_fences.push((device, fences));
                    Event::Stopped { device, fence: fences }
                }
                Step::NewMap(device) => {
                    fences += 1;
                    open_fences.push((device, fences));
                    Event::MapChanged { device, fence: fences }
                }
                Step::KernelReport(inflated, count) => {
                    next_report += 1;
                    kernel_reports.insert(next_report, count.into());
                    let source = if inflated { Source::Inflated } else { Source::Reported };
                    kernel::report(next_report, source, count.into(), now)
                }
                Step::Poison(poison_val) => {
                    poisoned = poison_val.is_some_and(|pattern| pattern != 0);
                    Event::PagePoison(poison_val)
                }
                Step::Drain(wait) => {
                    next_drain += 1;
                    drains.push(next_drain);
                    Event::Drain { id: DrainId(next_drain), until: now + ms(wait.into()) }
                }
                Step::Reclaimed(id) => match &session.phase {
                    Phase::Active(active) => {
                        let message = Message::Reclaimed { id, end: PassEnd::GaveBack };
                        Event::Message(active.connection, message)
                    }
                    _ => continue,
                },
                Step::Gate(closed) => {
                    inhibited = closed;
                    let gates = if closed { vec![(Gate::Operator, String::new())] } else { vec![] };
                    Event::Gates(GateSource::Operator, gates)
                }
                Step::Wait(wait) => {
                    now += ms(wait.into());
                    Event::Tick
                }
            };
            for action in session.handle(event, now) {
                match action {
                    Action::Start(id, job) => {
                        if let Job::Drop { deadline, items, .. } = &job {
                            prop_assert!(!inhibited && !poisoned, "dropped behind a closed gate: {step:?}");
                            prop_assert!(*deadline >= now, "a drop that is late from the start");
                            prop_assert!(*deadline <= now + ms(5000));
                            prop_assert!(!items.is_empty());
                        }
                        if let Job::Discard { deadline, .. } = &job {
                            prop_assert!(!inhibited && !poisoned, "dropped behind a closed gate: {step:?}");
                            prop_assert_eq!(*deadline, now + ms(5000));
                        }
                        running.push((id, job, false));
                    }
                    Action::CancelJobs(device) => {
                        let of_device = running.iter_mut().filter(|(_, job, _)| job.device() == device);
                        of_device.for_each(|(_, _, cancelled)| *cancelled = true);
                    }
                    Action::FencePassed(fence) => {
                        let at = open_fences.iter().position(|(_, open)| *open == fence);
                        let (device, _) = open_fences.remove(at.expect("a fence that nobody waits for"));
                        let behind = running.iter().any(|(_, job, _)| job.device() == device);
                        prop_assert!(!behind, "a fence passed with jobs of its device running");
                    }
                    Action::Answer(id, results) => {
                        prop_assert_eq!(kernel_reports.remove(&id.0), Some(results.len()), "answered once, in full");
                    }
                    Action::Drained(id, _) => {
                        let at = drains.iter().position(|open| *open == id.0);
                        drains.remove(at.expect("a drain answered twice"));
                    }
                    Action::Send(connection, Message::Welcome(_)) => {
                        let _ = connection;
                        let behind = running.iter().any(|(_, job, _)| job.device() == DeviceKind::Vsock);
                        prop_assert!(!behind, "welcomed with jobs of the session before running");
                        unanswered.clear();
                    }
                    Action::Send(connection, Message::Ping { id }) => {
                        last_ping.insert(connection.0, id);
                    }
                    Action::Send(_, Message::Ack(Ack { sequence, results })) => {
                        let at = unanswered.iter().position(|(open, _)| *open == sequence);
                        let (_, ranges) = unanswered.remove(at.expect("an answer nobody waits for"));
                        prop_assert_eq!(results.len(), ranges);
                    }
                    _ => {}
                }
            }
            if matches!(session.phase, Phase::Idle) {
                let mut jobs = running.iter().filter(|(_, job, _)| job.device() == DeviceKind::Vsock);
                prop_assert!(jobs.all(|(_, _, cancelled)| *cancelled), "jobs go on without a session");
                prop_assert!(drains.is_empty(), "waiting for an agent that is gone");
                unanswered.clear();
            }
            for device in [DeviceKind::Vsock, DeviceKind::Balloon] {
                let jobs = running.iter().filter(|(_, job, _)| job.device() == device);
                prop_assert_eq!(session.jobs_of(device), jobs.clone().count());
                let at_most = if device == DeviceKind::Vsock { 6 + 256 } else { 2 };
                prop_assert!(jobs.count() <= at_most);
            }
            // Whatever the kernel waits for has a job, and one whose device stopped was told to end.
            prop_assert_eq!(kernel_reports.len(), session.jobs_of(DeviceKind::Balloon));
            for (device, _) in &open_fences {
                let mut behind = running.iter().filter(|(_, job, _)| job.device() == *device).peekable();
                prop_assert!(behind.peek().is_some(), "a fence holds for nothing");
                prop_assert!(behind.any(|(_, _, cancelled)| *cancelled));
            }
            // Whatever is unanswered has a job; one that the operator cancelled still answers.
            let drops = running.iter().filter(|(_, job, _)| matches!(job, Job::Drop { .. })).count();
            prop_assert!(unanswered.len() <= drops, "{unanswered:?} without jobs");
        }
    }
}
