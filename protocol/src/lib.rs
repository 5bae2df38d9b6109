//! The agent channel of fpr: what a guest agent and a host agent say to each other, and its bytes.
//!
//! Used by both agents. Does no I/O, reads no clock and holds no `unsafe`. Every value that comes out of here was
//! sent by a peer: it is well-formed, but nothing says that it is true. The wire format is written down in
//! `docs/protocol.md`, whose byte examples `tests/golden.rs` checks.

#![forbid(unsafe_code)]

pub mod codec;
pub mod cookie;
pub mod frame;
pub mod message;
pub mod range;
pub mod reason;
pub mod size;
pub mod units;
pub mod version;

pub use cookie::Cookie;
pub use frame::{Frame, FrameDecoder, FrameError};
pub use message::Message;
pub use range::{BackedRange, HugePageRange, Isolation, RangeError, ReportedRange};
pub use reason::{CloseReason, Gate, PassEnd, Refusal};
pub use size::ByteSize;
pub use units::{GuestAddress, HugePageSize};
pub use version::{Version, VersionRange};

/// vsock port the host agent listens on: 0x667072, ASCII `fpr`.
pub const PORT: u32 = 0x66_70_72;

/// Most ranges in one `Report`. One report is one unit of waiting in the guest, so it stays small: 512 ranges of one
/// huge page each are 1 GiB on x86-64.
pub const MAX_REPORT_RANGES: usize = 512;

/// Most runs in one `Survey` and its reply. 2,048 runs of at most 23 bytes fit in a frame (`codec::MAX_PAYLOAD`).
pub const MAX_SURVEY_RANGES: usize = 2048;

/// Most pages in one `Prove`: a few per memory region of the host are enough.
pub const MAX_PROOFS: usize = 64;

/// Most memory regions that a `Welcome` can name; vhost-user knows at most 509 memory slots.
pub const MAX_REGIONS: usize = 512;

/// Longest string in a message, in bytes. Longest today: a kernel release.
pub const MAX_STRING: usize = 128;

/// Longest lease and grace together that a host may set. A guest that does not know which host it spoke to before can
/// take memory back after this long plus its margin.
pub const MAX_LEASE_AND_GRACE: std::time::Duration = std::time::Duration::from_secs(30);

/// An error and what caused it, in one line: for logs, and for messages that carry text only.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
