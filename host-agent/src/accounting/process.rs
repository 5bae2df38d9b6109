//! A process's own figures: resident set, swapped out, proportional set, huge pages, merged pages.
//!
//! The directory of the process is opened once and everything is read relative to it. It stands for the process and not
//! for its number: when the process has exited, reading fails, whoever has the number then.

use super::parse::{self, Malformed};
use super::percpu::{ANON_COUNTERS, Kernel, RSS_COUNTERS, SWAP_COUNTERS};
use super::{Absent, AbsentReason, Measured, Precision, Roots};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Enough for the mappings of any VMM; the file of a process can be long, since it decides how often it maps.
const MAX_TEXT: u64 = 64 << 20;

/// `/proc/PID`, open.
#[derive(Debug)]
pub(super) struct Process {
    directory: File,
    path: PathBuf,
}

impl Process {
    pub(super) fn open(roots: &Roots, pid: i32) -> Result<Self, Absent> {
        // SO_PEERCRED says 0 for a peer outside our pid namespace.
        if pid <= 0 {
            let detail = "the VMM's process is in another pid namespace: run this in the host's";
            return Err(Absent::new(AbsentReason::NoProcess, detail));
        }
        let path = roots.proc.join(pid.to_string());
        let missing =
            (AbsentReason::NoProcess, "there is no such process; `fpr-host-agent status` shows the VMs' pids");
        let directory = File::open(&path).map_err(|error| Absent::unreadable(&path, &error, missing))?;
        Ok(Self { directory, path })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens one of its files; `remedy` is for a kernel that does not have it.
    pub(super) fn file(&self, name: &str, remedy: &str) -> Result<File, Absent> {
        openat(&self.directory, name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()).map(File::from).map_err(
            |errno| {
                let missing = if self.is_gone() {
                    (AbsentReason::NoProcess, "the process has exited; a running VM has another pid")
                } else {
                    (AbsentReason::NotSupported, remedy)
                };
                Absent::unreadable(&self.path(name), &io::Error::from(errno), missing)
            },
        )
    }

    /// The kernel finds no file of a process that has exited, and every kernel has this one.
    fn is_gone(&self) -> bool {
        let status = openat(&self.directory, "status", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty());
        status.map(File::from).is_err_and(|errno| errno == nix::errno::Errno::ENOENT)
    }

    pub(super) fn text(&self, name: &str, remedy: &str) -> Result<String, Absent> {
        read_text(self.file(name, remedy)?, &self.path(name))
    }

    pub(super) fn status(&self) -> Result<String, Absent> {
        self.text("status", "mount procfs")
    }
}

/// All of a file, from its beginning.
pub(super) fn read_text(file: impl Read, path: &Path) -> Result<String, Absent> {
    let mut bytes = Vec::new();
    let missing = (AbsentReason::NoProcess, "it has gone");
    file.take(MAX_TEXT).read_to_end(&mut bytes).map_err(|error| Absent::unreadable(path, &error, missing))?;
    // Names of files and processes need not be UTF-8.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A process that is being taken down, and a kernel thread, have `status` without memory in it.
fn of_status(text: &str, key: &'static str, path: &Path) -> Result<u64, Absent> {
    parse::kib(text, key).map_err(|malformed| match malformed {
        Malformed::Missing(_) => Absent::new(
            AbsentReason::NoProcess,
            format!("{}: no {key}: the process has exited or has no memory of its own", path.display()),
        ),
        malformed => Absent::malformed(path, &malformed),
    })
}

/// `VmRSS`, from the text of `status`.
pub(super) fn rss_of_status(text: &str, path: &Path, kernel: &Kernel) -> Result<Measured, Absent> {
    let bytes = of_status(text, "VmRSS", path)?;
    let precision = kernel.mm_counters(RSS_COUNTERS, threads(text))?;
    Ok(Measured { bytes, precision, source: source(path, "VmRSS") })
}

/// `VmSwap`, from the text of `status`; without what is swapped out of shared memory.
pub(super) fn swap_of_status(text: &str, path: &Path, kernel: &Kernel) -> Result<Measured, Absent> {
    let bytes = of_status(text, "VmSwap", path)?;
    let precision = kernel.mm_counters(SWAP_COUNTERS, threads(text))?;
    Ok(Measured { bytes, precision, source: source(path, "VmSwap") })
}

/// `RssAnon` (Linux 4.5) and `VmSwap`, from the text of `status`.
pub(super) fn anonymous_of_status(text: &str, path: &Path, kernel: &Kernel) -> Result<Measured, Absent> {
    let bytes = of_status(text, "RssAnon", path)?.saturating_add(of_status(text, "VmSwap", path)?);
    let precision = kernel.mm_counters(ANON_COUNTERS, threads(text))?;
    Ok(Measured { bytes, precision, source: source(path, "RssAnon + VmSwap") })
}

fn threads(status: &str) -> Option<u64> {
    parse::count(status, "Threads", 1).ok()
}

/// The resident set, from the text of `statm`. A process without memory has zeros there.
pub(super) fn rss_of_statm(text: &str, path: &Path, kernel: &Kernel) -> Result<Measured, Absent> {
    let bytes = parse::resident(text, kernel.page_bytes).map_err(|malformed| Absent::malformed(path, &malformed))?;
    if bytes == 0 && text.split_ascii_whitespace().next() == Some("0") {
        let detail = format!("{}: the process has exited or has no memory of its own", path.display());
        return Err(Absent::new(AbsentReason::NoProcess, detail));
    }
    Ok(Measured { bytes, precision: kernel.mm_counters(RSS_COUNTERS, None)?, source: source(path, "resident") })
}

/// Fields of `smaps_rollup` (Linux 4.14), each summed from the page tables at the moment of the read.
pub(super) fn rollup(process: &Process, fields: &[&'static str]) -> Result<Measured, Absent> {
    let text = process.text("smaps_rollup", "Linux has it since 4.14, with CONFIG_PROC_PAGE_MONITOR")?;
    let path = process.path("smaps_rollup");
    if text.is_empty() {
        // The kernel returns nothing once the process has given up its memory.
        let detail = format!("{}: is empty: the process has exited or has no memory of its own", path.display());
        return Err(Absent::new(AbsentReason::NoProcess, detail));
    }
    let mut bytes = 0_u64;
    for field in fields {
        bytes = bytes.saturating_add(parse::kib(&text, field).map_err(|malformed| match malformed {
            Malformed::Missing(_) => Absent::new(
                AbsentReason::NotSupported,
                format!("{}: this kernel does not have {field} there: use a newer one", path.display()),
            ),
            malformed => Absent::malformed(&path, &malformed),
        })?);
    }
    Ok(Measured { bytes, precision: Precision::Precise, source: source(&path, &fields.join(" + ")) })
}

/// What stands in front of a person: the file's own name and the field.
pub(super) fn source(path: &Path, field: &str) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{name} {field}")
}
