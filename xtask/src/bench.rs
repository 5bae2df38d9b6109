//! `cargo xtask bench`: runs a benchmark, writes its document and prints what counts in it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fpr_tests::bench::return_memory::{self, Options};
use fpr_tests::bench::{accounting, discard, rank, scale};
use fpr_tests::process;
use fpr_tests::reporting::Reporting;
use serde_json::Value;

use crate::progress::Progress;

pub(crate) fn return_memory(json: &Path, runs: usize, configs: Vec<Reporting>) -> Result<()> {
    ensure!(runs > 0 && !configs.is_empty(), "nothing to measure: --runs and --configs must not be empty");
    write(json, |progress| return_memory::run(&Options { runs, configs }, progress))
}

pub(crate) fn discard(json: &Path, runs: usize) -> Result<()> {
    ensure!(runs > 0, "nothing to measure: --runs must not be 0");
    if cfg!(debug_assertions) {
        return in_release(&["bench", "discard", "--runs", &runs.to_string(), "--json"], json);
    }
    write(json, |progress| discard::run(runs, progress))
}

pub(crate) fn rank(json: &Path, runs: usize) -> Result<()> {
    ensure!(runs > 0, "nothing to measure: --runs must not be 0");
    if cfg!(debug_assertions) {
        return in_release(&["bench", "rank", "--runs", &runs.to_string(), "--json"], json);
    }
    write(json, |progress| rank::run(runs, progress))
}

pub(crate) fn accounting(json: &Path) -> Result<()> {
    if cfg!(debug_assertions) {
        return in_release(&["bench", "accounting", "--json"], json);
    }
    write(json, accounting::run)
}

pub(crate) fn scale(json: &Path, vms: usize, runs: usize) -> Result<()> {
    write(json, |progress| scale::run(vms, runs, progress))
}

/// What runs in this process is measured as it ships: unoptimised, the core costs ten times as much beside its system calls.
fn in_release(words: &[&str], json: &Path) -> Result<()> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["run", "--quiet", "--release", "--package", "xtask", "--"]).args(words).arg(json);
    let status = cargo.status().with_context(|| process::command_line(&cargo))?;
    ensure!(status.success(), "`{}` failed", process::command_line(&cargo));
    Ok(())
}

fn write(json: &Path, measure: impl FnOnce(&dyn Fn(&str)) -> Result<Value>) -> Result<()> {
    // A benchmark takes minutes; better to learn of an unwritable path before.
    fs::write(json, "").with_context(|| json.display().to_string())?;
    let progress = Progress::start();
    let document = measure(&|what| progress.say(what))?;
    drop(progress);
    fs::write(json, format!("{document}\n")).with_context(|| json.display().to_string())?;
    print_medians(&document);
    print_targets(&document);
    println!("written to {}", json.display());
    Ok(())
}

fn print_medians(document: &Value) {
    let Some(configs) = document.get("configs").and_then(Value::as_object) else { return };
    let metrics = configs.values().next().and_then(Value::as_object).into_iter().flatten().map(|(name, _)| name);
    print!("{:24}", "median");
    configs.keys().for_each(|config| print!("{config:>16}"));
    println!();
    for metric in metrics {
        print!("{metric:24}");
        for config in configs.values() {
            let value = config.get(metric).filter(|value| !value.is_null());
            print!("{:>16}", value.map_or_else(|| "-".to_owned(), Value::to_string));
        }
        println!();
    }
}

fn print_targets(document: &Value) {
    for target in document.get("targets").and_then(Value::as_array).into_iter().flatten() {
        let field = |name| target.get(name).unwrap_or(&Value::Null);
        let verdict = if field("met").as_bool() == Some(true) { "met" } else { "NOT MET" };
        println!(
            "{verdict}: {} at most {}, got {}",
            field("name").as_str().unwrap_or_default(),
            field("wanted"),
            field("got")
        );
    }
}
