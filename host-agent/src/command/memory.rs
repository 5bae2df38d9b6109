//! `memory`: finds the processes meant, reads them with this process's rights and prints.
//!
//! The daemon is asked for names and pids only: what an operator may not see by himself, this does not show him.

use crate::print;
use anyhow::{Context, bail};
use fpr_host_agent::accounting::{Method, Roots, Subject, VmReport, text};
use fpr_host_agent::cli::MemoryArgs;
use fpr_host_agent::control::{self, Command};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Reads and prints; exit code 1 if there was nothing that could be read.
pub(crate) fn run(arguments: &MemoryArgs) -> anyhow::Result<ExitCode> {
    let mut methods = if arguments.methods.is_empty() { Method::ALL.to_vec() } else { arguments.methods.clone() };
    let mut seen = std::collections::BTreeSet::new();
    methods.retain(|method| seen.insert(*method));
    let subjects = subjects(arguments)?;
    let reports: Vec<VmReport> = subjects
        .into_iter()
        .map(|(name, subject)| VmReport::read(&Roots::default(), name, &subject, &methods))
        .collect();
    if arguments.json {
        let document = json!({ "format": 1, "vms": serde_json::to_value(&reports).context("cannot write JSON")? });
        print(&format!("{document:#}\n"))?;
    } else {
        print(&text(&reports))?;
    }
    let nothing = !reports.is_empty() && reports.iter().all(|report| !report.has_figure());
    Ok(ExitCode::from(u8::from(nothing)))
}

/// Whose memory is meant, with the name if the daemon knows one.
fn subjects(arguments: &MemoryArgs) -> anyhow::Result<Vec<(Option<String>, Subject)>> {
    if arguments.pid.is_some() || arguments.cgroup.is_some() {
        let subject = Subject { pid: arguments.pid, cgroup: arguments.cgroup.clone(), files: Vec::new() };
        return Ok(vec![(None, subject)]);
    }
    let status = control::ask(&arguments.control, &Command::Status)
        .context("VMs are known by name to the daemon only; --pid and --cgroup need none")?;
    let vms = status["vms"].as_array().map(Vec::as_slice).unwrap_or_default();
    let name = |vm: &Value| vm["name"].as_str().unwrap_or("?").to_owned();
    let chosen: Vec<&Value> =
        vms.iter().filter(|vm| arguments.vm.as_ref().is_none_or(|wanted| *wanted == name(vm))).collect();
    if let (Some(wanted), true) = (&arguments.vm, chosen.is_empty()) {
        let known: Vec<String> = vms.iter().map(name).collect();
        bail!("no VM {wanted}; there are: {}", known.join(", "));
    }
    let subject = |vm: &Value| {
        let pid = vm["front_end"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        (Some(name(vm)), Subject { pid, ..Subject::default() })
    };
    Ok(chosen.into_iter().map(subject).collect())
}
