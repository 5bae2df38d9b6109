//! Anonymous mappings of 64-bit words. The only unsafe code of this workload.

use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Who may see what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// This process: plain anonymous memory.
    Private,
    /// Its children too, so the kernel backs it with shmem.
    Shared,
}

/// Memory straight from the kernel: unlike the allocator's it goes back to the kernel the moment it is dropped.
pub(crate) struct Mapping {
    start: NonNull<u64>,
    words: usize,
}

impl Mapping {
    pub(crate) fn new(bytes: NonZeroUsize, sharing: Sharing) -> Result<Self, Errno> {
        let flags = match sharing {
            Sharing::Private => MapFlags::MAP_PRIVATE,
            Sharing::Shared => MapFlags::MAP_SHARED,
        };
        // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing that exists.
        let start = unsafe { mmap_anonymous(None, bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) }?;
        Ok(Self { start: start.cast(), words: bytes.get() / size_of::<u64>() })
    }
}

impl Deref for Mapping {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        // SAFETY: the mapping is readable, page-aligned, at least `words` long, zero-filled by the kernel, and lives until drop; no other
        // process or thread writes it, since it is never shared with a child, and `&self` keeps `deref_mut` away.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl DerefMut for Mapping {
    fn deref_mut(&mut self) -> &mut [u64] {
        // SAFETY: as in `deref`; the mapping is writable and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and length are those of the mapping made in `new`, and no slice into it outlives `self`.
        let _ = unsafe { munmap(self.start.cast(), self.words * size_of::<u64>()) };
    }
}
