//! The control socket: one JSON object per line in, one out.
//!
//! Called by `serve`; the other subcommands are its clients ([`client`]). Who may open the socket (its mode is 0660) may
//! inhibit and resume VMs; guests never reach it. Clients are limited in number, request size and time ([`admission`]):
//! one that sends nothing gives way to new ones, and drains, which may wait for minutes, have a number of their own.

mod admission;
mod client;

pub use client::{ClientError, ask};

use crate::accounting::Roots;
use crate::accounting::choose::{self, Ranking};
use crate::config::{self, Config, Flags};
use crate::fleet::{self, Fleet, Force, Reloaded, VmReport};
use crate::vm::{ANSWER_LIMIT, DrainReport, Origin, Request, VmConfig, VmHandle};
use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, oneshot};

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
            Self::Inhibit { .. } => inhibit_limit() + ANSWER_LIMIT,
            Self::Status | Self::Resume { .. } | Self::VmAdd { .. } | Self::VmList | Self::Reload => Duration::ZERO,
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
pub async fn serve(listener: UnixListener, fleet: Fleet, reload: Reload) {
    admission::serve(listener, move |command| {
        let (fleet, reload) = (fleet.clone(), reload.clone());
        async move { obey(command, &fleet, &reload).await }
    })
    .await;
}

async fn obey(command: Command, fleet: &Fleet, reload: &Reload) -> Answer {
    let wait = command.wait();
    match command {
        Command::Status => Answer::Status(status(fleet).await),
        Command::Rank { top } => {
            let vms = fleet.view().members.iter().filter_map(|member| member.handle.clone()).collect();
            Answer::Ranking(choose::rank(vms, Roots::default(), top.unwrap_or(usize::MAX)).await)
        }
        Command::Inhibit { vm, reason } => match fleet.vm(&vm) {
            Ok(vm) => done(inhibit(&vm, reason).await),
            Err(error) => failed(&error),
        },
        Command::Resume { vm } => match fleet.vm(&vm) {
            Ok(vm) => done(ask_vm(&vm, ANSWER_LIMIT, Request::Resume).await),
            Err(error) => failed(&error),
        },
        Command::Drain { vm: name, .. } => match fleet.vm(&name) {
            Ok(vm) => match vm.ask(|answer| Request::Drain(wait, answer)).await {
                Some(Ok(report)) => Answer::Drained(report),
                Some(Err(error)) => Answer::Error(format!("VM {name}: {error}")),
                None => failed(&Silence::Ended { vm: name }),
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
        Command::Reload => match reload.run(fleet).await {
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

/// Reads the configuration again, one time after the other.
#[derive(Clone, Debug)]
pub struct Reload {
    flags: Arc<Flags>,
    turn: Arc<Semaphore>,
}

impl Reload {
    /// With the flags that the daemon was started with.
    #[must_use]
    pub fn new(flags: Flags) -> Self {
        Self { flags: Arc::new(flags), turn: Arc::new(Semaphore::new(1)) }
    }

    /// Reads it and puts it in force; the service manager is told before and after. Goes on if nobody waits for it any
    /// more.
    ///
    /// # Errors
    /// It cannot be read, and the old one stays.
    pub async fn run(&self, fleet: &Fleet) -> Result<Reloaded, fleet::ReloadError> {
        let turn = Arc::clone(&self.turn).acquire_owned().await.map_err(|_| fleet::ReloadError::Ending)?;
        let (fleet, flags) = (fleet.clone(), Arc::clone(&self.flags));
        let reload = async move {
            let _turn = turn;
            // sd_notify(3): systemd 253 wants to know when.
            if let Ok(now) = NotifyState::monotonic_usec_now() {
                fleet::notify(&[NotifyState::Reloading, now]);
            }
            // A file system that hangs holds up a thread that nobody else needs.
            let config = tokio::task::spawn_blocking(move || Config::load(&flags)).await;
            let reloaded = match config {
                Ok(config) => fleet.reload(config).await,
                Err(_) => Err(fleet::ReloadError::Ending),
            };
            fleet::notify(&[NotifyState::Ready]);
            reloaded
        };
        tokio::spawn(reload).await.unwrap_or(Err(fleet::ReloadError::Ending))
    }
}

/// Why a VM gave no answer.
#[derive(Debug, thiserror::Error)]
enum Silence {
    /// It is on its way out.
    #[error("VM {vm}: its devices are being stopped, so nothing of it is dropped any more: see `vm list`")]
    Ended { vm: String },
    /// Its task is busy or stuck.
    #[error(
        "VM {vm} does not answer within {limit_s} s, and may still do what was asked: see its state in `status` and the \
         daemon's log, and try again"
    )]
    Late { vm: String, limit_s: u64 },
    /// The gate is closed, and drops that had begun go on.
    #[error(
        "VM {vm}: its gate `operator` is closed, but drops that were running did not end within {limit_s} s and were not \
         awaited: nothing new is dropped; run `inhibit` again to wait for them"
    )]
    StillDropping { vm: String, limit_s: u64 },
}

/// `inhibit` is answered when running drops have ended: none begins after lease and grace, or after the deadline of the
/// kernel's reports, and one takes far less than the rest.
fn inhibit_limit() -> Duration {
    let session = crate::session::Config::default();
    (session.lease + session.grace).max(session.kernel_deadline) + ANSWER_LIMIT
}

async fn inhibit(vm: &VmHandle, reason: String) -> Result<(), Silence> {
    let inhibited = ask_vm(vm, inhibit_limit(), |answer| Request::Inhibit(reason, answer)).await;
    let Err(Silence::Late { vm: name, limit_s }) = inhibited else { return inhibited };
    // Requests are taken in order: an answer to this one says that the gate is closed.
    ask_vm(vm, ANSWER_LIMIT, Request::Ping).await?;
    Err(Silence::StillDropping { vm: name, limit_s })
}

/// Asks one VM, and tells one that has ended from one that is late.
async fn ask_vm<T>(
    vm: &VmHandle,
    limit: Duration,
    request: impl FnOnce(oneshot::Sender<T>) -> Request,
) -> Result<T, Silence> {
    match tokio::time::timeout(limit, vm.ask(request)).await {
        Ok(answer) => answer.ok_or_else(|| Silence::Ended { vm: vm.name.clone() }),
        Err(_) => Err(Silence::Late { vm: vm.name.clone(), limit_s: limit.as_secs() }),
    }
}

fn done(answer: Result<(), Silence>) -> Answer {
    answer.map_or_else(|silence| failed(&silence), |()| Answer::Done)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn inhibit_waits_for_running_drops_and_says_if_it_did_not() {
        let (handle, mut requests) = VmHandle::detached("web1");
        // Drops end after 5 s, then never, then the task is stuck, then it has gone.
        let vm = tokio::spawn(async move {
            let Some(Request::Inhibit(_, answer)) = requests.recv().await else { return };
            tokio::time::sleep(Duration::from_secs(5)).await;
            let _ = answer.send(());
            let Some(Request::Inhibit(_, kept)) = requests.recv().await else { return };
            let Some(Request::Ping(answer)) = requests.recv().await else { return };
            let _ = answer.send(());
            tokio::time::sleep(Duration::from_secs(60)).await;
            drop((kept, requests));
        });

        inhibit(&handle, String::new()).await.unwrap();
        let dropping = inhibit(&handle, String::new()).await.unwrap_err().to_string();
        let stuck = inhibit(&handle, String::new()).await.unwrap_err().to_string();
        vm.await.unwrap();
        let ended = inhibit(&handle, String::new()).await.unwrap_err().to_string();

        assert!(dropping.contains("VM web1: its gate `operator` is closed") && dropping.contains("6 s"), "{dropping}");
        assert!(stuck.contains("VM web1 does not answer") && !stuck.contains("closed"), "{stuck}");
        assert!(ended.contains("VM web1: its devices are being stopped"), "{ended}");
    }
}
