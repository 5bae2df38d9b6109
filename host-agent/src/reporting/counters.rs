//! What was counted on one queue since it was made. Never reset.
//!
//! Written by [`super::ReportingQueue`]; a VMM or the daemon copies it into its own status.

use fpr_protocol::Refusal;
use serde::Serialize;
use std::collections::BTreeMap;

/// Monotonic counters of one queue. A range is one descriptor of the reporting queue, or a run of adjacent page frame
/// numbers on the inflate queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct QueueCounters {
    /// Chains that were taken off the queue and returned.
    pub chains: u64,
    /// Of these: could not be read to their end (a loop, a bad index or indirect table, more than 2^32 bytes, an
    /// unreadable or torn list of page frame numbers). What was read before the break counts like any other.
    pub chains_malformed: u64,
    /// Descriptors in all chains, as far as they could be read.
    pub descriptors: u64,
    /// Ranges the guest named.
    pub ranges: u64,
    /// Bytes the guest named in them.
    pub named_bytes: u64,
    /// Ranges that were dropped, at least in part.
    pub ranges_dropped: u64,
    /// Bytes that were dropped, rounded inward to pages of the backing.
    pub dropped_bytes: u64,
    /// What was refused as a whole, by reason.
    pub refused_by_reason: BTreeMap<Refusal, Refused>,
}

/// What was refused for one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// Ranges, or descriptors that could not be read as ranges.
    pub ranges: u64,
    /// Bytes in them as the guest named them.
    pub bytes: u64,
}

impl QueueCounters {
    /// Counts one range that was handed to the discard.
    pub(super) fn result(&mut self, named_bytes: u64, result: Result<u64, Refusal>) {
        self.named(named_bytes);
        match result {
            Ok(bytes) => {
                self.ranges_dropped += 1;
                self.dropped_bytes = self.dropped_bytes.saturating_add(bytes);
            }
            Err(reason) => self.add(reason, named_bytes),
        }
    }

    /// Counts one that never got that far.
    pub(super) fn refused(&mut self, reason: Refusal, named_bytes: u64) {
        self.named(named_bytes);
        self.add(reason, named_bytes);
    }

    fn named(&mut self, bytes: u64) {
        self.ranges += 1;
        self.named_bytes = self.named_bytes.saturating_add(bytes);
    }

    fn add(&mut self, reason: Refusal, bytes: u64) {
        let refused = self.refused_by_reason.entry(reason).or_default();
        refused.ranges += 1;
        refused.bytes = refused.bytes.saturating_add(bytes);
    }
}
