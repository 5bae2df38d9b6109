//! What a claimed huge page starts with.
//!
//! The agent writes a cookie into each page it claims, the host compares all of its bytes before it drops the page.
//! A wrong address translation, a stale report or a lying offset is then refused instead of destroying a page. The
//! address is part of it, so that a cookie which the guest's kernel copied elsewhere (page migration) does not fit
//! its new place.

use crate::units::GuestAddress;

/// Identity of one claimed huge page in one report or proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookie {
    /// Session nonce of the `Welcome`.
    pub session_nonce: u64,
    /// Sequence of the `Report` or `Prove`.
    pub sequence: u64,
    /// Number of the huge page in it, counted over all its claimed ranges in order.
    pub index: u32,
    /// The page's own guest-physical address.
    pub address: GuestAddress,
}

/// First bytes of a cookie.
const MAGIC: [u8; 8] = *b"fpr-page";

impl Cookie {
    /// Length in memory, in bytes.
    pub const LEN: usize = 36;

    /// The bytes in memory, little-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.session_nonce.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.index.to_le_bytes());
        bytes[28..36].copy_from_slice(&self.address.0.to_le_bytes());
        bytes
    }
}
