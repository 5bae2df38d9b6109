//! What backs the guest's memory, by the mappings of the VMM.
//!
//! /proc does not say which mapping is guest memory: it is taken to be the largest, and all others of at least a
//! quarter of that. Programs, the code that an emulator generates and reserved addresses do not count. The size a
//! mapping really has in memory is what fstat says of its file; `smaps` would say it too, but walks the page tables of
//! a running guest for seconds.

use super::size;
use super::vmm::{Kind, Vmm};
use crate::backing::{FileId, Unsuitable};
use crate::process::Finding;
use crate::process::maps::{self, Mapping};
use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use serde::Serialize;
use std::os::unix::fs::MetadataExt;

/// Smaller mappings are libraries, heaps and rings.
const MIN_BYTES: u64 = 16 << 20;

/// Huge pages of an x86-64 guest, which is what it reports.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// What a mapping maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Backed {
    /// Memory without a file.
    Anonymous,
    /// Shared memory without a descriptor: nobody else can be given it.
    SharedAnonymous,
    /// memfd_create(2) without huge pages.
    Memfd,
    /// A file on tmpfs.
    Tmpfs,
    /// A memfd or a file of hugetlb pages.
    Hugetlb,
    /// A file on a disk.
    Disk,
    /// A file to which no readable descriptor is open.
    UnknownFile,
}

/// One mapping, or all of one file.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Block {
    pub(super) backed: Backed,
    pub(super) shared: bool,
    pub(super) mapped_bytes: u64,
    /// What the file costs; `None` where no file says it.
    pub(super) allocated_bytes: Option<u64>,
    pub(super) page_bytes: Option<u64>,
    pub(super) path: String,
    #[serde(skip)]
    file: Option<FileId>,
    #[serde(skip)]
    file_system: Option<i64>,
}

/// The mappings that look like guest memory, largest first.
pub(super) fn blocks(vmm: &Vmm) -> Result<Vec<Block>, Finding> {
    let maps = vmm.maps.as_ref().map_err(Clone::clone)?;
    let mut blocks: Vec<Block> = Vec::new();
    for mapping in maps.lines().filter_map(Mapping::parse).filter(may_be_guest_memory) {
        let Some(bytes) = length(mapping.addresses) else { continue };
        let file = (mapping.file.inode != 0).then_some(mapping.file);
        // Two NUMA nodes or two mappings of one file: its size counts once per mapped byte.
        match blocks.iter_mut().find(|block| file.is_some() && block.file == file) {
            Some(block) => {
                block.mapped_bytes = block.mapped_bytes.saturating_add(bytes);
                block.shared &= !mapping.is_private();
            }
            None => blocks.push(Block {
                backed: by_name(mapping.path, file),
                shared: !mapping.is_private(),
                mapped_bytes: bytes,
                allocated_bytes: None,
                page_bytes: None,
                path: mapping.path.to_owned(),
                file,
                file_system: None,
            }),
        }
    }
    blocks.sort_by_key(|block| std::cmp::Reverse(block.mapped_bytes));
    let least = blocks.first().map_or(0, |largest| largest.mapped_bytes / 4).max(MIN_BYTES);
    blocks.retain(|block| block.mapped_bytes >= least);
    for block in &mut blocks {
        look_at_file(block, vmm);
    }
    Ok(blocks)
}

fn may_be_guest_memory(mapping: &Mapping<'_>) -> bool {
    let [read, write, execute, ..] = mapping.permissions.as_bytes() else { return false };
    let named = mapping.path.starts_with('[') && !mapping.path.starts_with("[anon");
    *read == b'r' && *execute != b'x' && (*write == b'w' || !mapping.is_private()) && !named
}

fn length(addresses: &str) -> Option<u64> {
    let (start, end) = addresses.split_once('-')?;
    u64::from_str_radix(end, 16).ok()?.checked_sub(u64::from_str_radix(start, 16).ok()?)
}

/// By the names that the kernel gives (`shmem_zero_setup`, `memfd_create`, `hugetlb_file_setup`).
fn by_name(path: &str, file: Option<FileId>) -> Backed {
    match path {
        _ if file.is_none() => Backed::Anonymous,
        "/dev/zero (deleted)" => Backed::SharedAnonymous,
        _ if path.starts_with("/SYSV") => Backed::SharedAnonymous,
        _ if path.starts_with("/anon_hugepage") => Backed::Anonymous,
        _ if path.starts_with("/memfd:") => Backed::Memfd,
        _ => Backed::UnknownFile,
    }
}

/// Through the VMM's descriptor, which is also what it would hand to the daemon.
fn look_at_file(block: &mut Block, vmm: &Vmm) {
    let (Some(file), Ok(links)) = (block.file, &vmm.descriptors) else { return };
    let open = links.iter().filter(|link| link.target.as_os_str() == block.path.as_str());
    for link in open {
        let path = vmm.directory.join("fd").join(&link.number);
        let (Ok(metadata), Ok(file_system)) = (std::fs::metadata(&path), statfs(&path)) else { continue };
        if metadata.ino() != file.inode {
            continue;
        }
        // The unit of st_blocks is 512 bytes (inode(7)); f_bsize is the page size on both file systems.
        block.allocated_bytes = Some(metadata.blocks().saturating_mul(512));
        block.file_system = Some(file_system.filesystem_type().0);
        block.backed = match file_system.filesystem_type() {
            HUGETLBFS_MAGIC => Backed::Hugetlb,
            TMPFS_MAGIC if block.backed == Backed::Memfd => Backed::Memfd,
            TMPFS_MAGIC => Backed::Tmpfs,
            _ => Backed::Disk,
        };
        if matches!(block.backed, Backed::Hugetlb | Backed::Memfd | Backed::Tmpfs) {
            block.page_bytes = u64::try_from(file_system.block_size()).ok();
        }
        return;
    }
}

impl Block {
    /// Why it cannot be dropped by the daemon; the words are those of the gate `backing-unsuitable`.
    pub(super) fn unsuitable(&self, vmm: &Vmm) -> Option<String> {
        let path = &self.path;
        match (self.backed, self.file) {
            (Backed::Anonymous, _) | (_, None) => {
                return Some("only the VMM itself can drop private anonymous memory".to_owned());
            }
            (Backed::SharedAnonymous, _) => {
                return Some(format!("{path} has no descriptor that the VMM could hand to the daemon"));
            }
            (Backed::Disk, _) => {
                return Some(Unsuitable::NotInMemory { magic: self.file_system.unwrap_or_default() }.to_string());
            }
            (_, Some(file)) => {
                let maps = vmm.maps.as_deref().unwrap_or_default();
                if let Some(finding) = maps::check(maps, &[file]).into_iter().next() {
                    return Some(finding.detail);
                }
            }
        }
        let page_bytes = self.page_bytes.filter(|bytes| *bytes > HUGE_PAGE_BYTES)?;
        Some(Unsuitable::PagesTooLarge { page_bytes, huge_page_bytes: HUGE_PAGE_BYTES }.to_string())
    }

    pub(super) fn describe(&self) -> String {
        let kind = match self.backed {
            Backed::Anonymous => "anonymous memory",
            Backed::SharedAnonymous => "shared anonymous memory",
            Backed::Memfd => "memfd",
            Backed::Tmpfs => "tmpfs file",
            Backed::Hugetlb => "hugetlb file",
            Backed::Disk => "disk file",
            Backed::UnknownFile => "file",
        };
        let mut text =
            format!("{} of {} {kind}", size(self.mapped_bytes), if self.shared { "shared" } else { "private" });
        if !self.path.is_empty() {
            text.push_str(&format!(" {}", self.path));
        }
        if let Some(bytes) = self.page_bytes {
            text.push_str(&format!(", pages of {}", size(bytes)));
        }
        if let Some(bytes) = self.allocated_bytes {
            text.push_str(&format!(", {} allocated", size(bytes)));
        }
        text
    }
}

/// How to give this VM memory that the daemon can drop.
pub(super) fn remedy(vmm: &Vmm, guest_bytes: u64) -> String {
    match vmm.kind() {
        Kind::Qemu => {
            let backend = vmm.options("object").find(|object| object.contains("memory-backend-"));
            let Some(backend) = backend else {
                return format!(
                    "start QEMU with -object memory-backend-memfd,id=mem,size={},share=on -machine memory-backend=mem \
                     (libvirt: source type memfd and access mode shared in memoryBacking)",
                    size(guest_bytes)
                );
            };
            // JSON objects of libvirt have other quotes; the words are the same.
            let memfd = backend.contains("memory-backend-memfd");
            let change = if memfd { "share=on" } else { "memory-backend-memfd and share=on" };
            format!("start QEMU with {change} in `-object {backend}` (libvirt: memoryBacking, access mode shared)")
        }
        Kind::CloudHypervisor => {
            format!("start it with --memory size={},shared=on (docs/vmm/cloud-hypervisor.md)", size(guest_bytes))
        }
        Kind::Firecracker => "Firecracker keeps guest memory to itself: use its own balloon device".to_owned(),
        Kind::Other => {
            "map a memfd MAP_SHARED in the VMM; or use the library inside it, which drops private memory, too \
                        (docs/vmm/library.md)"
                .to_owned()
        }
    }
}
