//! What was counted for one VM since the daemon took it on. Never reset.
//!
//! Every figure here is the host's own count. What the guest claims about itself is in [`fpr_protocol::message::Stats`]
//! and keeps other names.

use crate::reporting::Source;
use fpr_protocol::{CloseReason, Isolation, Refusal};
use serde::Serialize;
use std::collections::BTreeMap;

/// Who gave memory away, and how it was isolated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemorySource {
    /// The agent, by taking memory blocks offline.
    AgentOfflined,
    /// The agent, by claiming huge pages.
    AgentClaimed,
    /// The guest's kernel, on the balloon's reporting queue.
    KernelReported,
    /// The guest's balloon driver, on the inflate queue.
    KernelInflated,
}

impl MemorySource {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::AgentOfflined, Self::AgentClaimed, Self::KernelReported, Self::KernelInflated];

    /// The word of `status`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::AgentOfflined => "agent-offlined",
            Self::AgentClaimed => "agent-claimed",
            Self::KernelReported => "kernel-reported",
            Self::KernelInflated => "kernel-inflated",
        }
    }
}

impl From<Isolation> for MemorySource {
    fn from(isolation: Isolation) -> Self {
        match isolation {
            Isolation::Offlined => Self::AgentOfflined,
            Isolation::Claimed => Self::AgentClaimed,
        }
    }
}

impl From<Source> for MemorySource {
    fn from(source: Source) -> Self {
        match source {
            Source::Reported => Self::KernelReported,
            Source::Inflated => Self::KernelInflated,
        }
    }
}

/// What came of one source's memory, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SourceCounters {
    /// Bytes the guest named; one that it names twice counts twice.
    pub reported_bytes: u64,
    /// Bytes dropped: whole pages of the backing.
    pub dropped_bytes: u64,
    /// Bytes of ranges that were refused.
    pub refused_bytes: u64,
    /// The same by reason.
    pub refused_bytes_by_reason: BTreeMap<Refusal, u64>,
}

impl SourceCounters {
    pub(super) fn count(&mut self, range_bytes: u64, result: Result<u64, Refusal>) {
        // A guest may name ranges as long as it likes.
        let add = |sum: &mut u64, bytes: u64| *sum = sum.saturating_add(bytes);
        add(&mut self.reported_bytes, range_bytes);
        match result {
            Ok(bytes) => add(&mut self.dropped_bytes, bytes),
            Err(refusal) => {
                add(&mut self.refused_bytes, range_bytes);
                add(self.refused_bytes_by_reason.entry(refusal).or_default(), range_bytes);
            }
        }
    }
}

/// Monotonic counters of one VM. `reports` and what is counted in huge pages are the agent's; `sources` holds everybody's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Sessions that reached `Welcome`.
    pub sessions: u64,
    /// Connections closed by the host, by reason.
    pub closed_by_reason: BTreeMap<CloseReason, u64>,
    /// Sessions that had to wait for drops of an earlier one.
    pub fences_waited: u64,
    /// Reports that came.
    pub reports: u64,
    /// Huge pages in them.
    pub huge_pages_reported: u64,
    /// Of these: isolated by memory-block offlining.
    pub huge_pages_offlined: u64,
    /// Of these: isolated by claims.
    pub huge_pages_claimed: u64,
    /// Huge pages whose backing was dropped.
    pub huge_pages_dropped: u64,
    /// Huge pages that were refused.
    pub huge_pages_refused: u64,
    /// Refused huge pages by reason.
    pub refused_by_reason: BTreeMap<Refusal, u64>,
    /// What each source returned, in bytes, counted when it was answered.
    pub sources: BTreeMap<MemorySource, SourceCounters>,
    /// Bytes by which the backing's allocated blocks fell across drops. Other activity in the guest blurs it, and so does
    /// a drop of the other device at the same time.
    pub freed_bytes: u64,
    /// Surveys answered.
    pub surveys: u64,
    /// Dropped bytes that were looked at [`super::effect::REFAULT_AFTER`] later.
    pub refault_watched_bytes: u64,
    /// Of these: backed again.
    pub refault_returned_bytes: u64,
    /// Dropped bytes whose fate within a minute is known, whoever gave them away ([`super::refault`]).
    pub refault_minute_watched_bytes: u64,
    /// Of these, by sample: backed again.
    pub refault_minute_returned_bytes: u64,
    /// Nanoseconds spent in jobs (checks, drops, looks).
    pub busy_ns: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            sessions: 0,
            closed_by_reason: BTreeMap::new(),
            fences_waited: 0,
            reports: 0,
            huge_pages_reported: 0,
            huge_pages_offlined: 0,
            huge_pages_claimed: 0,
            huge_pages_dropped: 0,
            huge_pages_refused: 0,
            refused_by_reason: BTreeMap::new(),
            // All of them from the start, so that a reader need not guess which there are.
            sources: MemorySource::ALL.map(|source| (source, SourceCounters::default())).into(),
            freed_bytes: 0,
            surveys: 0,
            refault_watched_bytes: 0,
            refault_returned_bytes: 0,
            refault_minute_watched_bytes: 0,
            refault_minute_returned_bytes: 0,
            busy_ns: 0,
        }
    }
}

impl Counters {
    /// What came of this source's memory.
    #[must_use]
    pub fn dropped_bytes(&self, source: MemorySource) -> u64 {
        self.sources.get(&source).map_or(0, |counters| counters.dropped_bytes)
    }

    pub(super) fn source(&mut self, source: MemorySource) -> &mut SourceCounters {
        self.sources.entry(source).or_default()
    }

    pub(super) fn closed(&mut self, reason: CloseReason) {
        *self.closed_by_reason.entry(reason).or_default() += 1;
    }

    pub(super) fn refused(&mut self, reason: Refusal, huge_pages: u64) {
        self.huge_pages_refused += huge_pages;
        *self.refused_by_reason.entry(reason).or_default() += huge_pages;
    }
}
