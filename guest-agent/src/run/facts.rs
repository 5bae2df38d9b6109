//! What this guest is and allows, gathered once at the start. `check` prints the same.

use crate::agent::{Facts, Method};
use crate::config::{Config, Wish};
use crate::isolate::claim::HugePageClaims;
use crate::isolate::hugetlb::HugePageRoots;
use crate::isolate::journal::{Journal, JournalError};
use crate::isolate::offline;
use crate::kernel::detect::{Detection, detect};
use crate::kernel::memory_blocks::{Kdump, MemoryBlocks, kdump};
use crate::kernel::zoneinfo::ZoneInfoReader;
use crate::kernel::{ReadError, Roots, identity, meminfo};
use fpr_protocol::message::Hello;
use fpr_protocol::{HugePageSize, VersionRange};
use std::fmt::Write;

/// Why the agent cannot work here at all.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// A kernel file that everything rests on.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// No usable huge page size.
    #[error(transparent)]
    Identity(#[from] identity::IdentityError),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// What a dead agent left cannot be listed.
    #[error("cannot look for what an earlier agent left")]
    Leftovers(#[from] crate::isolate::hugetlb::HugetlbError),
}

/// Everything that was found out.
pub struct Guest {
    /// For the state machine.
    pub facts: Facts,
    /// How the kernel treats freed pages, with evidence.
    pub detection: Detection,
    /// The memory blocks, where there are any.
    pub blocks: Option<MemoryBlocks>,
    /// Settings of hugetlb.
    pub huge_pages: HugePageRoots,
    /// Boot id as text, for the journal.
    pub boot_id: String,
}

/// Looks at the guest; changes nothing.
///
/// # Errors
/// See [`FactsError`].
pub fn gather(roots: &Roots, config: &Config) -> Result<Guest, FactsError> {
    let page_size = identity::page_size()?;
    let size = identity::huge_page_size(roots, page_size)?;
    let detection = detect(roots, &config.skip_checks);
    let blocks = MemoryBlocks::read(roots)?;
    let boot_id = identity::boot_id(roots)?;
    let memory = meminfo::MemInfoReader::open(roots)?.read()?;
    let huge_pages = HugePageRoots {
        sys: roots.sys.clone(),
        proc: roots.proc.clone(),
        mount_point: config.run_dir.join("hugepages"),
        huge_page: size,
    };
    let block_bytes = blocks.as_ref().map(MemoryBlocks::block_bytes);
    let facts = Facts {
        hello: Hello {
            versions: VersionRange::SUPPORTED,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id,
            page_size,
            huge_page_order: size.order(),
            memory_block_bytes: block_bytes.unwrap_or(0),
            memory_total_bytes: memory.total_bytes,
            kernel_release: identity::kernel_release(roots)?,
            freed_pages: detection.freed_pages,
            confidential: detection.confidential,
            now_ns: 0,
        },
        size,
        block_bytes,
        offline: offlining(roots, config, blocks.as_ref(), size)?,
        claims: claiming(config, &huge_pages),
        leftovers: false,
    };
    Ok(Guest { facts, detection, blocks, huge_pages, boot_id: boot_id_text(boot_id) })
}

/// Whether a dead agent left something.
///
/// # Errors
/// The journal or the mount cannot be read.
pub fn leftovers(roots: &Roots, guest: &Guest, journal: &Journal) -> Result<bool, FactsError> {
    let blocks = offline::MemoryBlocks::new(&roots.sys, journal.clone()).leftovers()?;
    let claims = HugePageClaims::new(guest.huge_pages.clone(), journal.clone()).leftovers()?;
    Ok(!blocks.is_empty() || !claims.is_empty() || journal.overcommit()?.is_some())
}

fn offlining(
    roots: &Roots,
    config: &Config,
    blocks: Option<&MemoryBlocks>,
    size: HugePageSize,
) -> Result<Method, ReadError> {
    let off = |why: &str| Ok(Method::Off(why.to_owned()));
    if config.offline == Wish::Avoid {
        return off("switched off by --no-offline or the configuration");
    }
    let Some(blocks) = blocks else { return off("the kernel has no memory hot-remove (CONFIG_MEMORY_HOTREMOVE)") };
    if blocks.block_bytes() < size.bytes() {
        return off("memory blocks are smaller than a huge page");
    }
    if keeps_memory_map_in_blocks(roots) {
        return off("memory_hotplug.memmap_on_memory is on: the memory map of a block may lie in the block itself");
    }
    if kdump(roots)? == Kdump::ReloadedByUserSpace {
        return off("a crash kernel is loaded and udev reloads it at every change of a memory block (kdump)");
    }
    Ok(Method::Usable)
}

/// With `memmap_on_memory` the `struct page`s of a hot-added block are in its own first pages and stay in use while it is
/// offline (`memory_block_offline`, drivers/base/memory.c): dropping the block would destroy them. Such blocks are never
/// wholly free, but this is not to hang on a survey. Kernels without the parameter (before 5.13) do not do it.
fn keeps_memory_map_in_blocks(roots: &Roots) -> bool {
    let parameter = roots.sys.join("module/memory_hotplug/parameters/memmap_on_memory");
    std::fs::read_to_string(parameter).is_ok_and(|value| !matches!(value.trim(), "N" | "n" | "0"))
}

/// Memory that the agent leaves free: what the operator says, at least the kernel's high watermarks and
/// [`ABOVE_WATERMARK`].
///
/// # Errors
/// `/proc/zoneinfo` cannot be read.
pub fn floor_bytes(roots: &Roots, config: &Config, size: HugePageSize) -> Result<u64, ReadError> {
    let high: u64 = ZoneInfoReader::open(roots)?.read()?.iter().map(|zone| zone.high).sum();
    Ok(config.policy.floor_bytes.max(high.saturating_mul(size.page_bytes()).saturating_add(ABOVE_WATERMARK)))
}

/// The kernel's own page reporting keeps as much (32 pages of order 9, `page_reporting_process_zone`).
const ABOVE_WATERMARK: u64 = 64 << 20;

fn claiming(config: &Config, huge_pages: &HugePageRoots) -> Method {
    if config.claims == Wish::Avoid {
        return Method::Off("switched off by --no-claims or the configuration".to_owned());
    }
    match huge_pages.available() {
        Ok(()) => Method::Usable,
        Err(error) => Method::Off(crate::error_chain(&error)),
    }
}

fn boot_id_text(id: [u8; 16]) -> String {
    id.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
