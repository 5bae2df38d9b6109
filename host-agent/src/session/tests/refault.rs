//! The look a minute after a drop, for accounting.

use super::kernel::report as kernel_report;
use super::*;
use crate::reporting::GuestRange;

const DUE: Duration = Duration::from_millis(60_010);

fn looks(actions: &[Action]) -> Vec<(JobId, DeviceKind, Vec<GuestRange>)> {
    let look = |action: &Action| match action {
        Action::Start(id, Job::LookBack { device, pieces }) => Some((*id, *device, pieces.clone())),
        _ => None,
    };
    actions.iter().filter_map(look).collect()
}

/// A VM whose kernel has reported two huge pages at 10 ms, one of which could be dropped.
fn reported() -> Session {
    let mut session = Session::new(Config::default(), 3);
    let (id, _) = only_start(&session.handle(kernel_report(1, Source::Reported, 2, ms(10)), ms(10)));
    let results = vec![Ok(MIB2), Err(Refusal::OutsideMemory)];
    let output = JobOutput::Drop(DropOutput { results, ..DropOutput::default() });
    session.handle(Event::JobFinished(id, output), ms(10));
    session
}

#[test]
fn what_came_back_is_counted_by_its_share_without_an_agent() {
    let mut session = reported();
    assert_eq!(session.next_deadline(), Some(DUE));
    let [(id, device, pieces)] = &looks(&session.handle(Event::Tick, DUE))[..] else { panic!("no look") };
    assert_eq!(
        (*device, &pieces[..]),
        (DeviceKind::Balloon, &[GuestRange { start: GuestAddress(0), bytes: MIB2 }][..])
    );
    // Two reports may wait beside it: nobody waits for a look.
    for report in [2, 3] {
        only_start(&session.handle(kernel_report(report, Source::Reported, 1, DUE), DUE));
    }
    let output = JobOutput::LookedBack { looked_bytes: MIB2, backed_bytes: MIB2 / 4 };
    session.handle(Event::JobFinished(*id, output), DUE);
    let counters = session.counters();
    assert_eq!((counters.refault_minute_watched_bytes, counters.refault_minute_returned_bytes), (MIB2, MIB2 / 4));
}

#[test]
fn the_agents_memory_is_looked_at_too_after_its_session() {
    let mut session = active();
    prove_all(&mut session, 1, ms(3));
    let ranges = [range(1, 2, Isolation::Offlined), range(40, 1, Isolation::Offlined)];
    let (id, job) = only_start(&session.handle(Event::Message(C1, report(2, ms(10), &ranges)), ms(10)));
    session.handle(Event::JobFinished(id, all_dropped(&job)), ms(10));
    session.handle(Event::Disconnected(C1), ms(20));
    let [(_, device, pieces)] = &looks(&session.handle(Event::Tick, DUE))[..] else { panic!("no look") };
    assert_eq!((*device, pieces.len()), (DeviceKind::Vsock, 3));
}

#[test]
fn nothing_is_counted_that_could_not_be_looked_at_and_nothing_looked_at_in_other_memory() {
    let mut session = reported();
    let [(id, ..)] = looks(&session.handle(Event::Tick, DUE))[..] else { panic!("no look") };
    session.handle(Event::JobFinished(id, JobOutput::Failed("no holes".into())), DUE);
    assert_eq!(session.counters().refault_minute_watched_bytes, 0);

    for event in [
        Event::Stopped { device: DeviceKind::Balloon, fence: 1 },
        Event::MapChanged { device: DeviceKind::Balloon, fence: 1 },
    ] {
        let mut session = reported();
        session.handle(event, ms(20));
        assert_eq!(looks(&session.handle(Event::Tick, DUE)), []);
    }
    let mut session = reported();
    session.handle(Event::Stopped { device: DeviceKind::Vsock, fence: 1 }, ms(20));
    assert_eq!(looks(&session.handle(Event::Tick, DUE)).len(), 1, "the other device's");
}
