//! `bench scale`: one daemon with 200 VMs: what it costs idle, how soon it answers when all report at once, and what one VM
//! that stalls or floods does to the others.
//!
//! Real vhost-user connections of both devices, real memfds, sessions of an agent; guests and VMMs are played by
//! `mock_vm`, one process per VM and each in a cgroup of its own, as on a host: the daemon looks into both. Each of the other VMs reports at the same instant, first by its agent and
//! then by its kernel, and that again and again; configurations alternate. The flood runs on the same CPUs as everything
//! else, so it has a companion that takes as much CPU time and gives the daemon nothing to do: what differs between the two
//! is the daemon's, the rest is the machine's.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::cgroup::Cgroups;
use super::report::{self, Metrics, Run, Target, summary};
use crate::daemon::{Devices, HostAgent};
use crate::process::OwnedChild;
use crate::units::MIB;
use crate::{artifacts, process, sys};

/// Reports of each VM in one run, of its agent and of its kernel.
const BURSTS: u64 = 10;
/// Between two bursts: all answers are back long before.
const PERIOD: Duration = Duration::from_millis(700);
/// From the order to the first burst, so that the last VM has read it.
const LEAD: Duration = Duration::from_millis(500);
/// The daemon looks more often at VMs that have reported in the last 10 s.
const SETTLE: Duration = Duration::from_secs(25);
const IDLE: Duration = Duration::from_secs(60);

/// What the one VM does that is not measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Other {
    Quiet,
    /// Has asked much and takes no answer, stopped.
    Stalls,
    /// Takes CPU time.
    Burns,
    Floods,
}

impl Other {
    const ALL: [Self; 4] = [Self::Quiet, Self::Stalls, Self::Burns, Self::Floods];

    fn name(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Stalls => "stall",
            Self::Burns => "burn",
            Self::Floods => "flood",
        }
    }
}

/// One VM's process.
struct Mock {
    child: OwnedChild,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Mock {
    fn start(binary: &Path, agent: &HostAgent, vm: &str, cgroup: &Path) -> Result<Self> {
        let mut command = Command::new(binary);
        command.arg(agent.socket(vm)).arg(agent.balloon_socket(vm)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = sys::die_with_spawning_thread(&mut command).spawn().context("mock_vm")?;
        fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).with_context(|| cgroup.display().to_string())?;
        let orders = child.stdin.take().context("no stdin")?;
        let answers = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut mock = Self { child: OwnedChild(child), orders, answers };
        let ready = mock.answer()?;
        ensure!(ready == "ready", "{vm} said {ready:?}: see its message above");
        Ok(mock)
    }

    fn order(&mut self, order: &str) -> Result<()> {
        Ok(writeln!(self.orders, "{order}")?)
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.child.pid().cast_signed()), signal)?)
    }
}

/// Measures with so many VMs, so many runs per configuration.
///
/// # Errors
/// Something cannot be built or started, or a VM got no answer.
pub fn run(vms: usize, runs: usize, progress: &dyn Fn(&str)) -> Result<Value> {
    ensure!(vms >= 2 && runs > 0, "nothing to measure: it takes two VMs and a run");
    progress("building");
    let binary = artifacts::mock_vm()?;
    let names: Vec<String> = (0..vms).map(|number| format!("vm{number}")).collect();
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    let agent = HostAgent::start_with(Devices::VsockAndBalloon, &words, &["--log-level", "warn"])?;
    progress("starting VMs");
    let groups = Cgroups::new("fpr-scale")?;
    let groups = words.iter().map(|name| groups.make(name)).collect::<Result<Vec<_>>>()?;
    let start = |(name, group): (&&str, &PathBuf)| Mock::start(&binary, &agent, name, group);
    let mut mocks = words.iter().zip(&groups).map(start).collect::<Result<Vec<_>>>()?;
    let mut measured = vec![idle(&agent, progress)?];
    for number in 0..runs {
        for turn in 0..Other::ALL.len() {
            let other = Other::ALL[(turn + number) % Other::ALL.len()];
            progress(&format!("run {} of {runs}: {}", number + 1, other.name()));
            measured.push(burst(&mut mocks, other)?);
            if let (true, Some(first), Some(group)) = (other != Other::Quiet, mocks.first_mut(), groups.first()) {
                // As it was: a process of its own, a session of its own.
                drop(first.child.0.kill());
                *first = Mock::start(&binary, &agent, "vm0", group)?;
            }
        }
    }
    let targets = targets(&measured, &agent)?;
    let mut machine = report::host();
    if let Some(machine) = machine.as_object_mut() {
        machine.insert("vms".to_owned(), json!(vms));
    }
    Ok(report::document("scale", machine, &measured, &targets))
}

/// Nobody reports; sessions are alive.
fn idle(agent: &HostAgent, progress: &dyn Fn(&str)) -> Result<Run> {
    progress("settling");
    std::thread::sleep(SETTLE);
    progress("idle");
    let (before, began) = (agent.cpu_time()?, clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    std::thread::sleep(IDLE);
    let used = agent.cpu_time()? - before;
    let elapsed = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)? - began);
    let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", agent.pid()))?;
    let threads = fs::read_dir(format!("/proc/{}/task", agent.pid()))?.count();
    let descriptors = fs::read_dir(format!("/proc/{}/fd", agent.pid()))?.count();
    let metrics = Metrics::from([
        ("cpu_percent", Some(100.0 * used.as_secs_f64() / elapsed.as_secs_f64())),
        ("rss_bytes", Some(as_f64(agent.resident_bytes()?))),
        ("rss_shmem_bytes", Some(as_f64(process::status_bytes(agent.pid(), "RssShmem")?))),
        ("pss_bytes", process::status_bytes_of(&rollup, "Pss").map(as_f64)),
        ("threads", Some(as_f64(threads as u64))),
        ("descriptors", Some(as_f64(descriptors as u64))),
    ]);
    Ok(Run { config: "idle".to_owned(), metrics, series: Vec::new() })
}

/// All VMs but the first report at once, several times, while the first does something.
fn burst(mocks: &mut [Mock], other: Other) -> Result<Run> {
    let Some((first, others)) = mocks.split_first_mut() else { return Err(anyhow::anyhow!("no VM")) };
    let bursts = u32::try_from(BURSTS)?;
    let milliseconds = (LEAD + PERIOD * (bursts + 1)).as_millis();
    match other {
        Other::Quiet => {}
        Other::Stalls => {
            first.order("stall")?;
            first.answer()?;
            first.signal(Signal::SIGSTOP)?;
        }
        Other::Burns => first.order(&format!("burn {milliseconds}"))?,
        Other::Floods => first.order(&format!("flood {milliseconds}"))?,
    }
    let start = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?) + LEAD;
    for mock in others.iter_mut() {
        mock.order(&format!("report {BURSTS} {} {}", start.as_nanos(), PERIOD.as_nanos()))?;
    }
    let (mut agent_ns, mut kernel_ns) = (Vec::new(), Vec::new());
    for mock in others.iter_mut() {
        let answer = mock.answer()?;
        let times: Vec<u64> = answer.split_whitespace().filter_map(|time| time.parse().ok()).collect();
        ensure!(times.len() as u64 == 2 * BURSTS, "a VM got no answer to a report: {answer:?}");
        agent_ns.extend(times.iter().step_by(2));
        kernel_ns.extend(times.iter().skip(1).step_by(2));
    }
    let flooded = if other == Other::Floods { first.answer()? } else { String::new() };
    let reports = flooded.strip_prefix("flooded ").and_then(|count| count.parse::<u64>().ok());
    agent_ns.sort_unstable();
    kernel_ns.sort_unstable();
    let metrics = Metrics::from([
        ("agent_answer_p50_us", quantile_us(&agent_ns, 50)),
        ("agent_answer_p99_us", quantile_us(&agent_ns, 99)),
        ("kernel_answer_p50_us", quantile_us(&kernel_ns, 50)),
        ("kernel_answer_p99_us", quantile_us(&kernel_ns, 99)),
        ("flood_reports", reports.map(as_f64)),
    ]);
    Ok(Run { config: other.name().to_owned(), metrics, series: Vec::new() })
}

fn targets(runs: &[Run], agent: &HostAgent) -> Result<Vec<Target>> {
    let median = |config: &str, metric: &str| summary(runs, config, metric).map(|summary| summary.median);
    let ratio = |config: &str, base: &str, metric: &str| Some(median(config, metric)? / median(base, metric)?);
    let mut targets = vec![
        Target::at_most("idle cpu_percent", 1.0, median("idle", "cpu_percent")),
        Target::at_most("idle rss_bytes", as_f64(64 * MIB), median("idle", "rss_bytes")),
    ];
    for metric in ["agent_answer_p99_us", "kernel_answer_p99_us"] {
        for (config, base) in [("stall", "quiet"), ("flood", "burn"), ("flood", "quiet")] {
            let name = format!("{metric} {config} / {base}");
            targets.push(Target::at_most(&name, 1.1, ratio(config, base, metric)));
        }
    }
    // The process that was measured is the one that was started.
    ensure!(agent.status()?["pid"] == agent.pid(), "another daemon answers");
    Ok(targets)
}

/// Of sorted times.
fn quantile_us(sorted: &[u64], percent: usize) -> Option<f64> {
    let place = (sorted.len() * percent).div_ceil(100).checked_sub(1)?;
    sorted.get(place).map(|time| as_f64(*time) / 1000.0)
}

#[allow(clippy::cast_precision_loss)] // 8 PiB are exact
fn as_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_sorted_times() {
        let times: Vec<u64> = (1..=100).map(|time| time * 1000).collect();
        assert_eq!((quantile_us(&times, 50), quantile_us(&times, 99)), (Some(50.0), Some(99.0)));
        assert_eq!(quantile_us(&[], 99), None);
    }
}
