//! The one JSON shape of all benchmarks:
//! `{"bench", "machine", "configs": {NAME: {METRIC: median}}, "spread": {NAME: {METRIC: [least, most]}}, "runs": [raw, in order], "targets": [{"name", "wanted", "got", "met"}]}`.
//!
//! Metric names carry their unit. A metric that a run does not have is null, and so is its median if no run has it.

use std::collections::BTreeMap;
use std::fs;

use serde::Serialize;
use serde_json::{Value, json};

use crate::environment::Environment;

/// Metrics of one run by name.
pub type Metrics = BTreeMap<&'static str, Option<f64>>;

/// One measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// Name of the configuration.
    pub config: String,
    /// The measured values.
    #[serde(serialize_with = "metrics")]
    pub metrics: Metrics,
    /// `[seconds after the event, bytes]`.
    pub series: Vec<(f64, u64)>,
}

/// A limit that a measured value must not exceed.
#[derive(Debug, Clone, Serialize)]
pub struct Target {
    /// What is limited.
    pub name: String,
    /// The most it may be.
    pub wanted: f64,
    /// What it is; null if it could not be measured.
    pub got: Option<f64>,
    /// Whether it is measured and within the limit.
    pub met: bool,
}

impl Target {
    /// Compares.
    #[must_use]
    pub fn at_most(name: &str, wanted: f64, got: Option<f64>) -> Self {
        Self { name: name.to_owned(), wanted, got, met: got.is_some_and(|got| got <= wanted) }
    }
}

/// All runs of one configuration, reduced.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// The middle value, or the mean of the two middle ones.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

/// Reduces one metric of one configuration. None if no run has it.
#[must_use]
pub fn summary(runs: &[Run], config: &str, metric: &str) -> Option<Summary> {
    let mut values: Vec<f64> =
        runs.iter().filter(|run| run.config == config).filter_map(|run| *run.metrics.get(metric)?).collect();
    values.sort_by(f64::total_cmp);
    let (least, most) = (*values.first()?, *values.last()?);
    let (low, high) = (values.get((values.len() - 1) / 2)?, values.get(values.len() / 2)?);
    Some(Summary { median: (low + high) / 2.0, least, most })
}

/// Puts the document together.
#[must_use]
pub fn document(bench: &str, machine: Value, runs: &[Run], targets: &[Target]) -> Value {
    let mut configs: BTreeMap<&str, BTreeMap<&str, Value>> = BTreeMap::new();
    let mut spread = configs.clone();
    for run in runs {
        for &metric in run.metrics.keys() {
            let summary = summary(runs, &run.config, metric);
            configs.entry(&run.config).or_default().insert(metric, number(summary.map(|summary| summary.median)));
            let range = summary.map(|summary| json!([number(Some(summary.least)), number(Some(summary.most))]));
            spread.entry(&run.config).or_default().insert(metric, range.unwrap_or(Value::Null));
        }
    }
    json!({ "bench": bench, "machine": machine, "configs": configs, "spread": spread, "runs": runs, "targets": targets })
}

/// The host that numbers were measured on.
#[must_use]
pub fn host() -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let memory_kib = read("/proc/meminfo").split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    // The first line of /proc/swaps is its heading.
    let swap: Vec<String> = read("/proc/swaps")
        .lines()
        .skip(1)
        .filter_map(|line| Some(line.split_whitespace().next()?.to_owned()))
        .collect();
    json!({
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_bytes": memory_kib.map(|kib| kib * 1024),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "swap": swap,
    })
}

/// The host, and what its guests run on.
#[must_use]
pub fn machine(environment: &Environment) -> Value {
    let mut machine = host();
    if let Some(machine) = machine.as_object_mut() {
        machine.insert("qemu".to_owned(), environment.packages.qemu.version.clone().into());
        machine.insert("accel".to_owned(), environment.accelerator.to_string().into());
        machine.insert("guest_kernel".to_owned(), environment.packages.kernel.release.clone().into());
    }
    machine
}

fn metrics<S: serde::Serializer>(metrics: &Metrics, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(metrics.iter().map(|(name, value)| (name, number(*value))))
}

/// Whole numbers as such: byte counts read badly with a decimal point. What is below 1 keeps six decimals, the rest three.
#[allow(clippy::cast_possible_truncation)]
fn number(value: Option<f64>) -> Value {
    match value {
        Some(value) if value.fract() == 0.0 && value.abs() < 9e15 => json!(value as i64),
        Some(value) => {
            let scale = if value.abs() < 1.0 { 1e6 } else { 1e3 };
            json!((value * scale).round() / scale)
        }
        None => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn run(config: &str, value: Option<f64>) -> Run {
        Run { config: config.to_owned(), metrics: [("t90_s", value)].into(), series: vec![(-0.5, 4096)] }
    }

    #[test]
    fn medians_are_per_configuration_and_ignore_missing_values() {
        let runs = [run("a", Some(3.0)), run("b", None), run("a", Some(1.0)), run("a", None), run("a", Some(2.5))];
        assert_eq!(summary(&runs, "a", "t90_s").unwrap(), Summary { median: 2.5, least: 1.0, most: 3.0 });
        assert_eq!(summary(&runs, "b", "t90_s"), None);
        assert_eq!(summary(&runs[..3], "a", "t90_s").unwrap().median, 2.0);
    }

    #[test]
    fn the_document_has_the_agreed_shape() {
        let runs = [run("a", Some(3.5)), run("b", None)];
        let targets = [Target::at_most("a t90_s", 4.0, Some(3.5)), Target::at_most("b t90_s", 4.0, None)];
        let document = document("return", json!({}), &runs, &targets);
        assert_eq!(document.pointer("/configs/a/t90_s"), Some(&json!(3.5)));
        assert_eq!(document.pointer("/configs/b/t90_s"), Some(&Value::Null));
        assert_eq!(document.pointer("/spread/a/t90_s"), Some(&json!([3.5, 3.5])));
        assert_eq!(
            document.pointer("/runs/0"),
            Some(&json!({ "config": "a", "metrics": { "t90_s": 3.5 }, "series": [[-0.5, 4096]] }))
        );
        assert_eq!(document.pointer("/targets/0/met"), Some(&json!(true)));
        assert_eq!(document.pointer("/targets/1/met"), Some(&json!(false)));
    }
}
