//! Protocol versions and their negotiation by range.

use bincode::{Decode, Encode};
use std::fmt;

/// A protocol version, major in the high byte, minor in the low one.
///
/// Another major version means another wire format. A newer minor version only adds message ids, which an older
/// peer skips.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct Version(pub u16);

impl Version {
    /// The first version.
    pub const V1_0: Self = Self(0x0100);
    /// The newest version this build speaks.
    pub const CURRENT: Self = Self::V1_0;

    /// Major version.
    #[must_use]
    pub fn major(self) -> u8 {
        self.0.to_be_bytes()[0]
    }

    /// Minor version.
    #[must_use]
    pub fn minor(self) -> u8 {
        self.0.to_be_bytes()[1]
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major(), self.minor())
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The versions a peer can speak, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct VersionRange {
    /// Oldest.
    pub oldest: Version,
    /// Newest.
    pub newest: Version,
}

impl VersionRange {
    /// What this build speaks.
    pub const SUPPORTED: Self = Self { oldest: Version::V1_0, newest: Version::CURRENT };

    /// The newest version both can speak, or `None` when the ranges do not meet or one of them is upside down.
    #[must_use]
    pub fn newest_common(self, other: Self) -> Option<Version> {
        if self.oldest > self.newest || other.oldest > other.newest {
            return None;
        }
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.oldest, self.newest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(oldest: u16, newest: u16) -> VersionRange {
        VersionRange { oldest: Version(oldest), newest: Version(newest) }
    }

    #[test]
    fn negotiation_takes_the_newest_common_version() {
        assert_eq!(range(0x100, 0x103).newest_common(range(0x102, 0x200)), Some(Version(0x103)));
        assert_eq!(range(0x100, 0x100).newest_common(range(0x100, 0x100)), Some(Version(0x100)));
        assert_eq!(range(0x100, 0x101).newest_common(range(0x102, 0x200)), None);
        assert_eq!(range(0x103, 0x100).newest_common(range(0x100, 0x103)), None);
    }
}
