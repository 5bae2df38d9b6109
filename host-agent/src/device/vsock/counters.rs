//! What passed through one vsock device since it was made. Never reset.

use super::fault::{Fault, FaultCounts};

/// A copy of a device's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets of the guest, refused ones included.
    pub packets_received: u64,
    /// Packets put into the guest's receive queue.
    pub packets_sent: u64,
    /// Payload bytes delivered to the owner.
    pub bytes_received: u64,
    /// Payload bytes sent to the guest.
    pub bytes_sent: u64,
    /// Connections that were accepted.
    pub connections_accepted: u64,
    refused: FaultCounts,
}

impl Counters {
    /// How often `fault` was met.
    #[must_use]
    pub fn refused(&self, fault: Fault) -> u64 {
        self.refused.of(fault)
    }

    pub(super) fn refuse(&mut self, fault: Fault) {
        self.refused.count(fault);
    }
}
