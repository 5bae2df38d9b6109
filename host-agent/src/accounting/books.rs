//! The books of all VMs: what each costs, read on every tick, and where its budget stands.
//!
//! Driven by [`super::task`] on a thread for blocking work. Each VM has a [`Reader`] whose files stay open, so that a tick
//! costs a few preads per VM; what is slow is handed back as a [`Slow`] read and made elsewhere. Time is an argument.

use super::cost::{self, Estimate};
use super::watch::{Action, BudgetStatus, Note, Watch};
use super::{Absent, AbsentReason, Figure, Method, Reader, Roots, Subject};
use crate::log_limit::RateLimited;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// What a tick reads: each of them is one or two files of constant price.
const METHODS: [Method; 4] = [Method::Rss, Method::Cgroup, Method::Backing, Method::Swap];

/// So often it is looked again who is in a VM's cgroup: every five minutes, since it takes as long as a hundred reads where
/// many processes are in it. VMs take turns.
const REFRESH_TICKS: u64 = 60;

/// A VM's figures as `status` shows them.
#[derive(Clone, Debug, Serialize)]
pub struct Accounting {
    /// How old they are.
    pub age_s: u64,
    /// By method, what was read on the last tick.
    pub figures: BTreeMap<&'static str, FigureStatus>,
    /// What the VM costs its host, between bounds.
    pub cost: CostStatus,
    /// Its budget, if it has one.
    pub budget: Option<BudgetStatus>,
    /// When it was read.
    #[serde(skip)]
    pub at: Duration,
}

/// A figure or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum FigureStatus {
    /// The figure.
    Present(Figure),
    /// None.
    Absent {
        /// Why.
        absent: Absent,
    },
}

/// The cost or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum CostStatus {
    /// The cost.
    Present(Estimate),
    /// None.
    Absent {
        /// Why.
        absent: Absent,
    },
}

impl Accounting {
    /// The same some time later.
    #[must_use]
    pub fn aged(&self, now: Duration) -> Self {
        Self { age_s: now.saturating_sub(self.at).as_secs(), ..self.clone() }
    }
}

/// A VM and what its task said about itself.
#[derive(Debug)]
pub struct Asked {
    /// Its name.
    pub name: String,
    /// Its budget.
    pub budget_bytes: Option<u64>,
    /// Whose memory it is; `None` if its task did not answer in time, and then nothing is read.
    pub subject: Option<Subject>,
}

/// Which read of which VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The VM.
    pub name: String,
    life: u64,
}

/// A precise read to be made off the tick.
#[derive(Debug)]
pub struct Slow {
    /// Which.
    pub ticket: Ticket,
    reader: Reader,
}

/// What came of it.
#[derive(Debug)]
pub struct SlowResult {
    ticket: Ticket,
    cost: Result<u64, Absent>,
    took: Duration,
}

impl Slow {
    /// Reads; may take seconds.
    #[must_use]
    pub fn read(mut self) -> SlowResult {
        let start = Instant::now();
        let cost = cost::precise(&mut self.reader).map(|cost| cost.high_bytes);
        SlowResult { ticket: self.ticket, cost, took: start.elapsed() }
    }
}

/// Which process and files a reader is of. The reader keeps weak references, so an address is not used again meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Identity {
    pid: Option<i32>,
    files: Vec<usize>,
}

impl Identity {
    fn of(subject: &Subject) -> Self {
        Self {
            pid: subject.pid,
            files: subject.files.iter().map(|file| std::sync::Arc::as_ptr(file) as usize).collect(),
        }
    }
}

#[derive(Debug)]
struct Entry {
    identity: Identity,
    reader: Reader,
    /// Names the reader and its latest precise read, so that an earlier one is known when it ends.
    life: u64,
    watch: Option<Watch>,
    log: RateLimited,
    last: Option<Accounting>,
}

/// All VMs.
#[derive(Debug)]
pub struct Books {
    roots: Roots,
    ticks: u64,
    vms: BTreeMap<String, Entry>,
}

impl Books {
    /// Empty ones.
    #[must_use]
    pub fn new(roots: Roots) -> Self {
        Self { roots, ticks: 0, vms: BTreeMap::new() }
    }

    /// Reads all VMs' cheap figures. Who is not among them is forgotten.
    pub fn tick(&mut self, vms: Vec<Asked>, now: Duration) -> (Vec<(String, Accounting)>, Vec<Slow>) {
        self.ticks += 1;
        let names: HashSet<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
        self.vms.retain(|name, _| names.contains(name.as_str()));
        let (mut figures, mut slow) = (Vec::new(), Vec::new());
        for (turn, vm) in (0..).zip(vms) {
            let Some(subject) = vm.subject else { continue };
            let roots = &self.roots;
            let entry = self.vms.entry(vm.name.clone()).or_insert_with(|| Entry::new(roots, &subject));
            entry.is_of(roots, &subject, &vm.name, now);
            if (self.ticks + turn).is_multiple_of(REFRESH_TICKS) {
                entry.reader.refresh();
            }
            entry.set_budget(vm.budget_bytes, now);
            if entry.read(&vm.name, now) == Wanted::Precise {
                // A reader of its own: this one is needed for the next tick.
                let ticket = Ticket { name: vm.name.clone(), life: entry.life };
                slow.push(Slow { ticket, reader: Reader::new(roots, &subject) });
            }
            figures.extend(entry.last.clone().map(|accounting| (vm.name, accounting)));
        }
        (figures, slow)
    }

    /// Takes the result of a precise read and returns what is to be shown now.
    pub fn confirmed(&mut self, result: SlowResult, now: Duration) -> Option<(String, Accounting)> {
        let SlowResult { ticket: Ticket { name, life }, cost, took } = result;
        let entry = self.vms.get_mut(&name).filter(|entry| entry.life == life)?;
        // The next read has a name of its own.
        entry.life = next_life();
        let watch = entry.watch.as_mut()?;
        let actions = watch.confirmed(cost, took, now);
        let status = watch.status(now);
        entry.tell(&name, actions);
        let last = entry.last.as_mut()?;
        last.budget = Some(status);
        Some((name, last.clone()))
    }

    /// A precise read that is not waited for any longer: it counts as one without a figure, and what may still come of it
    /// counts for nothing.
    pub fn given_up(&mut self, ticket: Ticket, took: Duration, now: Duration) -> Option<(String, Accounting)> {
        let detail = format!(
            "reading the VMM's memory figures has not ended within {} s: the process may hang in the kernel",
            took.as_secs()
        );
        let cost = Err(Absent { reason: AbsentReason::Failed, detail });
        self.confirmed(SlowResult { ticket, cost, took }, now)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Nothing,
    Precise,
}

/// Names nothing twice: a VM may be removed and another added by its name while a read of the first goes on.
fn next_life() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Entry {
    fn new(roots: &Roots, subject: &Subject) -> Self {
        Self {
            identity: Identity::of(subject),
            reader: Reader::new(roots, subject),
            life: next_life(),
            watch: None,
            log: RateLimited::guest_caused(),
            last: None,
        }
    }

    fn is_of(&mut self, roots: &Roots, subject: &Subject, name: &str, now: Duration) {
        let identity = Identity::of(subject);
        if identity == self.identity {
            return;
        }
        let same_process = identity.pid == self.identity.pid;
        self.reader = Reader::new(roots, subject);
        self.identity = identity;
        self.life = next_life();
        if let Some(watch) = &mut self.watch {
            if same_process {
                watch.read_lost();
            } else {
                let actions = watch.restarted(now);
                self.tell(name, actions);
            }
        }
    }

    fn set_budget(&mut self, budget_bytes: Option<u64>, now: Duration) {
        match (budget_bytes, &mut self.watch) {
            (Some(budget_bytes), Some(watch)) => watch.set_budget(budget_bytes),
            (Some(budget_bytes), watch @ None) => *watch = Some(Watch::new(budget_bytes, now)),
            (None, watch) => *watch = None,
        }
    }

    fn read(&mut self, name: &str, now: Duration) -> Wanted {
        let readings = METHODS.map(|method| self.reader.read(method));
        let [_, cgroup, backing, _] = readings.clone();
        let estimate = cost::estimate_from(&mut self.reader, cgroup, backing);
        let figures = readings
            .map(|reading| reading.map_or_else(|absent| FigureStatus::Absent { absent }, FigureStatus::Present));
        let actions = match &mut self.watch {
            Some(watch) => watch.estimated(estimate.clone(), now),
            None => Vec::new(),
        };
        self.last = Some(Accounting {
            age_s: 0,
            figures: METHODS.map(Method::word).into_iter().zip(figures).collect(),
            cost: estimate.map_or_else(|absent| CostStatus::Absent { absent }, CostStatus::Present),
            budget: self.watch.as_ref().map(|watch| watch.status(now)),
            at: now,
        });
        let wanted = if actions.contains(&Action::ReadPrecisely) { Wanted::Precise } else { Wanted::Nothing };
        self.tell(name, actions);
        wanted
    }

    /// A guest decides how much memory it uses, and so how often its VM crosses the budget: the lines are limited.
    fn tell(&mut self, vm: &str, actions: Vec<Action>) {
        for action in actions {
            let Action::Note(note) = action else { continue };
            let Some(suppressed) = self.log.admit(Instant::now()) else { continue };
            let budget_bytes = self.watch.as_ref().map(Watch::budget_bytes);
            match note {
                Note::Raised { cost_bytes } => {
                    warn!(vm, cost_bytes, budget_bytes, suppressed, "over budget");
                }
                Note::Cleared { cost_bytes } => {
                    info!(vm, cost_bytes, budget_bytes, suppressed, "no longer over budget");
                }
                Note::Unconfirmed { absent, at_most_bytes } => {
                    warn!(vm, budget_bytes, at_most_bytes, suppressed, why = %absent, "cannot tell whether over budget");
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "books_tests.rs"]
mod tests;
