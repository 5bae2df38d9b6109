//! Huge-page claims: free huge pages that the agent allocates so that nobody else can, each batch a file in the
//! agent's own hugetlbfs.
//!
//! [`HugePageClaims::claim`] is called by [`super::worker`] (it zeroes memory, up to 1 ms per huge page); batches then
//! belong to the state machine, which writes cookies, reports the addresses and releases. A claim is a file because
//! that outlives a killed agent; only [`Batch::release`] and [`HugePageClaims::recover`] give its pages back.
//!
//! **Addresses stay true.** A huge page in hugetlbfs can be migrated, and then the address that was reported is
//! somebody else's memory. Every page is therefore pinned *before* its frame number is read: a page with one
//! reference more than the page tables and the page cache account for is refused by `folio_migrate_mapping`
//! (mm/migrate.c). The pin ends with the process; the pages then stay allocated, but may move.
//!
//! **Cost to the guest.** The kernel takes what is free first, and may compact or reclaim when no huge page is free:
//! nothing in this interface can forbid that, so the caller looks at /proc/buddyinfo and its floor before it asks
//! for each batch, and asks for little at a time.
//!
//! Trusts the kernel's pagemap; checks that each address is a whole huge page.

use fpr_protocol::GuestAddress;
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::hugetlb::{HugePageRoots, HugetlbError, Overcommit, io_error};
use super::journal::Journal;
use super::sys::HugeMapping;

/// Most huge pages in one batch. As many as the slots of the largest pipe that an unprivileged process can make
/// (fs.pipe-max-size, 1 MiB, in base pages of 4 KiB), so that one descriptor pins a batch.
pub const MAX_BATCH: u32 = 256;

/// Bit 63 of a pagemap entry: the page is present (Documentation/admin-guide/mm/pagemap.rst).
const PAGEMAP_PRESENT: u64 = 1 << 63;

/// Bits 0 to 54 of a pagemap entry: the page frame number.
const PAGEMAP_PFN: u64 = (1 << 55) - 1;

/// Why there is no batch.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Hugetlb could not be used.
    #[error("cannot prepare a claim")]
    Hugetlb(#[from] HugetlbError),
    /// The operator's pool has free pages, which the kernel would hand out first.
    #[error("{free} huge pages of the operator's own pool are free and would be taken: nr_hugepages is too large")]
    PoolInUse {
        /// Free and unreserved pages in the pool.
        free: u64,
    },
    /// No huge page was free.
    #[error("no free huge page")]
    NoneFree,
    /// It was cancelled before it got a page.
    #[error("cancelled")]
    Cancelled,
    /// A step with the pages of a claim failed. What was allocated is free again.
    #[error("cannot {operation} {path}", path = path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The kernel does not tell where a page is.
    #[error("/proc/self/pagemap says {entry:#x} for a claimed huge page: the agent needs CAP_SYS_ADMIN")]
    NoAddress {
        /// The entry.
        entry: u64,
    },
    /// A cookie that does not fit.
    #[error("{length} bytes do not fit into huge page {page} of a batch of {pages}")]
    CookieOutOfBounds {
        /// Number of the page in the batch.
        page: usize,
        /// Pages in the batch.
        pages: usize,
        /// Length of the cookie in bytes.
        length: usize,
    },
}

/// Result of [`HugePageClaims::recover`].
#[derive(Debug, Default)]
pub struct RecoveredClaims {
    /// Files of claims that were removed.
    pub files: u64,
    /// The overcommit limit that was restored.
    pub overcommit: Option<u64>,
}

/// Claims of one running agent. Mounts its hugetlbfs at the first claim.
#[derive(Debug)]
pub struct HugePageClaims {
    roots: HugePageRoots,
    journal: Journal,
    overcommit: Overcommit,
    held: Arc<AtomicU64>,
    next_sequence: Option<u64>,
}

impl HugePageClaims {
    /// Nothing is touched until the first claim.
    #[must_use]
    pub fn new(roots: HugePageRoots, journal: Journal) -> Self {
        let overcommit = Overcommit::new(roots.clone(), journal.clone());
        Self { roots, journal, overcommit, held: Arc::default(), next_sequence: None }
    }

    /// Files of claims in the mount: those of a dead agent, as long as this one has made none.
    pub fn leftovers(&self) -> Result<Vec<PathBuf>, HugetlbError> {
        Ok(self.roots.claim_files()?.map(|(_, path)| path).collect())
    }

    /// Gives a dead agent's claims back and restores its overcommit limit. The host must have fenced its session
    /// before, and this agent must not hold a claim.
    pub fn recover(&mut self) -> Result<RecoveredClaims, HugetlbError> {
        let mut recovered = RecoveredClaims::default();
        for (_, path) in self.roots.claim_files()? {
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
            recovered.files += 1;
        }
        recovered.overcommit = self.roots.restore_overcommit(&self.journal)?;
        Ok(recovered)
    }

    /// Huge pages in batches that were not released.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Claims up to `pages` huge pages (at most [`MAX_BATCH`]), fewer if no more are free or as soon as `stop` says
    /// so. `stop` is asked before each page.
    pub fn claim(&mut self, pages: u32, stop: impl Fn() -> bool) -> Result<Batch, ClaimError> {
        let wanted = pages.min(MAX_BATCH);
        self.roots.mount()?;
        let free = self.roots.unreserved_pool_pages()?;
        if free > 0 {
            return Err(ClaimError::PoolInUse { free });
        }
        self.overcommit.allow(self.held() + u64::from(wanted))?;

        let (file, path) = self.create()?;
        // From here on the file goes with `unfinished`, unless it becomes a batch.
        let mut unfinished = Unfinished(Some(path));
        let got = self.allocate(&file, &unfinished, wanted, stop)?;
        let batch = self.pin(&file, &unfinished, got)?;
        unfinished.0 = None;
        self.held.fetch_add(batch.pages.len() as u64, Ordering::Relaxed);
        Ok(batch)
    }

    /// Lowers the overcommit limit to what is still held; the operator's own limit when nothing is.
    pub fn settle(&mut self) -> Result<(), HugetlbError> {
        self.overcommit.allow(self.held())
    }

    /// Restores the overcommit limit and unmounts, as far as no claim is left.
    pub fn close(mut self) -> Result<(), HugetlbError> {
        self.settle()?;
        self.roots.unmount_if_empty()
    }

    fn create(&mut self) -> Result<(File, PathBuf), ClaimError> {
        let sequence = match self.next_sequence {
            Some(sequence) => sequence,
            None => self.roots.claim_files()?.map(|(sequence, _)| sequence + 1).max().unwrap_or_default(),
        };
        let path = self.roots.mount_point.join(format!("claim-{sequence}"));
        let created = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = created.map_err(io_error("create", &path))?;
        self.next_sequence = Some(sequence + 1);
        Ok((file, path))
    }

    /// fallocate page by page: it tells exactly how many came, and a shortage is an error instead of the SIGBUS that
    /// a fault would raise.
    fn allocate(
        &self,
        file: &File,
        unfinished: &Unfinished,
        wanted: u32,
        stop: impl Fn() -> bool,
    ) -> Result<NonZeroUsize, ClaimError> {
        let bytes = self.roots.huge_page.bytes().cast_signed();
        let mut got = 0;
        let why = loop {
            if got == wanted {
                break ClaimError::NoneFree;
            }
            if stop() {
                break ClaimError::Cancelled;
            }
            match fallocate(file, FallocateFlags::empty(), i64::from(got) * bytes, bytes) {
                Ok(()) => got += 1,
                Err(nix::errno::Errno::EINTR) => {}
                Err(nix::errno::Errno::ENOSPC | nix::errno::Errno::ENOMEM) => break ClaimError::NoneFree,
                Err(errno) => return Err(unfinished.error("allocate huge pages in")(errno.into())),
            }
        };
        usize::try_from(got).ok().and_then(NonZeroUsize::new).ok_or(why)
    }

    fn pin(&self, file: &File, unfinished: &Unfinished, pages: NonZeroUsize) -> Result<Batch, ClaimError> {
        let huge_page = self.roots.huge_page;
        let page_bytes = usize::try_from(huge_page.bytes()).unwrap_or(usize::MAX);
        let base_page_bytes = usize::try_from(huge_page.page_bytes()).unwrap_or(usize::MAX);
        let length = pages.saturating_mul(NonZeroUsize::new(page_bytes).unwrap_or(NonZeroUsize::MAX));
        let mapping = HugeMapping::new(file, length).map_err(unfinished.error("map"))?;
        let pins = mapping.pin(page_bytes, base_page_bytes).map_err(unfinished.error("pin the pages of"))?;

        let pagemap_path = self.roots.proc.join("self/pagemap");
        let pagemap = File::open(&pagemap_path).map_err(io_error("open", &pagemap_path))?;
        let mut addresses = Vec::with_capacity(pages.get());
        for page in 0..pages.get() {
            let entry_at = (mapping.address_of(page * page_bytes) / base_page_bytes * 8) as u64;
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, entry_at).map_err(io_error("read", &pagemap_path))?;
            let entry = u64::from_ne_bytes(entry);
            let address = (entry & PAGEMAP_PFN) * huge_page.page_bytes();
            // Without CAP_SYS_ADMIN the frame number reads as zero (`pagemap_read` in fs/proc/task_mmu.c).
            if entry & PAGEMAP_PRESENT == 0 || address == 0 || !address.is_multiple_of(huge_page.bytes()) {
                return Err(ClaimError::NoAddress { entry });
            }
            addresses.push(GuestAddress(address));
        }
        Ok(Batch {
            pages: addresses,
            page_bytes,
            pins,
            mapping,
            path: unfinished.0.clone().unwrap_or_default(),
            held: Arc::clone(&self.held),
        })
    }
}

/// A claim that is not a batch yet: removed on the way out of an error.
struct Unfinished(Option<PathBuf>);

impl Unfinished {
    fn error(&self, operation: &'static str) -> impl FnOnce(io::Error) -> ClaimError + use<> {
        let path = self.0.clone().unwrap_or_default();
        move |source| ClaimError::Io { operation, path, source }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Should this fail, the file is a leftover that the next start removes.
            let _ = fs::remove_file(path);
        }
    }
}

/// Huge pages that the agent holds, pinned, in the order of the file.
///
/// Dropping a batch does **not** give the pages back: they stay in the hugetlbfs file until `recover`. Only
/// [`Batch::release`] does, after the host's answer.
#[derive(Debug)]
#[must_use = "a batch that is dropped keeps its pages until the next start recovers them"]
pub struct Batch {
    pages: Vec<GuestAddress>,
    page_bytes: usize,
    pins: Vec<OwnedFd>,
    mapping: HugeMapping,
    path: PathBuf,
    held: Arc<AtomicU64>,
}

impl Batch {
    /// Guest-physical address of each huge page.
    #[must_use]
    pub fn pages(&self) -> &[GuestAddress] {
        &self.pages
    }

    /// Writes `cookie` at the start of huge page number `page` of this batch.
    pub fn write_cookie(&mut self, page: usize, cookie: &[u8]) -> Result<(), ClaimError> {
        let pages = self.pages.len();
        let fits =
            page < pages && cookie.len() <= self.page_bytes && self.mapping.write(page * self.page_bytes, cookie);
        if fits { Ok(()) } else { Err(ClaimError::CookieOutOfBounds { page, pages, length: cookie.len() }) }
    }

    /// Gives the pages back to the kernel without touching them. If that fails they stay held, in a file that the
    /// next start recovers.
    pub fn release(self) -> Result<(), ClaimError> {
        let Self { pages, pins, mapping, path, held, .. } = self;
        drop(pins);
        drop(mapping);
        fs::remove_file(&path).map_err(|source| ClaimError::Io { operation: "release", path, source })?;
        held.fetch_sub(pages.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}
