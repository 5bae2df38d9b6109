//! `bench rank`: choosing the one to ask for memory on precise figures, among 40 and 10,000 real processes and cgroups.
//!
//! The readers and the order are the product's. The kernel's own figures for the same choice (OOM killer on precise sums:
//! 0.5 ms and 80 ms, on 256 CPUs) are the limits. Each process has a cgroup of its own where the machine can do that. The
//! one that holds most is known, and each choice has to find it.

use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use fpr_host_agent::accounting::books::{Asked, Books};
use fpr_host_agent::accounting::cost::{self, Basis, Estimate};
use fpr_host_agent::accounting::rank::{Candidate, Ranked, first};
use fpr_host_agent::accounting::task::INTERVAL;
use fpr_host_agent::accounting::{Absent, AbsentReason, Method, Precision, Reader, Roots, Subject};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use serde_json::Value;

use super::cgroup::Cgroups;
use super::report::{self, Metrics, Run, Target, summary};
use crate::crowd::Crowd;

/// How many, choices per run, and the most that a choice may take.
const SIZES: [(usize, usize, f64); 2] = [(40, 500, 0.5), (10_000, 100, 80.0)];

/// Descriptors that a reader keeps, at most, and what else the process has open.
const DESCRIPTORS: (u64, u64) = (4, 100);

/// Pages that all but the first candidate hold, and what that one holds: more than what each has inherited and shares with
/// all others, which its upper bound counts in full.
const PAGES: std::ops::Range<usize> = 8..40;
const MOST_PAGES: usize = 4096;

/// VMs of the daemon's tick, ticks per run, and what the configuration is called.
const TICK_VMS: usize = 200;
const TICKS: usize = 60;
const TICK: &str = "tick-200";

/// By which figure is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// Resident set: `statm`, precise on this kernel or confirmed by `smaps_rollup`.
    Rss,
    /// Anonymous memory and swap by their share: bounds from `status`, then `smaps_rollup` of who may be first.
    Share,
    /// Charge of the cgroup, which is named.
    Cgroup,
    /// The same, found by way of the process, as the daemon does: each read looks whether the process is still in it. The
    /// kernel answers that under one lock for the machine (`proc_cgroup_show` in `kernel/cgroup/cgroup.c`).
    CgroupOfProcess,
}

impl By {
    const ALL: [Self; 4] = [Self::Rss, Self::Share, Self::Cgroup, Self::CgroupOfProcess];

    fn name(self) -> &'static str {
        match self {
            Self::Rss => "rss",
            Self::Share => "share",
            Self::Cgroup => "cgroup",
            Self::CgroupOfProcess => "checked",
        }
    }

    fn cheap(self, reader: &mut Reader) -> Result<Estimate, Absent> {
        match self {
            Self::Rss => {
                let figure = reader.read(Method::Rss)?;
                let error = match figure.precision {
                    Precision::Precise => 0,
                    Precision::Approximate { error_bound_bytes } => error_bound_bytes,
                };
                let (low_bytes, high_bytes) = (figure.bytes.saturating_sub(error), figure.bytes.saturating_add(error));
                Ok(Estimate { basis: Basis::Process, low_bytes, high_bytes })
            }
            Self::Share => cost::held(reader),
            Self::Cgroup | Self::CgroupOfProcess => cost::estimate(reader),
        }
    }

    fn precise(self, reader: &mut Reader) -> Result<u64, Absent> {
        match self {
            Self::Rss => Ok(reader.read_precise(Method::Rss)?.bytes),
            Self::Share => cost::held_precise(reader),
            Self::Cgroup | Self::CgroupOfProcess => Ok(cost::precise(reader)?.high_bytes),
        }
    }

    fn subject(self, pid: i32, cgroup: Option<&PathBuf>) -> Subject {
        match self {
            Self::Cgroup => Subject { cgroup: cgroup.cloned(), ..Subject::default() },
            Self::Rss | Self::Share | Self::CgroupOfProcess => Subject { pid: Some(pid), ..Subject::default() },
        }
    }
}

/// The processes, and after them the cgroups, which can be removed when nobody is in them.
struct Candidates {
    crowd: Crowd,
    cgroups: Option<(Cgroups, Vec<PathBuf>)>,
}

impl Candidates {
    fn subjects(&self, by: By) -> Vec<Subject> {
        let pids = self.crowd.pids.iter().enumerate();
        pids.map(|(number, pid)| by.subject(*pid, self.cgroups.as_ref().and_then(|(_, of)| of.get(number)))).collect()
    }
}

/// Measures, telling `progress` what goes on, and returns the document.
///
/// # Errors
/// The machine does not allow as many processes or descriptors, or a choice was wrong.
pub fn run(runs: usize, progress: &dyn Fn(&str)) -> Result<Value> {
    raise_descriptor_limit();
    let mut results = Vec::new();
    let mut unavailable = serde_json::Map::new();
    for (count, choices, _) in SIZES {
        progress(&format!("{count} processes"));
        let winner = count / 2;
        let mut pages: Vec<usize> = PAGES.cycle().take(count).collect();
        pages[winner] = MOST_PAGES;
        let mut candidates = Candidates { crowd: Crowd::new(&pages)?, cgroups: None };
        match place(&candidates.crowd.pids) {
            Ok(cgroups) => candidates.cgroups = Some(cgroups),
            Err(error) => {
                progress(&format!("no cgroups: {error:#}"));
                unavailable.insert(format!("cgroup-{count}"), format!("{error:#}").into());
            }
        }
        candidates.crowd.hold()?;
        for by in By::ALL {
            if matches!(by, By::Cgroup | By::CgroupOfProcess) && candidates.cgroups.is_none() {
                continue;
            }
            let subjects = candidates.subjects(by);
            let config = format!("{}-{count}", by.name());
            let metrics = measure(by, &subjects, &name(winner), runs, choices, &|number, metrics| {
                progress(&format!("{config}, run {number} of {runs}: {metrics:?}"));
            });
            for metrics in metrics.with_context(|| config.clone())? {
                results.push(Run { config: config.clone(), metrics, series: Vec::new() });
            }
        }
    }
    progress("ticks of the daemon's accounting");
    for metrics in ticks(runs)? {
        results.push(Run { config: TICK.to_owned(), metrics, series: Vec::new() });
    }
    let mut document = report::document("rank", report::host(), &results, &targets(&results));
    if let Some(document) = document.as_object_mut() {
        document.insert("unavailable".to_owned(), unavailable.into());
    }
    Ok(document)
}

fn targets(results: &[Run]) -> Vec<Target> {
    let mut targets = Vec::new();
    for (count, _, wanted) in SIZES {
        for by in [By::Rss, By::Cgroup] {
            let config = format!("{}-{count}", by.name());
            let got = summary(results, &config, "median_ms").map(|summary| summary.median);
            targets.push(Target::at_most(&format!("{config} median_ms"), wanted, got));
        }
    }
    let name = format!("{TICK} cpu_ms: 0.5 % of a CPU every {} s", INTERVAL.as_secs());
    targets.push(Target::at_most(&name, 25.0, summary(results, TICK, "cpu_ms").map(|summary| summary.median)));
    targets
}

fn name(number: usize) -> String {
    format!("vm{number:05}")
}

/// What the daemon reads every 5 s, for 200 VMs that have no cgroup of their own and a budget.
fn ticks(runs: usize) -> Result<Vec<Metrics>> {
    let mut crowd = Crowd::new(&[PAGES.start; TICK_VMS])?;
    crowd.hold()?;
    let asked = || {
        let vms = crowd.pids.iter().enumerate();
        vms.map(|(number, pid)| Asked {
            name: name(number),
            budget_bytes: Some(1 << 40),
            subject: Some(Subject { pid: Some(*pid), ..Subject::default() }),
        })
    };
    let mut books = Books::new(Roots::default());
    let mut now = Duration::ZERO;
    books.tick(asked().collect(), now);
    let mut all_metrics = Vec::new();
    for _ in 0..runs {
        let mut times = Vec::new();
        let before = cpu()?;
        for _ in 0..TICKS {
            now += INTERVAL;
            let start = Instant::now();
            let (figures, slow) = books.tick(asked().collect(), now);
            times.push(start.elapsed());
            ensure!(
                figures.len() == TICK_VMS && slow.is_empty(),
                "{} figures, {} slow reads",
                figures.len(),
                slow.len()
            );
        }
        all_metrics.push(metrics(&mut times, 0, (before, cpu()?)));
    }
    Ok(all_metrics)
}

/// A cgroup for each.
fn place(pids: &[i32]) -> Result<(Cgroups, Vec<PathBuf>)> {
    let cgroups = Cgroups::new("fpr-bench-rank")?;
    let mut directories = Vec::new();
    for (number, pid) in pids.iter().enumerate() {
        let directory = cgroups.make(&name(number))?;
        let procs = directory.join("cgroup.procs");
        fs::write(&procs, pid.to_string()).with_context(|| procs.display().to_string())?;
        directories.push(directory);
    }
    Ok((cgroups, directories))
}

/// What a reading thread is asked.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// The cheap figures of all its candidates.
    Cheap,
    /// The precise figure of one of them.
    Precise(usize),
}

/// What it answers.
enum Answer {
    Cheap(Vec<Candidate>),
    Precise(Result<u64, Absent>),
}

/// The choice, made in as many threads as there are CPUs if there are many candidates, or in more if the limit of
/// descriptors wants it; each thread has descriptors of its own.
fn measure(
    by: By,
    subjects: &[Subject],
    winner: &str,
    runs: usize,
    choices: usize,
    progress: &dyn Fn(usize, &Metrics),
) -> Result<Vec<Metrics>> {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let per_thread = usize::try_from(limit.saturating_sub(DESCRIPTORS.1) / DESCRIPTORS.0)?;
    ensure!(per_thread >= 40, "{limit} descriptors are too few for 40 readers: raise `ulimit -n`");
    let threads = if subjects.len() < 1000 { 1 } else { cpus }.max(subjects.len().div_ceil(per_thread));
    let share = subjects.len().div_ceil(threads);
    thread::scope(|scope| {
        let (done, answers) = mpsc::channel::<Result<Answer>>();
        let mut orders = Vec::new();
        for (number, subjects) in subjects.chunks(share).enumerate() {
            let (order, orders_of_this) = mpsc::channel::<Order>();
            orders.push(order);
            let done = done.clone();
            scope.spawn(move || serve(by, number * share, subjects, &orders_of_this, &done));
        }
        // So that an answer that cannot come any more is not waited for.
        drop(done);
        let answer = || answers.recv().context("a reading thread has ended")?;
        let choose = || -> Result<(Option<Ranked>, u64)> {
            orders.iter().try_for_each(|order| order.send(Order::Cheap)).context("a reading thread has ended")?;
            let mut candidates = Vec::with_capacity(subjects.len());
            for _ in 0..orders.len() {
                match answer()? {
                    Answer::Cheap(part) => candidates.extend(part),
                    Answer::Precise(_) => bail!("a precise figure that nobody asked for"),
                }
            }
            let mut precise_reads = 0;
            let best = first(candidates, 1, |candidate| {
                precise_reads += 1;
                let number = candidate.name.trim_start_matches("vm").parse::<usize>().unwrap_or_default();
                let asked = orders.get(number / share).and_then(|of| of.send(Order::Precise(number % share)).ok());
                match asked.map(|()| answer()) {
                    Some(Ok(Answer::Precise(figure))) => figure,
                    _ => Err(Absent { reason: AbsentReason::Failed, detail: "the reading thread has ended".into() }),
                }
            });
            Ok((best.into_iter().next(), precise_reads))
        };
        // The first choice opens what stays open.
        choose()?;
        let mut all_metrics = Vec::new();
        for run in 1..=runs {
            let (mut times, mut reads) = (Vec::new(), 0);
            let before = cpu()?;
            for _ in 0..choices {
                let start = Instant::now();
                let (best, precise_reads) = choose()?;
                times.push(start.elapsed());
                reads += precise_reads;
                match best {
                    Some(Ranked { name, .. }) if name == winner => {}
                    best => bail!("chose {best:?} instead of {winner}"),
                }
            }
            let after = cpu()?;
            let metrics = metrics(&mut times, reads, (before, after));
            progress(run, &metrics);
            all_metrics.push(metrics);
        }
        drop(orders);
        Ok(all_metrics)
    })
}

/// One thread and its candidates.
fn serve(
    by: By,
    base: usize,
    subjects: &[Subject],
    orders: &mpsc::Receiver<Order>,
    done: &mpsc::Sender<Result<Answer>>,
) {
    // A table of descriptors of its own: the limit holds for each.
    if let Err(errno) = unshare(CloneFlags::CLONE_FILES) {
        let _ = done.send(Err(errno).context("unshare(CLONE_FILES)"));
        return;
    }
    let mut readers: Vec<Reader> = subjects.iter().map(|subject| Reader::new(&Roots::default(), subject)).collect();
    while let Ok(order) = orders.recv() {
        let answer = match order {
            Order::Cheap => candidates(by, base, &mut readers).map(Answer::Cheap),
            Order::Precise(number) => {
                readers.get_mut(number).map(|reader| Answer::Precise(by.precise(reader))).context("no such candidate")
            }
        };
        if done.send(answer).is_err() {
            return;
        }
    }
}

fn candidates(by: By, base: usize, readers: &mut [Reader]) -> Result<Vec<Candidate>> {
    let candidate = |(number, reader): (usize, &mut Reader)| {
        let held = by.cheap(reader).map_err(|absent| anyhow!("a figure is absent: {absent}"))?;
        Ok(Candidate { name: name(base + number), guest_claimed_used_bytes: Some(0), held: Ok(held) })
    };
    readers.iter_mut().enumerate().map(candidate).collect()
}

/// CPU time of this process in user mode and in the kernel.
fn cpu() -> Result<(Duration, Duration)> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = |time: nix::sys::time::TimeVal| {
        Duration::from_secs(time.tv_sec().unsigned_abs()) + Duration::from_micros(time.tv_usec().unsigned_abs())
    };
    Ok((time(usage.user_time()), time(usage.system_time())))
}

type Cpu = (Duration, Duration);

#[allow(clippy::cast_precision_loss)]
fn metrics(times: &mut [Duration], precise_reads: u64, (before, after): (Cpu, Cpu)) -> Metrics {
    times.sort_unstable();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len() - 1)).copied().map(ms);
    let count = times.len() as f64;
    let (user, kernel) = (ms(after.0 - before.0), ms(after.1 - before.1));
    Metrics::from([
        ("median_ms", at(50)),
        ("p99_ms", at(99)),
        ("most_ms", times.last().copied().map(ms)),
        ("cpu_ms", Some((user + kernel) / count)),
        ("kernel_share", (user + kernel > 0.0).then(|| kernel / (user + kernel))),
        ("precise_reads", Some(precise_reads as f64 / count)),
    ])
}

fn raise_descriptor_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // If not, whoever needs more says so.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}
