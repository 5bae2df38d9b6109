//! The set of VMs of the built daemon: they come and go while others run, a reload changes what it has to, and nothing that
//! is wrong touches a running VM.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation, unreachable_pub)]
#![allow(dead_code)] // Of what the tests share, each uses another part.

#[path = "../daemon/mod.rs"]
mod daemon;
#[path = "../mock_guest/mod.rs"]
mod mock_guest;

mod directory;
mod reload;
mod service;
mod unprivileged;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;

use daemon::{Daemon, exists, poll};
use mock_guest::balloon::{Balloon, INFLATE, REPORTING};
use mock_guest::{UPPER, UPPER_OFFSET, memfd};

const HUGE: u64 = 2 << 20;
/// With REPORTING alone Linux numbers the reporting queue 2.
const REPORTS: usize = 2;

fn ok(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn fails(output: &Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for word in words {
        assert!(said.contains(word), "{said:?} lacks {word:?}");
    }
}

/// A guest whose kernel reports.
fn guest(socket: &Path) -> Balloon {
    let mut balloon = Balloon::connect(socket, memfd(), REPORTING);
    balloon.start(&[INFLATE, REPORTS]);
    balloon
}

/// Whether what it reports is dropped: the proof that this VM is served. On a busy machine a report may come too late.
fn is_served(balloon: &mut Balloon) -> bool {
    (0..5).any(|_| is_dropped(balloon))
}

fn is_dropped(balloon: &mut Balloon) -> bool {
    balloon.file.write_all_at(&[0xaa; 4096], UPPER_OFFSET).unwrap();
    balloon.report(REPORTS, &[(UPPER, HUGE as u32)]);
    balloon.wait_returned(REPORTS);
    let mut byte = [0xff];
    balloon.file.read_exact_at(&mut byte, UPPER_OFFSET).unwrap();
    byte == [0]
}

fn listed(daemon: &Daemon, name: &str) -> serde_json::Value {
    let vms: serde_json::Value = serde_json::from_str(&ok(&daemon.client(&["vm", "list", "--json"]))).unwrap();
    vms.as_array().unwrap().iter().find(|vm| vm["name"] == name).cloned().unwrap_or_default()
}

fn wait_for_state(daemon: &Daemon, name: &str, state: &str) {
    poll(&format!("{name} is {state}"), || {
        let vm = listed(daemon, name);
        if vm["state"] == state { Ok(()) } else { Err(vm) }
    });
}

fn wait_until_gone(daemon: &Daemon, name: &str) {
    poll(&format!("{name} is gone"), || {
        let vm = listed(daemon, name);
        if vm.is_null() { Ok(()) } else { Err(vm) }
    });
}

#[test]
fn vms_are_added_used_and_removed_while_another_runs() {
    let daemon = Daemon::start_with(&[], &["first"]);
    let mut first = guest(&daemon.balloon("first"));
    let (socket, vsock) = (daemon.socket("new-balloon"), daemon.socket("new"));
    let text = |path: &Path| path.to_str().unwrap().to_owned();

    ok(&daemon.client(&["vm", "add", "new", "--balloon", &text(&socket), "--socket", &text(&vsock), "--budget", "1G"]));
    let mut new = guest(&socket);
    assert!(is_served(&mut new) && is_served(&mut first));
    let vm = listed(&daemon, "new");
    assert_eq!((&vm["origin"], &vm["state"]), (&"command".into(), &"running".into()));
    let table = ok(&daemon.client(&["vm", "list"]));
    assert!(table.starts_with("VM") && table.contains("first") && table.contains("flag"), "{table}");

    let refused = daemon.client(&["vm", "remove", "new"]);
    fails(&refused, &["VM new", &format!("pid {}", std::process::id()), "--force"]);
    assert!(is_served(&mut new));
    ok(&daemon.client(&["vm", "remove", "new", "--force"]));
    assert!(!exists(&socket) && !exists(&vsock) && listed(&daemon, "new").is_null());
    assert!(is_served(&mut first));

    ok(&daemon.client(&["vm", "add", "new", "--balloon", &text(&socket)]));
    ok(&daemon.client(&["vm", "remove", "new"]));
    assert!(!exists(&socket));
    assert!(is_served(&mut first), "{}", daemon.vm("first"));
}

#[test]
fn what_cannot_be_added_or_removed_is_said_and_touches_nothing() {
    let daemon = Daemon::start_with(&[], &["first"]);
    let mut first = guest(&daemon.balloon("first"));
    let path = |name: &str| daemon.dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("file"), "precious").unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(path("used")).unwrap();
    let first_socket = daemon.balloon("first").to_str().unwrap().to_owned();
    let (long, nowhere) = (format!("/{}", "x".repeat(107)), path("missing/socket"));
    for (arguments, words) in [
        (vec!["add", "first", "--socket", "/x"], vec!["VM first", "already", "vm remove first"]),
        (vec!["add", "a", "--socket", &first_socket], vec!["first-balloon", "VM first"]),
        (vec!["add", "a"], vec!["VM a has no device", "--socket", "directory"]),
        (vec!["add", "a/b", "--socket", "/x"], vec!["a/b", "no VM name"]),
        (vec!["add", "..", "--socket", "/x"], vec!["no VM name"]),
        (vec!["add", "a", "--socket", "x.sock"], vec!["x.sock", "relative", "absolute"]),
        (vec!["add", "a", "--socket", &long], vec!["108 bytes", "107", "shorter"]),
        (vec!["add", "a", "--socket", &path("file")], vec!["file exists and is not a socket", "remove it"]),
        (vec!["add", "a", "--balloon", &path("used")], vec!["used is in use", "another socket path"]),
        (vec!["add", "a", "--socket", &nowhere], vec!["missing/socket", "directory exists"]),
        (vec!["add", "a", "--socket", "/x", "--guest-cid", "2"], vec!["guest_cid 2", "from 3"]),
        (vec!["add", "a", "--socket", "/x", "--budget", "0"], vec!["budget 0", "leave it out"]),
        (vec!["remove", "a"], vec!["no VM a", "first"]),
    ] {
        fails(&daemon.client(&[&["vm"], &arguments[..]].concat()), &words);
        assert!(listed(&daemon, "a").is_null(), "{arguments:?}");
    }
    // One of two sockets cannot be made: the other does not stay behind.
    fails(&daemon.client(&["vm", "add", "a", "--socket", &path("a"), "--balloon", &path("file")]), &["not a socket"]);
    poll("its other socket goes", || if exists(&daemon.socket("a")) { Err("there") } else { Ok(()) });
    assert_eq!(std::fs::read_to_string(path("file")).unwrap(), "precious");
    assert!(is_served(&mut first));
}

#[test]
fn a_shutdown_answers_every_vms_report_and_leaves_no_socket() {
    let names: Vec<String> = (0..40).map(|number| format!("vm{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut daemon = Daemon::start_with(&[], &names);
    let mut guests: Vec<Balloon> = names.iter().map(|name| guest(&daemon.balloon(name))).collect();
    for guest in &mut guests {
        guest.report(REPORTS, &[(UPPER, HUGE as u32)]);
    }
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    // What was taken is answered; what was not stays in the ring for the next daemon, and is not half-taken.
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(!daemon.log().contains("did not stop"), "{}", daemon.log());
    assert!(names.iter().all(|name| !exists(&daemon.balloon(name))));
}
