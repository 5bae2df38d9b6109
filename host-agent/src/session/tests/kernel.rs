//! Two devices: kernel reports beside an agent's session, and `drain`.

use super::*;
use crate::reporting::GuestRange;
use crate::session::counters::MemorySource;
use crate::session::drain::{DrainError, Drained};
use crate::session::kernel::{KernelReport, KernelReportId};

pub(super) fn report(id: u64, source: Source, ranges: u64, now: Duration) -> Event {
    let range = |n| GuestRange { start: GuestAddress(n * MIB2), bytes: MIB2 };
    let ranges = (0..ranges).map(range).collect();
    Event::KernelReported(KernelReport { id: KernelReportId(id), source, ranges, taken_after: now })
}

fn answer(actions: &[Action]) -> Vec<Result<u64, Refusal>> {
    let mut answers = actions.iter().filter_map(|action| match action {
        Action::Answer(_, results) => Some(results.clone()),
        _ => None,
    });
    answers.next().unwrap_or_else(|| panic!("no answer in {actions:?}"))
}

fn dropped(results: Vec<Result<u64, Refusal>>) -> JobOutput {
    JobOutput::Drop(DropOutput { results, ..DropOutput::default() })
}

fn without_agent() -> Session {
    Session::new(Config::default(), 0)
}

#[test]
fn a_kernel_report_needs_no_agent_and_is_answered_range_by_range() {
    let mut session = without_agent();
    let actions = session.handle(report(7, Source::Reported, 3, ms(10)), ms(11));
    let (id, job) = only_start(&actions);
    let Job::Discard { ranges, deadline } = &job else { panic!("{job:?}") };
    assert_eq!((ranges.len(), *deadline), (3, ms(5010)), "counted from before the chain was taken");
    let output = dropped(vec![Ok(MIB2), Ok(MIB2 - 4096), Err(Refusal::OutsideMemory)]);
    let actions = session.handle(Event::JobFinished(id, output), ms(12));
    assert_eq!(
        actions,
        [Action::Answer(KernelReportId(7), vec![Ok(MIB2), Ok(MIB2 - 4096), Err(Refusal::OutsideMemory)])]
    );
    let counters = &session.counters().sources[&MemorySource::KernelReported];
    assert_eq!((counters.reported_bytes, counters.dropped_bytes), (3 * MIB2, 2 * MIB2 - 4096));
    assert_eq!(counters.refused_bytes_by_reason, BTreeMap::from([(Refusal::OutsideMemory, MIB2)]));
    assert_eq!(session.counters().dropped_bytes(MemorySource::KernelInflated), 0);

    // The device has no memory map, or the worker did something else.
    let (id, _) = only_start(&session.handle(report(8, Source::Inflated, 2, ms(13)), ms(13)));
    let actions = session.handle(Event::JobFinished(id, JobOutput::Failed("no map".into())), ms(14));
    assert_eq!(answer(&actions), [Err(Refusal::OutsideMemory); 2]);
    assert_eq!(answer(&session.handle(report(9, Source::Reported, 0, ms(15)), ms(15))), []);
}

#[test]
fn every_gate_but_write_on_free_holds_for_the_kernel() {
    for gate in Gate::ALL {
        let mut session = without_agent();
        session.handle(Event::Gates(GateSource::Process, vec![(*gate, String::new())]), ms(1));
        let actions = session.handle(report(1, Source::Reported, 2, ms(2)), ms(2));
        if *gate == Gate::WriteOnFree {
            only_start(&actions);
        } else {
            assert_eq!(actions, [Action::Answer(KernelReportId(1), vec![Err(Refusal::Gated); 2])], "{gate}");
        }
    }
}

#[test]
fn a_poison_value_gates_both_until_it_is_gone() {
    let mut session = active();
    let (id, _) = only_start(&session.handle(report(1, Source::Reported, 1, ms(3)), ms(3)));
    let actions = session.handle(Event::PagePoison(Some(0xaaaa_aaaa)), ms(3));
    assert!(actions.contains(&Action::CancelJobs(DeviceKind::Balloon)), "{actions:?}");
    assert!(actions.contains(&Action::Send(C1, Message::Inhibit(vec![Gate::PagePoison]))), "{actions:?}");
    assert_eq!(session.closed_gates()[0].source, GateSource::Balloon);
    assert!(session.closed_gates()[0].detail.contains("0xaaaaaaaa"));
    let actions = session.handle(Event::JobFinished(id, dropped(vec![Err(Refusal::Cancelled)])), ms(3));
    assert_eq!(answer(&actions), [Err(Refusal::Gated)], "cancelled by the gate");
    assert_eq!(answer(&session.handle(report(2, Source::Inflated, 1, ms(4)), ms(4))), [Err(Refusal::Gated)]);
    // A stop alone, as when the VM is paused, says nothing about the value.
    session.handle(Event::Stopped { device: DeviceKind::Balloon, fence: 1 }, ms(5));
    assert_eq!(answer(&session.handle(report(3, Source::Reported, 1, ms(5)), ms(5))), [Err(Refusal::Gated)]);
    for open in [None, Some(0)] {
        session.handle(Event::PagePoison(Some(1)), ms(6));
        session.handle(Event::PagePoison(open), ms(7));
        let (id, _) = only_start(&session.handle(report(4, Source::Reported, 1, ms(8)), ms(8)));
        session.handle(Event::JobFinished(id, dropped(vec![Ok(MIB2)])), ms(8));
    }
}

#[test]
fn each_device_waits_for_its_own_drops_only() {
    let mut session = active();
    let ranges = [range(1, 1, Isolation::Claimed)];
    let (agents, job) = only_start(&session.handle(Event::Message(C1, super::report(1, ms(4), &ranges)), ms(4)));
    let (kernels, _) = only_start(&session.handle(report(1, Source::Reported, 1, ms(4)), ms(4)));

    let actions = session.handle(Event::Stopped { device: DeviceKind::Balloon, fence: 1 }, ms(5));
    assert_eq!(actions[0], Action::CancelJobs(DeviceKind::Balloon));
    assert!(!actions.contains(&Action::FencePassed(1)), "{actions:?}");
    assert!(matches!(session.agent(), AgentStatus::Active { .. }), "the agent's session goes on");
    let actions = session.handle(Event::JobFinished(kernels, dropped(vec![Err(Refusal::Cancelled)])), ms(6));
    assert_eq!(actions, [Action::Answer(KernelReportId(1), vec![Err(Refusal::Cancelled)]), Action::FencePassed(1)]);
    let actions = session.handle(Event::JobFinished(agents, all_dropped(&job)), ms(7));
    assert_eq!(ack(&actions), [RangeResult::Dropped { bytes: MIB2 }]);

    let (kernels, _) = only_start(&session.handle(report(2, Source::Reported, 1, ms(8)), ms(8)));
    let actions = session.handle(Event::MapChanged { device: DeviceKind::Vsock, fence: 2 }, ms(9));
    assert!(actions.contains(&Action::FencePassed(2)), "{actions:?}");
    assert!(!actions.iter().any(|action| matches!(action, Action::CancelJobs(_))), "{actions:?}");
    let actions = session.handle(Event::MapChanged { device: DeviceKind::Balloon, fence: 3 }, ms(10));
    assert_eq!(actions, [Action::CancelJobs(DeviceKind::Balloon)]);
    let actions = session.handle(Event::JobFinished(kernels, dropped(vec![Ok(MIB2)])), ms(11));
    assert_eq!(actions, [Action::Answer(KernelReportId(2), vec![Ok(MIB2)]), Action::FencePassed(3)]);
}

#[test]
fn ineffective_is_measured_for_each_device_by_itself() {
    let mut session = active();
    let mut now = ms(4);
    let mut report_both = |session: &mut Session, agent: u64, kernel: u64| {
        now += ms(1);
        let sequence = now.as_millis() as u64;
        let ranges = [range(8, 1, Isolation::Claimed)];
        let (id, job) = only_start(&session.handle(Event::Message(C1, super::report(sequence, now, &ranges)), now));
        let JobOutput::Drop(mut output) = all_dropped(&job) else { panic!() };
        output.still_backed_bytes = agent;
        session.handle(Event::JobFinished(id, JobOutput::Drop(output)), now);
        let actions = session.handle(report(sequence, Source::Reported, 1, now), now);
        if actions.iter().any(|action| matches!(action, Action::Start(..))) {
            let (id, _) = only_start(&actions);
            let JobOutput::Drop(mut output) = dropped(vec![Ok(MIB2)]) else { panic!() };
            output.still_backed_bytes = kernel;
            session.handle(Event::JobFinished(id, JobOutput::Drop(output)), now);
        }
    };
    report_both(&mut session, MIB2, 0);
    report_both(&mut session, MIB2, 0);
    report_both(&mut session, 0, MIB2);
    report_both(&mut session, 0, MIB2);
    assert!(session.closed_gates().is_empty(), "no three in a row of one source");
    report_both(&mut session, 0, MIB2);
    assert_eq!(session.closed_gates()[0].gate, Gate::Ineffective);
    assert_eq!(session.closed_gates()[0].source, GateSource::Balloon);
    session.handle(Event::Stopped { device: DeviceKind::Vsock, fence: 1 }, ms(20));
    assert_eq!(session.closed_gates().len(), 1, "the vsock device's stop says nothing of the balloon");
    session.handle(Event::Stopped { device: DeviceKind::Balloon, fence: 2 }, ms(21));
    assert!(session.closed_gates().is_empty());
}

#[test]
fn reports_beyond_the_bound_are_refused() {
    let mut session = without_agent();
    for id in 0..2 {
        only_start(&session.handle(report(id, Source::Reported, 1, ms(1)), ms(1)));
    }
    assert_eq!(answer(&session.handle(report(2, Source::Reported, 1, ms(1)), ms(1))), [Err(Refusal::TooMuchInFlight)]);
}

#[test]
fn the_agent_is_told_whether_the_kernel_reports() {
    let told = |active| Action::Send(C1, Message::KernelReporting { active });
    let mut session = active();
    let inflated = session.handle(report(1, Source::Inflated, 1, ms(3)), ms(3));
    assert!(!inflated.contains(&told(true)), "an inflated page is no report");
    assert!(session.handle(report(2, Source::Reported, 0, ms(4)), ms(4)).contains(&told(true)));
    assert!(!session.handle(report(3, Source::Reported, 0, ms(5)), ms(5)).contains(&told(true)), "once");
    let stopped = session.handle(Event::Stopped { device: DeviceKind::Balloon, fence: 1 }, ms(6));
    assert!(stopped.contains(&told(false)), "{stopped:?}");
    session.handle(report(4, Source::Reported, 0, ms(7)), ms(7));
    session.handle(Event::Disconnected(C1), ms(8));
    session.handle(Event::Connected(C1), ms(9));
    let welcomed = session.handle(Event::Message(C1, hello()), ms(9));
    assert!(welcomed.contains(&told(true)), "the next session hears it, too: {welcomed:?}");
}

#[test]
fn a_drain_asks_the_agent_and_tells_what_came_back() {
    let id = DrainId(5);
    let drain = |until| Event::Drain { id, until };
    let mut session = active();
    let actions = session.handle(drain(ms(1000)), ms(3));
    assert_eq!(actions, [Action::Send(C1, Message::Reclaim { id: 5 })]);
    let (job, drop) = only_start(
        &session.handle(Event::Message(C1, super::report(1, ms(4), &[range(1, 2, Isolation::Claimed)])), ms(4)),
    );
    session.handle(Event::JobFinished(job, all_dropped(&drop)), ms(5));
    let reclaimed = Message::Reclaimed { id: 5, end: PassEnd::GaveBack };
    let actions = session.handle(Event::Message(C1, reclaimed.clone()), ms(6));
    let [Action::Drained(DrainId(5), Ok(Drained { pass: Some(PassEnd::GaveBack), dropped_bytes }))] = &actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!(dropped_bytes[&MemorySource::AgentClaimed], 2 * MIB2);
    assert_eq!(dropped_bytes.values().sum::<u64>(), 2 * MIB2);
    assert_eq!(session.handle(Event::Message(C1, reclaimed), ms(7)), [], "nobody waits any more");

    session.handle(drain(ms(1000)), ms(8));
    assert!(session.next_deadline() <= Some(ms(1000)));
    let actions = session.handle(Event::Tick, ms(1000));
    assert!(matches!(&actions[..], [Action::Drained(_, Ok(Drained { pass: None, .. })), ..]), "{actions:?}");

    session.handle(drain(ms(2000)), ms(1001));
    let actions = session.handle(Event::Disconnected(C1), ms(1002));
    assert!(actions.contains(&Action::Drained(id, Err(DrainError::AgentLost))), "{actions:?}");
    let actions = session.handle(drain(ms(2000)), ms(1003));
    assert_eq!(actions, [Action::Drained(id, Err(DrainError::NoAgent))]);

    let mut session = active();
    session.handle(Event::Gates(GateSource::Operator, vec![(Gate::Operator, String::new())]), ms(3));
    let actions = session.handle(drain(ms(1000)), ms(4));
    assert_eq!(actions, [Action::Drained(id, Err(DrainError::Gated(vec![Gate::Operator])))]);
}
