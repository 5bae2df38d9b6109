//! How a process maps guest memory, by `/proc/PID/maps`. Pure: text in, findings out.
//!
//! A hole in a file reaches shared mappings only: a private one keeps its copies, or shows the file's old bytes.

use super::{Finding, uninspectable};
use crate::backing::FileId;
use fpr_protocol::Gate;

/// One line of `maps` (proc_pid_maps(5)): `start-end perms offset major:minor inode path`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapping<'a> {
    pub(crate) addresses: &'a str,
    pub(crate) permissions: &'a str,
    /// Device and inode 0 for anonymous memory.
    pub(crate) file: FileId,
    pub(crate) path: &'a str,
}

impl<'a> Mapping<'a> {
    pub(crate) fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let (addresses, permissions) = (fields.next()?, fields.next()?);
        let _offset = fields.next()?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let (major, minor) = (u64::from_str_radix(major, 16).ok()?, u64::from_str_radix(minor, 16).ok()?);
        let inode = fields.next()?.parse().ok()?;
        let file = FileId { device: libc::makedev(u32::try_from(major).ok()?, u32::try_from(minor).ok()?), inode };
        Some(Self { addresses, permissions, file, path: fields.next().unwrap_or_default().trim_start() })
    }

    pub(crate) fn is_private(&self) -> bool {
        !self.permissions.ends_with('s')
    }

    fn is_writable(&self) -> bool {
        self.permissions.as_bytes().get(1) == Some(&b'w')
    }
}

/// Checks that every file is mapped shared and writable somewhere and nowhere private.
pub(crate) fn check(maps: &str, files: &[FileId]) -> Vec<Finding> {
    let mut mappings = Vec::new();
    for line in maps.lines() {
        let Some(mapping) = Mapping::parse(line) else {
            return vec![uninspectable(format!("cannot understand the mapping {line:?}"))];
        };
        if files.contains(&mapping.file) {
            mappings.push(mapping);
        }
    }
    let mut findings = Vec::new();
    let unsuitable = |detail| Finding { gate: Gate::BackingUnsuitable, detail };
    for file in files {
        let mut of_file = mappings.iter().filter(|mapping| mapping.file == *file).peekable();
        let Some(first) = of_file.peek().copied() else {
            findings.push(uninspectable(format!(
                "the process does not map the memory file with inode {}: the socket must be opened by the VMM itself",
                file.inode
            )));
            continue;
        };
        let mut writable = false;
        let mut private = None;
        for mapping in of_file {
            writable |= mapping.is_writable();
            private = private.or(mapping.is_private().then_some(mapping));
        }
        if let Some(Mapping { addresses, path, .. }) = private {
            findings.push(unsuitable(format!(
                "the mapping {addresses} of {path} is private: set share=on on the memory backend"
            )));
        } else if !writable {
            let Mapping { addresses, path, .. } = first;
            findings.push(unsuitable(format!(
                "the mapping {addresses} of {path} is read-only: set readonly=off on the memory backend"
            )));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const RAM: FileId = FileId { device: 1, inode: 4711 };
    const DISK: FileId = FileId { device: 0xfd01, inode: 99 };

    fn check_ram(lines: &[&str]) -> Vec<Gate> {
        let code = "55d0-55e0 r-xp 00001000 fd:01 99                         /usr/bin/qemu system\n";
        let maps = format!("{code}{}\n7fff0000-7fff1000 rw-p 00000000 00:00 0    [stack]\n", lines.join("\n"));
        check(&maps, &[RAM]).into_iter().map(|finding| finding.gate).collect()
    }

    #[test]
    fn guest_memory_must_be_mapped_shared_and_writable() {
        let shared = "7f0000-7f8000 rw-s 00000000 00:01 4711      /memfd:pc.ram (deleted)";
        let read_only = "7f0000-7f8000 r--s 00000000 00:01 4711      /memfd:pc.ram (deleted)";
        let private = "7f0000-7f8000 rw-p 00000000 00:01 4711      /memfd:pc.ram (deleted)";
        let other_device = "7f0000-7f8000 rw-s 00000000 00:02 4711      /memfd:pc.ram (deleted)";
        assert_eq!(check_ram(&[shared]), []);
        assert_eq!(check_ram(&[read_only, shared]), []);
        assert_eq!(check_ram(&[read_only]), [Gate::BackingUnsuitable]);
        assert_eq!(check_ram(&[private]), [Gate::BackingUnsuitable]);
        assert_eq!(check_ram(&[shared, private]), [Gate::BackingUnsuitable]);
        assert_eq!(check_ram(&[other_device]), [Gate::Uninspectable]);
        assert_eq!(check_ram(&["not a mapping"]), [Gate::Uninspectable]);
    }

    #[test]
    fn parses_device_inode_and_path() {
        let mapping = Mapping::parse("55d0-55e0 r-xp 00001000 fd:01 99      /usr/bin/qemu system").unwrap();
        assert_eq!((mapping.file, mapping.path), (DISK, "/usr/bin/qemu system"));
        assert!(mapping.is_private() && !mapping.is_writable());
        assert!(Mapping::parse("55d0-55e0 rw-p 00001000 00:00 0").is_some());
    }
}
