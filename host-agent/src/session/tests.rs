//! The session against its rules: by example, then by random events against what must always hold.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

use super::job::{DropOutput, JobOutput};
use super::*;
use crate::reporting::Source;
use fpr_protocol::message::{Ack, FreedPages, Prove, RangeResult, Report, Survey};
use fpr_protocol::{Isolation, PassEnd, ReportedRange, Version, VersionRange};

mod kernel;
mod random;
mod refault;

const MIB2: u64 = 2 << 20;
const C1: ConnectionId = ConnectionId(1);
const C2: ConnectionId = ConnectionId(2);

/// Memory from 0 to 64 huge pages in two regions, cut at 32.
struct TwoRegions;

impl Layout for TwoRegions {
    fn regions(&self) -> Vec<Region> {
        [0, 32].map(|n| Region { start: GuestAddress(n * MIB2), bytes: 32 * MIB2 }).to_vec()
    }

    fn check(&self, ranges: &[HugePageRange], size: HugePageSize) -> Vec<Result<usize, Refusal>> {
        ranges
            .iter()
            .map(|range| {
                let bytes = range.check(size).map_err(Refusal::from)?;
                if bytes.end > 64 * MIB2 {
                    return Err(Refusal::OutsideMemory);
                }
                let (first, last) = (bytes.start / (32 * MIB2), (bytes.end - 1) / (32 * MIB2));
                if first == last { Ok(first as usize) } else { Err(Refusal::CrossesRegions) }
            })
            .collect()
    }

    fn region_of(&self, address: GuestAddress) -> Option<usize> {
        (address.0 < 64 * MIB2).then_some((address.0 / (32 * MIB2)) as usize)
    }
}

fn hello() -> Message {
    Message::Hello(Hello {
        versions: VersionRange::SUPPORTED,
        agent_version: "1".into(),
        boot_id: [0; 16],
        page_size: 4096,
        huge_page_order: 9,
        memory_block_bytes: 128 << 20,
        memory_total_bytes: 1 << 30,
        kernel_release: "6.12".into(),
        freed_pages: FreedPages::Untouched,
        confidential: false,
        now_ns: 0,
    })
}

fn range(first: u64, count: u32, isolation: Isolation) -> ReportedRange {
    ReportedRange { range: HugePageRange { start: GuestAddress(first * MIB2), count }, isolation }
}

fn report(sequence: u64, sent: Duration, ranges: &[ReportedRange]) -> Message {
    Message::Report(Report { sequence, sent_at_ns: sent.as_nanos() as u64, ranges: ranges.to_vec() })
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A session whose guest clock equals the host's, past `Hello` and the first `Pong`, on connection C1.
fn active() -> Session {
    let mut session = Session::new(Config::default(), 100);
    session.set_layout(Some(Box::new(TwoRegions)));
    session.handle(Event::Connected(C1), ms(0));
    let actions = session.handle(Event::Message(C1, hello()), ms(1));
    assert!(matches!(&actions[0], Action::Send(C1, Message::Welcome(w)) if w.version == Version::V1_0), "{actions:?}");
    assert!(actions.contains(&Action::Send(C1, Message::Ping { id: 1 })), "{actions:?}");
    session.handle(Event::Message(C1, Message::Pong { id: 1, now_ns: 2_000_000 }), ms(2));
    session
}

fn prove_all(session: &mut Session, sequence: u64, now: Duration) {
    let pages = vec![GuestAddress(0), GuestAddress(40 * MIB2)];
    let (id, _) = only_start(&session.handle(Event::Message(C1, Message::Prove(Prove { sequence, pages })), now));
    session.handle(Event::JobFinished(id, JobOutput::Prove(vec![true, true])), now);
}

fn only_start(actions: &[Action]) -> (JobId, Job) {
    let mut starts = actions.iter().filter_map(|action| match action {
        Action::Start(id, job) => Some((*id, job.clone())),
        _ => None,
    });
    let start = starts.next().unwrap_or_else(|| panic!("no job in {actions:?}"));
    assert!(starts.next().is_none(), "more than one job in {actions:?}");
    start
}

fn ack(actions: &[Action]) -> Vec<RangeResult> {
    actions
        .iter()
        .find_map(|action| match action {
            Action::Send(_, Message::Ack(Ack { results, .. })) => Some(results.clone()),
            _ => None,
        })
        .unwrap_or_else(|| panic!("no Ack in {actions:?}"))
}

fn closed_for(actions: &[Action], connection: ConnectionId) -> Option<CloseReason> {
    actions.iter().find_map(|action| match action {
        Action::Close(closed, reason) if *closed == connection => Some(*reason),
        _ => None,
    })
}

fn all_dropped(job: &Job) -> JobOutput {
    let Job::Drop { items, size, .. } = job else { panic!("{job:?}") };
    JobOutput::Drop(DropOutput {
        results: items.iter().map(|item| Ok(item.range.bytes(*size))).collect(),
        ..DropOutput::default()
    })
}

#[test]
fn a_report_is_dropped_and_answered_range_by_range() {
    let mut session = active();
    prove_all(&mut session, 1, ms(3));
    let ranges = [
        range(1, 2, Isolation::Claimed),
        range(30, 4, Isolation::Offlined),
        range(63, 2, Isolation::Claimed),
        range(40, 8, Isolation::Offlined),
        range(50, 1, Isolation::Claimed),
    ];
    let (id, job) = only_start(&session.handle(Event::Message(C1, report(2, ms(4), &ranges)), ms(5)));
    let Job::Drop { items, deadline, key, .. } = &job else { panic!("{job:?}") };
    assert_eq!(items.iter().map(|item| item.first_cookie).collect::<Vec<_>>(), [Some(0), None, Some(4)]);
    assert_eq!((key.session_nonce, key.sequence), (100, 2));
    // The clock sample was taken between 1 ms and 2 ms, so the report may be a millisecond older than it says.
    assert_eq!(*deadline, ms(3) + ms(5000));
    let output =
        DropOutput { results: vec![Ok(2 * MIB2), Ok(8 * MIB2), Err(Refusal::CookieMismatch)], ..DropOutput::default() };
    let results = ack(&session.handle(Event::JobFinished(id, JobOutput::Drop(output)), ms(6)));
    assert_eq!(
        results,
        [
            RangeResult::Dropped { bytes: 2 * MIB2 },
            RangeResult::Refused(Refusal::CrossesRegions),
            RangeResult::Refused(Refusal::OutsideMemory),
            RangeResult::Dropped { bytes: 8 * MIB2 },
            RangeResult::Refused(Refusal::CookieMismatch),
        ]
    );
    let counters = session.counters();
    assert_eq!((counters.huge_pages_reported, counters.huge_pages_dropped, counters.huge_pages_refused), (17, 10, 7));
    assert_eq!((counters.huge_pages_offlined, counters.huge_pages_claimed), (12, 5));
}

#[test]
fn offlined_memory_needs_a_proven_region_and_claims_prove_theirs() {
    let mut session = active();
    let offlined = [range(0, 1, Isolation::Offlined)];
    let actions = session.handle(Event::Message(C1, report(1, ms(4), &offlined)), ms(5));
    assert_eq!(ack(&actions), [RangeResult::Refused(Refusal::AddressUnproven)]);
    let claimed = [range(1, 1, Isolation::Claimed)];
    let (id, job) = only_start(&session.handle(Event::Message(C1, report(2, ms(5), &claimed)), ms(6)));
    session.handle(Event::JobFinished(id, all_dropped(&job)), ms(7));
    only_start(&session.handle(Event::Message(C1, report(3, ms(8), &offlined)), ms(8)));
    // One wrong cookie takes all proofs back.
    let pages = vec![GuestAddress(0), GuestAddress(MIB2)];
    let actions = session.handle(Event::Message(C1, Message::Prove(Prove { sequence: 4, pages })), ms(9));
    let (id, _) = only_start(&actions);
    session.handle(Event::JobFinished(id, JobOutput::Prove(vec![true, false])), ms(9));
    let actions = session.handle(Event::Message(C1, report(5, ms(10), &offlined)), ms(10));
    assert_eq!(ack(&actions), [RangeResult::Refused(Refusal::AddressUnproven)]);
}

#[test]
fn an_operator_stops_what_was_ordered_before() {
    let mut session = active();
    let ranges = [range(1, 1, Isolation::Claimed), range(3, 1, Isolation::Claimed)];
    let (id, _) = only_start(&session.handle(Event::Message(C1, report(1, ms(4), &ranges)), ms(5)));
    let inhibit = vec![(Gate::Operator, "snapshot".to_owned())];
    let actions = session.handle(Event::Gates(GateSource::Operator, inhibit), ms(6));
    assert!(actions.contains(&Action::CancelJobs(DeviceKind::Vsock)), "{actions:?}");
    let output = DropOutput { results: vec![Ok(MIB2), Err(Refusal::Cancelled)], ..DropOutput::default() };
    let results = ack(&session.handle(Event::JobFinished(id, JobOutput::Drop(output)), ms(7)));
    assert_eq!(results, [RangeResult::Dropped { bytes: MIB2 }, RangeResult::Refused(Refusal::Gated)]);
}

#[test]
fn lease_future_and_unknown_clock_are_refused_by_name() {
    let ranges = [range(1, 1, Isolation::Claimed)];
    let mut session = active();
    let late = session.handle(Event::Message(C1, report(1, ms(4), &ranges)), ms(2010));
    assert_eq!(ack(&late), [RangeResult::Refused(Refusal::LeaseExpired)]);
    assert!(late.contains(&Action::Send(C1, Message::Ping { id: 2 })), "the clock is asked again: {late:?}");
    let future = session.handle(Event::Message(C1, report(2, ms(9000), &ranges)), ms(2011));
    assert_eq!(ack(&future), [RangeResult::Refused(Refusal::FromFuture)]);

    let mut session = Session::new(Config::default(), 0);
    session.set_layout(Some(Box::new(TwoRegions)));
    session.handle(Event::Connected(C1), ms(0));
    session.handle(Event::Message(C1, hello()), ms(1));
    let unknown = session.handle(Event::Message(C1, report(1, ms(1), &ranges)), ms(2));
    assert_eq!(ack(&unknown), [RangeResult::Refused(Refusal::ClockUnknown)]);
}

#[test]
fn violations_close_the_connection_by_name() {
    let ranges = [range(1, 1, Isolation::Claimed)];
    let mut session = Session::new(Config::default(), 0);
    session.handle(Event::Connected(C1), ms(0));
    let no_hello = session.handle(Event::Message(C1, report(1, ms(0), &ranges)), ms(0));
    assert_eq!(closed_for(&no_hello, C1), Some(CloseReason::UnexpectedMessage));

    let mut session = active();
    session.handle(Event::Connected(C2), ms(3));
    let second = session.handle(Event::Message(C2, hello()), ms(3));
    assert_eq!(closed_for(&second, C2), Some(CloseReason::SecondSession));
    assert!(matches!(session.agent(), AgentStatus::Active { .. }), "the first session goes on");

    let repeated = session.handle(Event::Message(C1, hello()), ms(4));
    assert_eq!(closed_for(&repeated, C1), Some(CloseReason::UnexpectedMessage));
    assert_eq!(session.agent(), AgentStatus::Absent);

    for (message, reason) in [
        (Message::Resume, CloseReason::UnexpectedMessage),
        (Message::Pong { id: 77, now_ns: 0 }, CloseReason::UnexpectedMessage),
        (report(0, ms(4), &ranges), CloseReason::InvalidValue),
        (report(1, ms(4), &vec![ranges[0]; fpr_protocol::MAX_REPORT_RANGES + 1]), CloseReason::InvalidValue),
    ] {
        let mut session = active();
        let actions = session.handle(Event::Message(C1, message.clone()), ms(4));
        assert_eq!(closed_for(&actions, C1), Some(reason), "{message:?}");
        assert_eq!(session.counters().closed_by_reason[&reason], 1);
    }

    let mut session = active();
    let malformed = session.handle(Event::Malformed(C1, CloseReason::MalformedFrame), ms(4));
    assert_eq!(closed_for(&malformed, C1), Some(CloseReason::MalformedFrame));

    // The device has reset the connection already: it is counted, and nothing is sent or closed.
    let mut session = active();
    let actions = session.handle(Event::NotReading(C1), ms(4));
    assert_eq!(actions, [Action::Note(Note::SessionEnded(Some(CloseReason::SlowReader)))]);
    assert_eq!(session.counters().closed_by_reason[&CloseReason::SlowReader], 1);
}

#[test]
fn silence_ends_connections() {
    let mut session = Session::new(Config::default(), 0);
    session.handle(Event::Connected(C1), ms(0));
    assert_eq!(session.next_deadline(), Some(ms(5000)));
    assert_eq!(closed_for(&session.handle(Event::Tick, ms(5000)), C1), Some(CloseReason::HelloTimeout));

    let mut session = active();
    let mut now = ms(10);
    let closed = loop {
        now = session.next_deadline().unwrap().max(now);
        let actions = session.handle(Event::Tick, now);
        if let Some(reason) = closed_for(&actions, C1) {
            break reason;
        }
    };
    assert_eq!(closed, CloseReason::PingTimeout);
    assert!(now <= ms(31_000), "{now:?}");
}

#[test]
fn a_closed_gate_refuses_and_is_told() {
    let mut session = active();
    let gate = vec![(Gate::AssignedDevice, "descriptor 9 is anon_inode:kvm-vfio".to_owned())];
    let actions = session.handle(Event::Gates(GateSource::Process, gate), ms(3));
    assert!(actions.contains(&Action::Send(C1, Message::Inhibit(vec![Gate::AssignedDevice]))), "{actions:?}");
    let actions = session.handle(Event::Message(C1, report(1, ms(4), &[range(1, 1, Isolation::Claimed)])), ms(4));
    assert_eq!(ack(&actions), [RangeResult::Refused(Refusal::Gated)]);
    let actions = session.handle(Event::Gates(GateSource::Process, vec![]), ms(5));
    assert!(actions.contains(&Action::Send(C1, Message::Resume)), "{actions:?}");
    only_start(&session.handle(Event::Message(C1, report(2, ms(6), &[range(1, 1, Isolation::Claimed)])), ms(6)));
}

#[test]
fn a_gate_that_the_worker_finds_is_closed_too() {
    let mut session = active();
    let ranges = [range(1, 1, Isolation::Claimed)];
    let (id, _) = only_start(&session.handle(Event::Message(C1, report(1, ms(4), &ranges)), ms(4)));
    let output = DropOutput {
        results: vec![Err(Refusal::Gated)],
        process_gates: vec![(Gate::AssignedDevice, "descriptor 9".into())],
        ..DropOutput::default()
    };
    let actions = session.handle(Event::JobFinished(id, JobOutput::Drop(output)), ms(5));
    assert_eq!(ack(&actions), [RangeResult::Refused(Refusal::Gated)]);
    assert!(actions.contains(&Action::Send(C1, Message::Inhibit(vec![Gate::AssignedDevice]))), "{actions:?}");
}

#[test]
fn the_next_session_is_welcomed_only_after_the_last_ones_drops() {
    let mut session = active();
    let ranges = [range(1, 1, Isolation::Claimed)];
    let (id, job) = only_start(&session.handle(Event::Message(C1, report(1, ms(4), &ranges)), ms(4)));
    assert!(session.handle(Event::Disconnected(C1), ms(5)).contains(&Action::CancelJobs(DeviceKind::Vsock)));
    session.handle(Event::Connected(C2), ms(6));
    let actions = session.handle(Event::Message(C2, hello()), ms(7));
    assert!(!actions.iter().any(|action| matches!(action, Action::Send(..))), "{actions:?}");
    assert_eq!(session.agent(), AgentStatus::Fencing);
    let actions = session.handle(Event::JobFinished(id, all_dropped(&job)), ms(8));
    assert!(
        matches!(actions.first(), Some(Action::Send(C2, Message::Welcome(welcome))) if welcome.session_nonce == 101),
        "{actions:?}"
    );
    assert!(!actions.iter().any(|action| matches!(action, Action::Send(_, Message::Ack(_)))), "{actions:?}");
}

#[test]
fn a_stopped_device_waits_for_drops() {
    let mut session = active();
    let ranges = [range(1, 1, Isolation::Claimed)];
    let (id, job) = only_start(&session.handle(Event::Message(C1, report(1, ms(4), &ranges)), ms(4)));
    let actions = session.handle(Event::Stopped { device: DeviceKind::Vsock, fence: 7 }, ms(5));
    assert!(
        actions.contains(&Action::CancelJobs(DeviceKind::Vsock)) && !actions.contains(&Action::FencePassed(7)),
        "{actions:?}"
    );
    let actions = session.handle(Event::JobFinished(id, all_dropped(&job)), ms(6));
    assert_eq!(actions, [Action::FencePassed(7)]);
    assert_eq!(session.handle(Event::Stopped { device: DeviceKind::Vsock, fence: 8 }, ms(7)), [Action::FencePassed(8)]);
}

#[test]
fn init_on_free_is_caught_by_measurement() {
    let mut session = active();
    prove_all(&mut session, 1, ms(3));
    let mut now = ms(4);
    for sequence in 2..20 {
        let ranges = [range(8, 8, Isolation::Offlined)];
        let actions = session.handle(Event::Message(C1, report(sequence, now, &ranges)), now);
        if let Some(RangeResult::Refused(Refusal::Gated)) = actions.iter().find_map(|action| match action {
            Action::Send(_, Message::Ack(ack)) => Some(ack.results[0]),
            _ => None,
        }) {
            assert_eq!(sequence, 5, "three reports in a row");
            assert_eq!(session.closed_gates()[0].gate, Gate::WriteOnFree);
            assert_eq!(session.closed_gates()[0].source, GateSource::Measured);
            // It is tried again after a while.
            session.handle(Event::Tick, now + effect::RETRY_AFTER);
            assert!(session.closed_gates().is_empty());
            return;
        }
        let (id, job) = only_start(&actions);
        session.handle(Event::JobFinished(id, all_dropped(&job)), now);
        now += effect::RETURN_AFTER;
        let (id, job) = only_start(&session.handle(Event::Tick, now));
        assert!(matches!(job, Job::Look { .. }));
        session.handle(Event::JobFinished(id, JobOutput::Look(8 * MIB2, effect::Content::Zeros)), now);
    }
    panic!("the gate never closed");
}

#[test]
fn drops_that_free_nothing_close_ineffective() {
    let mut session = active();
    for sequence in 1..=3 {
        let ranges = [range(8, 8, Isolation::Claimed)];
        let (id, job) = only_start(&session.handle(Event::Message(C1, report(sequence, ms(4), &ranges)), ms(4)));
        let JobOutput::Drop(mut output) = all_dropped(&job) else { panic!() };
        output.still_backed_bytes = 8 * MIB2;
        session.handle(Event::JobFinished(id, JobOutput::Drop(output)), ms(4));
    }
    assert_eq!(session.closed_gates()[0].gate, Gate::Ineffective);
}

#[test]
fn each_measured_gate_is_tried_again_at_its_own_time() {
    let mut session = active();
    let nothing_freed = |ranges| {
        let results = vec![Ok(MIB2); ranges];
        JobOutput::Drop(DropOutput { results, still_backed_bytes: 8 * MIB2, ..DropOutput::default() })
    };
    let mut kernel_job = None;
    for id in 1..=3 {
        if let Some(job) = kernel_job.take() {
            session.handle(Event::JobFinished(job, nothing_freed(8)), ms(4));
        }
        kernel_job = Some(only_start(&session.handle(kernel::report(id, Source::Reported, 8, ms(4)), ms(4))).0);
    }
    for sequence in 1..=3 {
        let ranges = [range(8, 8, Isolation::Claimed)];
        let (job, _) = only_start(&session.handle(Event::Message(C1, report(sequence, ms(4), &ranges)), ms(4)));
        session.handle(Event::JobFinished(job, nothing_freed(1)), ms(4));
    }
    session.handle(Event::JobFinished(kernel_job.unwrap(), nothing_freed(8)), ms(60_000));

    let sources = |session: &Session| session.closed_gates().iter().map(|gate| gate.source).collect::<Vec<_>>();
    assert_eq!(sources(&session), [GateSource::Measured, GateSource::Balloon]);
    session.handle(Event::Tick, ms(4) + effect::RETRY_AFTER);
    assert_eq!(sources(&session), [GateSource::Balloon]);
    session.handle(Event::Tick, ms(59_999) + effect::RETRY_AFTER);
    assert_eq!(sources(&session), [GateSource::Balloon]);
    session.handle(Event::Tick, ms(60_000) + effect::RETRY_AFTER);
    assert_eq!(sources(&session), []);
}

#[test]
fn an_operator_waits_for_the_jobs_that_were_there() {
    let mut session = active();
    assert_eq!(session.oldest_job(), None);
    let ranges = [range(1, 1, Isolation::Claimed)];
    let (first, job) = only_start(&session.handle(Event::Message(C1, report(1, ms(4), &ranges)), ms(4)));
    let inhibit = vec![(Gate::Operator, "snapshot".to_owned())];
    session.handle(Event::Gates(GateSource::Operator, inhibit), ms(5));
    let after = session.next_job();
    assert!(session.oldest_job() == Some(first) && first < after);
    // What drops nothing goes on behind the gate, and nobody waits for it.
    let survey = Message::Survey(Survey { sequence: 2, ranges: vec![] });
    let (second, _) = only_start(&session.handle(Event::Message(C1, survey), ms(6)));
    session.handle(Event::JobFinished(first, all_dropped(&job)), ms(7));
    assert!(session.oldest_job() == Some(second) && second >= after);
}

#[test]
fn a_flood_ends_the_session() {
    let mut session = active();
    let survey = |sequence| Message::Survey(Survey { sequence, ranges: vec![] });
    let closed =
        (1..1000).find_map(|sequence| closed_for(&session.handle(Event::Message(C1, survey(sequence)), ms(4)), C1));
    assert_eq!(closed, Some(CloseReason::Flood));
}

#[test]
fn a_guest_that_writes_on_free_is_told_at_welcome() {
    for (freed_pages, gate) in [(FreedPages::Zeroed, Gate::WriteOnFree), (FreedPages::Poisoned, Gate::PagePoison)] {
        let mut session = Session::new(Config::default(), 0);
        session.handle(Event::Connected(C1), ms(0));
        let Message::Hello(mut hello) = hello() else { panic!() };
        hello.freed_pages = freed_pages;
        let actions = session.handle(Event::Message(C1, Message::Hello(hello)), ms(1));
        assert!(matches!(&actions[0], Action::Send(_, Message::Welcome(w)) if w.gates == [gate]), "{actions:?}");
        session.handle(Event::Disconnected(C1), ms(2));
        assert!(session.closed_gates().is_empty(), "the guest's word ends with its session");
    }
}
