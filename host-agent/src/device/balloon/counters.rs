//! What passed through one balloon device since it was made. Never reset.

use super::fault::Fault;
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
    /// Buffers of statistics that were read.
    pub statistics_received: u64,
    /// Front ends that were disconnected because of what they sent: a feature that was not offered, a descriptor that
    /// cannot be mapped for writing, too many memory regions, a broken message.
    pub front_ends_broken_off: u64,
    refused: [u64; Fault::ALL.len()],
}

impl Counters {
    /// How often `fault` was met.
    #[must_use]
    pub fn refused(&self, fault: Fault) -> u64 {
        self.refused[fault as usize]
    }

    pub(super) fn refuse(&mut self, fault: Fault) {
        self.refused[fault as usize] += 1;
    }
}
