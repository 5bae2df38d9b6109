//! What the kernel's counters hold back per CPU or per thread, and so by how much a figure can be wrong.
//!
//! A kernel that adds to one counter from many CPUs lets each CPU keep a small amount back. A reader that does not ask
//! every CPU is wrong by what they keep. `docs/accounting.md` derives each bound. Kernels of distributions carry changes
//! that their release does not show, so a bound here is the larger one wherever there is doubt.

use super::parse;
use super::{Absent, AbsentReason, Precision, Roots};
use nix::unistd::{SysconfVar, sysconf};
use std::fs;

/// Counters that make up a resident set: file, anonymous and shmem pages (`get_mm_rss` in `include/linux/mm.h`).
pub(super) const RSS_COUNTERS: u64 = 3;
/// Counters that make up `VmSwap`: `MM_SWAPENTS`.
pub(super) const SWAP_COUNTERS: u64 = 1;
/// Counters that make up anonymous memory, resident and swapped out: `MM_ANONPAGES` and `MM_SWAPENTS`.
pub(super) const ANON_COUNTERS: u64 = 2;

/// Page faults of a thread whose counts it may still hold before Linux 6.2: `TASK_RSS_EVENTS_THRESH` is 64 and
/// `check_sync_rss_stat` in `mm/memory.c` compares after counting.
const FAULTS_PER_THREAD: u64 = 65;
/// What one fault maps at most, if the pages are in a file: `fault_around_bytes` in `mm/memory.c`.
const FAULT_AROUND_BYTES: u64 = 64 << 10;
/// Threads of a process whose count was not read: `PID_MAX_LIMIT` on small machines (`include/linux/threads.h`).
const UNKNOWN_THREADS: u64 = 1 << 15;

/// Pages that a CPU may hold charged to a cgroup and unused: `MEMCG_CHARGE_BATCH` in `include/linux/memcontrol.h`, 32
/// before Linux 6.1.
const CHARGE_BATCH: u64 = 64;

/// `major.minor.patch` at the head of `osrelease`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Release(u32, u32, u32);

impl Release {
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.trim().split(|c: char| !c.is_ascii_digit());
        let mut next = || numbers.next()?.parse().ok();
        // "7.2-rc1" has no third number that means a patch level.
        let (major, minor) = (next()?, next()?);
        let patch = text.trim().splitn(3, '.').nth(2).and_then(|rest| {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok()
        });
        Some(Self(major, minor, patch.unwrap_or(0)))
    }
}

/// How `VmRSS`, `statm` and `VmSwap` come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counting {
    /// `task_mem` and `task_statm` sum over all CPUs (commit 82241a83cd15, Linux 6.16; stable 6.15.7 and 6.12.39).
    Summed,
    /// A counter per mm with parts per CPU that are not summed (commit f1a7941243c1, Linux 6.2).
    PerCpu,
    /// Parts per thread (`SPLIT_RSS_COUNTING`), unless the distribution has taken over the above.
    PerThreadOrCpu,
}

/// What must be known of the kernel to say how true a figure is.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    counting: Counting,
    possible_cpus: Result<u64, Absent>,
    pub(super) page_bytes: u64,
}

impl Kernel {
    pub(super) fn look(roots: &Roots) -> Self {
        let release = fs::read_to_string(roots.proc.join("sys/kernel/osrelease")).ok();
        let counting = match release.as_deref().and_then(Release::parse) {
            Some(release) if release >= Release(6, 16, 0) => Counting::Summed,
            Some(release) if (Release(6, 15, 7)..Release(6, 16, 0)).contains(&release) => Counting::Summed,
            Some(release) if (Release(6, 12, 39)..Release(6, 13, 0)).contains(&release) => Counting::Summed,
            Some(release) if release >= Release(6, 2, 0) => Counting::PerCpu,
            Some(_) | None => Counting::PerThreadOrCpu,
        };
        let path = roots.sys.join("devices/system/cpu/possible");
        let possible_cpus = fs::read_to_string(&path)
            .map_err(|error| {
                let missing = "the number of CPUs is not known, and with it the error bound; mount sysfs";
                Absent::unreadable(&path, &error, (AbsentReason::NotSupported, missing))
            })
            .and_then(|list| parse::cpus(&list).map_err(|malformed| Absent::malformed(&path, &malformed)));
        Self { counting, possible_cpus, page_bytes: page_bytes() }
    }

    /// Whether a resident set is summed over all CPUs.
    pub(super) fn sums_precisely(&self) -> bool {
        self.counting == Counting::Summed
    }

    /// Whether the number of threads decides the bound.
    pub(super) fn counts_per_thread(&self) -> bool {
        self.counting == Counting::PerThreadOrCpu
    }

    /// How true the sum of `counters` counters of an mm is, read from `status` or `statm`.
    pub(super) fn mm_counters(&self, counters: u64, threads: Option<u64>) -> Result<Precision, Absent> {
        if self.counting == Counting::Summed {
            return Ok(Precision::Precise);
        }
        // `compute_batch_value` in `lib/percpu_counter.c` takes the CPUs that are online; with all that are possible the
        // bound also holds for what a CPU kept from the time before others went.
        let cpus = self.possible_cpus.clone()?;
        let batch = (cpus * 2).max(32);
        let mut pages = counters.saturating_mul(cpus).saturating_mul(batch);
        if self.counting == Counting::PerThreadOrCpu {
            let per_thread = FAULTS_PER_THREAD * (FAULT_AROUND_BYTES / self.page_bytes).max(1);
            pages = pages.max(threads.unwrap_or(UNKNOWN_THREADS).saturating_mul(per_thread));
        }
        Ok(Precision::Approximate { error_bound_bytes: pages.saturating_mul(self.page_bytes) })
    }

    /// How true the usage of a cgroup is whose subtree has `cgroups` cgroups, itself included.
    pub(super) fn charges(&self, cgroups: u64) -> Result<Precision, Absent> {
        // Each CPU keeps a batch per cgroup, and what it keeps for a child is charged to the parents, too. One page more
        // for the kernel's own objects, which are charged in bytes (`obj_stock` in `mm/memcontrol.c`).
        let pages = self.possible_cpus.clone()?.saturating_mul(CHARGE_BATCH + 1).saturating_mul(cgroups.max(1));
        Ok(Precision::Approximate { error_bound_bytes: pages.saturating_mul(self.page_bytes) })
    }
}

fn page_bytes() -> u64 {
    // POSIX requires it; 4 KiB is the smallest there is.
    let bytes = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).filter(|bytes| *bytes > 0).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn kernel(release: Option<&str>, cpus: &str) -> Kernel {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().join("proc"), sys: dir.path().join("sys"), cgroup: dir.path().into() };
        fs::create_dir_all(roots.proc.join("sys/kernel")).unwrap();
        fs::create_dir_all(roots.sys.join("devices/system/cpu")).unwrap();
        if let Some(release) = release {
            fs::write(roots.proc.join("sys/kernel/osrelease"), release).unwrap();
        }
        fs::write(roots.sys.join("devices/system/cpu/possible"), cpus).unwrap();
        Kernel { page_bytes: 4096, ..Kernel::look(&roots) }
    }

    fn bound(kernel: &Kernel, threads: Option<u64>) -> Option<u64> {
        match kernel.mm_counters(RSS_COUNTERS, threads).unwrap() {
            Precision::Precise => None,
            Precision::Approximate { error_bound_bytes } => Some(error_bound_bytes),
        }
    }

    #[test]
    fn releases_that_sum() {
        for release in
            ["6.16.0", "6.18.44-cloud-amd64", "7.1", "7.2-rc3\n", "6.15.7", "6.15.11-cachyos", "6.12.39+deb13-amd64"]
        {
            assert!(kernel(Some(release), "0-1").sums_precisely(), "{release}");
        }
        for release in
            ["6.15.6", "6.12.38+deb13", "6.12.0-55.el10", "6.14.0-29-generic", "6.2.0", "6.1.0-40-amd64", "junk"]
        {
            assert!(!kernel(Some(release), "0-1").sums_precisely(), "{release}");
        }
        assert!(!kernel(None, "0-1").sums_precisely());
    }

    #[test]
    fn bounds_follow_the_batch_rule() {
        // 2 CPUs: batch 32. 256 CPUs: batch 512, the gigabyte and more of the report to the kernel's developers.
        assert_eq!(bound(&kernel(Some("6.6.0"), "0-1"), None), Some(3 * 2 * 32 * 4096));
        assert_eq!(bound(&kernel(Some("6.6.0"), "0-255"), None), Some(3 * 256 * 512 * 4096));
        assert_eq!(bound(&kernel(Some("6.18.1"), "0-255"), None), None);
        // Before 6.2 both ways of counting are thinkable.
        assert_eq!(bound(&kernel(Some("6.1.0"), "0-1"), Some(10)), Some(10 * 65 * 16 * 4096));
        assert_eq!(bound(&kernel(Some("5.14.0-427.el9"), "0-255"), Some(10)), Some(3 * 256 * 512 * 4096));
        assert!(bound(&kernel(Some("6.1.0"), "0-1"), None) > bound(&kernel(Some("6.1.0"), "0-1"), Some(1000)));
    }

    #[test]
    fn charges_are_held_per_cpu_and_cgroup() {
        let kernel = kernel(Some("6.18.0"), "0-3");
        assert_eq!(kernel.charges(1).unwrap(), Precision::Approximate { error_bound_bytes: 4 * 65 * 4096 });
        assert_eq!(kernel.charges(3).unwrap(), Precision::Approximate { error_bound_bytes: 3 * 4 * 65 * 4096 });
    }

    #[test]
    fn without_the_number_of_cpus_there_is_no_bound() {
        let old = kernel(Some("6.6.0"), "junk");
        assert_eq!(old.mm_counters(1, None).unwrap_err().reason, AbsentReason::Malformed);
        assert_eq!(kernel(Some("6.18.0"), "junk").mm_counters(1, None), Ok(Precision::Precise), "none is needed");
    }
}
