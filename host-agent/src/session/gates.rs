//! Which gates of one VM are closed, who closed them and why.
//!
//! Owned by the session; a gate is the VM's, whichever device it was seen through. The same gate may be closed by several sources at once (`write-on-free` by the guest's word
//! and by measurement) and opens when the last of them lets go.

use crate::device::DeviceKind;
use fpr_protocol::Gate;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GateSource {
    /// Looking into the VMM's process.
    Process,
    /// The memory the front end handed over.
    Backing,
    /// The guest's `Hello`.
    Guest,
    /// What the host measured after dropping what the agent reported.
    Measured,
    /// The balloon device: what its driver wrote, and what was measured after dropping what the kernel reported.
    Balloon,
    /// `inhibit` or the configuration.
    Operator,
}

/// One closed gate as `status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ClosedGate {
    /// Which.
    pub gate: Gate,
    /// Who closed it.
    pub source: GateSource,
    /// What was seen and what to do about it.
    pub detail: String,
    /// Since when, host clock since boot.
    #[serde(skip)]
    pub since: Duration,
}

/// All gates of one VM.
#[derive(Debug, Default)]
pub struct Gates {
    closed: BTreeMap<(Gate, GateSource), (String, Duration)>,
}

impl Gates {
    /// Closes a gate; the latest detail wins.
    pub fn close(&mut self, gate: Gate, source: GateSource, detail: String, now: Duration) {
        self.closed.entry((gate, source)).or_insert_with(|| (String::new(), now)).0 = detail;
    }

    /// Opens what this source closed.
    pub fn open(&mut self, gate: Gate, source: GateSource) {
        self.closed.remove(&(gate, source));
    }

    /// Makes `found` the only gates that this source holds closed.
    pub fn replace(&mut self, source: GateSource, found: Vec<(Gate, String)>, now: Duration) {
        self.closed.retain(|(gate, by), _| *by != source || found.iter().any(|(other, _)| other == gate));
        for (gate, detail) in found {
            self.close(gate, source, detail, now);
        }
    }

    /// Whether what comes through this device may be dropped.
    ///
    /// `write-on-free` does not hold for the guest's kernel: it would find what it frees zeroed either way, and a
    /// reported page reads zero (`init_on_free` is what it asks for with a `poison_val` of 0). An agent's memory is freed
    /// or onlined afterwards, which writes to it and backs it again.
    #[must_use]
    pub fn open_for(&self, device: DeviceKind) -> bool {
        match device {
            DeviceKind::Vsock => self.closed.is_empty(),
            DeviceKind::Balloon => self.closed.keys().all(|(gate, _)| *gate == Gate::WriteOnFree),
        }
    }

    /// The closed gates, each once.
    #[must_use]
    pub fn words(&self) -> Vec<Gate> {
        let mut gates: Vec<Gate> = self.closed.keys().map(|(gate, _)| *gate).collect();
        gates.dedup();
        gates
    }

    /// The closed gates with who and why.
    #[must_use]
    pub fn closed(&self) -> Vec<ClosedGate> {
        self.closed
            .iter()
            .map(|((gate, source), (detail, since))| ClosedGate {
                gate: *gate,
                source: *source,
                detail: detail.clone(),
                since: *since,
            })
            .collect()
    }

    /// When `gate` was closed by `source`.
    #[must_use]
    pub fn since(&self, gate: Gate, source: GateSource) -> Option<Duration> {
        self.closed.get(&(gate, source)).map(|(_, since)| *since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    #[test]
    fn a_gate_opens_when_the_last_source_lets_go() {
        let mut gates = Gates::default();
        gates.close(Gate::WriteOnFree, GateSource::Guest, "init_on_free".into(), NOW);
        gates.close(Gate::WriteOnFree, GateSource::Measured, "came back".into(), NOW);
        gates.open(Gate::WriteOnFree, GateSource::Guest);
        assert_eq!(gates.words(), [Gate::WriteOnFree]);
        gates.open(Gate::WriteOnFree, GateSource::Measured);
        assert!(gates.open_for(DeviceKind::Vsock));
    }

    #[test]
    fn only_write_on_free_lets_the_kernel_report() {
        for gate in Gate::ALL {
            let mut gates = Gates::default();
            gates.close(*gate, GateSource::Guest, "test".into(), NOW);
            assert!(!gates.open_for(DeviceKind::Vsock), "{gate}");
            assert_eq!(gates.open_for(DeviceKind::Balloon), *gate == Gate::WriteOnFree, "{gate}");
        }
    }

    #[test]
    fn replace_touches_only_its_own_source() {
        let mut gates = Gates::default();
        gates.close(Gate::Operator, GateSource::Operator, "maintenance".into(), NOW);
        gates.replace(GateSource::Process, vec![(Gate::AssignedDevice, "fd 7".into())], NOW);
        gates.replace(GateSource::Process, vec![(Gate::MemoryLocked, "VmLck".into())], 2 * NOW);
        assert_eq!(gates.words(), [Gate::MemoryLocked, Gate::Operator]);
        gates.replace(GateSource::Process, vec![(Gate::MemoryLocked, "VmLck 2".into())], 3 * NOW);
        assert_eq!(gates.since(Gate::MemoryLocked, GateSource::Process), Some(2 * NOW));
    }
}
