//! One VM: the task that owns its session, and what it owns with it.
//!
//! ```text
//!  vsock device ---- DeviceEvent --> owner (one task) --Work--> worker thread of that device
//!  balloon device -- DeviceEvent -->   |  session                   |
//!       ^                              |                            |
//!       +--- DeviceHandle, Answer -----+  <---------- Done ---------+
//!                                      ^
//!   control socket ----- Request ------+
//! ```
//! Only this task touches the session, so nothing here needs a lock and observers get copies. It blocks on nothing:
//! system calls on guest memory and on the VMM's /proc are the workers'. A device has a worker of its own, so that the
//! guest's kernel, which waits with its report, does not wait for a survey of the agent.

mod ask;
mod drain;
mod drop;
mod front_end;
mod log;
mod memory_files;
mod owner;
pub mod status;
mod stream;
mod worker;

use crate::accounting::Subject;
use crate::accounting::books::Accounting;
use crate::accounting::choose::Account;
use crate::backing;
use crate::device::balloon::{self, BalloonConfig};
use crate::device::vsock::{self, VsockConfig};
use crate::device::{DeviceEvent, Rings};
use crate::session::Config;
use crate::session::drain::{DrainError, Drained};
pub use ask::{ANSWER_LIMIT, Unanswered, ask_all};
pub use memory_files::MemoryFiles;
use owner::Owner;
use status::VmStatus;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Requests waiting for an owner, at most.
const REQUESTS: usize = 16;

/// CLOCK_BOOTTIME: a guest's clock may go on while the host is suspended, so a clock that stands still meanwhile would
/// make reports look younger than they are.
pub(crate) fn boot_now() -> Duration {
    // The clock exists since Linux 2.6.39; without one no report is ever fresh.
    backing::boot_time().unwrap_or(Duration::MAX)
}

/// Who wants a VM to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The configuration file.
    Config,
    /// The command line of `serve`.
    Flag,
    /// `vm add`.
    Command,
    /// A folder in the VM directory.
    Directory,
}

impl Origin {
    /// The word of `status`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Flag => "flag",
            Self::Command => "command",
            Self::Directory => "directory",
        }
    }
}

/// What makes up one VM. At least one of the two sockets is there.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Its name, for people.
    pub name: String,
    /// Who wants it.
    pub origin: Origin,
    /// Where the VMM's front end of the vsock device connects, if the VM has one.
    pub socket: Option<PathBuf>,
    /// Where the VMM's front end of the balloon device connects, if the VM has one.
    pub balloon: Option<PathBuf>,
    /// CID that the guest sees.
    pub guest_cid: u64,
    /// Closed from the start, with this reason.
    pub inhibit: Option<String>,
    /// What it may cost its host before an alarm is raised.
    pub budget_bytes: Option<u64>,
    /// Session times and bounds.
    pub session: Config,
    /// Root of procfs.
    pub proc_root: PathBuf,
    /// Memory files of all VMs of the daemon.
    pub memory_files: Arc<MemoryFiles>,
}

/// Root of procfs unless a test says otherwise.
pub const PROC_ROOT: &str = "/proc";

impl VmConfig {
    /// A VM with the documented defaults and without a device.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            origin: Origin::Config,
            socket: None,
            balloon: None,
            guest_cid: vsock::DEFAULT_GUEST_CID,
            inhibit: None,
            budget_bytes: None,
            session: Config::default(),
            proc_root: PathBuf::from(PROC_ROOT),
            memory_files: Arc::default(),
        }
    }
}

/// What an operator can ask of a VM.
#[derive(Debug)]
pub enum Request {
    /// Its figures.
    Status(oneshot::Sender<VmStatus>),
    /// Whose memory is to be accounted for; without a front end it has neither process nor files.
    Subject(oneshot::Sender<Subject>),
    /// What the choice of the VM to ask for memory needs to know.
    Account(oneshot::Sender<Account>),
    /// What accounting read, for `status`.
    Accounted(Box<Accounting>),
    /// Close the gate `operator`; answered when nothing is dropped any more.
    Inhibit(String, oneshot::Sender<()>),
    /// Open it.
    Resume(oneshot::Sender<()>),
    /// Ask the agent for a pass and wait for it at most so long.
    Drain(Duration, oneshot::Sender<Result<DrainReport, DrainError>>),
    /// Just say that the task is alive.
    Ping(oneshot::Sender<()>),
    /// End, now or when no front end is connected.
    Leave(Leave, oneshot::Sender<Result<(), Connected>>),
    /// Take back a `Leave` that waits.
    Stay(oneshot::Sender<()>),
    /// End the devices and the task.
    Shutdown,
}

/// When a VM that is not wanted any more ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// Now, unless a front end is connected: then not at all.
    IfUnused,
    /// When its last front end has gone.
    WhenUnused,
    /// Now, whoever is connected.
    Now,
}

/// A front end is connected, so the VM does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connected {
    /// Its process, if known.
    pub pid: Option<i32>,
}

/// What `drain` tells.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DrainReport {
    /// What the session counted.
    #[serde(flatten)]
    pub drained: Drained,
    /// Bytes of guest memory backed when it was asked for and when it was answered, measured.
    pub backed_bytes: (Option<u64>, Option<u64>),
}

/// Way to a VM's task.
#[derive(Clone, Debug)]
pub struct VmHandle {
    /// The VM's name.
    pub name: String,
    requests: mpsc::Sender<Request>,
}

impl VmHandle {
    /// Asks the VM's task; `None` if it has ended.
    pub async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        self.requests.send(request(sender)).await.ok()?;
        receiver.await.ok()
    }

    /// Tells the VM's task something without waiting; lost if its queue is full or it has ended.
    pub fn tell(&self, request: Request) {
        let _ = self.requests.try_send(request);
    }

    /// Puts a request into the VM's queue without waiting, and returns where the answer will come.
    ///
    /// # Errors
    /// See [`NotTaken`].
    pub fn request<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<oneshot::Receiver<T>, NotTaken> {
        let (sender, receiver) = oneshot::channel();
        match self.requests.try_send(request(sender)) {
            Ok(()) => Ok(receiver),
            Err(mpsc::error::TrySendError::Full(_)) => Err(NotTaken::Full),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(NotTaken::Ended),
        }
    }

    /// Tells the VM to end.
    pub async fn shut_down(&self) {
        let _ = self.requests.send(Request::Shutdown).await;
    }

    /// Waits until the VM's task has ended.
    pub async fn ended(&self) {
        self.requests.closed().await;
    }

    /// A handle without a VM, and what a VM's task would be asked.
    #[cfg(test)]
    pub(crate) fn detached(name: &str) -> (Self, mpsc::Receiver<Request>) {
        let (requests, receiver) = mpsc::channel(REQUESTS);
        (Self { name: name.to_owned(), requests }, receiver)
    }
}

/// Why a VM's task did not take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// Its queue is full: it has not looked for long.
    Full,
    /// It has ended.
    Ended,
}

/// Why a VM could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// Its vsock device.
    #[error("vsock device")]
    Vsock(#[from] vsock::SpawnError),
    /// Its balloon device.
    #[error("balloon device")]
    Balloon(#[from] balloon::SpawnError),
    /// No thread.
    #[error("cannot start a worker thread: raise the limit of tasks")]
    Worker(#[source] std::io::Error),
}

/// How long a device without a front end may take to end: one wake-up of its thread, even on a busy host.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Until a device's thread has ended and taken its socket with it, so that the path is free for the next attempt.
fn wait_for_end(mut events: mpsc::Receiver<DeviceEvent>) {
    let (ended, end) = std::sync::mpsc::channel();
    let waiting = std::thread::Builder::new().name("fpr device end".to_owned()).spawn(move || {
        while events.blocking_recv().is_some() {}
        let _ = ended.send(());
    });
    // Without a thread to wait, or after the limit, the device ends a little later.
    if waiting.is_ok() {
        let _ = end.recv_timeout(END_LIMIT);
    }
}

/// Makes the VM's devices, workers and task.
///
/// # Errors
/// A socket or a thread cannot be made; then nothing is left behind.
pub fn spawn(config: VmConfig) -> Result<(VmHandle, tokio::task::JoinHandle<()>), SpawnError> {
    let vm = &config.name;
    let rings = Arc::<Rings>::default();
    let vsock = config.socket.clone().map(|socket| {
        vsock::spawn(VsockConfig {
            vm: vm.clone(),
            socket,
            guest_cid: config.guest_cid,
            port: fpr_protocol::PORT,
            rings: Arc::clone(&rings),
        })
    });
    let vsock = vsock.transpose()?;
    let balloon = config
        .balloon
        .clone()
        .map(|socket| balloon::spawn(BalloonConfig { vm: vm.clone(), socket, rings: Arc::clone(&rings) }));
    let balloon = match balloon.transpose() {
        Ok(balloon) => balloon,
        Err(error) => {
            if let Some((vsock, events)) = vsock {
                vsock.shutdown();
                wait_for_end(events);
            }
            return Err(error.into());
        }
    };
    let (requests, receiver) = mpsc::channel(REQUESTS);
    let handle = VmHandle { name: vm.clone(), requests };
    let (owner, inbox) = Owner::new(config, vsock, balloon, rings, receiver).map_err(SpawnError::Worker)?;
    Ok((handle, tokio::spawn(owner.run(inbox))))
}
