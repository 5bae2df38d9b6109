//! `rank`: which VM to ask for memory, as the daemon sees it.

use crate::print;
use fpr_host_agent::control::{self, Command};
use fpr_host_agent::fields::table::{shortened, size};
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;

/// Asks and prints.
pub(crate) fn run(top: Option<u16>, control: &Path, json: bool) -> anyhow::Result<()> {
    let ranking = control::ask(control, &Command::Rank { top: top.map(usize::from) })?;
    print(&if json { format!("{ranking:#}\n") } else { table(&ranking) })
}

/// The table; what the guest claims is called so.
fn table(ranking: &Value) -> String {
    let mut text = format!("{:24} {:>12} {:>8} {:>12}  {}\n", "VM", "RECLAIMABLE", "HELD", "CLAIMED USED", "WHY NOT");
    for vm in ranking["vms"].as_array().into_iter().flatten() {
        #[allow(clippy::cast_precision_loss)] // three digits are shown
        let bytes = |field: &str| vm[field].as_u64().map_or_else(|| "-".to_owned(), |bytes| size(bytes as f64));
        let line = format!(
            "{:24} {:>12} {:>8} {:>12}  {}",
            shortened(vm["name"].as_str().unwrap_or("?")),
            bytes("reclaimable_bytes"),
            bytes("held_bytes"),
            bytes("guest_claimed_used_bytes"),
            obstacle(&vm["obstacle"]),
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn obstacle(obstacle: &Value) -> String {
    match obstacle["detail"].as_str() {
        Some(detail) => detail.to_owned(),
        None => String::new(),
    }
}
