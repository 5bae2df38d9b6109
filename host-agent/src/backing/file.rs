//! The files that back guest memory: what they are, whether they can be punched, and the calls all kinds share.
//!
//! Used by [`super::GuestBacking`] when the VMM sends its memory table. Trusts fstatfs and fcntl for what a file is.

use super::Backing;
use super::hugetlb::HugetlbFile;
use super::shared::ShmemFile;
use fpr_protocol::HugePageSize;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, SealFlag, fallocate, fcntl};
use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, fstatfs};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

/// Identity of a file, as `/proc/PID/maps` and fstat tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

impl FileId {
    /// Identity of an open file.
    pub fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// Why guest memory cannot be dropped by punching its file. The message names the option of QEMU to change.
#[derive(Debug, thiserror::Error)]
pub enum Unsuitable {
    /// The descriptor cannot be written to, so it cannot be punched.
    #[error("the memory file is opened read-only: set readonly=off on the memory backend")]
    ReadOnly,
    /// `F_SEAL_WRITE` or `F_SEAL_FUTURE_WRITE` forbid punching (kernel: `mm/shmem.c`, `shmem_fallocate`).
    #[error("the memory file is sealed against writing ({seals:?}): use memory-backend-memfd without a write seal")]
    Sealed {
        /// Its seals.
        seals: SealFlag,
    },
    /// A file of a file system that keeps its pages on a disk, or memory that is not backed by a file at all.
    ///
    /// Punching works on many of them, but it changes the file system's metadata and writes to the disk, and page
    /// cache is not what the guest's memory costs.
    #[error(
        "the memory file is on a file system of type {magic:#x}, not in memory: use memory-backend-memfd,share=on, or \
         memory-backend-file,share=on with mem-path on tmpfs or hugetlbfs"
    )]
    NotInMemory {
        /// `f_type` of fstatfs.
        magic: i64,
    },
    /// One page of the backing holds more than one huge page of the guest.
    #[error(
        "the backing has pages of {page_bytes:#x} bytes, the guest reports huge pages of {huge_page_bytes:#x}: set \
         hugetlbsize (memory-backend-memfd) or the pagesize of the hugetlbfs mount to at most that"
    )]
    PagesTooLarge {
        /// Page size of the backing.
        page_bytes: u64,
        /// Huge page size of the guest.
        huge_page_bytes: u64,
    },
    /// A region lies past the end of its file.
    #[error(
        "a memory region ends at byte {end:#x} of a memory file of {file_bytes:#x} bytes: the VMM described its memory \
         wrongly"
    )]
    PastEnd {
        /// End of the region in the file.
        end: u64,
        /// Size of the file.
        file_bytes: u64,
    },
    /// Two regions of the guest are the same bytes: what is free at one address may be in use at the other.
    #[error(
        "two memory regions share the bytes from {offset:#x} of one memory file: give each region memory of its own"
    )]
    Aliased {
        /// First shared byte.
        offset: u64,
    },
    /// The file could not be looked at.
    #[error("cannot inspect the memory file ({call}): the VMM must pass an open file")]
    Inspect {
        /// The call that failed.
        call: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Finds out what kind of file backs guest memory and how it is dropped.
pub fn choose(file: &Arc<File>) -> Result<Box<dyn Backing>, Unsuitable> {
    let inspect = |call| move |errno: Errno| Unsuitable::Inspect { call, source: errno.into() };
    let status = fstatfs(file.as_ref()).map_err(inspect("fstatfs"))?;
    let kind = status.filesystem_type();
    if kind != TMPFS_MAGIC && kind != HUGETLBFS_MAGIC {
        // `__fsword_t` is narrower on 32-bit machines.
        #[allow(clippy::useless_conversion)]
        return Err(Unsuitable::NotInMemory { magic: kind.0.into() });
    }
    let flags = fcntl(file.as_ref(), FcntlArg::F_GETFL).map_err(inspect("F_GETFL"))?;
    if OFlag::from_bits_retain(flags) & OFlag::O_ACCMODE != OFlag::O_RDWR {
        return Err(Unsuitable::ReadOnly);
    }
    let seals = fcntl(file.as_ref(), FcntlArg::F_GET_SEALS).map_err(inspect("F_GET_SEALS"))?;
    let seals = SealFlag::from_bits_retain(seals);
    if seals.intersects(SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_FUTURE_WRITE) {
        return Err(Unsuitable::Sealed { seals });
    }
    // f_bsize is the page size on both: PAGE_SIZE on tmpfs, that of the hstate on hugetlbfs.
    let page_bytes = u64::try_from(status.block_size())
        .ok()
        .filter(|bytes| bytes.is_power_of_two())
        .ok_or_else(|| inspect("f_bsize")(Errno::EINVAL))?;
    let file = MemoryFile { file: Arc::clone(file), page_bytes };
    Ok(if kind == TMPFS_MAGIC { Box::new(ShmemFile(file)) } else { Box::new(HugetlbFile(file)) })
}

/// Refuses a backing whose pages are larger than the guest's huge pages: no hint could cover one.
pub(super) fn check_page_size(backing: &dyn Backing, size: HugePageSize) -> Result<(), Unsuitable> {
    let (page_bytes, huge_page_bytes) = (backing.page_bytes(), size.bytes());
    if page_bytes > huge_page_bytes {
        return Err(Unsuitable::PagesTooLarge { page_bytes, huge_page_bytes });
    }
    Ok(())
}

/// A file in memory, and what works the same on every kind.
pub(super) struct MemoryFile {
    pub(super) file: Arc<File>,
    pub(super) page_bytes: u64,
}

impl MemoryFile {
    /// `fallocate(FALLOC_FL_PUNCH_HOLE)`, which also unmaps the pages from every process and every guest.
    pub(super) fn punch(&self, extent: Range<u64>) -> Result<(), Errno> {
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let offset = i64::try_from(extent.start).map_err(|_| Errno::EOVERFLOW)?;
        let bytes = i64::try_from(extent.end - extent.start).map_err(|_| Errno::EOVERFLOW)?;
        fallocate(self.file.as_ref(), mode, offset, bytes)
    }

    /// Allocated blocks; the unit of `st_blocks` is 512 bytes whatever the file system (`inode(7)`).
    pub(super) fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks().saturating_mul(512))
    }

    /// pread, never a load through a mapping: that would fault holes in.
    pub(super) fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }
}
