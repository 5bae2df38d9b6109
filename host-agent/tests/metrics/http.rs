//! The listener: who gets what, and that nobody can hold it up.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use super::daemon::{DEADLINE, Daemon, exists};
use super::scrape::{ask, body, connect, daemon, scrape};
use nix::sys::signal::Signal;

#[test]
fn a_scrape_has_every_vm_and_the_format_that_was_asked_for() {
    let daemon = daemon(&["web1"], &["db"]);
    let samples = scrape(&daemon);
    assert_eq!(samples[&format!("fpr_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"))], 1.0);
    assert_eq!(samples["fpr_agent_state{vm=\"web1\",state=\"absent\"}"], 1.0);
    assert_eq!(samples["fpr_front_end_connected{vm=\"db\",device=\"balloon\"}"], 0.0);
    assert!(!samples.contains_key("fpr_memory_backed_bytes{vm=\"db\"}"), "there is no front end, so no memory");
    let mode = daemon.socket("metrics.sock").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o007, 0, "open to all: {mode:o}");

    let answer = ask(connect(&daemon), b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{answer}");
    let accept =
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text;version=1.0.0,*/*;q=0.1\r\n\r\n";
    let answer = ask(connect(&daemon), accept);
    assert!(
        answer.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"),
        "{answer}"
    );
    assert!(body(&answer).ends_with("# EOF\n"), "{answer}");
    assert_eq!(body(&ask(connect(&daemon), b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")), "");
}

#[test]
fn everything_else_is_refused() {
    let daemon = daemon(&["web1"], &[]);
    let long = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let many = format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{}\r\n", "X: y\r\n".repeat(500));
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], "404"),
        (b"GET /metrics/ HTTP/1.1\r\nHost: x\r\n\r\n", "404"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", "405"),
        (b"DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "405"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"),
        (b"garbage\r\n\r\n", "400"),
        (long.as_bytes(), "431"),
        (many.as_bytes(), "431"),
    ] {
        let answer = ask(connect(&daemon), request);
        let shown = String::from_utf8_lossy(&request[..request.len().min(40)]);
        // HTTP/2's preface may be cut off without an answer.
        let cut_off = answer.is_empty() && request.starts_with(b"PRI");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) || cut_off, "{shown:?}: {answer}");
    }
}

#[test]
fn silent_and_slow_clients_hold_up_neither_the_commands_nor_for_long_a_scrape() {
    let daemon = daemon(&["web1"], &[]);
    let silent: Vec<_> = (0..20).map(|_| connect(&daemon)).collect();
    let mut slow = connect(&daemon);
    slow.write_all(b"GET /metrics HTTP/1.1\r\nHo").unwrap();
    let started = Instant::now();
    assert_eq!(daemon.status()["pid"], daemon.pid());
    // None of them has been given up by then.
    assert!(started.elapsed().as_secs() < 4, "a command waited {:?}", started.elapsed());
    // Three lots of eight clients, each of which has 5 s to ask.
    assert!(!scrape(&daemon).is_empty());
    assert!(started.elapsed() < 2 * DEADLINE, "a scrape waited {:?}", started.elapsed());
    drop((silent, slow));
}

#[test]
fn tcp_works_a_used_port_is_an_error_and_the_socket_goes_with_the_daemon() {
    // The kernel chooses a port; between here and there somebody else might take it.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = format!("metrics = \"127.0.0.1:{port}\"\n");
    let on_tcp = Daemon::start_configured(|_| config.clone(), &["web1"], &[]);
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let answer = ask(stream, b"GET /metrics HTTP/1.0\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.0 200 OK\r\n") && answer.contains("fpr_build_info"), "{answer}");

    let file = on_tcp.dir.path().join("second.toml");
    std::fs::write(&file, &config).unwrap();
    let vm = format!("a={}", on_tcp.dir.path().join("a").display());
    let control = on_tcp.dir.path().join("second.sock");
    let second = super::daemon::host_agent()
        .args(["serve", "--config", file.to_str().unwrap(), "--control", control.to_str().unwrap(), "--vm", &vm])
        .output()
        .unwrap();
    let stderr = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(71), "{stderr}");
    assert!(stderr.contains(&format!("127.0.0.1:{port}")) && stderr.contains("in use"), "{stderr}");

    let mut on_unix = daemon(&["web1"], &[]);
    on_unix.signal(Signal::SIGTERM);
    assert_eq!(on_unix.wait().code(), Some(0));
    assert!(!exists(&on_unix.socket("metrics.sock")));
}
