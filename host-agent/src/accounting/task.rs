//! The daemon's accounting: a tick every few seconds for all VMs, and precise reads one at a time.
//!
//! ```text
//!   every tick: ask all VMs' tasks whose memory it is, at once, with a time limit
//!               --> thread for blocking work: cheap figures of all VMs ([`Books`]) --> each VM's task, for `status`
//!   in between: the precise reads that budgets asked for, one after the other, on a thread for blocking work
//! ```
//! Started by `serve`. A VM that does not answer is left out until it does; its last figures stand and grow old. Nothing
//! here is waited for by anybody.

use super::books::{Asked, Books, SlowResult};
use super::{Roots, Subject};
use crate::vm::{Request, VmHandle, boot_now};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval, timeout};

/// Between two ticks. A tick for 200 VMs takes a few milliseconds of a CPU.
pub const INTERVAL: Duration = Duration::from_secs(5);

/// How long a VM's task may take to say whose memory is meant. It blocks on nothing.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// A VM as the daemon has it.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The way to its task.
    pub handle: VmHandle,
    /// What it may cost its host.
    pub budget_bytes: Option<u64>,
}

/// Runs until it is aborted. `list` says which VMs there are.
pub async fn run(roots: Roots, list: impl Fn() -> Vec<Watched>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (done, mut results) = mpsc::unbounded_channel::<SlowResult>();
    let (mut books, mut queue, mut busy) = (Books::new(roots.clone()), VecDeque::new(), false);
    let mut handles: HashMap<String, VmHandle> = HashMap::new();
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let watched = list();
                handles = watched.iter().map(|vm| (vm.handle.name.clone(), vm.handle.clone())).collect();
                let asked = ask_all(watched).await;
                let ticked = spawn_blocking(move || {
                    let read = books.tick(asked, boot_now());
                    (books, read)
                });
                match ticked.await {
                    Ok((same, (figures, slow))) => {
                        books = same;
                        queue.extend(slow);
                        figures.into_iter().for_each(|(name, accounting)| tell(&handles, &name, accounting));
                    }
                    Err(error) => {
                        // A bug; the VMs go on without it, and so does the next tick.
                        tracing::error!(%error, "accounting failed and begins anew");
                        books = Books::new(roots.clone());
                    }
                }
            }
            Some(result) = results.recv() => {
                busy = false;
                if let Some((name, accounting)) = books.confirmed(result, boot_now()) {
                    tell(&handles, &name, accounting);
                }
            }
        }
        if !busy && let Some(slow) = queue.pop_front() {
            busy = true;
            let done = done.clone();
            spawn_blocking(move || {
                // Nobody takes it when the daemon ends.
                let _ = done.send(slow.read());
            });
        }
    }
}

fn tell(handles: &HashMap<String, VmHandle>, name: &str, accounting: super::books::Accounting) {
    if let Some(handle) = handles.get(name) {
        handle.tell(Request::Accounted(Box::new(accounting)));
    }
}

/// All at once; in the order of `vms`.
async fn ask_all(vms: Vec<Watched>) -> Vec<Asked> {
    let mut asking = JoinSet::new();
    for (place, vm) in vms.into_iter().enumerate() {
        asking.spawn(async move {
            let subject: Option<Subject> = timeout(ANSWER_LIMIT, vm.handle.ask(Request::Subject)).await.ok().flatten();
            (place, Asked { name: vm.handle.name, budget_bytes: vm.budget_bytes, subject })
        });
    }
    let mut asked = asking.join_all().await;
    asked.sort_by_key(|(place, _)| *place);
    asked.into_iter().map(|(_, asked)| asked).collect()
}
