#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_possible_truncation)]

use super::*;
use proptest::prelude::*;

fn request(buf_alloc: u32) -> Header {
    Header { buf_alloc, ..Header::default() }
}

fn packet(len: u32, buf_alloc: u32, fwd_cnt: u32) -> Header {
    Header { len, buf_alloc, fwd_cnt, ..Header::default() }
}

/// Accepted, and the RESPONSE is out.
fn open(buf_alloc: u32) -> Connection {
    let mut connection = Connection::accept(&request(buf_alloc));
    assert_eq!(connection.next(0).unwrap().op, Operation::Response);
    assert!(!connection.has_packet());
    connection
}

fn shutdown(connection: &mut Connection, flags: u32) -> Received {
    let header = Header { flags, ..packet(0, 1000, 0) };
    connection.receive(Operation::Shutdown, &header).unwrap()
}

#[test]
fn payload_over_the_credit_is_an_overrun() {
    let mut connection = open(1000);
    let all = packet(RECEIVE_BUFFER, 1000, 0);
    assert_eq!(connection.receive(Operation::Rw, &all), Ok(Received::Data));
    connection.consume(10);
    assert_eq!(connection.receive(Operation::Rw, &packet(10, 1000, 0)), Ok(Received::Data));
    assert_eq!(connection.receive(Operation::Rw, &packet(1, 1000, 0)), Err(Fault::CreditOverrun));
}

#[test]
fn a_guest_cannot_have_taken_more_than_it_was_sent() {
    let mut connection = open(1000);
    connection.send(b"12345").unwrap();
    assert_eq!(connection.next(1000).unwrap().payload, b"12345");
    assert_eq!(connection.receive(Operation::CreditUpdate, &packet(0, 1000, 5)), Ok(Received::Nothing));
    assert_eq!(connection.receive(Operation::CreditUpdate, &packet(0, 1000, 4)), Ok(Received::Nothing), "overtaken");
    assert_eq!(connection.receive(Operation::CreditUpdate, &packet(0, 1000, 6)), Err(Fault::CreditInvalid));
}

#[test]
fn a_guest_that_does_not_read_is_given_up() {
    let mut connection = open(0);
    connection.send(&vec![0; OUTBOUND_LIMIT]).unwrap();
    assert_eq!(connection.send(b"x"), Err(Fault::PeerNotReading));
}

#[test]
fn credit_is_asked_for_once_per_drought() {
    let mut connection = open(3);
    connection.send(b"123456").unwrap();
    assert_eq!(connection.next(1000).unwrap().payload, b"123");
    assert_eq!(connection.next(1000).unwrap().op, Operation::CreditRequest);
    assert_eq!(connection.next(1000), None);
    // An answer without credit does not make it ask again.
    connection.receive(Operation::CreditUpdate, &packet(0, 3, 0)).unwrap();
    assert!(!connection.has_packet());
    connection.receive(Operation::CreditUpdate, &packet(0, 3, 1)).unwrap();
    assert_eq!(connection.next(1000).unwrap().payload, b"4");
    assert_eq!(connection.next(1000).unwrap().op, Operation::CreditRequest);
}

#[test]
fn a_shrunk_buffer_stops_the_sender() {
    let mut connection = open(100);
    connection.send(&[0; 100]).unwrap();
    connection.next(60).unwrap();
    connection.receive(Operation::CreditUpdate, &packet(0, 50, 0)).unwrap();
    let next = connection.next(60);
    assert_eq!(next.unwrap().op, Operation::CreditRequest);
}

#[test]
fn a_credit_request_is_answered_at_once() {
    let mut connection = open(100);
    connection.receive(Operation::Rw, &packet(7, 100, 0)).unwrap();
    connection.consume(7);
    assert!(!connection.has_packet(), "too little to announce unasked");
    connection.receive(Operation::CreditRequest, &packet(0, 100, 0)).unwrap();
    let update = connection.next(0).unwrap();
    assert_eq!((update.op, update.buf_alloc, update.fwd_cnt), (Operation::CreditUpdate, RECEIVE_BUFFER, 7));
    assert!(!connection.has_packet());
}

#[test]
fn a_half_closed_guest_still_receives() {
    let mut connection = open(1000);
    assert_eq!(shutdown(&mut connection, SHUTDOWN_SEND), Received::PeerFinished);
    assert_eq!(shutdown(&mut connection, SHUTDOWN_SEND), Received::Nothing, "said before");
    assert_eq!(connection.receive(Operation::Rw, &packet(1, 1000, 0)), Err(Fault::DataAfterShutdown));
    connection.send(b"bye").unwrap();
    assert_eq!(connection.next(1000).unwrap().payload, b"bye");
    assert_eq!(shutdown(&mut connection, SHUTDOWN_RECEIVE), Received::PeerShutdown);
}

#[test]
fn a_guest_that_receives_no_more_is_sent_nothing() {
    let mut connection = open(1000);
    connection.send(b"too late").unwrap();
    assert_eq!(shutdown(&mut connection, SHUTDOWN_RECEIVE), Received::Nothing);
    connection.send(b"later still").unwrap();
    assert!(!connection.has_packet());
    assert_eq!(connection.receive(Operation::Rw, &packet(1, 1000, 0)), Ok(Received::Data));
}

#[test]
fn a_close_sends_what_is_queued_first() {
    let mut connection = open(4);
    connection.send(b"goodbye").unwrap();
    connection.close();
    connection.send(b"not this").unwrap();
    assert_eq!(connection.next(1000).unwrap().payload, b"good");
    assert_eq!(connection.next(1000).unwrap().op, Operation::CreditRequest);
    assert!(!connection.has_packet());
    connection.receive(Operation::CreditUpdate, &packet(0, 4, 4)).unwrap();
    assert_eq!(connection.next(1000).unwrap().payload, b"bye");
    let end = connection.next(1000).unwrap();
    assert_eq!((end.op, end.flags), (Operation::Shutdown, SHUTDOWN_RECEIVE | SHUTDOWN_SEND));
    assert!(!connection.has_packet());
    // What the guest had under way is dropped and does not exhaust its credit.
    for _ in 0..3 {
        assert_eq!(connection.receive(Operation::Rw, &packet(RECEIVE_BUFFER, 4, 7)), Ok(Received::Nothing));
    }
    assert_eq!(connection.receive(Operation::Rst, &packet(0, 0, 0)), Ok(Received::PeerReset));
}

#[derive(Clone, Debug)]
enum Step {
    GuestSends(u32),
    OwnerConsumes(u32),
    OwnerSends(usize),
    GuestReads(u32),
    GuestTakesPacket(usize),
    GuestUpdates,
    GuestUpdatesLate,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        1 => (1..40_000_u32).prop_map(Step::GuestSends),
        1 => (1..40_000_u32).prop_map(Step::OwnerConsumes),
        1 => (1..20_000_usize).prop_map(Step::OwnerSends),
        1 => (1..40_000_u32).prop_map(Step::GuestReads),
        2 => (0..5_000_usize).prop_map(Step::GuestTakesPacket),
        1 => Just(Step::GuestUpdates),
        1 => Just(Step::GuestUpdatesLate),
    ];
    proptest::collection::vec(step, 1..120)
}

/// A guest and an owner that count in u64 from 0, so that nothing of theirs wraps; only the wire does.
struct Model {
    connection: Connection,
    /// Where both of the connection's streams begin on the wire.
    origin: u32,
    guest_buffer: u64,
    guest_sent: u64,
    guest_credit_until: u64,
    guest_received: u64,
    guest_read: u64,
    guest_read_before: u64,
    owner_consumed: u64,
    owner_sent: u64,
}

impl Model {
    fn new(origin: u32, guest_buffer: u32) -> Self {
        let mut connection = Connection::accept(&request(guest_buffer));
        connection.received = origin;
        connection.consumed = origin;
        connection.announced = origin;
        connection.sent = origin;
        connection.peer_fwd_cnt = origin;
        Self {
            connection,
            origin,
            guest_buffer: guest_buffer.into(),
            guest_sent: 0,
            guest_credit_until: 0,
            guest_received: 0,
            guest_read: 0,
            guest_read_before: 0,
            owner_consumed: 0,
            owner_sent: 0,
        }
    }

    fn wire(&self, total: u64) -> u32 {
        (u64::from(self.origin) + total) as u32
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::GuestSends(n) => {
                let len = u64::from(n).min(self.guest_credit_until - self.guest_sent);
                self.guest_sent += len;
                let header = packet(len as u32, self.guest_buffer as u32, self.wire(self.guest_read));
                let expected = if len == 0 { Received::Nothing } else { Received::Data };
                assert_eq!(self.connection.receive(Operation::Rw, &header), Ok(expected), "within its credit");
            }
            Step::OwnerConsumes(n) => {
                let len = u64::from(n).min(self.guest_sent - self.owner_consumed);
                self.owner_consumed += len;
                self.connection.consume(len as u32);
            }
            Step::OwnerSends(n) => {
                let bytes: Vec<u8> = (self.owner_sent..).take(n).map(byte_at).collect();
                let room = OUTBOUND_LIMIT as u64 - (self.owner_sent - self.guest_received);
                match self.connection.send(&bytes) {
                    Ok(()) => self.owner_sent += n as u64,
                    Err(fault) => assert!(fault == Fault::PeerNotReading && n as u64 > room),
                }
            }
            Step::GuestReads(n) => {
                self.guest_read += u64::from(n).min(self.guest_received - self.guest_read);
            }
            Step::GuestTakesPacket(room) => drop(self.take_packet(room)),
            Step::GuestUpdates => self.update(self.guest_read),
            Step::GuestUpdatesLate => self.update(self.guest_read_before),
        }
    }

    fn update(&mut self, read: u64) {
        let header = packet(0, self.guest_buffer as u32, self.wire(read));
        assert_eq!(self.connection.receive(Operation::CreditUpdate, &header), Ok(Received::Nothing));
        self.guest_read_before = self.guest_read;
    }

    fn take_packet(&mut self, room: usize) -> Option<Operation> {
        let announced = self.connection.has_packet();
        let Some(packet) = self.connection.next(room) else {
            assert!(room == 0 || !announced, "has_packet without a packet");
            return None;
        };
        assert!(announced, "a packet without has_packet");
        assert!(packet.payload.len() <= room);
        for byte in &packet.payload {
            assert_eq!(*byte, byte_at(self.guest_received), "lost or out of order");
            self.guest_received += 1;
        }
        assert!(self.guest_received - self.guest_read <= self.guest_buffer, "more than the guest has room for");
        assert_eq!(packet.fwd_cnt, self.wire(self.owner_consumed));
        self.guest_credit_until = self.owner_consumed + u64::from(packet.buf_alloc);
        assert!(self.guest_credit_until - self.owner_consumed <= u64::from(RECEIVE_BUFFER));
        if packet.op == Operation::CreditRequest {
            self.update(self.guest_read);
        }
        Some(packet.op)
    }

    /// Everybody reads whatever there is; afterwards nothing may be left anywhere.
    fn settle(&mut self) {
        // At least one byte per packet, and every other packet may be about credit.
        for _ in 0..2 * self.owner_sent + 1000 {
            self.guest_read = self.guest_received;
            self.update(self.guest_read);
            self.step(&Step::OwnerConsumes(u32::MAX));
            if self.take_packet(4096).is_none() {
                break;
            }
        }
        assert!(!self.connection.has_packet(), "does not come to rest");
        assert_eq!(self.guest_received, self.owner_sent, "not everything arrived");
        let credit = self.guest_credit_until - self.guest_sent;
        assert!(credit > u64::from(RECEIVE_BUFFER / 2), "the guest was left with {credit} bytes of credit");
    }
}

/// Not periodic in any packet size, so that a lost or repeated chunk shows.
fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Credit is never exceeded in either direction, nothing is lost or reordered, and nobody is left stuck, wherever
    /// on the circle of 2^32 the counters are.
    #[test]
    fn agrees_with_a_model_that_does_not_wrap(
        origin in prop_oneof![Just(0), (u32::MAX - 20_000)..=u32::MAX, any::<u32>()],
        guest_buffer in prop_oneof![1..5_000_u32, 1..300_000_u32],
        steps in steps(),
    ) {
        let mut model = Model::new(origin, guest_buffer);
        for step in &steps {
            model.step(step);
        }
        model.settle();
    }

    /// Any packet in any state is taken or refused, and memory stays bounded.
    #[test]
    fn survives_any_packets(packets in proptest::collection::vec(
        (1..8_u16, 0..70_000_u32, any::<u32>(), any::<u32>(), 0..5_u32), 0..60,
    )) {
        let mut connection = open(1000);
        for (op, len, buf_alloc, fwd_cnt, flags) in packets {
            let header = Header { op, kind: 1, flags, len: if op == 5 { len } else { 0 }, buf_alloc, fwd_cnt, ..Header::default() };
            let Ok(op) = header.validate() else { continue };
            if connection.receive(op, &header).is_err() {
                break;
            }
            let held = connection.received.wrapping_sub(connection.consumed);
            prop_assert!(held <= RECEIVE_BUFFER);
            // A full buffer is refused, which is fine here; what counts is that it stays bounded.
            let _ = connection.send(&[0; 1000]);
            prop_assert!(connection.outbound.len() <= OUTBOUND_LIMIT);
            let _ = connection.next(300);
        }
    }
}
