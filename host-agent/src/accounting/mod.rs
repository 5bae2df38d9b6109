//! What a VM costs its host, read in several ways at several prices.
//!
//! Used by the `memory` command, by the daemon's tick (figures of constant price only) and by decisions (precise ones
//! only). Every figure carries its source, whether it is precise or by how much it may be wrong, and what it cost to
//! read. A figure that cannot be had is absent with a reason; it is never 0 and never guessed.
//!
//! The roots of the kernel's file trees are parameters, and nothing else is trusted.

mod absent;
mod backing;
pub mod books;
mod cgroup;
pub mod choose;
pub mod cost;
mod ksm;
mod parse;
mod percpu;
mod process;
pub mod rank;
mod reader;
mod report;
pub mod task;
pub mod watch;

pub use ksm::KsmStat;
pub use reader::Reader;
pub use report::{VmReport, text};

use serde::Serialize;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A way to read what a VM costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Resident set of the VMM's process (`status`, `statm`). Blind to sharing and to KSM.
    Rss,
    /// Proportional set of the VMM's process (`smaps_rollup`): walks its page tables.
    Pss,
    /// What its memory cgroup is charged with.
    Cgroup,
    /// Sum of the resident sets of all processes of its cgroup.
    RssCgroup,
    /// Allocated blocks of its shared guest memory (`fstat`).
    Backing,
    /// Swapped out.
    Swap,
    /// Merged by KSM.
    Ksm,
    /// In transparent huge pages.
    Thp,
}

impl Method {
    /// All of them.
    pub const ALL: [Self; 8] =
        [Self::Rss, Self::Pss, Self::Cgroup, Self::RssCgroup, Self::Backing, Self::Swap, Self::Ksm, Self::Thp];

    /// The word of the command line, of JSON and of metrics.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Rss => "rss",
            Self::Pss => "pss",
            Self::Cgroup => "cgroup",
            Self::RssCgroup => "rss-cgroup",
            Self::Backing => "backing",
            Self::Swap => "swap",
            Self::Ksm => "ksm",
            Self::Thp => "thp",
        }
    }
}

/// How true a figure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "precision")]
pub enum Precision {
    /// As it was at one moment of the read.
    Precise,
    /// From per-CPU counters that were not summed.
    Approximate {
        /// The true figure is at most so many bytes away.
        error_bound_bytes: u64,
    },
}

/// One figure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Figure {
    /// The figure.
    pub bytes: u64,
    /// Where it was read: file and field.
    pub source: String,
    /// How true it is.
    #[serde(flatten)]
    pub precision: Precision,
    /// Time the read took.
    #[serde(rename = "read_ns", serialize_with = "nanoseconds")]
    pub read: Duration,
}

/// Why there is no figure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{detail}")]
pub struct Absent {
    /// The kind of reason.
    pub reason: AbsentReason,
    /// File, what the kernel said, and what would help.
    pub detail: String,
}

/// Kinds of reasons for an absent figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AbsentReason {
    /// The process is not known or has exited.
    NoProcess,
    /// The VM is in no memory cgroup, or in one that it shares with others.
    NoCgroup,
    /// The VM's memory is in no file.
    NotShared,
    /// This kernel does not have the file or the field.
    NotSupported,
    /// Reading is not permitted.
    NotPermitted,
    /// The file says something that makes no sense.
    Malformed,
    /// Reading failed otherwise.
    Failed,
}

impl AbsentReason {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::NoProcess,
        Self::NoCgroup,
        Self::NotShared,
        Self::NotSupported,
        Self::NotPermitted,
        Self::Malformed,
        Self::Failed,
    ];
}

/// A figure, or why there is none.
pub type Reading = Result<Figure, Absent>;

/// Roots of the kernel's file trees.
#[derive(Clone, Debug)]
pub struct Roots {
    /// procfs.
    pub proc: PathBuf,
    /// sysfs.
    pub sys: PathBuf,
    /// Where cgroup hierarchies are mounted: one v2 tree, or a directory per v1 controller.
    pub cgroup: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { proc: "/proc".into(), sys: "/sys".into(), cgroup: "/sys/fs/cgroup".into() }
    }
}

/// Whose memory is meant.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    /// The VMM's process, if it is known.
    pub pid: Option<i32>,
    /// Its cgroup below the hierarchy's root; found by way of the process if it is not given.
    pub cgroup: Option<PathBuf>,
    /// Files of its shared guest memory, each once. Found by way of the process if it is empty.
    pub files: Vec<Arc<File>>,
}

/// One figure for one VM. Who reads more than one keeps a [`Reader`].
///
/// # Errors
/// There is no figure: [`Absent`] says why.
pub fn read(roots: &Roots, subject: &Subject, method: Method) -> Reading {
    Reader::new(roots, subject).read(method)
}

/// A figure before it is known what it cost.
#[derive(Debug)]
struct Measured {
    bytes: u64,
    precision: Precision,
    source: String,
}

impl Measured {
    fn after(self, read: Duration) -> Figure {
        Figure { bytes: self.bytes, source: self.source, precision: self.precision, read }
    }
}

fn nanoseconds<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}
