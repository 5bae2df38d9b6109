//! Sizes as powers of two. All memory sizes of this crate are bytes in a `u64`.

/// Bytes in a kibibyte.
pub const KIB: u64 = 1 << 10;
/// Bytes in a mebibyte.
pub const MIB: u64 = 1 << 20;
/// Bytes in a gibibyte.
pub const GIB: u64 = 1 << 30;

/// Bytes as mebibytes with one decimal, for people.
#[must_use]
pub fn mib(bytes: u64) -> String {
    format!("{}.{} MiB", bytes / MIB, bytes % MIB * 10 / MIB)
}
