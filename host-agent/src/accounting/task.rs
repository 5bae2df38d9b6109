//! The daemon's accounting: a tick every few seconds for all VMs, and precise reads one at a time.
//!
//! ```text
//!   every tick: ask all VMs' tasks whose memory it is, at once, with a time limit
//!               --> thread for blocking work: cheap figures of all VMs ([`Books`]) --> each VM's task, for `status`
//!   in between: the precise reads that budgets asked for, one after the other, on a thread for blocking work
//! ```
//! Started by `serve`. A VM that does not answer is left out until it does; its last figures stand and grow old. Nothing
//! here is waited for by anybody.

use super::Roots;
use super::books::{Asked, Books, Slow, SlowResult, Ticket};
use crate::vm::{ANSWER_LIMIT, Request, VmHandle, ask_all, boot_now};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

/// Between two ticks. A tick for 200 VMs takes a few milliseconds of a CPU.
pub const INTERVAL: Duration = Duration::from_secs(5);

/// How long a precise read is waited for. One of a VM of 200 GB takes 5 s; one of a process that hangs with its `mmap_lock`
/// taken never ends, and the other VMs' reads go on without it.
const READ_LIMIT: Duration = Duration::from_secs(30);

/// Reads that may hang at a time, a thread each.
const MAX_READS: usize = 4;

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
    let (mut books, mut reads) = (Books::new(roots.clone()), Reads::default());
    let mut handles: HashMap<String, VmHandle> = HashMap::new();
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let watched = list();
                handles = watched.iter().map(|vm| (vm.handle.name.clone(), vm.handle.clone())).collect();
                let vms = watched.into_iter().map(|vm| ((vm.handle.name.clone(), vm.budget_bytes), Some(vm.handle)));
                let asked: Vec<_> = ask_all(vms, ANSWER_LIMIT, Request::Subject)
                    .await
                    .into_iter()
                    .map(|((name, budget_bytes), subject)| Asked { name, budget_bytes, subject: subject.ok() })
                    .collect();
                let ticked = spawn_blocking(move || {
                    let read = books.tick(asked, boot_now());
                    (books, read)
                });
                match ticked.await {
                    Ok((same, (figures, slow))) => {
                        books = same;
                        reads.queue(slow, |vm| handles.contains_key(vm));
                        figures.into_iter().for_each(|(name, accounting)| tell(&handles, &name, accounting));
                    }
                    Err(error) => {
                        // A bug; the VMs go on without it, and so does the next tick.
                        tracing::error!(%error, "accounting failed and begins anew");
                        books = Books::new(roots.clone());
                    }
                }
            }
            outcome = reads.next() => {
                let shown = match outcome {
                    Ok(result) => books.confirmed(result, boot_now()),
                    Err(ticket) => books.given_up(ticket, READ_LIMIT, boot_now()),
                };
                if let Some((name, accounting)) = shown {
                    tell(&handles, &name, accounting);
                }
            }
        }
    }
}

/// Precise reads: one is waited for, the others queue.
#[derive(Default)]
struct Reads {
    queue: VecDeque<Slow>,
    running: Option<(Ticket, Instant, JoinHandle<SlowResult>)>,
    /// Has a clone in each thread that reads, those that are not waited for any longer among them.
    threads: Arc<()>,
}

impl Reads {
    /// A VM's read takes the place of one that it has in the queue; those of VMs that are gone are not made.
    fn queue(&mut self, slow: Vec<Slow>, exists: impl Fn(&str) -> bool) {
        let is_new = |name: &str| slow.iter().all(|slow| slow.ticket.name != name);
        self.queue.retain(|queued| exists(&queued.ticket.name) && is_new(&queued.ticket.name));
        self.queue.extend(slow);
    }

    /// Starts the next read, if none is waited for, and waits for it; for ever while there is none. Can be cancelled.
    async fn next(&mut self) -> Result<SlowResult, Ticket> {
        if self.running.is_none() && Arc::strong_count(&self.threads) <= MAX_READS {
            self.running = self.queue.pop_front().map(|slow| {
                let (ticket, thread) = (slow.ticket.clone(), Arc::clone(&self.threads));
                let read = spawn_blocking(move || {
                    let result = slow.read();
                    drop(thread);
                    result
                });
                (ticket, Instant::now() + READ_LIMIT, read)
            });
        }
        let Some((_, deadline, read)) = &mut self.running else { return std::future::pending().await };
        let outcome = timeout_at(*deadline, read).await;
        // A read that panicked is a bug that the log has already, and for its VM one without a figure.
        match (outcome, self.running.take()) {
            (Ok(Ok(result)), _) => Ok(result),
            (_, Some((ticket, ..))) => Err(ticket),
            (_, None) => std::future::pending().await,
        }
    }
}

fn tell(handles: &HashMap<String, VmHandle>, name: &str, accounting: super::books::Accounting) {
    if let Some(handle) = handles.get(name) {
        handle.tell(Request::Accounted(Box::new(accounting)));
    }
}
