//! Sizes as operators write them: `64M`.
//!
//! Used by the configurations and command lines of both agents, so that one way of writing a size is right everywhere.

use serde::Deserialize;
use std::fmt;
use std::str::FromStr;

/// Units and the powers of two they stand for, as in `dd` and QEMU.
const UNITS: [(&str, u32); 5] = [("", 0), ("K", 10), ("M", 20), ("G", 30), ("T", 40)];

/// A number of bytes, written plain or with K, M, G or T for powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct ByteSize(pub u64);

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ByteSizeError {
    /// Something else.
    #[error("{0:?} is no size: write it like 64M, with K, M, G or T")]
    Malformed(String),
    /// More than 64 bits.
    #[error("{0:?} is too large: at most 16777215T")]
    TooLarge(String),
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(end);
        let known = UNITS.iter().find(|(name, _)| *name == unit).filter(|_| !digits.is_empty());
        let Some((_, shift)) = known else { return Err(ByteSizeError::Malformed(text.to_owned())) };
        // Digits only: what does not fit is too large, and nothing else can be wrong.
        let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
        bytes.map(Self).ok_or_else(|| ByteSizeError::TooLarge(text.to_owned()))
    }
}

impl TryFrom<String> for ByteSize {
    type Error = ByteSizeError;

    fn try_from(text: String) -> Result<Self, ByteSizeError> {
        text.parse()
    }
}

impl fmt::Display for ByteSize {
    /// In the largest unit that leaves nothing over, so that it reads back as the same size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.iter().rev().find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift);
        let (unit, shift) = whole.copied().unwrap_or(("", 0));
        write!(f, "{}{unit}", self.0 >> shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_a_size() {
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("8K", 8192), ("64M", 64 << 20), ("6G", 6 << 30), ("1T", 1 << 40)]
        {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "M", "6g", "6 G", "6GB", "-1", "+1", "1.5G", "0x10", "６G"] {
            assert_eq!(text.parse::<ByteSize>(), Err(ByteSizeError::Malformed(text.to_owned())));
        }
        for text in ["18446744073709551616", "16777216T", "99999999999G"] {
            assert_eq!(text.parse::<ByteSize>(), Err(ByteSizeError::TooLarge(text.to_owned())));
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(bytes: u64, shift in 0u32..50) {
            let size = ByteSize(bytes << shift);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,24}") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
