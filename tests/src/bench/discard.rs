//! `bench discard`: how fast memory is dropped through the reporting-queue core, and what the core adds to the system calls.
//!
//! No guest: the part of its kernel is played here, by chains of 32 descriptors of 2 MiB on a virtqueue in the same memory, so that nothing
//! but the host side is measured. The core and a bare loop of the same system calls take turns chain by chain over the same memory, which
//! is filled again between the two halves of a run: every huge page is dropped once by each, and a slow spell of the machine hits both. The
//! pages of a chain are no neighbours, so the core merges nothing and makes exactly the loop's calls.

use std::fs::{self, File};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fpr_host_agent::reporting::{LocalMemory, Processed, ReportingQueue, Source};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::report::{self, Metrics, Run, Target, summary};
use crate::sys::{self, Advice};
use crate::units::{GIB, MIB};

const HUGE: u64 = 2 * MIB;
/// Linux reports 32 ranges at a time (`PAGE_REPORTING_CAPACITY`).
const PER_CHAIN: u64 = 32;
const CHAINS: u64 = 8;
const MEMORY: u64 = CHAINS * PER_CHAIN * HUGE;
/// Where the rings are: a region of their own, far above.
const RINGS: u64 = 64 * GIB;
const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

/// What backs the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Private4k,
    PrivateThp,
    Memfd4k,
    MemfdHuge,
    Hugetlbfs,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Private4k, Self::PrivateThp, Self::Memfd4k, Self::MemfdHuge, Self::Hugetlbfs];

    fn name(self) -> &'static str {
        match self {
            Self::Private4k => "private-4k",
            Self::PrivateThp => "private-thp",
            Self::Memfd4k => "memfd-4k",
            Self::MemfdHuge => "memfd-huge",
            Self::Hugetlbfs => "hugetlbfs",
        }
    }

    fn is_huge(self) -> bool {
        !matches!(self, Self::Private4k | Self::Memfd4k)
    }
}

/// Measures, telling `progress` what goes on, and returns the document.
///
/// # Errors
/// The core does not drop what it should. What the machine cannot do is no error; the document says why.
pub fn run(runs: usize, progress: &dyn Fn(&str)) -> Result<Value> {
    let mut unavailable = serde_json::Map::new();
    let mut benches = Vec::new();
    for kind in Kind::ALL {
        match Bench::new(kind) {
            Ok(bench) => benches.push(bench),
            Err(error) => {
                progress(&format!("{}: not available: {error:#}", kind.name()));
                unavailable.insert(kind.name().to_owned(), format!("{error:#}").into());
            }
        }
    }
    let mut results = Vec::new();
    for number in 1..=runs {
        for bench in &mut benches {
            let metrics = bench.measure().with_context(|| bench.kind.name())?;
            progress(&format!("{}, run {number} of {runs}: {}", bench.kind.name(), line(&metrics)));
            results.push(Run { config: bench.kind.name().to_owned(), metrics, series: Vec::new() });
        }
    }
    let mut document = report::document("discard", report::host(), &results, &targets(&results));
    if let Some(document) = document.as_object_mut() {
        document.insert("unavailable".to_owned(), unavailable.into());
        document.insert("memory_bytes_per_run".to_owned(), json!(2 * MEMORY));
        document.insert("descriptor_bytes".to_owned(), json!(HUGE));
        document.insert("descriptors_per_chain".to_owned(), json!(PER_CHAIN));
    }
    Ok(document)
}

/// A setting of the kernel for the time of the benchmark.
struct Setting {
    path: &'static str,
    before: String,
}

impl Setting {
    fn set(path: &'static str, before: String, value: &str) -> Result<Self> {
        let setting = Self { path, before };
        fs::write(path, value).with_context(|| format!("writing {value:?} to {path}: run as root"))?;
        Ok(setting)
    }

    /// Shared memory may use huge pages where it is advised to.
    fn shmem_advise() -> Result<Self> {
        let text = fs::read_to_string(SHMEM_ENABLED).context(SHMEM_ENABLED)?;
        let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).context("no value is chosen")?.0;
        Self::set(SHMEM_ENABLED, chosen.to_owned(), "advise")
    }

    fn huge_pages(count: u64) -> Result<Self> {
        let before = fs::read_to_string(NR_HUGEPAGES).context(NR_HUGEPAGES)?;
        let wanted = (before.trim().parse::<u64>().context(NR_HUGEPAGES)? + count).to_string();
        let setting = Self::set(NR_HUGEPAGES, before, &wanted)?;
        let got = fs::read_to_string(NR_HUGEPAGES)?;
        ensure!(got.trim() == wanted, "{} of {wanted} huge pages: memory is too fragmented", got.trim());
        Ok(setting)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = fs::write(self.path, &self.before) {
            eprintln!("{} is not restored to {:?}: {error}", self.path, self.before);
        }
    }
}

/// Wall and CPU time of this thread.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    wall: Duration,
    cpu: Duration,
}

impl Cost {
    fn now() -> Result<Self> {
        let read = |clock| clock_gettime(clock).map(Duration::from);
        Ok(Self { wall: read(ClockId::CLOCK_MONOTONIC)?, cpu: read(ClockId::CLOCK_THREAD_CPUTIME_ID)? })
    }

    fn add(&mut self, since: Self) -> Result<()> {
        let now = Self::now()?;
        self.wall += now.wall - since.wall;
        self.cpu += now.cpu - since.cpu;
        Ok(())
    }
}

struct Bench {
    kind: Kind,
    data: Arc<MmapRegion<()>>,
    file: Option<Arc<File>>,
    guest: GuestMemoryMmap<()>,
    queue: Queue,
    available: u16,
    core: ReportingQueue,
    discard: LocalMemory,
    /// Last, so that the memory is gone when it is restored.
    _setting: Option<Setting>,
}

impl Bench {
    fn new(kind: Kind) -> Result<Self> {
        let setting = match kind {
            Kind::MemfdHuge => Some(Setting::shmem_advise()?),
            Kind::Hugetlbfs => Some(Setting::huge_pages(MEMORY / HUGE)?),
            _ => None,
        };
        let bytes = usize::try_from(MEMORY)?;
        let file = match kind {
            Kind::Private4k | Kind::PrivateThp => None,
            Kind::Memfd4k | Kind::MemfdHuge => Some(memfd_create(c"guest-memory", MFdFlags::MFD_CLOEXEC)?),
            Kind::Hugetlbfs => {
                let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
                Some(memfd_create(c"guest-memory", flags)?)
            }
        };
        let file = file.map(|descriptor| Arc::new(File::from(descriptor)));
        if let Some(file) = &file {
            file.set_len(MEMORY)?;
        }
        let data = Arc::new(match &file {
            None => MmapRegion::new(bytes)?,
            Some(file) => MmapRegion::from_file(FileOffset::from_arc(Arc::clone(file), 0), bytes)?,
        });
        match kind {
            Kind::Private4k | Kind::Memfd4k => sys::advise(&data, &(0..MEMORY), Advice::NoHugePage)?,
            Kind::PrivateThp | Kind::MemfdHuge => sys::advise(&data, &(0..MEMORY), Advice::HugePage)?,
            Kind::Hugetlbfs => {}
        }
        let rings = Arc::new(MmapRegion::new(64 << 10)?);
        let region =
            |mapping: &Arc<MmapRegion<()>>, start| GuestRegionMmap::with_arc(Arc::clone(mapping), GuestAddress(start));
        let regions = [region(&data, 0), region(&rings, RINGS)].into_iter().collect::<Option<Vec<_>>>();
        let guest = GuestMemoryMmap::from_regions(regions.context("guest memory")?)?;
        let mut queue = Queue::new(u16::try_from(PER_CHAIN)?)?;
        let half = |address: u64| (u32::try_from(address & 0xffff_ffff).ok(), u32::try_from(address >> 32).ok());
        let (table, available, used) = (half(RINGS), half(RINGS + 0x1000), half(RINGS + 0x2000));
        queue.set_desc_table_address(table.0, table.1);
        queue.set_avail_ring_address(available.0, available.1);
        queue.set_used_ring_address(used.0, used.1);
        queue.set_ready(true);
        let discard = LocalMemory::new(&guest)?;
        let core = ReportingQueue::new(Source::Reported);
        let bench = Self { kind, data, file, guest, queue, available: 0, core, discard, _setting: setting };
        bench.fill()?;
        bench.check_page_size()?;
        bench.loop_over(&(0..CHAINS).flat_map(pages_of).collect::<Vec<_>>())?;
        Ok(bench)
    }

    fn fill(&self) -> Result<()> {
        let block = vec![0xa5; usize::try_from(HUGE)?];
        for page in 0..MEMORY / HUGE {
            self.guest.write_slice(&block, GuestAddress(page * HUGE))?;
        }
        Ok(())
    }

    /// Whether the kernel has given the pages that this configuration is about.
    fn check_page_size(&self) -> Result<()> {
        if self.kind == Kind::Hugetlbfs {
            return Ok(());
        }
        let smaps = fs::read_to_string("/proc/self/smaps")?;
        let huge = huge_bytes(&smaps, self.data.as_ptr() as u64).context("the mapping is not in smaps")?;
        let (wanted, bytes) = if self.kind.is_huge() { (MEMORY, huge) } else { (MEMORY, MEMORY.saturating_sub(huge)) };
        ensure!(bytes * 10 >= wanted * 9, "the kernel gave huge pages for {huge} of {MEMORY} bytes");
        Ok(())
    }

    fn measure(&mut self) -> Result<Metrics> {
        let (mut core, mut bare) = (Cost::default(), Cost::default());
        for half in 0..2 {
            self.fill()?;
            for chain in 0..CHAINS {
                let pages = pages_of(chain);
                if chain % 2 == half {
                    self.publish(&pages)?;
                    let start = Cost::now()?;
                    let processed = self.core.process(&self.guest, &mut self.queue, &mut self.discard);
                    core.add(start)?;
                    ensure!(processed == Processed { chains_returned: 1, more: false, fault: None }, "{processed:?}");
                } else {
                    let start = Cost::now()?;
                    self.loop_over(&pages)?;
                    bare.add(start)?;
                }
            }
            let left = self.discard.allocated_bytes()?;
            // The rings stay.
            ensure!(left <= 64 << 10, "{left} bytes are still backed");
        }
        let refused = &self.core.counters().refused_by_reason;
        ensure!(refused.is_empty(), "refused: {refused:?}");
        Ok(metrics(core, bare))
    }

    /// One chain of device-writable buffers, as `virtballoon_free_page_report` adds it.
    fn publish(&mut self, pages: &[Range<u64>]) -> Result<()> {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        for (index, page) in (0u16..).zip(pages) {
            let next = if usize::from(index) + 1 < pages.len() { NEXT } else { 0 };
            let descriptor =
                Descriptor::new(page.start, u32::try_from(page.end - page.start)?, WRITE | next, index + 1);
            self.guest.write_obj(RawDescriptor::from(descriptor), GuestAddress(RINGS + u64::from(index) * 16))?;
        }
        let slot = u64::from(self.available % self.queue.size());
        self.guest.write_obj(0u16, GuestAddress(RINGS + 0x1000 + 4 + slot * 2))?;
        self.available = self.available.wrapping_add(1);
        self.guest.write_obj(self.available, GuestAddress(RINGS + 0x1000 + 2))?;
        Ok(())
    }

    /// The system calls and nothing else.
    fn loop_over(&self, pages: &[Range<u64>]) -> Result<()> {
        for page in pages {
            match &self.file {
                None => sys::advise(&self.data, page, Advice::DontNeed)?,
                Some(file) => {
                    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                    let (start, bytes) = (i64::try_from(page.start)?, i64::try_from(page.end - page.start)?);
                    fallocate(file.as_ref(), mode, start, bytes)?;
                }
            }
        }
        Ok(())
    }
}

/// Huge pages of a chain, none next to another.
fn pages_of(chain: u64) -> Vec<Range<u64>> {
    (0..PER_CHAIN).map(|i| (i * CHAINS + chain) * HUGE).map(|start| start..start + HUGE).collect()
}

/// Bytes of the mapping around `address` that are mapped by huge pages (proc_pid_smaps(5)).
fn huge_bytes(smaps: &str, address: u64) -> Option<u64> {
    let mut lines = smaps.lines().skip_while(|line| {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let range = range
            .and_then(|(start, end)| Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?));
        !range.is_some_and(|range| range.contains(&address))
    });
    lines.next()?;
    // The fields of one mapping end where the next mapping begins, with VmFlags.
    let fields = lines.take_while(|line| !line.starts_with("VmFlags"));
    let huge = fields.filter_map(|line| {
        let rest = line.strip_prefix("AnonHugePages:").or_else(|| line.strip_prefix("ShmemPmdMapped:"))?;
        rest.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    Some(huge.sum::<u64>() * 1024)
}

#[allow(clippy::cast_precision_loss)]
fn metrics(core: Cost, bare: Cost) -> Metrics {
    let gib = MEMORY as f64 / GIB as f64;
    let huge_pages = (MEMORY / HUGE) as f64;
    let us = |cost: Cost| cost.wall.as_secs_f64() * 1e6 / huge_pages;
    Metrics::from([
        ("core_gib_per_s", Some(gib / core.wall.as_secs_f64())),
        ("loop_gib_per_s", Some(gib / bare.wall.as_secs_f64())),
        ("core_cpu_s_per_gib", Some(core.cpu.as_secs_f64() / gib)),
        ("loop_cpu_s_per_gib", Some(bare.cpu.as_secs_f64() / gib)),
        ("core_us_per_2mib", Some(us(core))),
        ("loop_us_per_2mib", Some(us(bare))),
        ("overhead_us_per_2mib", Some(us(core) - us(bare))),
        ("overhead_percent", Some((us(core) / us(bare) - 1.0) * 100.0)),
    ])
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let target = |kind: Kind| {
        let (metric, wanted) = if kind.is_huge() { ("overhead_us_per_2mib", 1.0) } else { ("overhead_percent", 5.0) };
        let got = summary(runs, kind.name(), metric).map(|summary| summary.median);
        Target::at_most(&format!("{}: {metric}", kind.name()), wanted, got)
    };
    Kind::ALL.into_iter().map(target).collect()
}

fn line(metrics: &Metrics) -> String {
    let value = |name| metrics.get(name).copied().flatten().unwrap_or(f64::NAN);
    format!(
        "core {:.1} GiB/s, loop {:.1} GiB/s, {:+.2} us per 2 MiB ({:+.1} %)",
        value("core_gib_per_s"),
        value("loop_gib_per_s"),
        value("overhead_us_per_2mib"),
        value("overhead_percent")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_of_one_mapping_are_told_from_its_neighbours() {
        let mapping = |range, anonymous, shared| {
            let counts = format!("AnonHugePages: {anonymous} kB\nShmemPmdMapped: {shared} kB\n");
            format!("{range} rw-p 00000000 00:00 0 \nSize: 8 kB\n{counts}VmFlags: rd\n")
        };
        let smaps = mapping("1000-3000", 2, 0) + &mapping("3000-5000", 0, 4) + &mapping("5000-6000", 8, 8);
        assert_eq!(huge_bytes(&smaps, 0x2fff), Some(2048));
        assert_eq!(huge_bytes(&smaps, 0x3000), Some(4096));
        assert_eq!(huge_bytes(&smaps, 0x6000), None);
    }

    #[test]
    fn chains_cover_all_memory_once_and_nothing_is_adjacent() {
        let mut all: Vec<u64> = (0..CHAINS).flat_map(pages_of).map(|page| page.start).collect();
        all.sort_unstable();
        assert_eq!(all, (0..MEMORY / HUGE).map(|page| page * HUGE).collect::<Vec<_>>());
        assert!((0..CHAINS).all(|chain| pages_of(chain).windows(2).all(|pair| pair[0].end < pair[1].start)));
    }
}
