//! Devices: where vhost-user front ends and guests meet the task that owns a VM.
//!
//! A device lives in blocking threads, because `vhost-user-backend` does: one that waits for front ends, one that
//! answers the front end's requests, one that serves the queues. The owner lives in a tokio task. Between them are a
//! channel of [`DeviceEvent`]s towards the owner and a handle towards the device, and nothing else.
//!
//! # The safety rule at this seam
//! After GET_VRING_BASE, a change of the memory map, a reset or a disconnect, nothing the guest reported earlier may be
//! dropped any more. Such events carry a [`Done`]; the device processes nothing and answers nothing to the front end
//! until the owner has let go of it, which the owner does once no drop is in flight.
//!
//! # What is trusted
//! The front end (the VMM) is trusted with its own guest's memory and with nothing else; the guest is trusted with
//! nothing.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use fpr_protocol::{GuestAddress, Refusal};

use crate::reporting::{GuestRange, Source};

pub mod balloon;
mod fault;
mod listen;
mod memory;
mod peer;
mod rings;
mod serve;
#[allow(unsafe_code)]
mod sys;
pub mod vsock;

pub use listen::ListenError;
pub(crate) use listen::{SocketFile, bind_listener, bind_service};
pub use peer::PeerProcess;
pub use rings::Rings;
pub use vsock::fault::Fault;

/// A connection of the guest, unique for the life of the device, so that a stale one never means another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// Which of a VM's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKind {
    /// virtio-vsock: the guest's agent.
    Vsock,
    /// virtio-balloon: the guest's kernel.
    Balloon,
}

/// What `poison_val` reads as until it is written. Any value other than 0 forbids dropping.
pub const UNKNOWN_POISON: u32 = u32::MAX;

/// What a device tells the owner of its VM, in order. The owner must keep receiving: a full channel stalls the device.
#[derive(Debug)]
pub enum DeviceEvent {
    /// A front end connected. Precedes everything else of that front end.
    FrontEndConnected {
        /// The process behind the socket, or why it is not known.
        peer: Result<PeerProcess, std::io::Error>,
    },
    /// The guest's memory is now this and only this. Connections stay.
    MemoryMap {
        /// In order of guest address, not overlapping.
        regions: Vec<MemoryRegion>,
        /// Holds the front end's request until drops under the earlier map are finished.
        done: Done,
    },
    /// The guest connected to the agent's port. The connection is open until [`Closed`](Self::Closed) or until the owner
    /// ends it.
    Connected {
        /// Name of the connection.
        connection: ConnectionId,
        /// The guest's port, below 1024.
        peer_port: u32,
    },
    /// Bytes of the guest, never empty, at most 64 KiB. They hold credit until `DeviceHandle::consumed`.
    Data {
        /// Name of the connection.
        connection: ConnectionId,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// The guest will send no more on this connection but still reads.
    PeerFinished {
        /// Name of the connection.
        connection: ConnectionId,
    },
    /// The connection is gone, and not because the owner ended it.
    Closed {
        /// Name of the connection.
        connection: ConnectionId,
        /// Who ended it.
        reason: EndReason,
    },
    /// The front end stopped a queue (GET_VRING_BASE) or reset the device. Every connection was `Closed` before. Comes
    /// once per queue.
    Stopped {
        /// Holds the front end's request until drops are finished.
        done: Done,
    },
    /// The guest's kernel gave memory away on a balloon queue. It belongs to nobody until `answer` is used or dropped;
    /// the queue's thread waits for that.
    Reported {
        /// Which queue it came on.
        source: Source,
        /// What the guest named, unchecked, at most as many as a queue has descriptors.
        ranges: Vec<GuestRange>,
        /// A moment (`backing::boot_time`) read *before* the chain was taken from the queue: drops end a bounded time
        /// after it. Read later, a daemon that was stopped between taking the chain and reading the clock (SIGSTOP, a
        /// frozen cgroup) would take an old report for a fresh one.
        taken_after: Duration,
        /// Where the results go, when no drop of it is in flight any more.
        answer: Answer,
    },
    /// What the guest's driver wrote to `poison_val` and whether it negotiated PAGE_POISON; comes when a front end has
    /// negotiated features, before any report, and after each change.
    PagePoison {
        /// The pattern that free pages hold (`struct virtio_balloon_config`), `None` while PAGE_POISON is not negotiated.
        /// All ones while it is and the driver has not written it, which it must have done before DRIVER_OK: the
        /// value went to an earlier daemon, and is not known.
        poison_val: Option<u32>,
    },
    /// The front end is gone, and with it the memory map. The next front end is not accepted before `done`.
    FrontEndGone {
        /// Holds the device until drops are finished.
        done: Done,
    },
}

/// Why a connection ended without the owner's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndReason {
    /// The guest closed it in order.
    PeerShutdown,
    /// The guest reset it.
    PeerReset,
    /// The guest broke the rules of virtio-vsock.
    Fault(Fault),
    /// The front end stopped the device.
    DeviceStopped,
    /// The front end went away.
    FrontEndGone,
}

/// A range of guest memory and the file behind it. Several regions may share one file at different offsets.
#[derive(Clone, Debug)]
pub struct MemoryRegion {
    /// First address of the range.
    pub guest_address: GuestAddress,
    /// Length in bytes.
    pub size: u64,
    /// The descriptor the front end sent.
    pub file: Arc<File>,
    /// Where in the file the range starts, in bytes.
    pub file_offset: u64,
}

/// The fence: something in the device waits until this value is dropped. An owner that is gone has dropped it.
#[derive(Debug)]
#[must_use = "dropping it at once says that no drop is in flight"]
pub struct Done {
    _release: mpsc::Sender<std::convert::Infallible>,
}

impl Done {
    /// A fence and the side that waits for it.
    pub fn new() -> (Self, DoneWaiter) {
        let (sender, receiver) = mpsc::channel();
        (Self { _release: sender }, DoneWaiter(receiver))
    }

    /// Lets the device go on; the same as dropping the value, but it reads like what it means.
    pub fn signal(self) {}
}

/// The waiting side of [`Done`].
#[derive(Debug)]
pub struct DoneWaiter(mpsc::Receiver<std::convert::Infallible>);

impl DoneWaiter {
    /// Blocks until the owner has let go of the fence. There is no time limit: going on early could lose guest data.
    pub fn wait(self) {
        // Nothing can be received; the error says that the sender is gone, which is the signal.
        let Err(mpsc::RecvError) = self.0.recv();
    }

    /// Whether the owner has let go of the fence.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.0.try_recv(), Err(mpsc::TryRecvError::Disconnected))
    }
}

/// Takes the results of one [`DeviceEvent::Reported`]. Dropped unused it says `cancelled`, and only the owner's end does
/// that: like [`Done`] it must not be let go of while a drop of the report is in flight.
#[derive(Debug)]
#[must_use = "dropping it at once says that nothing was dropped"]
pub struct Answer(mpsc::Sender<Vec<Result<u64, Refusal>>>);

impl Answer {
    /// An answer and the side that waits for it.
    pub fn new() -> (Self, AnswerWaiter) {
        let (sender, receiver) = mpsc::channel();
        (Self(sender), AnswerWaiter(receiver))
    }

    /// Hands over one result per range, in order.
    pub fn send(self, results: Vec<Result<u64, Refusal>>) {
        // The waiter waits without a limit, so it is there unless its thread is gone, which needs no answer.
        let _ = self.0.send(results);
    }
}

/// The waiting side of [`Answer`].
#[derive(Debug)]
pub struct AnswerWaiter(mpsc::Receiver<Vec<Result<u64, Refusal>>>);

impl AnswerWaiter {
    /// Blocks until the owner has answered; `None` if it let go of the report unanswered.
    #[must_use]
    pub fn wait(self) -> Option<Vec<Result<u64, Refusal>>> {
        self.0.recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_holds_until_it_is_dropped() {
        let (done, waiter) = Done::new();
        assert!(!waiter.is_done());
        done.signal();
        assert!(waiter.is_done());
        waiter.wait();
    }
}
