//! The main loop: one thread, poll(2), the state machine in the middle.
//!
//! ```text
//!   channel (vsock) --Message--> agent --Action--> executor --Command--> workers
//!        ^                        |  ^                |                    |
//!        +--------- Send ---------+  +---- Event -----+<--- Completion ----+
//! ```
//! Between polls nothing waits. While the agent holds memory, free memory and pressure are looked at every few
//! milliseconds; else one to ten times a second, and not at all while nothing can be reported.

mod block_check;
pub mod channel;
pub mod executor;
pub mod facts;
pub mod log;
mod service;

use crate::agent::policy::{PassOutcome, Policy};
use crate::agent::{Action, Agent, Event, Note};
use crate::config::Config;
use crate::isolate::journal::{Journal, JournalError, RunLock};
use crate::kernel::meminfo::{MemInfoReader, free_memory_bytes};
use crate::kernel::psi::PressureReader;
use crate::kernel::{ReadError, Roots};
use channel::{Channel, ChannelEvent, Interest};
use executor::{Executor, ExecutorError};
use facts::FactsError;
use fpr_protocol::message::Stats;
use fpr_protocol::{CloseReason, Message};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};
use service::Service;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Between two looks at free memory while the agent holds some.
const WATCH_BUSY: Duration = Duration::from_millis(5);
/// While it holds none and memory is in use that may become free: how soon a pass can follow.
const WATCH_LOW: Duration = Duration::from_millis(100);
/// While as much is free as after the last pass: memory must be used before it can be freed, and that is seen in time.
const WATCH_IDLE: Duration = Duration::from_secs(1);
/// Between two looks at PSI, whose averages the kernel updates every two seconds but whose totals at once.
const PRESSURE: Duration = Duration::from_millis(50);
/// Share of time, in percent, that tasks may wait for memory before the agent steps back.
const STALL_PERCENT: u64 = 10;
/// Between two `Stats`.
const STATS: Duration = Duration::from_secs(10);
/// How long a stop may take when the host answers; what is still unanswered then is left to the next start.
const STOP: Duration = Duration::from_secs(12);

/// Why the agent ends.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The guest cannot be looked at.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// Lock or journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Workers.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// A kernel file that the loop reads.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// poll, signalfd or a clock.
    #[error("{call}")]
    Os {
        /// The call.
        call: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// `once` or `recover` met no host.
    #[error("no session with the host agent within {0:?}: is fpr-host-agent serving this VM?")]
    NoHost(Duration),
}

fn os(call: &'static str) -> impl FnOnce(nix::errno::Errno) -> RunError {
    move |errno| RunError::Os { call, source: errno.into() }
}

/// When to end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// On a signal only.
    Stopped,
    /// After the first pass that ended, or without a session within this time.
    FirstPass(Duration),
    /// When what an earlier agent left is back; without a session by time.
    Recovered,
}

/// What was done, for `once`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// Totals of the agent.
    pub totals: crate::agent::Totals,
}

/// Runs the agent.
///
/// # Errors
/// See [`RunError`].
pub fn run(roots: &Roots, config: &Config, until: Until) -> Result<Summary, RunError> {
    let signals = block_signals()?;
    let lock = RunLock::acquire(&config.run_dir)?;
    let mut guest = facts::gather(roots, config)?;
    let journal = Journal::open(&config.run_dir, &guest.boot_id)?;
    guest.facts.leftovers = facts::leftovers(roots, &guest, &journal)?;
    if until == Until::Recovered {
        if !guest.facts.leftovers {
            return Ok(Summary::default());
        }
        let why = "this is recover";
        guest.facts.offline = crate::agent::Method::Off(why.to_owned());
        guest.facts.claims = crate::agent::Method::Off(why.to_owned());
    }
    let policy = Policy { floor_bytes: facts::floor_bytes(roots, config, guest.facts.size)?, ..config.policy.clone() };
    let agent = Agent::new(policy, guest.facts.clone());
    let jitter = u64::from_ne_bytes(guest.facts.hello.boot_id.first_chunk().copied().unwrap_or_default());
    let main = Main {
        channel: Channel::new(config.connect.clone(), jitter),
        executor: Executor::new(roots, guest, &journal, config.offline_limit)?,
        agent,
        memory: MemInfoReader::open(roots)?,
        pressure: PressureReader::open(roots)?,
        stall: Stall::default(),
        next_watch: Duration::ZERO,
        next_stats: Duration::ZERO,
        down_logged: false,
        lowered: true,
        service: Service::new(until),
    };
    let result = main.run(&signals, until);
    drop(lock);
    result
}

fn block_signals() -> Result<SignalFd, RunError> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    // Before any thread is made, so that all of them inherit it.
    set.thread_block().map_err(os("sigprocmask"))?;
    SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC).map_err(os("signalfd"))
}

/// The clock of the protocol's guest side.
fn now() -> Result<Duration, RunError> {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).map_err(os("clock_gettime"))
}

struct Main {
    channel: Channel,
    executor: Executor,
    agent: Agent,
    memory: MemInfoReader,
    pressure: PressureReader,
    stall: Stall,
    next_watch: Duration,
    next_stats: Duration,
    down_logged: bool,
    /// The hugetlb limit is what it was before the first claim.
    lowered: bool,
    service: Service,
}

/// What poll(2) said. Asking a descriptor that has nothing costs a system call each time.
#[derive(Clone, Copy, Debug)]
struct Ready {
    channel: bool,
    workers: bool,
    signal: bool,
}

/// Time that tasks waited for memory, at the last look.
#[derive(Debug, Default)]
struct Stall {
    looked: Duration,
    total_us: u64,
    stalled: bool,
}

impl Main {
    fn run(mut self, signals: &SignalFd, until: Until) -> Result<Summary, RunError> {
        let started = now()?;
        if matches!(until, Until::FirstPass(_)) {
            self.agent.demand();
        }
        let mut stopping: Option<Duration> = None;
        let mut ready = Ready { channel: true, workers: true, signal: true };
        self.service.ready();
        loop {
            let at = now()?;
            self.turn(at, ready)?;
            self.service.turn(at);
            let totals = self.agent.totals();
            let done = match until {
                Until::FirstPass(limit) if stopping.is_none() => {
                    if totals.passes == 0 && self.agent.gates().is_none() && at >= started + limit {
                        return Err(RunError::NoHost(limit));
                    }
                    // With a closed gate or without a way to isolate there will be no pass.
                    let gated = self.agent.gates().is_some_and(|gates| !gates.is_empty() || !self.agent.can_isolate());
                    totals.passes > 0 || gated
                }
                Until::Recovered => self.agent.is_clear(),
                _ => false,
            };
            if done && stopping.is_none() {
                stopping = Some(at);
                self.stop(at);
            }
            if stopping.is_some_and(|since| self.agent.is_clear() || at >= since + STOP) {
                break;
            }
            let give_up = match until {
                Until::FirstPass(limit) if stopping.is_none() && self.agent.gates().is_none() => Some(started + limit),
                _ => stopping.map(|since| since + STOP),
            };
            ready = self.wait(signals, at, give_up)?;
            while ready.signal && matches!(signals.read_signal(), Ok(Some(_))) {
                if stopping.is_some() {
                    // The second time: at once. What is held is returned by the next start.
                    return Ok(Summary { totals });
                }
                stopping = Some(at);
                self.stop(at);
            }
        }
        let summary = Summary { totals: self.agent.totals() };
        // As far as it fits; a host that does not hear it sees the end of the connection.
        let _ = self.channel.send(&Message::Goodbye { reason: CloseReason::Shutdown }, now()?);
        self.executor.finish();
        Ok(summary)
    }

    fn stop(&mut self, at: Duration) {
        self.service.stopping();
        self.executor.cut_short();
        let actions = self.agent.stop(at);
        self.perform(actions, at);
    }

    /// Everything that can be done without waiting.
    fn turn(&mut self, mut at: Duration, ready: Ready) -> Result<(), RunError> {
        if ready.channel || self.channel.next_deadline().is_some_and(|deadline| deadline <= at) {
            let events = self.channel.service(at);
            // The host takes the time in a `Pong` for one after its `Ping` left. Before the `Ping` was read is too early:
            // reports would look younger than they are by however long this thread stood still in between.
            at = now()?;
            for event in events {
                let event = self.channel_event(event);
                self.feed(event, at);
            }
        }
        if ready.workers {
            for event in self.executor.completed() {
                self.feed(event, at);
            }
        }
        self.watch(at)?;
        if at >= self.next_stats && self.agent.gates().is_some() {
            self.next_stats = at + STATS;
            let stats = self.stats()?;
            self.feed(Event::Stats(stats), at);
        }
        if self.agent.next_deadline().is_some_and(|deadline| deadline <= at) {
            self.feed(Event::Tick, at);
        }
        if self.agent.is_busy() {
            // A pass may have begun between two idle looks; it is watched closely from the start.
            self.next_watch = self.next_watch.min(at + WATCH_BUSY);
        }
        Ok(())
    }

    fn watch(&mut self, at: Duration) -> Result<(), RunError> {
        let busy = self.agent.is_busy();
        // Without a session or behind a gate nothing starts, whatever becomes free.
        let idle = self.agent.gates() != Some(&[]);
        if at < self.next_watch || (idle && !busy) {
            return Ok(());
        }
        let free_bytes = free_memory_bytes().map_err(os("sysinfo"))?;
        let stalled = busy && self.is_stalled(at)?;
        self.feed(Event::Watch { free_bytes, stalled }, at);
        self.next_watch = at
            + match (self.agent.is_busy(), self.agent.is_watchful()) {
                (true, _) => WATCH_BUSY,
                (false, true) => WATCH_LOW,
                (false, false) => WATCH_IDLE,
            };
        if stalled {
            self.executor.cut_short();
        }
        if !self.agent.is_busy() && !self.lowered {
            self.lowered = true;
            self.executor.settle();
        }
        Ok(())
    }

    fn is_stalled(&mut self, at: Duration) -> Result<bool, RunError> {
        let elapsed = at.saturating_sub(self.stall.looked);
        if elapsed < PRESSURE {
            return Ok(self.stall.stalled);
        }
        let Some(pressure) = self.pressure.read()? else { return Ok(false) };
        let waited = pressure.some.total_us.saturating_sub(self.stall.total_us);
        // The first look has nothing to compare with, and after a long pause the share says nothing about now.
        let recent = elapsed <= 10 * PRESSURE;
        let stalled = recent && u128::from(waited) * 100 > elapsed.as_micros() * u128::from(STALL_PERCENT);
        self.stall = Stall { looked: at, total_us: pressure.some.total_us, stalled };
        Ok(stalled)
    }

    fn stats(&mut self) -> Result<Stats, RunError> {
        let memory = self.memory.read()?;
        let pressure = self.pressure.read()?;
        let usage = getrusage(UsageWho::RUSAGE_SELF).map_err(os("getrusage"))?;
        let cpu_ms = usage.user_time().num_milliseconds() + usage.system_time().num_milliseconds();
        let totals = self.agent.totals();
        Ok(Stats {
            memory_total_bytes: memory.total_bytes,
            memory_free_bytes: memory.free_bytes,
            memory_available_bytes: memory.available_bytes,
            page_cache_bytes: memory.cached_bytes,
            psi_some_avg10_centipercent: pressure.map_or(0, |pressure| pressure.some.avg10_centipercent),
            psi_full_avg10_centipercent: pressure.map_or(0, |pressure| pressure.full.avg10_centipercent),
            huge_pages_offlined: totals.huge_pages_offlined,
            huge_pages_claimed: totals.huge_pages_claimed,
            agent_cpu_ms: u64::try_from(cpu_ms).unwrap_or(0),
        })
    }

    fn channel_event(&mut self, event: ChannelEvent) -> Event {
        match event {
            ChannelEvent::Up => Event::LinkUp,
            ChannelEvent::Down(why) => {
                // Once per outage; the attempts go on for ever.
                if !self.down_logged {
                    log::info(&format!("no host agent: {why}; trying again"));
                    self.down_logged = true;
                    self.service.status("no session with the host agent; trying again");
                }
                Event::LinkDown
            }
            ChannelEvent::Message(message) => Event::Message(message),
        }
    }

    fn feed(&mut self, event: Event, at: Duration) {
        let actions = self.agent.handle(event, at);
        self.perform(actions, at);
    }

    fn perform(&mut self, actions: Vec<Action>, at: Duration) {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            let event = match action {
                Action::Send(message) => self.channel.send(&message, at).map(|event| self.channel_event(event)),
                Action::Disconnect(reason) => {
                    log::info(&format!("closing the session: {reason}"));
                    self.channel.close(at);
                    Some(Event::LinkDown)
                }
                Action::Note(note) => {
                    self.note(&note);
                    None
                }
                action => {
                    self.lowered &= !matches!(action, Action::Claim(..));
                    self.executor.execute(action)
                }
            };
            if let Some(event) = event {
                // The clock may have gone on while the kernel was asked.
                let at = now().unwrap_or(at);
                actions.extend(self.agent.handle(event, at));
            }
        }
    }

    fn note(&mut self, note: &Note) {
        match note {
            Note::SessionStarted(gates) => {
                self.down_logged = false;
                let text = format!("session with the host agent; {}", gates_text(gates));
                log::info(&text);
                self.service.status(&text);
            }
            Note::Gates(gates) => {
                log::info(&gates_text(gates));
                self.service.status(&format!("session with the host agent; {}", gates_text(gates)));
            }
            Note::KernelReporting(true) => {
                log::info("the kernel reports free pages by itself: passes for big frees and on demand only");
            }
            Note::KernelReporting(false) => {
                log::info("the kernel reports no free pages: passes whenever memory is free");
            }
            Note::HostGoodbye(reason) => log::info(&format!("the host ends the session: {reason}")),
            Note::MethodOff(method, why) => log::warn(&format!("{method} switched off: {why}")),
            Note::Unanswered(unit) => log::warn(&format!("the host never answered for {unit:?}; taken back by time")),
            Note::ProofFailed(pages) => log::warn(&format!("address check failed for {pages} pages")),
            Note::Passed { outcome: PassOutcome::FoundNothing, refused: 0, .. } => {}
            Note::Passed { outcome, dropped, refused, last_refusal } => {
                let why = last_refusal.map(|refusal| format!(", last refusal: {refusal}")).unwrap_or_default();
                log::info(&format!("pass: {outcome:?}, {dropped} huge pages dropped, {refused} refused{why}"));
            }
        }
    }

    fn wait(&self, signals: &SignalFd, at: Duration, give_up: Option<Duration>) -> Result<Ready, RunError> {
        let watch = (self.agent.is_busy() || self.agent.gates() == Some(&[])).then_some(self.next_watch);
        let stats = self.agent.gates().map(|_| self.next_stats);
        let deadline = [
            self.agent.next_deadline(),
            self.channel.next_deadline(),
            watch,
            stats,
            give_up,
            self.service.next_deadline(),
        ]
        .into_iter()
        .flatten()
        .min();
        let timeout = match deadline {
            // Rounded up: waking early would spin until the deadline.
            Some(deadline) => {
                let millis = deadline.saturating_sub(at).as_micros().div_ceil(1000);
                PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
            }
            None => PollTimeout::NONE,
        };
        let [blocks, claims] = self.executor.wake_fds();
        let mut fds = vec![
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(blocks, PollFlags::POLLIN),
            PollFd::new(claims, PollFlags::POLLIN),
        ];
        if let Some((fd, interest)) = self.channel.interest() {
            let flags = match interest {
                Interest::Read => PollFlags::POLLIN,
                Interest::Write => PollFlags::POLLOUT,
                Interest::Both => PollFlags::POLLIN | PollFlags::POLLOUT,
            };
            fds.push(PollFd::new(fd, flags));
        }
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(os("poll")(errno)),
        }
        let is_ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| fd.any().unwrap_or(true));
        Ok(Ready {
            signal: is_ready(fds.first()),
            workers: is_ready(fds.get(1)) || is_ready(fds.get(2)),
            channel: is_ready(fds.get(3)),
        })
    }
}

fn gates_text(gates: &[fpr_protocol::Gate]) -> String {
    if gates.is_empty() {
        return "all gates open".to_owned();
    }
    let words: Vec<&str> = gates.iter().map(|gate| gate.word()).collect();
    format!("gates closed, nothing is reported: {}", words.join(", "))
}
