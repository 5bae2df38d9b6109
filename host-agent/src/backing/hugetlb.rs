//! hugetlbfs: pages of a fixed size from a pool, which nothing smaller than one of them gives back.
//!
//! Freed pages go to the pool, and to the host only if they are surplus pages or the pool is shrunk. A hole also gives up
//! the reservation that mmap made (`hugetlb_unreserve_pages` in the kernel's `mm/hugetlb.c`): when somebody else empties
//! the pool, the guest's next touch kills the VMM with SIGBUS. Operators must leave the pool to their guests, or allow
//! surplus pages (`nr_overcommit_hugepages`).

use super::Backing;
use super::file::MemoryFile;
use nix::errno::Errno;
use std::io;
use std::ops::Range;

/// A file of hugetlbfs.
pub(super) struct HugetlbFile(pub(super) MemoryFile);

impl Backing for HugetlbFile {
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes
    }

    fn punch(&self, extent: Range<u64>) -> Result<(), Errno> {
        self.0.punch(extent)
    }

    /// All of it, unless the file is wholly empty: SEEK_DATA knows no holes here, cachestat refuses hugetlbfs, and
    /// mincore looks at the caller's page tables only.
    fn backed_bytes(&self, extent: Range<u64>) -> io::Result<u64> {
        Ok(if self.allocated_bytes()? == 0 { 0 } else { extent.end - extent.start })
    }

    fn sees_holes(&self) -> bool {
        false
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        self.0.allocated_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }
}
