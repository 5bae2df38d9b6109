//! `memory`, as an operator would run it.

use crate::daemon::{Daemon, host_agent};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

fn memory(arguments: &[&str]) -> Output {
    host_agent().arg("memory").args(arguments).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn json_and_table_say_the_same() {
    let pid = std::process::id().to_string();
    let output = memory(&["--pid", &pid, "--json"]);
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let vm = &report["vms"][0];
    assert_eq!((&report["format"], &vm["pid"].to_string()), (&Value::from(1), &pid));
    let readings = vm["readings"].as_array().unwrap();
    let methods: Vec<&str> = readings.iter().map(|row| row["method"].as_str().unwrap()).collect();
    for method in ["rss", "pss", "cgroup", "rss-cgroup", "backing", "swap", "ksm", "thp"] {
        assert!(methods.contains(&method), "{method} is not in {methods:?}");
    }
    for row in readings {
        // Either a figure with all that belongs to it, or a reason.
        let keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        let figure = ["bytes", "source", "precision", "read_ns"].iter().all(|key| keys.contains(key));
        let absent = ["reason", "detail"].iter().all(|key| keys.contains(key));
        assert!(figure != absent, "{row}");
        assert_eq!(row["precision"] == "approximate", keys.contains(&"error_bound_bytes"), "{row}");
    }
    assert!(readings[0]["bytes"].as_u64().unwrap() > 1 << 20, "{}", readings[0]);

    let table = String::from_utf8(memory(&["--pid", &pid]).stdout).unwrap();
    assert!(table.starts_with(&format!("pid {pid}, ")), "{table}");
    for method in methods {
        assert!(table.lines().any(|line| line.split_whitespace().next() == Some(method)), "{method}: {table}");
    }
}

#[test]
fn methods_are_chosen() {
    let pid = std::process::id().to_string();
    let output = memory(&["--pid", &pid, "--method", "pss", "--method", "thp", "--method", "pss", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let readings = report["vms"][0]["readings"].as_array().unwrap();
    assert_eq!(readings.iter().map(|row| &row["method"]).collect::<Vec<_>>(), ["pss", "thp"]);
}

#[test]
fn vms_are_named_by_the_daemon() {
    let daemon = Daemon::start(&["web1", "web2"]);
    let control = daemon.control();
    let control = control.to_str().unwrap();
    let all: Value = serde_json::from_slice(&memory(&["--control", control, "--json"]).stdout).unwrap();
    let names: Vec<&Value> = all["vms"].as_array().unwrap().iter().map(|vm| &vm["name"]).collect();
    assert_eq!(names, ["web1", "web2"]);
    // Nobody is connected: nothing can be read, and that is said.
    let output = memory(&["web2", "--control", control]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("no front end is connected"), "{output:?}");
    let output = memory(&["web3", "--control", control]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no VM web3; there are: web1, web2"), "{}", stderr(&output));
}

/// Process 1 is somebody else's: its resident set is public, its page tables are not.
#[test]
fn without_rights_the_reason_is_said() {
    let dir = tempfile::tempdir().unwrap();
    // Under its own path the other user may not reach the binary.
    let binary = dir.path().join("fpr-host-agent");
    std::fs::copy(host_agent().get_program(), &binary).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(&binary);
    command.current_dir("/").args(["memory", "--pid", "1", "--json"]);
    for method in ["rss", "pss", "ksm", "backing"] {
        command.args(["--method", method]);
    }
    if nix::unistd::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut public = 0;
    for row in report["vms"][0]["readings"].as_array().unwrap() {
        if row["bytes"].is_u64() {
            public += 1;
            assert_eq!(row["method"], "rss", "{row}");
        } else {
            assert_eq!(row["reason"], "not-permitted", "{row}");
            assert!(row["detail"].as_str().unwrap().contains("CAP_SYS_PTRACE"), "{row}");
        }
    }
    assert!(public > 0, "{report:#}");
}

#[test]
fn bad_input_is_named() {
    for (arguments, code, words) in [
        (&["--pid", "0"][..], 2, &["--pid", "0"][..]),
        (&["--method", "vibes"], 2, &["vibes", "rss-cgroup"]),
        (&["web1", "--pid", "1"], 2, &["--pid"]),
        (&["--control", "/nonexistent/x.sock"], 69, &["/nonexistent/x.sock", "--pid"]),
    ] {
        let output = memory(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
        words.iter().for_each(|word| assert!(stderr(&output).contains(word), "{word}: {}", stderr(&output)));
        assert!(output.stdout.is_empty());
    }
    // A pid that does not exist is no wrong usage: it may have been right a moment ago.
    let output = memory(&["--pid", &i32::MAX.to_string()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("there is no such process"), "{output:?}");
    let output = memory(&["--cgroup", "/nonexistent/cgroup", "--method", "cgroup"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("/nonexistent/cgroup"), "{output:?}");
}
