//! Private anonymous memory of this process: guest memory of a Rust VMM that has no other process to share it with.
//!
//! Made by [`crate::reporting::LocalMemory`] for regions of vm-memory. Trusts [`MmapRegion`] for the flags of a mapping
//! it has made itself and for keeping it alive; hence it takes no mapping that somebody else made.
//!
//! `MADV_DONTNEED` is right here and nowhere else: on a shared mapping it returns 0 and frees nothing, and a private
//! mapping of a file shows the file's old bytes afterwards. [`PrivateMemory::new`] lets neither through. A locked range
//! fails with EINVAL.

use super::{Backing, sys};
use nix::errno::Errno;
use nix::unistd::{SysconfVar, sysconf};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

/// Why `MADV_DONTNEED` does not give back the memory of a mapping.
#[derive(Debug, thiserror::Error)]
pub enum NotPrivate {
    /// It is no private anonymous memory of base pages or transparent huge ones.
    #[error(
        "the mapping is {what}: map it MAP_PRIVATE | MAP_ANONYMOUS with MmapRegion::build, or MAP_SHARED from a memfd"
    )]
    Kind {
        /// What it is.
        what: &'static str,
    },
    /// It could not be looked at.
    #[error("cannot inspect memory of this process ({call}): /proc must be mounted")]
    Inspect {
        /// The call that failed.
        call: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// `/proc/PID/pagemap` (`Documentation/admin-guide/mm/pagemap.rst` of the kernel): u64 per page, bit 63 present, bit 62
/// swapped.
const BACKED: u64 = 1 << 63 | 1 << 62;
const ENTRY_BYTES: usize = 8;

/// A mapping of private anonymous memory. Offsets are bytes from its start.
pub struct PrivateMemory<B = ()> {
    mapping: Arc<MmapRegion<B>>,
    page_bytes: u64,
    pagemap: File,
}

impl<B: Bitmap> PrivateMemory<B> {
    /// Keeps the mapping alive as long as it lives.
    pub fn new(mapping: Arc<MmapRegion<B>>) -> Result<Self, NotPrivate> {
        if let Some(what) = unsuitable_kind(&mapping) {
            return Err(NotPrivate::Kind { what });
        }
        let inspect = |call| move |source: io::Error| NotPrivate::Inspect { call, source };
        let page_bytes = sysconf(SysconfVar::PAGE_SIZE).map_err(|errno| inspect("sysconf")(errno.into()))?;
        let page_bytes = page_bytes
            .and_then(|bytes| u64::try_from(bytes).ok())
            .ok_or_else(|| inspect("_SC_PAGE_SIZE")(Errno::EINVAL.into()))?;
        let pagemap = File::open("/proc/self/pagemap").map_err(inspect("/proc/self/pagemap"))?;
        Ok(Self { mapping, page_bytes, pagemap })
    }

    fn bytes(&self) -> u64 {
        // usize is never wider than u64.
        self.mapping.size() as u64
    }

    /// Entries of the pages of `extent`, in order.
    fn for_each_page(&self, extent: Range<u64>, mut page: impl FnMut(u64)) -> io::Result<()> {
        let first = (self.mapping.as_ptr() as u64 + extent.start) / self.page_bytes;
        let count = (extent.end - extent.start).div_ceil(self.page_bytes);
        let mut entries = [0; 512 * ENTRY_BYTES];
        let mut done = 0;
        while done < count {
            let wanted = usize::try_from(count - done).unwrap_or(usize::MAX).min(512);
            let Some(chunk) = entries.get_mut(..wanted * ENTRY_BYTES) else { break };
            self.pagemap.read_exact_at(chunk, (first + done) * ENTRY_BYTES as u64)?;
            for entry in chunk.as_chunks::<ENTRY_BYTES>().0 {
                page(u64::from_ne_bytes(*entry));
            }
            done += wanted as u64;
        }
        Ok(())
    }
}

/// What is wrong with the kind of a mapping; None for what can be dropped.
fn unsuitable_kind<B: Bitmap>(mapping: &MmapRegion<B>) -> Option<&'static str> {
    let flags = mapping.flags();
    if !mapping.owned() {
        // Neither its flags nor its life are known for sure.
        Some("made by somebody else (a raw pointer)")
    } else if mapping.file_offset().is_some() || flags & libc::MAP_ANONYMOUS == 0 {
        Some("a file's")
    } else if flags & libc::MAP_TYPE != libc::MAP_PRIVATE {
        Some("shared anonymous memory")
    } else if flags & libc::MAP_HUGETLB != 0 {
        Some("hugetlb memory without a file")
    } else {
        None
    }
}

impl<B: Bitmap + Send + Sync> Backing for PrivateMemory<B> {
    /// The base page; a transparent huge page that is dropped in part is split by the kernel.
    fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    fn punch(&self, extent: Range<u64>) -> Result<(), Errno> {
        sys::dontneed(&self.mapping, &extent)
    }

    /// By pagemap. A page that was only ever read shows the kernel's page of zeros and counts though it costs nothing.
    fn backed_bytes(&self, extent: Range<u64>) -> io::Result<u64> {
        let mut pages = 0;
        self.for_each_page(extent, |entry| pages += u64::from(entry & BACKED != 0))?;
        Ok(pages * self.page_bytes)
    }

    fn sees_holes(&self) -> bool {
        true
    }

    /// 10 to 40 ms per GiB of base pages: there is no counter per mapping.
    fn allocated_bytes(&self) -> io::Result<u64> {
        self.backed_bytes(0..self.bytes())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.bytes());
        let end = end.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        let page = self.page_bytes;
        let mut backed = Vec::new();
        self.for_each_page(offset - offset % page..end, |entry| backed.push(entry & BACKED != 0))?;
        let memory = self.mapping.as_volatile_slice();
        let mut at = offset;
        let mut rest = buf;
        for backed in backed {
            let bytes = (page - at % page).min(rest.len() as u64);
            let (part, after) = rest.split_at_mut(usize::try_from(bytes).unwrap_or(usize::MAX));
            if backed {
                let at = usize::try_from(at).map_err(io::Error::other)?;
                memory.read_slice(part, at).map_err(io::Error::other)?;
            } else {
                part.fill(0);
            }
            at += bytes;
            rest = after;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use vm_memory::FileOffset;

    const BYTES: usize = 64 << 10;
    const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

    fn refused(file: bool, flags: i32) -> String {
        let file = file.then(|| {
            let file = File::from(memfd_create(c"guest-memory", MFdFlags::empty()).unwrap());
            file.set_len(BYTES as u64).unwrap();
            FileOffset::new(file, 0)
        });
        let mapping = MmapRegion::<()>::build(file, BYTES, READ_WRITE, flags).unwrap();
        PrivateMemory::new(Arc::new(mapping)).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn takes_private_anonymous_memory_and_nothing_else() {
        use libc::{MAP_ANONYMOUS, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED};
        assert_eq!(refused(false, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE), "");
        assert!(refused(false, MAP_SHARED | MAP_ANONYMOUS).contains("shared anonymous"));
        assert!(refused(true, MAP_SHARED).contains("a file's"));
        assert!(refused(true, MAP_PRIVATE).contains("a file's"));
        // The kernel ignores the file, but who passed one did not mean that.
        assert!(refused(true, MAP_PRIVATE | MAP_ANONYMOUS).contains("a file's"));
    }

    #[test]
    fn locked_memory_fails_by_name() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED;
        let mapping = MmapRegion::<()>::build(None, BYTES, READ_WRITE, flags).unwrap();
        let memory = PrivateMemory::new(Arc::new(mapping)).unwrap();
        assert_eq!(memory.punch(0..4096), Err(Errno::EINVAL));
        assert_eq!(memory.allocated_bytes().unwrap(), BYTES as u64);
    }

    #[test]
    fn nothing_beyond_the_mapping_is_dropped() {
        let mapping = MmapRegion::<()>::new(BYTES).unwrap();
        let memory = PrivateMemory::new(Arc::new(mapping)).unwrap();
        let bytes = BYTES as u64;
        for extent in [bytes..bytes + 4096, 0..bytes + 4096, bytes - 4096..u64::MAX, 4096..4096, 1..4096] {
            assert_eq!(memory.punch(extent.clone()), Err(Errno::EINVAL), "{extent:?}");
        }
        assert_eq!(memory.punch(0..bytes), Ok(()));
    }
}
