//! Units that must not be mixed up: addresses and page sizes.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Guest-physical address in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize)]
pub struct GuestAddress(pub u64);

impl GuestAddress {
    /// This address plus `bytes`, or `None` past the end of the address space.
    #[must_use]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

impl fmt::Display for GuestAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for GuestAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Size of the guest's huge page, the unit of a hint: base page size shifted by the order the guest named.
///
/// 2 MiB on x86-64 and on arm64 with 4 KiB pages (order 9), 2 MiB on arm64 with 64 KiB pages (order 5). Negotiated
/// in `Hello`, never hard-coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePageSize {
    page_shift: u8,
    order: u8,
}

/// Why a page size and order cannot be a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "page size {page_size} with order {order} is no huge page: wanted is a page size that is a power of two from \
     4096 to 65536, an order from 1 to 18 and at most 1 GiB together"
)]
pub struct HugePageSizeError {
    /// Base page size in bytes.
    pub page_size: u32,
    /// Allocation order.
    pub order: u8,
}

impl HugePageSize {
    /// Huge page of `page_size << order` bytes.
    pub fn new(page_size: u32, order: u8) -> Result<Self, HugePageSizeError> {
        let error = HugePageSizeError { page_size, order };
        if !page_size.is_power_of_two() || !(4096..=65536).contains(&page_size) {
            return Err(error);
        }
        let page_shift = u8::try_from(page_size.trailing_zeros()).map_err(|_| error)?;
        if !(1..=18).contains(&order) || page_shift + order > 30 {
            return Err(error);
        }
        Ok(Self { page_shift, order })
    }

    /// Size of the huge page in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        1 << (self.page_shift + self.order)
    }

    /// Size of the base page in bytes.
    #[must_use]
    pub fn page_bytes(self) -> u64 {
        1 << self.page_shift
    }

    /// Base pages in one huge page.
    #[must_use]
    pub fn pages(self) -> u64 {
        1 << self.order
    }

    /// Allocation order of the huge page.
    #[must_use]
    pub fn order(self) -> u8 {
        self.order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_page_sizes_of_real_machines() {
        assert_eq!(HugePageSize::new(4096, 9).map(HugePageSize::bytes), Ok(2 << 20));
        assert_eq!(HugePageSize::new(65536, 5).map(HugePageSize::bytes), Ok(2 << 20));
        assert_eq!(HugePageSize::new(65536, 13).map(HugePageSize::bytes), Ok(512 << 20));
        assert_eq!(HugePageSize::new(4096, 18).map(HugePageSize::bytes), Ok(1 << 30));
    }

    #[test]
    fn what_is_no_huge_page() {
        for (page_size, order) in [(0, 9), (4095, 9), (2048, 9), (131_072, 3), (4096, 0), (4096, 19), (65536, 15)] {
            assert!(HugePageSize::new(page_size, order).is_err(), "{page_size} order {order}");
        }
    }
}
