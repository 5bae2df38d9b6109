//! What goes into the state machine and what comes out of it.

use super::held::{BatchId, Unit};
use super::policy::PassOutcome;
use crate::kernel::memory_blocks::BlockNumber;
use fpr_protocol::message::{Hello, Stats};
use fpr_protocol::{CloseReason, Cookie, Gate, GuestAddress, HugePageSize, Message, Refusal};

/// Whether an isolation method can be used, and why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Method {
    /// It can.
    Usable,
    /// It cannot; the reason is for a person.
    Off(String),
}

impl Method {
    /// Whether it can be used.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        *self == Self::Usable
    }
}

/// What does not change while the agent runs.
#[derive(Clone, Debug)]
pub struct Facts {
    /// First message of each session; its clock is filled in.
    pub hello: Hello,
    /// Unit of a hint.
    pub size: HugePageSize,
    /// Size of a memory block, where there are any.
    pub block_bytes: Option<u64>,
    /// Memory-block offlining.
    pub offline: Method,
    /// Huge-page claims.
    pub claims: Method,
    /// A dead agent left memory isolated.
    pub leftovers: bool,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// The stream to the host is open.
    LinkUp,
    /// It is gone.
    LinkDown,
    /// A message came.
    Message(Message),
    /// Free memory now, and whether the workload stalls for memory.
    Watch {
        /// Free memory.
        free_bytes: u64,
        /// Tasks waited for memory for more than a tenth of the time since the last look (PSI `some`).
        stalled: bool,
    },
    /// Free huge pages, ascending; the answer to [`Action::Look`].
    Looked(Vec<GuestAddress>),
    /// The answer to [`Action::Offline`].
    Offline(BlockNumber, OfflineResult),
    /// The answer to [`Action::CheckBlock`]: is it still offline?
    BlockChecked(BlockNumber, bool),
    /// The answer to [`Action::Online`].
    Online(BlockNumber, OnlineResult),
    /// The answer to [`Action::Claim`]: what came, ascending, and why not all.
    Claimed(BatchId, Vec<GuestAddress>, Option<ClaimShort>),
    /// Figures to pass on.
    Stats(Stats),
    /// Nothing but time.
    Tick,
}

/// What came of taking a block offline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OfflineResult {
    /// It is offline.
    Isolated,
    /// A page in it is in use; nothing was tried.
    InUse,
    /// A page was taken after the check: the kernel tried to move it, or printed a page dump.
    Refused,
    /// The kernel will never do it.
    Failed(String),
}

/// What came of bringing a block back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnlineResult {
    /// It was offline all the time and is back.
    Online,
    /// It was online already: somebody else did that.
    StolenOnline,
    /// The kernel refused; it is tried again.
    Failed(String),
}

/// Why a claim got fewer pages than asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimShort {
    /// No free huge pages without making the kernel work for them.
    Exhausted,
    /// The method does not work.
    Failed(String),
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send it to the host.
    Send(Message),
    /// Close the stream and connect again later.
    Disconnect(CloseReason),
    /// Find the free huge pages.
    Look,
    /// Take the block offline if every page of it is free.
    Offline(BlockNumber),
    /// Is it still offline?
    CheckBlock(BlockNumber),
    /// Bring it back.
    Online(BlockNumber),
    /// Allocate up to this many free huge pages and pin them.
    Claim(BatchId, u32),
    /// Write cookies to the batch's pages, in ascending order of address.
    WriteCookies(BatchId, Vec<Cookie>),
    /// Free the batch without touching it.
    Release(BatchId),
    /// Return what a dead agent left.
    Recover,
    /// Tell a person.
    Note(Note),
}

/// Things worth a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A session began; these gates are closed.
    SessionStarted(Vec<Gate>),
    /// The host's gates changed.
    Gates(Vec<Gate>),
    /// Whether the guest's kernel reports free pages by itself, as the host says.
    KernelReporting(bool),
    /// The host closes.
    HostGoodbye(CloseReason),
    /// An isolation method was switched off.
    MethodOff(&'static str, String),
    /// A unit came back without an answer, by time.
    Unanswered(Unit),
    /// A pass ended: dropped and refused huge pages, and the last refusal.
    Passed {
        /// What it achieved.
        outcome: PassOutcome,
        /// Huge pages dropped.
        dropped: u64,
        /// Huge pages refused.
        refused: u64,
        /// Why, the last time.
        last_refusal: Option<Refusal>,
    },
    /// The address check failed for so many pages.
    ProofFailed(u32),
}

/// What the agent did since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Huge pages taken offline.
    pub huge_pages_offlined: u64,
    /// Huge pages claimed.
    pub huge_pages_claimed: u64,
    /// Huge pages that the host dropped.
    pub huge_pages_dropped: u64,
    /// Huge pages that it refused.
    pub huge_pages_refused: u64,
    /// Passes ended.
    pub passes: u64,
}
