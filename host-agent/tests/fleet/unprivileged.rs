//! The daemon as an ordinary user: it drops for a VMM of the same user, and refuses one that it may not look into.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use fpr_host_agent::control;

use super::daemon::{DEADLINE, poll};
use super::{guest, is_dropped};

const NOBODY: u32 = 65_534;
const SOMEBODY: u32 = 65_533;
/// Names the socket for the process that plays the VMM.
const SOCKET: &str = "FPR_TEST_FRONT_END";

/// Kills its process, which may be another user's: we are root.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn as_user(uid: u32, binary: &Path) -> Command {
    let mut command = Command::new("sh");
    // As the unit has it: the group lets the VMM in.
    command.args(["-c", "umask 007; exec \"$@\"", "sh"]).arg(binary);
    command.uid(uid).gid(NOBODY).stdin(Stdio::null()).stderr(Stdio::null());
    command
}

/// Where everybody may run it. By cp: a descriptor of ours that is open for writing could be inherited by what another
/// test starts just then, and a program that is open for writing cannot be run.
fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
    std::fs::set_permissions(to, PermissionsExt::from_mode(0o755)).unwrap();
}

/// The VMM's process of the test below.
#[test]
#[ignore = "started by the other test of this file as another user"]
fn front_end() {
    // Run by itself, as all ignored tests are in CI, it is nobody's process.
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let mut guest = guest(Path::new(&socket));
    let served = is_dropped(&mut guest);
    println!("served: {served}");
    // Connected until it is killed, so that its gates can be looked at.
    loop {
        std::thread::park_timeout(DEADLINE);
    }
}

#[test]
fn drops_for_its_own_user_and_names_the_gate_for_another() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can become two other users");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    std::fs::create_dir(&run).unwrap();
    for path in [dir.path(), &run] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    std::os::unix::fs::chown(&run, Some(NOBODY), Some(NOBODY)).unwrap();
    let (binary, tests) = (dir.path().join("fpr-host-agent"), dir.path().join("tests"));
    copy(Path::new(env!("CARGO_BIN_EXE_fpr-host-agent")), &binary);
    copy(&std::env::current_exe().unwrap(), &tests);
    let (control, config) = (run.join("control"), dir.path().join("host.toml"));
    std::fs::write(&config, "").unwrap();
    let mut daemon = as_user(NOBODY, &binary);
    daemon.arg("serve").arg("--config").arg(&config).arg("--control").arg(&control);
    for vm in ["own", "other"] {
        daemon.arg("--balloon").arg(format!("{vm}={}", run.join(vm).display()));
    }
    let _daemon = Killed(daemon.spawn().unwrap());
    let status = || control::ask(&control, &control::Command::Status).map_err(|error| error.to_string());
    poll("the daemon serves", status);

    let front_end = |uid, vm: &str| {
        let mut command = as_user(uid, &tests);
        command.args(["--ignored", "--exact", "unprivileged::front_end"]).env(SOCKET, run.join(vm));
        Killed(command.stdout(Stdio::null()).spawn().unwrap())
    };
    // The group lets the second one in.
    let _vmms = [front_end(NOBODY, "own"), front_end(SOMEBODY, "other")];

    let vms = poll("both have reported", || {
        let vms = status()?["vms"].clone();
        let chains = |vm: usize| vms[vm]["balloon"]["reporting"]["chains"].as_u64();
        if chains(0) == Some(1) && chains(1) == Some(1) { Ok(vms) } else { Err(vms.to_string()) }
    });
    let dropped = |vm: usize| vms[vm]["balloon"]["reporting"]["dropped_bytes"].as_u64();
    assert_eq!((dropped(0), &vms[0]["gates"]), (Some(super::HUGE), &serde_json::json!([])), "{vms}");
    assert_eq!(dropped(1), Some(0), "{vms}");
    let gate = poll("the gate closes", || {
        let gate = status()?["vms"][1]["gates"][0].clone();
        if gate["gate"] == "uninspectable" { Ok(gate) } else { Err(gate.to_string()) }
    });
    let detail = gate["detail"].as_str().unwrap();
    assert!(detail.contains("CAP_SYS_PTRACE"), "{detail}");
}
