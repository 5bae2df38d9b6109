//! Whether dropping the guest's free memory is safe and of use: how the kernel treats pages it frees, and whether the
//! guest is confidential.
//!
//! The agent calls it once at start, for `Hello` and for `check`. Each finding carries its evidence. A check can be
//! switched off by name, by operators who know better and by tests of what happens when nothing is known; then, and when
//! a file cannot be read, the answer is [`FreedPages::Unknown`] rather than a guess.
//!
//! The kernel's rules (`mm/mm_init.c`, `mem_debugging_and_hardening_init`): poisoning wins over zeroing;
//! `init_on_free` on the command line wins over `CONFIG_INIT_ON_FREE_DEFAULT_ON`; the boot log says what came of both.

use super::command_line;
use super::kernel_config::KernelConfig;
use super::text::read_once;
use super::{ReadError, Roots, boot_log, identity};
use fpr_protocol::message::FreedPages;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::ControlFlow;

/// A source of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// `/proc/cmdline`.
    CommandLine,
    /// `/dev/kmsg`.
    BootLog,
    /// `/boot/config-RELEASE`.
    KernelConfig,
    /// `/proc/cpuinfo`.
    CpuFlags,
    /// Device nodes and sysfs entries of confidential guests.
    Devices,
}

impl Check {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::CommandLine, Self::BootLog, Self::KernelConfig, Self::CpuFlags, Self::Devices];

    /// The word operators read and write.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::CommandLine => "command-line",
            Self::BootLog => "boot-log",
            Self::KernelConfig => "kernel-config",
            Self::CpuFlags => "cpu-flags",
            Self::Devices => "devices",
        }
    }
}

impl std::fmt::Display for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

/// No check has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no check {0:?}; there are command-line, boot-log, kernel-config, cpu-flags and devices")]
pub struct UnknownCheck(pub String);

impl std::str::FromStr for Check {
    type Err = UnknownCheck;

    fn from_str(word: &str) -> Result<Self, UnknownCheck> {
        Self::ALL.into_iter().find(|check| check.word() == word).ok_or_else(|| UnknownCheck(word.to_owned()))
    }
}

/// What a piece of evidence means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Meaning {
    /// Freed pages are filled with a pattern.
    Poisons,
    /// No parameter asks for poisoning, and no kernel poisons without one.
    DoesNotPoison,
    /// Freed pages are zeroed.
    Zeroes,
    /// They are not.
    DoesNotZero,
    /// The guest's memory is encrypted or otherwise out of the host's reach.
    Confidential,
    /// The check was not made, or its file could not be read.
    NotChecked,
}

/// One piece of evidence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Where it comes from.
    pub check: Check,
    /// What it means.
    pub meaning: Meaning,
    /// File and text, such as `/proc/cmdline: init_on_free=1`.
    pub evidence: String,
}

/// All findings and what follows from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detection {
    /// How the kernel treats freed pages.
    pub freed_pages: FreedPages,
    /// SEV, TDX and the like.
    pub confidential: bool,
    /// The evidence.
    pub findings: Vec<Finding>,
}

/// Makes all checks but those in `switched_off`. A check that fails is a finding, not an error.
#[must_use]
pub fn detect(roots: &Roots, switched_off: &BTreeSet<Check>) -> Detection {
    let mut findings = Vec::new();
    for check in Check::ALL {
        let mut add = |meaning, evidence| findings.push(Finding { check, meaning, evidence });
        if switched_off.contains(&check) {
            add(Meaning::NotChecked, "switched off by configuration".to_owned());
            continue;
        }
        let result = match check {
            Check::CommandLine => command_line(roots, &mut add),
            Check::BootLog => boot_log(roots, &mut add),
            Check::KernelConfig => kernel_config(roots, &mut add),
            Check::CpuFlags => cpu_flags(roots, &mut add),
            Check::Devices => {
                devices(roots, &mut add);
                Ok(())
            }
        };
        if let Err(error) = result {
            add(Meaning::NotChecked, error.to_string());
        }
    }
    let confidential = findings.iter().any(|finding| finding.meaning == Meaning::Confidential);
    Detection { freed_pages: freed_pages(&findings), confidential, findings }
}

/// The verdict. What the kernel logged about zeroing outranks what it was told, which outranks its default; poisoning
/// has no such order: any sign of it counts.
fn freed_pages(findings: &[Finding]) -> FreedPages {
    if findings.iter().any(|finding| finding.meaning == Meaning::Poisons) {
        return FreedPages::Poisoned;
    }
    let zeroes = [Check::BootLog, Check::CommandLine, Check::KernelConfig].into_iter().find_map(|check| {
        findings.iter().filter(|finding| finding.check == check).find_map(|finding| match finding.meaning {
            Meaning::Zeroes => Some(true),
            Meaning::DoesNotZero => Some(false),
            _ => None,
        })
    });
    let no_poison = findings.iter().any(|finding| finding.meaning == Meaning::DoesNotPoison);
    match zeroes {
        Some(true) => FreedPages::Zeroed,
        Some(false) if no_poison => FreedPages::Untouched,
        _ => FreedPages::Unknown,
    }
}

type Add<'a> = &'a mut dyn FnMut(Meaning, String);

fn command_line(roots: &Roots, add: Add<'_>) -> Result<(), ReadError> {
    let path = roots.proc.join("cmdline");
    let line = read_once(path.clone(), |text| Ok(text.to_owned()))?;
    let mut poisons = false;
    // debug_pagealloc poisons where the architecture cannot unmap pages instead; elsewhere each later access to a freed
    // page is meant to fault. Such a kernel hunts bugs: nothing is to be gained there.
    for name in ["page_poison", "debug_pagealloc"] {
        if command_line::truth(&line, name) == Some(true) {
            let value = command_line::last(&line, name).unwrap_or_default();
            add(Meaning::Poisons, format!("{}: {name}={value}", path.display()));
            poisons = true;
        }
    }
    if !poisons {
        add(Meaning::DoesNotPoison, format!("{}: neither page_poison nor debug_pagealloc is on", path.display()));
    }
    if let Some(zeroes) = command_line::truth(&line, "init_on_free") {
        let value = command_line::last(&line, "init_on_free").unwrap_or_default();
        let meaning = if zeroes { Meaning::Zeroes } else { Meaning::DoesNotZero };
        add(meaning, format!("{}: init_on_free={value}", path.display()));
    }
    Ok(())
}

fn boot_log(roots: &Roots, add: Add<'_>) -> Result<(), ReadError> {
    let path = roots.dev.join("kmsg");
    let mut found = false;
    boot_log::messages(roots, |message| {
        if let Some(meaning) = logged(message) {
            found = true;
            add(meaning, format!("{}: {message}", path.display()));
        }
        ControlFlow::Continue(())
    })?;
    if !found {
        add(Meaning::NotChecked, format!("{}: the boot messages are no longer in the log", path.display()));
    }
    Ok(())
}

/// What a line of the boot log means.
fn logged(message: &str) -> Option<Meaning> {
    if let Some(state) = message.strip_prefix("mem auto-init: ") {
        // "stack:off, heap alloc:on, heap free:off" (report_meminit), or
        // "CONFIG_PAGE_POISONING is on, will take precedence over init_on_alloc and init_on_free".
        return match state {
            _ if state.starts_with("CONFIG_PAGE_POISONING is on") => Some(Meaning::Poisons),
            _ if state.contains("heap free:on") => Some(Meaning::Zeroes),
            _ if state.contains("heap free:off") => Some(Meaning::DoesNotZero),
            _ => None,
        };
    }
    // kasan_init: "KernelAddressSanitizer initialized (generic)".
    if message.contains("KernelAddressSanitizer initialized") {
        return Some(Meaning::Poisons);
    }
    // "Memory Encryption Features active: AMD SEV SEV-ES", "AMD Memory Encryption Features active: SEV" before Linux
    // 5.19, "Memory Encryption Features active: Intel TDX"; but "AMD SME" is a host or a plain machine.
    let (_, features) = message.split_once("Memory Encryption Features active:")?;
    let mut features = features.split_ascii_whitespace();
    features.any(|name| name.starts_with("SEV") || name == "TDX").then_some(Meaning::Confidential)
}

const INIT_ON_FREE_DEFAULT_ON: &str = "CONFIG_INIT_ON_FREE_DEFAULT_ON";
const DEBUG_PAGEALLOC_DEFAULT_ON: &str = "CONFIG_DEBUG_PAGEALLOC_ENABLE_DEFAULT";
const KASAN: &str = "CONFIG_KASAN";
/// KASAN in tagged memory works only on processors that have it; the boot log tells.
const KASAN_HW_TAGS: &str = "CONFIG_KASAN_HW_TAGS";

fn kernel_config(roots: &Roots, add: Add<'_>) -> Result<(), ReadError> {
    let release = identity::kernel_release(roots)?;
    let options = [INIT_ON_FREE_DEFAULT_ON, DEBUG_PAGEALLOC_DEFAULT_ON, KASAN, KASAN_HW_TAGS];
    let Some(config) = KernelConfig::read(roots, &release, &options)? else {
        add(Meaning::NotChecked, format!("no config-{release} in {}", roots.boot.display()));
        return Ok(());
    };
    let path = config.path().display();
    if config.is_enabled(INIT_ON_FREE_DEFAULT_ON) {
        add(Meaning::Zeroes, format!("{path}: {INIT_ON_FREE_DEFAULT_ON}=y"));
    } else {
        add(Meaning::DoesNotZero, format!("{path}: {INIT_ON_FREE_DEFAULT_ON} is not set"));
    }
    if config.is_enabled(KASAN) && !config.is_enabled(KASAN_HW_TAGS) {
        add(Meaning::Poisons, format!("{path}: {KASAN}=y"));
    }
    if config.is_enabled(DEBUG_PAGEALLOC_DEFAULT_ON) {
        add(Meaning::Poisons, format!("{path}: {DEBUG_PAGEALLOC_DEFAULT_ON}=y"));
    }
    Ok(())
}

fn cpu_flags(roots: &Roots, add: Add<'_>) -> Result<(), ReadError> {
    let path = roots.proc.join("cpuinfo");
    // The flags sev, sev_es and sev_snp say what a host could do; tdx_guest is set in guests only.
    let is_tdx = read_once(path.clone(), |text| {
        let flags = text.lines().find(|line| line.starts_with("flags"));
        Ok(flags.is_some_and(|flags| flags.split_ascii_whitespace().any(|flag| flag == "tdx_guest")))
    })?;
    if is_tdx {
        add(Meaning::Confidential, format!("{}: flag tdx_guest", path.display()));
    }
    Ok(())
}

fn devices(roots: &Roots, add: Add<'_>) {
    // Drivers of drivers/virt/coco, made in confidential guests only, and the attributes by which SEV-SNP guests
    // (Documentation/ABI, sysfs-devices-system-cpu) and Arm realms (sysfs-firmware-cca) know themselves.
    let signs = [
        roots.dev.join("sev-guest"),
        roots.dev.join("tdx_guest"),
        roots.sys.join("devices/system/cpu/sev/vmpl"),
        roots.sys.join("firmware/cca/realm_guest"),
    ];
    for path in signs.iter().filter(|path| path.exists()) {
        add(Meaning::Confidential, format!("{} exists", path.display()));
    }
    // s390 Secure Execution: the file is there in every guest.
    let secure_execution = roots.sys.join("firmware/uv/prot_virt_guest");
    if read_once(secure_execution.clone(), |text| Ok(text.trim() == "1")).unwrap_or(false) {
        add(Meaning::Confidential, format!("{}: 1", secure_execution.display()));
    }
}
