//! Registering the inotify descriptor with tokio's reactor.

use nix::sys::inotify::Inotify;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// An inotify descriptor that tokio can wait for. The field is private: nobody can take the descriptor out or replace it.
pub(super) struct Watch(Inotify);

impl Watch {
    pub(super) fn inotify(&self) -> &Inotify {
        &self.0
    }
}

impl AsRawFd for Watch {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Registers it.
///
/// # Errors
/// What epoll says.
pub(super) fn register(inotify: Inotify) -> io::Result<AsyncFd<Watch>> {
    // SAFETY: the descriptor has to be the same, open and ours from here until the `AsyncFd` has deregistered it. `Watch`
    // owns its `Inotify`, which closes the descriptor when it is dropped and not before; `as_raw_fd` always returns that
    // one; and `AsyncFd` deregisters before it drops what it owns.
    unsafe { AsyncFd::register_with_interest(Watch(inotify), Interest::READABLE) }.map_err(io::Error::from)
}
