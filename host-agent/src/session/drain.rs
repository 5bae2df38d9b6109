//! `drain`: an operator wants memory back now, and the guest's agent is asked for a pass.
//!
//! The kernel cannot be asked; what it reports meanwhile is told too. Each request is answered exactly once: when the
//! agent says that its pass has ended, when the session ends, or when the asker stops waiting.

use super::counters::MemorySource;
use super::{Action, Phase, Session};
use crate::device::DeviceKind;
use fpr_protocol::{Gate, Message, PassEnd};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Requests waiting for their pass, at most; the control socket has no more clients.
const MAX_DRAINS: usize = 16;

/// Names one request, here and on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DrainId(pub u64);

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Drained {
    /// How the agent's pass ended; `None` if it goes on.
    pub pass: Option<PassEnd>,
    /// Bytes dropped since the request, by source.
    pub dropped_bytes: BTreeMap<MemorySource, u64>,
}

/// Why nothing came of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DrainError {
    /// Nobody to ask.
    #[error("the guest's agent is not connected: start fpr-guest-agent in the guest")]
    NoAgent,
    /// It went away meanwhile.
    #[error("the guest's agent went away before its pass had ended")]
    AgentLost,
    /// Nothing is dropped at the moment.
    #[error("nothing is dropped while a gate is closed: {}", .0.iter().map(|gate| gate.word()).collect::<Vec<_>>().join(", "))]
    Gated(Vec<Gate>),
    /// Too many at once.
    #[error("{MAX_DRAINS} requests are waiting already: wait for them")]
    TooMany,
}

pub(super) struct PendingDrain {
    until: Duration,
    before: BTreeMap<MemorySource, u64>,
}

impl Session {
    /// Why the guest cannot be asked for memory now.
    #[must_use]
    pub fn drain_obstacle(&self) -> Option<DrainError> {
        match &self.phase {
            Phase::Active(_) if !self.gates.open_for(DeviceKind::Vsock) => Some(DrainError::Gated(self.gates.words())),
            Phase::Active(_) if self.drains.len() >= MAX_DRAINS => Some(DrainError::TooMany),
            Phase::Active(_) => None,
            Phase::Idle | Phase::Fencing(..) => Some(DrainError::NoAgent),
        }
    }

    pub(super) fn drain(&mut self, id: DrainId, until: Duration) {
        let error = match (self.drain_obstacle(), &self.phase) {
            (None, Phase::Active(active)) => {
                self.actions.push(Action::Send(active.connection, Message::Reclaim { id: id.0 }));
                self.drains.insert(id, PendingDrain { until, before: self.dropped_by_source() });
                return;
            }
            (obstacle, _) => obstacle.unwrap_or(DrainError::NoAgent),
        };
        self.actions.push(Action::Drained(id, Err(error)));
    }

    /// The agent says that the pass it was asked for has ended.
    pub(super) fn reclaimed(&mut self, id: DrainId, end: PassEnd) {
        // Nobody may be waiting any more.
        if let Some(pending) = self.drains.remove(&id) {
            self.drained(id, &pending, Some(end));
        }
    }

    pub(super) fn end_drains(&mut self) {
        for id in std::mem::take(&mut self.drains).into_keys() {
            self.actions.push(Action::Drained(id, Err(DrainError::AgentLost)));
        }
    }

    pub(super) fn drains_due(&self) -> Option<Duration> {
        self.drains.values().map(|pending| pending.until).min()
    }

    pub(super) fn tick_drains(&mut self, now: Duration) {
        while let Some(id) = self.drains.iter().find(|(_, pending)| pending.until <= now).map(|(id, _)| *id) {
            if let Some(pending) = self.drains.remove(&id) {
                self.drained(id, &pending, None);
            }
        }
    }

    fn drained(&mut self, id: DrainId, pending: &PendingDrain, pass: Option<PassEnd>) {
        let before = |source: &MemorySource| pending.before.get(source).copied().unwrap_or(0);
        let since = self.dropped_by_source().into_iter();
        let dropped_bytes = since.map(|(source, bytes)| (source, bytes - before(&source))).collect();
        self.actions.push(Action::Drained(id, Ok(Drained { pass, dropped_bytes })));
    }

    fn dropped_by_source(&self) -> BTreeMap<MemorySource, u64> {
        MemorySource::ALL.map(|source| (source, self.counters.dropped_bytes(source))).into()
    }
}
