//! Allocated blocks of the files that back shared guest memory: exact, and of one price whatever the VM's size.
//!
//! The daemon has the files from the VMM. Anybody else finds them by the mappings of the process. The files are never
//! kept open here: memory of a VM that is gone would stay for as long.

use super::process::Process;
use super::{Absent, AbsentReason, Measured, Precision};
use crate::backing::FileId;
use crate::process::maps::Mapping;
use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// Unit of `st_blocks` whatever the file system (inode(7)).
const STAT_BLOCK: u64 = 512;

/// Smaller mappings are rings and logs of devices, not a guest's memory.
const MIN_MAPPED_BYTES: u64 = 1 << 20;

/// A file that backs guest memory, without holding it.
#[derive(Debug)]
enum Handle {
    /// Somebody else holds it open.
    Open(Weak<File>),
    /// The kernel's link to it.
    Link(PathBuf),
}

impl Handle {
    fn metadata(&self) -> Result<Metadata, Absent> {
        match self {
            Self::Open(file) => match file.upgrade() {
                Some(file) => file.metadata().map_err(|error| {
                    Absent::new(AbsentReason::Failed, format!("the memory file cannot be looked at: {error}"))
                }),
                None => Err(Absent::new(
                    AbsentReason::NoProcess,
                    "the VMM has gone and its memory files with it; a running VM connects again",
                )),
            },
            Self::Link(path) => fs::metadata(path).map_err(|error| {
                let missing = (AbsentReason::NoProcess, "the process has exited or has unmapped it; look again");
                Absent::unreadable(path, &error, missing)
            }),
        }
    }
}

/// The files of one VM, each once.
#[derive(Debug)]
pub(super) struct Files(Vec<Handle>);

impl Files {
    pub(super) fn held(files: &[Arc<File>]) -> Self {
        Self(files.iter().map(|file| Handle::Open(Arc::downgrade(file))).collect())
    }

    /// By the mappings of the process.
    pub(super) fn find(process: &Process) -> Result<Self, Absent> {
        let maps = process.text("maps", "mount procfs")?;
        let shared = shared(&maps).map_err(|line| {
            let path = process.path("maps");
            Absent::new(AbsentReason::Malformed, format!("{}: cannot understand {line:?}", path.display()))
        })?;
        let mut handles = Vec::new();
        for (id, address) in shared {
            let link = process.path("map_files").join(address);
            let link = match in_memory(&link) {
                Ok(in_memory) => in_memory.then_some(link),
                // Following these links is for CAP_SYS_ADMIN and CAP_CHECKPOINT_RESTORE only; a descriptor will do.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    descriptor(&process.path("fd"), id)?.filter(|link| in_memory(link).is_ok_and(|yes| yes))
                }
                Err(error) => {
                    let missing = (AbsentReason::NoProcess, "the process has exited or has unmapped it; look again");
                    return Err(Absent::unreadable(&link, &error, missing));
                }
            };
            handles.extend(link.map(Handle::Link));
        }
        if handles.is_empty() {
            let detail = "the process maps no shared memory of a guest: its memory is private, read rss, pss or cgroup; \
                          or set share=on on the memory backend";
            return Err(Absent::new(AbsentReason::NotShared, detail));
        }
        Ok(Self(handles))
    }

    pub(super) fn allocated(&self) -> Result<Measured, Absent> {
        let mut bytes = 0_u64;
        for handle in &self.0 {
            bytes = bytes.saturating_add(handle.metadata()?.blocks().saturating_mul(STAT_BLOCK));
        }
        let files = self.0.len();
        let source = format!("fstat st_blocks of {files} memory file{}", if files == 1 { "" } else { "s" });
        Ok(Measured { bytes, precision: Precision::Precise, source })
    }
}

/// Files that are mapped shared and in memory's size, with the name of one mapping as `map_files` has it.
fn shared(maps: &str) -> Result<BTreeMap<FileId, String>, String> {
    let mut files: BTreeMap<FileId, (u64, String)> = BTreeMap::new();
    for line in maps.lines() {
        let bad = || line.chars().take(80).collect::<String>();
        let mapping = Mapping::parse(line).ok_or_else(bad)?;
        if mapping.is_private() || mapping.file.inode == 0 {
            continue;
        }
        let (start, end) = mapping.addresses.split_once('-').ok_or_else(bad)?;
        let (start, end) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16));
        let (Ok(start), Ok(end)) = (start, end) else { return Err(bad()) };
        let bytes = end.checked_sub(start).ok_or_else(bad)?;
        // `maps` pads an address to eight digits, `map_files` does not.
        let entry = files.entry(mapping.file).or_insert_with(|| (0, format!("{start:x}-{end:x}")));
        entry.0 = entry.0.saturating_add(bytes);
    }
    Ok(files
        .into_iter()
        .filter(|(_, (bytes, _))| *bytes >= MIN_MAPPED_BYTES)
        .map(|(id, (_, name))| (id, name))
        .collect())
}

/// Whether it is a file of a file system in memory; device nodes are on one of these as well.
fn in_memory(link: &Path) -> io::Result<bool> {
    let kind = statfs(link).map_err(io::Error::from)?.filesystem_type();
    Ok((kind == TMPFS_MAGIC || kind == HUGETLBFS_MAGIC) && fs::metadata(link)?.is_file())
}

/// The link to one of the process's descriptors that is this file.
fn descriptor(fd: &Path, id: FileId) -> Result<Option<PathBuf>, Absent> {
    let missing = (AbsentReason::NoProcess, "the process has exited; a running VM has another pid");
    let entries = fs::read_dir(fd).map_err(|error| Absent::unreadable(fd, &error, missing))?;
    let is_it = |path: &PathBuf| fs::metadata(path).is_ok_and(|of| FileId { device: of.dev(), inode: of.ino() } == id);
    Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).find(is_it))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn guest_memory_is_mapped_shared_and_large() {
        let maps = "00400000-00500000 r-xp 00000000 fd:01 99 /usr/bin/qemu\n\
                    7f0000000000-7f0008000000 rw-s 00000000 00:01 4711 /memfd:pc.ram (deleted)\n\
                    7f0010000000-7f0010001000 rw-s 00000000 00:01 5 /memfd:ring (deleted)\n\
                    7f0020000000-7f0028000000 rw-p 00000000 00:01 6 /dev/shm/private\n\
                    7f0030000000-7f0038000000 rw-p 00000000 00:00 0\n\
                    00100000-00200000 rw-s 00000000 00:01 7 /dev/hugepages/vm\n";
        let names: Vec<String> = shared(maps).unwrap().into_values().collect();
        assert_eq!(names, ["100000-200000", "7f0000000000-7f0008000000"], "as map_files has them");
        assert!(shared("7f00 nonsense").is_err());
        assert!(shared("20-10 rw-s 0 00:01 7 /x").is_err());
    }

    proptest! {
        #[test]
        fn no_mapping_panics(text in any::<String>(), range in "[0-9a-f]{1,20}-[0-9a-f]{1,20}") {
            let _ = (shared(&text), shared(&format!("{range} rw-s 0 00:01 7 /x")));
        }
    }
}
