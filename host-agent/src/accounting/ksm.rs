//! What KSM has merged of a process.
//!
//! Merged is not saved: of pages with the same content one stays, and the counter of each process counts its own share
//! of them (`stable_tree_append` in `mm/ksm.c`). What the kernel reckons as saved is `ksm_process_profit`.

use super::parse::{self, Malformed};
use super::percpu::Kernel;
use super::process::Process;
use super::{Absent, AbsentReason, Measured, Precision};
use serde::Serialize;

const REMEDY: &str = "Linux has it since 6.1, with CONFIG_KSM";

/// What `ksm_stat` says of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KsmStat {
    /// In pages that share their frame with an equal one.
    pub merging_bytes: u64,
    /// In pages replaced by the kernel's zero page (`use_zero_pages`); no longer in the resident set.
    pub zero_bytes: u64,
    /// What the kernel reckons as saved, less what it spends to remember it; below zero where that is more. Linux 6.4.
    pub profit_bytes: Option<i64>,
}

pub(super) fn stat(process: &Process, kernel: &Kernel) -> Result<KsmStat, Absent> {
    let path = process.path("ksm_stat");
    let text = process.text("ksm_stat", REMEDY)?;
    if text.is_empty() {
        let detail = format!("{}: is empty: the process has exited or has no memory of its own", path.display());
        return Err(Absent::new(AbsentReason::NoProcess, detail));
    }
    let malformed = |malformed: Malformed| Absent::malformed(&path, &malformed);
    // Linux 6.1 to 6.3 have the file without these two; the first is then in a file of its own.
    let merging_bytes = match parse::count(&text, "ksm_merging_pages", kernel.page_bytes) {
        Err(Malformed::Missing(_)) => merging(process, kernel)?,
        merging => merging.map_err(malformed)?,
    };
    let zero_bytes = match parse::count(&text, "ksm_zero_pages", kernel.page_bytes) {
        Err(Malformed::Missing(_)) => 0,
        zero => zero.map_err(malformed)?,
    };
    let profit_bytes = match parse::signed(&text, "ksm_process_profit") {
        Err(Malformed::Missing(_)) => None,
        profit => Some(profit.map_err(malformed)?),
    };
    Ok(KsmStat { merging_bytes, zero_bytes, profit_bytes })
}

fn merging(process: &Process, kernel: &Kernel) -> Result<u64, Absent> {
    let text = process.text("ksm_merging_pages", "Linux has it since 5.19, with CONFIG_KSM")?;
    parse::bytes(&text, "ksm_merging_pages", kernel.page_bytes)
        .map_err(|malformed| Absent::malformed(&process.path("ksm_merging_pages"), &malformed))
}

/// What is merged, wherever this kernel says it.
pub(super) fn merged(process: &Process, kernel: &Kernel) -> Result<Measured, Absent> {
    let (bytes, source) = match stat(process, kernel) {
        Ok(stat) => (stat.merging_bytes.saturating_add(stat.zero_bytes), "ksm_stat ksm_merging_pages + ksm_zero_pages"),
        Err(Absent { reason: AbsentReason::NotSupported, .. }) => (merging(process, kernel)?, "ksm_merging_pages"),
        Err(absent) => return Err(absent),
    };
    Ok(Measured { bytes, precision: Precision::Precise, source: source.to_owned() })
}
