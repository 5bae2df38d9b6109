//! What the host says to one VM's agent, and what it orders to be dropped. Pure: events and the time in, actions out.
//!
//! The owner task (`crate::vm`) feeds it from both devices, the workers, the timer and the control socket, and does
//! what it says. It trusts the owner and nothing that came from the guest.
//!
//! ```text
//!            Hello, jobs running             jobs done
//!   Idle ------------------------> Fencing ------------> Active
//!    | ^                              |                  |  |
//!    | +--- Hello, no jobs -----------|------------------+  |
//!    +--------- connection gone, front end stopped, map changed, violation
//! ```
//! * **Idle**: no agent, or none that has said `Hello`.
//! * **Fencing**: an agent said `Hello` while jobs of an earlier session still run. They are cancelled; `Welcome` goes
//!   out when the last one has ended. That makes `Welcome` the fence: nothing from before it can drop anything after.
//! * **Active**: reports are taken.
//!
//! Who may use a page, by instant: the guest's agent isolated it before `Report`; the worker may drop it between the
//! checks of its job and the `Ack`; the guest's kernel gets it back after `Ack`, after a fence, or after lease, grace and
//! the guest's margin. A job never begins a drop after lease and grace (its deadline), and every way out of `Active`
//! cancels the jobs. The front end's stop orders (`GET_VRING_BASE`, a new memory map, disconnect) are answered when
//! the jobs have ended ([`Action::FencePassed`]).
//!
//! # Two devices
//! The agent's session comes through the vsock device, reports of the guest's kernel ([`kernel`]) through the balloon
//! device; a VM has either or both. Gates are the VM's. Each device has its own memory map, jobs and fences, and neither
//! waits for the other's:
//! * what a device reported is dropped through that device's map, so only its own map change and stop can make a job of
//!   it wrong;
//! * at a reset of the guest the VMM stops both devices, each with an order of its own, and runs the guest again only
//!   when both have been answered;
//! * when only the balloon stops (its driver is unloaded), the agent in the same kernel goes on to hold what it has
//!   isolated, and the other way round;
//! * a page cannot come through both: what the agent isolates is not in the kernel's free lists, and what the kernel has
//!   taken out of them to report it, nobody can isolate.

mod active;
pub mod clock;
mod connection;
pub mod counters;
pub mod drain;
pub mod effect;
mod event;
pub mod gates;
pub mod job;
pub mod kernel;
pub mod rate;
pub mod refault;
mod report;

pub use event::{Action, AgentStatus, Event, Note};

use crate::device::{ConnectionId, DeviceKind};
use crate::reporting::GuestRange;
use active::Active;
use counters::Counters;
use drain::{DrainId, PendingDrain};
use effect::{Effect, Watched};
use fpr_protocol::message::{Hello, Region};
use fpr_protocol::{CloseReason, Gate, GuestAddress, HugePageRange, HugePageSize, Message, Refusal};
use gates::{ClosedGate, GateSource, Gates};
use job::{Job, JobId};
use kernel::PendingKernelReport;
use refault::RefaultWatch;
use std::collections::BTreeMap;
use std::time::Duration;

/// Connections that may wait with their `Hello`, so that a guest cannot pile them up.
const MAX_WAITING: usize = 8;

/// Why `ineffective` closes.
const STILL_BACKED: &str = "drops succeed but the backing does not shrink: is something mapping or pinning this memory \
                            besides the VMM?";

/// The guest's memory as the session must know it.
pub trait Layout: Send {
    /// Its regions, ascending.
    fn regions(&self) -> Vec<Region>;
    /// For each range the region it lies in, or why it cannot be dropped.
    fn check(&self, ranges: &[HugePageRange], size: HugePageSize) -> Vec<Result<usize, Refusal>>;
    /// The region that holds `address`.
    fn region_of(&self, address: GuestAddress) -> Option<usize>;
}

/// Times and bounds. The defaults are the documented ones.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Oldest age of a report on arrival.
    pub lease: Duration,
    /// How long after the lease drops may still begin.
    pub grace: Duration,
    /// How long a new connection may take to say `Hello`.
    pub hello_timeout: Duration,
    /// Between two `Ping`s.
    pub ping_interval: Duration,
    /// Without a `Pong` for this long the session ends.
    pub pong_timeout: Duration,
    /// Huge pages reported and not answered.
    pub max_huge_pages_in_flight: u32,
    /// Jobs of the agent queued for the worker.
    pub max_jobs: usize,
    /// How long after a kernel report was taken from its queue this process may live on with a drop of it ([`kernel`]).
    pub kernel_deadline: Duration,
    /// Kernel reports queued for the worker.
    pub max_kernel_jobs: usize,
    /// How long after a drop it is looked at again for the refault ratio ([`refault`]).
    pub refault_minute: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(2),
            grace: Duration::from_secs(3),
            hello_timeout: Duration::from_secs(5),
            // Two may go unanswered. What the guest's clock may drift meanwhile is in its bounds.
            ping_interval: Duration::from_secs(10),
            pong_timeout: Duration::from_secs(20),
            // 4 GiB of 2 MiB pages: two of the largest memory blocks Linux makes.
            max_huge_pages_in_flight: 2048,
            max_jobs: 64,
            kernel_deadline: Duration::from_secs(5),
            // Each of the two queues waits for its answer.
            max_kernel_jobs: 2,
            refault_minute: Duration::from_secs(60),
        }
    }
}

enum Phase {
    Idle,
    Fencing(ConnectionId, Box<Hello>),
    Active(Box<Active>),
}

/// One VM's session state.
pub struct Session {
    config: Config,
    layout: Option<Box<dyn Layout>>,
    phase: Phase,
    /// Connections that have not said `Hello`, and when they opened.
    waiting: BTreeMap<ConnectionId, Duration>,
    /// Every job the worker has and has not answered, also those of ended sessions.
    jobs: BTreeMap<JobId, PendingJob>,
    next_job: u64,
    fences: Vec<(DeviceKind, u64)>,
    gates: Gates,
    effect: Effect<Ranges>,
    /// The balloon has reported since it was started.
    kernel_reporting: bool,
    /// Of kernel reports; only whether the backing shrinks is asked.
    kernel_effect: Effect<()>,
    /// What each device dropped in the last minute.
    refaults: BTreeMap<DeviceKind, RefaultWatch>,
    drains: BTreeMap<DrainId, PendingDrain>,
    counters: Counters,
    next_nonce: u64,
    actions: Vec<Action>,
}

/// Dropped ranges and their unit.
type Ranges = (Vec<HugePageRange>, HugePageSize);

/// What the session remembers of a job.
struct PendingJob {
    /// The agent's session it belongs to, if any; an output for another one is counted and dropped.
    session_nonce: Option<u64>,
    device: DeviceKind,
    reply: Reply,
}

enum Reply {
    Ack(report::PendingReport),
    Survey { sequence: u64 },
    Prove { sequence: u64, regions: Vec<Option<usize>> },
    Look(Watched<Ranges>),
    Refault { dropped_bytes: u64 },
    Kernel(PendingKernelReport),
}

impl Session {
    /// A VM without an agent. `nonce_seed` should be random; it tells this daemon's sessions from an earlier one's.
    #[must_use]
    pub fn new(config: Config, nonce_seed: u64) -> Self {
        Self {
            config,
            layout: None,
            phase: Phase::Idle,
            waiting: BTreeMap::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            fences: Vec::new(),
            gates: Gates::default(),
            effect: Effect::default(),
            kernel_reporting: false,
            kernel_effect: Effect::default(),
            refaults: [DeviceKind::Vsock, DeviceKind::Balloon]
                .map(|device| (device, RefaultWatch::new(config.refault_minute, nonce_seed)))
                .into(),
            drains: BTreeMap::new(),
            counters: Counters::default(),
            next_nonce: nonce_seed,
            actions: Vec::new(),
        }
    }

    /// Takes one event at host time `now` (monotonic, never going back) and says what to do.
    pub fn handle(&mut self, event: Event, now: Duration) -> Vec<Action> {
        let gates_before = self.gates.closed();
        match event {
            Event::Connected(connection) => self.connected(connection, now),
            Event::Message(connection, message) => self.message(connection, message, now),
            Event::Malformed(connection, reason) => self.refuse(connection, reason),
            Event::NotReading(connection) => {
                self.counters.closed(CloseReason::SlowReader);
                self.disconnected(connection, Some(CloseReason::SlowReader));
            }
            Event::Disconnected(connection) => self.disconnected(connection, None),
            Event::KernelReported(report) => self.kernel_reported(report),
            Event::PagePoison(poison_val) => self.page_poison(poison_val, now),
            Event::Stopped { device, fence } => {
                self.forget_dropped(device);
                match device {
                    DeviceKind::Vsock => {
                        self.waiting.clear();
                        self.end_session(None);
                        // What was measured was this guest's kernel; the next boot may have another.
                        self.gates.replace(GateSource::Measured, Vec::new(), now);
                    }
                    DeviceKind::Balloon => self.balloon_stopped(),
                }
                self.fences.push((device, fence));
            }
            Event::MapChanged { device, fence } => {
                self.forget_dropped(device);
                match device {
                    DeviceKind::Vsock => self.close_all(CloseReason::MemoryMapChanged),
                    DeviceKind::Balloon => self.cancel_jobs(device),
                }
                self.fences.push((device, fence));
            }
            Event::Gates(source, found) => {
                // An operator is about to rely on it: what was ordered before ends as well, not only what comes.
                if source == GateSource::Operator && !found.is_empty() {
                    self.cancel_jobs(DeviceKind::Vsock);
                    self.cancel_jobs(DeviceKind::Balloon);
                }
                self.gates.replace(source, found, now);
            }
            Event::JobFinished(id, output) => self.job_finished(id, output, now),
            Event::Drain { id, until } => self.drain(id, until),
            Event::Tick => {}
        }
        self.tick(now);
        self.pass_fences(now);
        self.tell_gates(&gates_before);
        self.tell_kernel_reporting();
        std::mem::take(&mut self.actions)
    }

    /// Installs the vsock device's memory map that belongs to a [`Event::MapChanged`], or takes it away.
    pub fn set_layout(&mut self, layout: Option<Box<dyn Layout>>) {
        self.layout = layout;
    }

    /// When [`Event::Tick`] is wanted next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        let hello = self.waiting.values().map(|opened| *opened + self.config.hello_timeout).min();
        let active = match &self.phase {
            Phase::Active(active) => Some(active.next_deadline(&self.config)),
            _ => None,
        };
        let times = [hello, active, self.effect.next_due(), self.retry_measured_at(), self.drains_due()];
        let refaults = self.refaults.values().filter_map(RefaultWatch::next_due);
        times.into_iter().flatten().chain(refaults).min()
    }

    /// Counters so far.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Closed gates.
    #[must_use]
    pub fn closed_gates(&self) -> Vec<ClosedGate> {
        self.gates.closed()
    }

    /// The live session's huge page size.
    #[must_use]
    pub fn huge_page_size(&self) -> Option<HugePageSize> {
        match &self.phase {
            Phase::Active(active) => Some(active.size),
            _ => None,
        }
    }

    /// Jobs the device's worker has, of this or an ended session.
    #[must_use]
    pub fn jobs_of(&self, device: DeviceKind) -> usize {
        self.jobs.values().filter(|job| job.device == device).count()
    }

    /// The job that was ordered first of those that have not ended.
    #[must_use]
    pub fn oldest_job(&self) -> Option<JobId> {
        self.jobs.keys().next().copied()
    }

    /// What the next job will be called: every job so far has a smaller number.
    #[must_use]
    pub fn next_job(&self) -> JobId {
        JobId(self.next_job)
    }

    /// Whether the guest's kernel reports by itself.
    #[must_use]
    pub fn kernel_reporting(&self) -> bool {
        self.kernel_reporting
    }

    /// The agent, if one is connected.
    #[must_use]
    pub fn agent(&self) -> AgentStatus {
        match &self.phase {
            Phase::Idle => AgentStatus::Absent,
            Phase::Fencing(..) => AgentStatus::Fencing,
            Phase::Active(active) => active.status(),
        }
    }

    fn message(&mut self, connection: ConnectionId, message: Message, now: Duration) {
        let active = match &mut self.phase {
            Phase::Active(active) if active.connection == connection => active,
            _ => return self.first_message(connection, message, now),
        };
        if !active.rate.take(cost(&message), now) {
            return self.refuse(connection, CloseReason::Flood);
        }
        let result = match message {
            Message::Prove(prove) => self.prove(prove),
            Message::Survey(survey) => self.survey(survey),
            Message::Report(report) => self.report(report, now),
            Message::Pong { id, now_ns } => active.pong(id, now_ns, now),
            Message::Stats(stats) => {
                active.stats = Some(stats);
                Ok(())
            }
            Message::Reclaimed { id, end } => {
                self.reclaimed(DrainId(id), end);
                Ok(())
            }
            Message::Goodbye { reason } => {
                self.end_session(Some(reason));
                self.actions.push(Action::Close(connection, reason));
                Ok(())
            }
            _ => Err(CloseReason::UnexpectedMessage),
        };
        if let Err(reason) = result {
            self.refuse(connection, reason);
        }
    }

    fn cancel_jobs(&mut self, device: DeviceKind) {
        if self.jobs_of(device) > 0 {
            self.actions.push(Action::CancelJobs(device));
        }
    }

    fn pass_fences(&mut self, now: Duration) {
        for device in [DeviceKind::Vsock, DeviceKind::Balloon] {
            if self.jobs_of(device) == 0 {
                let passed = self.fences.extract_if(.., |(of, _)| *of == device);
                self.actions.extend(passed.map(|(_, fence)| Action::FencePassed(fence)));
            }
        }
        if self.jobs_of(DeviceKind::Vsock) > 0 {
            return;
        }
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Fencing(connection, hello) => {
                self.welcome(connection, *hello, now);
                self.tick(now);
            }
            other => self.phase = other,
        }
    }

    fn start(&mut self, reply: Reply, session_nonce: Option<u64>, job: Job) {
        let id = JobId(self.next_job);
        self.next_job += 1;
        self.jobs.insert(id, PendingJob { session_nonce, device: job.device(), reply });
        self.actions.push(Action::Start(id, job));
    }

    fn retry_measured_at(&self) -> Option<Duration> {
        MEASURED.into_iter().filter_map(|measured| self.retry_at(measured)).min()
    }

    fn retry_at(&self, (gate, source): (Gate, GateSource)) -> Option<Duration> {
        Some(self.gates.since(gate, source)? + effect::RETRY_AFTER)
    }

    /// Each gate is tried again at its own time, and what was measured begins from nothing.
    fn retry_measured(&mut self, now: Duration) {
        for (gate, source) in MEASURED {
            if self.retry_at((gate, source)).is_none_or(|at| at > now) {
                continue;
            }
            self.gates.open(gate, source);
            match source {
                GateSource::Balloon => self.kernel_effect.reset(),
                _ => self.effect.reset(),
            }
        }
    }

    fn tick(&mut self, now: Duration) {
        let late: Vec<ConnectionId> = self
            .waiting
            .iter()
            .filter(|(_, opened)| now.saturating_sub(**opened) >= self.config.hello_timeout)
            .map(|(connection, _)| *connection)
            .collect();
        for connection in late {
            self.refuse(connection, CloseReason::HelloTimeout);
        }
        self.retry_measured(now);
        self.tick_drains(now);
        self.look_for_refaults(now);
        let Phase::Active(active) = &mut self.phase else { return };
        let connection = active.connection;
        if active.pong_is_late(&self.config, now) {
            return self.refuse(connection, CloseReason::PingTimeout);
        }
        if let Some(id) = active.ping_if_due(&self.config, now) {
            self.actions.push(Action::Send(connection, Message::Ping { id }));
        }
        let nonce = active.nonce;
        let jobs_free = self.jobs_of(DeviceKind::Vsock) < self.config.max_jobs;
        for watched in self.effect.due(now) {
            // A worker that is behind has better things to do than to look back.
            if jobs_free {
                let (ranges, size) = watched.ranges.clone();
                self.start(Reply::Look(watched), Some(nonce), Job::Look { ranges, size });
            }
        }
    }

    fn look_for_refaults(&mut self, now: Duration) {
        let mut due = Vec::new();
        for (device, watch) in &mut self.refaults {
            due.extend(std::iter::from_fn(|| watch.due(now)).map(|sample| (*device, sample)));
        }
        for (device, sample) in due {
            // A worker that is behind has better things to do than to look back.
            if self.jobs_of(device) < self.config.max_jobs {
                let reply = Reply::Refault { dropped_bytes: sample.dropped_bytes };
                self.start(reply, None, Job::LookBack { device, pieces: sample.pieces });
            }
        }
    }

    fn watch_refaults(&mut self, device: DeviceKind, ranges: &[GuestRange], dropped_bytes: u64, now: Duration) {
        if let Some(watch) = self.refaults.get_mut(&device) {
            watch.dropped(ranges, dropped_bytes, now);
        }
    }

    /// What the device's addresses mean may change.
    fn forget_dropped(&mut self, device: DeviceKind) {
        if let Some(watch) = self.refaults.get_mut(&device) {
            watch.reset();
        }
    }

    fn tell_gates(&mut self, before: &[ClosedGate]) {
        let closed = self.gates.closed();
        let words = |gates: &[ClosedGate]| gates.iter().map(|gate| (gate.gate, gate.source)).collect::<Vec<_>>();
        if words(before) == words(&closed) {
            return;
        }
        self.actions.push(Action::Note(Note::GatesChanged(closed)));
        if let Phase::Active(active) = &mut self.phase {
            let gates = self.gates.words();
            if active.told_gates.as_ref() != Some(&gates) {
                let message = if gates.is_empty() { Message::Resume } else { Message::Inhibit(gates.clone()) };
                active.told_gates = Some(gates);
                self.actions.push(Action::Send(active.connection, message));
            }
        }
    }
}

/// The gates that are closed by measurement, and who measured.
const MEASURED: [(Gate, GateSource); 3] = [
    (Gate::WriteOnFree, GateSource::Measured),
    (Gate::Ineffective, GateSource::Measured),
    (Gate::Ineffective, GateSource::Balloon),
];

/// How many units of [`rate::RateLimit`] a message costs: what it makes the host do.
fn cost(message: &Message) -> u64 {
    match message {
        Message::Survey(_) => 40,
        Message::Prove(_) => 10,
        Message::Report(report) => 2 + report.ranges.len() as u64 / 32,
        _ => 1,
    }
}

#[cfg(test)]
mod tests;
