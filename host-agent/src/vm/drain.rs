//! `drain`: from an operator's request to the session and back.

use super::owner::Owner;
use super::{DrainReport, boot_now};
use crate::session::Event;
use crate::session::drain::{DrainError, DrainId, Drained};
use std::time::Duration;
use tokio::sync::oneshot;

/// Somebody who waits.
pub(super) struct Asker {
    answer: oneshot::Sender<Result<DrainReport, DrainError>>,
    backed_before: Option<u64>,
}

impl Owner {
    pub(super) fn drain(&mut self, wait: Duration, answer: oneshot::Sender<Result<DrainReport, DrainError>>) {
        self.next_drain += 1;
        let id = DrainId(self.next_drain);
        let backed_before = self.backed_bytes();
        self.askers.insert(id, Asker { answer, backed_before });
        self.handle(Event::Drain { id, until: boot_now() + wait });
    }

    pub(super) fn drained(&mut self, id: DrainId, result: Result<Drained, DrainError>) {
        let Some(Asker { answer, backed_before }) = self.askers.remove(&id) else { return };
        let backed_bytes = (backed_before, self.backed_bytes());
        // An asker that has gone needs no answer.
        let _ = answer.send(result.map(|drained| DrainReport { drained, backed_bytes }));
    }

    /// Measured on the memory of either device: both show the same guest.
    fn backed_bytes(&self) -> Option<u64> {
        let mut backings = self.front_ends.values().filter_map(|front_end| front_end.backing.as_deref());
        backings.next().and_then(|backing| backing.allocated_bytes().ok())
    }
}
