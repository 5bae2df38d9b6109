//! The unsafe corner of the crowd: fork without exec.
//!
//! The process that forks may have threads, so what runs in its child until the end does only what is async-signal-safe
//! (signal-safety(7)): system calls by thin wrappers, no allocation, no lock, no unwinding.

use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, pause, read, write};

const PAGE: usize = 4096;

/// The maker's ends of the pipes.
pub(super) struct Ends<'a> {
    /// Where the maker writes the pids of its children.
    pub(super) pids: &'a OwnedFd,
    /// Where each child writes a byte when it holds its memory.
    pub(super) ready: &'a OwnedFd,
    /// Ends when the children are to take their memory.
    pub(super) go: &'a OwnedFd,
    /// Ends when all is over.
    pub(super) end: &'a OwnedFd,
}

/// Forks a process that forks the others.
pub(super) fn fork_maker(pages: &[usize], ends: &Ends<'_>) -> Result<Pid, Errno> {
    // Here, since the maker must not allocate.
    let mut pids = vec![0i32; pages.len()];
    // SAFETY: the child runs `make` only, which does what this module's text says and never returns.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => make(pages, &mut pids, ends),
    }
}

fn make(pages: &[usize], pids: &mut [i32], ends: &Ends<'_>) -> ! {
    close_others(ends);
    let mut made = 0;
    for (pages, pid) in pages.iter().zip(pids.iter_mut()) {
        // SAFETY: this process has one thread; its child runs `hold` only, which never returns.
        match unsafe { fork() } {
            Ok(ForkResult::Parent { child }) => *pid = child.as_raw(),
            Ok(ForkResult::Child) => hold(*pages, ends),
            Err(_) => break,
        }
        made += 1;
    }
    let pids = pids.get(..made).unwrap_or_default();
    for pid in pids {
        // Four bytes are written at once (pipe(7)); a reader that is gone is seen at `end`.
        let _ = write(ends.pids, &pid.to_ne_bytes());
    }
    close(ends.pids.as_raw_fd(), ends.pids.as_raw_fd());
    wait_end(ends.end);
    for pid in pids {
        let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
    }
    for pid in pids {
        let _ = waitpid(Pid::from_raw(*pid), None);
    }
    exit()
}

fn hold(pages: usize, ends: &Ends<'_>) -> ! {
    // The maker may have been killed; nobody else would end this one.
    let _ = prctl::set_pdeathsig(Signal::SIGKILL);
    close(ends.pids.as_raw_fd(), ends.pids.as_raw_fd());
    wait_end(ends.go);
    let Some(length) = NonZeroUsize::new(pages * PAGE) else { exit() };
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new private mapping at an address that the kernel chooses touches no memory that is in use.
    let Ok(memory) = (unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) }) else { exit() };
    for page in 0..pages {
        let address = memory.as_ptr().cast::<u8>().wrapping_add(page * PAGE);
        // SAFETY: the address is inside the mapping just made, writable, and nobody else knows it.
        unsafe { address.write_volatile(1) };
    }
    let _ = write(ends.ready, &[1]);
    loop {
        pause();
    }
}

/// Until nobody has the other end any more.
fn wait_end(pipe: &OwnedFd) {
    let mut byte = [0];
    while !matches!(read(pipe, &mut byte), Ok(0)) {}
}

/// Other ends of the pipes above all, and whatever else would keep something open for others.
fn close_others(ends: &Ends<'_>) {
    let mut keep = [ends.pids, ends.ready, ends.go, ends.end].map(AsRawFd::as_raw_fd);
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep {
        close(first, fd - 1);
        first = fd + 1;
    }
    close(first, i32::MAX);
}

fn close(first: i32, last: i32) {
    let (Ok(first), Ok(last)) = (u32::try_from(first), u32::try_from(last)) else { return };
    if first <= last {
        // SAFETY: descriptors of a process that never returns to whoever owns them; its memory is a copy. The number is that
        // of close_range(2), Linux 5.9, and its arguments are plain numbers.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

fn exit() -> ! {
    // SAFETY: _exit(2) is async-signal-safe and takes any number.
    unsafe { libc::_exit(0) }
}
