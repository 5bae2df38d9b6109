//! The system calls of this module that have no safe wrapper: `cachestat` (Linux 6.5, `mm/filemap.c`) and
//! `madvise(MADV_DONTNEED)`.

use nix::errno::Errno;
use nix::sys::mman::{MmapAdvise, madvise};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use vm_memory::MmapRegion;
use vm_memory::bitmap::Bitmap;

/// Number of the call, the same on every architecture that Linux added it to (`asm-generic/unistd.h`).
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of `linux/mman.h`.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    bytes: u64,
}

/// `struct cachestat` of `linux/mman.h`; all fields count base pages.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Pages of a part of a file.
pub(super) struct PageCount {
    /// In the page cache.
    pub(super) cached: u64,
    /// No longer there; of shmem, in swap.
    pub(super) evicted: u64,
}

/// Counts the pages of `extent`, which must not be empty: the kernel takes a length of 0 for "to the end".
pub(super) fn cachestat(file: &File, extent: &Range<u64>) -> Result<PageCount, Errno> {
    let range = CachestatRange { offset: extent.start, bytes: extent.end.saturating_sub(extent.start) };
    if range.bytes == 0 {
        return Err(Errno::EINVAL);
    }
    let mut count = Cachestat::default();
    // SAFETY: the call reads 16 bytes at its second argument and writes 40 bytes at its third and touches no other
    // memory of ours. Both structures have exactly that size (`repr(C)`, only u64) and outlive the call; `count` is
    // borrowed by nobody else and any bit pattern is valid in it. The descriptor is open as long as `file` is borrowed.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut count, 0 as libc::c_uint) };
    Errno::result(result)?;
    Ok(PageCount { cached: count.cached, evicted: count.evicted })
}

/// Drops the pages of `extent`, bytes of a mapping of guest memory. EINVAL if the mapping is not owned by `mapping`, or
/// the extent is empty or not wholly inside it.
pub(super) fn dontneed<B: Bitmap>(mapping: &MmapRegion<B>, extent: &Range<u64>) -> Result<(), Errno> {
    let start = usize::try_from(extent.start).map_err(|_| Errno::EINVAL)?;
    let end = usize::try_from(extent.end).map_err(|_| Errno::EINVAL)?;
    if !mapping.owned() || start >= end || end > mapping.size() {
        return Err(Errno::EINVAL);
    }
    let address = NonNull::new(mapping.as_ptr().wrapping_add(start)).ok_or(Errno::EINVAL)?;
    // SAFETY: the call discards the content of the pages in `[address, address + bytes)` and keeps the mapping. Those
    // bytes lie inside a mapping that `mapping` has made itself (`owned`) and unmaps no earlier than when it is dropped,
    // and it is borrowed here. Nothing of Rust's own lives there: memory of an `MmapRegion` is handed out as volatile
    // slices only, which must expect that a guest changes it at any moment, and raw pointers, whose users answer for
    // themselves. An address that is no page boundary is refused by the kernel; a length that is no multiple of the page
    // size is rounded up to the end of a page which is part of the same mapping.
    unsafe { madvise(address.cast(), end - start, MmapAdvise::MADV_DONTNEED) }
}
