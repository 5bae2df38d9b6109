//! Memory statistics: what the guest's kernel says about itself (virtio 1.2, section 5.5.6.3).
//!
//! The guest leaves one buffer of `struct virtio_balloon_stat` on the statistics queue; the device reads it, keeps it,
//! and gives it back when it wants to know again, which makes the guest fill it anew. Nothing here was measured by the
//! host, and nothing may be decided by it.

use std::time::Instant;

/// Length of `struct virtio_balloon_stat`: le16 tag, le64 value, packed.
pub(super) const STAT_LEN: usize = 10;

/// Bytes of a buffer that are read. Linux sends 16 statistics at most (`VIRTIO_BALLOON_S_NR`); four times as many leave
/// room for tags to come.
pub(super) const MAX_LEN: usize = 64 * STAT_LEN;

macro_rules! statistics {
    ($($(#[$doc:meta])* $field:ident = $tag:literal,)*) => {
        /// The statistics of one buffer; `None` is what the guest did not send. All are claims of the guest.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Statistics { $($(#[$doc])* pub $field: Option<u64>,)* }

        impl Statistics {
            fn field(&mut self, tag: u16) -> Option<&mut Option<u64>> {
                match tag { $($tag => Some(&mut self.$field),)* _ => None }
            }
        }
    };
}

// Tags of include/uapi/linux/virtio_balloon.h, as of Linux 6.12.
statistics! {
    /// Swapped in, bytes, since boot (`VIRTIO_BALLOON_S_SWAP_IN`).
    swap_in_bytes = 0,
    /// Swapped out, bytes, since boot.
    swap_out_bytes = 1,
    /// Major faults since boot.
    major_faults = 2,
    /// Minor faults since boot.
    minor_faults = 3,
    /// Free memory in bytes (MemFree).
    free_bytes = 4,
    /// Total memory in bytes (MemTotal).
    total_bytes = 5,
    /// Available memory in bytes (MemAvailable).
    available_bytes = 6,
    /// Page cache in bytes.
    caches_bytes = 7,
    /// Successful allocations of huge pages since boot.
    hugetlb_allocations = 8,
    /// Failed allocations of huge pages since boot.
    hugetlb_failures = 9,
    /// Processes killed for want of memory since boot.
    oom_kills = 10,
    /// Allocations that had to reclaim by themselves since boot.
    alloc_stalls = 11,
    /// Bytes scanned by kswapd since boot.
    async_scanned_bytes = 12,
    /// Bytes scanned by direct reclaim since boot.
    direct_scanned_bytes = 13,
    /// Bytes reclaimed by kswapd since boot.
    async_reclaimed_bytes = 14,
    /// Bytes reclaimed by direct reclaim since boot.
    direct_reclaimed_bytes = 15,
}

impl Statistics {
    /// Reads a buffer: unknown tags are skipped, of a tag that comes twice the last value counts, a rest that is no
    /// whole statistic is not read.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let mut statistics = Self::default();
        for stat in bytes.chunks_exact(STAT_LEN) {
            let (tag, value) = stat.split_at(2);
            let tag = tag.iter().rev().fold(0_u16, |word, byte| word << 8 | u16::from(*byte));
            let value = value.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
            if let Some(field) = statistics.field(tag) {
                *field = Some(value);
            }
        }
        statistics
    }
}

/// Statistics and when they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// What the guest claims.
    pub statistics: Statistics,
    /// When the device read it. The guest had been asked at most shortly before.
    pub at: Instant,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(tag: u16, value: u64) -> Vec<u8> {
        [tag.to_le_bytes().as_slice(), value.to_le_bytes().as_slice()].concat()
    }

    #[test]
    fn tags_are_fields_unknown_ones_are_skipped_and_the_last_counts() {
        let bytes = [stat(4, 0x0102_0304_0506_0708), stat(16, 1), stat(0xffff, 2), stat(15, 3), stat(0, 5), stat(0, 6)]
            .concat();
        let expected = Statistics {
            free_bytes: Some(0x0102_0304_0506_0708),
            direct_reclaimed_bytes: Some(3),
            swap_in_bytes: Some(6),
            ..Statistics::default()
        };
        assert_eq!(Statistics::parse(&bytes), expected);
        for rest in 1..10 {
            assert_eq!(Statistics::parse(&[&bytes[..], &bytes[..rest]].concat()), expected);
        }
        assert_eq!(Statistics::parse(&[]), Statistics::default());
    }

    #[test]
    fn every_known_tag_has_a_field_of_its_own() {
        let mut statistics = Statistics::default();
        for tag in 0..16 {
            let field = statistics.field(tag);
            assert_eq!(field, Some(&mut None), "{tag}");
            *statistics.field(tag).into_iter().next().unwrap_or(&mut None) = Some(u64::from(tag));
        }
        assert_eq!(statistics.field(16), None);
    }
}
