//! What a guest can do wrong on its vsock device, by name.
//!
//! Every fault is counted, logged at a limited rate and answered by the muxer or the backend; none of them hurts
//! anything but the guest's own connections. The names are part of metrics and status, so they stay.

use crate::device::fault::faults;

faults! {
    /// Why a packet, a descriptor or a connection of the guest was refused.
    pub enum Fault {
        /// The descriptor chain is not readable (or not writable) memory of the guest, or the ring's index is out of range.
        BadDescriptor => "bad_descriptor",
        /// The chain is shorter than the packet it announces, the payload is too long, or an operation without payload
        /// announces one.
        BadLength => "bad_length",
        /// Not a stream packet.
        UnknownType => "unknown_type",
        /// An operation the specification does not know.
        UnknownOperation => "unknown_operation",
        /// The source is not the guest's CID, or the destination is not the host.
        WrongCid => "wrong_cid",
        /// A connection to a port nobody listens on.
        UnknownPort => "unknown_port",
        /// A connection to the agent's port from a source port that any process in the guest may bind.
        UnprivilegedPort => "unprivileged_port",
        /// More connections than one guest may have.
        TooManyConnections => "too_many_connections",
        /// A packet for a connection that does not exist.
        UnknownConnection => "unknown_connection",
        /// A second request on a live connection.
        DuplicateRequest => "duplicate_request",
        /// An operation that makes no sense here: the host never connects, so nothing can be a response.
        UnexpectedOperation => "unexpected_operation",
        /// More payload than the credit the host had granted.
        CreditOverrun => "credit_overrun",
        /// The guest claims to have taken more bytes than it was sent.
        CreditInvalid => "credit_invalid",
        /// Payload after the guest had said that it would send no more.
        DataAfterShutdown => "data_after_shutdown",
        /// The guest stopped reading until the host's buffer for it was full.
        PeerNotReading => "peer_not_reading",
        /// The guest caused resets faster than it took them; the surplus was dropped.
        ReplyQueueFull => "reply_queue_full",
    }
}
