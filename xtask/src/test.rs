//! `cargo xtask test`: all that CI runs. Every step runs even if an earlier one failed; the last line is
//! `N passed, N failed, N skipped`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use fpr_tests::container::Container;
use fpr_tests::environment::Environment;
use fpr_tests::{packages, process, skip};

/// Tests that may be skipped on a machine that cannot run them. Any other skip fails the run.
const MAY_SKIP: [&str; 13] = [
    "a_guest_keeps_all_but_what_it_reports",
    "a_wrong_discard_is_noticed_by_the_guest_and_by_pagemap",
    "a_guest_that_hangs_is_stopped_and_can_go_on",
    "what_a_guest_does_is_told",
    "shows_as_kvm_vfio_among_the_descriptors",
    "qemu_takes_and_drops_an_assigned_device",
    "an_assigned_device_stops_reporting_while_it_is_there",
    "the_documented_devices_work_side_by_side_with_a_qemu_that_has_the_generic_one",
    "the_kernels_reports_return_memory_and_outlive_a_reset_and_a_new_daemon",
    "a_guest_that_writes_to_freed_pages_reports_by_its_kernel_though_not_by_its_agent",
    "what_the_kernel_and_what_the_agent_returned_is_told_apart",
    "the_host_package_installs_serves_and_purges",
    "the_guest_package_installs_runs_and_purges",
];

/// How much to run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    Everything,
    WithoutGuests,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
    ignored: usize,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

/// Runs the steps; false if one of them failed.
pub(crate) fn run(extent: Extent) -> Result<bool> {
    let skips = packages::cache().join("skips");
    fs::create_dir_all(packages::cache())?;
    fs::write(&skips, "").with_context(|| skips.display().to_string())?;
    let cargo = |arguments: &str| {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(arguments.split(' ')).current_dir(process::workspace()).env(skip::SKIPS_FILE, &skips);
        command
    };
    install_components(&cargo)?;

    // What guests need is downloaded, which takes minutes on a new machine and hardly a CPU, beside the first steps. What goes
    // wrong there goes wrong again, and is told, where it is needed.
    let preparing = (extent == Extent::Everything).then(|| std::thread::spawn(prepare_guests));

    let mut total = Counts::default();
    total.add(check("format", cargo("fmt --all --check"))?);
    total.add(check("lints", cargo("clippy --workspace --all-targets --quiet -- -D warnings"))?);
    let without_guests = tests("tests without guests", cargo("test --workspace --no-fail-fast"))?;
    total.add(without_guests);
    // What was ignored there are the tests with guests. One that does not run here either is a skip.
    let mut never_run = without_guests.ignored;
    if extent == Extent::Everything {
        total.add(check_that("environment of the guests", || {
            // One that panicked left nothing behind that this does not make.
            let _ = preparing.map(std::thread::JoinHandle::join);
            Environment::get().map(drop)
        })?);
        let with_guests =
            tests("tests with guests", cargo("test --workspace --no-fail-fast --tests -- --ignored --test-threads=1"))?;
        never_run = never_run.saturating_sub(with_guests.passed + with_guests.failed);
        total.add(with_guests);
    }

    let skipped = fs::read_to_string(&skips)?;
    let unexpected: Vec<&str> =
        skipped.lines().filter(|line| !MAY_SKIP.iter().any(|name| line.starts_with(&format!("{name}:")))).collect();
    skipped.lines().for_each(|line| println!("skipped {line}"));
    unexpected.iter().for_each(|line| println!("this skip is not allowed: {line}"));
    total.failed += unexpected.len();
    // A skipping test returns like a passing one and was counted as such.
    let skips = skipped.lines().count();
    println!("{} passed, {} failed, {} skipped", total.passed.saturating_sub(skips), total.failed, skips + never_run);
    Ok(total.failed == 0)
}

fn prepare_guests() {
    // Tests that need the generic QEMU or a container and cannot have it are skipped, and say why.
    let _ = Environment::get().map(Environment::generic_qemu);
    let _ = Container::prepare();
}

/// rustup's minimal profile lacks them.
fn install_components(cargo: &dyn Fn(&str) -> Command) -> Result<()> {
    for (component, version) in [("rustfmt", "fmt --version"), ("clippy", "clippy --version")] {
        if process::run(&mut cargo(version)).is_err() {
            println!("installing {component} …");
            process::run(Command::new("rustup").args(["component", "add", component]))?;
        }
    }
    Ok(())
}

fn check(name: &str, mut command: Command) -> Result<Counts> {
    check_that(name, || {
        let status = command.status()?;
        anyhow::ensure!(status.success(), "`{}` failed", process::command_line(&command));
        Ok(())
    })
}

/// A step that passes or fails as a whole.
fn check_that(name: &str, step: impl FnOnce() -> Result<()>) -> Result<Counts> {
    let start = announce(name);
    let outcome = step();
    conclude(name, start, outcome.is_ok())?;
    Ok(match outcome {
        Ok(()) => Counts { passed: 1, ..Counts::default() },
        Err(error) => {
            println!("{name}: {error:#}");
            Counts { failed: 1, ..Counts::default() }
        }
    })
}

/// Runs `cargo test`, passes its output on and counts.
fn tests(name: &str, mut command: Command) -> Result<Counts> {
    let start = announce(name);
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| process::command_line(&command))?;
    let mut counts = Counts::default();
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        let line = line?;
        println!("{line}");
        if let Some(result) = counts_of(&line) {
            counts.add(result);
        }
    }
    let success = child.wait()?.success();
    if !success && counts.failed == 0 {
        // It did not build, or a test took its process down.
        counts.failed = 1;
    }
    conclude(name, start, success)?;
    Ok(counts)
}

/// libtest's closing line: `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
fn counts_of(line: &str) -> Option<Counts> {
    let (_, figures) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let figure = |name: &str| figures.split("; ").find_map(|part| part.strip_suffix(name)?.trim().parse().ok());
    Some(Counts { passed: figure("passed")?, failed: figure("failed")?, ignored: figure("ignored")? })
}

fn announce(name: &str) -> Instant {
    println!("== {name}");
    Instant::now()
}

fn conclude(name: &str, start: Instant, success: bool) -> Result<()> {
    println!("== {name}: {} after {:.0} s", if success { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
    Ok(std::io::stdout().flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_from_the_closing_line_only() {
        let line = "test result: FAILED. 12 passed; 1 failed; 3 ignored; 0 measured; 2 filtered out; finished in 0.04s";
        assert_eq!(counts_of(line), Some(Counts { passed: 12, failed: 1, ignored: 3 }));
        assert_eq!(counts_of("test result_is_kept ... ok"), None);
        assert_eq!(counts_of("test result: ok"), None);
    }
}
