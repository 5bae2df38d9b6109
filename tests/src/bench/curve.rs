//! How host-backed memory falls after an event in the guest: pure arithmetic on a recorded series.

use std::time::{Duration, Instant};

use crate::host_memory::Sample;
use crate::units::MIB;

/// The floor counts as reached this close above it: a guest that is alive moves by some pages for ever.
const FLOOR_TOLERANCE: u64 = MIB;
/// A fall smaller than this is the guest's own breathing, not returned memory.
const SMALLEST_RETURN: u64 = 64 * MIB;

/// A series around the moment in which memory became free.
#[derive(Debug, Clone)]
pub struct Curve<'samples> {
    samples: &'samples [Sample],
    freed_at: Instant,
    /// Most bytes at any moment.
    pub peak_bytes: u64,
    /// Fewest bytes after the memory became free.
    pub floor_bytes: u64,
}

impl<'samples> Curve<'samples> {
    /// None if no sample was taken after `freed_at`.
    #[must_use]
    pub fn of(samples: &'samples [Sample], freed_at: Instant) -> Option<Self> {
        let peak_bytes = samples.iter().map(|sample| sample.bytes).max()?;
        let floor_bytes = samples.iter().filter(|sample| sample.at >= freed_at).map(|sample| sample.bytes).min()?;
        Some(Self { samples, freed_at, peak_bytes, floor_bytes })
    }

    /// Bytes that came back; zero if it is too little to speak of a return.
    #[must_use]
    pub fn returned_bytes(&self) -> u64 {
        let fall = self.peak_bytes.saturating_sub(self.floor_bytes);
        if fall < SMALLEST_RETURN { 0 } else { fall }
    }

    /// Time until `percent` of what came back was back. None if nothing came back.
    #[must_use]
    pub fn time_to(&self, percent: u64) -> Option<Duration> {
        if self.returned_bytes() == 0 {
            return None;
        }
        let goal = self.peak_bytes - self.returned_bytes() * percent.min(100) / 100;
        let goal = goal.max(self.floor_bytes + FLOOR_TOLERANCE);
        let reached = self.samples.iter().find(|sample| sample.at >= self.freed_at && sample.bytes <= goal)?;
        Some(reached.at - self.freed_at)
    }

    /// Points `(seconds after the memory became free, bytes)`, without those between two equal ones. Earlier points are negative.
    #[must_use]
    pub fn points(&self) -> Vec<(f64, u64)> {
        let same = |a: Option<&Sample>, b: &Sample| a.is_some_and(|a| a.bytes == b.bytes);
        let kept = self.samples.iter().enumerate().filter(|(index, sample)| {
            let before = index.checked_sub(1).and_then(|index| self.samples.get(index));
            !(same(before, sample) && same(self.samples.get(index + 1), sample))
        });
        kept.map(|(_, sample)| (self.seconds(sample.at), sample.bytes)).collect()
    }

    fn seconds(&self, at: Instant) -> f64 {
        let seconds = match at.checked_duration_since(self.freed_at) {
            Some(after) => after.as_secs_f64(),
            None => -(self.freed_at - at).as_secs_f64(),
        };
        (seconds * 1000.0).round() / 1000.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn series(start: Instant, mib: &[u64]) -> Vec<Sample> {
        mib.iter()
            .zip(0..)
            .map(|(mib, second)| Sample { at: start + Duration::from_secs(second), bytes: mib * MIB })
            .collect()
    }

    #[test]
    fn times_are_shares_of_what_comes_back() {
        let start = Instant::now();
        let samples = series(start, &[100, 1100, 1100, 900, 600, 200, 101, 100, 100]);
        let curve = Curve::of(&samples, start + Duration::from_secs(2)).unwrap();
        assert_eq!((curve.peak_bytes, curve.floor_bytes, curve.returned_bytes()), (1100 * MIB, 100 * MIB, 1000 * MIB));
        assert_eq!(curve.time_to(50), Some(Duration::from_secs(2)));
        assert_eq!(curve.time_to(90), Some(Duration::from_secs(3)));
        assert_eq!(curve.time_to(100), Some(Duration::from_secs(4)));
    }

    #[test]
    fn what_was_low_before_the_exit_is_no_floor() {
        let start = Instant::now();
        let samples = series(start, &[100, 1100, 1090, 1100]);
        let curve = Curve::of(&samples, start + Duration::from_secs(1)).unwrap();
        assert_eq!((curve.floor_bytes, curve.returned_bytes(), curve.time_to(50)), (1090 * MIB, 0, None));
    }

    #[test]
    fn points_keep_the_ends_of_a_plateau() {
        let start = Instant::now();
        let samples = series(start, &[5, 5, 5, 5, 7, 6]);
        let curve = Curve::of(&samples, start + Duration::from_secs(1)).unwrap();
        assert_eq!(curve.points(), [(-1.0, 5 * MIB), (2.0, 5 * MIB), (3.0, 7 * MIB), (4.0, 6 * MIB)]);
    }
}
