//! The built binary, run as a user would, against nobody or against a host that the test plays.
//!
//! Both methods of isolation are switched off wherever a session could come up: the machine that runs the tests keeps
//! its memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use fpr_protocol::message::{Limits, Welcome};
use fpr_protocol::{Frame, FrameDecoder, Gate, Message, Version, frame};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// For what takes milliseconds, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

fn guest_agent() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fpr-guest-agent"));
    command.stdin(Stdio::null()).env_remove("JOURNAL_STREAM");
    command
}

/// An agent that can isolate nothing, with a run directory of its own.
fn harmless(dir: &Path) -> Command {
    let mut command = guest_agent();
    std::fs::write(dir.join("empty.toml"), "").unwrap();
    command.arg("--config").arg(dir.join("empty.toml")).arg("--run-dir").arg(dir.join("run"));
    command.args(["--no-offline", "--no-claims"]);
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn fails(output: &Output, code: i32, words: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "{said:?} lacks {word:?}");
    }
    assert!(output.stdout.is_empty(), "stdout is for data");
}

/// Whether the machine shows what the agent needs to see at all.
fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: looking at the kernel's page flags takes root");
    }
    root
}

struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }

    /// Exit status, stdout and stderr, in time.
    fn end(&mut self) -> (ExitStatus, String, String) {
        let deadline = Instant::now() + DEADLINE;
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "still running after {DEADLINE:?}");
            std::thread::sleep(Duration::from_millis(5));
        };
        let (mut out, mut err) = (String::new(), String::new());
        self.0.stdout.take().map(|mut pipe| pipe.read_to_string(&mut out).unwrap());
        self.0.stderr.take().map(|mut pipe| pipe.read_to_string(&mut err).unwrap());
        (status, out, err)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The host's side of the channel.
struct Host {
    listener: UnixListener,
    address: String,
}

impl Host {
    fn new(dir: &Path) -> Self {
        let path = dir.join("host.sock");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self { listener, address: format!("unix:{}", path.display()) }
    }

    fn accept(&self) -> Link {
        let deadline = Instant::now() + DEADLINE;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).unwrap();
                    stream.set_read_timeout(Some(DEADLINE)).unwrap();
                    return Link { stream, decoder: FrameDecoder::default() };
                }
                Err(error) => assert!(Instant::now() < deadline, "nobody connects: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Link {
    stream: UnixStream,
    decoder: FrameDecoder,
}

impl Link {
    fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(Frame::Message(message)) = self.decoder.next_frame().unwrap() {
                return Some(message);
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes).expect("the agent says something in time") {
                0 => return None,
                count => self.decoder.push(&bytes[..count]),
            }
        }
    }

    fn welcome(&mut self, gates: Vec<Gate>) {
        assert!(matches!(self.next(), Some(Message::Hello(_))));
        let limits = Limits { max_report_ranges: 512, max_huge_pages_in_flight: 64, lease_ms: 2000, grace_ms: 3000 };
        let (version, regions) = (Version::CURRENT, Vec::new());
        let welcome = Message::Welcome(Welcome { version, session_nonce: 1, limits, gates, regions });
        self.stream.write_all(&frame::encode(&welcome).unwrap()).unwrap();
    }
}

#[test]
fn wrong_usage_exits_2_and_names_the_flag() {
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["Usage"]),
        (&["frobnicate"], &["frobnicate"]),
        (&["run", "--frobnicate"], &["--frobnicate"]),
        (&["once", "--timeout", "soon"], &["--timeout", "soon"]),
        (&["check", "--timeout", "1"], &["--timeout"]),
    ];
    for (arguments, words) in cases {
        fails(&guest_agent().args(*arguments).output().unwrap(), 2, words);
    }
    let version = guest_agent().arg("--version").output().unwrap();
    assert_eq!(version.stdout, format!("fpr-guest-agent {}\n", env!("CARGO_PKG_VERSION")).into_bytes());
}

#[test]
fn wrong_configuration_exits_78_and_names_file_line_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("guest.toml");
    for command in ["validate", "check", "run", "once", "recover"] {
        for (text, words) in [
            ("run_dir = \"/x\"\nofline = true\n", &["line 2", "ofline", "offline"][..]),
            ("[policy]\n\nfloor = \"5X\"\n", &["line 3", "floor", "5X", "64M"]),
            ("connect = \"tcp:localhost\"\n", &["line 1", "connect", "tcp:localhost", "vsock:CID:PORT"]),
            ("skip_checks = [\"dmesg\"]\n", &["line 1", "skip_checks", "dmesg", "boot-log"]),
            ("[policy]\nmin_free_age = \"5m\"\n", &["policy.min_free_age", "300s", "max_free_age"]),
        ] {
            std::fs::write(&file, text).unwrap();
            let output = guest_agent().args([command, "--config"]).arg(&file).output().unwrap();
            fails(&output, 78, words);
            fails(&output, 78, &["guest.toml"]);
        }
        let output = guest_agent().args([command, "--config", "/nonexistent/guest.toml"]).output().unwrap();
        fails(&output, 78, &["/nonexistent/guest.toml", "No such file"]);
    }
    for (flag, value, words) in [
        ("--connect", "unix:relative", ["--connect", "unix:relative", "unix:/path"]),
        ("--skip-check", "dmesg", ["--skip-check", "dmesg", "boot-log"]),
    ] {
        fails(&harmless(dir.path()).args(["validate", flag, value]).output().unwrap(), 78, &words);
    }
}

#[test]
fn validate_prints_file_and_flags_together() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("guest.toml");
    std::fs::write(&file, "claims = false\n[policy]\nfloor = \"64M\"\n").unwrap();
    let output =
        guest_agent().args(["validate", "--connect", "unix:/run/x.sock", "--config"]).arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for word in ["/run/x.sock", "claims: Avoid", "offline: Use", "floor_bytes: 67108864"] {
        assert!(text.contains(word), "{text} lacks {word:?}");
    }
}

#[test]
fn check_says_what_this_machine_allows_and_changes_nothing() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let json = harmless(dir.path()).args(["check", "--json"]).output().unwrap();
    assert_eq!(json.status.code(), Some(0), "{}", stderr(&json));
    let report: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(report["would_report"], false);
    for method in ["offlining", "claims"] {
        assert_eq!(report[method]["usable"], false);
        assert!(report[method]["reason"].as_str().unwrap().contains("switched off"), "{report:#}");
    }
    assert!(report["huge_page_bytes"].as_u64().unwrap().is_power_of_two());
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(report["kernel_release"], release.trim());

    let text = harmless(dir.path()).arg("check").output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.starts_with("would report      no\n"), "{text}");
    assert!(text.contains(release.trim()) && text.contains("--no-claims"), "{text}");
    assert!(!dir.path().join("run").exists(), "check made the run directory");
}

#[test]
fn a_closed_pipe_is_no_error() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for arguments in [&["check"][..], &["check", "--json"], &["validate"]] {
        let mut agent = Running::start(harmless(dir.path()).args(arguments));
        // Closed before the agent can have written.
        drop(agent.0.stdout.take());
        let (status, _, err) = agent.end();
        assert_eq!((status.code(), err), (Some(0), String::new()), "{arguments:?}");
    }
}

#[test]
fn without_a_host_once_gives_up_with_69() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let started = Instant::now();
    let once = ["once", "--timeout", "1", "--connect"];
    let output = harmless(dir.path()).args(once).arg("unix:/nonexistent/host.sock").output().unwrap();
    fails(&output, 69, &["no session", "1s", "fpr-host-agent"]);
    assert!(started.elapsed() < DEADLINE, "{:?}", started.elapsed());

    // Nor does one count that accepts and says nothing, or talks nonsense.
    let host = Host::new(dir.path());
    let talk = std::thread::spawn({
        let address = host.address.clone();
        let mut command = harmless(dir.path());
        // Long enough for a second attempt by an agent that was slow to start.
        move || command.args(["once", "--timeout", "5", "--connect"]).arg(address).output().unwrap()
    });
    let mut link = host.accept();
    assert!(matches!(link.next(), Some(Message::Hello(_))));
    link.stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    assert_eq!(link.next(), None);
    let _silent = host.accept();
    fails(&talk.join().unwrap(), 69, &["no session"]);
}

#[test]
fn once_behind_a_closed_gate_says_that_nothing_was_done() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let host = Host::new(dir.path());
    let mut agent = Running::start(harmless(dir.path()).args(["once", "--connect", &host.address]));
    let mut link = host.accept();
    link.welcome(vec![Gate::Operator]);

    let (status, out, err) = agent.end();

    assert_eq!(status.code(), Some(0), "{err}");
    assert_eq!(out, "0 huge pages dropped, 0 refused; 0 taken offline, 0 claimed\n");
    assert!(err.contains("operator"), "{err}");
}

#[test]
fn once_without_a_method_ends() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let host = Host::new(dir.path());
    let mut agent = Running::start(harmless(dir.path()).args(["once", "--timeout", "5", "--connect", &host.address]));
    let mut link = host.accept();
    link.welcome(Vec::new());

    let (status, out, err) = agent.end();

    assert_eq!(status.code(), Some(0), "{err}");
    assert_eq!(out, "0 huge pages dropped, 0 refused; 0 taken offline, 0 claimed\n");
}

#[test]
fn run_connects_again_and_again_and_ends_with_0() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let host = Host::new(dir.path());
    let mut agent = Running::start(harmless(dir.path()).args(["run", "--connect", &host.address]));
    // The first ends at once, the second in the middle of a frame, the third is a host.
    drop(host.accept());
    host.accept().stream.write_all(b"FPRP\x00").unwrap();
    let mut link = host.accept();
    link.welcome(Vec::new());
    link.stream.write_all(&frame::encode(&Message::Ping { id: 7 }).unwrap()).unwrap();
    let pong = std::iter::from_fn(|| link.next()).find(|message| matches!(message, Message::Pong { .. }));
    assert!(matches!(pong, Some(Message::Pong { id: 7, .. })), "{pong:?}");

    agent.signal(Signal::SIGTERM);
    let (status, out, err) = agent.end();

    assert_eq!((status.code(), out.as_str()), (Some(0), ""), "{err}");
    assert!(err.contains("session with the host agent"), "{err}");
    let last = std::iter::from_fn(|| link.next()).last();
    assert!(matches!(last, Some(Message::Goodbye { .. })), "{last:?}");
}

#[test]
fn the_service_manager_is_told_and_its_watchdog_is_fed() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let host = Host::new(dir.path());
    let manager = std::os::unix::net::UnixDatagram::bind(dir.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    // The next message of the agent that has this in it.
    let told = |wanted: &str| loop {
        let mut message = [0; 4096];
        let length = manager.recv(&mut message).unwrap_or_else(|error| panic!("no {wanted}: {error}"));
        if String::from_utf8_lossy(&message[..length]).contains(wanted) {
            return;
        }
    };
    let mut command = harmless(dir.path());
    command.args(["run", "--connect", &host.address]);
    command.env("NOTIFY_SOCKET", dir.path().join("notify")).env("WATCHDOG_USEC", "300000");
    let mut agent = Running::start(&mut command);

    told("READY=1");
    host.accept().welcome(Vec::new());
    told("STATUS=session with the host agent; all gates open");
    (0..3).for_each(|_| told("WATCHDOG=1"));
    agent.signal(Signal::SIGTERM);
    told("STOPPING=1");

    assert_eq!(agent.end().0.code(), Some(0));
}

#[test]
fn a_second_agent_is_told_who_is_there() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let host = Host::new(dir.path());
    let mut first = Running::start(harmless(dir.path()).args(["run", "--connect", &host.address]));
    let _link = host.accept();

    for command in ["run", "once", "recover"] {
        let output = harmless(dir.path()).args([command, "--connect", &host.address]).output().unwrap();
        fails(&output, 71, &["another guest agent", &format!("pid {}", first.0.id()), "another run directory"]);
    }

    first.signal(Signal::SIGINT);
    assert_eq!(first.end().0.code(), Some(0));
    let output = harmless(dir.path()).arg("recover").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "nothing to recover: {}", stderr(&output));
}

#[test]
fn a_run_directory_that_cannot_be_made_exits_71_or_77() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("run"), "a file").unwrap();
    fails(&harmless(dir.path()).arg("recover").output().unwrap(), 71, &["cannot create directory", "/run"]);

    // Copied to where an ordinary user can run it.
    let binary = dir.path().join("fpr-guest-agent");
    // By cp: a descriptor of ours that is open for writing could be inherited by what another test starts just then,
    // and a program that is open for writing cannot be run.
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_fpr-guest-agent")).arg(&binary).status().unwrap().success());
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = Command::new(&binary)
        .args(["recover", "--no-offline", "--no-claims", "--run-dir"])
        .arg(dir.path().join("other"))
        .uid(65_534)
        .gid(65_534)
        .output()
        .unwrap();
    fails(&output, 77, &["cannot create directory", "other", "Permission denied"]);
}
