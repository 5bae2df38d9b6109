//! Real mappings, real system calls.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

use super::*;
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::sync::Arc;
use vm_memory::{Bytes, FileOffset, GuestAddress as VmAddress, GuestRegionMmap, MmapRegion};

const PAGE: u64 = 4096;
const BYTES: u64 = 32 * PAGE;
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

fn memfd() -> FileOffset {
    let file = File::from(memfd_create(c"guest-memory", MFdFlags::empty()).unwrap());
    file.set_len(2 * BYTES).unwrap();
    FileOffset::new(file, BYTES)
}

fn mapping(file: Option<FileOffset>, flags: i32, prot: i32) -> Arc<MmapRegion<()>> {
    Arc::new(MmapRegion::build(file, BYTES as usize, prot, flags).unwrap())
}

fn guest(regions: Vec<(u64, Arc<MmapRegion<()>>)>) -> GuestMemoryMmap<()> {
    let region = |(start, mapping)| GuestRegionMmap::with_arc(mapping, VmAddress(start)).unwrap();
    GuestMemoryMmap::from_regions(regions.into_iter().map(region).collect()).unwrap()
}

fn range(start: u64, bytes: u64) -> GuestRange {
    GuestRange { start: GuestAddress(start), bytes }
}

fn fill(memory: &GuestMemoryMmap<()>) {
    for region in memory.iter() {
        memory.write_slice(&[7; BYTES as usize], region.start_addr()).unwrap();
    }
}

/// The pages that read zero, of all regions in order; any other must hold what `fill` wrote.
fn zeroed(memory: &GuestMemoryMmap<()>) -> Vec<u64> {
    let mut zeroed = Vec::new();
    for region in memory.iter() {
        for page in (region.start_addr().0..region.start_addr().0 + BYTES).step_by(PAGE as usize) {
            let mut seen = [0; PAGE as usize];
            memory.read_slice(&mut seen, VmAddress(page)).unwrap();
            match seen {
                [0, ..] => zeroed.push(page),
                _ => assert_eq!(seen, [7; PAGE as usize], "{page:#x}"),
            }
        }
    }
    zeroed
}

fn discard(memory: &mut LocalMemory, ranges: &[GuestRange]) -> Vec<Result<u64, Refusal>> {
    memory.discard(Source::Reported, ranges)
}

#[test]
fn ranges_are_split_at_the_borders_of_private_and_shared_memory() {
    // Private, file and private memory in a row.
    let memory = guest(vec![
        (0, mapping(None, PRIVATE, READ_WRITE)),
        (BYTES, mapping(Some(memfd()), libc::MAP_SHARED, READ_WRITE)),
        (2 * BYTES, mapping(None, PRIVATE, READ_WRITE)),
    ]);
    fill(&memory);
    let mut local = LocalMemory::new(&memory).unwrap();
    assert_eq!(local.allocated_bytes().unwrap(), 3 * BYTES);
    let ranges = [range(BYTES - PAGE, BYTES + 2 * PAGE), range(PAGE + 1, PAGE), range(3 * BYTES - PAGE, 2 * PAGE)];
    let results = discard(&mut local, &ranges);
    assert_eq!(results, [Ok(BYTES + 2 * PAGE), Ok(0), Err(Refusal::OutsideMemory)]);
    assert_eq!(local.allocated_bytes().unwrap(), 2 * BYTES - 2 * PAGE);
    let wanted: Vec<u64> = (BYTES - PAGE..2 * BYTES + PAGE).step_by(PAGE as usize).collect();
    assert_eq!(zeroed(&memory), wanted);
}

#[test]
fn neighbours_are_merged_before_they_are_rounded() {
    let memory = guest(vec![(PAGE, mapping(None, PRIVATE, READ_WRITE))]);
    fill(&memory);
    let mut local = LocalMemory::new(&memory).unwrap();
    // Together the pages at 2 and 3; the border between them is in a page.
    let results = discard(&mut local, &[range(3 * PAGE + 100, PAGE - 100), range(2 * PAGE, PAGE + 100)]);
    assert_eq!(results, [Ok(PAGE - 100), Ok(PAGE + 100)]);
    assert_eq!(zeroed(&memory), [2 * PAGE, 3 * PAGE]);
}

#[test]
fn a_mapping_that_cannot_be_dropped_is_refused_from_the_start() {
    let refused =
        |mapping| LocalMemory::new(&guest(vec![(0, mapping)])).err().map(|error| fpr_protocol::error_chain(&error));
    let refused = |file, flags, prot| refused(mapping(file, flags, prot)).unwrap_or_default();
    assert!(refused(None, libc::MAP_SHARED | libc::MAP_ANONYMOUS, READ_WRITE).contains("shared anonymous memory"));
    for (flags, prot) in [(libc::MAP_PRIVATE, READ_WRITE), (libc::MAP_SHARED, libc::PROT_READ), (PRIVATE, READ_WRITE)] {
        assert!(refused(Some(memfd()), flags, prot).contains("map the file MAP_SHARED"));
    }
    let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    disk.set_len(BYTES).unwrap();
    assert!(refused(Some(FileOffset::new(disk, 0)), libc::MAP_SHARED, READ_WRITE).contains("not in memory"));
    // One file under two addresses: what is free at one may be in use at the other.
    let file = memfd();
    let shared = || mapping(Some(file.clone()), libc::MAP_SHARED, READ_WRITE);
    let aliased = LocalMemory::new(&guest(vec![(0, shared()), (BYTES, shared())])).err().unwrap();
    assert!(matches!(aliased, LocalError::Unsuitable(Unsuitable::Aliased { .. })));
}

#[test]
fn locked_memory_is_refused_and_keeps_its_content() {
    let memory = guest(vec![
        (0, mapping(None, PRIVATE | libc::MAP_LOCKED, READ_WRITE)),
        (BYTES, mapping(None, PRIVATE, READ_WRITE)),
    ]);
    fill(&memory);
    let mut local = LocalMemory::new(&memory).unwrap();
    let results = discard(&mut local, &[range(0, PAGE), range(BYTES - PAGE, 2 * PAGE)]);
    assert_eq!(results, [Err(Refusal::DropFailed), Ok(PAGE)], "what is not locked is dropped");
    assert_eq!(zeroed(&memory), [BYTES]);
}

#[test]
fn a_closed_gate_refuses_everything_and_drops_nothing() {
    let memory = guest(vec![(0, mapping(None, PRIVATE, READ_WRITE))]);
    fill(&memory);
    let mut local = LocalMemory::new(&memory).unwrap();
    local.gates().close(Gate::PagePoison, "poison_val is 0xaaaaaaaa");
    assert_eq!(discard(&mut local, &[range(0, PAGE), range(0, 0)]), [Err(Refusal::Gated); 2]);
    assert_eq!(zeroed(&memory), [0; 0]);
    // Memory was plugged: another map, the same gates.
    let mut replugged = LocalMemory::with_gates(&memory, local.gates()).unwrap();
    assert_eq!(discard(&mut replugged, &[range(0, PAGE)]), [Err(Refusal::Gated)]);
    local.gates().open(Gate::PagePoison);
    assert_eq!(discard(&mut replugged, &[range(0, PAGE)]), [Ok(PAGE)]);
}

/// Says that it drops, and drops nothing.
struct Pretender;

impl Backing for Pretender {
    fn page_bytes(&self) -> u64 {
        PAGE
    }

    fn punch(&self, _: Range<u64>) -> Result<(), Errno> {
        Ok(())
    }

    fn backed_bytes(&self, extent: Range<u64>) -> io::Result<u64> {
        Ok(extent.end - extent.start)
    }

    fn sees_holes(&self) -> bool {
        true
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(BYTES)
    }

    fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn drops_that_free_nothing_close_the_gate() {
    let memory = guest(vec![(0, mapping(None, PRIVATE, READ_WRITE))]);
    let mut local = LocalMemory::new(&memory).unwrap();
    (0..1000).for_each(|_| assert_eq!(discard(&mut local, &[range(0, PAGE)]), [Ok(PAGE)]));
    assert_eq!(local.gates().closed().len(), 0, "honest memory");

    let mut local = LocalMemory::new(&memory).unwrap();
    local.backings = vec![Box::new(Pretender)];
    for _ in 0..FAILED_LOOKS {
        assert_eq!(discard(&mut local, &[range(0, PAGE)]), [Ok(PAGE)]);
    }
    assert_eq!(discard(&mut local, &[range(0, PAGE)]), [Err(Refusal::Gated)]);
    assert!(local.gates().closed().contains_key(&Gate::Ineffective));
}
