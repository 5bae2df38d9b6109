//! The messages.
//!
//! Times are nanoseconds of the sender's monotonic clock; sizes are bytes unless the name says otherwise.
//! Guest to host: `Hello`, `Prove`, `Survey`, `Report`, `Stats`, `Pong`, `Goodbye`, `Reclaimed`. Host to guest:
//! `Welcome`, `Proven`, `SurveyReply`, `Ack`, `Inhibit`, `Resume`, `Ping`, `Reclaim`, `Refaults`, `KernelReporting`,
//! `Goodbye`.

use crate::codec::{self, CodecError};
use crate::range::{BackedRange, HugePageRange, ReportedRange};
use crate::reason::{CloseReason, Gate, PassEnd, Refusal};
use crate::units::GuestAddress;
use crate::version::{Version, VersionRange};
use bincode::{Decode, Encode};

/// How the guest's kernel treats pages it frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum FreedPages {
    /// Leaves them alone.
    Untouched,
    /// Writes zeros (`init_on_free`).
    Zeroed,
    /// Fills them with a pattern it checks later (`page_poison`, KASAN and the like).
    Poisoned,
    /// The agent could not find out, or was told not to look.
    Unknown,
}

/// First message of a session.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Hello {
    /// Protocol versions the agent speaks.
    pub versions: VersionRange,
    /// Version of the agent.
    pub agent_version: String,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: [u8; 16],
    /// Base page size.
    pub page_size: u32,
    /// Order of a huge page over the base page.
    pub huge_page_order: u8,
    /// `/sys/devices/system/memory/block_size_bytes`, 0 where there are no memory blocks.
    pub memory_block_bytes: u64,
    /// `MemTotal`.
    pub memory_total_bytes: u64,
    /// `uname -r`.
    pub kernel_release: String,
    /// How the kernel treats freed pages.
    pub freed_pages: FreedPages,
    /// SEV, SEV-SNP or TDX.
    pub confidential: bool,
    /// The guest's clock when it sent this.
    pub now_ns: u64,
}

/// Bounds the host sets for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Limits {
    /// Ranges in one report.
    pub max_report_ranges: u32,
    /// Huge pages reported and not yet answered.
    pub max_huge_pages_in_flight: u32,
    /// A report is refused when it is older than this on arrival, in milliseconds.
    pub lease_ms: u32,
    /// After the lease the host still finishes drops for at most this long, in milliseconds; then it kills itself
    /// rather than drop late. The guest may take unanswered memory back once lease, grace and its own margin are over.
    pub grace_ms: u32,
}

/// A range of guest-physical memory that the host can translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Region {
    /// First address.
    pub start: GuestAddress,
    /// Length in bytes.
    pub bytes: u64,
}

/// Answer to `Hello`. It is also the fence: no drop of an earlier session happens after it was sent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Welcome {
    /// The version both speak from now on.
    pub version: Version,
    /// Goes into every cookie.
    pub session_nonce: u64,
    /// Bounds.
    pub limits: Limits,
    /// Gates that are closed.
    pub gates: Vec<Gate>,
    /// The guest's memory as the host knows it.
    pub regions: Vec<Region>,
}

/// Asks the host to check cookies in claimed pages, and to drop nothing. Proves the address translation.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Prove {
    /// Counts up over all `Prove`, `Survey` and `Report` of a session.
    pub sequence: u64,
    /// Addresses of pages that start with a cookie, index counted from 0.
    pub pages: Vec<GuestAddress>,
}

/// Answer to `Prove`.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Proven {
    /// Of the `Prove`.
    pub sequence: u64,
    /// For each region of `Welcome`, whether it has passed the check in this session.
    pub regions: Vec<bool>,
    /// Pages whose cookie did not fit.
    pub mismatches: u32,
}

/// Asks which free huge pages the host still backs. A hint: nothing is isolated, nothing is dropped.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Survey {
    /// As in `Prove`.
    pub sequence: u64,
    /// Free huge pages, ascending.
    pub ranges: Vec<HugePageRange>,
}

/// Answer to `Survey`.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SurveyReply {
    /// Of the `Survey`.
    pub sequence: u64,
    /// What of it is backed, ascending.
    pub backed: Vec<BackedRange>,
}

/// Isolated huge pages whose backing may be dropped until the answer.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Report {
    /// As in `Prove`.
    pub sequence: u64,
    /// The guest's clock when it sent this.
    pub sent_at_ns: u64,
    /// The huge pages.
    pub ranges: Vec<ReportedRange>,
}

/// What became of one range of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum RangeResult {
    /// Dropped as a whole, this many bytes.
    Dropped {
        /// Length of the range.
        bytes: u64,
    },
    /// Untouched, or dropped only in part when the refusal is `drop-failed`.
    Refused(Refusal),
}

/// Answer to `Report`; the guest may use the memory again.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Ack {
    /// Of the `Report`.
    pub sequence: u64,
    /// One result per range, in order.
    pub results: Vec<RangeResult>,
}

/// What the guest says of itself. An indication: nothing is decided on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Stats {
    /// `MemTotal`.
    pub memory_total_bytes: u64,
    /// `MemFree`.
    pub memory_free_bytes: u64,
    /// `MemAvailable`.
    pub memory_available_bytes: u64,
    /// `Cached`.
    pub page_cache_bytes: u64,
    /// PSI memory `some avg10`, in hundredths of a percent.
    pub psi_some_avg10_centipercent: u32,
    /// PSI memory `full avg10`, in hundredths of a percent.
    pub psi_full_avg10_centipercent: u32,
    /// Huge pages taken offline since the agent started.
    pub huge_pages_offlined: u64,
    /// Huge pages claimed since the agent started.
    pub huge_pages_claimed: u64,
    /// CPU time of the agent since its start, in milliseconds.
    pub agent_cpu_ms: u64,
}

/// One message of either direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Guest: begins a session.
    Hello(Hello),
    /// Host: accepts it, and fences the one before.
    Welcome(Welcome),
    /// Guest: please check these cookies.
    Prove(Prove),
    /// Host: which regions passed.
    Proven(Proven),
    /// Guest: which of these do you still back?
    Survey(Survey),
    /// Host: these.
    SurveyReply(SurveyReply),
    /// Guest: drop these.
    Report(Report),
    /// Host: done, or why not.
    Ack(Ack),
    /// Guest: its own figures.
    Stats(Stats),
    /// Host: these gates are closed; report nothing until `Resume`.
    Inhibit(Vec<Gate>),
    /// Host: all gates are open.
    Resume,
    /// Host: are you there, and what does your clock say?
    Ping {
        /// Comes back in `Pong`.
        id: u64,
    },
    /// Guest: here, and this is the clock.
    Pong {
        /// Of the `Ping`.
        id: u64,
        /// The guest's clock.
        now_ns: u64,
    },
    /// Host: it wants memory back now, all that a pass can find and the guest can spare.
    Reclaim {
        /// Comes back in `Reclaimed`.
        id: u64,
    },
    /// Guest: the pass that was asked for has ended, and every report of it is answered.
    Reclaimed {
        /// Of the `Reclaim`.
        id: u64,
        /// How.
        end: PassEnd,
    },
    /// Host: whether the guest's kernel reports free pages by itself, through a balloon device. `false` until it is said.
    KernelReporting {
        /// It does.
        active: bool,
    },
    /// Host: how much of what was dropped came back soon. The agent's age adapts to it.
    Refaults {
        /// Dropped in the window.
        dropped_bytes: u64,
        /// Of it, backed again within the window.
        returned_bytes: u64,
    },
    /// Either: the end, and why.
    Goodbye {
        /// Why.
        reason: CloseReason,
    },
}

macro_rules! ids {
    ($($id:literal $variant:ident),* $(,)?) => {
        /// Message ids on the wire. An id is never used again for another message.
        pub mod id {
            $(#[allow(non_upper_case_globals, missing_docs)] pub const $variant: u16 = $id;)*
            /// All of them with their names.
            pub const ALL: &[(u16, &str)] = &[$(($id, stringify!($variant)),)*];
        }
    };
}
ids! {
    1 Hello, 2 Prove, 3 Survey, 4 Report, 5 Stats, 6 Pong, 7 Goodbye, 8 Reclaimed,
    128 Welcome, 129 Proven, 130 SurveyReply, 131 Ack, 132 Inhibit, 133 Resume, 134 Ping, 135 Reclaim, 136 Refaults,
    137 KernelReporting,
}

impl Message {
    /// The message's id on the wire.
    #[must_use]
    pub fn id(&self) -> u16 {
        match self {
            Self::Hello(_) => id::Hello,
            Self::Prove(_) => id::Prove,
            Self::Survey(_) => id::Survey,
            Self::Report(_) => id::Report,
            Self::Stats(_) => id::Stats,
            Self::Pong { .. } => id::Pong,
            Self::Goodbye { .. } => id::Goodbye,
            Self::Welcome(_) => id::Welcome,
            Self::Proven(_) => id::Proven,
            Self::SurveyReply(_) => id::SurveyReply,
            Self::Ack(_) => id::Ack,
            Self::Inhibit(_) => id::Inhibit,
            Self::Resume => id::Resume,
            Self::Ping { .. } => id::Ping,
            Self::Reclaim { .. } => id::Reclaim,
            Self::Refaults { .. } => id::Refaults,
            Self::Reclaimed { .. } => id::Reclaimed,
            Self::KernelReporting { .. } => id::KernelReporting,
        }
    }

    /// The name, for logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        id::ALL.iter().find(|(id, _)| *id == self.id()).map_or("?", |(_, name)| name)
    }

    pub(crate) fn encode_payload(&self) -> Result<Vec<u8>, CodecError> {
        match self {
            Self::Hello(m) => codec::encode(m),
            Self::Prove(m) => codec::encode(m),
            Self::Survey(m) => codec::encode(m),
            Self::Report(m) => codec::encode(m),
            Self::Stats(m) => codec::encode(m),
            Self::Pong { id, now_ns } => codec::encode(&(*id, *now_ns)),
            Self::Goodbye { reason } => codec::encode(reason),
            Self::Welcome(m) => codec::encode(m),
            Self::Proven(m) => codec::encode(m),
            Self::SurveyReply(m) => codec::encode(m),
            Self::Ack(m) => codec::encode(m),
            Self::Inhibit(gates) => codec::encode(gates),
            Self::Resume => Ok(Vec::new()),
            Self::Ping { id } => codec::encode(id),
            Self::Reclaim { id } => codec::encode(id),
            Self::Reclaimed { id, end } => codec::encode(&(*id, *end)),
            Self::KernelReporting { active } => codec::encode(active),
            Self::Refaults { dropped_bytes, returned_bytes } => codec::encode(&(*dropped_bytes, *returned_bytes)),
        }
    }

    /// Decodes the payload of message `id`; `None` for an id this build does not know.
    pub(crate) fn decode_payload(id: u16, payload: &[u8]) -> Option<Result<Self, CodecError>> {
        Some(match id {
            id::Hello => codec::decode(payload).map(Self::Hello),
            id::Prove => codec::decode(payload).map(Self::Prove),
            id::Survey => codec::decode(payload).map(Self::Survey),
            id::Report => codec::decode(payload).map(Self::Report),
            id::Stats => codec::decode(payload).map(Self::Stats),
            id::Pong => codec::decode(payload).map(|(id, now_ns)| Self::Pong { id, now_ns }),
            id::Goodbye => codec::decode(payload).map(|reason| Self::Goodbye { reason }),
            id::Welcome => codec::decode(payload).map(Self::Welcome),
            id::Proven => codec::decode(payload).map(Self::Proven),
            id::SurveyReply => codec::decode(payload).map(Self::SurveyReply),
            id::Ack => codec::decode(payload).map(Self::Ack),
            id::Inhibit => codec::decode(payload).map(Self::Inhibit),
            id::Resume => codec::decode(payload).map(|()| Self::Resume),
            id::Ping => codec::decode(payload).map(|id| Self::Ping { id }),
            id::Reclaim => codec::decode(payload).map(|id| Self::Reclaim { id }),
            id::Reclaimed => codec::decode(payload).map(|(id, end)| Self::Reclaimed { id, end }),
            id::KernelReporting => codec::decode(payload).map(|active| Self::KernelReporting { active }),
            id::Refaults => codec::decode(payload)
                .map(|(dropped_bytes, returned_bytes)| Self::Refaults { dropped_bytes, returned_bytes }),
            _ => return None,
        })
    }
}
