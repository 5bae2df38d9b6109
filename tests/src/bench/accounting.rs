//! `bench accounting`: what each way to read a VM's memory says, and what it costs, on real VMs.
//!
//! Three guests, each in a memory cgroup of its own: private memory, a shared memfd, and private memory several times as large. In each,
//! memhog writes the same bytes to about half of its memory and ends; nobody in the guest touches them again. All are read while KSM is off,
//! and again when it has merged what it can: memhog's pages are all equal. Readers keep their files open, as the daemon's do.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fpr_host_agent::accounting::{Figure, Method, Reader, Reading, Roots, Subject};
use serde_json::{Map, Value, json};

use super::aftermath::Aftermath;
use super::cgroup::Cgroups;
use super::report::{self, Metrics, Run, Target};
use crate::environment::Environment;
use crate::poll;
use crate::units::{GIB, MIB, mib};
use crate::vm::{MemoryBackend, Vm};

const KSM: &str = "/sys/kernel/mm/ksm";
/// Reads per method and VM; fewer where they take longer than [`BUDGET`] together.
const READS: usize = 1000;
const LEAST_READS: usize = 20;
const BUDGET: Duration = Duration::from_secs(10);
/// What the targets allow a read that must not depend on the VM's size.
const READ_US: f64 = 20.0;
/// How much of what KSM has merged, by PSS, the cgroup's usage may not show. The two differ by tens of MiB anyhow: QEMU's own file is charged
/// to whoever read it first, and page tables only to the cgroup. So the difference is set against what was merged.
const UNSEEN: f64 = 0.05;
const MERGE_DEADLINE: Duration = Duration::from_secs(180);

/// A VM to be measured.
struct Guest {
    name: &'static str,
    backend: MemoryBackend,
    memory: u64,
    /// What memhog writes.
    hog: u64,
}

const GUESTS: [Guest; 3] = [
    Guest { name: "private", backend: MemoryBackend::Anonymous, memory: GIB, hog: 512 * MIB },
    Guest { name: "memfd", backend: MemoryBackend::SharedMemfd, memory: GIB, hog: 512 * MIB },
    Guest { name: "large", backend: MemoryBackend::Anonymous, memory: 5 * GIB, hog: 4 * GIB },
];

/// Measures, telling `progress` what goes on, and returns the document.
///
/// # Errors
/// Not root, no memory cgroups, no KSM, or a guest does not come up.
pub fn run(progress: &dyn Fn(&str)) -> Result<Value> {
    let ksm = Ksm::off()?;
    let cgroups = Cgroups::new("fpr-bench")?;
    let environment = Environment::get()?;
    let mut guests = Vec::new();
    for guest in &GUESTS {
        progress(&format!("{}: booting {} and filling {}", guest.name, mib(guest.memory), mib(guest.hog)));
        let vm = Vm::builder()
            .memory(guest.memory)
            .vcpus(1)
            .backend(guest.backend)
            .cgroup(&cgroups.make(guest.name)?)
            .boot()
            .with_context(|| guest.name)?;
        vm.run(&format!("memhog {}m >/dev/null", guest.hog / MIB))?;
        let subject = Subject { pid: Some(i32::try_from(vm.pid())?), ..Subject::default() };
        guests.push((guest, vm, Reader::new(&Roots::default(), &subject)));
    }
    let mut measured = Measured::default();
    for (guest, _, reader) in &mut guests {
        measured.measure(guest.name, reader, progress);
    }
    ksm.on()?;
    for (guest, _, reader) in guests.iter_mut().filter(|(guest, ..)| guest.backend == MemoryBackend::Anonymous) {
        progress(&format!("{}: waiting for KSM to merge", guest.name));
        let merged = |bytes: &u64| *bytes >= guest.hog / 10 * 9;
        let look = || Ok(reader.read(Method::Ksm).context("ksm")?.bytes);
        poll::until("KSM to merge what memhog wrote", MERGE_DEADLINE, look, merged)?;
    }
    // Merging goes on for a while after nine tenths; what is read with it running would disagree by what it merges meanwhile.
    ksm.pause()?;
    for (guest, _, reader) in &mut guests {
        measured.measure(with_ksm(guest.name), reader, progress);
    }
    let mut document =
        report::document("accounting", report::machine(environment), &measured.runs, &measured.targets());
    if let Some(document) = document.as_object_mut() {
        document.insert("reads_per_method".to_owned(), json!(READS));
        document.insert("sources".to_owned(), measured.sources.into());
        document.insert("absent".to_owned(), measured.absent.into());
        let sizes = |of: fn(&Guest) -> u64| -> Map<String, Value> {
            GUESTS.iter().map(|guest| (guest.name.to_owned(), of(guest).into())).collect()
        };
        document.insert("guest_bytes".to_owned(), sizes(|guest| guest.memory).into());
        document.insert("memhog_bytes".to_owned(), sizes(|guest| guest.hog).into());
    }
    // Before KSM is what it was: merged pages of a running guest would be split again.
    drop(guests);
    Ok(document)
}

fn with_ksm(name: &str) -> &'static str {
    match name {
        "private" => "private+ksm",
        "memfd" => "memfd+ksm",
        _ => "large+ksm",
    }
}

/// Names of a method's metrics.
fn names(method: Method) -> [&'static str; 4] {
    match method {
        Method::Rss => ["rss_bytes", "rss_read_p50_us", "rss_read_p99_us", "rss_reads"],
        Method::Pss => ["pss_bytes", "pss_read_p50_us", "pss_read_p99_us", "pss_reads"],
        Method::Cgroup => ["cgroup_bytes", "cgroup_read_p50_us", "cgroup_read_p99_us", "cgroup_reads"],
        Method::RssCgroup => {
            ["rss_cgroup_bytes", "rss_cgroup_read_p50_us", "rss_cgroup_read_p99_us", "rss_cgroup_reads"]
        }
        Method::Backing => ["backing_bytes", "backing_read_p50_us", "backing_read_p99_us", "backing_reads"],
        Method::Swap => ["swap_bytes", "swap_read_p50_us", "swap_read_p99_us", "swap_reads"],
        Method::Ksm => ["ksm_bytes", "ksm_read_p50_us", "ksm_read_p99_us", "ksm_reads"],
        Method::Thp => ["thp_bytes", "thp_read_p50_us", "thp_read_p99_us", "thp_reads"],
    }
}

#[derive(Default)]
struct Measured {
    runs: Vec<Run>,
    sources: Map<String, Value>,
    absent: Map<String, Value>,
}

impl Measured {
    fn measure(&mut self, config: &str, reader: &mut Reader, progress: &dyn Fn(&str)) {
        let mut metrics = Metrics::new();
        let mut absent = Map::new();
        for method in Method::ALL {
            progress(&format!("{config}: reading {}", method.word()));
            let [bytes, median, p99, reads] = names(method);
            match series(|| reader.read(method)) {
                Ok((figure, times)) => {
                    self.sources.insert(method.word().to_owned(), figure.source.into());
                    metrics.extend([
                        (bytes, Some(as_f64(figure.bytes))),
                        (median, quantile(&times, 50)),
                        (p99, quantile(&times, 99)),
                        (reads, Some(as_f64(times.len() as u64))),
                    ]);
                }
                Err(reason) => {
                    metrics.extend([(bytes, None), (median, None), (p99, None), (reads, None)]);
                    absent.insert(method.word().to_owned(), format!("{reason:#}").into());
                }
            }
        }
        if let Ok(cache) = reader.page_cache() {
            metrics.insert("cgroup_page_cache_bytes", Some(as_f64(cache.bytes)));
        }
        self.absent.insert(config.to_owned(), absent.into());
        self.runs.push(Run { config: config.to_owned(), metrics, series: Vec::new() });
    }

    fn targets(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        let value = |run: &Run, metric| run.metrics.get(metric).copied().flatten();
        for run in &self.runs {
            let name = &run.config;
            targets.push(Target::at_most(
                &format!("{name}: cgroup_read_p50_us"),
                READ_US,
                value(run, "cgroup_read_p50_us"),
            ));
            if name.starts_with("memfd") {
                let got = value(run, "backing_read_p50_us");
                targets.push(Target::at_most(&format!("{name}: backing_read_p50_us"), READ_US, got));
            }
            let guest = GUESTS.iter().find(|guest| *name == with_ksm(guest.name));
            let Some(guest) = guest.filter(|guest| guest.backend == MemoryBackend::Anonymous) else { continue };
            let unseen = value(run, "cgroup_bytes").zip(value(run, "pss_bytes")).zip(value(run, "rss_bytes"));
            let unseen = unseen.map(|((cgroup, pss), rss)| (cgroup - pss).abs() / (rss - pss));
            let what = format!("{name}: cgroup differs from pss by this share of what pss sees merged");
            targets.push(Target::at_most(&what, UNSEEN, unseen));
            let unmerged = value(run, "ksm_bytes").map(|merged| 1.0 - merged / as_f64(guest.hog));
            targets.push(Target::at_most(&format!("{name}: share of memhog's memory not merged"), 0.1, unmerged));
        }
        targets
    }
}

/// Reads again and again; the last figure and the times, sorted.
fn series(mut read: impl FnMut() -> Reading) -> Result<(Figure, Vec<Duration>)> {
    // The first opens files and is not counted: the daemon does that once.
    let mut last = read()?;
    let (start, mut times) = (Instant::now(), Vec::with_capacity(READS));
    while times.len() < READS && (times.len() < LEAST_READS || start.elapsed() < BUDGET) {
        last = read()?;
        times.push(last.read);
    }
    times.sort();
    Ok((last, times))
}

/// In microseconds.
fn quantile(sorted: &[Duration], percent: usize) -> Option<f64> {
    let index = (sorted.len() * percent).div_ceil(100).checked_sub(1)?;
    sorted.get(index).map(|time| time.as_secs_f64() * 1e6)
}

#[allow(clippy::cast_precision_loss)] // 2^52 bytes at most.
fn as_f64(number: u64) -> f64 {
    number as f64
}

/// The host's KSM, put back as it was when this is dropped or the process ends otherwise.
struct Ksm {
    _restore: Aftermath,
}

impl Ksm {
    /// Switches it off, with settings for later that merge a few GiB in seconds.
    fn off() -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "KSM can be switched by root only: run it with sudo");
        let names = ["run", "pages_to_scan", "sleep_millisecs", "smart_scan"];
        let mut arguments = vec![KSM.to_owned()];
        for name in names {
            let path = PathBuf::from(KSM).join(name);
            // `smart_scan` is there since Linux 6.7; the others always are, with CONFIG_KSM.
            if let Ok(value) = fs::read_to_string(&path) {
                arguments.push(format!("{name}={}", value.trim()));
            }
        }
        ensure!(arguments.len() > 2, "{KSM}: this kernel has no KSM: use one with CONFIG_KSM");
        // If it was off, nothing was merged: 2 lets go of what the VMs left behind, which only ksmd would do otherwise.
        let restore = r#"dir=$1; shift; [ "$1" != run=0 ] || echo 2 >"$dir/run"; for pair; do printf %s "${pair#*=}" >"$dir/${pair%%=*}" || status=1; done; exit ${status:-0}"#;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let ksm = Self { _restore: Aftermath::new(restore, &arguments)? };
        // 2 splits what is merged, so that nothing is at the start.
        set("run", "2")?;
        set("run", "0")?;
        set("pages_to_scan", "20000")?;
        set("sleep_millisecs", "5")?;
        Ok(ksm)
    }

    fn on(&self) -> Result<()> {
        set("run", "1")
    }

    /// What is merged stays so.
    fn pause(&self) -> Result<()> {
        set("run", "0")
    }
}

fn set(name: &str, value: &str) -> Result<()> {
    let path = PathBuf::from(KSM).join(name);
    fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_sorted_times() {
        let times: Vec<Duration> = (1..=1000).map(Duration::from_micros).collect();
        assert_eq!((quantile(&times, 50), quantile(&times, 99)), (Some(500.0), Some(990.0)));
        assert_eq!((quantile(&times[..1], 99), quantile(&[], 50)), (Some(1.0), None));
    }

    #[test]
    fn a_target_without_a_value_is_not_met() {
        let run = Run { config: "large+ksm".to_owned(), metrics: Metrics::new(), series: Vec::new() };
        let measured = Measured { runs: vec![run], ..Measured::default() };
        let targets = measured.targets();
        assert!(targets.len() == 3 && targets.iter().all(|target| !target.met), "{targets:?}");
    }
}
