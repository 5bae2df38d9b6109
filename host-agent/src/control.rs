//! The control socket: one JSON object per line in, one out.
//!
//! Called by `serve`; the other subcommands are its clients. Who may open the socket (its mode is 0660) may inhibit
//! and resume VMs; guests never reach it. Clients are limited in number, request size and time, so that a stuck one
//! costs nothing but its slot; one that drains a VM may keep its slot for as long as it asked to wait.

use crate::accounting::Roots;
use crate::accounting::choose::{self, Ranking};
use crate::vm::status::VmStatus;
use crate::vm::{DrainReport, Request, VmHandle};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::Path;
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
}

impl Command {
    /// Time for an answer beyond that for any.
    fn wait(&self) -> Duration {
        match self {
            Self::Drain { wait_s, .. } => Duration::from_secs((*wait_s).min(MAX_DRAIN_WAIT)),
            Self::Rank { .. } => choose::LIMIT,
            Self::Status | Self::Inhibit { .. } | Self::Resume { .. } => Duration::ZERO,
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
    Error(String),
}

/// The daemon and its VMs.
#[derive(Debug, Serialize)]
pub struct DaemonStatus {
    /// Version of the daemon.
    pub version: &'static str,
    /// Its process.
    pub pid: u32,
    /// The VMs in the order of the configuration.
    pub vms: Vec<VmStatus>,
}

/// Serves clients until the task is aborted.
pub async fn serve(listener: UnixListener, vms: Arc<[VmHandle]>) {
    let slots = Arc::new(Semaphore::new(MAX_CLIENTS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let vms = Arc::clone(&vms);
                tokio::spawn(async move {
                    // A client that is late or gone gets no answer; there is nobody to tell.
                    let _ = client(stream, &vms).await;
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

async fn client(stream: UnixStream, vms: &[VmHandle]) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = Vec::new();
    let mut reader = AsyncBufReader::new(read.take(MAX_REQUEST));
    tokio::time::timeout(TIMEOUT, reader.read_until(b'\n', &mut line)).await??;
    if line.is_empty() {
        return Ok(());
    }
    let answer = match serde_json::from_slice::<Command>(&line) {
        Ok(command) => tokio::time::timeout(command.wait() + TIMEOUT, obey(command, vms)).await?,
        Err(error) => Answer::Error(format!("no request of at most {MAX_REQUEST} bytes: {error}")),
    };
    let mut bytes = serde_json::to_vec(&answer)?;
    bytes.push(b'\n');
    tokio::time::timeout(TIMEOUT, write.write_all(&bytes)).await?
}

async fn obey(command: Command, vms: &[VmHandle]) -> Answer {
    let wait = command.wait();
    match command {
        Command::Status => Answer::Status(status(vms).await),
        Command::Rank { top } => {
            Answer::Ranking(choose::rank(vms.to_vec(), Roots::default(), top.unwrap_or(usize::MAX)).await)
        }
        Command::Inhibit { vm, reason } => match find(vms, &vm) {
            Ok(vm) => done(vm.ask(|answer| Request::Inhibit(reason, answer)).await),
            Err(error) => Answer::Error(error),
        },
        Command::Resume { vm } => match find(vms, &vm) {
            Ok(vm) => done(vm.ask(Request::Resume).await),
            Err(error) => Answer::Error(error),
        },
        Command::Drain { vm: name, .. } => match find(vms, &name) {
            Ok(vm) => match vm.ask(|answer| Request::Drain(wait, answer)).await {
                Some(Ok(report)) => Answer::Drained(report),
                Some(Err(error)) => Answer::Error(format!("VM {name}: {error}")),
                None => Answer::Error(STOPPING.to_owned()),
            },
            Err(error) => Answer::Error(error),
        },
    }
}

/// Asks every VM for its figures, in order; one that is being stopped has none.
pub async fn status(vms: &[VmHandle]) -> DaemonStatus {
    let mut statuses = Vec::new();
    for vm in vms {
        statuses.extend(vm.ask(Request::Status).await);
    }
    DaemonStatus { version: env!("CARGO_PKG_VERSION"), pid: std::process::id(), vms: statuses }
}

/// What a VM that does not answer is.
const STOPPING: &str = "the VM's devices are being stopped";

fn find<'a>(vms: &'a [VmHandle], name: &str) -> Result<&'a VmHandle, String> {
    vms.iter().find(|vm| vm.name == name).ok_or_else(|| {
        let known: Vec<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
        format!("no VM {name}; there are: {}", known.join(", "))
    })
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
            let inner = ["status", "drained", "ranking"].iter().find(|kind| answer.get(**kind).is_some());
            Ok(inner.map(|kind| answer[*kind].take()).unwrap_or(answer))
        }
    }
}
