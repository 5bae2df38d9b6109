//! The address check: a few claimed pages with cookies, which the host looks for where our kernel says they are.
//!
//! Offlined memory can hold no cookie, so nothing is reported from a region of the host's map until a page of it was
//! found there in this session. Claims that the host dropped prove their region as well.

use super::held::{BatchId, Step, Unit};
use super::{Action, Agent, Note};
use fpr_protocol::message::{Prove, Proven};
use fpr_protocol::{Cookie, GuestAddress, Message};
use std::time::Duration;

/// Pages of one check. The allocator chooses where they are; a few tell as much as many.
const PAGES: u32 = 4;

/// Pause after a check that failed.
const PAUSE: Duration = Duration::from_secs(10);

/// How far the check of this session is.
#[derive(Debug, Default)]
pub(super) enum Proof {
    /// To be done, not before this time.
    #[default]
    Open,
    Paused(Duration),
    /// Pages are being claimed.
    Claiming(BatchId),
    /// The host is looking for them.
    Waiting {
        batch: BatchId,
        sequence: u64,
    },
    /// Done, or impossible because nothing can be claimed.
    Settled,
}

impl Proof {
    pub(super) fn is_settled(&self) -> bool {
        matches!(self, Self::Settled | Self::Paused(_))
    }

    pub(super) fn again(&mut self, now: Duration) {
        if self.is_settled() {
            *self = Self::Paused(now + PAUSE);
        }
    }

    pub(super) fn next_attempt(&self) -> Option<Duration> {
        match self {
            Self::Paused(until) => Some(*until),
            _ => None,
        }
    }
}

impl Agent {
    pub(super) fn proof_step(&mut self, now: Duration) {
        match self.proof {
            Proof::Open => {}
            Proof::Paused(until) if until <= now => {}
            _ => return,
        }
        if !self.facts.claims.is_usable() {
            self.proof = Proof::Settled;
            return;
        }
        let batch = BatchId(self.next_batch);
        self.next_batch += 1;
        self.held.isolate(Unit::Batch(batch), u64::from(PAGES));
        self.proof = Proof::Claiming(batch);
        self.actions.push(Action::Claim(batch, PAGES));
    }

    /// Takes the batch if it is the check's own.
    pub(super) fn proof_claimed(&mut self, batch: BatchId, pages: &[GuestAddress], now: Duration) -> bool {
        if !matches!(self.proof, Proof::Claiming(claiming) if claiming == batch) {
            return false;
        }
        let sequence = self.sequence();
        let unit = Unit::Batch(batch);
        let Some(session) = self.session.as_ref().filter(|_| !pages.is_empty()) else {
            self.proof = Proof::Paused(now + PAUSE);
            self.return_unit(unit);
            return true;
        };
        let cookies = cookies(session.welcome.session_nonce, sequence, pages);
        self.actions.push(Action::WriteCookies(batch, cookies));
        self.actions.push(Action::Send(Message::Prove(Prove { sequence, pages: pages.to_vec() })));
        self.proof = Proof::Waiting { batch, sequence };
        true
    }

    pub(super) fn proven(&mut self, proven: &Proven, now: Duration) {
        let Proof::Waiting { batch, sequence } = self.proof else { return };
        if sequence != proven.sequence {
            return;
        }
        if let Some(session) = &mut self.session {
            for (ours, theirs) in session.proven.iter_mut().zip(&proven.regions) {
                *ours = *theirs;
            }
        }
        self.proof = Proof::Settled;
        if proven.mismatches > 0 {
            self.actions.push(Action::Note(Note::ProofFailed(proven.mismatches)));
            self.proof = Proof::Paused(now + PAUSE);
        }
        // The host only read these pages; they were never `Reported`.
        self.return_unit(Unit::Batch(batch));
    }

    /// The host found the cookies of these pages and dropped them: that proves their regions too.
    pub(super) fn prove_by_claims(&mut self, pages: &[GuestAddress]) {
        let Some(session) = &mut self.session else { return };
        for page in pages {
            if let Some(region) = region_of(&session.welcome.regions, *page) {
                session.proven[region] = true;
            }
        }
    }

    /// Whether the whole range lies in a region that passed.
    pub(super) fn is_proven(&self, start: GuestAddress, bytes: u64) -> bool {
        let Some(session) = &self.session else { return false };
        region_of(&session.welcome.regions, start).is_some_and(|region| {
            let of = session.welcome.regions[region];
            session.proven[region] && start.0 + bytes <= of.start.0.saturating_add(of.bytes)
        })
    }

    /// Whether a unit belongs to a check that is under way.
    pub(super) fn proof_holds(&self, unit: Unit) -> bool {
        match self.proof {
            Proof::Claiming(batch) | Proof::Waiting { batch, .. } => unit == Unit::Batch(batch),
            _ => false,
        }
    }

    pub(super) fn isolated(&mut self, unit: Unit, pages: Vec<GuestAddress>) {
        if let Some(held) = self.held.get_mut(unit) {
            held.step = Step::Isolated;
            if let Unit::Batch(_) = unit {
                held.huge_pages = pages.len() as u64;
            }
            held.pages = pages;
            // Until free memory is looked at again.
            let bytes = held.huge_pages.saturating_mul(self.facts.size.bytes());
            self.free_bytes = self.free_bytes.saturating_sub(bytes);
        }
    }
}

fn region_of(regions: &[fpr_protocol::message::Region], address: GuestAddress) -> Option<usize> {
    regions.iter().position(|region| address.0 >= region.start.0 && address.0 - region.start.0 < region.bytes)
}

/// One cookie per page, in order.
pub(super) fn cookies(session_nonce: u64, sequence: u64, pages: &[GuestAddress]) -> Vec<Cookie> {
    (0..).zip(pages).map(|(index, address)| Cookie { session_nonce, sequence, index, address: *address }).collect()
}
