//! The configuration space: `struct virtio_balloon_config` (virtio 1.2, section 5.5.4), four little-endian words.
//!
//! Read and written by the guest's driver through the front end. Some front ends pass on what the driver wrote, others
//! (QEMU's `vub_set_config`, hw/virtio/vhost-user-base.c) write their copy of the whole space after each write of the
//! driver. So a word that the driver may not write is refused only if the write would change it.
//!
//! # The poison value
//! A driver that negotiates PAGE_POISON must write `poison_val` before DRIVER_OK (section 5.5.6.5.1), so a value that was
//! never written was written to somebody else: to the daemon that served the VM before this one. What it was is not
//! known, and [`UNKNOWN_POISON`] stands for it: not 0, so nothing is dropped, also when a front end that has read it
//! writes it back.

use crate::device::UNKNOWN_POISON;

/// Length of the configuration space in bytes.
const LEN: usize = 16;

/// The words of the configuration space by offset.
const ACTUAL: usize = 4;
const POISON_VAL: usize = 12;

/// A write that was refused, in whole or in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// It would have changed `num_pages` or `free_page_hint_cmd_id`.
    ReadOnly,
    /// Part of it lies behind the end.
    OutOfRange,
}

/// The configuration space. `num_pages` is always 0, since this device never asks the guest to inflate its balloon, and
/// so is `free_page_hint_cmd_id`, since free page hints are not offered.
#[derive(Debug)]
pub(super) struct ConfigSpace([u8; LEN]);

impl ConfigSpace {
    /// As after a reset.
    pub(super) fn new() -> Self {
        let mut bytes = [0; LEN];
        bytes[POISON_VAL..].copy_from_slice(&UNKNOWN_POISON.to_le_bytes());
        Self(bytes)
    }

    /// The pattern that the guest's free pages hold.
    pub(super) fn poison_val(&self) -> u32 {
        let mut word = [0; 4];
        word.copy_from_slice(&self.0[POISON_VAL..]);
        u32::from_le_bytes(word)
    }

    /// The bytes from `offset` on; `None` if there are not `size`.
    pub(super) fn read(&self, offset: u32, size: u32) -> Option<&[u8]> {
        let offset = usize::try_from(offset).ok()?;
        self.0.get(offset..offset.checked_add(usize::try_from(size).ok()?)?)
    }

    /// Writes `bytes` from `offset` on: those that the driver may write are stored, others are refused.
    ///
    /// # Errors
    /// Why something was refused; the rest is stored all the same.
    pub(super) fn write(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Refused> {
        let mut result = Ok(());
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, byte) in bytes.iter().enumerate() {
            let at = start.saturating_add(index);
            match (at, self.0.get_mut(at)) {
                (_, None) => result = Err(Refused::OutOfRange),
                (ACTUAL..8 | POISON_VAL.., Some(stored)) => *stored = *byte,
                (_, Some(stored)) if stored != byte => result = result.and(Err(Refused::ReadOnly)),
                _ => {}
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_poison_value_that_was_never_written_is_not_zero() {
        let mut config = ConfigSpace::new();
        assert_ne!(config.poison_val(), 0);
        config.write(12, &[0; 4]).unwrap();
        assert_eq!(config.poison_val(), 0);
    }

    /// As QEMU does it after the driver has written `actual`, having read the space before.
    #[test]
    fn the_whole_space_written_back_changes_only_what_the_driver_wrote() {
        let mut config = ConfigSpace::new();
        let mut copy = config.read(0, 16).unwrap().to_vec();
        copy[4..8].copy_from_slice(&7_u32.to_le_bytes());
        assert_eq!(config.write(0, &copy), Ok(()));
        assert_eq!(config.read(4, 4), Some(7_u32.to_le_bytes().as_slice()));
        assert_eq!(config.poison_val(), UNKNOWN_POISON);
        copy[0] = 1;
        assert_eq!(config.write(0, &copy), Err(Refused::ReadOnly));
        assert_eq!(config.read(0, 4), Some([0; 4].as_slice()));
    }

    proptest! {
        /// Against a model that knows only which bytes are whose.
        #[test]
        fn writes_and_reads_of_any_offset_and_size(
            writes in proptest::collection::vec((prop_oneof![0..24_u32, any::<u32>()], proptest::collection::vec(any::<u8>(), 0..24)), 0..8),
            read in (prop_oneof![0..24_u32, any::<u32>()], prop_oneof![0..24_u32, any::<u32>()]),
        ) {
            let mut config = ConfigSpace::new();
            let mut model = ConfigSpace::new().0;
            for (offset, bytes) in &writes {
                let mut refused = false;
                for (index, byte) in bytes.iter().enumerate() {
                    let at = u64::from(*offset) + index as u64;
                    match at {
                        4..=7 | 12..=15 => model[at as usize] = *byte,
                        0..=3 | 8..=11 => refused |= *byte != 0,
                        _ => refused = true,
                    }
                }
                prop_assert_eq!(config.write(*offset, bytes).is_err(), refused);
            }
            let end = u64::from(read.0) + u64::from(read.1);
            let expected = (end <= 16).then(|| &model[read.0 as usize..end as usize]);
            prop_assert_eq!(config.read(read.0, read.1), expected);
        }
    }
}
