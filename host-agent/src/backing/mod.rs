//! What backs a guest's memory, and how it is dropped.
//!
//! [`map`] says where guest-physical memory is, [`choose`] says whether a file can be punched and how, and
//! [`GuestBacking`] puts both together for one VM; its owner calls it from one thread. [`DropGuard`] bounds the time of
//! a drop. Nothing here knows whether a drop is safe: the session and its gates have decided that before.
//!
//! Trusts the VMM, which handed over the descriptors, to back with them the memory it said. That it maps them shared
//! is seen elsewhere ([`crate::process`]).

mod deadline;
mod file;
mod guest;
mod hugetlb;
mod map;
mod private;
mod punch;
mod shared;
#[allow(unsafe_code)]
mod sys;

pub use deadline::{ArmError, DropGuard, boot_time};
pub use file::{FileId, Unsuitable, choose};
pub use guest::{BackingError, GuestBacking, ReadError};
pub use map::{MapError, MemoryMap, Region, Span};
pub use private::{NotPrivate, PrivateMemory};
pub use punch::{DropOutcome, MAX_CALL_BYTES};
pub(crate) use punch::{drop_extents, round_inward};

use nix::errno::Errno;
use std::io;
use std::ops::Range;

/// Memory that can be given back to the host by the byte range.
///
/// Offsets are bytes of the backing file, or of the mapping where there is none. The conformance suite (`tests/backing_conformance.rs`) says what every
/// implementation has to do.
pub trait Backing: Send + Sync {
    /// Size of the backing's pages in bytes, a power of two. Nothing smaller can be given back.
    fn page_bytes(&self) -> u64;

    /// Gives back the pages of `extent`, which is page-aligned and not empty: they read zero afterwards and cost the
    /// host nothing. One system call; a hole is no error.
    fn punch(&self, extent: Range<u64>) -> Result<(), Errno>;

    /// How many bytes of `extent` are backed, resident or swapped out; at least that where the kernel does not tell it
    /// exactly, all of them where holes are invisible ([`Backing::sees_holes`]). `extent` is page-aligned; the time is
    /// proportional to its pages.
    fn backed_bytes(&self, extent: Range<u64>) -> io::Result<u64>;

    /// Whether [`Backing::backed_bytes`] can tell a hole from memory.
    fn sees_holes(&self) -> bool;

    /// Bytes the whole file costs the host, resident or swapped out. Exact and O(1); of memory without a file like
    /// [`Backing::backed_bytes`].
    fn allocated_bytes(&self) -> io::Result<u64>;

    /// Reads guest memory without allocating what is a hole.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
}
