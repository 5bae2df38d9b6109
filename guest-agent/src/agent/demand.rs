//! Passes that somebody asks for, and passes beside a kernel that reports by itself.
//!
//! Alone, the agent starts a pass when memory becomes free and isolates whatever pays. When the guest's kernel reports
//! free pages through a balloon device (`KernelReporting`), it does so for almost nothing, but slowly: a sixteenth of
//! each free list every two seconds (`mm/page_reporting.c`), half a minute for a big free. So the agent's own passes
//! then wait for free memory to rise by a share of the guest's memory
//! ([`Policy::big_free_share`](super::policy::Policy)), and take memory blocks offline only if those that are wholly free
//! and still backed hold as much; that is one second's work instead of half a minute's. What is less or scattered, it
//! leaves to the kernel: claims zero the memory first and would cost more than they gain.
//!
//! A pass that the host or an operator asks for (`Reclaim`) uses every means, and does not wait for memory to age: age is
//! there to leave churn alone, not for safety. Floor and PSI hold as in any pass.

use super::policy::PassOutcome;
use super::{Action, Agent};
use fpr_protocol::{Message, PassEnd};

/// Requests of the host that wait for their pass, at most. More are answered at once.
const MAX_WAITING: usize = 64;

/// What a pass may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Means {
    /// Everything that pays.
    All,
    /// Everything that pays, and at once.
    AllAtOnce,
    /// Memory blocks, if they hold a big free.
    BigFree,
}

/// Who waits for a pass.
#[derive(Debug, Default)]
pub(super) struct Demand {
    /// Requests of the host that came since the last pass began.
    waiting: Vec<u64>,
    /// Requests that the pass under way is for.
    served: Vec<u64>,
    /// Somebody in the guest asked.
    local: bool,
}

impl Agent {
    /// Wants a pass now with every means, as `Reclaim` does.
    pub fn demand(&mut self) {
        self.demand.local = true;
    }

    pub(super) fn reclaim(&mut self, id: u64) {
        if self.demand.waiting.len() < MAX_WAITING {
            self.demand.waiting.push(id);
        } else {
            self.answer(vec![id], PassEnd::CannotIsolate);
        }
    }

    /// What the next pass may do if it starts now for no other reason than a demand.
    pub(super) fn demanded(&mut self) -> bool {
        let demanded = self.demand.local || !self.demand.waiting.is_empty();
        if demanded {
            self.demand.local = false;
            self.demand.served = std::mem::take(&mut self.demand.waiting);
        }
        demanded
    }

    /// What a pass that nobody asked for may do.
    pub(super) fn own_means(&self) -> Means {
        if self.kernel_reporting { Means::BigFree } else { Means::All }
    }

    pub(super) fn big_free_bytes(&self) -> u64 {
        self.facts.hello.memory_total_bytes / self.policy.big_free_share.max(1)
    }

    pub(super) fn kernel_reports(&mut self, active: bool) {
        self.kernel_reporting = active;
        self.pace.big_free_only(active.then(|| self.big_free_bytes()));
    }

    /// Requests that no pass will ever serve as things are.
    pub(super) fn refuse_demand(&mut self) {
        let gated = self.session.as_ref().is_some_and(|session| !session.gates.is_empty());
        if self.session.is_some() && (gated || !self.can_isolate()) {
            let waiting = std::mem::take(&mut self.demand.waiting);
            self.answer(waiting, PassEnd::CannotIsolate);
        }
    }

    /// The pass under way has done what it can.
    pub(super) fn demand_served(&mut self, outcome: PassOutcome) {
        let end = match outcome {
            PassOutcome::GaveBack => PassEnd::GaveBack,
            PassOutcome::FoundNothing => PassEnd::FoundNothing,
            PassOutcome::Refused => PassEnd::Refused,
            PassOutcome::Pressed => PassEnd::CutShort,
        };
        let served = std::mem::take(&mut self.demand.served);
        self.answer(served, end);
    }

    /// The session is over, and with it everybody who waited for an answer.
    pub(super) fn forget_demand(&mut self) {
        self.demand.waiting.clear();
        self.demand.served.clear();
    }

    fn answer(&mut self, ids: Vec<u64>, end: PassEnd) {
        self.actions.extend(ids.into_iter().map(|id| Action::Send(Message::Reclaimed { id, end })));
    }
}
