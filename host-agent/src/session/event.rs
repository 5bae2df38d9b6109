//! What goes into the session and what comes out of it.

use super::drain::{DrainError, DrainId, Drained};
use super::gates::{ClosedGate, GateSource};
use super::job::{Job, JobId, JobOutput};
use super::kernel::{KernelReport, KernelReportId};
use crate::device::{ConnectionId, DeviceKind};
use fpr_protocol::message::Stats;
use fpr_protocol::{CloseReason, Gate, Message, Refusal};
use serde::Serialize;
use std::time::Duration;

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A connection to the agent's port opened.
    Connected(ConnectionId),
    /// A whole message came.
    Message(ConnectionId, Message),
    /// The stream could not be decoded, or ended in the middle of a frame; with what the guest is told.
    Malformed(ConnectionId, CloseReason),
    /// The guest did not read what it was sent, and the connection was reset for it.
    NotReading(ConnectionId),
    /// The connection is gone.
    Disconnected(ConnectionId),
    /// The guest's kernel gave memory away through the balloon device. Answered exactly once.
    KernelReported(KernelReport),
    /// What the balloon's driver says free pages hold; `None` when it says nothing.
    PagePoison(Option<u32>),
    /// A front end stopped its device; `fence` is answered when nothing that came through it can be dropped any more.
    Stopped {
        /// Which device.
        device: DeviceKind,
        /// Comes back in [`Action::FencePassed`].
        fence: u64,
    },
    /// A device has another memory map; the old one is used until the fence has passed by jobs that run.
    MapChanged {
        /// Which device.
        device: DeviceKind,
        /// Comes back in [`Action::FencePassed`].
        fence: u64,
    },
    /// A gate's source has looked again: these and no others are closed by it.
    Gates(GateSource, Vec<(Gate, String)>),
    /// The worker finished a job.
    JobFinished(JobId, JobOutput),
    /// An operator wants memory back now. Answered exactly once.
    Drain {
        /// Comes back in [`Action::Drained`].
        id: DrainId,
        /// When the asker stops waiting.
        until: Duration,
    },
    /// A time asked for by [`Session::next_deadline`] has come.
    Tick,
}

/// What to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Send it.
    Send(ConnectionId, Message),
    /// Close the connection after what was sent.
    Close(ConnectionId, CloseReason),
    /// Give it to the worker.
    Start(JobId, Job),
    /// Make running and queued jobs of this device end at their next check.
    CancelJobs(DeviceKind),
    /// Return the kernel's report: one result per range, in order. Nothing of it is in flight.
    Answer(KernelReportId, Vec<Result<u64, Refusal>>),
    /// Tell the operator what came back.
    Drained(DrainId, Result<Drained, DrainError>),
    /// All jobs of the device from before the event with this fence have ended.
    FencePassed(u64),
    /// Something an operator should see.
    Note(Note),
}

/// Things worth a log line. The owner decides on levels and limits.
#[derive(Debug, PartialEq)]
pub enum Note {
    /// A session began.
    SessionStarted {
        /// Agent version as the guest says.
        agent_version: String,
        /// Kernel release as the guest says.
        kernel_release: String,
    },
    /// A session ended.
    SessionEnded(Option<CloseReason>),
    /// Gates changed; these are closed now.
    GatesChanged(Vec<ClosedGate>),
    /// A drop's system call failed.
    DropFailed(String),
    /// An assigned device appeared while a report was being dropped: memory it uses may have been dropped.
    DeviceRaced(String),
}

/// The agent as `status` shows it. Everything in it is the guest's word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum AgentStatus {
    /// None has said `Hello`.
    Absent,
    /// One said `Hello` and waits for drops of the session before.
    Fencing,
    /// In session.
    Active {
        /// Its version.
        agent_version: String,
        /// Its kernel.
        kernel_release: String,
        /// Its last figures.
        #[serde(skip)]
        stats: Option<Stats>,
        /// Regions that passed the address check, of all.
        regions_proven: (usize, usize),
    },
}
