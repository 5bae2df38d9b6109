//! What a VM's memory cgroup is charged with: usage of its own cgroup and what is below it, each page once.
//!
//! The cgroup is found by the process and judged once; then its usage is one read of one file that stays open. Three
//! things can make that stale, and each is noticed: the cgroup is removed (the read fails), the process moves (its
//! `cgroup` file reads differently), the process exits (that file cannot be read).

mod members;
mod place;

use super::percpu::Kernel;
use super::process::{Process, read_text, rss_of_statm, source};
use super::{Absent, AbsentReason, Measured, Precision, Roots, parse};
use place::{Cgroup, Version};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Enough for a number and for `/proc/PID/cgroup`, whose paths are at most 4 KiB long per hierarchy.
const MAX_SHORT_TEXT: usize = 64 << 10;

/// A file that is read again and again from its beginning.
#[derive(Debug)]
pub(super) struct Kept {
    file: File,
    path: PathBuf,
}

impl Kept {
    pub(super) fn new(file: File, path: PathBuf) -> Self {
        Self { file, path }
    }

    /// One pread: the kernel makes the text anew for each read at offset 0.
    pub(super) fn text(&self, buffer: &mut Vec<u8>) -> Result<String, Absent> {
        buffer.resize(4096, 0);
        let mut length = 0;
        loop {
            let read = self.file.read_at(&mut buffer[length..], length as u64);
            match read.map_err(|error| Absent::unreadable(&self.path, &error, members::removed()))? {
                0 => break,
                read => length += read,
            }
            if length < buffer.len() {
                break;
            }
            if buffer.len() >= MAX_SHORT_TEXT {
                let detail = format!("{}: longer than {MAX_SHORT_TEXT} bytes", self.path.display());
                return Err(Absent::new(AbsentReason::Malformed, detail));
            }
            buffer.resize(buffer.len() * 2, 0);
        }
        Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }
}

/// The cgroup of one VM.
#[derive(Debug)]
pub(super) struct VmCgroup {
    cgroup: Cgroup,
    /// One file; with v1 and `use_hierarchy` off, one for each cgroup.
    usage: Vec<Kept>,
    cgroups: u64,
    /// The process's own `cgroup` file and what it said; absent if the cgroup was named.
    membership: Option<(Kept, String)>,
}

impl VmCgroup {
    /// The one that was named: what is in it is its namer's affair.
    pub(super) fn named(roots: &Roots, name: &Path) -> Result<Self, Absent> {
        Self::open(place::named(roots, name)?, None)
    }

    /// The process's own, unless others are in it.
    pub(super) fn of_process(roots: &Roots, process: &Process, pid: i32) -> Result<Self, Absent> {
        let path = process.path("cgroup");
        let membership = Kept::new(process.file("cgroup", "use a kernel with CONFIG_CGROUPS")?, path);
        let text = membership.text(&mut Vec::new())?;
        let mut cgroup = place::of_process(roots, &text)?;
        // Up from libvirt's parts, and from where the controller is not (threaded cgroups, or not enabled so far down).
        while place::is_part(&cgroup) || !cgroup.directory().join(cgroup.version.usage_file()).exists() {
            cgroup = cgroup.parent().ok_or_else(|| {
                let detail = "no cgroup above the process but the root has memory accounting: start the VM in a cgroup of \
                              its own, with the memory controller in its parent's cgroup.subtree_control";
                Absent::new(AbsentReason::NoCgroup, detail)
            })?;
        }
        members::check_is_of(roots, &cgroup, pid)?;
        Self::open(cgroup, Some((membership, text)))
    }

    fn open(cgroup: Cgroup, membership: Option<(Kept, String)>) -> Result<Self, Absent> {
        let directories = members::subtree(&cgroup.directory())?;
        let cgroups = directories.len() as u64;
        let read = if members::is_hierarchical(&cgroup) { &directories[..1] } else { &directories[..] };
        let open = |directory: &PathBuf| {
            let path = directory.join(cgroup.version.usage_file());
            let file = File::open(&path).map_err(|error| Absent::unreadable(&path, &error, members::removed()))?;
            Ok(Kept::new(file, path))
        };
        let usage = read.iter().map(open).collect::<Result<_, Absent>>()?;
        Ok(Self { cgroup, usage, cgroups, membership })
    }

    /// Its path below the hierarchy's root.
    pub(super) fn path(&self) -> PathBuf {
        Path::new("/").join(&self.cgroup.path)
    }

    /// Whether the process is where it was.
    pub(super) fn is_current(&self, buffer: &mut Vec<u8>) -> Result<bool, Absent> {
        match &self.membership {
            Some((file, before)) => Ok(file.text(buffer)? == *before),
            None => Ok(true),
        }
    }

    pub(super) fn usage(&self, kernel: &Kernel, buffer: &mut Vec<u8>) -> Result<Measured, Absent> {
        let mut bytes = 0_u64;
        for file in &self.usage {
            let text = file.text(buffer)?;
            let usage = parse::bytes(&text, self.cgroup.version.usage_file(), 1);
            bytes = bytes.saturating_add(usage.map_err(|malformed| Absent::malformed(&file.path, &malformed))?);
        }
        let source = self.cgroup.version.usage_file().to_owned();
        Ok(Measured { bytes, precision: kernel.charges(self.cgroups)?, source })
    }

    /// Page cache in the usage, by `memory.stat`; that file is made from hundreds of counters and not cheap.
    pub(super) fn page_cache(&self) -> Result<Measured, Absent> {
        let path = self.cgroup.directory().join("memory.stat");
        let file = File::open(&path).map_err(|error| Absent::unreadable(&path, &error, members::removed()))?;
        let text = read_text(file, &path)?;
        // With v1, the fields without `total_` leave out what is below.
        let (cache, shmem) = match self.cgroup.version {
            Version::V1 => ("total_cache", "total_shmem"),
            Version::V2 => ("file", "shmem"),
        };
        let count = |key| parse::count(&text, key, 1).map_err(|malformed| Absent::malformed(&path, &malformed));
        let bytes = count(cache)?.checked_sub(count(shmem)?).ok_or_else(|| {
            let detail = format!("{}: {cache} is less than {shmem}, which it contains", path.display());
            Absent::new(AbsentReason::Malformed, detail)
        })?;
        Ok(Measured { bytes, precision: Precision::Precise, source: format!("memory.stat {cache} - {shmem}") })
    }

    /// Resident sets of all processes in it, added up.
    pub(super) fn resident(&self, roots: &Roots, kernel: &Kernel) -> Result<Measured, Absent> {
        let directories = members::subtree(&self.cgroup.directory())?;
        let pids = members::processes(&directories)?;
        let (mut bytes, mut bound, mut counted, mut missing) = (0_u64, None, 0_u64, Vec::new());
        for pid in pids {
            let path = roots.proc.join(pid.to_string()).join("statm");
            let measured = fs::read_to_string(&path).map_err(|error| {
                if error.kind() == std::io::ErrorKind::NotFound {
                    missing.push(pid);
                }
                Absent::unreadable(&path, &error, (AbsentReason::NoProcess, "the process has exited"))
            });
            let measured = match measured.and_then(|text| rss_of_statm(&text, &path, kernel)) {
                Ok(measured) => measured,
                // Exited since the list was read, or a kernel thread: nothing is resident for it.
                Err(absent) if absent.reason == AbsentReason::NoProcess => continue,
                Err(absent) => return Err(absent),
            };
            counted += 1;
            bytes = bytes.saturating_add(measured.bytes);
            if let Precision::Approximate { error_bound_bytes } = measured.precision {
                bound = Some(bound.unwrap_or(0_u64).saturating_add(error_bound_bytes));
            }
        }
        members::check_exited(&directories, &missing)?;
        if counted == 0 {
            let detail = format!("the cgroup {} holds no process: the VM has exited", self.path().display());
            return Err(Absent::new(AbsentReason::NoProcess, detail));
        }
        let precision =
            bound.map_or(Precision::Precise, |error_bound_bytes| Precision::Approximate { error_bound_bytes });
        let plural = if counted == 1 { "" } else { "es" };
        let source = format!("{} of {counted} process{plural}", source(Path::new("statm"), "resident"));
        Ok(Measured { bytes, precision, source })
    }
}
