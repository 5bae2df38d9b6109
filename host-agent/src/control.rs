//! The control socket: one JSON object per line in, one out.
//!
//! Called by `serve`; the other subcommands are its clients. Who may open the socket (its mode is 0660) may inhibit
//! and resume VMs; guests never reach it. Clients are limited in number, request size and time, so that a stuck one
//! costs nothing but its slot; one that drains a VM may keep its slot for as long as it asked to wait.

use crate::accounting::Roots;
use crate::accounting::choose::{self, Ranking};
use crate::config::{self, Config, Flags};
use crate::fleet::{self, Fleet, Force, Reloaded, VmReport};
use crate::vm::{DrainReport, Origin, Request, VmConfig, VmHandle};
use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader as AsyncBufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Longest request in bytes.
const MAX_REQUEST: u64 = 4096;
/// Clients at a time; more wait in the kernel's queue.
const MAX_CLIENTS: usize = 16;
/// Time for a request to arrive, and for an answer to it beyond what it asked to wait.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for a drain in seconds. A pass over a large guest takes minutes at most.
pub const MAX_DRAIN_WAIT: u64 = 600;

/// What a client can ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// All VMs' figures.
    Status,
    /// Close a VM's gate `operator`.
    Inhibit {
        /// Which VM.
        vm: String,
        /// Why, for `status`.
        reason: String,
    },
    /// Open it again.
    Resume {
        /// Which VM.
        vm: String,
    },
    /// Ask a VM's agent for a pass now.
    Drain {
        /// Which VM.
        vm: String,
        /// Wait so long for its end, at most [`MAX_DRAIN_WAIT`].
        wait_s: u64,
    },
    /// Which VM to ask for memory.
    Rank {
        /// The first so many; all without it.
        #[serde(default)]
        top: Option<usize>,
    },
    /// Make a VM. Without a socket it is in the VM directory.
    VmAdd {
        /// Its name.
        vm: String,
        /// Its vsock device.
        #[serde(default)]
        socket: Option<PathBuf>,
        /// Its balloon device.
        #[serde(default)]
        balloon: Option<PathBuf>,
        /// The guest's CID, unless it is the usual one.
        #[serde(default)]
        guest_cid: Option<u64>,
        /// What it may cost its host before an alarm is raised.
        #[serde(default)]
        budget_bytes: Option<u64>,
    },
    /// End a VM.
    VmRemove {
        /// Which VM.
        vm: String,
        /// Cut off its front end.
        #[serde(default)]
        force: bool,
    },
    /// Which VMs there are.
    VmList,
    /// Read the configuration again.
    Reload,
}

impl Command {
    /// Time for an answer beyond that for any.
    fn wait(&self) -> Duration {
        match self {
            Self::Drain { wait_s, .. } => Duration::from_secs((*wait_s).min(MAX_DRAIN_WAIT)),
            Self::Rank { .. } => choose::LIMIT,
            Self::VmRemove { .. } => fleet::STOP_DEADLINE,
            Self::Status
            | Self::Inhibit { .. }
            | Self::Resume { .. }
            | Self::VmAdd { .. }
            | Self::VmList
            | Self::Reload => Duration::ZERO,
        }
    }
}

/// What comes back: the answer, or an error for a person.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Status(DaemonStatus),
    Done,
    Drained(DrainReport),
    Ranking(Ranking),
    Vms(Vec<ListedVm>),
    Reloaded(Reloaded),
    Error(String),
}

/// The daemon and its VMs.
#[derive(Debug, Serialize)]
pub struct DaemonStatus {
    /// Version of the daemon.
    pub version: &'static str,
    /// Its process.
    pub pid: u32,
    /// Why it still has an older configuration than the file's.
    pub config_error: Option<String>,
    /// The VMs in the order in which they came.
    pub vms: Vec<VmReport>,
}

/// One line of `vm list`: what is known without asking the VM.
#[derive(Clone, Debug, Serialize)]
pub struct ListedVm {
    /// Its name.
    pub name: String,
    /// Who wants it.
    pub origin: Origin,
    /// What it is doing.
    pub state: fleet::State,
    /// Why it failed, or what it waits for.
    pub detail: Option<String>,
    /// Its vsock device.
    pub socket: Option<PathBuf>,
    /// Its balloon device.
    pub balloon: Option<PathBuf>,
}

impl From<&fleet::Member> for ListedVm {
    fn from(member: &fleet::Member) -> Self {
        let config = member.config.as_deref();
        Self {
            name: member.name.clone(),
            origin: member.origin,
            state: member.state,
            detail: member.detail.clone(),
            socket: config.and_then(|config| config.socket.clone()),
            balloon: config.and_then(|config| config.balloon.clone()),
        }
    }
}

/// Serves clients until the task is aborted.
pub async fn serve(listener: UnixListener, fleet: Fleet, flags: Flags) {
    let slots = Arc::new(Semaphore::new(MAX_CLIENTS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (fleet, flags) = (fleet.clone(), flags.clone());
                tokio::spawn(async move {
                    // A client that is late or gone gets no answer; there is nobody to tell.
                    let _ = client(stream, &fleet, &flags).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept on the control socket");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

async fn client(stream: UnixStream, fleet: &Fleet, flags: &Flags) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = Vec::new();
    let mut reader = AsyncBufReader::new(read.take(MAX_REQUEST));
    tokio::time::timeout(TIMEOUT, reader.read_until(b'\n', &mut line)).await??;
    if line.is_empty() {
        return Ok(());
    }
    let answer = match serde_json::from_slice::<Command>(&line) {
        Ok(command) => tokio::time::timeout(command.wait() + TIMEOUT, obey(command, fleet, flags)).await?,
        Err(error) => Answer::Error(format!("no request of at most {MAX_REQUEST} bytes: {error}")),
    };
    let mut bytes = serde_json::to_vec(&answer)?;
    bytes.push(b'\n');
    tokio::time::timeout(TIMEOUT, write.write_all(&bytes)).await?
}

async fn obey(command: Command, fleet: &Fleet, flags: &Flags) -> Answer {
    let wait = command.wait();
    match command {
        Command::Status => Answer::Status(status(fleet).await),
        Command::Rank { top } => {
            let vms = fleet.view().members.iter().filter_map(|member| member.handle.clone()).collect();
            Answer::Ranking(choose::rank(vms, Roots::default(), top.unwrap_or(usize::MAX)).await)
        }
        Command::Inhibit { vm, reason } => match fleet.vm(&vm) {
            Ok(vm) => done(ask_vm(&vm, |answer| Request::Inhibit(reason, answer)).await),
            Err(error) => failed(&error),
        },
        Command::Resume { vm } => match fleet.vm(&vm) {
            Ok(vm) => done(ask_vm(&vm, Request::Resume).await),
            Err(error) => failed(&error),
        },
        Command::Drain { vm: name, .. } => match fleet.vm(&name) {
            Ok(vm) => match vm.ask(|answer| Request::Drain(wait, answer)).await {
                Some(Ok(report)) => Answer::Drained(report),
                Some(Err(error)) => Answer::Error(format!("VM {name}: {error}")),
                None => Answer::Error(STOPPING.to_owned()),
            },
            Err(error) => failed(&error),
        },
        Command::VmAdd { vm, socket, balloon, guest_cid, budget_bytes } => {
            if budget_bytes == Some(0) {
                return Answer::Error("budget 0 would always be crossed: leave it out for none".to_owned());
            }
            let config = match config::commanded(&vm, (socket, balloon), guest_cid) {
                Ok(config) => VmConfig { budget_bytes, ..config },
                Err(error) => return failed(&error),
            };
            fleet.add(config).await.map_or_else(|error| failed(&error), |()| Answer::Done)
        }
        Command::VmRemove { vm, force } => {
            let force = if force { Force::Yes } else { Force::No };
            fleet.remove(&vm, force).await.map_or_else(|error| failed(&error), |()| Answer::Done)
        }
        Command::VmList => Answer::Vms(fleet.view().members.iter().map(ListedVm::from).collect()),
        Command::Reload => match reload(fleet, flags).await {
            Ok(reloaded) => Answer::Reloaded(reloaded),
            Err(error) => failed(&error),
        },
    }
}

fn failed(error: &dyn std::error::Error) -> Answer {
    Answer::Error(crate::error_chain(error))
}

/// The figures of all VMs, each within its time limit.
pub async fn status(fleet: &Fleet) -> DaemonStatus {
    let (vms, config_error) = (fleet.status().await, fleet.view().config_error);
    DaemonStatus { version: env!("CARGO_PKG_VERSION"), pid: std::process::id(), config_error, vms }
}

/// Reads the configuration again and puts it in force; the service manager is told before and after.
///
/// # Errors
/// It cannot be read, and the old one stays.
pub async fn reload(fleet: &Fleet, flags: &Flags) -> Result<Reloaded, fleet::ReloadError> {
    // sd_notify(3): systemd 253 wants to know when.
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        fleet::notify(&[NotifyState::Reloading, now]);
    }
    let reloaded = fleet.reload(Config::load(flags)).await;
    fleet::notify(&[NotifyState::Ready]);
    reloaded
}

/// What a VM that does not answer is.
const STOPPING: &str = "the VM's devices are being stopped";

/// Asks one VM with the time limit of all.
async fn ask_vm<T>(vm: &VmHandle, request: impl FnOnce(tokio::sync::oneshot::Sender<T>) -> Request) -> Option<T> {
    tokio::time::timeout(fleet::ANSWER_LIMIT, vm.ask(request)).await.ok().flatten()
}

fn done(answer: Option<()>) -> Answer {
    match answer {
        Some(()) => Answer::Done,
        None => Answer::Error(STOPPING.to_owned()),
    }
}

/// Why a client got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("cannot reach the daemon at {path}: is `fpr-host-agent serve` running, with this --control path?")]
    Unreachable {
        /// The socket.
        path: String,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// It did not answer in time or not with JSON.
    #[error("no answer from the daemon")]
    NoAnswer(#[source] std::io::Error),
    /// It refused.
    #[error("{0}")]
    Refused(String),
}

/// Sends one command to a daemon and returns the answer's JSON.
///
/// # Errors
/// See [`ClientError`].
pub fn ask(path: &Path, command: &Command) -> Result<serde_json::Value, ClientError> {
    let mut stream = BlockingStream::connect(path)
        .map_err(|source| ClientError::Unreachable { path: path.display().to_string(), source })?;
    let exchange = || {
        stream.set_read_timeout(Some(command.wait() + 2 * TIMEOUT))?;
        let mut request = serde_json::to_vec(command)?;
        request.push(b'\n');
        stream.write_all(&request)?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(serde_json::from_str::<serde_json::Value>(&line)?)
    };
    let mut answer = exchange().map_err(ClientError::NoAnswer)?;
    match answer.get_mut("error") {
        Some(error) => Err(ClientError::Refused(error.as_str().unwrap_or("unknown error").to_owned())),
        None => {
            let inner =
                ["status", "drained", "vms", "reloaded", "ranking"].iter().find(|kind| answer.get(**kind).is_some());
            Ok(inner.map(|kind| answer[*kind].take()).unwrap_or(answer))
        }
    }
}
