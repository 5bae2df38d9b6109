//! What passed through one balloon device since it was made. Never reset.

use super::fault::{Fault, FaultCounts};
use crate::reporting::QueueCounters;

/// A copy of a device's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The reporting queue.
    pub reporting: QueueCounters,
    /// The inflate queue.
    pub inflate: QueueCounters,
    /// Chains of the deflate queue; nothing is done with what they hold.
    pub deflate_chains: u64,
    /// Chains that waited in their ring because the guest gives away faster than it may.
    pub chains_delayed: u64,
    /// Buffers of statistics that were read.
    pub statistics_received: u64,
    /// Front ends that were disconnected because of what they sent: a feature that was not offered, a descriptor that
    /// cannot be mapped for writing, too many memory regions, a broken message.
    pub front_ends_broken_off: u64,
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
