//! Reports whose ranges, cookies or times are wrong. The session lives on; the ranges are refused by name.

use fpr_protocol::message::{Hello, RangeResult};
use fpr_protocol::{Refusal, ReportedRange};

use crate::mock_guest::agent::{Agent, Session, claimed, hello, now_ns, offlined};
use crate::mock_guest::{UNUSED, UPPER, UPPER_SIZE};
use crate::witness::{HUGE, Witness};

/// Which cookies the claimed pages hold when the report is sent, all at the start of huge pages from [`UPPER`] on.
#[derive(Clone, Copy)]
enum Cookies {
    /// What the page held before.
    None,
    /// Those of the report before.
    OfSequenceBefore,
    /// Of the session before.
    OfSessionBefore,
    /// Right but for their order.
    Swapped,
    /// Copied from the page before, as the guest's kernel does when it migrates a page.
    OfNeighbour,
}

struct Case {
    name: &'static str,
    ranges: &'static [fn() -> ReportedRange],
    cookies: Cookies,
    /// Added to the guest's clock.
    clock_offset_ns: i64,
    refusals: &'static [Refusal],
}

const DEFAULT: Case = Case { name: "", ranges: &[], cookies: Cookies::None, clock_offset_ns: 0, refusals: &[] };
const SECOND_NS: i64 = 1_000_000_000;

const CASES: &[Case] = &[
    Case { name: "unaligned", ranges: &[|| offlined(UPPER + 4096, 1)], refusals: &[Refusal::Unaligned], ..DEFAULT },
    Case { name: "zero-length", ranges: &[|| offlined(UPPER, 0)], refusals: &[Refusal::Empty], ..DEFAULT },
    Case {
        name: "overflowing",
        ranges: &[|| offlined(0_u64.wrapping_sub(HUGE), 2), || claimed(0_u64.wrapping_sub(HUGE), u32::MAX)],
        refusals: &[Refusal::Overflow, Refusal::Overflow],
        ..DEFAULT
    },
    Case {
        name: "outside of memory",
        ranges: &[
            || offlined(UPPER + UPPER_SIZE, 1),
            || offlined(UPPER, 13),
            || claimed(UPPER, u32::MAX),
            || offlined(1 << 62, 1),
        ],
        refusals: &[Refusal::OutsideMemory; 4],
        ..DEFAULT
    },
    Case {
        name: "across a hole and across two regions",
        ranges: &[|| offlined(0, 1), || offlined(UPPER - HUGE, 2), || claimed(UPPER - HUGE, 2)],
        refusals: &[Refusal::CrossesRegions; 3],
        ..DEFAULT
    },
    Case {
        name: "overlapping and duplicated",
        ranges: &[
            || claimed(UPPER, 2),
            || claimed(UPPER, 2),
            || offlined(UPPER + HUGE, 2),
            || claimed(UPPER + HUGE, 1),
        ],
        // The first one is refused as well, by its cookie, so that nothing is dropped.
        refusals: &[Refusal::CookieMismatch, Refusal::Overlapping, Refusal::Overlapping, Refusal::Overlapping],
        ..DEFAULT
    },
    Case { name: "no cookie", ranges: &[|| claimed(UPPER, 1)], refusals: &[Refusal::CookieMismatch], ..DEFAULT },
    Case {
        name: "cookie of an earlier report",
        ranges: &[|| claimed(UPPER, 2)],
        cookies: Cookies::OfSequenceBefore,
        refusals: &[Refusal::CookieMismatch],
        ..DEFAULT
    },
    Case {
        name: "cookie of an earlier session",
        ranges: &[|| claimed(UPPER, 2)],
        cookies: Cookies::OfSessionBefore,
        refusals: &[Refusal::CookieMismatch],
        ..DEFAULT
    },
    Case {
        name: "cookies in the wrong order",
        ranges: &[|| claimed(UPPER, 2)],
        cookies: Cookies::Swapped,
        refusals: &[Refusal::CookieMismatch],
        ..DEFAULT
    },
    Case {
        name: "cookie of another page",
        ranges: &[|| claimed(UPPER, 2)],
        cookies: Cookies::OfNeighbour,
        refusals: &[Refusal::CookieMismatch],
        ..DEFAULT
    },
    Case {
        name: "older than the lease",
        ranges: &[|| offlined(UPPER, 1)],
        clock_offset_ns: -3 * SECOND_NS,
        refusals: &[Refusal::LeaseExpired],
        ..DEFAULT
    },
    Case {
        name: "from the future",
        ranges: &[|| offlined(UPPER, 1)],
        clock_offset_ns: SECOND_NS,
        refusals: &[Refusal::FromFuture],
        ..DEFAULT
    },
];

#[test]
fn bad_ranges_are_refused_by_name_and_nothing_is_dropped() {
    let mut witness = Witness::new();
    // Both regions are proven, so that nothing but the case itself speaks against the report.
    let mut session = witness.bad.start_session(hello());
    witness.bad.prove(&mut session, &[UNUSED, UPPER]);
    let mut expected_refused = 0;
    for case in CASES {
        let sequence = session.next_sequence();
        write_cookies(&mut witness.bad, &session, case.cookies, sequence);
        witness.remember();
        let ranges: Vec<ReportedRange> = case.ranges.iter().map(|range| range()).collect();
        expected_refused += ranges.iter().map(|range| u64::from(range.range.count)).sum::<u64>();
        let by_reason = format!("/counters/refused_by_reason/{}", case.refusals[0]);
        let before = witness.count(&by_reason);

        let sent_at_ns = now_ns().wrapping_add_signed(case.clock_offset_ns);
        let results = witness.bad.report_as(&session, sequence, sent_at_ns, ranges.clone());

        let refusals: Vec<_> = case.refusals.iter().map(|refusal| RangeResult::Refused(*refusal)).collect();
        assert_eq!(results, refusals, "{}", case.name);
        let of_first_reason = case.refusals.iter().zip(&ranges).filter(|(refusal, _)| **refusal == case.refusals[0]);
        let huge_pages: u64 = of_first_reason.map(|(_, range)| u64::from(range.range.count)).sum();
        assert_eq!(witness.count(&by_reason), before + huge_pages, "{}: {by_reason}", case.name);
        assert_eq!(witness.count("/counters/huge_pages_refused"), expected_refused, "{}", case.name);
        witness.check(case.name);
    }
    // The session has survived all of it, and does what is right.
    let results = witness.bad.report(&mut session, vec![offlined(UPPER, 1)]);
    assert_eq!(results, [RangeResult::Dropped { bytes: HUGE }]);
}

fn write_cookies(agent: &mut Agent, session: &Session, cookies: Cookies, sequence: u64) {
    let [first, second] = [UPPER, UPPER + HUGE];
    match cookies {
        Cookies::None => {}
        Cookies::OfSequenceBefore => {
            agent.write_cookie(session, sequence - 1, 0, first);
            agent.write_cookie(session, sequence - 1, 1, second);
        }
        Cookies::OfSessionBefore => {
            let mut before = session.clone();
            before.welcome.session_nonce = before.welcome.session_nonce.wrapping_sub(1);
            agent.write_cookie(&before, sequence, 0, first);
            agent.write_cookie(&before, sequence, 1, second);
        }
        Cookies::Swapped => {
            agent.write_cookie(session, sequence, 1, first);
            agent.write_cookie(session, sequence, 0, second);
        }
        Cookies::OfNeighbour => {
            agent.write_cookie(session, sequence, 0, first);
            agent.copy_cookie(first, second);
        }
    }
}

#[test]
fn reports_that_come_too_early_or_name_too_much_are_refused() {
    let mut witness = Witness::new();
    let refused = |refusal| [RangeResult::Refused(refusal)];

    let mut session = witness.bad.start_session_without_clock(hello());
    let results = witness.bad.report(&mut session, vec![offlined(UPPER, 1)]);
    assert_eq!(results, refused(Refusal::ClockUnknown));
    witness.check("without a clock");
    witness.bad.close(session.port);

    // Huge pages of 8 KiB: 2,049 of them lie in memory, one more than may be in flight.
    let mut session = witness.bad.start_session(Hello { huge_page_order: 1, ..hello() });
    witness.bad.prove(&mut session, &[UPPER]);
    witness.remember();
    let results = witness.bad.report(&mut session, vec![offlined(UPPER, 2049)]);
    assert_eq!(results, refused(Refusal::TooMuchInFlight));
    witness.check("too much in flight");
    let results = witness.bad.report(&mut session, vec![offlined(UPPER, 2048)]);
    assert_eq!(results, [RangeResult::Dropped { bytes: 16 << 20 }], "the limit itself is allowed");
}
