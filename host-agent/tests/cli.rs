//! The built binary, run as an operator would: exit codes, messages, control socket, signals.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

#[allow(dead_code)] // Each test uses another part of it.
mod daemon;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use daemon::{Daemon, exists, host_agent};
use nix::sys::signal::Signal;

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Exit code and what stderr must say; stdout is for data, so an error leaves it empty.
fn fails(output: &Output, code: i32, words: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "{said:?} lacks {word:?}");
    }
    assert_eq!(stdout(output), "");
}

/// `serve` with these flags, which must end by itself.
fn serve(dir: &Path, flags: &[&str]) -> Output {
    std::fs::write(dir.join("empty.toml"), "").unwrap();
    let mut command = host_agent();
    command.current_dir(dir).args(["serve", "--config", "empty.toml"]).args(flags);
    command.output().unwrap()
}

#[test]
fn wrong_usage_exits_2_and_names_the_flag() {
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["Usage"]),
        (&["frobnicate"], &["frobnicate"]),
        (&["serve", "--frobnicate"], &["--frobnicate"]),
        (&["serve", "--log-format", "xml"], &["xml", "text", "json"]),
        (&["serve", "--log-level", "fpr=loud"], &["--log-level", "fpr=loud", "debug"]),
        (&["inhibit"], &["<VM>"]),
        (&["status", "--json=5"], &["--json"]),
    ];
    for (arguments, words) in cases {
        fails(&host_agent().args(*arguments).output().unwrap(), 2, words);
    }
    let help = host_agent().arg("--help").output().unwrap();
    assert_eq!(help.status.code(), Some(0));
    assert!(stdout(&help).contains("serve"));
    let version = host_agent().arg("--version").output().unwrap();
    assert_eq!(stdout(&version), format!("fpr-host-agent {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_configuration_exits_78_and_names_file_line_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("host.toml");
    let name = file.to_str().unwrap();
    let vm = "[vm.web1]\nsocket = \"/run/fpr/web1.sock\"\n";
    let cases = [
        (format!("{vm}sokcet = \"x\"\n"), vec!["line 3", "sokcet", "socket"]),
        (format!("{vm}guest_cid = \"three\"\n"), vec!["line 3", "guest_cid"]),
        (format!("{vm}guest_cid = 2\n"), vec!["vm.web1", "guest_cid 2", "from 3"]),
        ("control = [\n".to_owned(), vec!["line"]),
        ("[vm.web1]\n".to_owned(), vec!["web1", "no device", "socket", "balloon"]),
        (format!("control = \"/run/fpr/web1.sock\"\n{vm}"), vec!["/run/fpr/web1.sock", "control", "web1"]),
        ("directory = \"run/vm\"\n".to_owned(), vec!["directory run/vm", "relative", "absolute"]),
        ("[vm.\"a/b\"]\nsocket = \"/run/a\"\n".to_owned(), vec!["a/b", "no VM name"]),
    ];
    for command in ["validate", "serve"] {
        for (text, words) in &cases {
            std::fs::write(&file, text).unwrap();
            let output = host_agent().args([command, "--config", name]).output().unwrap();
            fails(&output, 78, words);
            fails(&output, 78, &[name]);
        }
        let missing = dir.path().join("missing.toml");
        let output = host_agent().args([command, "--config", missing.to_str().unwrap()]).output().unwrap();
        fails(&output, 78, &["missing.toml", "No such file"]);
    }
}

#[test]
fn wrong_vm_flags_exit_78_and_say_what_would_be_right() {
    let dir = tempfile::tempdir().unwrap();
    let long = format!("web1=/{}", "x".repeat(107));
    for (flags, words) in [
        (vec!["--vm", "web1"], vec!["--vm web1", "NAME=SOCKET"]),
        (vec!["--vm", "web1=run/web1.sock"], vec!["relative", "absolute"]),
        (vec!["--vm", &long], vec!["108 bytes", "107", "shorter"]),
        (vec!["--vm", "a=/x", "--vm", "a=/y"], vec!["VM a", "twice"]),
        (vec!["--vm", "a=/x", "--control", "run/x.sock"], vec!["control", "relative"]),
        (vec!["--vm", "a="], vec!["--vm a=", "empty"]),
    ] {
        fails(&serve(dir.path(), &flags), 78, &words);
    }
}

#[test]
fn validate_says_what_it_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("host.toml");
    std::fs::write(&file, "control = \"/run/x.sock\"\n[vm.a]\nsocket = \"/run/a.sock\"\n").unwrap();
    let output =
        host_agent().args(["validate", "--config", file.to_str().unwrap(), "--vm", "b=/run/b.sock"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "2 VMs, control socket /run/x.sock\n");
}

#[test]
fn without_a_daemon_clients_exit_69_and_name_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    let control = dir.path().join("none.sock");
    let control = control.to_str().unwrap();
    for command in [&["status"][..], &["status", "--json"], &["inhibit", "web1"], &["resume", "web1"]] {
        let output = host_agent().args(command).args(["--control", control]).output().unwrap();
        fails(&output, 69, &[control, "fpr-host-agent serve", "--control"]);
    }
    // A daemon that is there and never answers would be waited for; one that hangs up is not.
    let listener = std::os::unix::net::UnixListener::bind(control).unwrap();
    let hangs_up = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let output = host_agent().args(["status", "--control", control]).output().unwrap();
    fails(&output, 69, &["no answer from the daemon"]);
    hangs_up.join().unwrap();
}

#[test]
fn sockets_that_cannot_be_made_exit_71_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("file"), "precious").unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(path("used")).unwrap();
    for (control, vm, words) in [
        ("no/such/dir", "vm", ["control socket", "no/such/dir", "directory exists"]),
        ("file", "vm", ["control socket", "not a socket", "remove it"]),
        ("used", "vm", ["control socket", "in use", "another socket path"]),
        ("control", "file", ["VM web1", "not a socket", "remove it"]),
        ("control", "used", ["VM web1", "in use", "another socket path"]),
    ] {
        let output = serve(dir.path(), &["--control", &path(control), "--vm", &format!("web1={}", path(vm))]);
        fails(&output, 71, &words);
        assert!(!exists(Path::new(&path("control"))) && !exists(Path::new(&path("vm"))), "{words:?}");
    }
    assert_eq!(std::fs::read_to_string(path("file")).unwrap(), "precious");
    assert!(UnixStream::connect(path("used")).is_ok());
}

#[test]
fn without_permission_exits_77() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can become somebody without permission");
        return;
    }
    let daemon = Daemon::start(&["web1"]);
    // Copied to where an ordinary user can run it.
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("fpr-host-agent");
    // By cp: a descriptor of ours that is open for writing could be inherited by what another test starts just then,
    // and a program that is open for writing cannot be run.
    let copied = std::process::Command::new("cp").arg(env!("CARGO_BIN_EXE_fpr-host-agent")).arg(&binary).status();
    assert!(copied.unwrap().success());
    let open = |path: &Path| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    };
    open(dir.path());
    open(daemon.dir.path());
    let as_nobody = |arguments: &[&str]| {
        std::process::Command::new(&binary).args(arguments).uid(65_534).gid(65_534).output().unwrap()
    };
    let control = daemon.control();

    fails(&as_nobody(&["status", "--control", control.to_str().unwrap()]), 77, &["control.sock", "Permission denied"]);
    let other = dir.path().join("other.sock");
    let vm = format!("a={}", dir.path().join("a").display());
    let output = as_nobody(&["serve", "--control", other.to_str().unwrap(), "--vm", &vm]);
    fails(&output, 77, &["other.sock", "Permission denied", "writable"]);
}

#[test]
fn a_second_daemon_on_the_same_socket_fails_and_the_first_goes_on() {
    let daemon = Daemon::start(&["web1"]);
    let vm = format!("web1={}", daemon.socket("web1").display());
    let elsewhere = format!("web2={}", daemon.socket("web2").display());
    let control = daemon.control();
    let control = control.to_str().unwrap();

    fails(&serve(daemon.dir.path(), &["--control", control, "--vm", &elsewhere]), 71, &["control socket", "in use"]);
    let own = daemon.dir.path().join("own.sock");
    let output = serve(daemon.dir.path(), &["--control", own.to_str().unwrap(), "--vm", &elsewhere, "--vm", &vm]);
    fails(&output, 71, &["VM web1", "in use"]);

    assert!(!exists(&own) && !exists(&daemon.socket("web2")));
    assert!(exists(&daemon.socket("web1")));
    assert_eq!(daemon.status()["pid"], daemon.pid());
}

#[test]
fn signals_end_it_with_0_and_without_its_sockets() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut daemon = Daemon::start(&["web1", "web2"]);
        assert!(exists(&daemon.control()) && exists(&daemon.socket("web1")));
        daemon.signal(signal);
        assert_eq!(daemon.wait().code(), Some(0), "{signal}");
        let left = [daemon.control(), daemon.socket("web1"), daemon.socket("web2")].map(|path| exists(&path));
        assert_eq!(left, [false; 3], "{signal}");
        assert!(daemon.log().contains(signal.as_str()), "{}", daemon.log());
    }
}

#[test]
fn a_daemon_that_was_killed_leaves_sockets_that_the_next_one_takes_over() {
    let mut daemon = Daemon::start(&["web1"]);
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    assert!(exists(&daemon.control()) && exists(&daemon.socket("web1")));

    let vm = format!("web1={}", daemon.socket("web1").display());
    let config = daemon.dir.path().join("host.toml");
    let mut next = host_agent()
        .args(["serve", "--config", config.to_str().unwrap(), "--vm", &vm, "--control"])
        .arg(daemon.control())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = daemon::poll("the next daemon serves", || {
        let output = daemon.client(&["status", "--json"]);
        serde_json::from_slice::<serde_json::Value>(&output.stdout).map_err(|_| stderr(&output))
    });
    assert_eq!(pid["pid"], next.id());
    next.kill().unwrap();
    next.wait().unwrap();
}

#[test]
fn status_is_a_table_for_people_and_json_for_programs() {
    let daemon = Daemon::start(&["web1", "db"]);

    let table = daemon.client(&["status"]);
    assert_eq!(table.status.code(), Some(0));
    let text = stdout(&table);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let header = "VM PID AGENT KERNEL SIZE BACKED COST CLAIMED DROPPED REFUSED BACK GATES";
    assert_eq!(rows[0].join(" "), header);
    assert_eq!(rows[1], ["web1", "-", "absent", "-", "-", "-", "-", "-", "0", "0", "-", "open"]);
    assert_eq!(rows[2][0], "db");
    assert_eq!(rows.len(), 3, "{text}");

    let json = daemon.client(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(status["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(status["pid"], daemon.pid());
    let names: Vec<_> = status["vms"].as_array().unwrap().iter().map(|vm| vm["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["web1", "db"]);
    assert_eq!(status["vms"][0]["counters"]["huge_pages_dropped"], 0);
    assert!(status["vms"][0]["front_end"].is_null());
}

#[test]
fn top_without_a_terminal_names_status_and_its_flags_are_checked() {
    let daemon = Daemon::start(&["web1"]);
    fails(&daemon.client(&["top"]), 2, &["terminal", "fpr-host-agent status"]);
    fails(&daemon.client(&["top", "--sort", "colour"]), 2, &["colour", "BACKED"]);
    fails(&daemon.client(&["top", "--interval", "2"]), 2, &["\"2\"", "2s"]);
}

/// Runs `top` on a terminal of 120 columns, does `then` to it when the VM is on the screen, and returns its exit code and
/// all that it wrote.
fn on_terminal(daemon: &Daemon, then: impl FnOnce(&mut std::fs::File, u32)) -> (Option<i32>, String) {
    let size = nix::pty::Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = nix::pty::openpty(&size, None).unwrap();
    let mut child = host_agent()
        .args(["top", "--interval", "100ms", "--control"])
        .arg(daemon.control())
        .env("TERM", "xterm")
        .stdin(pty.slave.try_clone().unwrap())
        .stdout(pty.slave.try_clone().unwrap())
        .stderr(pty.slave)
        .spawn()
        .unwrap();
    let mut terminal = std::fs::File::from(pty.master);
    let mut reader = terminal.try_clone().unwrap();
    let (sender, written) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        // EIO when the last descriptor of the other end is closed.
        while let Ok(length @ 1..) = reader.read(&mut buffer) {
            let _ = sender.send(buffer[..length].to_vec());
        }
    });
    let mut all = Vec::new();
    let shown = |all: &Vec<u8>| String::from_utf8_lossy(all).into_owned();
    daemon::poll("the VM is on the screen", || {
        all.extend(written.try_iter().flatten());
        if shown(&all).contains("web1") { Ok(()) } else { Err(shown(&all)) }
    });
    then(&mut terminal, child.id());
    let status = daemon::poll("top ends", || child.try_wait().unwrap().ok_or("running"));
    all.extend(written.iter().flatten());
    (status.code(), shown(&all))
}

#[test]
fn top_ends_with_a_key_or_a_signal_and_gives_the_screen_back() {
    let daemon = Daemon::start(&["web1"]);
    let kill = |signal| {
        move |_: &mut std::fs::File, pid: u32| {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), signal).unwrap();
        }
    };
    for (code, written) in [
        on_terminal(&daemon, |terminal, _| terminal.write_all(b"q").unwrap()),
        on_terminal(&daemon, |terminal, _| terminal.write_all(b"\x03").unwrap()),
        on_terminal(&daemon, kill(Signal::SIGTERM)),
        on_terminal(&daemon, kill(Signal::SIGHUP)),
    ] {
        assert_eq!(code, Some(0), "{written}");
        let (entered, left) = (written.find("\x1b[?1049h").unwrap(), written.find("\x1b[?1049l").unwrap());
        assert!(entered < left, "{written}");
        assert!(written[left..].contains("\x1b[?25h"), "the cursor stays hidden: {written}");
    }
}

#[test]
fn inhibit_and_resume_show_in_status() {
    let daemon = Daemon::start(&["web1", "db"]);

    let output = daemon.client(&["inhibit", "web1", "--reason", "backup at noon"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), String::new()), "{}", stderr(&output));
    let gates = daemon.vm("web1")["gates"].clone();
    assert_eq!(gates.as_array().map(Vec::len), Some(1));
    assert_eq!((&gates[0]["gate"], &gates[0]["source"]), (&"operator".into(), &"operator".into()));
    assert_eq!(gates[0]["detail"], "backup at noon");
    assert_eq!(daemon.vm("db")["gates"], serde_json::json!([]));
    assert!(stdout(&daemon.client(&["status"])).contains("web1: operator: backup at noon\n"));

    assert_eq!(daemon.client(&["resume", "web1"]).status.code(), Some(0));
    assert_eq!(daemon.vm("web1")["gates"], serde_json::json!([]));
}

#[test]
fn an_unknown_vm_is_an_error_that_names_the_known_ones() {
    let daemon = Daemon::start(&["web1", "db"]);
    for command in ["inhibit", "resume"] {
        fails(&daemon.client(&[command, "web"]), 1, &["no VM web", "web1, db"]);
    }
}

#[test]
fn a_client_that_sends_garbage_or_nothing_hangs_nobody() {
    let daemon = Daemon::start(&["web1"]);
    let silent: Vec<_> = (0..8).map(|_| UnixStream::connect(daemon.control()).unwrap()).collect();
    for (request, answer) in [
        (b"garbage\n".to_vec(), Some("error")),
        (b"{\"command\":\"reboot\"}\n".to_vec(), Some("reboot")),
        (b"{\"command\":\"inhibit\"}\n".to_vec(), Some("vm")),
        (b"{\"command\":\"resume\",\"vm\":\"web1\",\"more\":1}\n".to_vec(), Some("more")),
        (vec![b'x'; 100_000], Some("4096")),
        (b"\xff\xfe\n".to_vec(), Some("error")),
        (b"\n".to_vec(), Some("error")),
        (b"".to_vec(), None),
    ] {
        let mut stream = UnixStream::connect(daemon.control()).unwrap();
        stream.set_read_timeout(Some(daemon::DEADLINE)).unwrap();
        // The daemon may answer and hang up before it has taken all of it.
        let _ = stream.write_all(&request);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut line = String::new();
        let read = BufReader::new(stream).read_line(&mut line);
        let shown = String::from_utf8_lossy(&request[..request.len().min(40)]).into_owned();
        match answer {
            Some(word) => assert!(line.contains("error") && line.contains(word), "{shown:?}: {read:?} {line:?}"),
            None => assert_eq!(line, ""),
        }
    }
    let started = Instant::now();
    assert_eq!(daemon.client(&["status"]).status.code(), Some(0));
    // Each of them is waited for 5 s.
    assert!(started.elapsed() < Duration::from_secs(4), "waited {:?} for eight silent clients", started.elapsed());
    drop(silent);
}

#[test]
fn a_closed_pipe_is_no_error() {
    let daemon = Daemon::start(&["web1"]);
    for arguments in [&["status"][..], &["status", "--json"]] {
        let mut child = host_agent()
            .args(arguments)
            .arg("--control")
            .arg(daemon.control())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Closed before the client can have written.
        drop(child.stdout.take());
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!((child.wait().unwrap().code(), said), (Some(0), String::new()));
    }
}
