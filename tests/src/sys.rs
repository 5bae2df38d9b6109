//! The unsafe corner of the harness: what has to happen between fork and exec, and advice on memory.

use std::fs::File;
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::sys::mman::{MmapAdvise, madvise};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use vm_memory::MmapRegion;

/// Has the kernel kill the child when the **thread** that spawned it ends (`PR_SET_PDEATHSIG`, prctl(2)), so that no VM outlives its test
/// even if the test process is killed. Spawn from the thread that owns the child.
pub(crate) fn die_with_spawning_thread(command: &mut Command) -> &mut Command {
    // SAFETY: the closure runs between fork and exec and may only do what is async-signal-safe: it makes one system call, allocates nothing
    // and takes no lock (converting an errno into io::Error does not allocate).
    unsafe { command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)) }
}

/// Has the child enter the cgroup whose `cgroup.procs` is open for writing, before its program begins (cgroups(7): 0 stands for the writer).
pub(crate) fn enter_cgroup(command: &mut Command, procs: File) {
    // SAFETY: the closure runs between fork and exec and may only do what is async-signal-safe: it makes one write(2) to a descriptor that it
    // owns, allocates nothing and takes no lock (converting an errno into io::Error does not allocate).
    unsafe { command.pre_exec(move || Ok(nix::unistd::write(&procs, b"0").map(drop)?)) };
}

/// What to do with memory (madvise(2)).
#[derive(Debug, Clone, Copy)]
pub(crate) enum Advice {
    /// Drop it: private anonymous memory reads zero afterwards.
    DontNeed,
    /// Use huge pages where possible.
    HugePage,
    /// Use none.
    NoHugePage,
}

/// Gives advice on the bytes `extent` of a mapping. EINVAL if they are not wholly inside it.
pub(crate) fn advise(mapping: &MmapRegion<()>, extent: &Range<u64>, advice: Advice) -> Result<(), Errno> {
    let start = usize::try_from(extent.start).map_err(|_| Errno::EINVAL)?;
    let end = usize::try_from(extent.end).map_err(|_| Errno::EINVAL)?;
    if !mapping.owned() || start >= end || end > mapping.size() {
        return Err(Errno::EINVAL);
    }
    let address = NonNull::new(mapping.as_ptr().wrapping_add(start)).ok_or(Errno::EINVAL)?;
    let advice = match advice {
        Advice::DontNeed => MmapAdvise::MADV_DONTNEED,
        Advice::HugePage => MmapAdvise::MADV_HUGEPAGE,
        Advice::NoHugePage => MmapAdvise::MADV_NOHUGEPAGE,
    };
    // SAFETY: the bytes lie inside a mapping that `mapping` has made itself and keeps while it is borrowed. None of the three kinds of advice
    // unmaps anything; at most the content changes, and memory of an `MmapRegion` is read and written through volatile accesses only.
    unsafe { madvise(address.cast(), end - start, advice) }
}
