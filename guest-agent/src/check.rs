//! `check`: what the agent found out about this guest, what it would do, and why not.

use crate::agent::Method;
use crate::config::Config;
use crate::kernel::detect::Finding;
use crate::run::facts::Guest;
use fpr_protocol::message::FreedPages;
use serde::Serialize;
use std::fmt::Write;

/// Everything `check` prints.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether memory of this guest would be reported.
    pub would_report: bool,
    /// Why not, or with what limits.
    pub remarks: Vec<String>,
    /// Where the host agent is looked for.
    pub connect: String,
    /// `uname -r`.
    pub kernel_release: String,
    /// Huge page, in bytes.
    pub huge_page_bytes: u64,
    /// Memory block, in bytes.
    pub memory_block_bytes: Option<u64>,
    /// `MemTotal`.
    pub memory_total_bytes: u64,
    /// Memory-block offlining.
    pub offlining: MethodReport,
    /// Huge-page claims.
    pub claims: MethodReport,
    /// How the kernel treats freed pages: `untouched`, `zeroed`, `poisoned` or `unknown`.
    pub freed_pages: &'static str,
    /// SEV, TDX and the like.
    pub confidential: bool,
    /// Evidence for the two above.
    pub findings: Vec<Finding>,
}

/// An isolation method.
#[derive(Debug, Serialize)]
pub struct MethodReport {
    /// Whether it can be used.
    pub usable: bool,
    /// Why not.
    pub reason: Option<String>,
}

impl From<&Method> for MethodReport {
    fn from(method: &Method) -> Self {
        match method {
            Method::Usable => Self { usable: true, reason: None },
            Method::Off(why) => Self { usable: false, reason: Some(why.clone()) },
        }
    }
}

/// Puts the findings together.
#[must_use]
pub fn report(guest: &Guest, config: &Config) -> Report {
    let facts = &guest.facts;
    let mut remarks = Vec::new();
    match facts.hello.freed_pages {
        FreedPages::Zeroed => remarks.push(
            "write-on-free: the kernel zeroes pages when it frees them, so dropped memory would be back at once; boot \
             without init_on_free=1"
                .to_owned(),
        ),
        FreedPages::Poisoned => remarks.push(
            "page-poison: the kernel fills freed pages and checks them; boot without page_poison, KASAN or \
             debug_pagealloc"
                .to_owned(),
        ),
        FreedPages::Untouched | FreedPages::Unknown => {}
    }
    if facts.hello.confidential {
        remarks.push("confidential-guest: the host cannot drop encrypted memory".to_owned());
    }
    let gated = !remarks.is_empty();
    let methods = facts.offline.is_usable() || facts.claims.is_usable();
    if !methods {
        remarks.push("no way to isolate memory; free page reporting by the kernel needs no agent".to_owned());
    } else if !facts.claims.is_usable() {
        remarks.push(
            "without claims the address check cannot be made, so nothing will be reported from offlined blocks either"
                .to_owned(),
        );
    }
    Report {
        would_report: !gated && facts.claims.is_usable(),
        remarks,
        connect: config.connect.to_string(),
        kernel_release: facts.hello.kernel_release.clone(),
        huge_page_bytes: facts.size.bytes(),
        memory_block_bytes: facts.block_bytes,
        memory_total_bytes: facts.hello.memory_total_bytes,
        offlining: MethodReport::from(&facts.offline),
        claims: MethodReport::from(&facts.claims),
        freed_pages: match facts.hello.freed_pages {
            FreedPages::Untouched => "untouched",
            FreedPages::Zeroed => "zeroed",
            FreedPages::Poisoned => "poisoned",
            FreedPages::Unknown => "unknown",
        },
        confidential: facts.hello.confidential,
        findings: guest.detection.findings.clone(),
    }
}

/// For a person.
#[must_use]
pub fn text(report: &Report) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<18}{value}");
    };
    line("would report", if report.would_report { "yes" } else { "no" });
    for remark in &report.remarks {
        line("", remark);
    }
    line("host agent", &report.connect);
    line("kernel", &report.kernel_release);
    line("memory", &format!("{}M", report.memory_total_bytes >> 20));
    line("huge page", &format!("{}K", report.huge_page_bytes >> 10));
    let block = report.memory_block_bytes.map_or("none".to_owned(), |bytes| format!("{}M", bytes >> 20));
    line("memory block", &block);
    for (name, method) in [("offlining", &report.offlining), ("claims", &report.claims)] {
        line(name, method.reason.as_deref().unwrap_or("usable"));
    }
    line("freed pages", report.freed_pages);
    line("confidential", if report.confidential { "yes" } else { "no" });
    for finding in &report.findings {
        line("", &format!("{}: {}", finding.check, finding.evidence));
    }
    text
}
