//! What every backing has to do, run on each kind of memory this machine has.
//!
//! Tier 2: real files, real system calls. A kind that the machine cannot provide is skipped with a line
//! `SKIPPED …` on stderr. The last test shows that the suite tells a backing that works from one that only says so.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use fpr_host_agent::backing::{Backing, DropOutcome, GuestBacking, MemoryMap, PrivateMemory, Region, choose};
use fpr_protocol::{BackedRange, GuestAddress, HugePageRange, HugePageSize};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::{self, File};
use std::io::Write;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

const HUGE: u64 = 2 << 20;
/// Huge pages in the file under test; one above the bound of a call, so that drops need more than one.
const PAGES: u64 = 6;
/// Guest-physical address of the file's second huge page; the first is not guest memory.
const BASE: u64 = 4 << 30;

fn always() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn size() -> HugePageSize {
    HugePageSize::new(4096, 9).unwrap()
}

fn pages(first: u64, count: u64) -> Range<u64> {
    first * HUGE..(first + count) * HUGE
}

/// Guest memory as a VMM has mapped it, from a file or without one.
struct Memory {
    file: Option<Arc<File>>,
    mapping: Arc<MmapRegion<()>>,
}

impl Memory {
    fn new(file: File) -> Self {
        file.set_len(PAGES * HUGE).unwrap();
        let file = Arc::new(file);
        let bytes = usize::try_from(PAGES * HUGE).unwrap();
        let mapping = MmapRegion::from_file(FileOffset::from_arc(Arc::clone(&file), 0), bytes).unwrap();
        Self { file: Some(file), mapping: Arc::new(mapping) }
    }

    fn private() -> Self {
        let mapping = MmapRegion::new(usize::try_from(PAGES * HUGE).unwrap()).unwrap();
        Self { file: None, mapping: Arc::new(mapping) }
    }

    fn backing(&self) -> Box<dyn Backing> {
        match &self.file {
            Some(file) => choose(file).unwrap(),
            None => Box::new(PrivateMemory::new(Arc::clone(&self.mapping)).unwrap()),
        }
    }

    /// Writes a byte that differs from page to page, and is never zero, all over.
    fn fill(&self) {
        for page in 0..PAGES * HUGE / 4096 {
            self.mapping.as_volatile_slice().write_slice(&[pattern(page); 4096], offset(page)).unwrap();
        }
    }

    /// Whether what the VMM sees is zero in `holes` and untouched everywhere else.
    fn check_content(&self, holes: &[Range<u64>]) -> Result<(), String> {
        let mut seen = [0u8; 4096];
        for page in 0..PAGES * HUGE / 4096 {
            self.mapping.as_volatile_slice().read_slice(&mut seen, offset(page)).unwrap();
            let dropped = holes.iter().any(|hole| hole.contains(&(page * 4096)));
            let wanted = if dropped { 0 } else { pattern(page) };
            if seen != [wanted; 4096] {
                return Err(format!("page {page} reads {:#x}, wanted {wanted:#x}", seen[0]));
            }
        }
        Ok(())
    }

    fn guest(&self) -> GuestBacking {
        let region = Region {
            guest_address: GuestAddress(BASE),
            bytes: (PAGES - 1) * HUGE,
            file: Arc::clone(self.file.as_ref().unwrap()),
            file_offset: HUGE,
        };
        GuestBacking::new(MemoryMap::new(vec![region]).unwrap()).unwrap()
    }

    fn allocated(&self) -> u64 {
        self.backing().allocated_bytes().unwrap()
    }
}

fn pattern(page: u64) -> u8 {
    u8::try_from(page % 251 + 1).unwrap()
}

fn offset(page: u64) -> usize {
    usize::try_from(page * 4096).unwrap()
}

/// Punches `extent` of a filled file and looks at what it says, what it frees and what a VMM reads.
fn check_punch(backing: &dyn Backing, memory: &Memory, extent: Range<u64>) -> Result<(), String> {
    memory.fill();
    let before = backing.allocated_bytes().unwrap();
    if before != PAGES * HUGE {
        return Err(format!("{before} bytes allocated of a full file of {}", PAGES * HUGE));
    }
    backing.punch(extent.clone()).map_err(|errno| format!("punch: {errno}"))?;
    let freed = before - backing.allocated_bytes().unwrap();
    if freed != extent.end - extent.start {
        return Err(format!("{freed} bytes freed of {}", extent.end - extent.start));
    }
    memory.check_content(&[extent])
}

/// Everything a [`Backing`] of a file promises, and what [`GuestBacking`] makes of it.
fn file_conformance(file: File) {
    let memory = Memory::new(file);
    let page = memory.backing().page_bytes();
    conformance(&memory);
    holes_are_seen(&memory);
    drops_reported_ranges(&memory, page);
    stops_between_calls(&memory);
}

/// Everything a [`Backing`] promises.
fn conformance(memory: &Memory) {
    let backing = memory.backing();
    let page = backing.page_bytes();

    assert_eq!(backing.allocated_bytes().unwrap(), 0, "nothing was touched yet");
    assert_eq!(backing.backed_bytes(0..PAGES * HUGE).unwrap(), 0, "nothing was touched yet");
    for extent in [pages(0, 1), pages(2, 3), HUGE..HUGE + page, HUGE - page..HUGE + page, pages(PAGES - 1, 1)] {
        check_punch(backing.as_ref(), memory, extent.clone()).unwrap_or_else(|error| panic!("{extent:?}: {error}"));
    }
    reads_allocate_nothing(backing.as_ref(), memory);
    counts_what_is_backed(backing.as_ref(), memory);
}

fn counts_what_is_backed(backing: &dyn Backing, memory: &Memory) {
    memory.fill();
    backing.punch(pages(2, 2)).unwrap();
    for (extent, wanted) in [(pages(0, 2), 2 * HUGE), (pages(2, 2), 0), (pages(1, 4), 2 * HUGE)] {
        let backed = backing.backed_bytes(extent.clone()).unwrap();
        let wanted = if backing.sees_holes() { wanted } else { extent.end - extent.start };
        assert_eq!(backed, wanted, "{extent:?}");
    }
}

fn reads_allocate_nothing(backing: &dyn Backing, memory: &Memory) {
    backing.punch(0..PAGES * HUGE).unwrap();
    // A hole in a hole is fine.
    backing.punch(pages(1, 2)).unwrap();
    let mut buf = vec![0xff; usize::try_from(HUGE).unwrap()];
    backing.read_at(HUGE, &mut buf).unwrap();
    assert!(buf.iter().all(|byte| *byte == 0), "a hole reads zero");
    assert_eq!(backing.allocated_bytes().unwrap(), 0, "reading a hole must not fault it in");
    memory.mapping.as_volatile_slice().write_slice(b"cookie", offset(600)).unwrap();
    let mut buf = [0; 6];
    backing.read_at(600 * 4096, &mut buf).unwrap();
    assert_eq!(&buf, b"cookie");
    assert!(backing.read_at(PAGES * HUGE - 2, &mut buf).is_err(), "past the end of the file");
}

fn holes_are_seen(memory: &Memory) {
    memory.fill();
    let guest = memory.guest();
    memory.backing().punch(pages(2, 2)).unwrap();
    let whole = HugePageRange { start: GuestAddress(BASE), count: 5 };
    let span = guest.map().locate(whole, size()).unwrap();
    let backed = guest.backed(&span, size(), &mut always).unwrap();
    let run = |page: u64, count: u32| BackedRange {
        range: HugePageRange { start: GuestAddress(BASE + page * HUGE), count },
        backed_bytes: u64::from(count) * HUGE,
    };
    // Pages 1 to 5 of the file are the guest's 0 to 4.
    let wanted = if guest.sees_holes() { vec![run(0, 1), run(3, 2)] } else { vec![run(0, 5)] };
    assert_eq!(backed, wanted);
    assert_eq!(guest.backed(&span, size(), &mut || ControlFlow::Break(())).unwrap(), [], "asked before each huge page");

    // One base page of the guest's page 2.
    memory.mapping.as_volatile_slice().write_slice(&[1], offset(3 * 512 + 7)).unwrap();
    let backed = guest.backed(&span, size(), &mut always).unwrap();
    assert_eq!(backed.iter().map(|run| run.range.count).sum::<u32>(), if guest.sees_holes() { 4 } else { 5 });
    let bytes: u64 = backed.iter().map(|run| run.backed_bytes).sum();
    assert!(bytes >= memory.allocated() - HUGE, "{bytes} bytes are backed besides page 0");
}

fn drops_reported_ranges(memory: &Memory, page: u64) {
    memory.fill();
    let guest = memory.guest();
    let before = guest.allocated_bytes().unwrap();
    let range = |page: u64, count| HugePageRange { start: GuestAddress(BASE + page * HUGE), count };
    // Out of order, adjacent, and one that is refused.
    let report = [range(3, 1), range(1, 2), range(5, 1)];
    let spans: Vec<_> = guest.map().locate_report(&report, size()).into_iter().filter_map(Result::ok).collect();
    let mut calls = 0;
    let mut count = || {
        calls += 1;
        ControlFlow::Continue(())
    };
    let outcomes = guest.drop_spans(&spans, &mut count);
    assert_eq!(outcomes, [HUGE, 2 * HUGE].map(|bytes| DropOutcome::Dropped { bytes }));
    assert_eq!(calls, 1, "adjacent ranges are one call");
    assert_eq!(before - guest.allocated_bytes().unwrap(), 3 * HUGE);
    memory.check_content(&[pages(2, 3)]).unwrap();

    // Not aligned to the backing's pages: inward.
    memory.fill();
    let mut span = guest.map().locate(range(1, 2), size()).unwrap();
    span.extent = span.extent.start + 1..span.extent.end - 1;
    let before = guest.allocated_bytes().unwrap();
    let bytes = 2 * HUGE - 2 * page;
    assert_eq!(guest.drop_spans(std::slice::from_ref(&span), &mut always), [DropOutcome::Dropped { bytes }]);
    assert_eq!(before - guest.allocated_bytes().unwrap(), bytes);
    let hole = 2 * HUGE + page..4 * HUGE - page;
    memory.check_content(std::slice::from_ref(&hole)).unwrap();
}

fn stops_between_calls(memory: &Memory) {
    memory.fill();
    let guest = memory.guest();
    let range = HugePageRange { start: GuestAddress(BASE), count: 5 };
    let span = guest.map().locate(range, size()).unwrap();
    let mut left = 1;
    let mut once = || {
        left -= 1;
        if left < 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcomes = guest.drop_spans(std::slice::from_ref(&span), &mut once);
    assert_eq!(outcomes, [DropOutcome::Stopped { bytes: 4 * HUGE }]);
    memory.check_content(&[pages(1, 4)]).unwrap();

    memory.fill();
    let outcomes = guest.drop_spans(std::slice::from_ref(&span), &mut || ControlFlow::Break(()));
    assert_eq!(outcomes, [DropOutcome::Stopped { bytes: 0 }]);
    memory.check_content(&[]).unwrap();
}

fn memfd(flags: MFdFlags) -> Result<File, Errno> {
    memfd_create(c"guest-memory", flags | MFdFlags::MFD_CLOEXEC).map(File::from)
}

/// Straight to stderr: the test harness swallows what print macros write.
fn skip(what: &str, why: &str) {
    let mut stderr = std::io::stderr();
    writeln!(stderr, "SKIPPED {what}: {why}").unwrap();
}

#[test]
fn private_memory_conforms() {
    conformance(&Memory::private());
}

#[test]
fn memfd_conforms() {
    file_conformance(memfd(MFdFlags::empty()).unwrap());
}

#[test]
fn tmpfs_file_conforms() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    file_conformance(
        File::options().read(true).write(true).create_new(true).open(directory.path().join("ram")).unwrap(),
    );
}

/// A mount for the duration of a test.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, options: &str) -> Result<Self, String> {
        let output = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output();
        match output {
            Ok(output) if output.status.success() => Ok(Self(at.to_owned())),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(format!("mount: {error}")),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn transparent_huge_pages_conform() {
    let directory = tempfile::tempdir().unwrap();
    let _mount = match Mount::tmpfs(directory.path(), "huge=always") {
        Ok(mount) => mount,
        Err(why) => return skip("transparent huge pages", &format!("no tmpfs with huge=always ({why}); run as root")),
    };
    let file = File::options().read(true).write(true).create_new(true).open(directory.path().join("ram")).unwrap();
    file_conformance(file);
}

/// Huge pages in the pool for the duration of a test, and the pool for nobody else who tests on this machine.
struct HugePages {
    before: String,
    _turn: Flock<File>,
}

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    /// Locked in the directory for temporary files by every test that changes the pool.
    const LOCK: &str = "fpr-test-huge-page-pool.lock";

    fn reserve(count: u64) -> Result<Self, String> {
        let lock = File::create(std::env::temp_dir().join(Self::LOCK)).map_err(|error| error.to_string())?;
        let turn = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno.to_string())?;
        let before = fs::read_to_string(Self::COUNT).map_err(|error| format!("{}: {error}", Self::COUNT))?;
        let had: u64 = before.trim().parse().map_err(|error| format!("{before:?}: {error}"))?;
        let pages = Self { before, _turn: turn };
        let wanted = had + count;
        fs::write(Self::COUNT, wanted.to_string()).map_err(|error| format!("{}: {error}", Self::COUNT))?;
        let got = fs::read_to_string(Self::COUNT).unwrap_or_default();
        if got.trim() == wanted.to_string() { Ok(pages) } else { Err(format!("got {} of {wanted}", got.trim())) }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(Self::COUNT, &self.before);
    }
}

#[test]
fn hugetlb_conforms() {
    let _pages = match HugePages::reserve(PAGES) {
        Ok(pages) => pages,
        Err(why) => return skip("hugetlb", &format!("no huge pages of 2 MiB ({why}); run as root with free memory")),
    };
    file_conformance(memfd(MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB).unwrap());
}

/// Says that it dropped, as `MADV_DONTNEED` on a shared mapping does, and drops nothing.
struct Pretender<'a> {
    memory: &'a Memory,
    /// Whether it zeroes the bytes at least.
    zeroes: bool,
}

impl Backing for Pretender<'_> {
    fn page_bytes(&self) -> u64 {
        4096
    }

    fn punch(&self, extent: Range<u64>) -> Result<(), Errno> {
        if self.zeroes {
            let start = usize::try_from(extent.start).unwrap();
            let zeros = vec![0; usize::try_from(extent.end - extent.start).unwrap()];
            self.memory.mapping.as_volatile_slice().write_slice(&zeros, start).unwrap();
        }
        Ok(())
    }

    fn backed_bytes(&self, extent: Range<u64>) -> std::io::Result<u64> {
        Ok(extent.end - extent.start)
    }

    fn sees_holes(&self) -> bool {
        false
    }

    fn allocated_bytes(&self) -> std::io::Result<u64> {
        Ok(self.memory.allocated())
    }

    fn read_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_suite_rejects_a_backing_that_frees_nothing() {
    let memory = Memory::new(memfd(MFdFlags::empty()).unwrap());
    for zeroes in [false, true] {
        let error = check_punch(&Pretender { memory: &memory, zeroes }, &memory, pages(1, 1)).unwrap_err();
        assert!(error.starts_with("0 bytes freed"), "{error}");
    }
    // And content is looked at for itself.
    memory.fill();
    assert!(memory.check_content(&[pages(1, 1)]).is_err());
    memory.backing().punch(pages(1, 1)).unwrap();
    assert!(memory.check_content(&[]).is_err());
}
