//! Who is behind a front end's socket.
//!
//! The gates look into the VMM's process (assigned devices, locked memory), so the device has to name it. The kernel
//! knows it: SO_PEERCRED of a connected Unix socket. But `vhost-user-backend` accepts the connection itself and shows
//! the stream to nobody (`VhostUserDaemon::start`). So after the accept, our own open descriptors are searched for the
//! one connected Unix socket whose local address is the device's socket path; the listener has the same address but
//! accepts connections (SO_ACCEPTCONN), and a device has one front end at a time, so there is exactly one (or a
//! duplicate of it).
//!
//! The process is the one that called connect(2). A management program that connects and passes the descriptor on to
//! the VMM is seen instead of the VMM.

use std::io;
use std::path::Path;

use nix::sys::socket::{UnixAddr, getsockname, getsockopt, sockopt};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::sys;

/// The process that connected to a device's socket, as the kernel recorded it at connect(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// Process id in our namespace; `None` if the process lives in a pid namespace we cannot see.
    pub pid: Option<i32>,
    /// User id.
    pub uid: u32,
}

/// Finds the front end connected to the device that listens on `path`, and a duplicate of the connection.
///
/// # Errors
/// `NotFound` if no such connection is open; otherwise what /proc or the kernel answered.
pub(super) fn find(path: &Path) -> io::Result<(PeerProcess, OwnedFd)> {
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let Some(fd) = entry?.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok()) else { continue };
        // Closed since it was listed, or not ours to duplicate: not the one we hold open right now.
        let Ok(socket) = sys::duplicate(fd) else { continue };
        if is_connection_to(&socket, path) {
            let credentials = getsockopt(&socket, sockopt::PeerCredentials)?;
            let pid = Some(credentials.pid()).filter(|pid| *pid > 0);
            return Ok((PeerProcess { pid, uid: credentials.uid() }, socket));
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("no open descriptor of this process is a connection to {}", path.display()),
    ))
}

fn is_connection_to(socket: &OwnedFd, path: &Path) -> bool {
    // Anything that is not a Unix socket fails one of the two questions.
    let local = getsockname::<UnixAddr>(socket.as_raw_fd());
    local.is_ok_and(|address| address.path() == Some(path))
        && getsockopt(socket, sockopt::AcceptConn).is_ok_and(|accepts| !accepts)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn finds_the_accepted_connection_and_not_the_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(find(&path).unwrap_err().kind(), io::ErrorKind::NotFound);

        let _client = UnixStream::connect(&path).unwrap();
        let _server = listener.accept().unwrap();

        let (peer, _) = find(&path).unwrap();
        assert_eq!(peer.pid, i32::try_from(std::process::id()).ok());
        assert_eq!(peer.uid, nix::unistd::geteuid().as_raw());
        assert!(find(&dir.path().join("other")).is_err());
    }
}
