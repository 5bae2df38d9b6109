//! `vm add`, `vm remove`, `vm list` and `reload`: asks the daemon and says what it did.

use crate::print;
use fpr_host_agent::cli::VmCommand;
use fpr_host_agent::control::{self, Command};
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;

pub(crate) fn run(command: VmCommand) -> anyhow::Result<()> {
    match command {
        VmCommand::Add { name, socket, balloon, guest_cid, budget, control } => {
            let budget_bytes = budget.map(|budget| budget.0);
            control::ask(&control, &Command::VmAdd { vm: name, socket, balloon, guest_cid, budget_bytes })?;
        }
        VmCommand::Remove { name, force, control } => {
            control::ask(&control, &Command::VmRemove { vm: name, force })?;
        }
        VmCommand::List { control, json } => {
            let vms = control::ask(&control, &Command::VmList)?;
            print(&if json { format!("{vms:#}\n") } else { list(&vms) })?;
        }
    }
    Ok(())
}

/// Exit code 1 by an error if a VM could not be made: the rest is in force all the same.
pub(crate) fn reload(control: &Path) -> anyhow::Result<()> {
    let reloaded = control::ask(control, &Command::Reload)?;
    let mut text = String::new();
    for (what, said) in [
        ("added", "added"),
        ("removed", "removed, at the latest when its front end has gone"),
        ("changed", "changed"),
        ("changing", "begins anew when its front end has gone"),
    ] {
        for name in reloaded[what].as_array().into_iter().flatten() {
            let _ = writeln!(text, "{}: {said}", name.as_str().unwrap_or("?"));
        }
    }
    for (name, what) in reloaded["waiting"].as_object().into_iter().flatten() {
        let _ = writeln!(text, "{name}: {}", what.as_str().unwrap_or("?"));
    }
    for note in reloaded["notes"].as_array().into_iter().flatten() {
        let _ = writeln!(text, "{}", note.as_str().unwrap_or("?"));
    }
    print(&text)?;
    let failed: Vec<String> = reloaded["failed"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, why)| format!("{name}: {}", why.as_str().unwrap_or("?")))
        .collect();
    if failed.is_empty() { Ok(()) } else { anyhow::bail!("{}", failed.join("; ")) }
}

const HEADER: [&str; 5] = ["VM", "ORIGIN", "STATE", "VSOCK", "BALLOON"];

fn list(vms: &Value) -> String {
    let mut rows = vec![HEADER.map(str::to_owned)];
    let mut details = String::new();
    for vm in vms.as_array().into_iter().flatten() {
        let field = |field: &str| vm[field].as_str().unwrap_or("-").to_owned();
        rows.push([field("name"), field("origin"), field("state"), field("socket"), field("balloon")]);
        if let Some(detail) = vm["detail"].as_str() {
            let _ = writeln!(details, "{}: {detail}", field("name"));
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    if !details.is_empty() {
        text.push('\n');
        text.push_str(&details);
    }
    text
}
