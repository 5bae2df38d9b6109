//! SIGHUP and `reload`.

use nix::sys::signal::Signal;
use serde_json::json;

use super::daemon::{Daemon, exists, poll};
use super::{guest, is_served, listed, ok, wait_for_state, wait_until_gone};

struct Rig {
    daemon: Daemon,
}

impl Rig {
    /// VMs of the file, each with a balloon socket of its name.
    fn new(vms: &[&str]) -> Self {
        let daemon = Daemon::start_configured(|dir| text(dir, vms), &[], &[]);
        Self { daemon }
    }

    fn write(&self, text: &str) {
        std::fs::write(self.daemon.dir.path().join("host.toml"), text).unwrap();
    }

    fn rewrite(&self, vms: &[&str]) {
        self.write(&text(self.daemon.dir.path(), vms));
    }
}

/// `name` or `name@socket`, then lines of the table.
fn text(dir: &std::path::Path, vms: &[&str]) -> String {
    let table = |vm: &&str| {
        let (head, rest) = vm.split_once('\n').unwrap_or((vm, ""));
        let (name, socket) = head.split_once('@').unwrap_or((head, head));
        format!("[vm.{name}]\nballoon = \"{}-balloon\"\n{rest}\n", dir.join(socket).display())
    };
    vms.iter().map(table).collect()
}

#[test]
fn new_vms_come_and_removed_ones_wait_for_their_front_end() {
    let rig = Rig::new(&["stays", "used", "unused"]);
    let daemon = &rig.daemon;
    let (mut stays, mut used) = (guest(&daemon.balloon("stays")), guest(&daemon.balloon("used")));

    rig.rewrite(&["stays", "new"]);
    daemon.signal(Signal::SIGHUP);

    wait_for_state(daemon, "new", "running");
    wait_for_state(daemon, "used", "leaving");
    wait_until_gone(daemon, "unused");
    assert!(is_served(&mut stays) && is_served(&mut used), "a reload touched a running VM");
    assert_eq!(daemon.vm("used")["state"], "leaving");
    assert!(exists(&daemon.balloon("new")) && !exists(&daemon.balloon("unused")));
    drop(used);
    wait_until_gone(daemon, "used");
    assert!(!exists(&daemon.balloon("used")) && is_served(&mut stays));
}

#[test]
fn who_is_wanted_again_stays() {
    let rig = Rig::new(&["a"]);
    let daemon = &rig.daemon;
    let mut a = guest(&daemon.balloon("a"));
    rig.rewrite(&[]);
    assert!(ok(&daemon.client(&["reload"])).contains("a: removed"));
    wait_for_state(daemon, "a", "leaving");
    rig.rewrite(&["a"]);
    ok(&daemon.client(&["reload"]));
    wait_for_state(daemon, "a", "running");
    assert!(is_served(&mut a));
    drop(a);
    assert!(is_served(&mut guest(&daemon.balloon("a"))), "it left after all");
}

#[test]
fn live_values_are_in_force_at_once_and_devices_when_the_front_end_has_gone() {
    let rig = Rig::new(&["a"]);
    let daemon = &rig.daemon;
    let mut a = guest(&daemon.balloon("a"));

    rig.rewrite(&["a\ninhibit = \"backup\""]);
    assert_eq!(ok(&daemon.client(&["reload"])), "a: changed\n");
    poll("the gate closes", || {
        let gates = daemon.vm("a")["gates"].clone();
        if gates[0]["detail"] == "backup" { Ok(()) } else { Err(gates) }
    });
    assert!(!is_served(&mut a));
    rig.rewrite(&["a@other"]);
    assert_eq!(ok(&daemon.client(&["reload"])), "a: begins anew when its front end has gone\n");
    wait_for_state(daemon, "a", "changing");
    drop(a);
    wait_for_state(daemon, "a", "running");
    assert!(!exists(&daemon.balloon("a")));
    assert!(is_served(&mut guest(&daemon.balloon("other"))));
}

#[test]
fn a_wrong_file_keeps_the_old_configuration_and_says_so_until_it_is_right() {
    let rig = Rig::new(&["a"]);
    let daemon = &rig.daemon;
    let mut a = guest(&daemon.balloon("a"));
    for (wrong, word) in [
        ("[vm.b]\nsokcet = \"/x\"\n", "sokcet"),
        ("[vm.b]\nsocket = 5\n", "line 2"),
        ("[vm.b]\nsocket = \"/x\"\nbudget = \"6X\"\n", "6X"),
        ("[vm.b]\n", "no device"),
    ] {
        rig.write(wrong);
        let output = daemon.client(&["reload"]);
        super::fails(&output, &["old configuration stays in force", "host.toml", word]);
        let error = daemon.status()["config_error"].as_str().unwrap().to_owned();
        assert!(error.contains(word), "{error}");
        assert!(is_served(&mut a) && listed(daemon, "b").is_null());
    }
    std::fs::remove_file(daemon.dir.path().join("host.toml")).unwrap();
    daemon.signal(Signal::SIGHUP);
    poll("the log says so", || {
        let log = daemon.log();
        if log.contains("No such file") { Ok(()) } else { Err(log) }
    });
    rig.rewrite(&["a"]);
    ok(&daemon.client(&["reload"]));
    assert_eq!((&daemon.status()["config_error"], &listed(daemon, "a")["state"]), (&json!(null), &json!("running")));
    assert!(is_served(&mut a));
}

#[test]
fn a_vm_that_waits_for_anothers_socket_is_made_when_that_one_has_gone() {
    let rig = Rig::new(&["a"]);
    let daemon = &rig.daemon;
    // `b` wants the socket that `a` still has.
    rig.rewrite(&["b@a"]);
    let said = ok(&daemon.client(&["reload"]));
    assert!(said.contains("b: waits for VM a to end"), "{said}");
    // `a` has no front end and goes; then there is room.
    wait_until_gone(daemon, "a");
    wait_for_state(daemon, "b", "running");
    assert!(is_served(&mut guest(&daemon.balloon("a"))));
}
