//! The VMs of the daemon: which there are, who wants each of them, and how to ask all of them at once.
//!
//! ```text
//!   control socket --+                      +--> owner of VM a --+
//!   SIGHUP ----------+-- Order --> task ----+--> owner of VM b --+-- ended --> task
//!   VM directory ----+              |       +--> …
//!                                   +--> View, for everybody who only looks
//! ```
//! One task ([`task`]) owns the set and never waits for a VM, so that one VM's trouble delays nobody: what has to be
//! waited for comes back as an order. Others hold a [`Fleet`], look at the published [`View`], and ask the VMs directly,
//! all at once and with a time limit. What a reload or a look into the VM directory changes is decided in [`plan`].
//!
//! ```text
//!            add                     no front end, or forced
//!  (nothing) ---> running -------------------------------------> stopping ---> (nothing), or running anew
//!     |              |  ^                                            ^
//!     | no socket    |  | wanted again                               | last front end gone
//!     v              v  |                                            |
//!   failed        leaving, changing ---------------------------------+
//! ```
//! A VM is `leaving` when nobody wants it any more, and `changing` when it is to begin anew with other sockets; both wait
//! for its front end to go. A new VM that waits for the socket of one that goes is `changing`, too. `failed` is wanted and
//! cannot be made: tried again whenever a VM has ended.

pub mod directory;
mod error;
mod folders;
pub mod plan;
mod report;
#[allow(unsafe_code)]
mod sys;
mod task;
mod watchdog;

use crate::config::{Config, ConfigError};
use crate::vm::{ANSWER_LIMIT, Origin, Request, VmConfig, VmHandle, ask_all};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

pub use error::{FleetError, ReloadError};
pub use report::{Figures, Reloaded, VmReport};
pub use watchdog::notify;

/// VMs at most: each costs threads and descriptors, and who may create folders in the VM directory could create any number.
pub const MAX_VMS: usize = 1000;

/// How long a VM may take to finish a drop when it is stopped.
pub const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// Orders waiting for the task, at most.
const ORDERS: usize = 64;

/// What a VM is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its devices are there.
    Running,
    /// Nobody wants it any more; ends when its front end has gone.
    Leaving,
    /// Begins anew, with what the configuration says now, when its front end, or the VM that has its socket, has gone.
    Changing,
    /// Its devices are being stopped.
    Stopping,
    /// It cannot be made.
    Failed,
    /// Its task does not answer.
    Unresponsive,
}

impl State {
    /// All of them, as `status` calls them.
    pub const WORDS: [&'static str; 6] = ["running", "leaving", "changing", "stopping", "failed", "unresponsive"];
}

/// One VM, as published.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its name; for a folder that cannot be a VM, the folder's.
    pub name: String,
    /// Who wants it.
    pub origin: Origin,
    /// What it is doing. Never `Unresponsive`: that is known only to who has asked it.
    pub state: State,
    /// Why it failed, or what it waits for.
    pub detail: Option<String>,
    /// The way to its task, unless it failed.
    pub handle: Option<VmHandle>,
    /// What makes it up, unless its name already was wrong.
    pub config: Option<Arc<VmConfig>>,
}

/// What everybody may look at.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The VMs in the order in which they came.
    pub members: Arc<[Member]>,
    /// Why the daemon still has an older configuration than the file's.
    pub config_error: Option<String>,
}

/// What the task is told.
#[derive(Debug)]
enum Order {
    Add {
        config: Box<VmConfig>,
        answer: oneshot::Sender<Result<(), FleetError>>,
    },
    Remove {
        name: String,
        force: Force,
        answer: oneshot::Sender<Result<(), FleetError>>,
    },
    /// A VM said whether it goes.
    Leaves {
        id: u64,
        goes: Result<(), FleetError>,
        answer: oneshot::Sender<Result<(), FleetError>>,
    },
    Reload {
        config: Box<Result<Config, ConfigError>>,
        answer: oneshot::Sender<Result<Reloaded, ConfigError>>,
    },
    /// Something happened in the VM directory.
    FoldersChanged,
    Ended {
        id: u64,
    },
    /// How many VMs answered in a round of the watchdog, and which did not.
    Round {
        answered: usize,
        silent: Vec<String>,
    },
    Shutdown {
        answer: oneshot::Sender<()>,
    },
}

/// Whether a front end may be cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    /// Not: refuse.
    No,
    /// It may.
    Yes,
}

/// The way to the daemon's VMs. Cheap to copy.
#[derive(Clone, Debug)]
pub struct Fleet {
    orders: mpsc::Sender<Order>,
    view: watch::Receiver<View>,
}

impl Fleet {
    /// Makes the VMs of the configuration and the task that owns them.
    ///
    /// # Errors
    /// One of them cannot be made, or the VM directory; then nothing is left behind.
    pub async fn start(config: &Config) -> Result<Self, FleetError> {
        let (orders, inbox) = mpsc::channel(ORDERS);
        let (task, view) = task::Task::new(config, orders.clone());
        let task = task.start(config.vms.clone()).await?;
        tokio::spawn(task.run(inbox));
        Ok(Self { orders, view })
    }

    /// The VMs as they are now.
    #[must_use]
    pub fn view(&self) -> View {
        self.view.borrow().clone()
    }

    /// The way to one VM's task.
    ///
    /// # Errors
    /// There is no such VM, or none with a task.
    pub fn vm(&self, name: &str) -> Result<VmHandle, FleetError> {
        let view = self.view();
        let found = view.members.iter().find(|member| member.name == name && member.handle.is_some());
        found.and_then(|member| member.handle.clone()).ok_or_else(|| unknown(name, &view))
    }

    /// Asks all VMs at once and waits [`ANSWER_LIMIT`] at most for all of them together.
    pub async fn ask_all<T>(
        &self,
        request: impl Fn(oneshot::Sender<T>) -> Request,
    ) -> impl Iterator<Item = (Member, Option<T>)> {
        let members = self.view().members;
        let vms = members.iter().map(|member| (member.clone(), member.handle.clone()));
        ask_all(vms, ANSWER_LIMIT, request).await.into_iter().map(|(member, answer)| (member, answer.ok()))
    }

    /// Every VM's figures.
    pub async fn status(&self) -> Vec<VmReport> {
        self.ask_all(Request::Status).await.map(|(member, status)| VmReport::new(member, status)).collect()
    }

    /// Makes a VM; without a socket in its folder of the VM directory.
    ///
    /// # Errors
    /// See [`FleetError`]; no other VM is touched.
    pub async fn add(&self, config: VmConfig) -> Result<(), FleetError> {
        self.order(|answer| Order::Add { config: Box::new(config), answer }).await
    }

    /// Ends a VM and waits until its sockets have gone.
    ///
    /// # Errors
    /// See [`FleetError`].
    pub async fn remove(&self, name: &str, force: Force) -> Result<(), FleetError> {
        self.order(|answer| Order::Remove { name: name.to_owned(), force, answer }).await
    }

    /// Puts a configuration that was read anew in force, or remembers why it could not be read.
    ///
    /// # Errors
    /// That error; then nothing has changed.
    pub async fn reload(&self, config: Result<Config, ConfigError>) -> Result<Reloaded, ReloadError> {
        let (answer, receiver) = oneshot::channel();
        let order = Order::Reload { config: Box::new(config), answer };
        self.orders.send(order).await.map_err(|_| ReloadError::Ending)?;
        Ok(receiver.await.map_err(|_| ReloadError::Ending)??)
    }

    /// Ends all VMs at once: running drops are finished or cancelled, descriptors are back with their guests.
    pub async fn shut_down(&self) {
        let (answer, receiver) = oneshot::channel();
        let all = async {
            let _ = self.orders.send(Order::Shutdown { answer }).await;
            let _ = receiver.await;
        };
        if tokio::time::timeout(STOP_DEADLINE, all).await.is_err() {
            tracing::warn!("a VM did not stop within {} s", STOP_DEADLINE.as_secs());
        }
    }

    async fn order(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<(), FleetError>>) -> Order,
    ) -> Result<(), FleetError> {
        let (answer, receiver) = oneshot::channel();
        self.orders.send(order(answer)).await.map_err(|_| FleetError::Ending)?;
        receiver.await.map_err(|_| FleetError::Ending)?
    }
}

fn unknown(name: &str, view: &View) -> FleetError {
    let known: Vec<&str> = view.members.iter().map(|member| member.name.as_str()).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    FleetError::Unknown { name: name.to_owned(), known }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn member(name: &str, handle: Option<VmHandle>) -> Member {
        let state = if handle.is_some() { State::Running } else { State::Failed };
        Member { name: name.to_owned(), origin: Origin::Config, state, detail: None, handle, config: None }
    }

    #[test]
    fn a_silent_vm_is_reported_by_its_name() {
        let (handle, _queue) = VmHandle::detached("web1");
        let report = serde_json::to_value(VmReport::new(member("web1", Some(handle)), None)).unwrap();
        assert_eq!((&report["name"], &report["state"]), (&"web1".into(), &"unresponsive".into()));
        let report = serde_json::to_value(VmReport::new(member("web2", None), None)).unwrap();
        assert_eq!(
            (&report["name"], &report["state"], &report["origin"]),
            (&"web2".into(), &"failed".into(), &"config".into())
        );
    }
}
