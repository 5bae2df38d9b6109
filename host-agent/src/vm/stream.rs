//! The agent's byte streams: from what the vsock device hands over to whole messages for the session.

use super::boot_now;
use super::owner::Owner;
use crate::device::{ConnectionId, EndReason};
use crate::session::Event;
use fpr_protocol::{CloseReason, Frame, FrameDecoder, FrameError, Message};

impl Owner {
    pub(super) fn opened(&mut self, connection: ConnectionId) {
        self.decoders.insert(connection, FrameDecoder::default());
        self.handle(Event::Connected(connection));
    }

    pub(super) fn data(&mut self, connection: ConnectionId, bytes: &[u8]) {
        if let Some(decoder) = self.decoders.get_mut(&connection) {
            decoder.push(bytes);
        }
        if let Some(vsock) = &self.vsock {
            vsock.consumed(connection, bytes.len());
        }
        // Whatever a message makes the session do may end the connection, so the decoder is looked up each time.
        while let Some(decoder) = self.decoders.get_mut(&connection) {
            match decoder.next_frame() {
                Ok(Some(Frame::Message(message))) => {
                    if matches!(message, Message::Report(_)) {
                        self.last_report = boot_now();
                    }
                    self.handle(Event::Message(connection, message));
                }
                Ok(Some(Frame::Skipped { .. })) => {}
                Ok(None) => break,
                Err(error) => {
                    self.log.malformed(&error);
                    self.decoders.remove(&connection);
                    self.handle(Event::Malformed(connection, close_reason(&error)));
                }
            }
        }
    }

    pub(super) fn finished(&mut self, connection: ConnectionId) {
        if !self.cut_off(connection) {
            if let Some(vsock) = &self.vsock {
                vsock.close(connection);
            }
            self.disconnected(connection);
        }
    }

    pub(super) fn closed(&mut self, connection: ConnectionId, reason: EndReason) {
        self.log.connection_ended(reason);
        let by_guest = matches!(reason, EndReason::PeerShutdown | EndReason::PeerReset);
        if !by_guest || !self.cut_off(connection) {
            self.disconnected(connection);
        }
    }

    /// Whether the guest ended its stream in the middle of a frame, which is then dealt with.
    fn cut_off(&mut self, connection: ConnectionId) -> bool {
        let pending = self.decoders.get(&connection).map_or(0, FrameDecoder::pending);
        if pending > 0 {
            self.log.cut_off(pending);
            self.decoders.remove(&connection);
            self.handle(Event::Malformed(connection, CloseReason::MalformedFrame));
        }
        pending > 0
    }

    fn disconnected(&mut self, connection: ConnectionId) {
        self.decoders.remove(&connection);
        self.handle(Event::Disconnected(connection));
    }
}

/// What the guest is told of a stream that cannot be read on.
fn close_reason(error: &FrameError) -> CloseReason {
    match error {
        FrameError::Version { .. } => CloseReason::UnsupportedVersion,
        FrameError::UnknownMessage { .. } => CloseReason::UnexpectedMessage,
        FrameError::Magic { .. } | FrameError::Oversized { .. } | FrameError::Payload { .. } => {
            CloseReason::MalformedFrame
        }
    }
}
