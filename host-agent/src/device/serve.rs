//! A device's own thread: waits for a front end, serves it to its end, waits for the next. The same for every device.
//!
//! A front end is served by two more threads that exist only while it is connected: one for its requests, one for the
//! queues. Both are gone, and the owner has confirmed that nothing is in flight, before the next one is accepted.
//!
//! The two threads take turns at one [`Backend`] behind one mutex, and that is the point: while a request waits for the
//! owner behind a [`Done`], the queue thread cannot take a single descriptor, and while the queue thread waits for a
//! drop, no request is answered. A turn of the queue thread is short, so that a guest that never pauses cannot keep a
//! request waiting: measured beside a thread that takes the mutex again at once, the other waits for one turn, for nine
//! at worst.
//!
//! The front end is trusted with its own guest only. Whatever it sends that `vhost-user-backend` or the backend cannot
//! make sense of (a feature that was not offered, a descriptor that cannot be mapped, too many regions) ends its
//! connection, with a count and a line in the log; the next one is served as if nothing had been.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::sync::mpsc;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::{Error as DaemonError, ShutdownHandle, VhostUserBackendMut, VhostUserDaemon, VringMutex};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use super::listen::SocketFile;
use super::{DeviceEvent, Done, PeerProcess, memory, peer};
use crate::log_limit::RateLimited;

/// Pause after a front end could not be served for want of descriptors, memory or threads, in milliseconds. It still
/// waits in the socket's backlog, so the next attempt is for the same one.
const RETRY_MS: u16 = 1_000;

/// What every device offers beside virtio: several queues, answers to requests (which is what a fence holds), the
/// configuration space, and memory regions one by one.
pub(super) const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// The device's side of one front end.
pub(super) trait Backend: VhostUserBackendMut<Bitmap = (), Vring = VringMutex> + Send + 'static {
    /// What the device is called in the names of its threads and in logs.
    const NAME: &'static str;

    /// Epoll data of [`Control::wake`] and [`Control::wake_after`]. Numbers up to the count of queues belong to `vhost-user-backend`.
    const WAKE: u16;

    /// Tells the owner who connected; with a duplicate of the connection. Nothing of the front end was answered yet.
    fn announce(&mut self, peer: io::Result<(PeerProcess, OwnedFd)>);

    /// The front end is gone. From now on `handle_event` fails, which is the only way to end the queue thread that leaks
    /// no descriptor: the crate never closes the consumer it gets from `exit_event`.
    fn end(&mut self);
}

/// Events towards the owner.
#[derive(Clone)]
pub(super) struct Events(mpsc::Sender<DeviceEvent>);

impl Events {
    pub(super) fn new(sender: mpsc::Sender<DeviceEvent>) -> Self {
        Self(sender)
    }

    /// Blocks while the owner is behind: the guest's queues fill up, and that is the guest's affair. An owner that is
    /// gone needs no events, and a fence in one is released by dropping it.
    pub(super) fn emit(&self, event: DeviceEvent) {
        drop(self.0.blocking_send(event));
    }

    /// Emits an event with a fence, and waits until the owner has let go of it.
    pub(super) fn emit_and_wait(&self, event: impl FnOnce(Done) -> DeviceEvent) {
        let (done, waiter) = Done::new();
        self.emit(event(done));
        waiter.wait();
    }

    /// The front end has changed the guest's memory: waits until nothing is in flight under the earlier map.
    ///
    /// # Errors
    /// The map is none that a daemon can use; the front end is disconnected.
    pub(super) fn memory_map(&self, memory: &GuestMemoryAtomic<GuestMemoryMmap>) -> io::Result<()> {
        let regions = memory::regions(&memory.memory())?;
        self.emit_and_wait(|done| DeviceEvent::MemoryMap { regions, done });
        Ok(())
    }
}

/// Two ways to cut the connection of a front end.
#[derive(Clone)]
struct FrontEnd {
    /// In a turn of its own, so that every descriptor was returned before, and none is taken after. Blocks for a turn.
    in_turn: Arc<dyn Fn() + Send + Sync>,
    /// At once.
    handle: ShutdownHandle,
}

/// What the threads of a device and the owner's handle share whatever the device is.
pub(super) struct Control {
    vm: String,
    /// Readable when the queue thread has something to do that no kick announces.
    wake: EventFd,
    /// The same, at a time.
    timer: TimerFd,
    stopping: AtomicBool,
    /// Readable when the device is to end.
    stop: EventFd,
    front_end: Mutex<Option<FrontEnd>>,
    broken_off: AtomicU64,
}

impl Control {
    /// For the device of the VM named `vm`.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub(super) fn new(vm: String) -> io::Result<Self> {
        let eventfd = || EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        Ok(Self {
            vm,
            wake: eventfd()?,
            timer: TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?,
            stopping: AtomicBool::new(false),
            stop: eventfd()?,
            front_end: Mutex::new(None),
            broken_off: AtomicU64::new(0),
        })
    }

    /// Name of the VM, for logs.
    pub(super) fn vm(&self) -> &str {
        &self.vm
    }

    /// Has the queue thread call `handle_event` with [`Backend::WAKE`].
    pub(super) fn wake(&self) {
        // Fails only when it is readable already.
        let _ = self.wake.write(1);
    }

    /// The same after `wait`, in place of an earlier wait.
    pub(super) fn wake_after(&self, wait: Duration) {
        // A wait of nothing would switch the timer off.
        let at = Expiration::OneShot(TimeSpec::from_duration(wait.max(Duration::from_nanos(1))));
        if self.timer.set(at, TimerSetTimeFlags::empty()).is_err() {
            // Too early is better than never.
            self.wake();
        }
    }

    /// The queue thread is awake.
    pub(super) fn take_wake(&self) {
        // Each fails only when somebody took it before, or when it was the other that woke.
        let _ = self.wake.read();
        let _ = self.timer.wait();
    }

    /// Begins the end of the device.
    pub(super) fn shutdown(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        // The counter of an eventfd is full only if it was written 2^64 - 2 times; then it is readable anyway.
        let _ = self.stop.write(1);
        let Some(FrontEnd { in_turn, handle }) = self.front_end().clone() else { return };
        // The turn may be the queue thread's, which waits for an answer of our caller.
        let cut = std::thread::Builder::new().name("cut-front-end".to_owned()).spawn(move || in_turn());
        if cut.is_err() {
            // Without a thread the guest's descriptor may stay out; the next daemon serves it again.
            handle.shutdown();
        }
    }

    /// Front ends whose connection was ended because of what they sent.
    pub(super) fn broken_off(&self) -> u64 {
        self.broken_off.load(Ordering::Relaxed)
    }

    fn front_end(&self) -> MutexGuard<'_, Option<FrontEnd>> {
        lock(&self.front_end)
    }
}

/// A panic under a lock is a bug; what it left behind is still the best there is.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device that is not running yet. `make` makes its side of each front end.
pub(super) struct Device<M> {
    control: Arc<Control>,
    path: PathBuf,
    probe: UnixListener,
    listener: Listener,
    file: SocketFile,
    events: Events,
    make: M,
    log: RateLimited,
}

impl<B: Backend, M> Device<M>
where
    M: FnMut(Events, GuestMemoryAtomic<GuestMemoryMmap>) -> B + Send + 'static,
{
    /// Starts the thread of a device that accepts on `listener`, bound to `path`; `file` removes the path when the
    /// device ends.
    ///
    /// # Errors
    /// If the listener cannot be duplicated or there is no thread.
    pub(super) fn spawn(
        control: Arc<Control>,
        path: PathBuf,
        (listener, file): (UnixListener, SocketFile),
        events: Events,
        make: M,
    ) -> io::Result<()> {
        // The crate's `Listener` shows its descriptor only as a number; the duplicate is for poll.
        let probe = listener.try_clone()?;
        let log = RateLimited::guest_caused();
        let device = Self { control, path, probe, listener: Listener::from(listener), file, events, make, log };
        std::thread::Builder::new().name(format!("{}-device", B::NAME)).spawn(move || device.run())?;
        Ok(())
    }

    /// Serves front ends until `shutdown`.
    fn run(mut self) {
        while self.wait_for_front_end() {
            if let Err(error) = self.serve_front_end() {
                self.report("cannot serve a front end, trying again", &error);
                self.pause();
            }
        }
        // The end of the events tells the owner that the socket is gone, so the socket goes first.
        drop(self.file);
        drop(self.events);
    }

    fn stopping(&self) -> bool {
        self.control.stopping.load(Ordering::SeqCst)
    }

    /// True when a front end waits to be accepted, false when the device is to end.
    fn wait_for_front_end(&mut self) -> bool {
        while !self.stopping() {
            let mut fds = [
                PollFd::new(self.probe.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.control.stop.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) if fds[0].any().unwrap_or(false) => return !self.stopping(),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => {
                    self.report("cannot wait for a front end, trying again", &errno);
                    self.pause();
                }
            }
        }
        false
    }

    /// A pause that `shutdown` ends.
    fn pause(&self) {
        // Whatever the outcome, the caller looks again at what it waits for.
        let _ = poll(&mut [PollFd::new(self.control.stop.as_fd(), PollFlags::POLLIN)], PollTimeout::from(RETRY_MS));
    }

    /// From accept to the confirmation that nothing is in flight. An error means that there was no front end.
    fn serve_front_end(&mut self) -> Result<(), DaemonError> {
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
        let backend = Arc::new(Mutex::new((self.make)(self.events.clone(), memory.clone())));
        let mut daemon = VhostUserDaemon::new(format!("{}-requests", B::NAME), Arc::clone(&backend), memory)?;
        let [wake, timer] = [self.control.wake.as_fd(), self.control.timer.as_fd()].map(|fd| fd.as_raw_fd());
        let registered = daemon.get_epoll_handlers().iter().try_for_each(|handler| {
            handler.register_listener(wake, EventSet::IN, u64::from(B::WAKE))?;
            handler.register_listener(timer, EventSet::IN, u64::from(B::WAKE))
        });
        if let Err(error) = registered {
            // Dropping the daemon would wait for a queue thread that nothing can wake. It sleeps for ever; that is the
            // price of one failed attempt on a host that is out of memory.
            std::mem::forget(daemon);
            return Err(DaemonError::StartDaemon(error));
        }

        let served = self.accept_and_wait(&mut daemon, &backend);

        lock(&backend).end();
        self.control.wake();
        // Joins the queue thread; the thread for requests has ended already. Then guest memory is unmapped.
        drop(daemon);
        drop(backend);
        let accepted = served?;
        if let Err(error) = accepted {
            self.control.broken_off.fetch_add(1, Ordering::Relaxed);
            self.report("a front end broke off", &error);
        }
        self.events.emit_and_wait(|done| DeviceEvent::FrontEndGone { done });
        Ok(())
    }

    /// The outer error means that nothing was accepted, the inner one how the connection ended.
    fn accept_and_wait(
        &mut self,
        daemon: &mut VhostUserDaemon<Arc<Mutex<B>>>,
        backend: &Arc<Mutex<B>>,
    ) -> Result<Result<(), DaemonError>, DaemonError> {
        {
            // Holding the backend holds every request of the front end, so that nothing overtakes the announcement.
            let mut backend = lock(backend);
            daemon.start(&mut self.listener)?;
            backend.announce(peer::find(&self.path));
        }
        let front_end = daemon.shutdown_handle().map(|handle| FrontEnd {
            in_turn: {
                let (backend, handle) = (Arc::clone(backend), handle.clone());
                Arc::new(move || {
                    let mut turn = lock(&backend);
                    turn.end();
                    handle.shutdown();
                })
            },
            handle,
        });
        *self.control.front_end() = front_end.clone();
        if let (true, Some(front_end)) = (self.stopping(), front_end) {
            (front_end.in_turn)();
        }
        let ended = daemon.wait();
        *self.control.front_end() = None;
        Ok(match ended {
            // How a connection ends when the VMM exits, whatever it was doing.
            Err(DaemonError::HandleRequest(VhostUserError::Disconnected | VhostUserError::PartialMessage)) => Ok(()),
            other => other,
        })
    }

    fn report(&mut self, message: &'static str, error: &dyn std::fmt::Display) {
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            tracing::warn!(vm = %self.control.vm, device = B::NAME, socket = %self.path.display(), %error, suppressed, "{message}");
        }
    }
}
