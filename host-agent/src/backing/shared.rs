//! Shared memory: memfd, `/dev/shm`, any tmpfs. Pages of the base size, or transparent huge ones.

use super::Backing;
use super::file::MemoryFile;
use super::sys;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::io;
use std::ops::Range;

/// A file of shmem.
///
/// `MADV_DONTNEED` on a mapping of it returns 0 and frees nothing: only a hole in the file does.
pub(super) struct ShmemFile(pub(super) MemoryFile);

impl ShmemFile {
    /// cachestat: exact, bounded by the extent, takes no lock of the file.
    fn count_pages(&self, extent: &Range<u64>) -> Result<u64, Errno> {
        let pages = sys::cachestat(self.0.file.as_ref(), extent)?;
        // What shmem has evicted is in swap.
        Ok(pages.cached.saturating_add(pages.evicted).saturating_mul(self.0.page_bytes))
    }

    /// SEEK_DATA: all of the extent if any of it is backed. SEEK_HOLE would tell more, but it runs on to the next hole
    /// in the *file*, 25 ms per GiB, with the file locked.
    ///
    /// Moves the file position, which the VMM's descriptor shares; nobody reads memory by position.
    fn any_data(&self, extent: &Range<u64>) -> Result<u64, Errno> {
        let start = i64::try_from(extent.start).map_err(|_| Errno::EOVERFLOW)?;
        match lseek(self.0.file.as_ref(), start, Whence::SeekData) {
            Ok(data) if u64::try_from(data).is_ok_and(|data| data < extent.end) => Ok(extent.end - extent.start),
            Ok(_) | Err(Errno::ENXIO) => Ok(0),
            Err(errno) => Err(errno),
        }
    }
}

impl Backing for ShmemFile {
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes
    }

    fn punch(&self, extent: Range<u64>) -> Result<(), Errno> {
        self.0.punch(extent)
    }

    fn backed_bytes(&self, extent: Range<u64>) -> io::Result<u64> {
        let counted = match self.count_pages(&extent) {
            // Before Linux 6.5, or kept from us by a system call filter.
            Err(Errno::ENOSYS | Errno::EPERM) => self.any_data(&extent),
            result => result,
        };
        Ok(counted?)
    }

    fn sees_holes(&self) -> bool {
        true
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        self.0.allocated_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    const HUGE: u64 = 2 << 20;

    #[test]
    fn without_cachestat_a_touched_extent_counts_as_a_whole() {
        let file = File::from(memfd_create(c"guest-memory", MFdFlags::empty()).unwrap());
        file.set_len(4 * HUGE).unwrap();
        file.write_all_at(&[1; 8192], 3 * HUGE - 8192).unwrap();
        let shmem = ShmemFile(MemoryFile { file: Arc::new(file), page_bytes: 4096 });
        for (page, any, exact) in [(0, 0, 0), (1, 0, 0), (2, HUGE, 8192), (3, 0, 0)] {
            let extent = page * HUGE..(page + 1) * HUGE;
            assert_eq!(shmem.any_data(&extent), Ok(any), "huge page {page}");
            match shmem.count_pages(&extent) {
                Err(Errno::ENOSYS | Errno::EPERM) => {}
                counted => assert_eq!(counted, Ok(exact), "huge page {page}"),
            }
        }
    }
}
