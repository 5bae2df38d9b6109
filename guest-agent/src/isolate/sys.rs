//! System calls without a safe wrapper: shared mappings of hugetlbfs files, pinning with `vmsplice`, per-thread
//! timers and the signal that interrupts a blocking write.
//!
//! Called by [`super::claim`] and [`super::worker`]. All `unsafe` of the isolation code is here.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, vmsplice};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io::{self, IoSlice};
use std::num::NonZeroUsize;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::time::Duration;

/// Signal that interrupts a worker. Ignored by default, so one that arrives late does no harm.
const INTERRUPT: libc::c_int = libc::SIGURG;

/// How often an armed timer fires again: a signal that came just before the system call interrupted nothing.
const INTERRUPT_AGAIN: Duration = Duration::from_millis(2);

/// `UIO_MAXIOV` of the kernel (`include/uapi/linux/uio.h`).
const MAX_IOVECS: usize = 1024;

/// Shared, writable mapping of a hugetlbfs file that holds all its pages already.
#[derive(Debug)]
pub(super) struct HugeMapping {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to this value alone, no thread-local state is involved, and munmap(2) may be called
// from any thread.
unsafe impl Send for HugeMapping {}

impl HugeMapping {
    /// Maps the first `length` bytes of `file`, a multiple of its page size.
    ///
    /// `MAP_NORESERVE`, so that mmap allocates nothing of its own accord (`hugetlb_reserve_pages` in mm/hugetlb.c).
    pub(super) fn new(file: &File, length: NonZeroUsize) -> io::Result<Self> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED the kernel picks an unused address range, so no existing object is replaced.
        let address = unsafe { mmap(None, length, protection, flags, file, 0) }?;
        Ok(Self { address: address.cast(), length: length.get() })
    }

    /// Virtual address of the byte at `offset`, for /proc/self/pagemap.
    pub(super) fn address_of(&self, offset: usize) -> usize {
        self.address.as_ptr() as usize + offset
    }

    /// Copies `bytes` to `offset`. False if they do not fit.
    #[must_use]
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) -> bool {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.length) {
            return false;
        }
        // SAFETY: offset is within the mapping (checked above), so the sum stays in the same mapped object.
        let to = unsafe { self.address.as_ptr().add(offset) };
        // SAFETY: `to..to + bytes.len()` lies inside this mapping, which is writable and exclusively borrowed;
        // `bytes` is a Rust slice and so cannot overlap it. All pages were allocated before the mapping was made and
        // only this process has the file, so the access does not raise SIGBUS.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        true
    }

    /// Takes a reference to each of the huge pages of `page_bytes` by moving one byte of it into a pipe. The
    /// references last as long as the returned descriptors.
    ///
    /// A pipe has as many slots as its size has base pages (`pipe_set_size` in fs/pipe.c); where it cannot be made
    /// large enough (fs.pipe-max-size without CAP_SYS_RESOURCE), several are used.
    pub(super) fn pin(&self, page_bytes: usize, base_page_bytes: usize) -> io::Result<Vec<OwnedFd>> {
        let mut bytes: Vec<IoSlice<'_>> = Vec::new();
        for offset in (0..self.length).step_by(page_bytes) {
            // SAFETY: offset is below the length of the mapping.
            let address = unsafe { self.address.as_ptr().add(offset) };
            // SAFETY: one readable byte of this mapping, which outlives the slice because the slice borrows nothing
            // longer than this call, and nobody writes to it meanwhile: writing needs `&mut self`.
            bytes.push(IoSlice::new(unsafe { std::slice::from_raw_parts(address, 1) }));
        }
        let mut pipes = Vec::new();
        let mut left = bytes.as_slice();
        while !left.is_empty() {
            let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
            let size = i32::try_from(left.len() * base_page_bytes).unwrap_or(i32::MAX);
            match fcntl(&writer, FcntlArg::F_SETPIPE_SZ(size)) {
                Ok(_) | Err(Errno::EPERM | Errno::EBUSY) => {}
                Err(errno) => return Err(errno.into()),
            }
            let chunk = left.get(..MAX_IOVECS).unwrap_or(left);
            // SAFETY: vmsplice without SPLICE_F_GIFT only takes references to the pages. Their content may change
            // while they sit in the pipe (cookies are written later); nobody ever reads this pipe, so nobody can see
            // that.
            let pinned = unsafe { vmsplice(&writer, chunk, SpliceFFlags::SPLICE_F_NONBLOCK) }?;
            if pinned == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            left = left.get(pinned..).unwrap_or_default();
            // The buffers of a pipe live as long as either end.
            pipes.push(reader);
        }
        Ok(pipes)
    }
}

impl Drop for HugeMapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the whole range and made it with mmap; nothing borrows from it any more. An error
        // is impossible for a range that is mapped, and there is no one to tell it.
        let _ = unsafe { munmap(self.address.cast(), self.length) };
    }
}

/// An eventfd, non-blocking, as a file: `write` adds, `read` clears.
pub(super) fn eventfd() -> io::Result<File> {
    // SAFETY: no pointers are passed; the result is checked before it is used.
    let fd = Errno::result(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
    // SAFETY: the kernel has just handed out this descriptor; nobody else owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Timer that sends [`INTERRUPT`] to the thread that created it, again and again from the moment it is due.
#[derive(Debug)]
pub(super) struct InterruptTimer(libc::timer_t);

// SAFETY: a timer id is a handle of the process, not of the thread; the kernel locks the timer in every call
// (`lock_timer` in kernel/time/posix-timers.c).
unsafe impl Send for InterruptTimer {}
// SAFETY: as above; timer_settime(2) on one timer from two threads is serialized by the kernel.
unsafe impl Sync for InterruptTimer {}

impl InterruptTimer {
    /// A disarmed timer for the calling thread. Installs the signal handler and unblocks the signal for this thread.
    pub(super) fn for_this_thread() -> io::Result<Self> {
        extern "C" fn interrupted(_: libc::c_int) {}
        // SAFETY: sigaction is a C struct of integers, pointers and bits, for all of which zero is valid.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = interrupted as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // No SA_RESTART: the system call has to return.
        action.sa_flags = 0;
        // SAFETY: the struct is fully initialised, the handler does nothing and so is async-signal-safe, and its
        // code lives as long as the program.
        Errno::result(unsafe { libc::sigaction(INTERRUPT, &raw const action, ptr::null_mut()) })?;
        let mut mask = nix::sys::signal::SigSet::empty();
        mask.add(nix::sys::signal::Signal::SIGURG);
        mask.thread_unblock()?;

        // SAFETY: sigevent is a C struct of integers and a union of integers and pointers; zero is valid.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = INTERRUPT;
        event.sigev_notify_thread_id = nix::unistd::gettid().as_raw();
        let mut id: libc::timer_t = ptr::null_mut();
        // SAFETY: both pointers are to live locals of the right type.
        Errno::result(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut id) })?;
        Ok(Self(id))
    }

    /// First signal after `after` (at least a nanosecond), then one every [`INTERRUPT_AGAIN`].
    pub(super) fn arm(&self, after: Duration) -> io::Result<()> {
        self.set(after.max(Duration::from_nanos(1)), INTERRUPT_AGAIN)
    }

    /// No signal will be sent from now on; one that was sent is delivered before this returns to the thread.
    pub(super) fn disarm(&self) -> io::Result<()> {
        self.set(Duration::ZERO, Duration::ZERO)
    }

    fn set(&self, after: Duration, interval: Duration) -> io::Result<()> {
        let time = |duration: Duration| *nix::sys::time::TimeSpec::from_duration(duration).as_ref();
        let value = libc::itimerspec { it_interval: time(interval), it_value: time(after) };
        // SAFETY: the id is of a timer that this value owns and that lives until drop; `value` is a live local.
        Errno::result(unsafe { libc::timer_settime(self.0, 0, &raw const value, ptr::null_mut()) })?;
        Ok(())
    }
}

impl Drop for InterruptTimer {
    fn drop(&mut self) {
        // SAFETY: the id is of a timer that this value owns; it is not used after this.
        unsafe { libc::timer_delete(self.0) };
    }
}
