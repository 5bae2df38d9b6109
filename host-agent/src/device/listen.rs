//! A device's socket in the file system: made with a safe mode, never taken from somebody else, removed by its owner.
//!
//! Called by the device's thread. The directory is the operator's: who may write there can replace the socket.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket};
use nix::sys::stat::{Mode, fchmod};

/// Owner and group may connect: the group is how an operator lets the VMM's user in. Others may not, since a front end
/// says what our guest memory is.
const SOCKET_MODE: Mode = Mode::from_bits_truncate(0o660);

/// Connections the kernel keeps waiting. A second front end waits here until the first has gone.
const BACKLOG: i32 = 4;

/// The same for a socket with many clients: what is more waits in its connect(2). The kernel takes `somaxconn` at most,
/// 4,096 by default (Linux include/linux/socket.h, SOMAXCONN).
const SERVICE_BACKLOG: i32 = 128;

/// Why a socket could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody listens there.
    #[error("{} is in use by a running listener: stop it, or give this VM another socket path", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// There is a file, and it is not a socket.
    #[error("{} exists and is not a socket: remove it, or give this VM another socket path", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// There is a dead socket, and it is not ours to remove.
    #[error("{} is a dead socket of user {uid}: remove it as that user", path.display())]
    ForeignSocket {
        /// The path.
        path: PathBuf,
        /// Who owns it.
        uid: u32,
    },
    /// A system call failed.
    #[error("cannot {action} socket {}: check that the directory exists and is writable", path.display())]
    Os {
        /// What was attempted.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// A listening socket that removes its file when it goes, unless the file is no longer its own.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// Listens on `path`, replacing a dead socket of ours.
///
/// # Errors
/// See [`ListenError`]; a path with a live listener is never touched.
pub(crate) fn bind_listener(path: &Path) -> Result<(UnixListener, SocketFile), ListenError> {
    bind_with(path, BACKLOG)
}

/// The same for many short connections.
///
/// # Errors
/// As above.
pub(crate) fn bind_service(path: &Path) -> Result<(UnixListener, SocketFile), ListenError> {
    bind_with(path, SERVICE_BACKLOG)
}

fn bind_with(path: &Path, backlog: i32) -> Result<(UnixListener, SocketFile), ListenError> {
    let os = |action| move |source: io::Error| ListenError::Os { action, path: path.to_owned(), source };
    remove_stale(path)?;

    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
        .map_err(|errno| os("create")(errno.into()))?;
    // The file that bind makes gets the mode of the socket's own inode (Linux unix_bind_bsd), less the umask. Unlike
    // umask(2) this touches no other thread, and unlike a chmod afterwards it leaves no moment with a wider mode.
    fchmod(&fd, SOCKET_MODE).map_err(|errno| os("restrict the mode of")(errno.into()))?;
    let address = UnixAddr::new(path).map_err(|errno| os("name")(errno.into()))?;
    bind(fd.as_raw_fd(), &address).map_err(|errno| match errno {
        Errno::EADDRINUSE => ListenError::InUse { path: path.to_owned() },
        errno => os("bind")(errno.into()),
    })?;
    let metadata = std::fs::symlink_metadata(path).map_err(os("inspect"))?;
    let file = SocketFile { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino() };
    let backlog = Backlog::new(backlog).map_err(|errno| os("listen on")(errno.into()))?;
    listen(&fd, backlog).map_err(|errno| os("listen on")(errno.into()))?;
    Ok((UnixListener::from(fd), file))
}

fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let os = |action| move |source: io::Error| ListenError::Os { action, path: path.to_owned(), source };
    let metadata = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(os("inspect"))?,
    };
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NotASocket { path: path.to_owned() });
    }
    match probe(path) {
        Err(Errno::ECONNREFUSED) => {}
        // EAGAIN: its backlog is full, so there is a listener.
        Ok(()) | Err(Errno::EAGAIN) => return Err(ListenError::InUse { path: path.to_owned() }),
        Err(errno) => return Err(os("probe")(errno.into())),
    }
    if metadata.uid() != nix::unistd::geteuid().as_raw() {
        return Err(ListenError::ForeignSocket { path: path.to_owned(), uid: metadata.uid() });
    }
    std::fs::remove_file(path).map_err(os("replace the dead"))
}

/// Connects without waiting: a listener that accepts nobody must not hold up the VMs of others.
fn probe(path: &Path) -> nix::Result<()> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (self.device, self.inode));
        // A leftover socket file is harmless: the next start finds it dead and replaces it.
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove own socket");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_listener_with_a_full_backlog_is_in_use_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let _first = bind_listener(&path).unwrap();
        let mut waiting = Vec::new();
        loop {
            let flags = SockFlag::SOCK_NONBLOCK;
            let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
            if connect(fd.as_raw_fd(), &UnixAddr::new(&path).unwrap()).is_err() {
                break;
            }
            waiting.push(fd);
        }

        assert!(matches!(bind_listener(&path).unwrap_err(), ListenError::InUse { .. }));
    }

    #[test]
    fn a_service_keeps_many_clients_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let (_listener, _file) = bind_service(&path).unwrap();

        let waiting: Vec<_> = (0..64).map(|_| connect_at_once(&path).unwrap()).collect();

        assert_eq!(waiting.len(), 64);
    }

    fn connect_at_once(path: &Path) -> nix::Result<std::os::fd::OwnedFd> {
        let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_NONBLOCK, None)?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(fd)
    }

    #[test]
    fn a_new_socket_is_private_and_goes_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");

        let (_listener, file) = bind_listener(&path).unwrap();

        // The test's umask may take more away.
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777 & !0o660, 0);
        assert!(UnixStream::connect(&path).is_ok());
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_live_listener_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let _first = bind_listener(&path).unwrap();

        let error = bind_listener(&path).unwrap_err();

        assert!(matches!(error, ListenError::InUse { .. }), "{error}");
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn a_dead_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());

        assert!(bind_listener(&path).is_ok());
    }

    #[test]
    fn another_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        std::fs::write(&path, "precious").unwrap();

        let error = bind_listener(&path).unwrap_err();

        assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_socket_that_somebody_else_put_there_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let (_listener, file) = bind_listener(&path).unwrap();
        // Renamed over, so that the new file cannot get the inode number of the old one.
        let other = dir.path().join("other.sock");
        let _other = UnixListener::bind(&other).unwrap();
        std::fs::rename(&other, &path).unwrap();

        drop(file);

        assert!(path.exists());
    }
}
