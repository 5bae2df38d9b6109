//! The drop guard: no drop begins after its deadline, whatever happens to this process.
//!
//! A guest takes unanswered memory back once the lease and the grace period are over. A daemon that checks the clock
//! and then drops can be stopped between the two (SIGSTOP, a frozen cgroup, a debugger, a starved CPU) and would drop
//! minutes later, when the guest uses the pages again. Checking more often makes the gap smaller and never closes it.
//!
//! So the kernel keeps the promise. While a drop runs, a POSIX timer is armed that sends SIGKILL to this process at
//! the deadline; after the drop it is disarmed. SIGKILL cannot be caught, blocked or ignored, and a pending one is acted
//! on before a thread returns to user mode: a thread that was stopped or frozen dies without executing another
//! instruction (the version 1 freezer keeps it as a corpse until it is thawed, which changes nothing), and one that
//! runs on another CPU is interrupted. Hence no system call of this process *begins* after the deadline. What the
//! deadline may find inside the kernel is one call of at most [`super::MAX_CALL_BYTES`] or one page of the backing per
//! guard: a millisecond or two, more if that call waits for the file's lock or for a CPU (18 ms seen with ten runnable
//! threads on two CPUs). The guest's margin covers it. A timer descriptor would not do: somebody has to read it.
//!
//! The clock is CLOCK_BOOTTIME, which goes on while the host is suspended.
//!
//! The daemon owns many VMs, and all of them lose their sessions when it dies. That is the lesser evil: sessions come
//! back by themselves, a page that was dropped under its user does not.

use nix::errno::Errno;
use nix::sys::signal::{SigEvent, SigevNotify, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Why the guard could not be armed. Nothing may be dropped then.
#[derive(Debug, thiserror::Error)]
#[error("cannot arm the drop deadline ({call}): raise RLIMIT_SIGPENDING, which counts timers")]
pub struct ArmError {
    /// The call that failed.
    call: &'static str,
    #[source]
    source: Errno,
}

/// Time since boot, suspend included (CLOCK_BOOTTIME): the clock of [`DropGuard::arm`].
pub fn boot_time() -> Result<Duration, ArmError> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME);
    now.map(Duration::from).map_err(|source| ArmError { call: "clock_gettime", source })
}

/// While it lives, this process is killed by SIGKILL at the deadline. Dropping it disarms.
#[must_use = "the guard disarms when it goes out of scope"]
#[derive(Debug)]
pub struct DropGuard {
    _timer: Timer,
}

impl DropGuard {
    /// Arms for the moment `deadline` of [`boot_time`]; one that has passed kills at once. A few microseconds.
    pub fn arm(deadline: Duration) -> Result<Self, ArmError> {
        let kill = SigEvent::new(SigevNotify::SigevSignal { signal: Signal::SIGKILL, si_value: 0 });
        let mut timer =
            Timer::new(ClockId::CLOCK_BOOTTIME, kill).map_err(|source| ArmError { call: "timer_create", source })?;
        // All zero would mean "never" (timer_settime(2)).
        let at = Expiration::OneShot(TimeSpec::from(deadline.max(Duration::from_nanos(1))));
        timer
            .set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME)
            .map_err(|source| ArmError { call: "timer_settime", source })?;
        Ok(Self { _timer: timer })
    }
}
