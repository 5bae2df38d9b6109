//! The work that a session orders and a VM's worker does: everything that touches guest memory or its file.
//!
//! Each device of a VM has a worker that takes its jobs in order. A job that drops memory re-checks, in this order and right before it does:
//! the VMM's process (gates), the cookies, the deadline. What may happen when:
//!
//! ```text
//! Report arrives -> session judges age, ranges, gates -> Drop job queued
//!   worker: inspect process -> compare cookies -> arm the deadline guard -> drop, asking `cancelled` between calls
//!   -> disarm -> JobOutput -> session -> Ack
//! ```
//! Until the `Ack` (or a fence) the guest keeps the pages isolated, so nobody else can own them in between. A kernel
//! report goes the same way without cookies: [`Job::Discard`] and [`super::kernel`].

use super::effect::Content;
use crate::device::DeviceKind;
use crate::reporting::GuestRange;
use fpr_protocol::{BackedRange, Gate, GuestAddress, HugePageRange, HugePageSize, Refusal};
use std::time::Duration;

/// Names one job for as long as it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// Whose cookies to expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CookieKey {
    /// Session nonce.
    pub session_nonce: u64,
    /// Sequence of the message.
    pub sequence: u64,
}

/// One range to drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropItem {
    /// The huge pages; lies in one region of the map and is aligned.
    pub range: HugePageRange,
    /// Index of the first huge page's cookie, or `None` for offlined memory, which has none.
    pub first_cookie: Option<u32>,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Job {
    /// Drop these ranges.
    Drop {
        /// Them.
        items: Vec<DropItem>,
        /// Unit.
        size: HugePageSize,
        /// What the cookies say.
        key: CookieKey,
        /// Host time after which no drop may begin.
        deadline: Duration,
    },
    /// Drop these bytes, which the guest's kernel gave away.
    Discard {
        /// As the guest named them: unchecked, and they may overlap.
        ranges: Vec<GuestRange>,
        /// Host time after which no drop may begin.
        deadline: Duration,
    },
    /// Compare cookies only; index counts from 0.
    Prove {
        /// Addresses of the pages.
        pages: Vec<GuestAddress>,
        /// What the cookies say.
        key: CookieKey,
    },
    /// Which of these huge pages are backed?
    Survey {
        /// Ranges that passed the map's check.
        ranges: Vec<HugePageRange>,
        /// Unit.
        size: HugePageSize,
    },
    /// How much of these earlier dropped ranges is backed by now?
    Look {
        /// Them.
        ranges: Vec<HugePageRange>,
        /// Unit.
        size: HugePageSize,
    },
    /// How much of these pieces, dropped a minute ago, is backed by now?
    LookBack {
        /// Who dropped them.
        device: DeviceKind,
        /// Them; they may overlap.
        pieces: Vec<GuestRange>,
    },
}

impl Job {
    /// The device it belongs to: whose memory map it uses, whose fence waits for it.
    #[must_use]
    pub fn device(&self) -> DeviceKind {
        match self {
            Self::LookBack { device, .. } => *device,
            Self::Discard { .. } => DeviceKind::Balloon,
            Self::Drop { .. } | Self::Prove { .. } | Self::Survey { .. } | Self::Look { .. } => DeviceKind::Vsock,
        }
    }
}

/// What came of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobOutput {
    /// Of [`Job::Drop`] and [`Job::Discard`].
    Drop(DropOutput),
    /// Of [`Job::Prove`]: per page whether its cookie fits.
    Prove(Vec<bool>),
    /// Of [`Job::Survey`].
    Survey(Vec<BackedRange>),
    /// Of [`Job::Look`]: bytes backed, and what samples of them hold.
    Look(u64, Content),
    /// Of [`Job::LookBack`].
    LookedBack {
        /// Bytes that could be looked at.
        looked_bytes: u64,
        /// Of these: backed.
        backed_bytes: u64,
    },
    /// The worker could not do it; for a look or a survey that is no reason to end the session.
    Failed(String),
}

/// What came of a drop.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DropOutput {
    /// Per item or range: bytes dropped, or why not.
    pub results: Vec<Result<u64, Refusal>>,
    /// What a look into the VMM's process found, right before.
    pub process_gates: Vec<(Gate, String)>,
    /// Bytes in the dropped ranges that are still backed, the guest being locked out.
    pub still_backed_bytes: u64,
    /// Allocated bytes of all backing, before and after.
    pub allocated_bytes: (u64, u64),
    /// First system call error, for the log.
    pub error: Option<String>,
    /// What a second look into the VMM's process found right after the drop that the first had not.
    pub raced: Option<String>,
}

impl DropOutput {
    /// Nothing was dropped of so many items.
    #[must_use]
    pub fn refused(refusal: Refusal, items: usize) -> Self {
        Self { results: vec![Err(refusal); items], ..Self::default() }
    }
}
