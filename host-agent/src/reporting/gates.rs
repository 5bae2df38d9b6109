//! The gates that a VMM sets for its own guest: named reasons why nothing is dropped.
//!
//! A gate is closed by whoever learns of the reason, on any thread, and looked at by [`super::LocalMemory`] for every
//! report. Which gates there are and what closes them: [`Gate`].

use fpr_protocol::Gate;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// Handle to the gates of one VM; clones are the same gates.
#[derive(Clone, Debug, Default)]
pub struct Gates(Arc<RwLock<BTreeMap<Gate, String>>>);

impl Gates {
    /// Closes a gate and waits for a drop that is under way: once this returns, nothing is dropped until the gate is
    /// open again. Close [`Gate::AssignedDevice`] *before* memory is mapped for a device.
    ///
    /// `detail` tells people why and what to do about it.
    pub fn close(&self, gate: Gate, detail: impl Into<String>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(gate, detail.into());
    }

    /// Opens a gate. Nothing that was reported meanwhile is dropped later: the guest will not report it again until it
    /// has used it.
    pub fn open(&self, gate: Gate) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&gate);
    }

    /// The closed gates with their details.
    #[must_use]
    pub fn closed(&self) -> BTreeMap<Gate, String> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps the gates as they are while the value lives; None if one is closed.
    ///
    /// `write-on-free` does not matter to memory that the guest's kernel reports: it has been written to already, and
    /// reads zero when it is next used, which is what `init_on_free` wants.
    pub(super) fn pass(&self) -> Option<Passage<'_>> {
        let closed = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let open = closed.keys().all(|gate| *gate == Gate::WriteOnFree);
        open.then_some(Passage { _closed: closed })
    }
}

/// While it lives, [`Gates::close`] waits.
pub(super) struct Passage<'a> {
    _closed: RwLockReadGuard<'a, BTreeMap<Gate, String>>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn closing_waits_for_the_drop_that_is_under_way() {
        let gates = Gates::default();
        let passage = gates.pass().unwrap();
        let (sender, closed) = mpsc::channel();
        let other = gates.clone();
        let closer = std::thread::spawn(move || {
            other.close(Gate::AssignedDevice, "0000:01:00.0 is being attached");
            sender.send(()).unwrap();
        });
        assert!(closed.recv_timeout(Duration::from_millis(50)).is_err(), "closed while a drop was under way");
        drop(passage);
        closed.recv_timeout(Duration::from_secs(10)).unwrap();
        closer.join().unwrap();
        assert!(gates.pass().is_none());
        assert_eq!(gates.closed()[&Gate::AssignedDevice], "0000:01:00.0 is being attached");
        gates.open(Gate::AssignedDevice);
        assert!(gates.pass().is_some());
    }

    #[test]
    fn every_gate_but_write_on_free_stops_kernel_reports() {
        for gate in Gate::ALL {
            let gates = Gates::default();
            gates.close(*gate, "test");
            assert_eq!(gates.pass().is_some(), *gate == Gate::WriteOnFree, "{gate}");
        }
    }
}
