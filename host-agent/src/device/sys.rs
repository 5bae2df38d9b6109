//! The one place where the device code needs a raw descriptor number.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// A duplicate of descriptor number `fd` of this process, close-on-exec.
///
/// # Errors
/// EBADF if no descriptor has that number (any more).
pub(super) fn duplicate(fd: RawFd) -> std::io::Result<OwnedFd> {
    if fd < 0 {
        return Err(std::io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: `borrow_raw` asks for a number that is not -1, checked above, and that stays open while borrowed. Another
    // thread may close it meanwhile; the borrow is used for exactly one thing, the fcntl(F_DUPFD_CLOEXEC) inside
    // `try_clone_to_owned`, to which the kernel answers EBADF for a closed number, and which otherwise takes its own
    // reference. If the number was reused in between, the duplicate is of another open file, and the only caller looks
    // at what it got before it believes it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned()
}
