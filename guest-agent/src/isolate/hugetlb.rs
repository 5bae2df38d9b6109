//! The kernel's hugetlb settings for one huge page size: whether claims are possible, the overcommit limit they are
//! allocated under, and the agent's own hugetlbfs mount.
//!
//! Used by [`super::claim`]. Claims are *surplus* huge pages: allocated from the buddy allocator on demand and given
//! back to it when freed. Their number is limited by `nr_overcommit_hugepages`
//! (Documentation/admin-guide/mm/hugetlbpage.rst), which is raised by what the agent holds and restored afterwards.
//! The pool that an operator set aside with `nr_hugepages` is left alone.

use fpr_protocol::HugePageSize;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statfs::{HUGETLBFS_MAGIC, statfs};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::journal::{Journal, JournalError};

/// Where the kernel and the agent keep what claims need. Tests point it elsewhere.
#[derive(Clone, Debug)]
pub struct HugePageRoots {
    /// Normally `/sys`.
    pub sys: PathBuf,
    /// Normally `/proc`.
    pub proc: PathBuf,
    /// Where the agent's own hugetlbfs is or will be mounted, normally `/run/fpr-guest/hugepages`.
    pub mount_point: PathBuf,
    /// Size of a huge page.
    pub huge_page: HugePageSize,
}

/// Why this guest cannot claim huge pages.
#[derive(Debug, thiserror::Error)]
pub enum ClaimsUnavailable {
    /// No hugetlbfs in the kernel.
    #[error("the kernel has no hugetlbfs: it needs CONFIG_HUGETLBFS")]
    NoHugetlbfs,
    /// No hugetlb pages of this size.
    #[error("the kernel has no hugetlb pages of {bytes} bytes ({path} is missing)", path = path.display())]
    NoSuchSize {
        /// Size of a huge page in bytes.
        bytes: u64,
        /// What would be there.
        path: PathBuf,
    },
    /// The overcommit limit cannot be changed.
    #[error("cannot write {path}: claims need root and a writable /sys", path = path.display())]
    OvercommitNotWritable {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A mount made now would die with the agent, and the claims in it.
    #[error(
        "the agent has a mount namespace of its own, so its hugetlbfs would not outlive it: mount hugetlbfs on {path} \
         beforehand, or run the agent without private mounts",
        path = path.display()
    )]
    PrivateMountNamespace {
        /// Where the mount should be.
        path: PathBuf,
    },
    /// Something else is mounted there.
    #[error("{path} is a hugetlbfs with pages of {found} bytes, wanted are {wanted}: unmount it", path = path.display())]
    OtherPageSize {
        /// The mount point.
        path: PathBuf,
        /// Page size of what is mounted there, in bytes.
        found: u64,
        /// Size of a huge page in bytes.
        wanted: u64,
    },
}

/// A step with hugetlb failed.
#[derive(Debug, thiserror::Error)]
pub enum HugetlbError {
    /// Claims are impossible in this guest.
    #[error("huge pages cannot be claimed")]
    Unavailable(#[from] ClaimsUnavailable),
    /// A file or mount operation failed.
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
    /// The journal cannot be written, and the overcommit limit is not touched without it.
    #[error("cannot keep the journal of the hugetlb overcommit limit")]
    Journal(#[from] JournalError),
}

pub(super) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HugetlbError {
    let path = path.to_owned();
    move |source| HugetlbError::Io { operation, path, source }
}

impl HugePageRoots {
    fn knob(&self, name: &str) -> PathBuf {
        let kib = self.huge_page.bytes() / 1024;
        self.sys.join(format!("kernel/mm/hugepages/hugepages-{kib}kB")).join(name)
    }

    fn read_knob(&self, name: &str) -> Result<u64, HugetlbError> {
        let path = self.knob(name);
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        text.trim().parse().map_err(|_| io_error("read", &path)(io::ErrorKind::InvalidData.into()))
    }

    fn write_overcommit(&self, pages: u64) -> Result<(), HugetlbError> {
        let path = self.knob("nr_overcommit_hugepages");
        fs::write(&path, pages.to_string()).map_err(io_error("write", &path))
    }

    /// Whether claims are possible, without changing anything.
    pub fn available(&self) -> Result<(), ClaimsUnavailable> {
        let bytes = self.huge_page.bytes();
        let filesystems = fs::read_to_string(self.proc.join("filesystems")).unwrap_or_default();
        if !filesystems.split_whitespace().any(|word| word == "hugetlbfs") {
            return Err(ClaimsUnavailable::NoHugetlbfs);
        }
        let path = self.knob("nr_overcommit_hugepages");
        if let Err(source) = OpenOptions::new().write(true).open(&path) {
            return Err(if source.kind() == io::ErrorKind::NotFound {
                ClaimsUnavailable::NoSuchSize { bytes, path }
            } else {
                ClaimsUnavailable::OvercommitNotWritable { path, source }
            });
        }
        if !self.is_mounted()? && !self.mounts_outlive_us() {
            return Err(ClaimsUnavailable::PrivateMountNamespace { path: self.mount_point.clone() });
        }
        Ok(())
    }

    /// Free pages of the operator's own pool that nobody has reserved. Claims would be served from these first.
    pub(super) fn unreserved_pool_pages(&self) -> Result<u64, HugetlbError> {
        Ok(self.read_knob("free_hugepages")?.saturating_sub(self.read_knob("resv_hugepages")?))
    }

    /// True if a hugetlbfs of the right page size is at the mount point.
    fn is_mounted(&self) -> Result<bool, ClaimsUnavailable> {
        let Ok(fs) = statfs(&self.mount_point) else { return Ok(false) };
        if fs.filesystem_type() != HUGETLBFS_MAGIC {
            return Ok(false);
        }
        // statfs of hugetlbfs gives the huge page size as the block size (`hugetlbfs_statfs` in fs/hugetlbfs/inode.c).
        let found = u64::try_from(fs.block_size()).unwrap_or_default();
        let wanted = self.huge_page.bytes();
        if found == wanted {
            return Ok(true);
        }
        Err(ClaimsUnavailable::OtherPageSize { path: self.mount_point.clone(), found, wanted })
    }

    /// A mount lives as long as its namespace; that of process 1 outlives the agent. Where the namespaces cannot be
    /// compared, nothing suggests that they differ.
    fn mounts_outlive_us(&self) -> bool {
        let namespace = |process: &str| fs::read_link(self.proc.join(process).join("ns/mnt")).ok();
        match (namespace("1"), namespace("self")) {
            (Some(first), Some(own)) => first == own,
            _ => true,
        }
    }

    /// Mounts the agent's hugetlbfs unless it is there already: a dead agent's, or the operator's.
    pub(super) fn mount(&self) -> Result<(), HugetlbError> {
        self.available()?;
        if self.is_mounted()? {
            return Ok(());
        }
        let path = &self.mount_point;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(io_error("create directory", path))?;
        let options = format!("pagesize={},mode=0700", self.huge_page.bytes());
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("fpr"), path, Some("hugetlbfs"), flags, Some(options.as_str()))
            .map_err(|errno| io_error("mount hugetlbfs on", path)(errno.into()))
    }

    /// Unmounts it if nobody uses it and no claim is left in it.
    pub(super) fn unmount_if_empty(&self) -> Result<(), HugetlbError> {
        let path = &self.mount_point;
        if !self.is_mounted()? || self.claim_files()?.next().is_some() {
            return Ok(());
        }
        match umount2(path, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(Errno::EBUSY) => Ok(()),
            Err(errno) => Err(io_error("unmount", path)(errno.into())),
        }
    }

    /// Files of claims in the mount, held or left behind. None if it is not mounted: what lies in the bare directory
    /// is not ours.
    pub(super) fn claim_files(&self) -> Result<impl Iterator<Item = (u64, PathBuf)> + use<>, HugetlbError> {
        let path = &self.mount_point;
        let entries = if self.is_mounted()? {
            let listed: io::Result<Vec<_>> = fs::read_dir(path).and_then(Iterator::collect);
            listed.map_err(io_error("list", path))?
        } else {
            Vec::new()
        };
        Ok(entries.into_iter().filter_map(|entry| {
            let sequence = entry.file_name().to_str()?.strip_prefix("claim-")?.parse().ok()?;
            Some((sequence, entry.path()))
        }))
    }

    /// Writes a dead agent's original overcommit limit back, if the journal has one.
    pub(super) fn restore_overcommit(&self, journal: &Journal) -> Result<Option<u64>, HugetlbError> {
        let original = journal.overcommit()?;
        if let Some(original) = original {
            self.write_overcommit(original)?;
            journal.forget_overcommit()?;
        }
        Ok(original)
    }
}

/// The raised overcommit limit of one running agent.
#[derive(Debug)]
pub(super) struct Overcommit {
    roots: HugePageRoots,
    journal: Journal,
    raised: Option<Raised>,
}

#[derive(Clone, Copy, Debug)]
struct Raised {
    original: u64,
    written: u64,
}

impl Overcommit {
    pub(super) fn new(roots: HugePageRoots, journal: Journal) -> Self {
        Self { roots, journal, raised: None }
    }

    /// Lets the agent hold `pages` surplus pages on top of what the operator allows everybody; zero restores the
    /// operator's limit. A value that somebody else wrote meanwhile becomes the one to restore.
    pub(super) fn allow(&mut self, pages: u64) -> Result<(), HugetlbError> {
        let current = self.roots.read_knob("nr_overcommit_hugepages")?;
        let original = match self.raised {
            Some(Raised { original, written }) if written == current => original,
            _ => current,
        };
        let written = original.saturating_add(pages);
        if pages > 0 && self.raised.is_none_or(|raised| raised.original != original) {
            self.journal.record_overcommit(original)?;
        }
        if written != current {
            self.roots.write_overcommit(written)?;
        }
        self.raised = (pages > 0).then_some(Raised { original, written });
        if pages == 0 {
            self.journal.forget_overcommit()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    struct Tree {
        dir: tempfile::TempDir,
        roots: HugePageRoots,
        journal: Journal,
    }

    fn tree(overcommit: &str) -> Tree {
        let dir = tempfile::tempdir().unwrap();
        let knobs = dir.path().join("sys/kernel/mm/hugepages/hugepages-2048kB");
        fs::create_dir_all(&knobs).unwrap();
        fs::create_dir_all(dir.path().join("proc")).unwrap();
        fs::write(knobs.join("nr_overcommit_hugepages"), overcommit).unwrap();
        fs::write(knobs.join("free_hugepages"), "8\n").unwrap();
        fs::write(knobs.join("resv_hugepages"), "3\n").unwrap();
        fs::write(dir.path().join("proc/filesystems"), "nodev\ttmpfs\nnodev\thugetlbfs\n").unwrap();
        let roots = HugePageRoots {
            sys: dir.path().join("sys"),
            proc: dir.path().join("proc"),
            mount_point: dir.path().join("run/hugepages"),
            huge_page: HugePageSize::new(4096, 9).unwrap(),
        };
        let journal = Journal::open(&dir.path().join("run"), "boot").unwrap();
        Tree { dir, roots, journal }
    }

    fn overcommit(tree: &Tree) -> u64 {
        tree.roots.read_knob("nr_overcommit_hugepages").unwrap()
    }

    #[test]
    fn overcommit_is_raised_by_what_is_held_and_restored() {
        let tree = tree("5\n");
        let mut limit = Overcommit::new(tree.roots.clone(), tree.journal.clone());
        limit.allow(32).unwrap();
        assert_eq!((overcommit(&tree), tree.journal.overcommit().unwrap()), (37, Some(5)));
        limit.allow(64).unwrap();
        assert_eq!((overcommit(&tree), tree.journal.overcommit().unwrap()), (69, Some(5)));
        limit.allow(0).unwrap();
        assert_eq!((overcommit(&tree), tree.journal.overcommit().unwrap()), (5, None));
    }

    #[test]
    fn what_the_operator_writes_meanwhile_is_kept() {
        let tree = tree("5\n");
        let mut limit = Overcommit::new(tree.roots.clone(), tree.journal.clone());
        limit.allow(32).unwrap();
        tree.roots.write_overcommit(100).unwrap();
        limit.allow(64).unwrap();
        assert_eq!((overcommit(&tree), tree.journal.overcommit().unwrap()), (164, Some(100)));
        tree.roots.write_overcommit(7).unwrap();
        limit.allow(0).unwrap();
        assert_eq!((overcommit(&tree), tree.journal.overcommit().unwrap()), (7, None));
    }

    #[test]
    fn a_dead_agents_limit_is_restored_once() {
        let tree = tree("5\n");
        Overcommit::new(tree.roots.clone(), tree.journal.clone()).allow(32).unwrap();
        assert_eq!(tree.roots.restore_overcommit(&tree.journal).unwrap(), Some(5));
        assert_eq!(overcommit(&tree), 5);
        assert_eq!(tree.roots.restore_overcommit(&tree.journal).unwrap(), None);
    }

    #[test]
    fn why_claims_are_unavailable() {
        let tree = tree("0\n");
        assert!(tree.roots.available().is_ok());
        assert_eq!(tree.roots.unreserved_pool_pages().unwrap(), 5);

        for (process, namespace) in [("1", "mnt:[1]"), ("self", "mnt:[2]")] {
            fs::create_dir_all(tree.roots.proc.join(process).join("ns")).unwrap();
            std::os::unix::fs::symlink(namespace, tree.roots.proc.join(process).join("ns/mnt")).unwrap();
        }
        assert!(matches!(tree.roots.available(), Err(ClaimsUnavailable::PrivateMountNamespace { .. })));

        let other = HugePageRoots { huge_page: HugePageSize::new(4096, 18).unwrap(), ..tree.roots.clone() };
        assert!(matches!(other.available(), Err(ClaimsUnavailable::NoSuchSize { bytes, .. }) if bytes == 1 << 30));

        fs::write(tree.dir.path().join("proc/filesystems"), "nodev\ttmpfs\n").unwrap();
        assert!(matches!(tree.roots.available(), Err(ClaimsUnavailable::NoHugetlbfs)));
    }
}
