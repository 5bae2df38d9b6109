//! How much of what was dropped came back within a minute: for accounting, by sample, whoever gave the memory away.
//!
//! Called by the session with what was dropped. The look of [`super::effect`] after 10 s is another: it tells the guest's
//! agent about what it took offline.
//!
//! A guest decides how much it gives away and how often, so the memory and the looks this takes are bounded: what one
//! device drops within a [`SLOT`] is remembered as its number of bytes and at most [`PIECES`] pieces of it, chosen at
//! random with the same chance for each. Up to that many pieces it is no sample but all of it. A minute later the pieces
//! are looked at, and their share that is backed again stands for the slot.

use crate::reporting::GuestRange;
use fpr_protocol::GuestAddress;
use std::collections::VecDeque;
use std::time::Duration;

/// Drops of so long are looked at together, which bounds the slots of a device to 60.
const SLOT: Duration = Duration::from_secs(1);

/// Pieces remembered of a slot. Looking at one that is backed by pages of 4 KiB takes up to 50 µs.
const PIECES: usize = 8;

/// Size of a piece: what ranges are cut into for sampling.
const PIECE_BYTES: u64 = 2 << 20;

/// What to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Pieces of what was dropped; they may overlap if it was dropped twice.
    pub pieces: Vec<GuestRange>,
    /// So many bytes were dropped.
    pub dropped_bytes: u64,
}

#[derive(Debug)]
struct Slot {
    opened: Duration,
    pieces_seen: u64,
    sample: Sample,
}

/// What one device dropped in the last minute.
#[derive(Debug)]
pub struct RefaultWatch {
    /// When to look, after the drop.
    after: Duration,
    slots: VecDeque<Slot>,
    random: u64,
}

impl RefaultWatch {
    /// Nothing dropped yet.
    #[must_use]
    pub fn new(after: Duration, seed: u64) -> Self {
        // The generator stays at 0.
        Self { after, slots: VecDeque::new(), random: seed | 1 }
    }

    /// These ranges were dropped, so many bytes of them.
    pub fn dropped(&mut self, ranges: &[GuestRange], dropped_bytes: u64, now: Duration) {
        let pieces: u64 = ranges.iter().map(pieces_in).fold(0, u64::saturating_add);
        if dropped_bytes == 0 || pieces == 0 {
            return;
        }
        if self.slots.back().is_none_or(|slot| now.saturating_sub(slot.opened) >= SLOT) {
            let sample = Sample { pieces: Vec::new(), dropped_bytes: 0 };
            self.slots.push_back(Slot { opened: now, pieces_seen: 0, sample });
        }
        let random = &mut self.random;
        let Some(slot) = self.slots.back_mut() else { return };
        slot.sample.dropped_bytes = slot.sample.dropped_bytes.saturating_add(dropped_bytes);
        let room = (PIECES - slot.sample.pieces.len()) as u64;
        let taken = room.min(pieces);
        slot.sample.pieces.extend((0..taken).filter_map(|number| piece(ranges, number)));
        slot.pieces_seen = slot.pieces_seen.saturating_add(pieces);
        let rest = pieces - taken;
        if rest == 0 {
            return;
        }
        // Each place is given to one of the rest with the chance that the rest has among all.
        for place in &mut slot.sample.pieces {
            if below(random, slot.pieces_seen) < rest
                && let Some(other) = piece(ranges, taken + below(random, rest))
            {
                *place = other;
            }
        }
    }

    /// Takes out one slot that is due.
    pub fn due(&mut self, now: Duration) -> Option<Sample> {
        if self.next_due()? > now {
            return None;
        }
        self.slots.pop_front().map(|slot| slot.sample)
    }

    /// When the next look is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Duration> {
        self.slots.front().map(|slot| slot.opened + self.after)
    }

    /// The guest's memory is another now.
    pub fn reset(&mut self) {
        self.slots.clear();
    }
}

fn pieces_in(range: &GuestRange) -> u64 {
    range.bytes.div_ceil(PIECE_BYTES)
}

/// The piece of this number, counted through all ranges.
fn piece(ranges: &[GuestRange], mut number: u64) -> Option<GuestRange> {
    for range in ranges {
        let pieces = pieces_in(range);
        if number < pieces {
            let offset = number * PIECE_BYTES;
            let start = GuestAddress(range.start.0.checked_add(offset)?);
            return Some(GuestRange { start, bytes: PIECE_BYTES.min(range.bytes - offset) });
        }
        number -= pieces;
    }
    None
}

/// A number below `bound` (xorshift64; good enough to choose what to look at).
fn below(state: &mut u64, bound: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) % bound.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const PIECE: u64 = PIECE_BYTES;

    fn watch() -> RefaultWatch {
        RefaultWatch::new(MINUTE, 7)
    }

    fn range(first: u64, pieces: u64) -> GuestRange {
        GuestRange { start: GuestAddress(first * PIECE), bytes: pieces * PIECE }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn little_is_remembered_as_a_whole_and_due_within_the_minute() {
        let mut watch = watch();
        let odd = GuestRange { start: GuestAddress(100 * PIECE), bytes: PIECE + 4096 };
        watch.dropped(&[range(3, 2), odd], 3 * PIECE + 4096, ms(100));
        watch.dropped(&[range(50, 1)], PIECE, ms(900));
        assert_eq!(watch.next_due(), Some(ms(60_100)));
        assert_eq!(watch.due(ms(60_099)), None);
        let tail = GuestRange { start: GuestAddress(101 * PIECE), bytes: 4096 };
        let pieces = vec![range(3, 1), range(4, 1), range(100, 1), tail, range(50, 1)];
        assert_eq!(watch.due(ms(60_100)), Some(Sample { pieces, dropped_bytes: 4 * PIECE + 4096 }));
        assert_eq!(watch.next_due(), None);
    }

    #[test]
    fn a_guest_can_make_neither_the_memory_nor_a_look_grow() {
        let mut watch = watch();
        let all = [GuestRange { start: GuestAddress(0), bytes: u64::MAX }, range(0, 1 << 20)];
        for at in 0..60_000 {
            watch.dropped(&all, u64::MAX, ms(at));
        }
        assert!(watch.slots.len() <= 60, "{}", watch.slots.len());
        assert!(watch.slots.iter().all(|slot| slot.sample.pieces.len() == PIECES));
        watch.dropped(&[], 5, ms(0));
        watch.reset();
        watch.dropped(&[range(0, 1)], 0, ms(0));
        assert_eq!(watch.next_due(), None);
    }

    /// Half of what was dropped lies in one large range, half in many small ones: each piece has the same chance.
    #[test]
    fn the_sample_does_not_prefer_large_early_or_late_ranges() {
        let mut watch = watch();
        let mut low = 0;
        for slot in 0..500 {
            let now = Duration::from_secs(slot);
            watch.dropped(&[range(0, 64)], 64 * PIECE, now);
            for small in 0..64 {
                watch.dropped(&[range(64 + small, 1)], PIECE, now);
            }
            let Some(sample) = watch.due(now + MINUTE) else { continue };
            low += sample.pieces.iter().filter(|piece| piece.start.0 < 64 * PIECE).count();
        }
        // 4,000 fair choices: 2,000, standard deviation 32.
        assert!((1840..=2160).contains(&low), "{low} of 4000");
    }
}
