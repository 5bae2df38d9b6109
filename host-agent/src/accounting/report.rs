//! All figures of a VM beside each other, as the `memory` command prints them. `docs/accounting.md` describes the JSON.

use super::{Absent, Figure, KsmStat, Method, Precision, Reader, Reading, Roots, Subject};
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

/// One VM.
#[derive(Debug, Serialize)]
pub struct VmReport {
    /// Its name, if the daemon knows it.
    pub name: Option<String>,
    /// Its VMM's process, if it is known.
    pub pid: Option<i32>,
    /// Its cgroup below the hierarchy's root, if it has one of its own.
    pub cgroup: Option<PathBuf>,
    /// One for each source of each method.
    readings: Vec<Row>,
    /// Page cache in the cgroup's usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    cgroup_page_cache: Option<Outcome>,
    /// What KSM saves; absent where the kernel does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    ksm: Option<KsmStat>,
}

#[derive(Debug, Serialize)]
struct Row {
    method: Method,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Outcome {
    Figure(Figure),
    Absent(Absent),
}

impl From<Reading> for Outcome {
    fn from(reading: Reading) -> Self {
        match reading {
            Ok(figure) => Self::Figure(figure),
            Err(absent) => Self::Absent(absent),
        }
    }
}

impl VmReport {
    /// Reads a VM in these ways, one after the other.
    #[must_use]
    pub fn read(roots: &Roots, name: Option<String>, subject: &Subject, methods: &[Method]) -> Self {
        let mut reader = Reader::new(roots, subject);
        let mut readings = Vec::new();
        for method in methods {
            let of_method = reader.read_all(*method).into_iter();
            readings.extend(of_method.map(|reading| Row { method: *method, outcome: reading.into() }));
        }
        let has_cgroup = methods.contains(&Method::Cgroup) && reader.cgroup_path().is_some();
        let cgroup_page_cache = has_cgroup.then(|| reader.page_cache().into());
        let ksm = methods.contains(&Method::Ksm).then(|| reader.ksm().ok()).flatten();
        Self { name, pid: subject.pid, cgroup: reader.cgroup_path(), readings, cgroup_page_cache, ksm }
    }

    /// Whether anything could be read.
    #[must_use]
    pub fn has_figure(&self) -> bool {
        self.readings.iter().any(|row| matches!(row.outcome, Outcome::Figure(_)))
    }
}

/// The reports as tables for a person. Bytes are not rounded: to lay one method beside the other is what they are for.
#[must_use]
pub fn text(reports: &[VmReport]) -> String {
    let mut text = String::new();
    for (index, report) in reports.iter().enumerate() {
        let blank = if index == 0 { "" } else { "\n" };
        let name = report.name.as_ref().map_or(String::new(), |name| format!("{name}: "));
        let pid = report.pid.map_or("no process".to_owned(), |pid| format!("pid {pid}"));
        let cgroup = report
            .cgroup
            .as_ref()
            .map_or("no cgroup of its own".to_owned(), |path| format!("cgroup {}", path.display()));
        let _ = writeln!(text, "{blank}{name}{pid}, {cgroup}");
        row(&mut text, ["METHOD", "BYTES", "±", "READ µs", "SOURCE"]);
        for Row { method, outcome } in &report.readings {
            outcome_row(&mut text, method.word(), outcome, "");
        }
        if let Some(cache) = &report.cgroup_page_cache {
            outcome_row(&mut text, Method::Cgroup.word(), cache, " (page cache in it)");
        }
        if let Some(KsmStat { merging_bytes, zero_bytes, profit_bytes }) = &report.ksm {
            let profit = profit_bytes.map_or("does not say".to_owned(), |bytes| format!("reckons {bytes}"));
            let _ = writeln!(
                text,
                "KSM: {merging_bytes} bytes merged, {zero_bytes} in the zero page; as saved, the kernel {profit}"
            );
        }
    }
    text
}

fn outcome_row(text: &mut String, method: &str, outcome: &Outcome, note: &str) {
    match outcome {
        Outcome::Figure(Figure { bytes, source, precision, read }) => {
            let bound = match precision {
                Precision::Precise => 0,
                Precision::Approximate { error_bound_bytes } => *error_bound_bytes,
            };
            let read_us = format!("{:.1}", read.as_secs_f64() * 1e6);
            row(text, [method, &bytes.to_string(), &bound.to_string(), &read_us, &format!("{source}{note}")]);
        }
        Outcome::Absent(absent) => row(text, [method, "-", "-", "-", &absent.to_string()]),
    }
}

fn row(text: &mut String, [method, bytes, bound, read, source]: [&str; 5]) {
    let _ = writeln!(text, "{method:10} {bytes:>15} {bound:>10} {read:>9}  {source}");
}
