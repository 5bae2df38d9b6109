//! Log lines of one VM. What the guest or the front end can cause is limited, and the lines held back are counted.

use crate::device::{DeviceKind, EndReason, PeerProcess};
use crate::log_limit::RateLimited;
use crate::session::Note;
use fpr_protocol::codec::CodecError;
use fpr_protocol::{CloseReason, FrameError};
use std::time::Instant;
use tracing::{error, info, warn};

fn word(device: DeviceKind) -> &'static str {
    match device {
        DeviceKind::Vsock => "vsock",
        DeviceKind::Balloon => "balloon",
    }
}

pub(super) struct VmLog {
    vm: String,
    limit: RateLimited,
    /// Of what must not be held back by anything a guest does: a host's device that came in the middle of a drop.
    raced: RateLimited,
}

impl VmLog {
    pub(super) fn new(vm: &str) -> Self {
        Self { vm: vm.to_owned(), limit: RateLimited::guest_caused(), raced: RateLimited::guest_caused() }
    }

    /// A guest causes this line: says how many were held back before it, or that it is held back itself.
    fn admit(&mut self) -> Option<u64> {
        self.limit.admit(Instant::now())
    }

    pub(super) fn front_end(&mut self, device: DeviceKind, peer: &std::io::Result<PeerProcess>) {
        let device = word(device);
        match peer {
            Ok(peer) => info!(vm = self.vm, device, pid = peer.pid, uid = peer.uid, "front end connected"),
            Err(error) => warn!(vm = self.vm, device, %error, "front end connected, but its process is not known"),
        }
    }

    pub(super) fn two_processes(&mut self, one: Option<i32>, other: Option<i32>) {
        warn!(vm = self.vm, one, other, "the VM's devices are of two processes: is one of them of another VM?");
    }

    pub(super) fn front_end_gone(&mut self, device: DeviceKind) {
        info!(vm = self.vm, device = word(device), "front end gone");
    }

    pub(super) fn connection_ended(&mut self, reason: EndReason) {
        if let EndReason::Fault(fault) = reason
            && let Some(suppressed) = self.admit()
        {
            warn!(vm = self.vm, ?fault, suppressed, "guest broke the rules of virtio-vsock");
        }
    }

    pub(super) fn malformed(&mut self, error: &FrameError) {
        if let Some(suppressed) = self.admit() {
            let error = crate::error_chain(error);
            warn!(vm = self.vm, error, suppressed, "guest sent what is no frame");
        }
    }

    pub(super) fn cut_off(&mut self, pending: usize) {
        if let Some(suppressed) = self.admit() {
            warn!(vm = self.vm, pending, suppressed, "guest ended its stream in the middle of a frame");
        }
    }

    pub(super) fn not_reading(&mut self) {
        if let Some(suppressed) = self.admit() {
            warn!(vm = self.vm, suppressed, "guest does not read its answers: connection reset");
        }
    }

    pub(super) fn closed(&mut self, reason: CloseReason) {
        if let Some(suppressed) = self.admit() {
            info!(vm = self.vm, %reason, suppressed, "connection closed");
        }
    }

    pub(super) fn bug(&mut self, error: &CodecError) {
        error!(vm = self.vm, error = crate::error_chain(error), "cannot encode a message; please report this");
    }

    pub(super) fn note(&mut self, note: &Note) {
        let limit = if matches!(note, Note::DeviceRaced(_)) { &mut self.raced } else { &mut self.limit };
        let Some(suppressed) = limit.admit(Instant::now()) else { return };
        match note {
            Note::SessionStarted { agent_version, kernel_release } => {
                info!(vm = self.vm, agent_version, kernel_release, suppressed, "session started");
            }
            Note::SessionEnded(reason) => {
                let reason = reason.map(CloseReason::word);
                info!(vm = self.vm, reason, suppressed, "session ended");
            }
            Note::GatesChanged(gates) if gates.is_empty() => info!(vm = self.vm, suppressed, "all gates open"),
            Note::GatesChanged(gates) => {
                for gate in gates {
                    warn!(vm = self.vm, gate = %gate.gate, detail = gate.detail, suppressed, "gate closed");
                }
            }
            Note::DropFailed(error) => warn!(vm = self.vm, error, suppressed, "drop failed"),
            Note::DeviceRaced(found) => error!(
                vm = self.vm,
                found, suppressed, "a gate closed while memory was dropped: unplug and plug the device again"
            ),
        }
    }
}
