//! One stream connection: its credit, its outbound bytes and how it ends.
//!
//! The muxer feeds it packets of the guest and bytes of the owner and asks it for packets to send. Sans-I/O and without
//! a clock: a connection that waits for the guest holds bounded memory and can wait for ever. The guest opens every
//! connection; the host only accepts.
//!
//! Credit (virtio 1.2, section 5.10.6.3). Each side says in every packet how large its receive buffer is
//! (`buf_alloc`) and how many bytes it has taken out of it (`fwd_cnt`, modulo 2^32); the other side never has more
//! than `buf_alloc` bytes under way. All counters wrap, so only differences are compared.
//!
//! ```text
//!            REQUEST                 close()                 outbound empty
//!  (nothing) -------> open ------------------> draining ---------------------> shut down
//!                      |                          |           sends SHUTDOWN       |
//!                      +--------------------------+--------------------------------+---> gone
//!             RST or SHUTDOWN of both directions by the guest; a fault; stop of the device
//! ```
//! A shut down connection stays until the guest answers with RST, because an earlier RST of ours would throw away what
//! the guest has not read yet (Linux `__vsock_connectible_recvmsg` checks the state before the data).

use std::collections::VecDeque;

use super::fault::Fault;
use super::packet::{Header, MAX_PAYLOAD, Operation, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Bytes the guest may have under way to the host on one connection: one largest message of the agent protocol.
pub(super) const RECEIVE_BUFFER: u32 = 64 * 1024;

/// Taken bytes are announced once they are this many: half of the buffer keeps the guest sending without an extra
/// packet per read.
const CREDIT_UPDATE_AT: u32 = RECEIVE_BUFFER / 2;

/// Most bytes the host keeps for a guest that does not read: a few largest messages. A session answers one report at a
/// time, so a healthy guest never comes near.
pub(super) const OUTBOUND_LIMIT: usize = 256 * 1024;

/// What a packet of the guest did.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Bookkeeping only.
    Nothing,
    /// The payload counts and goes to the owner.
    Data,
    /// The guest will send no more; it still receives.
    PeerFinished,
    /// The guest closed both directions. The connection is gone and an RST confirms it.
    PeerShutdown,
    /// The guest reset the connection. It is gone.
    PeerReset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Local {
    Open,
    Draining,
    ShutDown,
}

/// State of one connection.
#[derive(Debug)]
pub(super) struct Connection {
    local: Local,
    peer_sends: bool,
    peer_receives: bool,

    received: u32,
    consumed: u32,
    announced: u32,

    outbound: VecDeque<u8>,
    sent: u32,
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,

    response_due: bool,
    credit_requested: bool,
    credit_request_due: bool,
    credit_update_due: bool,
}

/// A packet of one connection, without its addresses.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) op: Operation,
    pub(super) flags: u32,
    pub(super) payload: Vec<u8>,
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

impl Connection {
    /// Accepts the guest's REQUEST.
    pub(super) fn accept(request: &Header) -> Self {
        Self {
            local: Local::Open,
            peer_sends: true,
            peer_receives: true,
            received: 0,
            consumed: 0,
            announced: 0,
            outbound: VecDeque::new(),
            sent: 0,
            peer_buf_alloc: request.buf_alloc,
            peer_fwd_cnt: 0,
            response_due: true,
            credit_requested: false,
            credit_request_due: false,
            credit_update_due: false,
        }
    }

    /// Whether the owner has closed the connection, so that nothing more is delivered from it.
    pub(super) fn is_closing(&self) -> bool {
        self.local != Local::Open
    }

    /// Takes a valid packet of the guest other than REQUEST and RESPONSE. `header.len` is the length of its payload.
    ///
    /// # Errors
    /// A [`Fault`] ends the connection.
    pub(super) fn receive(&mut self, op: Operation, header: &Header) -> Result<Received, Fault> {
        if op == Operation::Rst {
            return Ok(Received::PeerReset);
        }
        self.take_credit(header)?;
        match op {
            Operation::Rw => self.receive_payload(header.len),
            Operation::Shutdown => Ok(self.receive_shutdown(header.flags)),
            Operation::CreditRequest => {
                self.credit_update_due = true;
                Ok(Received::Nothing)
            }
            Operation::CreditUpdate => Ok(Received::Nothing),
            Operation::Request | Operation::Response | Operation::Rst => Err(Fault::UnexpectedOperation),
        }
    }

    /// Queues bytes for the guest. Bytes after the guest stopped receiving, or after `close`, go nowhere.
    ///
    /// # Errors
    /// [`Fault::PeerNotReading`] when the guest has left too much unread; nothing of `bytes` was queued.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        if !self.peer_receives || self.is_closing() {
            return Ok(());
        }
        if self.outbound.len() + bytes.len() > OUTBOUND_LIMIT {
            return Err(Fault::PeerNotReading);
        }
        self.outbound.extend(bytes);
        self.note_missing_credit();
        Ok(())
    }

    /// The owner has taken `bytes` out of the receive buffer: they become credit again. More than was delivered
    /// counts as all of it.
    pub(super) fn consume(&mut self, bytes: u32) {
        let held = self.received.wrapping_sub(self.consumed);
        self.consumed = self.consumed.wrapping_add(bytes.min(held));
        if self.consumed.wrapping_sub(self.announced) >= CREDIT_UPDATE_AT {
            self.credit_update_due = true;
        }
    }

    /// The owner is done: what is queued is still sent, then SHUTDOWN of both directions.
    pub(super) fn close(&mut self) {
        if self.local == Local::Open {
            self.local = Local::Draining;
            self.consume(u32::MAX);
        }
    }

    /// Whether [`next`](Self::next) with enough room would return a packet.
    pub(super) fn has_packet(&self) -> bool {
        self.response_due
            || self.credit_update_due
            || self.credit_request_due
            || (!self.outbound.is_empty() && self.peer_free() > 0)
            || (self.local == Local::Draining && self.outbound.is_empty())
    }

    /// The next packet for the guest, its payload at most `room` bytes.
    pub(super) fn next(&mut self, room: usize) -> Option<Outgoing> {
        let chunk = self.chunk(room);
        if self.response_due {
            self.response_due = false;
            return Some(self.packet(Operation::Response, 0, Vec::new()));
        }
        if chunk > 0 {
            let payload: Vec<u8> = self.outbound.drain(..chunk).collect();
            self.sent = self.sent.wrapping_add(wire_len(chunk));
            self.note_missing_credit();
            return Some(self.packet(Operation::Rw, 0, payload));
        }
        if self.credit_update_due {
            return Some(self.packet(Operation::CreditUpdate, 0, Vec::new()));
        }
        if self.credit_request_due {
            self.credit_request_due = false;
            return Some(self.packet(Operation::CreditRequest, 0, Vec::new()));
        }
        if self.local == Local::Draining && self.outbound.is_empty() {
            self.local = Local::ShutDown;
            return Some(self.packet(Operation::Shutdown, SHUTDOWN_RECEIVE | SHUTDOWN_SEND, Vec::new()));
        }
        None
    }

    fn take_credit(&mut self, header: &Header) -> Result<(), Fault> {
        // Ahead of what was sent, in the half of the number circle that counts as ahead.
        if header.fwd_cnt.wrapping_sub(self.sent).cast_signed() > 0 {
            return Err(Fault::CreditInvalid);
        }
        // Behind an earlier value is legal: Linux fills in the header before it queues the packet, and two senders can
        // overtake. It costs credit until the next packet, and a drought ends with the answer to our request.
        self.peer_fwd_cnt = header.fwd_cnt;
        self.peer_buf_alloc = header.buf_alloc;
        if self.peer_free() > 0 {
            self.credit_requested = false;
            self.credit_request_due = false;
        }
        self.note_missing_credit();
        Ok(())
    }

    fn receive_payload(&mut self, len: u32) -> Result<Received, Fault> {
        if !self.peer_sends {
            return Err(Fault::DataAfterShutdown);
        }
        let held = self.received.wrapping_sub(self.consumed);
        if len > RECEIVE_BUFFER - held {
            return Err(Fault::CreditOverrun);
        }
        self.received = self.received.wrapping_add(len);
        if self.is_closing() {
            // Under way before the guest saw the SHUTDOWN; nobody is left to take it.
            self.consume(len);
            return Ok(Received::Nothing);
        }
        Ok(if len == 0 { Received::Nothing } else { Received::Data })
    }

    fn receive_shutdown(&mut self, flags: u32) -> Received {
        if flags & SHUTDOWN_RECEIVE != 0 {
            self.peer_receives = false;
            self.outbound.clear();
            self.credit_request_due = false;
        }
        let finished_now = flags & SHUTDOWN_SEND != 0 && self.peer_sends;
        if finished_now {
            self.peer_sends = false;
        }
        match (self.peer_sends, self.peer_receives) {
            (false, false) => Received::PeerShutdown,
            _ if finished_now && !self.is_closing() => Received::PeerFinished,
            _ => Received::Nothing,
        }
    }

    /// Bytes the guest still has room for. Nothing if it shrank its buffer below what is under way.
    fn peer_free(&self) -> u32 {
        self.peer_buf_alloc.saturating_sub(self.sent.wrapping_sub(self.peer_fwd_cnt))
    }

    fn chunk(&self, room: usize) -> usize {
        let free = usize::try_from(self.peer_free()).unwrap_or(usize::MAX);
        self.outbound.len().min(room).min(free).min(MAX_PAYLOAD)
    }

    /// Asks once per drought; the answer, or any packet with credit, ends it.
    fn note_missing_credit(&mut self) {
        if !self.outbound.is_empty() && self.peer_free() == 0 && !self.credit_requested {
            self.credit_requested = true;
            self.credit_request_due = true;
        }
    }

    /// Every packet carries the current credit, so every packet is a credit update.
    fn packet(&mut self, op: Operation, flags: u32, payload: Vec<u8>) -> Outgoing {
        self.credit_update_due = false;
        self.announced = self.consumed;
        Outgoing { op, flags, payload, buf_alloc: RECEIVE_BUFFER, fwd_cnt: self.consumed }
    }
}

/// A payload length as its header field. [`MAX_PAYLOAD`] bounds it far below the field's range.
pub(super) fn wire_len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
