//! Everything the agent keeps away from the guest at this moment, and how far each piece is.
//!
//! ```text
//!               isolated            sent             Ack, fence or time
//!  Isolating ------------> Isolated -----> Reported ---------------------> Answered -----> Returning -> (gone)
//!      |   failed             |  never sent (gate, lost link)                 ^
//!      v                      +-----------------------------------------------+
//!    (gone)
//! ```
//! The rule: a unit leaves `Reported` only through the host's answer, a fence (a newer session's `Welcome`), or lease,
//! grace and margin by the guest's own clock. Nothing else may return it.

use crate::kernel::memory_blocks::BlockNumber;
use fpr_protocol::GuestAddress;
use std::time::Duration;

/// Names one batch of claimed huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// A piece of isolated memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A memory block that is offline.
    Block(BlockNumber),
    /// Huge pages that the agent owns.
    Batch(BatchId),
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Asked for, not there yet.
    Isolating,
    /// There, and the host does not know of it.
    Isolated,
    /// The host may drop it until it answers.
    Reported {
        /// Of the report.
        sequence: u64,
        /// When lease, grace and margin are over, by the limits of the session it was reported in.
        until: Duration,
    },
    /// The host has let go of it.
    Answered,
    /// On its way back to the guest.
    Returning,
}

/// One piece with its state.
#[derive(Clone, Debug)]
pub struct Held {
    /// Which.
    pub unit: Unit,
    /// How far.
    pub step: Step,
    /// Claimed pages, ascending; empty for a block.
    pub pages: Vec<GuestAddress>,
    /// Huge pages in it.
    pub huge_pages: u64,
}

/// All pieces. Small: blocks are few at a time, batches bounded by the floor.
#[derive(Debug, Default)]
pub struct Holdings(Vec<Held>);

impl Holdings {
    /// Adds a piece that is being isolated.
    pub fn isolate(&mut self, unit: Unit, huge_pages: u64) {
        self.0.push(Held { unit, step: Step::Isolating, pages: Vec::new(), huge_pages });
    }

    /// The piece, if it is held.
    pub fn get_mut(&mut self, unit: Unit) -> Option<&mut Held> {
        self.0.iter_mut().find(|held| held.unit == unit)
    }

    /// Forgets a piece.
    pub fn remove(&mut self, unit: Unit) {
        self.0.retain(|held| held.unit != unit);
    }

    /// All pieces.
    pub fn iter(&self) -> impl Iterator<Item = &Held> {
        self.0.iter()
    }

    /// All pieces, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Held> {
        self.0.iter_mut()
    }

    /// Nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The piece that was reported under this sequence.
    pub fn reported(&mut self, sequence: u64) -> Option<&mut Held> {
        self.0.iter_mut().find(|held| matches!(held.step, Step::Reported { sequence: of, .. } if of == sequence))
    }

    /// Huge pages that the host may be dropping.
    #[must_use]
    pub fn huge_pages_in_flight(&self) -> u64 {
        self.0.iter().filter(|held| matches!(held.step, Step::Reported { .. })).map(|held| held.huge_pages).sum()
    }

    /// Number of pieces for which `wanted` holds.
    pub fn count(&self, wanted: impl Fn(&Held) -> bool) -> usize {
        self.0.iter().filter(|held| wanted(held)).count()
    }
}
