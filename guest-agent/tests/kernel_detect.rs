//! What the agent concludes from fake kernel trees, and from the machine the test runs on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use fpr_guest_agent::kernel::Roots;
use fpr_guest_agent::kernel::detect::{Check, Detection, Meaning, detect};
use fpr_protocol::message::FreedPages;
use std::collections::BTreeSet;
use std::fs;

const CONFIG: &str = "boot/config-6.12";
const OFF_LOG: &str =
    "5,0,0,-;Linux version 6.12\n6,1,9,-;mem auto-init: stack:all(zero), heap alloc:on, heap free:off\n";
const ON_LOG: &str = "6,1,9,-;mem auto-init: stack:all(zero), heap alloc:on, heap free:on\n";
const PLAIN_CONFIG: &str = "CONFIG_PAGE_POISONING=y\n# CONFIG_INIT_ON_FREE_DEFAULT_ON is not set\n";

fn with(files: &[(&str, &str)], off: &[Check]) -> Detection {
    let directory = tempfile::tempdir().unwrap();
    let plain =
        [("proc/cmdline", "quiet\n"), ("proc/cpuinfo", "flags\t: fpu sev\n"), ("proc/sys/kernel/osrelease", "6.12\n")];
    for (path, text) in plain.iter().chain(files) {
        let path = directory.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    detect(&Roots::below(directory.path()), &off.iter().copied().collect())
}

fn freed(files: &[(&str, &str)]) -> FreedPages {
    with(files, &[]).freed_pages
}

fn evidence(detection: &Detection, meaning: Meaning) -> Vec<String> {
    let found = detection.findings.iter().filter(|finding| finding.meaning == meaning);
    found.map(|finding| finding.evidence.clone()).collect()
}

#[test]
fn a_stock_guest_leaves_freed_pages_alone() {
    assert_eq!(freed(&[("dev/kmsg", OFF_LOG)]), FreedPages::Untouched);
    assert_eq!(freed(&[(CONFIG, PLAIN_CONFIG)]), FreedPages::Untouched);
    assert_eq!(freed(&[("proc/cmdline", "init_on_free=0\n")]), FreedPages::Untouched);
}

#[test]
fn zeroing_has_its_evidence() {
    let found = with(&[("proc/cmdline", "quiet init_on_free=1\n"), ("dev/kmsg", ON_LOG)], &[]);
    assert_eq!(found.freed_pages, FreedPages::Zeroed);
    let evidence = evidence(&found, Meaning::Zeroes);
    assert!(evidence[0].ends_with("/proc/cmdline: init_on_free=1"), "{evidence:?}");
    assert!(
        evidence[1].ends_with("/dev/kmsg: mem auto-init: stack:all(zero), heap alloc:on, heap free:on"),
        "{evidence:?}"
    );
}

#[test]
fn the_log_outranks_the_command_line_and_that_the_default() {
    assert_eq!(freed(&[(CONFIG, "CONFIG_INIT_ON_FREE_DEFAULT_ON=y\n")]), FreedPages::Zeroed);
    let overridden = [(CONFIG, "CONFIG_INIT_ON_FREE_DEFAULT_ON=y\n"), ("proc/cmdline", "init_on_free=off\n")];
    assert_eq!(freed(&overridden), FreedPages::Untouched);
    assert_eq!(freed(&[(CONFIG, PLAIN_CONFIG), ("dev/kmsg", ON_LOG)]), FreedPages::Zeroed);
    assert_eq!(freed(&[("proc/cmdline", "init_on_free=1\n"), ("dev/kmsg", OFF_LOG)]), FreedPages::Untouched);
}

#[test]
fn any_sign_of_poisoning_counts() {
    for line in ["page_poison=1\n", "page_poison=on init_on_free=1\n", "debug_pagealloc=on\n"] {
        assert_eq!(freed(&[("proc/cmdline", line), ("dev/kmsg", OFF_LOG)]), FreedPages::Poisoned, "{line}");
    }
    for message in [
        "mem auto-init: CONFIG_PAGE_POISONING is on, will take precedence over init_on_alloc and init_on_free",
        "kasan: KernelAddressSanitizer initialized (generic)",
    ] {
        let log = format!("{OFF_LOG}6,2,9,-;{message}\n");
        assert_eq!(freed(&[("dev/kmsg", &log)]), FreedPages::Poisoned, "{message}");
    }
    assert_eq!(freed(&[(CONFIG, "CONFIG_KASAN=y\n")]), FreedPages::Poisoned);
    assert_eq!(freed(&[(CONFIG, "CONFIG_KASAN=y\nCONFIG_KASAN_HW_TAGS=y\n")]), FreedPages::Untouched);
    assert_eq!(
        freed(&[("proc/cmdline", "page_poison=1 page_poison=0\n"), ("dev/kmsg", OFF_LOG)]),
        FreedPages::Untouched
    );
}

#[test]
fn what_was_not_looked_at_is_unknown() {
    assert_eq!(freed(&[]), FreedPages::Unknown);
    let zeroed = [("proc/cmdline", "init_on_free=1\n"), ("dev/kmsg", ON_LOG)];
    let all = with(&zeroed, &Check::ALL);
    assert_eq!(all.freed_pages, FreedPages::Unknown);
    assert_eq!(evidence(&all, Meaning::NotChecked).len(), Check::ALL.len());
    assert_eq!(with(&zeroed, &[Check::CommandLine]).freed_pages, FreedPages::Zeroed);
    assert_eq!(with(&zeroed, &[Check::BootLog]).freed_pages, FreedPages::Zeroed);
    // Poisoning is asked for on the command line only.
    assert_eq!(with(&[("dev/kmsg", OFF_LOG)], &[Check::CommandLine]).freed_pages, FreedPages::Unknown);
    let rotated = with(&[("dev/kmsg", "6,9,9,-;usb 1-1: new device\n")], &[]);
    assert!(evidence(&rotated, Meaning::NotChecked).iter().any(|text| text.contains("no longer in the log")));
}

#[test]
fn confidential_guests() {
    assert!(!with(&[], &[]).confidential);
    for (path, text) in [
        ("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu tdx_guest\n"),
        ("dev/sev-guest", ""),
        ("dev/tdx_guest", ""),
        ("sys/devices/system/cpu/sev/vmpl", "0\n"),
        ("sys/firmware/cca/realm_guest", "1\n"),
        ("sys/firmware/uv/prot_virt_guest", "1\n"),
        ("dev/kmsg", "6,1,9,-;Memory Encryption Features active: AMD SEV SEV-ES\n"),
        ("dev/kmsg", "6,1,9,-;AMD Memory Encryption Features active: SEV\n"),
        ("dev/kmsg", "6,1,9,-;Memory Encryption Features active: Intel TDX\n"),
    ] {
        let found = with(&[(path, text)], &[]);
        assert!(found.confidential, "{path} {text}");
        assert!(evidence(&found, Meaning::Confidential)[0].contains(path), "{path} {text}");
    }
    for (path, text) in [
        ("sys/firmware/uv/prot_virt_guest", "0\n"),
        ("dev/kmsg", "6,1,9,-;Memory Encryption Features active: AMD SME\n"),
        // A process wrote this one.
        ("dev/kmsg", "12,1,9,-;Memory Encryption Features active: Intel TDX\n"),
    ] {
        assert!(!with(&[(path, text)], &[]).confidential, "{path} {text}");
    }
}

#[test]
fn checks_have_one_name() {
    for check in Check::ALL {
        assert_eq!(check.word().parse(), Ok(check));
        assert_eq!(serde_json::to_string(&check).unwrap(), format!("\"{check}\""));
    }
    assert!("cmdline".parse::<Check>().unwrap_err().to_string().contains("command-line"));
}

#[test]
fn this_machine() {
    let found = detect(&Roots::default(), &BTreeSet::new());
    assert!(found.findings.iter().any(|finding| finding.check == Check::CommandLine), "{found:?}");
    for finding in &found.findings {
        println!("{} {:?}: {}", finding.check, finding.meaning, finding.evidence);
    }
    println!("{:?}", found.freed_pages);
}
