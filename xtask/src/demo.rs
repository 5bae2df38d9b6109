//! `cargo xtask demo`: two guests run the same program; one of them gives the memory back.
//!
//! Each guest lives in a thread of its own, because a VM dies with the thread that booted it; the main thread draws.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use fpr_tests::bench::curve::Curve;
use fpr_tests::environment::Environment;
use fpr_tests::host_memory::Sample;
use fpr_tests::reporting::Reporting;
use fpr_tests::units::{GIB, MIB, mib};
use fpr_tests::vm::Vm;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Small enough that two guests run on a machine with two cores and 4 GiB.
const GUEST_MEMORY: u64 = GIB;
const WORKLOAD: &str = "memhog 700m";
const WORKLOAD_DEADLINE: Duration = Duration::from_secs(120);
/// How long both guests are watched after the program has ended.
const WATCH: Duration = Duration::from_secs(15);
const REDRAW: Duration = Duration::from_millis(100);
/// Between two lines where there is no terminal to draw on.
const PLAIN_LINE: Duration = Duration::from_secs(1);

/// What a guest's thread shows to the one that draws.
struct Stage {
    name: &'static str,
    phase: Mutex<&'static str>,
    bytes: AtomicU64,
}

impl Stage {
    fn new(name: &'static str) -> Arc<Self> {
        Arc::new(Self { name, phase: Mutex::new("booting"), bytes: AtomicU64::new(0) })
    }

    fn enter(&self, phase: &'static str) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    fn phase(&self) -> &'static str {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// A finished guest.
struct Outcome {
    before: u64,
    after: u64,
    samples: Vec<Sample>,
    exited_at: Instant,
}

pub(crate) fn run(reporting: Reporting) -> Result<()> {
    eprintln!("preparing (the first time this builds and downloads) …");
    let environment = Environment::get()?;
    if reporting.uses_host_agent() {
        fpr_tests::artifacts::host_agent()?;
    }
    println!(
        "Two guests with {} each run `{WORKLOAD}`. Shown is the memory each costs its host. ({}, {}, {})",
        mib(GUEST_MEMORY),
        environment.packages.kernel.release,
        environment.packages.qemu.version,
        environment.accelerator,
    );
    let stages = [Stage::new("without reporting"), Stage::new("with reporting")];
    let together = Arc::new(Barrier::new(stages.len()));
    let guests: Vec<_> = stages
        .iter()
        .zip([Reporting::None, reporting])
        .map(|(stage, reporting)| {
            let (stage, together) = (stage.clone(), together.clone());
            thread::spawn(move || guest(&stage, reporting, &together))
        })
        .collect();
    draw(&stages, || guests.iter().all(thread::JoinHandle::is_finished));
    let mut outcomes = Vec::new();
    for (guest, stage) in guests.into_iter().zip(&stages) {
        let outcome = guest.join().map_err(|_| anyhow!("the thread of the guest {} panicked", stage.name))?;
        outcomes.push((stage.name, outcome.with_context(|| format!("guest {}", stage.name))?));
    }
    table(&outcomes)
}

fn guest(stage: &Stage, reporting: Reporting, together: &Barrier) -> Result<Outcome> {
    let booted = reporting.boot(Vm::builder().memory(GUEST_MEMORY));
    stage.enter("waiting for the other");
    // Met even by a guest that failed, or the other one would wait for ever.
    together.wait();
    let guest = booted?;
    let memory = guest.vm.host_memory()?;
    let recording = memory.record();
    let before = memory.allocated_bytes()?;
    let workload = guest.vm.spawn(WORKLOAD)?;
    stage.enter("memhog runs");
    while workload.exited_at().is_none() {
        stage.bytes.store(memory.allocated_bytes()?, Ordering::Relaxed);
        thread::sleep(REDRAW / 2);
    }
    let exited_at = workload.wait(WORKLOAD_DEADLINE)?.exited_at;
    stage.enter("memhog has ended");
    while exited_at.elapsed() < WATCH {
        stage.bytes.store(memory.allocated_bytes()?, Ordering::Relaxed);
        thread::sleep(REDRAW / 2);
    }
    stage.enter("done");
    Ok(Outcome { before, after: memory.allocated_bytes()?, samples: recording.stop(), exited_at })
}

fn draw(stages: &[Arc<Stage>], finished: impl Fn() -> bool) {
    let bars = MultiProgress::new();
    let template = "{prefix:>18} {bar:40.cyan/blue} {pos:>5} MiB  {msg}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bars: Vec<_> = stages
        .iter()
        .map(|stage| bars.add(ProgressBar::new(GUEST_MEMORY / MIB).with_style(style.clone()).with_prefix(stage.name)))
        .collect();
    let start = Instant::now();
    let mut next_line = start;
    while !finished() {
        for (bar, stage) in bars.iter().zip(stages) {
            bar.set_position(stage.bytes() / MIB);
            bar.set_message(stage.phase());
        }
        if bars.iter().all(ProgressBar::is_hidden) && Instant::now() >= next_line {
            next_line += PLAIN_LINE;
            let states =
                stages.iter().map(|stage| format!("{}: {:>10} ({})", stage.name, mib(stage.bytes()), stage.phase()));
            println!("{:>3} s  {}", start.elapsed().as_secs(), states.collect::<Vec<_>>().join("  "));
        }
        thread::sleep(REDRAW);
    }
    bars.iter().for_each(ProgressBar::abandon);
}

fn table(outcomes: &[(&str, Outcome)]) -> Result<()> {
    println!();
    println!(
        "{:18} {:>11} {:>11} {:>17} {:>11} {:>11}",
        "host memory of", "before", "at peak", "15 s after exit", "came back", "90 % after"
    );
    for (name, outcome) in outcomes {
        let curve = Curve::of(&outcome.samples, outcome.exited_at).context("nothing was recorded")?;
        let time = curve.time_to(90).map_or_else(|| "-".to_owned(), |time| format!("{:.2} s", time.as_secs_f64()));
        println!(
            "{name:18} {:>11} {:>11} {:>17} {:>11} {time:>11}",
            mib(outcome.before),
            mib(curve.peak_bytes),
            mib(outcome.after),
            mib(curve.peak_bytes.saturating_sub(outcome.after)),
        );
    }
    Ok(())
}
