//! The guest agent's decisions. Pure: events and the time in, actions out.
//!
//! The main loop (`crate::run`) feeds it and does what it says. It trusts the guest's kernel for what it says at the
//! moment, and the host for nothing but its own memory: the worst a lying host gets is what every host has anyway.
//!
//! A session: link up -> `Hello` -> `Welcome` (the fence: what was reported in an earlier session comes back now, and
//! what a dead agent left) -> `Prove` -> passes. A pass ([`pass`]) looks at free memory, asks the host what of it is
//! backed, waits until it has been free for long enough, isolates it, reports it, and returns it when the host has
//! answered. What is isolated and how it may come back is [`held`]; when and how much is [`policy`].
//!
//! Who may use an isolated page: nobody in the guest from the moment the executor says that it is isolated until the
//! agent orders its return, and it orders that only for units that are not `Reported` (never sent, answered, fenced or
//! out of lease). The host may drop it only between `Report` and its answer or lease and grace, whichever is first.

mod demand;
mod event;
pub mod held;
mod pass;
pub mod policy;
mod proof;

pub use event::{Action, ClaimShort, Event, Facts, Method, Note, OfflineResult, OnlineResult, Totals};

use crate::kernel::memory_blocks::BlockNumber;
use demand::{Demand, Means};
use fpr_protocol::message::{Hello, RangeResult, Welcome};
use fpr_protocol::{CloseReason, Gate, GuestAddress, Message, Refusal};
use held::{Holdings, Step, Unit};
use pass::Pass;
use policy::{FreeAge, Holding, Occasion, Pace, PassOutcome, Policy, Rest};
use proof::Proof;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A session with the host.
struct Session {
    welcome: Welcome,
    gates: Vec<Gate>,
    proven: Vec<bool>,
    /// No page may be reported before the host has an estimate of our clock.
    ponged: bool,
}

/// Whether somebody else onlines our blocks: tried once with the first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SelfTest {
    Open,
    Running(BlockNumber, Option<Duration>),
    Passed,
}

/// The state machine.
pub struct Agent {
    policy: Policy,
    facts: Facts,
    session: Option<Session>,
    held: Holdings,
    pass: Option<Pass>,
    proof: Proof,
    pace: Pace,
    age: FreeAge,
    demand: Demand,
    /// The guest's kernel reports free pages by itself.
    kernel_reporting: bool,
    self_test: SelfTest,
    /// Blocks that would not go offline, and until when they are left alone.
    refused_blocks: BTreeMap<BlockNumber, Duration>,
    retry_online: BTreeMap<BlockNumber, Duration>,
    offline_rest: Rest,
    /// When `Hello` went out, until `Welcome` comes.
    hello_sent: Option<Duration>,
    /// Backed free huge pages that claims did not reach; tried again when free memory has risen.
    unreachable: BTreeSet<GuestAddress>,
    started: Option<Duration>,
    next_sequence: u64,
    next_batch: u64,
    free_bytes: u64,
    totals: Totals,
    actions: Vec<Action>,
}

/// Longest lease and grace together that a host may ask for; what a dead agent left is safe after it, whoever the host
/// was (`fpr_protocol::MAX_LEASE_AND_GRACE`).
const LEFTOVERS_AFTER: Duration = fpr_protocol::MAX_LEASE_AND_GRACE;

/// How long a host may take for `Welcome`: it waits for drops of the session before, which end with lease and grace.
const WELCOME_TIMEOUT: Duration = LEFTOVERS_AFTER;

/// How long to leave a block alone that was in use after all, and how long to wait before onlining is tried again.
const BLOCK_PAUSE: Duration = Duration::from_secs(5);

impl Agent {
    /// An agent without a link.
    #[must_use]
    pub fn new(policy: Policy, facts: Facts) -> Self {
        Self {
            pace: Pace::new(&policy),
            age: FreeAge::new(policy.min_free_age, policy.max_free_age),
            policy,
            facts,
            demand: Demand::default(),
            kernel_reporting: false,
            session: None,
            held: Holdings::default(),
            pass: None,
            proof: Proof::default(),
            self_test: SelfTest::Open,
            refused_blocks: BTreeMap::new(),
            retry_online: BTreeMap::new(),
            offline_rest: Rest::default(),
            hello_sent: None,
            unreachable: BTreeSet::new(),
            started: None,
            next_sequence: 1,
            next_batch: 1,
            free_bytes: 0,
            totals: Totals::default(),
            actions: Vec::new(),
        }
    }

    /// Takes one event at guest time `now` (monotonic, never going back) and says what to do.
    pub fn handle(&mut self, event: Event, now: Duration) -> Vec<Action> {
        self.started.get_or_insert(now);
        match event {
            Event::LinkUp => {
                let hello = Hello { now_ns: nanos(now), ..self.facts.hello.clone() };
                self.actions.push(Action::Send(Message::Hello(hello)));
                self.hello_sent = Some(now);
            }
            Event::LinkDown => self.link_down(now),
            Event::Message(message) => self.message(message, now),
            Event::Watch { free_bytes, stalled } => self.watch(free_bytes, stalled, now),
            Event::Looked(pages) => self.looked(pages, now),
            Event::Offline(block, result) => self.offlined(block, result, now),
            Event::BlockChecked(block, offline) => self.block_checked(block, offline, now),
            Event::Online(block, result) => self.onlined(block, result, now),
            Event::Claimed(batch, pages, short) => self.claimed(batch, pages, short, now),
            Event::Stats(stats) => {
                if self.session.is_some() {
                    self.actions.push(Action::Send(Message::Stats(stats)));
                }
            }
            Event::Tick => {}
        }
        self.tick(now);
        std::mem::take(&mut self.actions)
    }

    /// When [`Event::Tick`] is wanted, apart from the watch over free memory.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        let unanswered = self.held.iter().filter_map(|held| match held.step {
            Step::Reported { until, .. } => Some(until),
            _ => None,
        });
        let self_test = match self.self_test {
            SelfTest::Running(_, until) => until,
            _ => None,
        };
        let pass = self.pass.as_ref().and_then(Pass::next_deadline);
        // Only what a tick would act on: a deadline that stays in the past makes the main loop spin.
        let proof = if self.may_isolate() { self.proof.next_attempt() } else { None };
        let may_start = self.pass.is_none() && self.may_isolate() && self.proof.is_settled();
        let pace = if may_start { self.pace.next() } else { None };
        unanswered
            .chain(self_test)
            .chain(pass)
            .chain(pace)
            .chain(self.retry_online.values().copied())
            .chain(self.leftovers_due())
            .chain(proof)
            .chain(self.hello_sent.map(|sent| sent + WELCOME_TIMEOUT))
            .min()
    }

    /// Whether it is in the middle of something, so that free memory should be watched closely.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.pass.is_some() || !self.held.is_empty()
    }

    /// Whether a big free may be near, so that free memory should be looked at often.
    #[must_use]
    pub fn is_watchful(&self) -> bool {
        self.pace.is_low()
    }

    /// Whether nothing is held and nothing left over: the agent may exit.
    #[must_use]
    pub fn is_clear(&self) -> bool {
        self.held.is_empty() && !self.facts.leftovers
    }

    /// What it did so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Whether a method of isolation is left; one is switched off when it does not work in this guest.
    #[must_use]
    pub fn can_isolate(&self) -> bool {
        self.facts.offline.is_usable() || self.facts.claims.is_usable()
    }

    /// Gates the host has closed, or `None` without a session.
    #[must_use]
    pub fn gates(&self) -> Option<&[Gate]> {
        self.session.as_ref().map(|session| session.gates.as_slice())
    }

    /// Stops isolating; what is held comes back as the rules allow.
    pub fn stop(&mut self, now: Duration) -> Vec<Action> {
        self.facts.offline = Method::Off("the agent is stopping".to_owned());
        self.facts.claims = Method::Off("the agent is stopping".to_owned());
        self.end_pass(PassOutcome::FoundNothing, now);
        self.return_free_units();
        std::mem::take(&mut self.actions)
    }

    fn message(&mut self, message: Message, now: Duration) {
        match message {
            Message::Welcome(welcome) if self.session.is_none() => self.welcomed(welcome),
            Message::Goodbye { reason } => {
                self.actions.push(Action::Note(Note::HostGoodbye(reason)));
                self.actions.push(Action::Disconnect(reason));
            }
            Message::Ping { id } => {
                self.actions.push(Action::Send(Message::Pong { id, now_ns: nanos(now) }));
                if let Some(session) = &mut self.session {
                    session.ponged = true;
                }
            }
            Message::Inhibit(gates) => self.gates_changed(gates, now),
            Message::Resume => self.gates_changed(Vec::new(), now),
            Message::Ack(ack) => self.acked(ack.sequence, &ack.results, now),
            Message::Proven(proven) => self.proven(&proven, now),
            Message::SurveyReply(reply) => self.surveyed(&reply, now),
            Message::Reclaim { id } => self.reclaim(id),
            Message::KernelReporting { active } => {
                self.actions.push(Action::Note(Note::KernelReporting(active)));
                self.kernel_reports(active);
            }
            Message::Refaults { dropped_bytes, returned_bytes } => self.age.refaults(dropped_bytes, returned_bytes),
            _ => self.actions.push(Action::Disconnect(CloseReason::UnexpectedMessage)),
        }
    }

    fn welcomed(&mut self, welcome: Welcome) {
        // The fence: no drop of an earlier session happens any more.
        for held in self.held.iter_mut() {
            if matches!(held.step, Step::Reported { .. }) {
                held.step = Step::Answered;
            }
        }
        if std::mem::take(&mut self.facts.leftovers) {
            self.actions.push(Action::Recover);
        }
        let gates = welcome.gates.clone();
        self.actions.push(Action::Note(Note::SessionStarted(gates.clone())));
        let proven = vec![false; welcome.regions.len()];
        self.hello_sent = None;
        self.session = Some(Session { welcome, gates, proven, ponged: false });
        self.proof = Proof::default();
        self.pace.ask();
        self.return_free_units();
    }

    fn link_down(&mut self, now: Duration) {
        self.session = None;
        self.hello_sent = None;
        // The next session says it again.
        self.kernel_reports(false);
        self.forget_demand();
        self.end_pass(PassOutcome::FoundNothing, now);
        self.return_free_units();
    }

    fn gates_changed(&mut self, gates: Vec<Gate>, now: Duration) {
        let Some(session) = &mut self.session else { return };
        session.gates = gates.clone();
        if gates.is_empty() {
            self.pace.ask();
            if self.kernel_reporting {
                // What the kernel reported while a gate was closed was refused, and it does not report that again.
                self.demand();
            }
        } else {
            self.end_pass(PassOutcome::FoundNothing, now);
            self.return_free_units();
        }
        self.actions.push(Action::Note(Note::Gates(gates)));
    }

    fn watch(&mut self, free_bytes: u64, stalled: bool, now: Duration) {
        self.free_bytes = free_bytes;
        let holding = if self.held.is_empty() { Holding::None } else { Holding::Some };
        self.pace.free(free_bytes, holding);
        if self.pass.is_some() && (stalled || free_bytes < self.policy.floor_bytes) {
            self.end_pass(PassOutcome::Pressed, now);
            self.return_free_units();
        }
    }

    fn acked(&mut self, sequence: u64, results: &[RangeResult], now: Duration) {
        let Some(held) = self.held.reported(sequence) else { return };
        held.step = Step::Answered;
        let (unit, pages, huge_pages) = (held.unit, held.pages.clone(), held.huge_pages);
        let bytes = self.facts.size.bytes();
        let (mut dropped, mut refused, mut last_refusal) = (0, 0, None);
        for result in results {
            match result {
                RangeResult::Dropped { bytes: length } => dropped += length / bytes,
                RangeResult::Refused(refusal) => {
                    last_refusal = Some(*refusal);
                }
            }
        }
        dropped = dropped.min(huge_pages);
        refused += huge_pages - dropped;
        self.totals.huge_pages_dropped += dropped;
        self.totals.huge_pages_refused += refused;
        if last_refusal.is_none() {
            self.prove_by_claims(&pages);
        }
        if last_refusal == Some(Refusal::AddressUnproven) {
            self.proof.again(now);
        }
        self.pass_answered(dropped, refused, last_refusal);
        // Claims are kept until their pass ends. Without one, because demand or a gate ended it, nobody needs them.
        if matches!(unit, Unit::Block(_)) || self.pass.is_none() {
            self.return_unit(unit);
        }
    }

    /// Orders the return of every unit that the host cannot be dropping, unless a pass still wants it.
    fn return_free_units(&mut self) {
        let free: Vec<Unit> = self
            .held
            .iter()
            .filter(|held| matches!(held.step, Step::Isolated | Step::Answered))
            .map(|held| held.unit)
            .collect();
        for unit in free {
            self.return_unit(unit);
        }
    }

    /// Orders the return of one unit. The only place that does.
    fn return_unit(&mut self, unit: Unit) {
        let Some(held) = self.held.get_mut(unit) else { return };
        match held.step {
            Step::Isolated | Step::Answered => {}
            // Not there yet, the host may be dropping it, or ordered already.
            Step::Isolating | Step::Reported { .. } | Step::Returning => return,
        }
        match unit {
            Unit::Block(block) => {
                held.step = Step::Returning;
                if matches!(self.self_test, SelfTest::Running(tested, _) if tested == block) {
                    self.self_test = SelfTest::Open;
                }
                self.actions.push(Action::Online(block));
            }
            Unit::Batch(batch) => {
                // Freeing pages cannot fail.
                self.held.remove(unit);
                self.actions.push(Action::Release(batch));
            }
        }
    }

    fn onlined(&mut self, block: BlockNumber, result: OnlineResult, now: Duration) {
        match result {
            OnlineResult::Online => self.held.remove(Unit::Block(block)),
            // What a dead agent left was tried again and is back.
            OnlineResult::StolenOnline if self.held.get_mut(Unit::Block(block)).is_none() => {}
            OnlineResult::StolenOnline => {
                self.held.remove(Unit::Block(block));
                self.switch_off_offlining(format!(
                    "somebody else brought memory block {block} online while it was isolated; look for udev rules that write to \
                     /sys/devices/system/memory/*/state"
                ));
            }
            OnlineResult::Failed(_) => {
                self.retry_online.insert(block, now + BLOCK_PAUSE);
            }
        }
    }

    fn switch_off_offlining(&mut self, why: String) {
        if self.facts.offline.is_usable() {
            self.facts.offline = Method::Off(why.clone());
            self.actions.push(Action::Note(Note::MethodOff("offlining", why)));
        }
    }

    fn switch_off_claims(&mut self, why: String) {
        if self.facts.claims.is_usable() {
            self.facts.claims = Method::Off(why.clone());
            self.actions.push(Action::Note(Note::MethodOff("claims", why)));
        }
    }

    fn tick(&mut self, now: Duration) {
        if self.hello_sent.is_some_and(|sent| sent + WELCOME_TIMEOUT <= now) {
            self.hello_sent = None;
            self.actions.push(Action::Disconnect(CloseReason::HelloTimeout));
        }
        self.take_back_unanswered(now);
        if self.leftovers_due().is_some_and(|due| due <= now) {
            self.facts.leftovers = false;
            self.actions.push(Action::Recover);
        }
        let retry: Vec<BlockNumber> =
            self.retry_online.iter().filter(|(_, at)| **at <= now).map(|(block, _)| *block).collect();
        for block in retry {
            self.retry_online.remove(&block);
            self.actions.push(Action::Online(block));
        }
        if let SelfTest::Running(block, Some(until)) = self.self_test
            && until <= now
        {
            self.self_test = SelfTest::Running(block, None);
            self.actions.push(Action::CheckBlock(block));
        }
        if self.may_isolate() {
            self.proof_step(now);
            self.start_due_pass(now);
        }
        self.refuse_demand();
        self.pump(now);
        // One that was asked for while another was under way.
        self.start_demanded_pass(now);
    }

    fn start_due_pass(&mut self, now: Duration) {
        self.start_demanded_pass(now);
        if self.pass.is_none()
            && self.proof.is_settled()
            && let Some(occasion) = self.pace.due(now)
        {
            if occasion == Occasion::Change {
                self.unreachable.clear();
            }
            self.start_pass(self.own_means(), now);
        }
    }

    fn start_demanded_pass(&mut self, now: Duration) {
        if self.pass.is_none() && self.may_isolate() && self.proof.is_settled() && self.demanded() {
            self.unreachable.clear();
            self.start_pass(Means::AllAtOnce, now);
        }
    }

    /// Lease, grace and margin are over for what the host did not answer: it has killed itself rather than drop now.
    fn take_back_unanswered(&mut self, now: Duration) {
        let mut late = Vec::new();
        for held in self.held.iter_mut() {
            if let Step::Reported { until, .. } = held.step
                && until <= now
            {
                held.step = Step::Answered;
                late.push(held.unit);
            }
        }
        if late.is_empty() {
            return;
        }
        for unit in late {
            self.actions.push(Action::Note(Note::Unanswered(unit)));
            self.return_unit(unit);
        }
        // A host that owes an answer for so long is not there.
        if self.session.is_some() {
            self.actions.push(Action::Disconnect(CloseReason::PingTimeout));
        }
    }

    fn lease_over(&self) -> Duration {
        let lease_and_grace = match &self.session {
            Some(session) => {
                let limits = session.welcome.limits;
                Duration::from_millis(u64::from(limits.lease_ms) + u64::from(limits.grace_ms)).min(LEFTOVERS_AFTER)
            }
            // Whoever the host was.
            None => LEFTOVERS_AFTER,
        };
        lease_and_grace + self.policy.margin
    }

    fn leftovers_due(&self) -> Option<Duration> {
        let started = self.started.filter(|_| self.facts.leftovers)?;
        Some(started + LEFTOVERS_AFTER + self.policy.margin)
    }

    fn may_isolate(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.gates.is_empty() && session.ponged) && self.can_isolate()
    }

    fn sequence(&mut self) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        sequence
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
