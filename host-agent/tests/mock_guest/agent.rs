//! A guest agent in the mock guest: streams over the driver's packets, frames over streams, a session over frames.
//!
//! It can do everything right, and stop doing so at any point: raw bytes, silence, no credit.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use fpr_protocol::message::{FreedPages, Hello, Prove, Proven, RangeResult, Report, Survey, SurveyReply, Welcome};
use fpr_protocol::{
    Cookie, Frame, FrameDecoder, GuestAddress, HugePageRange, Isolation, Message, ReportedRange, VersionRange, frame,
};
use vm_memory::Bytes;

use super::{CREDIT_UPDATE, Guest, Packet, REQUEST, RESPONSE, RST, RW};

/// Operations that only this file needs (virtio 1.2, section 5.10.6).
const SHUTDOWN: u16 = 4;
const CREDIT_REQUEST: u16 = 7;
/// Both directions.
const SHUTDOWN_BOTH: u32 = 3;
const SHUTDOWN_SEND: u32 = 2;
/// The device's receive buffer per connection.
const HOST_BUFFER: u32 = 64 * 1024;
const CHUNK: usize = 4000;

/// What the guest does with what it is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// Reads it and gives credit back.
    Yes,
    /// Leaves it where it is: after 4 KiB the host has no credit left.
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pings {
    Answer,
    Ignore,
}

struct Stream {
    decoder: FrameDecoder,
    messages: VecDeque<Message>,
    received: u32,
    sent: u32,
    host_took: u32,
    accepted: bool,
    ended: bool,
    reading: Reading,
    pings: Pings,
    unanswered: Option<u64>,
    pongs: u32,
}

pub struct Agent {
    pub guest: Guest,
    streams: BTreeMap<u32, Stream>,
    next_port: u32,
}

/// A live session: which stream, and what goes into cookies.
#[derive(Clone, Debug)]
pub struct Session {
    pub port: u32,
    pub welcome: Welcome,
    pub sequence: u64,
}

impl Session {
    pub fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }
}

pub fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    Duration::from(now).as_nanos() as u64
}

pub fn hello() -> Hello {
    Hello {
        versions: VersionRange::SUPPORTED,
        agent_version: "0.0.0-mock".into(),
        boot_id: [7; 16],
        page_size: 4096,
        huge_page_order: 9,
        memory_block_bytes: 128 << 20,
        memory_total_bytes: 32 << 20,
        kernel_release: "6.12-mock".into(),
        freed_pages: FreedPages::Untouched,
        confidential: false,
        now_ns: now_ns(),
    }
}

pub fn range(start: u64, count: u32) -> HugePageRange {
    HugePageRange { start: GuestAddress(start), count }
}

pub fn claimed(start: u64, count: u32) -> ReportedRange {
    ReportedRange { range: range(start, count), isolation: Isolation::Claimed }
}

pub fn offlined(start: u64, count: u32) -> ReportedRange {
    ReportedRange { range: range(start, count), isolation: Isolation::Offlined }
}

impl Agent {
    /// In a guest whose VMM has just connected to `socket` and whose queues run.
    pub fn boot(socket: &std::path::Path) -> Self {
        let mut guest = Guest::connect(socket);
        guest.set_memory();
        guest.start();
        Self { guest, streams: BTreeMap::new(), next_port: 1023 }
    }

    /// A connection to the host agent on a port of its own; false if it was refused.
    pub fn connect_as(&mut self, port: u32, reading: Reading) -> bool {
        let stream = Stream {
            decoder: FrameDecoder::default(),
            messages: VecDeque::new(),
            received: 0,
            sent: 0,
            host_took: 0,
            accepted: false,
            ended: false,
            reading,
            pings: Pings::Answer,
            unanswered: None,
            pongs: 0,
        };
        self.streams.insert(port, stream);
        self.packet(port, REQUEST, 0, b"");
        while !self.streams[&port].accepted && !self.streams[&port].ended {
            self.pump();
        }
        self.streams[&port].accepted
    }

    pub fn connect(&mut self) -> u32 {
        let port = self.free_port();
        assert!(self.connect_as(port, Reading::Yes), "connection refused");
        port
    }

    pub fn free_port(&mut self) -> u32 {
        // Downwards as real agents do, and round: an ended connection's port may be used again.
        self.next_port = if self.next_port == 512 { 1023 } else { self.next_port - 1 };
        self.next_port
    }

    /// Answers the ping that came already, and all that come.
    pub fn answer_pings(&mut self, port: u32) {
        let stream = self.stream(port);
        stream.pings = Pings::Answer;
        if let Some(id) = stream.unanswered.take() {
            stream.pongs += 1;
            self.send(port, &Message::Pong { id, now_ns: now_ns() });
        }
    }

    /// Bytes as they are, in packets, as far as the host gives credit.
    pub fn send_bytes(&mut self, port: u32, bytes: &[u8]) {
        for chunk in bytes.chunks(CHUNK) {
            let len = chunk.len() as u32;
            while self.streams[&port].sent.wrapping_sub(self.streams[&port].host_took) + len > HOST_BUFFER {
                if self.streams[&port].ended {
                    return;
                }
                self.pump();
            }
            self.stream(port).sent += len;
            self.packet(port, RW, 0, chunk);
        }
    }

    pub fn send(&mut self, port: u32, message: &Message) {
        self.send_bytes(port, &frame::encode(message).unwrap());
    }

    /// Closes the connection, both directions at once.
    pub fn close(&mut self, port: u32) {
        self.packet(port, SHUTDOWN, SHUTDOWN_BOTH, b"");
        self.wait_end(port);
    }

    /// Says that nothing more will come; still reads.
    pub fn finish_sending(&mut self, port: u32) {
        self.packet(port, SHUTDOWN, SHUTDOWN_SEND, b"");
    }

    /// Payload for a connection that never was.
    pub fn send_stray_packet(&mut self) {
        self.guest.send(&Packet::new(RW, 1, b"x"));
    }

    /// Waits for the end of a connection and returns what the host said last.
    pub fn wait_end(&mut self, port: u32) -> Option<Message> {
        while !self.streams[&port].ended {
            self.pump();
        }
        self.stream(port).messages.pop_back()
    }

    pub fn has_ended(&self, port: u32) -> bool {
        self.streams[&port].ended
    }

    /// The next message, or `None` when the host has closed the connection.
    pub fn next(&mut self, port: u32) -> Option<Message> {
        loop {
            let stream = self.stream(port);
            if let Some(message) = stream.messages.pop_front() {
                return Some(message);
            }
            if stream.ended {
                return None;
            }
            self.pump();
        }
    }

    /// The next message that `wanted` takes; others of a live session may come before it.
    fn find<T>(&mut self, port: u32, wanted: impl Fn(Message) -> Result<T, Message>) -> T {
        loop {
            match wanted(self.next(port).expect("the session is alive")) {
                Ok(found) => return found,
                Err(Message::Goodbye { reason }) => panic!("the host closed the session: {reason}"),
                Err(_) => {}
            }
        }
    }

    /// `Hello` up to the first `Pong`, so that reports can be judged.
    pub fn start_session(&mut self, hello: Hello) -> Session {
        let session = self.start_session_without_clock(hello);
        self.answer_pings(session.port);
        while self.streams[&session.port].pongs == 0 {
            self.pump();
        }
        session
    }

    /// `Welcome`, and no `Pong` after it unless [`answer_pings`](Self::answer_pings) says so.
    pub fn start_session_without_clock(&mut self, hello: Hello) -> Session {
        let port = self.connect();
        self.stream(port).pings = Pings::Ignore;
        self.send(port, &Message::Hello(hello));
        let welcome = self.find(port, |message| match message {
            Message::Welcome(welcome) => Ok(welcome),
            other => Err(other),
        });
        Session { port, welcome, sequence: 0 }
    }

    /// Writes the cookies that a `Prove` of these pages needs and sends it.
    pub fn prove(&mut self, session: &mut Session, pages: &[u64]) -> Proven {
        let sequence = session.next_sequence();
        for (index, page) in pages.iter().enumerate() {
            self.write_cookie(session, sequence, index as u32, *page);
        }
        self.prove_as_is(session, sequence, pages)
    }

    pub fn prove_as_is(&mut self, session: &Session, sequence: u64, pages: &[u64]) -> Proven {
        let pages = pages.iter().map(|page| GuestAddress(*page)).collect();
        self.send(session.port, &Message::Prove(Prove { sequence, pages }));
        self.find(session.port, |message| match message {
            Message::Proven(proven) => Ok(proven),
            other => Err(other),
        })
    }

    pub fn write_cookie(&mut self, session: &Session, sequence: u64, index: u32, page: u64) {
        let address = GuestAddress(page);
        let cookie = Cookie { session_nonce: session.welcome.session_nonce, sequence, index, address };
        self.guest.memory.write_slice(&cookie.to_bytes(), vm_memory::GuestAddress(page)).unwrap();
    }

    /// Copies the cookie of one page to another, address and all.
    pub fn copy_cookie(&mut self, from: u64, to: u64) {
        let mut cookie = [0; Cookie::LEN];
        self.guest.memory.read_slice(&mut cookie, vm_memory::GuestAddress(from)).unwrap();
        self.guest.memory.write_slice(&cookie, vm_memory::GuestAddress(to)).unwrap();
    }

    pub fn survey(&mut self, session: &mut Session, ranges: Vec<HugePageRange>) -> SurveyReply {
        let sequence = session.next_sequence();
        self.send(session.port, &Message::Survey(Survey { sequence, ranges }));
        self.find(session.port, |message| match message {
            Message::SurveyReply(reply) => Ok(reply),
            other => Err(other),
        })
    }

    pub fn report(&mut self, session: &mut Session, ranges: Vec<ReportedRange>) -> Vec<RangeResult> {
        let sequence = session.next_sequence();
        self.report_as(session, sequence, now_ns(), ranges)
    }

    pub fn report_as(
        &mut self,
        session: &Session,
        sequence: u64,
        sent_at_ns: u64,
        ranges: Vec<ReportedRange>,
    ) -> Vec<RangeResult> {
        self.send(session.port, &Message::Report(Report { sequence, sent_at_ns, ranges }));
        let ack = self.find(session.port, |message| match message {
            Message::Ack(ack) => Ok(ack),
            other => Err(other),
        });
        assert_eq!(ack.sequence, sequence);
        ack.results
    }

    fn stream(&mut self, port: u32) -> &mut Stream {
        self.streams.get_mut(&port).unwrap()
    }

    fn packet(&mut self, port: u32, op: u16, flags: u32, payload: &[u8]) {
        let stream = self.stream(port);
        let (buf_alloc, fwd_cnt) = match stream.reading {
            Reading::Yes => (1 << 18, stream.received),
            Reading::Never => (4096, 0),
        };
        self.guest.send(&Packet { flags, buf_alloc, fwd_cnt, ..Packet::new(op, port, payload) });
    }

    /// Takes what has come, and waits for nothing.
    pub fn serve_waiting(&mut self) {
        while self.guest.has_packet() {
            self.pump();
        }
    }

    /// Takes one packet of the host and does what a guest's kernel and its agent do with it.
    fn pump(&mut self) {
        let packet = self.guest.receive();
        let port = packet.dst.1;
        let Some(stream) = self.streams.get_mut(&port).filter(|stream| !stream.ended) else { return };
        if packet.src != (2, fpr_protocol::PORT) {
            return;
        }
        stream.host_took = packet.fwd_cnt.max(stream.host_took);
        match packet.op {
            RESPONSE => stream.accepted = true,
            RST => stream.ended = true,
            SHUTDOWN => {
                stream.ended = true;
                self.packet(port, RST, 0, b"");
            }
            CREDIT_REQUEST => self.packet(port, CREDIT_UPDATE, 0, b""),
            RW => {
                stream.received += packet.payload.len() as u32;
                stream.decoder.push(&packet.payload);
                self.take_frames(port);
                if self.stream(port).reading == Reading::Yes && !packet.payload.is_empty() {
                    self.packet(port, CREDIT_UPDATE, 0, b"");
                }
            }
            _ => {}
        }
    }

    fn take_frames(&mut self, port: u32) {
        while let Some(frame) = self.stream(port).decoder.next_frame().expect("the host sends frames") {
            let stream = self.stream(port);
            match frame {
                Frame::Message(Message::Ping { id }) if stream.pings == Pings::Answer => {
                    stream.pongs += 1;
                    self.send(port, &Message::Pong { id, now_ns: now_ns() });
                }
                Frame::Message(Message::Ping { id }) => stream.unanswered = Some(id),
                Frame::Message(message) => stream.messages.push_back(message),
                Frame::Skipped { .. } => {}
            }
        }
    }
}
