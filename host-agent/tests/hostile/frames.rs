//! Frames and messages that are wrong or come at the wrong time. The connection is closed with the reason.

use fpr_protocol::message::{Hello, Prove, Report, Survey, Welcome, id};
use fpr_protocol::{CloseReason, GuestAddress, Message, Version, VersionRange, frame};

use crate::mock_guest::UPPER;
use crate::mock_guest::agent::{Reading, claimed, hello, now_ns, offlined, range};
use crate::witness::Witness;

const NEXT_MAJOR: Version = Version(0x0200);

/// Where in the life of a connection the bytes are sent.
#[derive(Clone, Copy)]
enum When {
    First,
    InSession,
}

use When::{First, InSession};

struct Case {
    name: &'static str,
    when: When,
    bytes: fn() -> Vec<u8>,
    reason: CloseReason,
}

const fn case(name: &'static str, when: When, bytes: fn() -> Vec<u8>, reason: CloseReason) -> Case {
    Case { name, when, bytes, reason }
}

const CASES: &[Case] = &[
    case("wrong magic", First, || b"GET / HTTP/1.1\r\n\r\n".to_vec(), CloseReason::MalformedFrame),
    case("wrong magic, nothing after it", First, || b"FPRQ".to_vec(), CloseReason::MalformedFrame),
    case("magic lost in a session", InSession, || vec![0; 64], CloseReason::MalformedFrame),
    case("unsupported version", First, || raw(NEXT_MAJOR.0, id::Hello, &[]), CloseReason::UnsupportedVersion),
    case("unsupported version in Hello", First, || hello_of(NEXT_MAJOR, NEXT_MAJOR), CloseReason::UnsupportedVersion),
    case("versions upside down", First, || hello_of(NEXT_MAJOR, Version::V1_0), CloseReason::UnsupportedVersion),
    case("oversized", First, || header(0x100, id::Hello, 64 * 1024 + 1), CloseReason::MalformedFrame),
    case("oversized by far", InSession, || header(0x100, id::Report, u32::MAX), CloseReason::MalformedFrame),
    case("payload too short", First, || payload_of_hello(|bytes| bytes.truncate(20)), CloseReason::MalformedFrame),
    case("no payload", InSession, || raw(0x100, id::Report, &[]), CloseReason::MalformedFrame),
    case("trailing byte", First, || payload_of_hello(|bytes| bytes.push(0)), CloseReason::MalformedFrame),
    case("a list longer than its frame", InSession, endless_list, CloseReason::MalformedFrame),
    case("unknown message", First, || raw(0x100, 99, b""), CloseReason::UnexpectedMessage),
    case("unknown message in a session", InSession, || raw(0x100, 0xffff, b""), CloseReason::UnexpectedMessage),
    case("the host's own message", InSession, welcome, CloseReason::UnexpectedMessage),
    case("report without Hello", First, || report(1, 1), CloseReason::UnexpectedMessage),
    case("survey without Hello", First, || survey(1), CloseReason::UnexpectedMessage),
    case("second Hello", InSession, || encode(Message::Hello(hello())), CloseReason::UnexpectedMessage),
    case("Pong that nobody asked for", InSession, || encode(pong(77)), CloseReason::UnexpectedMessage),
    case("no such page size", First, || hello_with(|hello| hello.page_size = 5000), CloseReason::InvalidValue),
    case("no such order", First, || hello_with(|hello| hello.huge_page_order = 255), CloseReason::InvalidValue),
    case("long string", First, || hello_with(|hello| hello.agent_version = "x".repeat(129)), CloseReason::InvalidValue),
    case("sequence repeated", InSession, || [survey(5), survey(5)].concat(), CloseReason::InvalidValue),
    case("sequence back", InSession, || [survey(5), report(4, 1)].concat(), CloseReason::InvalidValue),
    case("too many ranges", InSession, || report(1, 513), CloseReason::InvalidValue),
    case("too many ranges to survey", InSession, survey_of_too_many, CloseReason::InvalidValue),
    case("too many pages to prove", InSession, prove_of_too_many, CloseReason::InvalidValue),
    case("more than the rate limit", InSession, || survey_flood(100), CloseReason::Flood),
];

#[test]
fn bad_frames_close_the_connection_by_name_and_nothing_is_dropped() {
    let mut witness = Witness::new();
    for case in CASES {
        let port = match case.when {
            First => witness.bad.connect(),
            InSession => witness.bad.start_session(hello()).port,
        };
        let counter = format!("/counters/closed_by_reason/{}", case.reason);
        let before = witness.count(&counter);

        witness.bad.send_bytes(port, &(case.bytes)());

        let last = witness.bad.wait_end(port);
        assert_eq!(last, Some(Message::Goodbye { reason: case.reason }), "{}", case.name);
        witness.wait_count(case.name, &counter, before + 1);
        assert_eq!(witness.status()["agent"]["state"], "absent", "{}", case.name);
        witness.check(case.name);
    }
    let log = witness.daemon.log();
    for said in ["wrong magic", "malformed-frame"] {
        assert!(log.contains(said), "the log lacks {said:?}:\n{log}");
    }
}

#[test]
fn a_stream_that_ends_in_mid_frame_is_counted() {
    let mut witness = Witness::new();
    let counter = "/counters/closed_by_reason/malformed-frame";
    let whole = encode(Message::Hello(hello()));
    for (count, cut) in [(1, 2), (2, 12), (3, whole.len() - 1)] {
        let port = witness.bad.connect();
        witness.bad.send_bytes(port, &whole[..cut]);
        witness.bad.close(port);
        witness.wait_count("first frame cut", counter, count);
    }
    let session = witness.bad.start_session(hello());
    witness.bad.send_bytes(session.port, &report(1, 3)[..15]);
    witness.bad.finish_sending(session.port);
    let last = witness.bad.wait_end(session.port);
    assert_eq!(last, Some(Message::Goodbye { reason: CloseReason::MalformedFrame }));
    witness.wait_count("report cut", counter, 4);
    witness.check("truncated");

    // An end between two frames is nobody's fault.
    let session = witness.bad.start_session(hello());
    witness.bad.close(session.port);
    let port = witness.bad.connect();
    witness.bad.finish_sending(port);
    witness.bad.wait_end(port);
    assert_eq!(witness.count(counter), 4);
}

#[test]
fn a_second_session_is_refused_and_the_first_goes_on() {
    let mut witness = Witness::new();
    let mut first = witness.bad.start_session(hello());

    let second = witness.bad.connect();
    witness.bad.send(second, &Message::Hello(hello()));

    assert_eq!(witness.bad.wait_end(second), Some(Message::Goodbye { reason: CloseReason::SecondSession }));
    assert_eq!(witness.count("/counters/closed_by_reason/second-session"), 1);
    assert_eq!(witness.count("/counters/sessions"), 1);
    assert_eq!(witness.bad.survey(&mut first, vec![range(UPPER, 1)]).backed.len(), 1);
    witness.check("second session");
}

#[test]
fn connections_without_hello_are_bounded() {
    let mut witness = Witness::new();
    let waiting: Vec<u32> = (0..8).map(|_| witness.bad.connect()).collect();

    for count in 1..=32 {
        let surplus = witness.bad.connect();
        assert_eq!(witness.bad.wait_end(surplus), Some(Message::Goodbye { reason: CloseReason::Flood }));
        assert_eq!(witness.count("/counters/closed_by_reason/flood"), count);
    }

    assert!(waiting.iter().all(|port| !witness.bad.has_ended(*port)));
    witness.check("eight connections wait");
    // One that leaves makes room for one that has something to say.
    witness.bad.close(waiting[0]);
    witness.bad.start_session(hello());
}

/// Thousands of mistakes are thousands in the counters and a few lines in the log.
#[test]
fn a_flood_of_mistakes_is_counted_and_not_logged() {
    let mut witness = Witness::new();
    let lines_before = witness.daemon.log().lines().count();
    let (packets, frames) = (3000, 200);
    for _ in 0..packets {
        witness.bad.send_stray_packet();
    }
    for _ in 0..frames {
        let port = witness.bad.free_port();
        assert!(witness.bad.connect_as(port, Reading::Yes));
        witness.bad.send_bytes(port, b"what is this");
        witness.bad.wait_end(port);
    }
    witness.wait_count("flood", "/counters/closed_by_reason/malformed-frame", frames);
    assert_eq!(witness.count("/vsock/refused_by_reason/unknown_connection"), packets);
    witness.check("flood");
    let log = witness.daemon.log();
    let lines: Vec<_> = log.lines().skip(lines_before).collect();
    // Two limits of five lines per ten seconds, in at most four such windows.
    assert!((2..=40).contains(&lines.len()), "{} lines:\n{}", lines.len(), lines.join("\n"));
}

fn header(version: u16, id: u16, length: u32) -> Vec<u8> {
    [&frame::MAGIC[..], &version.to_le_bytes(), &id.to_le_bytes(), &length.to_le_bytes()].concat()
}

fn raw(version: u16, id: u16, payload: &[u8]) -> Vec<u8> {
    [header(version, id, payload.len() as u32), payload.to_vec()].concat()
}

fn encode(message: Message) -> Vec<u8> {
    frame::encode(&message).unwrap()
}

fn hello_with(change: impl FnOnce(&mut Hello)) -> Vec<u8> {
    let mut hello = hello();
    change(&mut hello);
    encode(Message::Hello(hello))
}

fn hello_of(oldest: Version, newest: Version) -> Vec<u8> {
    hello_with(|hello| hello.versions = VersionRange { oldest, newest })
}

/// A Hello with another payload; the length in the header is right.
fn payload_of_hello(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut payload = encode(Message::Hello(hello())).split_off(frame::HEADER_LEN);
    change(&mut payload);
    raw(0x100, id::Hello, &payload)
}

/// Sequence 1, time 1, and 2^64 - 1 ranges (bincode's varint: 253, then eight bytes).
fn endless_list() -> Vec<u8> {
    let mut payload = vec![1, 1, 253];
    payload.extend([0xff; 8]);
    raw(0x100, id::Report, &payload)
}

fn welcome() -> Vec<u8> {
    let limits =
        fpr_protocol::message::Limits { max_report_ranges: 1, max_huge_pages_in_flight: 1, lease_ms: 1, grace_ms: 1 };
    let (version, gates, regions) = (Version::CURRENT, Vec::new(), Vec::new());
    encode(Message::Welcome(Welcome { version, session_nonce: 1, limits, gates, regions }))
}

fn pong(id: u64) -> Message {
    Message::Pong { id, now_ns: now_ns() }
}

fn report(sequence: u64, ranges: usize) -> Vec<u8> {
    let ranges = (0..ranges).map(|i| if i % 2 == 0 { offlined(UPPER, 1) } else { claimed(UPPER, 1) }).collect();
    encode(Message::Report(Report { sequence, sent_at_ns: now_ns(), ranges }))
}

fn survey(sequence: u64) -> Vec<u8> {
    encode(Message::Survey(Survey { sequence, ranges: vec![range(UPPER, 1)] }))
}

fn survey_flood(surveys: u64) -> Vec<u8> {
    (1..=surveys).flat_map(survey).collect()
}

fn survey_of_too_many() -> Vec<u8> {
    encode(Message::Survey(Survey { sequence: 1, ranges: vec![range(UPPER, 1); 2049] }))
}

fn prove_of_too_many() -> Vec<u8> {
    encode(Message::Prove(Prove { sequence: 1, pages: vec![GuestAddress(UPPER); 65] }))
}
