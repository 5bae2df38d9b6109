#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::device::vsock::packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use proptest::prelude::*;

const CID: u64 = 3;
const PORT: u32 = 0x66_7072;

fn header(op: Operation, guest_port: u32) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: guest_port,
        dst_port: PORT,
        kind: TYPE_STREAM,
        op: op as u16,
        buf_alloc: 1 << 16,
        ..Header::default()
    }
}

fn muxer() -> Muxer {
    Muxer::new(CID, PORT)
}

fn connect(muxer: &mut Muxer, guest_port: u32) -> ConnectionId {
    let outcome = muxer.receive(&header(Operation::Request, guest_port), Vec::new());
    assert_eq!(outcome.fault, None);
    let Some(DeviceEvent::Connected { connection, peer_port }) = outcome.event else { panic!("{outcome:?}") };
    assert_eq!(peer_port, guest_port);
    assert_eq!(muxer.next_packet(0).unwrap().header.op, Operation::Response as u16);
    connection
}

/// The packet is refused for `fault`, which is counted.
fn refused(muxer: &mut Muxer, header: &Header, payload: &[u8], fault: Fault) -> Option<DeviceEvent> {
    let before = muxer.counters().refused(fault);
    let outcome = muxer.receive(header, payload.to_vec());
    assert_eq!(outcome.fault, Some(fault));
    assert_eq!(muxer.counters().refused(fault), before + 1);
    outcome.event
}

/// The only packet waiting is the RST that answers `header`.
fn answered_with_rst(muxer: &mut Muxer, header: &Header) {
    assert_eq!(muxer.next_packet(0).unwrap().header, header.rst_reply());
    assert!(!muxer.has_packet());
}

#[test]
fn bad_packets_are_refused_by_name_and_reset() {
    let cases = [
        (Header { kind: 2, ..header(Operation::Request, 1) }, Fault::UnknownType),
        (Header { op: 0, ..header(Operation::Request, 1) }, Fault::UnknownOperation),
        (Header { op: 9, ..header(Operation::Request, 1) }, Fault::UnknownOperation),
        (Header { len: 5, ..header(Operation::Request, 1) }, Fault::BadLength),
        (Header { len: 65_537, ..header(Operation::Rw, 1) }, Fault::BadLength),
        (Header { len: 5, ..header(Operation::Rw, 1) }, Fault::BadLength), // announced, not there
        (Header { dst_cid: 4, ..header(Operation::Request, 1) }, Fault::WrongCid),
        (Header { dst_port: 22, ..header(Operation::Request, 1) }, Fault::UnknownPort),
        (header(Operation::Request, 1024), Fault::UnprivilegedPort),
        (header(Operation::Request, u32::MAX), Fault::UnprivilegedPort),
        (header(Operation::Response, 1), Fault::UnexpectedOperation),
        (header(Operation::Rw, 1), Fault::UnknownConnection),
        (header(Operation::CreditUpdate, 1), Fault::UnknownConnection),
        (header(Operation::Shutdown, 1), Fault::UnknownConnection),
    ];
    for (bad, fault) in cases {
        let mut muxer = muxer();
        assert!(refused(&mut muxer, &bad, b"", fault).is_none(), "{bad:?}");
        answered_with_rst(&mut muxer, &bad);
    }
}

#[test]
fn a_forged_source_gets_no_answer() {
    let mut muxer = muxer();
    let forged = Header { src_cid: 9, ..header(Operation::Request, 1) };
    assert!(refused(&mut muxer, &forged, b"", Fault::WrongCid).is_none());
    assert!(!muxer.has_packet());
}

#[test]
fn a_reset_is_never_answered() {
    let mut muxer = muxer();
    let stray = muxer.receive(&header(Operation::Rst, 1), Vec::new());
    assert!(stray.event.is_none() && stray.fault.is_none());
    let bad = Header { len: 1, ..header(Operation::Rst, 1) };
    refused(&mut muxer, &bad, b"", Fault::BadLength);
    assert!(!muxer.has_packet());
}

#[test]
fn a_fault_ends_the_connection_it_is_on_and_no_other() {
    let mut muxer = muxer();
    let bad = connect(&mut muxer, 1);
    let good = connect(&mut muxer, 2);
    let overrun = Header { len: 65_536, ..header(Operation::Rw, 1) };
    assert!(muxer.receive(&overrun, vec![0; 65_536]).event.is_some());

    let event = refused(&mut muxer, &Header { len: 1, ..overrun }, b"x", Fault::CreditOverrun);

    let Some(DeviceEvent::Closed { connection, reason }) = event else { panic!("{event:?}") };
    assert_eq!((connection, reason), (bad, EndReason::Fault(Fault::CreditOverrun)));
    answered_with_rst(&mut muxer, &overrun);
    assert_eq!(muxer.send(bad, b"x"), Err(Fault::UnknownConnection));
    assert_eq!(muxer.send(good, b"x"), Ok(()));
}

#[test]
fn a_flood_of_connections_is_bounded_and_the_first_ones_live() {
    let mut muxer = muxer();
    let first = connect(&mut muxer, 0);
    for port in 1..16 {
        connect(&mut muxer, port);
    }
    for port in 16..1000 {
        refused(&mut muxer, &header(Operation::Request, port), b"", Fault::TooManyConnections);
    }
    assert_eq!(muxer.resets.len(), MAX_RESETS);
    assert_eq!(muxer.counters().refused(Fault::ReplyQueueFull), 984 - MAX_RESETS as u64);
    assert_eq!(muxer.send(first, b"x"), Ok(()));
}

#[test]
fn a_connection_the_owner_closed_makes_room() {
    let mut muxer = muxer();
    let ids: Vec<_> = (0..16).map(|port| connect(&mut muxer, port)).collect();
    muxer.close(ids[5]);
    muxer.close(ids[3]);

    assert!(muxer.receive(&header(Operation::Request, 99), Vec::new()).event.is_some());

    let reset = muxer.next_packet(0).unwrap().header;
    assert_eq!((reset.op, reset.dst_port), (Operation::Rst as u16, 3), "the oldest of those that were closing");
}

#[test]
fn a_second_request_on_a_live_connection_ends_it() {
    let mut muxer = muxer();
    let id = connect(&mut muxer, 1);
    let event = refused(&mut muxer, &header(Operation::Request, 1), b"", Fault::DuplicateRequest);
    assert!(matches!(event, Some(DeviceEvent::Closed { connection, .. }) if connection == id));
    // The reset that waits for the old socket must not kill the new one.
    connect(&mut muxer, 1);
    assert!(!muxer.has_packet());
}

#[test]
fn a_guest_that_closes_is_confirmed_and_announced_once() {
    let mut muxer = muxer();
    let id = connect(&mut muxer, 1);
    let bye = Header { flags: SHUTDOWN_RECEIVE | SHUTDOWN_SEND, ..header(Operation::Shutdown, 1) };

    let outcome = muxer.receive(&bye, Vec::new());

    let Some(DeviceEvent::Closed { connection, reason }) = outcome.event else { panic!("{outcome:?}") };
    assert_eq!((connection, reason), (id, EndReason::PeerShutdown));
    answered_with_rst(&mut muxer, &bye);
    assert!(muxer.end_all(EndReason::DeviceStopped).is_empty());
}

#[test]
fn the_owner_hears_nothing_more_of_a_connection_it_closed() {
    let mut muxer = muxer();
    let id = connect(&mut muxer, 1);
    muxer.send(id, b"bye").unwrap();
    muxer.close(id);
    assert_eq!(muxer.next_packet(100).unwrap().payload, b"bye");
    assert_eq!(muxer.next_packet(100).unwrap().header.op, Operation::Shutdown as u16);

    let late = Header { len: 1, ..header(Operation::Rw, 1) };
    assert!(muxer.receive(&late, b"x".to_vec()).event.is_none());
    assert!(muxer.receive(&header(Operation::Rst, 1), Vec::new()).event.is_none());
    assert!(muxer.entries.is_empty());
}

#[test]
fn connections_take_turns() {
    let mut muxer = muxer();
    for port in [1, 2] {
        let id = connect(&mut muxer, port);
        muxer.send(id, &[0; 250]).unwrap();
    }
    let order: Vec<_> = std::iter::from_fn(|| muxer.next_packet(100)).map(|packet| packet.header.dst_port).collect();
    assert_eq!(order, [1, 2, 1, 2, 1, 2]);
}

#[test]
fn a_guest_that_stops_reading_is_reset() {
    let mut muxer = muxer();
    let id = connect(&mut muxer, 1);
    let chunk = vec![0; 64 * 1024];
    let failed = (0..10).find_map(|_| muxer.send(id, &chunk).err());
    assert_eq!(failed, Some(Fault::PeerNotReading));
    assert_eq!(muxer.counters().refused(Fault::PeerNotReading), 1);
    assert_eq!(muxer.next_packet(100).unwrap().header.op, Operation::Rst as u16);
    assert!(!muxer.has_packet());
}

#[test]
fn a_stop_ends_every_connection_and_tells_a_guest_that_runs_on() {
    let mut muxer = muxer();
    let open = connect(&mut muxer, 1);
    let closing = connect(&mut muxer, 2);
    muxer.close(closing);

    let events = muxer.end_all(EndReason::DeviceStopped);

    assert!(matches!(events[..], [DeviceEvent::Closed { connection, .. }] if connection == open), "{events:?}");
    let ports: Vec<_> = std::iter::from_fn(|| muxer.next_packet(0)).map(|packet| packet.header.dst_port).collect();
    assert_eq!(ports, [1, 2]);
}

#[test]
fn nothing_is_left_for_the_next_front_end() {
    let mut muxer = muxer();
    connect(&mut muxer, 1);
    assert_eq!(muxer.end_all(EndReason::FrontEndGone).len(), 1);
    assert!(!muxer.has_packet());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the guest sends, every connection is announced once and ended at most once, and nothing grows.
    #[test]
    fn survives_any_packets(packets in proptest::collection::vec(
        (0..9_u16, 0..20_u16, 0..40_u32, 0..3_usize, 0..4_u32, any::<bool>()), 0..300,
    )) {
        let mut muxer = muxer();
        let mut open = std::collections::BTreeSet::new();
        for (op, kind, port, len, flags, drain) in packets {
            let payload = vec![0; [0, 1, 60_000][len]];
            let fuzzed = Header {
                op, flags, kind: if kind == 0 { 2 } else { TYPE_STREAM },
                len: wire_len(payload.len()),
                ..header(Operation::Request, port)
            };
            match muxer.receive(&fuzzed, payload).event {
                Some(DeviceEvent::Connected { connection, .. }) => prop_assert!(open.insert(connection)),
                Some(DeviceEvent::Closed { connection, .. }) => prop_assert!(open.remove(&connection)),
                Some(DeviceEvent::Data { connection, .. } | DeviceEvent::PeerFinished { connection }) => {
                    prop_assert!(open.contains(&connection));
                }
                Some(other) => panic!("{other:?}"),
                None => {}
            }
            prop_assert!(muxer.entries.len() <= MAX_CONNECTIONS && muxer.resets.len() <= MAX_RESETS);
            while drain && muxer.next_packet(100).is_some() {}
        }
        prop_assert_eq!(muxer.end_all(EndReason::FrontEndGone).len(), open.len());
    }
}
