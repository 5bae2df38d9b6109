//! The budget of one VM: watched with cheap figures, decided on precise ones. Pure: figures and a time in, actions out.
//!
//! Called by [`super::task`] on every tick. It trusts the bounds of an [`Estimate`] and nothing else.
//!
//! ```text
//!            upper bound above the budget, precise figure not           precise figure above the budget
//!        +--- asks for a precise figure, which is below ---+      +----------------------------------------+
//!        |                                                 v      |                                        v
//!      idle -- estimate --> below ------------------------ below -+                                      over
//!        ^                    ^   \                                                                     /  |
//!        |                    |    \ no precise figure to be had     precise figure at most 15/16 of   /   |
//!        |                    |     v                                the budget: back to below <------+    |
//!   process gone              +--- unconfirmed <------------------- no precise figure three times ---------+
//! ```
//! A precise figure can take seconds, so the time between two of them doubles while they say the same, and each is
//! followed by a hundred times its own duration of rest. It comes back to the shortest when the cheap figure has moved
//! by as much as was missing. That a guest shares much memory, so that its upper bound stands above the budget for good,
//! costs one precise read a minute and no false alarm.

use super::cost::Estimate;
use super::{Absent, AbsentReason};
use serde::Serialize;
use std::time::Duration;

/// At least this long between two precise reads of a VM: two ticks.
pub const SHORTEST_PAUSE: Duration = Duration::from_secs(10);
/// While nothing changes, a precise read at least this often; with the tick, the longest time a crossing goes unseen.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Rest after a precise read, as a multiple of its duration: 1 % of a CPU at most.
const REST: u32 = 100;
/// Longest rest, however long a read took.
pub const LONGEST_REST: Duration = Duration::from_secs(600);
/// An alarm ends at this part below the budget, so that a VM at its budget does not raise one every minute.
const HYSTERESIS: u64 = 16;
/// An alarm outlives as many failed reads less one.
const MISSES: u32 = 3;

/// What is known of a VM and its budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum State {
    /// Nothing to watch: no figure yet, or no process.
    Idle,
    /// Within the budget, or below it by less than ends an alarm.
    Below,
    /// Above it, by a precise figure.
    Over,
    /// Above it perhaps: there is no precise figure to decide on, for this reason.
    Unconfirmed(AbsentReason),
}

/// What the caller has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read precisely, off the tick, and call [`Watch::confirmed`] with what came of it, whatever it is.
    ReadPrecisely,
    /// Tell people.
    Note(Note),
}

/// What people are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The alarm is on.
    Raised {
        /// The precise figure.
        cost_bytes: u64,
    },
    /// The alarm is off.
    Cleared {
        /// The precise figure; absent if the process has gone.
        cost_bytes: Option<u64>,
    },
    /// It cannot be told whether the budget is crossed.
    Unconfirmed {
        /// Why there is no precise figure.
        absent: Absent,
        /// The cost is at most this, if that is known.
        at_most_bytes: Option<u64>,
    },
}

/// The last precise figure and what was known beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Confirmed {
    cost_bytes: u64,
    at: Duration,
}

/// One VM's budget.
#[derive(Clone, Debug)]
pub struct Watch {
    budget_bytes: u64,
    state: State,
    /// The last precise figure raised an alarm and none has ended it, though the state may be `Unconfirmed` meanwhile.
    alarm: bool,
    since: Duration,
    confirmed: Option<Confirmed>,
    /// Why the state is `Unconfirmed`, for people.
    absent: Option<Absent>,
    misses: u32,
    /// A precise read is under way.
    asked: bool,
    /// When the last one ended, and the rest it earned.
    last_read: Option<(Duration, Duration)>,
    pause: Duration,
    /// Upper bound of the latest estimate, and the one beside the last precise read.
    high_bytes: u64,
    high_then_bytes: u64,
    alarms: u64,
    precise_reads: u64,
}

impl Watch {
    /// Nothing known yet.
    #[must_use]
    pub fn new(budget_bytes: u64, now: Duration) -> Self {
        Self {
            budget_bytes,
            state: State::Idle,
            alarm: false,
            since: now,
            confirmed: None,
            absent: None,
            misses: 0,
            asked: false,
            last_read: None,
            pause: SHORTEST_PAUSE,
            high_bytes: 0,
            high_then_bytes: 0,
            alarms: 0,
            precise_reads: 0,
        }
    }

    /// An alarm ends at this cost.
    #[must_use]
    pub fn clear_bytes(&self) -> u64 {
        self.budget_bytes - self.budget_bytes / HYSTERESIS
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The budget.
    #[must_use]
    pub fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// The budget is another one now. What was known is judged anew by the next estimate.
    pub fn set_budget(&mut self, budget_bytes: u64) {
        if self.budget_bytes != budget_bytes {
            self.budget_bytes = budget_bytes;
            self.rest_no_longer();
        }
    }

    /// The VM has another process. A precise read that is under way is of the old one: its result is not to be passed on.
    pub fn restarted(&mut self, now: Duration) -> Vec<Action> {
        self.asked = false;
        self.confirmed = None;
        self.rest_no_longer();
        self.idle(now)
    }

    /// The files of the process are others: a precise read that is under way is not to be passed on.
    pub fn read_lost(&mut self) {
        self.asked = false;
    }

    fn rest_no_longer(&mut self) {
        self.last_read = None;
        self.pause = SHORTEST_PAUSE;
    }

    /// A tick's cheap figure.
    pub fn estimated(&mut self, estimate: Result<Estimate, Absent>, now: Duration) -> Vec<Action> {
        let estimate = match estimate {
            Ok(estimate) => estimate,
            Err(absent) if absent.reason == AbsentReason::NoProcess => return self.idle(now),
            Err(absent) => return self.missed(absent, None, now),
        };
        self.high_bytes = estimate.high_bytes;
        if let Some(cost_bytes) = estimate.exact() {
            self.asked = false;
            return self.judge(cost_bytes, now);
        }
        // What is below by its upper bound is below. An alarm, though, ends with a precise figure only.
        if !self.alarm && estimate.high_bytes <= self.budget_bytes {
            self.misses = 0;
            self.change(State::Below, now);
            return Vec::new();
        }
        if self.asked || !self.is_due(now) {
            return Vec::new();
        }
        self.asked = true;
        vec![Action::ReadPrecisely]
    }

    fn is_due(&self, now: Duration) -> bool {
        let Some((ended, rest)) = self.last_read else { return true };
        let pause = if self.has_moved() { SHORTEST_PAUSE } else { self.pause };
        now >= ended.saturating_add(pause.max(rest))
    }

    /// Whether the cheap figure has moved by what the last precise one was away from another verdict.
    fn has_moved(&self) -> bool {
        let Some(Confirmed { cost_bytes, .. }) = self.confirmed else { return false };
        let (moved, missing) = if self.alarm {
            (self.high_then_bytes.saturating_sub(self.high_bytes), cost_bytes.saturating_sub(self.clear_bytes()))
        } else {
            (self.high_bytes.saturating_sub(self.high_then_bytes), self.budget_bytes.saturating_sub(cost_bytes))
        };
        moved > 0 && moved >= missing
    }

    /// What came of [`Action::ReadPrecisely`], and how long it took.
    pub fn confirmed(&mut self, cost: Result<u64, Absent>, took: Duration, now: Duration) -> Vec<Action> {
        if !self.asked {
            // Overtaken: an exact figure came meanwhile, or the process is another one.
            return Vec::new();
        }
        self.asked = false;
        self.precise_reads += 1;
        let before = self.state.clone();
        self.high_then_bytes = self.high_bytes;
        let actions = match cost {
            Ok(cost_bytes) => self.judge(cost_bytes, now),
            Err(absent) if absent.reason == AbsentReason::NoProcess => self.idle(now),
            Err(absent) => self.missed(absent, Some(self.high_bytes), now),
        };
        let same = self.state == before && self.last_read.is_some();
        self.pause = if same { (self.pause * 2).min(LONGEST_PAUSE) } else { SHORTEST_PAUSE };
        self.last_read = Some((now, took.saturating_mul(REST).min(LONGEST_REST)));
        actions
    }

    /// The only way to an alarm and, while the process lives, away from it.
    fn judge(&mut self, cost_bytes: u64, now: Duration) -> Vec<Action> {
        self.misses = 0;
        self.confirmed = Some(Confirmed { cost_bytes, at: now });
        let limit = if self.alarm { self.clear_bytes() } else { self.budget_bytes };
        let (was_over, is_over) = (self.alarm, cost_bytes > limit);
        self.alarm = is_over;
        self.change(if is_over { State::Over } else { State::Below }, now);
        match (was_over, is_over) {
            (false, true) => {
                self.alarms += 1;
                vec![Action::Note(Note::Raised { cost_bytes })]
            }
            (true, false) => vec![Action::Note(Note::Cleared { cost_bytes: Some(cost_bytes) })],
            _ => Vec::new(),
        }
    }

    /// A figure that should have been there.
    fn missed(&mut self, absent: Absent, at_most_bytes: Option<u64>, now: Duration) -> Vec<Action> {
        self.misses = self.misses.saturating_add(1);
        // One bad read neither ends an alarm nor starts a lament; a suspicion that cannot be confirmed is told at once.
        let suspected = !self.alarm && at_most_bytes.is_some();
        if !suspected && self.misses < MISSES {
            return Vec::new();
        }
        let told = matches!(&self.state, State::Unconfirmed(reason) if *reason == absent.reason);
        self.change(State::Unconfirmed(absent.reason), now);
        self.absent = Some(absent.clone());
        if told { Vec::new() } else { vec![Action::Note(Note::Unconfirmed { absent, at_most_bytes })] }
    }

    fn idle(&mut self, now: Duration) -> Vec<Action> {
        self.misses = 0;
        let was_over = std::mem::take(&mut self.alarm);
        self.change(State::Idle, now);
        if was_over { vec![Action::Note(Note::Cleared { cost_bytes: None })] } else { Vec::new() }
    }

    fn change(&mut self, state: State, now: Duration) {
        if self.state != state {
            self.state = state;
            self.since = now;
            self.absent = None;
        }
    }

    /// What `status` shows.
    #[must_use]
    pub fn status(&self, now: Duration) -> BudgetStatus {
        BudgetStatus {
            budget_bytes: self.budget_bytes,
            clear_bytes: self.clear_bytes(),
            state: match self.state {
                State::Idle => "idle",
                State::Below => "below",
                State::Over => "over",
                State::Unconfirmed(_) => "unconfirmed",
            },
            since_s: now.saturating_sub(self.since).as_secs(),
            detail: self.absent.as_ref().map(ToString::to_string),
            cost_bytes: self.confirmed.map(|confirmed| confirmed.cost_bytes),
            cost_age_s: self.confirmed.map(|confirmed| now.saturating_sub(confirmed.at).as_secs()),
            alarms: self.alarms,
            precise_reads: self.precise_reads,
        }
    }
}

/// A budget as `status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetStatus {
    /// The budget.
    pub budget_bytes: u64,
    /// An alarm ends at this cost.
    pub clear_bytes: u64,
    /// `idle`, `below`, `over` or `unconfirmed`.
    pub state: &'static str,
    /// For so long.
    pub since_s: u64,
    /// Why it is unconfirmed.
    pub detail: Option<String>,
    /// The last precise figure.
    pub cost_bytes: Option<u64>,
    /// So long ago.
    pub cost_age_s: Option<u64>,
    /// Alarms raised since the daemon started.
    pub alarms: u64,
    /// Precise reads since then; none where the cheap figure is exact.
    pub precise_reads: u64,
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
