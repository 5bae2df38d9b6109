//! The VM directory.

use std::fs;
use std::path::PathBuf;

use super::daemon::{Daemon, exists, poll};
use super::{fails, guest, is_served, listed, ok, wait_for_state, wait_until_gone};

fn daemon() -> (Daemon, PathBuf) {
    let config = |dir: &std::path::Path| format!("directory = \"{}\"\n", dir.join("vm").display());
    let daemon = Daemon::start_configured(config, &[], &[]);
    let vms = daemon.dir.path().join("vm");
    (daemon, vms)
}

#[test]
fn a_folder_is_a_vm_for_as_long_as_it_is_there_or_its_front_end() {
    let (daemon, vms) = daemon();
    fs::create_dir(vms.join(".web1")).unwrap();
    fs::rename(vms.join(".web1"), vms.join("web1")).unwrap();
    wait_for_state(&daemon, "web1", "running");
    assert!(exists(&vms.join("web1/vsock.sock")));
    let mut web1 = guest(&vms.join("web1/balloon.sock"));
    assert!(is_served(&mut web1));
    assert_eq!(daemon.vm("web1")["origin"], "directory");

    fs::remove_dir_all(vms.join("web1")).unwrap();
    wait_for_state(&daemon, "web1", "leaving");
    assert!(is_served(&mut web1));
    // Made anew: the next VM of that name, when the front end of this one has gone.
    fs::create_dir(vms.join("web1")).unwrap();
    wait_for_state(&daemon, "web1", "changing");
    drop(web1);
    wait_for_state(&daemon, "web1", "running");
    assert!(is_served(&mut guest(&vms.join("web1/balloon.sock"))));
    fs::remove_dir_all(vms.join("web1")).unwrap();
    wait_until_gone(&daemon, "web1");
}

#[test]
fn commands_make_and_remove_folders() {
    let (daemon, vms) = daemon();
    ok(&daemon.client(&["vm", "add", "web1"]));
    assert!(is_served(&mut guest(&vms.join("web1/balloon.sock"))));
    fails(&daemon.client(&["vm", "add", "web1"]), &["VM web1", "already", "directory"]);
    poll("removed", || {
        let output = daemon.client(&["vm", "remove", "web1"]);
        if output.status.success() { Ok(()) } else { Err(output) }
    });
    assert!(!exists(&vms.join("web1")));

    // Something of somebody else's is in it: the folder stays, the VM does not come back by itself.
    ok(&daemon.client(&["vm", "add", "web2"]));
    fs::write(vms.join("web2/notes"), "precious").unwrap();
    ok(&daemon.client(&["vm", "remove", "web2"]));
    fs::create_dir(vms.join("web3")).unwrap();
    wait_for_state(&daemon, "web3", "running");
    assert!(listed(&daemon, "web2").is_null() && exists(&vms.join("web2/notes")));
    ok(&daemon.client(&["vm", "add", "web2"]));
    assert_eq!(listed(&daemon, "web2")["state"], "running");
}

#[test]
fn what_cannot_be_a_vm_is_shown_and_a_flood_of_it_is_bounded() {
    let (daemon, vms) = daemon();
    fs::create_dir(vms.join("good")).unwrap();
    wait_for_state(&daemon, "good", "running");
    let mut good = guest(&vms.join("good/balloon.sock"));
    fs::create_dir(vms.join("bad name")).unwrap();
    std::os::unix::fs::symlink("good", vms.join("link")).unwrap();
    wait_for_state(&daemon, "bad name", "failed");
    wait_for_state(&daemon, "link", "failed");
    let table = ok(&daemon.client(&["vm", "list"]));
    assert!(table.contains("no VM name") && table.contains("symbolic link"), "{table}");

    for number in 0..200 {
        fs::create_dir(vms.join(format!("bad {number}"))).unwrap();
    }
    poll("as many as are shown", || {
        let failed = daemon.status()["vms"].as_array().unwrap().iter().filter(|vm| vm["state"] == "failed").count();
        if failed == 32 { Ok(()) } else { Err(failed) }
    });
    assert!(is_served(&mut good));
    let lines = daemon.log().lines().filter(|line| line.contains("no such VM can be made")).count();
    assert!(lines <= 10, "{lines} lines of log");
    fs::remove_dir(vms.join("bad name")).unwrap();
    wait_until_gone(&daemon, "bad name");
}
