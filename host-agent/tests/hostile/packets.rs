//! Packets and descriptors that are wrong. Each is counted by name, and the connection it hits is reset.

use vm_memory::GuestAddress;

use crate::mock_guest::agent::{Agent, Reading, hello, range};
use crate::mock_guest::{CREDIT_UPDATE, Packet, REQUEST, RESPONSE, RW, UPPER};
use crate::witness::Witness;

/// What becomes of the connection that the packet names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Reset,
    /// The packet named no connection of ours, or nothing that could be read.
    Lives,
}

struct Case {
    name: &'static str,
    /// Sends it, on a connection that has a session.
    send: fn(&mut Agent, u32),
    fault: &'static str,
    then: Then,
}

const fn case(name: &'static str, send: fn(&mut Agent, u32), fault: &'static str, then: Then) -> Case {
    Case { name, send, fault, then }
}

/// Offset of `len` in a packet header (virtio 1.2, section 5.10.6).
const LEN: usize = 24;

const CASES: &[Case] = &[
    case("length over the payload", |agent, port| lie_about_length(agent, port, 100), "bad_length", Then::Reset),
    case("length over the limit", |agent, port| lie_about_length(agent, port, 65_537), "bad_length", Then::Reset),
    case("length of 4 GiB", |agent, port| lie_about_length(agent, port, u32::MAX), "bad_length", Then::Reset),
    case(
        "payload on a credit update",
        |agent, port| agent.guest.send(&Packet::new(CREDIT_UPDATE, port, b"x")),
        "bad_length",
        Then::Reset,
    ),
    case("shorter than a header", |agent, _| agent.guest.send_bytes(&[1; 43]), "bad_length", Then::Lives),
    case("outside of memory", |agent, _| agent.guest.send_at(GuestAddress(1 << 40), 64), "bad_descriptor", Then::Lives),
    case("no stream", |agent, port| agent.guest.send(&Packet { kind: 2, ..rw(port) }), "unknown_type", Then::Reset),
    case("no type", |agent, port| agent.guest.send(&Packet { kind: 0, ..rw(port) }), "unknown_type", Then::Reset),
    case(
        "operation 0",
        |agent, port| agent.guest.send(&Packet { op: 0, ..rw(port) }),
        "unknown_operation",
        Then::Reset,
    ),
    case(
        "operation 99",
        |agent, port| agent.guest.send(&Packet { op: 99, ..rw(port) }),
        "unknown_operation",
        Then::Reset,
    ),
    case(
        "response to nothing",
        |agent, port| agent.guest.send(&Packet::new(RESPONSE, port, b"")),
        "unexpected_operation",
        Then::Reset,
    ),
    case(
        "request on a live connection",
        |agent, port| agent.guest.send(&Packet::new(REQUEST, port, b"")),
        "duplicate_request",
        Then::Reset,
    ),
    case(
        "credit for bytes that were never sent",
        |agent, port| agent.guest.send(&Packet { fwd_cnt: 1 << 20, ..Packet::new(CREDIT_UPDATE, port, b"") }),
        "credit_invalid",
        Then::Reset,
    ),
    case(
        "another guest's CID",
        |agent, port| agent.guest.send(&Packet { src: (4, port), ..rw(port) }),
        "wrong_cid",
        Then::Lives,
    ),
    case(
        "not to the host",
        |agent, port| agent.guest.send(&Packet { dst: (5, fpr_protocol::PORT), ..rw(port) }),
        "wrong_cid",
        Then::Lives,
    ),
    case("no connection", |agent, _| agent.send_stray_packet(), "unknown_connection", Then::Lives),
    case(
        "port nobody listens on",
        |agent, port| agent.guest.send(&Packet { dst: (2, 22), ..Packet::new(REQUEST, port, b"") }),
        "unknown_port",
        Then::Lives,
    ),
    case(
        "port that any process may use",
        |agent, _| assert!(!agent.connect_as(1024, Reading::Yes)),
        "unprivileged_port",
        Then::Lives,
    ),
];

#[test]
fn bad_packets_are_counted_by_name_and_nothing_is_dropped() {
    let mut witness = Witness::new();
    for case in CASES {
        let mut session = witness.bad.start_session(hello());
        let counter = format!("/vsock/refused_by_reason/{}", case.fault);
        let before = witness.count(&counter);

        (case.send)(&mut witness.bad, session.port);

        witness.wait_count(case.name, &counter, before + 1);
        match case.then {
            Then::Reset => {
                assert_eq!(witness.bad.wait_end(session.port), None, "{}", case.name);
                witness.wait_absent(case.name);
            }
            Then::Lives => {
                let backed = witness.bad.survey(&mut session, vec![range(UPPER, 1)]).backed;
                assert_eq!(backed.len(), 1, "{}", case.name);
                witness.bad.close(session.port);
            }
        }
        witness.check(case.name);
    }
}

fn rw(port: u32) -> Packet {
    Packet::new(RW, port, b"x")
}

fn lie_about_length(agent: &mut Agent, port: u32, len: u32) {
    let mut bytes = rw(port).to_bytes();
    bytes[LEN..LEN + 4].copy_from_slice(&len.to_le_bytes());
    agent.guest.send_bytes(&bytes);
}
