//! The built program on this machine, as an operator would run it.

use super::daemon::{Daemon, host_agent};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::process::Output;
use std::sync::Arc;
use vm_memory::{FileOffset, MmapRegion};

/// Large enough that nothing else in this process has a quarter of it.
const GUEST_BYTES: usize = 512 << 20;

fn doctor(arguments: &[&str]) -> Output {
    let output = host_agent().arg("doctor").args(arguments).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    output
}

/// The report; the exit code must be the one that its lines call for.
fn json(arguments: &[&str]) -> Value {
    let output = doctor(&[arguments, &["--json"]].concat());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let no = report["lines"].as_array().unwrap().iter().any(|line| line["verdict"] == "no");
    assert_eq!(output.status.code(), Some(i32::from(no)), "{report:#}");
    report
}

fn line<'a>(report: &'a Value, check: &str) -> &'a Value {
    report["lines"].as_array().unwrap().iter().find(|line| line["check"] == check).unwrap()
}

#[test]
fn json_and_table_say_the_same() {
    let report = json(&["--control", "/nonexistent/host.sock"]);
    assert_eq!((&report["format"], &report["pid"]), (&Value::from(1), &Value::Null));
    assert_eq!(line(&report, "daemon")["verdict"], "warn");
    let table = String::from_utf8(doctor(&["--control", "/nonexistent/host.sock"]).stdout).unwrap();
    assert!(!table.contains('\x1b'), "no colours into a pipe");
    for line in report["lines"].as_array().unwrap() {
        let (check, verdict) = (line["check"].as_str().unwrap(), line["verdict"].as_str().unwrap());
        let in_table = table.lines().any(|row| row.split_whitespace().take(2).eq([verdict, check]));
        assert!(in_table, "{verdict} {check} is not in {table}");
        assert_eq!(line["remedy"].is_null(), verdict == "ok", "{line}");
    }
}

#[test]
fn its_own_callers_memory_is_recognized() {
    let pid = std::process::id().to_string();
    let file = File::from(memfd_create("fpr-doctor", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(GUEST_BYTES as u64).unwrap();
    nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, 4 << 20).unwrap();
    let region: MmapRegion = MmapRegion::from_file(FileOffset::from_arc(Arc::new(file), 0), GUEST_BYTES).unwrap();

    let report = json(&["--pid", &pid]);
    assert_eq!(report["pid"].to_string(), pid);
    assert_eq!(line(&report, "process")["figures"]["exists"], true);
    let memory = line(&report, "memory");
    assert_eq!(memory["verdict"], "ok", "{memory}");
    assert_eq!(memory["figures"]["guest_bytes"], GUEST_BYTES);
    assert_eq!(memory["figures"]["allocated_bytes"], 4 << 20);
    assert_eq!(memory["figures"]["mappings"][0]["backed"], "memfd");
    drop(region);

    // The same without a file: only the process itself could drop it.
    let _region: MmapRegion = MmapRegion::new(GUEST_BYTES).unwrap();
    let report = json(&["--pid", &pid]);
    assert_eq!(line(&report, "memory")["verdict"], "no");
    assert_eq!(line(&report, "memory")["figures"]["mappings"][0]["backed"], "anonymous");
    assert_eq!(line(&report, "usable")["verdict"], "no");
}

#[test]
fn a_process_that_does_not_exist_is_a_no() {
    // Larger than any pid: PID_MAX_LIMIT is 2^22 (include/linux/threads.h).
    let report = json(&["--pid", "5000000"]);
    assert_eq!(report["verdict"], "no");
    assert_eq!(line(&report, "process")["figures"]["exists"], false);
    assert_eq!(report["lines"].as_array().unwrap().last().unwrap()["check"], "process");
}

#[test]
fn a_pid_that_is_none_is_wrong_usage() {
    for pid in ["0", "-1", "self", "99999999999"] {
        let output = host_agent().args(["doctor", &format!("--pid={pid}")]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{pid}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("--pid"), "{pid}");
    }
}

#[test]
fn a_running_daemon_is_found_and_looked_at() {
    let daemon = Daemon::start(&["web1"]);
    let report = json(&["--control", daemon.control().to_str().unwrap()]);
    assert_eq!(line(&report, "daemon")["verdict"], "ok", "{report:#}");
    assert_eq!(line(&report, "daemon")["figures"]["pid"], daemon.pid());
    assert_eq!(line(&report, "daemon")["figures"]["vms"], 1);
    assert!(line(&report, "drop-guard")["reason"].as_str().unwrap().contains("the daemon"));
    let pid = std::process::id().to_string();
    let report = json(&["--control", daemon.control().to_str().unwrap(), "--pid", &pid]);
    assert_eq!(line(&report, "connected")["verdict"], "warn", "this process is no front end");
}

#[test]
fn every_check_and_figure_is_documented() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/host-agent.md")).unwrap();
    let (_, section) = text.split_once("## Doctor").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let mut words: BTreeSet<String> =
        fpr_host_agent::doctor::Check::ALL.iter().map(|check| check.word().to_owned()).collect();
    let report = json(&["--pid", &std::process::id().to_string()]);
    for line in report["lines"].as_array().unwrap() {
        words.extend(line.as_object().unwrap().keys().cloned());
        words.extend(line["figures"].as_object().unwrap().keys().cloned());
    }
    let missing: Vec<_> = words.iter().filter(|word| !section.contains(&format!("`{word}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
