//! The client's side of the control socket: one question, one answer, and an end in any case.
//!
//! Called by the subcommands, `doctor`, `top` and tests. The daemon is trusted to mean well, not to be alive: each step
//! has a time limit.

use super::{Command, TIMEOUT};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Why a client got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("cannot reach the daemon at {path}: is `fpr-host-agent serve` running, with this --control path?")]
    Unreachable {
        /// The socket.
        path: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Somebody listens and takes no connection.
    #[error(
        "the daemon at {path} took no connection within {limit_s} s: look whether its process is stopped and what its log \
         says, then try again or restart it"
    )]
    NoConnection {
        /// The socket.
        path: String,
        /// How long it was tried.
        limit_s: u64,
    },
    /// It did not answer in time or not with JSON.
    #[error(
        "no answer from the daemon at {path}: look whether its process is stopped and what its log says, then try again"
    )]
    NoAnswer {
        /// The socket.
        path: String,
        /// What happened instead.
        #[source]
        source: io::Error,
    },
    /// It refused.
    #[error("{0}")]
    Refused(String),
}

/// Sends one command to a daemon and returns the answer's JSON.
///
/// # Errors
/// See [`ClientError`].
pub fn ask(path: &Path, command: &Command) -> Result<serde_json::Value, ClientError> {
    ask_within(path, command, TIMEOUT, command.wait() + 2 * TIMEOUT)
}

fn ask_within(
    path: &Path,
    command: &Command,
    send: Duration,
    receive: Duration,
) -> Result<serde_json::Value, ClientError> {
    let shown = || path.display().to_string();
    let mut stream = connect_within(path, send).map_err(|errno| match errno {
        Errno::EAGAIN => ClientError::NoConnection { path: shown(), limit_s: send.as_secs() },
        errno => ClientError::Unreachable { path: shown(), source: errno.into() },
    })?;
    let exchange = || {
        stream.set_read_timeout(Some(receive))?;
        let mut request = serde_json::to_vec(command)?;
        request.push(b'\n');
        stream.write_all(&request)?;
        let mut line = String::new();
        if BufReader::new(stream).read_line(&mut line)? == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"));
        }
        Ok(serde_json::from_str::<serde_json::Value>(&line)?)
    };
    let mut answer = exchange().map_err(|source| {
        // What a socket's own time limit ends with says nothing to a person.
        let late = source.kind() == io::ErrorKind::WouldBlock;
        let what = || format!("nothing came within {} s", receive.as_secs());
        let source = if late { io::Error::new(io::ErrorKind::TimedOut, what()) } else { source };
        ClientError::NoAnswer { path: shown(), source }
    })?;
    match answer.get_mut("error") {
        Some(error) => Err(ClientError::Refused(error.as_str().unwrap_or("unknown error").to_owned())),
        None => {
            let inner =
                ["status", "drained", "vms", "reloaded", "ranking"].iter().find(|kind| answer.get(**kind).is_some());
            Ok(inner.map(|kind| answer[*kind].take()).unwrap_or(answer))
        }
    }
}

/// The limit is for each write, too. While the backlog is full, connect(2) waits as long as a send may (Linux
/// unix_stream_connect: `sock_sndtimeo`), then fails with EAGAIN.
fn connect_within(path: &Path, limit: Duration) -> nix::Result<UnixStream> {
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let limit = TimeVal::milliseconds(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX));
    setsockopt(&fd, sockopt::SendTimeout, &limit)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_daemon_that_takes_no_connection_or_says_nothing_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let (_listener, _file) = crate::device::bind_listener(&path).unwrap();
        let limit = Duration::from_millis(20);
        // Accepted by nobody: first they wait for an answer, then, with a full backlog, for the connection.
        let mut waiting = Vec::new();
        while let Ok(stream) = connect_within(&path, limit) {
            let error = ask_within(&path, &Command::Status, limit, limit).unwrap_err();
            if let ClientError::NoAnswer { source, .. } = &error {
                assert_eq!(source.kind(), io::ErrorKind::TimedOut);
                assert!(error.to_string().contains("control.sock"), "{error}");
            }
            waiting.push(stream);
        }

        let error = ask_within(&path, &Command::Status, limit, limit).unwrap_err();

        assert!(matches!(error, ClientError::NoConnection { .. }), "{error}");
        assert!(error.to_string().contains("control.sock took no connection"), "{error}");
    }
}
