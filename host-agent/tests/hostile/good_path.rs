//! A guest that keeps to the protocol gets its memory dropped, and only what it reported.

use fpr_host_agent::control;
use fpr_protocol::message::RangeResult;
use fpr_protocol::{Gate, Message, Refusal};

use crate::daemon::Daemon;
use crate::mock_guest::agent::{Agent, claimed, hello, now_ns, offlined, range};
use crate::mock_guest::{REGIONS, UNUSED, UPPER};
use crate::witness::{HUGE, allocated, contents, fill};

const MIB: usize = 1 << 20;

#[test]
fn what_is_reported_in_order_is_gone_from_the_file_and_nothing_else() {
    let daemon = Daemon::start(&["good"]);
    let mut agent = Agent::boot(&daemon.socket("good"));
    fill(&agent);
    let mut session = agent.start_session(hello());
    let seen: Vec<_> = session.welcome.regions.iter().map(|region| (region.start.0, region.bytes)).collect();
    assert_eq!(seen, REGIONS.map(|(guest, size, _)| (guest, size)));
    assert_eq!(session.welcome.gates, []);

    // Before the address check, offlined memory is refused.
    let results = agent.report(&mut session, vec![offlined(UPPER, 1)]);
    assert_eq!(results, [RangeResult::Refused(Refusal::AddressUnproven)]);
    let last = UPPER + 11 * HUGE;
    let proven = agent.prove(&mut session, &[UNUSED, last]);
    assert_eq!((proven.regions, proven.mismatches), (vec![false, true, true], 0));

    let survey = agent.survey(&mut session, vec![range(UNUSED, 2), range(UPPER, 12)]);
    let backed: Vec<_> = survey.backed.iter().map(|run| (run.range, run.backed_bytes)).collect();
    assert_eq!(backed, [(range(UNUSED, 2), 2 * HUGE), (range(UPPER, 12), 12 * HUGE)]);

    let (before, blocks) = (contents(&agent), allocated(&agent));
    let sequence = session.next_sequence();
    // The cookie's index counts claimed huge pages only, over all ranges.
    agent.write_cookie(&session, sequence, 0, UNUSED);
    agent.write_cookie(&session, sequence, 1, UPPER + 4 * HUGE);
    agent.write_cookie(&session, sequence, 2, UPPER + 5 * HUGE);
    let ranges = vec![claimed(UNUSED, 1), offlined(UPPER + HUGE, 2), claimed(UPPER + 4 * HUGE, 2)];
    let results = agent.report_as(&session, sequence, now_ns(), ranges);

    let dropped = |huge_pages| RangeResult::Dropped { bytes: huge_pages * HUGE };
    assert_eq!(results, [dropped(1), dropped(2), dropped(2)]);
    assert_eq!(allocated(&agent), blocks - 5 * HUGE);
    // In what `contents` shows, UNUSED is at 0 and UPPER at 4 MiB.
    let mut expected = before;
    for gone in [0..2 * MIB, 6 * MIB..10 * MIB, 12 * MIB..16 * MIB] {
        expected[gone].fill(0);
    }
    assert!(contents(&agent) == expected, "other memory has changed, or dropped memory does not read zero");

    let vm = daemon.vm("good");
    let counters = &vm["counters"];
    for (counter, wanted) in [
        ("sessions", 1),
        ("reports", 2),
        ("huge_pages_reported", 6),
        ("huge_pages_offlined", 3),
        ("huge_pages_claimed", 3),
        ("huge_pages_dropped", 5),
        ("huge_pages_refused", 1),
        ("freed_bytes", 5 * HUGE),
    ] {
        assert_eq!(counters[counter], wanted, "{counter} in {vm:#}");
    }
    assert_eq!(vm["memory"]["backed_bytes"], allocated(&agent));
    assert_eq!(vm["agent"]["state"], "active");
}

#[test]
fn an_operator_can_stop_and_resume_it_and_the_guest_is_told() {
    let daemon = Daemon::start(&["good"]);
    let mut agent = Agent::boot(&daemon.socket("good"));
    fill(&agent);
    let mut session = agent.start_session(hello());
    agent.prove(&mut session, &[UPPER]);
    let (before, blocks) = (contents(&agent), allocated(&agent));

    let inhibit = control::Command::Inhibit { vm: "good".into(), reason: "snapshot under way".into() };
    control::ask(&daemon.control(), &inhibit).unwrap();
    assert_eq!(agent.next(session.port), Some(Message::Inhibit(vec![Gate::Operator])));
    assert_eq!(agent.report(&mut session, vec![offlined(UPPER, 1)]), [RangeResult::Refused(Refusal::Gated)]);
    assert!(contents(&agent) == before && allocated(&agent) == blocks, "dropped behind a closed gate");
    assert_eq!(daemon.vm("good")["gates"][0]["detail"], "snapshot under way");

    control::ask(&daemon.control(), &control::Command::Resume { vm: "good".into() }).unwrap();
    assert_eq!(agent.next(session.port), Some(Message::Resume));
    assert_eq!(agent.report(&mut session, vec![offlined(UPPER, 1)]), [RangeResult::Dropped { bytes: HUGE }]);
    assert_eq!(allocated(&agent), blocks - HUGE);
}

#[test]
fn a_wrong_proof_takes_back_what_was_proven() {
    let daemon = Daemon::start(&["good"]);
    let mut agent = Agent::boot(&daemon.socket("good"));
    fill(&agent);
    let mut session = agent.start_session(hello());
    assert_eq!(agent.prove(&mut session, &[UNUSED, UPPER]).regions, [false, true, true]);

    // The page holds the cookie of the earlier proof.
    let sequence = session.next_sequence();
    let proven = agent.prove_as_is(&session, sequence, &[UPPER]);

    assert_eq!((proven.regions, proven.mismatches), (vec![false, false, false], 1));
    let results = agent.report(&mut session, vec![offlined(UPPER, 1)]);
    assert_eq!(results, [RangeResult::Refused(Refusal::AddressUnproven)]);
}
