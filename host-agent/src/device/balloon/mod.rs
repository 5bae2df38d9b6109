//! The vhost-user virtio-balloon device of one VM: memory that the guest's kernel gives away by itself.
//!
//! ```text
//!   front end (QEMU) ── vhost-user ──> serve ──> backend ──> reporting (chains), config_space, stats
//!                                                  │  ^
//!                          DeviceEvent::Reported   │  │ Answer
//!                                                  v  │
//!                                              the owner of the VM
//! ```
//! [`spawn`] is called by whoever sets up a VM; the owner's task receives the events and holds the [`BalloonHandle`]. The
//! thread that serves the queues takes one chain, tells the owner, waits for its answer and returns the chain: what the
//! guest gave away belongs to nobody in between, and there is no time limit on the guest's side.
//!
//! | queue | what happens |
//! | --- | --- |
//! | reporting, inflate | the owner decides and drops, then the chain is returned, whatever it holds |
//! | deflate | returned: a page that comes back to the guest is filled with zeros at its first touch |
//! | statistics | read into [`Received`], returned when somebody wants to know again |
//!
//! The device never asks for memory (`num_pages` is 0); a guest inflates only if its driver does so by itself.
//!
//! Features: REPORTING and STATS_VQ, and PAGE_POISON because Linux reports only with it when it runs with
//! `init_on_free` (`virtballoon_validate`). EVENT_IDX and INDIRECT_DESC are not offered: there is one report in flight.

mod backend;
mod config_space;
pub(crate) mod counters;
pub(crate) mod fault;
mod pace;
mod queues;
mod stats;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

pub use counters::Counters;
pub use fault::Fault;
pub use stats::{Received, Statistics};

use self::backend::BalloonBackend;
use self::pace::Pace;
use super::serve::{Control, Device, Events};
use super::{DeviceEvent, ListenError, Rings};
use crate::reporting::{ReportingQueue, Source};

/// Events that may wait for the owner. The queue thread waits for the answer to each report, so there is one report among
/// them at most.
const EVENT_CHANNEL: usize = 64;

/// What makes up the balloon device of one VM.
#[derive(Clone, Debug)]
pub struct BalloonConfig {
    /// Name of the VM, for logs.
    pub vm: String,
    /// Where the front end connects.
    pub socket: PathBuf,
    /// The rings of all devices of the VM.
    pub rings: Arc<Rings>,
}

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No eventfd or no thread.
    #[error("cannot set up the balloon device of VM {vm}: raise the limits of open files and tasks")]
    Os {
        /// Name of the VM.
        vm: String,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
}

/// Makes the device and its thread. The receiver ends when the device has ended and its socket is removed.
///
/// # Errors
/// See [`SpawnError`]. Nothing is left behind.
pub fn spawn(config: BalloonConfig) -> Result<(BalloonHandle, mpsc::Receiver<DeviceEvent>), SpawnError> {
    let os = |source| SpawnError::Os { vm: config.vm.clone(), source };
    let socket = super::listen::bind_listener(&config.socket)?;
    let shared = Arc::new(Shared::new(config.vm.clone(), Arc::clone(&config.rings)).map_err(os)?);
    let (sender, receiver) = mpsc::channel(EVENT_CHANNEL);
    let make = {
        let shared = Arc::clone(&shared);
        move |events, memory| BalloonBackend::new(Arc::clone(&shared), events, memory)
    };
    Device::spawn(Arc::clone(&shared.control), config.socket.clone(), socket, Events::new(sender), make).map_err(os)?;
    Ok((BalloonHandle { shared }, receiver))
}

/// The owner's way to the device. None of the calls waits for the guest, the front end or a drop.
#[derive(Clone)]
pub struct BalloonHandle {
    shared: Arc<Shared>,
}

impl BalloonHandle {
    /// Asks the guest for new statistics. They come when the guest likes, or never; see [`statistics`](Self::statistics).
    pub fn request_stats(&self) {
        self.shared.stats_wanted.store(true, Ordering::SeqCst);
        self.shared.control.wake();
    }

    /// The latest statistics of the guest behind the present front end: claims, not measurements.
    #[must_use]
    pub fn statistics(&self) -> Option<Received> {
        self.shared.state().statistics
    }

    /// What passed so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let state = self.shared.state();
        let mut counters = state.counters.clone();
        counters.reporting = state.reporting.counters().clone();
        counters.inflate = state.inflate.counters().clone();
        counters.front_ends_broken_off = self.shared.control.broken_off();
        counters
    }

    /// Begins the end of the device: the front end is disconnected and the socket removed. The events go on until
    /// their channel ends, and the owner must receive them and answer.
    pub fn shutdown(&self) {
        self.shared.control.shutdown();
    }
}

impl std::fmt::Debug for BalloonHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BalloonHandle").field("vm", &self.shared.control.vm()).finish_non_exhaustive()
    }
}

/// What the threads of a device and its handles share.
struct Shared {
    control: Arc<Control>,
    rings: Arc<Rings>,
    started: Instant,
    stats_wanted: AtomicBool,
    /// Locked for single steps only, never while anything waits.
    state: Mutex<State>,
}

/// What outlives a front end.
struct State {
    reporting: ReportingQueue,
    inflate: ReportingQueue,
    pace: Pace,
    statistics: Option<Received>,
    counters: Counters,
}

impl Shared {
    fn new(vm: String, rings: Arc<Rings>) -> std::io::Result<Self> {
        Ok(Self {
            control: Arc::new(Control::new(vm)?),
            rings,
            started: Instant::now(),
            stats_wanted: AtomicBool::new(false),
            state: Mutex::new(State {
                reporting: ReportingQueue::new(Source::Reported),
                inflate: ReportingQueue::new(Source::Inflated),
                pace: Pace::new(Duration::ZERO),
                statistics: None,
                counters: Counters::default(),
            }),
        })
    }

    /// How long the guest's chains have to wait; `None` if one may be taken now. It outlives front ends: a guest that has
    /// its device reset is not given more.
    fn wait_for_pace(&self) -> Option<Duration> {
        self.state().pace.wait(self.started.elapsed())
    }

    /// A panic under the lock is a bug, but no step leaves the state half-changed in a way that could harm memory.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn queue(&mut self, source: Source) -> &mut ReportingQueue {
        match source {
            Source::Reported => &mut self.reporting,
            Source::Inflated => &mut self.inflate,
        }
    }
}
