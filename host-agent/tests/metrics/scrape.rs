//! A scraper that can also be rude.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::daemon::{DEADLINE, Daemon};

/// A daemon that serves its metrics on a Unix socket in its directory.
pub fn daemon(vms: &[&str], balloons: &[&str]) -> Daemon {
    let config = |dir: &Path| format!("metrics = \"unix:{}\"\n", dir.join("metrics.sock").display());
    Daemon::start_configured(config, vms, balloons)
}

pub fn connect(daemon: &Daemon) -> UnixStream {
    let stream = UnixStream::connect(daemon.socket("metrics.sock")).unwrap();
    stream.set_read_timeout(Some(2 * DEADLINE)).unwrap();
    stream
}

/// Everything that comes back until the daemon hangs up.
pub fn ask(mut stream: impl Read + Write, request: &[u8]) -> String {
    // A request that is too long may be answered before it is read.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

/// The body of a good answer.
pub fn body(answer: &str) -> &str {
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    answer.split_once("\r\n\r\n").unwrap().1
}

/// Samples by name, labels and all, of the text for Prometheus.
pub fn scrape(daemon: &Daemon) -> BTreeMap<String, f64> {
    let answer = ask(connect(daemon), b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let samples = body(&answer).lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
        })
        .collect()
}
