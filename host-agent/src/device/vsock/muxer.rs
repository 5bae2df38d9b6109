//! All stream connections of one guest: which packet belongs to which, what is refused, who sends next.
//!
//! The backend feeds it every packet of the transmit queue and asks it for packets for the receive queue; the owner's
//! [`DeviceHandle`](super::DeviceHandle) sends and closes through it. Sans-I/O and without a clock. Trusts nothing in
//! a packet, and its memory is bounded whatever the guest sends: [`MAX_CONNECTIONS`] connections, each with bounded
//! buffers, and [`MAX_RESETS`] resets.
//!
//! Only a source port below 1024 may reach the agent's port: binding one takes CAP_NET_BIND_SERVICE in the guest
//! (Linux `__vsock_bind_connectible`, LAST_RESERVED_PORT 1023), otherwise any process in the guest could speak for
//! the whole guest.

use std::collections::VecDeque;

use super::connection::{Connection, Outgoing, Received, wire_len};
use super::counters::Counters;
use super::fault::Fault;
use super::packet::{HOST_CID, Header, Operation, Packet, TYPE_STREAM};
use crate::device::{ConnectionId, DeviceEvent, EndReason};

/// Most connections of one guest. The agent needs one; the rest is for a reconnect that overlaps the old connection
/// and for connections that wait for the guest's last RST.
pub(super) const MAX_CONNECTIONS: usize = 16;

/// Most resets that wait for the guest to offer receive buffers: one per buffer of Linux' receive ring (128 entries
/// in QEMU).
pub(super) const MAX_RESETS: usize = 128;

/// First source port that needs no privilege in the guest (net/vmw_vsock/af_vsock.c, LAST_RESERVED_PORT + 1).
const FIRST_UNPRIVILEGED_PORT: u32 = 1024;

#[derive(Debug)]
struct Entry {
    id: ConnectionId,
    guest_port: u32,
    connection: Connection,
}

/// What a packet of the guest did: an event for the owner, a fault to log, both or neither.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) event: Option<DeviceEvent>,
    pub(super) fault: Option<Fault>,
}

/// The connections of one guest.
#[derive(Debug)]
pub(super) struct Muxer {
    guest_cid: u64,
    agent_port: u32,
    /// In order of sending; the first has waited longest.
    entries: VecDeque<Entry>,
    resets: VecDeque<Header>,
    next_id: u64,
    counters: Counters,
}

impl Muxer {
    /// A guest without connections. `agent_port` is the only port that is listened on.
    pub(super) fn new(guest_cid: u64, agent_port: u32) -> Self {
        Self {
            guest_cid,
            agent_port,
            entries: VecDeque::new(),
            resets: VecDeque::new(),
            next_id: 1,
            counters: Counters::default(),
        }
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Counts a fault found outside of any packet, such as an unreadable descriptor.
    pub(super) fn count(&mut self, fault: Fault) {
        self.counters.refuse(fault);
    }

    /// Takes a packet of the guest.
    pub(super) fn receive(&mut self, header: &Header, payload: Vec<u8>) -> Outcome {
        self.counters.packets_received += 1;
        // Somebody else's address: not even worth an answer, which would go to that somebody.
        if header.src_cid != self.guest_cid {
            self.counters.refuse(Fault::WrongCid);
            return Outcome { event: None, fault: Some(Fault::WrongCid) };
        }
        match self.dispatch(header, payload) {
            Ok(event) => Outcome { event, fault: None },
            Err(fault) => self.refuse(header, fault),
        }
    }

    fn dispatch(&mut self, header: &Header, payload: Vec<u8>) -> Result<Option<DeviceEvent>, Fault> {
        let op = header.validate()?;
        if header.len != wire_len(payload.len()) {
            return Err(Fault::BadLength);
        }
        if header.dst_cid != HOST_CID {
            return Err(Fault::WrongCid);
        }
        match op {
            Operation::Request => self.accept(header).map(Some),
            Operation::Response => Err(Fault::UnexpectedOperation),
            _ => self.deliver(op, header, payload),
        }
    }

    fn accept(&mut self, header: &Header) -> Result<DeviceEvent, Fault> {
        if header.dst_port != self.agent_port {
            return Err(Fault::UnknownPort);
        }
        if header.src_port >= FIRST_UNPRIVILEGED_PORT {
            return Err(Fault::UnprivilegedPort);
        }
        if let Some(at) = self.find(header) {
            if !self.entries[at].connection.is_closing() {
                return Err(Fault::DuplicateRequest);
            }
            // The guest has a new socket on this port, so nobody waits for the end of the old one any more.
            self.entries.remove(at);
        }
        if self.entries.len() == MAX_CONNECTIONS {
            let at = self.oldest_closing().ok_or(Fault::TooManyConnections)?;
            self.remove_with_rst(at);
        }
        // A reset that still waits for this port speaks of an earlier socket and would kill the new one.
        self.resets.retain(|reset| (reset.src_port, reset.dst_port) != (header.dst_port, header.src_port));
        let id = ConnectionId(self.next_id);
        self.next_id += 1;
        self.counters.connections_accepted += 1;
        self.entries.push_back(Entry { id, guest_port: header.src_port, connection: Connection::accept(header) });
        Ok(DeviceEvent::Connected { connection: id, peer_port: header.src_port })
    }

    fn deliver(&mut self, op: Operation, header: &Header, payload: Vec<u8>) -> Result<Option<DeviceEvent>, Fault> {
        let Some(at) = self.find(header) else {
            return if op == Operation::Rst { Ok(None) } else { Err(Fault::UnknownConnection) };
        };
        let entry = &mut self.entries[at];
        let connection = entry.id;
        let closing = entry.connection.is_closing();
        match entry.connection.receive(op, header)? {
            Received::Nothing => Ok(None),
            Received::Data => {
                self.counters.bytes_received += u64::from(header.len);
                Ok(Some(DeviceEvent::Data { connection, bytes: payload }))
            }
            Received::PeerFinished => Ok(Some(DeviceEvent::PeerFinished { connection })),
            Received::PeerShutdown => {
                self.remove_with_rst(at);
                Ok((!closing).then_some(DeviceEvent::Closed { connection, reason: EndReason::PeerShutdown }))
            }
            Received::PeerReset => {
                self.entries.remove(at);
                Ok((!closing).then_some(DeviceEvent::Closed { connection, reason: EndReason::PeerReset }))
            }
        }
    }

    /// Answers a faulty packet with RST and ends the connection it belonged to, whose stream has lost its place.
    fn refuse(&mut self, header: &Header, fault: Fault) -> Outcome {
        self.counters.refuse(fault);
        let mut event = None;
        if let Some(at) = self.find(header).filter(|_| header.dst_cid == HOST_CID)
            && let Some(entry) = self.entries.remove(at)
            && !entry.connection.is_closing()
        {
            event = Some(DeviceEvent::Closed { connection: entry.id, reason: EndReason::Fault(fault) });
        }
        if !header.is_rst() {
            self.push_reset(header.rst_reply());
        }
        Outcome { event, fault: Some(fault) }
    }

    /// Queues bytes for the guest.
    ///
    /// # Errors
    /// [`Fault::UnknownConnection`] if the connection is gone. [`Fault::PeerNotReading`] if its buffer is full; the
    /// connection was reset.
    pub(super) fn send(&mut self, id: ConnectionId, bytes: &[u8]) -> Result<(), Fault> {
        let at = self.position(id).ok_or(Fault::UnknownConnection)?;
        self.entries[at].connection.send(bytes).inspect_err(|fault| {
            self.counters.refuse(*fault);
            self.remove_with_rst(at);
        })
    }

    /// Turns bytes the owner has taken into credit for the guest. An unknown connection is gone and needs none.
    pub(super) fn consume(&mut self, id: ConnectionId, bytes: usize) {
        if let Some(at) = self.position(id) {
            self.entries[at].connection.consume(wire_len(bytes));
        }
    }

    /// Ends a connection in order: what is queued is still sent.
    pub(super) fn close(&mut self, id: ConnectionId) {
        if let Some(at) = self.position(id) {
            self.entries[at].connection.close();
        }
    }

    /// Ends a connection at once.
    pub(super) fn reset(&mut self, id: ConnectionId) {
        if let Some(at) = self.position(id) {
            self.remove_with_rst(at);
        }
    }

    /// Ends every connection. After a stop the guest may run on (QEMU `stop` and `cont`), so it is told; after the
    /// front end has gone there is nobody to tell.
    pub(super) fn end_all(&mut self, reason: EndReason) -> Vec<DeviceEvent> {
        let ended = self
            .entries
            .iter()
            .filter(|entry| !entry.connection.is_closing())
            .map(|entry| DeviceEvent::Closed { connection: entry.id, reason })
            .collect();
        while !self.entries.is_empty() {
            self.remove_with_rst(0);
        }
        if reason == EndReason::FrontEndGone {
            self.resets.clear();
        }
        ended
    }

    /// Whether [`next_packet`](Self::next_packet) with enough room would return a packet.
    pub(super) fn has_packet(&self) -> bool {
        !self.resets.is_empty() || self.entries.iter().any(|entry| entry.connection.has_packet())
    }

    /// The next packet for the guest, its payload at most `room` bytes. Connections take turns.
    pub(super) fn next_packet(&mut self, room: usize) -> Option<Packet> {
        if let Some(header) = self.resets.pop_front() {
            self.counters.packets_sent += 1;
            return Some(Packet { header, payload: Vec::new() });
        }
        let (at, out) =
            self.entries.iter_mut().enumerate().find_map(|(at, entry)| Some((at, entry.connection.next(room)?)))?;
        let entry = self.entries.remove(at)?;
        let packet = self.address(entry.guest_port, out);
        self.entries.push_back(entry);
        self.counters.packets_sent += 1;
        self.counters.bytes_sent += u64::from(packet.header.len);
        Some(packet)
    }

    fn address(&self, guest_port: u32, out: Outgoing) -> Packet {
        let header = Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: self.agent_port,
            dst_port: guest_port,
            len: wire_len(out.payload.len()),
            kind: TYPE_STREAM,
            op: out.op as u16,
            flags: out.flags,
            buf_alloc: out.buf_alloc,
            fwd_cnt: out.fwd_cnt,
        };
        Packet { header, payload: out.payload }
    }

    fn find(&self, header: &Header) -> Option<usize> {
        if header.dst_port != self.agent_port {
            return None;
        }
        self.entries.iter().position(|entry| entry.guest_port == header.src_port)
    }

    fn position(&self, id: ConnectionId) -> Option<usize> {
        self.entries.iter().position(|entry| entry.id == id)
    }

    fn oldest_closing(&self) -> Option<usize> {
        let closing = self.entries.iter().enumerate().filter(|(_, entry)| entry.connection.is_closing());
        closing.min_by_key(|(_, entry)| entry.id).map(|(at, _)| at)
    }

    fn remove_with_rst(&mut self, at: usize) {
        if let Some(entry) = self.entries.remove(at) {
            let reset = Header {
                src_cid: HOST_CID,
                dst_cid: self.guest_cid,
                src_port: self.agent_port,
                dst_port: entry.guest_port,
                kind: TYPE_STREAM,
                op: Operation::Rst as u16,
                ..Header::default()
            };
            self.push_reset(reset);
        }
    }

    fn push_reset(&mut self, header: Header) {
        if self.resets.len() == MAX_RESETS {
            self.counters.refuse(Fault::ReplyQueueFull);
        } else {
            self.resets.push_back(header);
        }
    }
}

#[cfg(test)]
#[path = "muxer_tests.rs"]
mod tests;
