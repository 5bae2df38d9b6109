//! Readers of the guest kernel's state: how much memory is free, where the free huge pages are, which memory blocks
//! there are, how the kernel treats what it frees.
//!
//! The agent's loop and its isolation methods call them. Each reader takes its files below [`Roots`], so that tests
//! read fake trees; it keeps its file open and its buffer, so that reading again allocates nothing. What the kernel
//! prints is trusted to be true at the moment of reading and at no later one: a survey is a hint, never proof that a
//! page is still free.

pub mod boot_log;
pub mod buddyinfo;
pub mod command_line;
pub mod detect;
pub mod identity;
pub mod kernel_config;
pub mod kpageflags;
pub mod meminfo;
pub mod memory_blocks;
pub mod psi;
mod text;
pub mod vmstat;
pub mod zone;
pub mod zoneinfo;

use fpr_protocol::GuestAddress;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Where the trees of the kernel are mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// procfs, usually `/proc`.
    pub proc: PathBuf,
    /// sysfs, usually `/sys`.
    pub sys: PathBuf,
    /// Device nodes, usually `/dev`.
    pub dev: PathBuf,
    /// Kernel configurations as Debian installs them, usually `/boot`.
    pub boot: PathBuf,
    /// Module trees, where other distributions keep the kernel configuration; usually `/lib/modules`.
    pub modules: PathBuf,
}

impl Roots {
    /// The usual trees below `root`.
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self {
            proc: root.join("proc"),
            sys: root.join("sys"),
            dev: root.join("dev"),
            boot: root.join("boot"),
            modules: root.join("lib/modules"),
        }
    }
}

impl Default for Roots {
    fn default() -> Self {
        Self::below(Path::new("/"))
    }
}

/// Page frame number: a guest-physical address divided by the base page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pfn(pub u64);

impl Pfn {
    /// Address of the frame, where the guest's base page has `page_bytes` bytes.
    #[must_use]
    pub fn address(self, page_bytes: u64) -> GuestAddress {
        GuestAddress(self.0.saturating_mul(page_bytes))
    }
}

/// Frames `[start, end)`.
pub type PfnRange = Range<Pfn>;

/// Why a reader has no value.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file could not be opened or read.
    #[error("cannot read {path}{}", remedy(source))]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A line is not what the kernel prints there.
    #[error("{path}, line {line}: wanted {wanted}, found {found:?}")]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// Which line, counted from 1.
        line: usize,
        /// What should be there.
        wanted: &'static str,
        /// What is there, cut to 80 characters.
        found: String,
    },
    /// A value is not in the file at all.
    #[error("{path} has no {wanted}; this kernel is too old or was built without it")]
    Missing {
        /// Which file.
        path: PathBuf,
        /// What should be there.
        wanted: &'static str,
    },
    /// The file is longer than any kernel prints.
    #[error("{path} is longer than {limit} bytes, so it is not the kernel's file; check what is mounted there")]
    TooLong {
        /// Which file.
        path: PathBuf,
        /// Most that is read.
        limit: usize,
    },
}

impl ReadError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// Whether the file is not there, as with a kernel built without the feature.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => "; run the agent as root",
        io::ErrorKind::NotFound => "; it is not mounted, or this kernel was built without it",
        _ => "",
    }
}

#[cfg(test)]
pub(crate) mod fake {
    //! A fake tree of kernel files in a temporary directory.
    #![allow(clippy::unwrap_used)]
    use super::Roots;
    use std::fs;

    pub(crate) struct Tree {
        directory: tempfile::TempDir,
    }

    impl Tree {
        pub(crate) fn new(files: &[(&str, &str)]) -> Self {
            let tree = Self { directory: tempfile::tempdir().unwrap() };
            for (path, text) in files {
                tree.write(path, text.as_bytes());
            }
            tree
        }

        pub(crate) fn write(&self, path: &str, bytes: &[u8]) {
            let path = self.directory.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }

        pub(crate) fn remove(&self, path: &str) {
            let path = self.directory.path().join(path);
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        }

        pub(crate) fn roots(&self) -> Roots {
            Roots::below(self.directory.path())
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn errors_name_the_operand_and_the_remedy() {
        let path = Path::new("/proc/kpageflags");
        let error = ReadError::io(path, io::Error::from(io::ErrorKind::PermissionDenied));
        assert_eq!(error.to_string(), "cannot read /proc/kpageflags; run the agent as root");
        assert!(!error.is_not_found());
        assert!(ReadError::io(path, io::Error::from(io::ErrorKind::NotFound)).is_not_found());
    }
}
