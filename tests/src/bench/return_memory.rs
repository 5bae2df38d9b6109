//! `bench return`: how fast, how far and at what price the memory of an ended program comes back to the host.
//!
//! The same guest (2 GiB, 2 virtual CPUs, shared memfd) runs the real `memhog 1500m` under each way of reporting. Host memory is the
//! allocated blocks of the memory file, sampled every 20 ms. Time zero is the moment the host learns of memhog's exit. The configurations
//! alternate, so that a slow spell of the machine hits them all.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::curve::Curve;
use super::report::{self, Metrics, Run, Target, summary};
use super::usage::Usage;
use crate::environment::Environment;
use crate::poll;
use crate::reporting::{Reporting, ReportingVm};
use crate::units::{GIB, MIB, mib};
use crate::vm::Vm;

const GUEST_MEMORY: u64 = 2 * GIB;
const WORKLOAD: &str = "exec memhog 1500m";
/// memhog writes 1500 MiB once; TCG takes 2 to 5 s for it.
const WORKLOAD_DEADLINE: Duration = Duration::from_secs(120);

/// Before the workload starts: the boot is over when host memory holds still this long.
const SETTLED: Duration = Duration::from_secs(2);
const SETTLE_DEADLINE: Duration = Duration::from_secs(60);
/// Stock reporting makes its last pass 11 to 14 s after the exit; all configurations are watched at least this long.
const SHORTEST_WATCH: Duration = Duration::from_secs(20);
const LONGEST_WATCH: Duration = Duration::from_secs(60);
/// The floor is found when memory has not fallen by [`STILL_FALLING`] for this long. Stock passes are 2 s apart.
const FLOOR_HELD: Duration = Duration::from_secs(5);
const STILL_FALLING: u64 = MIB;

/// CPU times are sampled often while the fast configurations work, then rarely.
const DENSE_USAGE: Duration = Duration::from_secs(3);
const DENSE_USAGE_INTERVAL: Duration = Duration::from_millis(50);
const SPARSE_USAGE_INTERVAL: Duration = Duration::from_millis(500);

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// Runs per configuration.
    pub runs: usize,
    /// The configurations, in the order in which they alternate.
    pub configs: Vec<Reporting>,
}

/// Measures, telling `progress` what goes on, and returns the document.
///
/// # Errors
/// A guest or an agent does not start, or a guest does not do its work.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Value> {
    let environment = Environment::get()?;
    let configs = comparable(&options.configs);
    if configs.iter().any(|config| config.uses_generic_qemu()) {
        environment.generic_qemu().context("leave out `kernel` and `stock-generic` with --configs")?;
    }
    let total = options.runs * configs.len();
    let (mut runs, mut qemus) = (Vec::new(), BTreeMap::new());
    for number in 1..=options.runs {
        for &config in &configs {
            let place = format!("[{}/{total}] {config}, run {number}", runs.len() + 1);
            progress(&format!("{place}: booting"));
            let (run, qemu) =
                measure(config, &|what| progress(&format!("{place}: {what}"))).with_context(|| place.clone())?;
            qemus.insert(config.to_string(), qemu);
            progress(&format!("{place}: {}", line(&run.metrics)));
            runs.push(run);
        }
    }
    let mut machine = report::machine(environment);
    // Not all configurations run on the same one.
    machine["qemu_of_config"] = json!(qemus);
    Ok(report::document("return", machine, &runs, &targets(&runs)))
}

/// The configurations, with those they are compared with on the same QEMU.
fn comparable(configs: &[Reporting]) -> Vec<Reporting> {
    let mut configs = configs.to_vec();
    if let (Some(place), false) =
        (configs.iter().position(|&config| config == Reporting::Kernel), configs.contains(&Reporting::StockGeneric))
    {
        configs.insert(place, Reporting::StockGeneric);
    }
    configs
}

/// One run, and what QEMU it was made on.
fn measure(config: Reporting, progress: &dyn Fn(&str)) -> Result<(Run, String)> {
    let guest = config.boot(Vm::builder().memory(GUEST_MEMORY))?;
    let memory = guest.vm.host_memory()?;
    settle(&guest)?;
    let before_bytes = memory.allocated_bytes()?;
    let stalls_before = Stalls::of(&guest)?;

    progress("memhog runs");
    let recording = memory.record();
    let workload = guest.vm.spawn(WORKLOAD)?.wait(WORKLOAD_DEADLINE)?;
    ensure!(workload.status == 0, "memhog failed with status {}: {}", workload.status, workload.stdout);
    progress("memhog has ended");
    let usage = watch(&guest, workload.exited_at)?;
    let samples = recording.stop();

    let curve = Curve::of(&samples, workload.exited_at).context("nothing was recorded after memhog's exit")?;
    let stalls = Stalls::of(&guest)?;
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let used = curve.time_to(100).and_then(|time| Usage::between(&usage, workload.exited_at + time));
    let watched = Usage::between(&usage, workload.exited_at + SHORTEST_WATCH - SPARSE_USAGE_INTERVAL * 2);
    let mut metrics = Metrics::from([
        ("before_bytes", Some(before_bytes as f64)),
        ("peak_bytes", Some(curve.peak_bytes as f64)),
        ("floor_bytes", Some(curve.floor_bytes as f64)),
        ("t50_s", seconds(curve.time_to(50))),
        ("t90_s", seconds(curve.time_to(90))),
        ("t100_s", seconds(curve.time_to(100))),
        ("guest_cpu_s", seconds(used.map(|used| used.guest))),
        ("guest_agent_cpu_s", seconds(used.and_then(|used| used.guest_agent))),
        ("host_cpu_s", seconds(used.and_then(|used| used.host_agent))),
        ("vmm_cpu_s", seconds(used.map(|used| used.vmm))),
        ("guest_cpu_in_20s_s", seconds(watched.map(|used| used.guest))),
        ("compact_stalls", Some((stalls.compaction - stalls_before.compaction) as f64)),
        ("alloc_stalls", Some((stalls.allocation - stalls_before.allocation) as f64)),
        ("kernel_complaints", Some(guest.vm.trouble().len() as f64)),
    ]);
    for name in
        ["huge_pages_reported", "huge_pages_dropped", "huge_pages_refused", "huge_pages_offlined", "huge_pages_claimed"]
    {
        let counter = if config.uses_guest_agent() { Some(guest.counter(name)? as f64) } else { None };
        metrics.insert(name, counter);
    }
    for (name, field) in [
        ("kernel_reported_bytes", "reported_bytes"),
        ("kernel_dropped_bytes", "dropped_bytes"),
        ("kernel_refused_bytes", "refused_bytes"),
    ] {
        let bytes = config.uses_host_agent().then(|| guest.source_bytes("kernel-reported", field)).transpose()?;
        metrics.insert(name, bytes.map(|bytes| bytes as f64));
    }
    let run = Run { config: config.to_string(), metrics, series: curve.points() };
    Ok((run, guest.vm.qemu_version().to_owned()))
}

/// Waits until the boot (and what an agent reports of it) is over.
fn settle(guest: &ReportingVm) -> Result<()> {
    let (mut level, mut since) = (0_u64, Instant::now());
    let look = || {
        let now = guest.vm.host_memory()?.allocated_bytes()?;
        if now.abs_diff(level) > STILL_FALLING {
            (level, since) = (now, Instant::now());
        }
        Ok((since.elapsed(), format!("{} at the moment", mib(now))))
    };
    poll::until("host memory to settle after the boot", SETTLE_DEADLINE, look, |(still, _)| *still >= SETTLED).map(drop)
}

/// Samples CPU usage until host memory has reached its floor.
fn watch(guest: &ReportingVm, since: Instant) -> Result<Vec<Usage>> {
    let mut usage = vec![Usage::sample(guest)?];
    let (mut floor, mut fell_at) = (u64::MAX, since);
    loop {
        let elapsed = since.elapsed();
        std::thread::sleep(if elapsed < DENSE_USAGE { DENSE_USAGE_INTERVAL } else { SPARSE_USAGE_INTERVAL });
        usage.push(Usage::sample(guest)?);
        let now = guest.vm.host_memory()?.allocated_bytes()?;
        if now + STILL_FALLING < floor {
            (floor, fell_at) = (now, Instant::now());
        }
        let held = fell_at.elapsed() >= FLOOR_HELD;
        if (elapsed >= SHORTEST_WATCH && held) || elapsed >= LONGEST_WATCH {
            return Ok(usage);
        }
    }
}

/// How often the guest's kernel made an allocation wait (`compact_stall` and `allocstall_*` of /proc/vmstat).
struct Stalls {
    compaction: u64,
    allocation: u64,
}

impl Stalls {
    fn of(guest: &ReportingVm) -> Result<Self> {
        let vmstat = guest.vm.read("/proc/vmstat")?;
        let sum = |prefix: &str| {
            let values = vmstat
                .lines()
                .filter(|line| line.starts_with(prefix))
                .filter_map(|line| line.split(' ').nth(1)?.parse::<u64>().ok());
            values.sum()
        };
        Ok(Self { compaction: sum("compact_stall "), allocation: sum("allocstall_") })
    }
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let median = |config: Reporting, metric| summary(runs, &config.to_string(), metric).map(|summary| summary.median);
    let ran = |config: &Reporting| runs.iter().any(|run| run.config == config.to_string());
    let mut targets = Vec::new();
    // By the kernel's own pace there is nothing to win, and nothing to lose.
    let wanted = [
        (Reporting::Agent, Reporting::Stock, 0.15),
        (Reporting::AgentClaims, Reporting::Stock, 0.30),
        (Reporting::Kernel, Reporting::StockGeneric, 1.10),
    ];
    for (config, stock, share) in wanted.into_iter().filter(|(config, ..)| ran(config)) {
        let both = |metric| Option::zip(median(config, metric), median(stock, metric));
        let ratio = both("t90_s").map(|(ours, stock)| ours / stock);
        targets.push(Target::at_most(&format!("{config}: t90_s / {stock}'s t90_s"), share, ratio));
        let above = both("floor_bytes").map(|(ours, stock)| ours - stock);
        targets.push(Target::at_most(&format!("{config}: floor_bytes above {stock}'s"), (32 * MIB) as f64, above));
        for metric in ["compact_stalls", "alloc_stalls", "kernel_complaints"] {
            let worst = summary(runs, &config.to_string(), metric).map(|summary| summary.most);
            targets.push(Target::at_most(&format!("{config}: {metric}, worst run"), 0.0, worst));
        }
    }
    targets
}

/// One run for people.
#[must_use]
pub fn line(metrics: &Metrics) -> String {
    let value = |name| metrics.get(name).copied().flatten();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let size = |name| value(name).map_or_else(|| "-".to_owned(), |bytes| mib(bytes as u64));
    let time = |name| value(name).map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.2} s"));
    format!(
        "before {}, peak {}, floor {}; 50 % after {}, 90 % {}, 100 % {}",
        size("before_bytes"),
        size("peak_bytes"),
        size("floor_bytes"),
        time("t50_s"),
        time("t90_s"),
        time("t100_s")
    )
}
