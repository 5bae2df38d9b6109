//! One pass over the free memory.
//!
//! ```text
//!  Looking -> Asking -> Aging -> Working -> (ended)
//!     ^                             |
//!     +---- blocks went offline ----+
//! ```
//! * **Looking**: which huge pages are free, by their first page only.
//! * **Asking**: which of them the host still backs. Little: the pass ends.
//! * **Aging**: until they have been free for the age that counts; blocks are read in full right before they go offline,
//!   which is the second look.
//! * **Working**: wholly free blocks go offline, best first and few at a time. Offlining drains the kernel's per-CPU lists
//!   (`zone_pcp_disable`, mm/memory_hotplug.c), and what was in them completes more huge pages and blocks: so there is
//!   another look afterwards. Then huge pages are claimed for what is left. Claimed pages stay claimed until the pass ends, because the allocator hands out the most recently freed page
//!   first and would return the same ones again.

use super::demand::Means;
use super::held::{BatchId, Step, Unit};
use super::policy::PassOutcome;
use super::proof::cookies;
use super::{Action, Agent, BLOCK_PAUSE, ClaimShort, Note, OfflineResult, SelfTest, nanos};
use crate::kernel::memory_blocks::BlockNumber;
use fpr_protocol::message::{Report, Survey, SurveyReply};
use fpr_protocol::range::runs;
use fpr_protocol::{
    BackedRange, GuestAddress, HugePageRange, Isolation, MAX_SURVEY_RANGES, Message, Refusal, ReportedRange,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// A run that is backed to less than one part in this many is not worth a claim: claiming zeroes the whole page first.
const CLAIM_FILL: u64 = 4;

/// Claims may meet this share of what they want, in percent, in pages that nobody wants: claiming zeroes and so backs
/// what it meets, and the allocator hands out the most recently freed page first, be it long dropped.
const MISSES_PERCENT: u64 = 50;

/// Times a pass looks again after blocks went offline.
const MAX_ROUNDS: u32 = 3;

enum Stage {
    Looking,
    Asking { sequence: u64 },
    Aging { until: Duration },
    Working,
}

/// A pass under way.
pub(super) struct Pass {
    means: Means,
    stage: Stage,
    looked_at: Duration,
    free: Vec<GuestAddress>,
    backed: Vec<BackedRange>,
    blocks: VecDeque<BlockNumber>,
    /// Looks so far.
    rounds: u32,
    /// Blocks that went offline since the last look.
    fruitful_blocks: u32,
    /// Backed huge pages that no block has covered.
    wanted: BTreeSet<GuestAddress>,
    /// Claimed pages that were not wanted, and how many there may be.
    misses: u64,
    max_misses: u64,
    claims: Claims,
    /// Huge pages reported that the host had backed before the pass.
    useful: u64,
    dropped: u64,
    refused: u64,
    last_refusal: Option<Refusal>,
}

/// How far claiming is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claims {
    Going,
    Over,
}

impl Pass {
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        match self.stage {
            Stage::Aging { until } => Some(until),
            _ => None,
        }
    }
}

impl Agent {
    pub(super) fn start_pass(&mut self, means: Means, now: Duration) {
        self.pass = Some(Pass {
            means,
            stage: Stage::Looking,
            looked_at: now,
            free: Vec::new(),
            backed: Vec::new(),
            blocks: VecDeque::new(),
            rounds: 0,
            fruitful_blocks: 0,
            wanted: BTreeSet::new(),
            misses: 0,
            max_misses: 0,
            claims: if means == Means::BigFree { Claims::Over } else { Claims::Going },
            useful: 0,
            dropped: 0,
            refused: 0,
            last_refusal: None,
        });
        self.actions.push(Action::Look);
    }

    pub(super) fn looked(&mut self, pages: Vec<GuestAddress>, now: Duration) {
        if !matches!(&self.pass, Some(Pass { stage: Stage::Looking, .. })) {
            return;
        }
        let mut ranges = runs(pages.iter().copied(), self.facts.size);
        if ranges.len() > MAX_SURVEY_RANGES {
            // The longest hold the most; in order of address again for the host.
            ranges.sort_unstable_by_key(|range| std::cmp::Reverse(range.count));
            ranges.truncate(MAX_SURVEY_RANGES);
            ranges.sort_unstable_by_key(|range| range.start);
        }
        let sequence = self.sequence();
        if ranges.is_empty() {
            return self.finish_pass(now);
        }
        let Some(pass) = &mut self.pass else { return };
        if pass.rounds == 0 {
            pass.looked_at = now;
        }
        pass.rounds += 1;
        pass.free = pages;
        pass.stage = Stage::Asking { sequence };
        self.actions.push(Action::Send(Message::Survey(Survey { sequence, ranges })));
    }

    pub(super) fn surveyed(&mut self, reply: &SurveyReply, now: Duration) {
        let big_free_bytes = self.big_free_bytes();
        let Some(pass) = &mut self.pass else { return };
        if !matches!(pass.stage, Stage::Asking { sequence } if sequence == reply.sequence) {
            return;
        }
        let backed_bytes: u64 = reply.backed.iter().map(|backed| backed.backed_bytes).sum();
        let to_test = self.self_test == SelfTest::Open && self.facts.offline.is_usable();
        let (least, age) = match pass.means {
            Means::All => (self.policy.min_reclaim_bytes, self.age.current()),
            Means::AllAtOnce => (self.policy.min_reclaim_bytes, Duration::ZERO),
            Means::BigFree => (big_free_bytes, self.age.current()),
        };
        if backed_bytes < least && !to_test {
            return self.finish_pass(now);
        }
        pass.backed.clone_from(&reply.backed);
        pass.stage = Stage::Aging { until: pass.looked_at + age };
    }

    /// Divides what is backed into blocks to take offline and huge pages to claim.
    fn plan(&mut self, now: Duration) {
        let size = self.facts.size;
        let Some(mut pass) = self.pass.take() else { return };
        pass.wanted.clear();
        pass.fruitful_blocks = 0;
        let free: BTreeSet<GuestAddress> = std::mem::take(&mut pass.free).into_iter().collect();
        let may_offline = self.facts.offline.is_usable() && self.offline_rest.is_over(now);
        let block_bytes = self.facts.block_bytes.filter(|_| may_offline);
        let mut per_block: BTreeMap<u64, u64> = BTreeMap::new();
        for BackedRange { range, backed_bytes } in &pass.backed {
            let worth_claiming = range.bytes(size) / CLAIM_FILL <= *backed_bytes;
            let end = GuestAddress(range.start.0.saturating_add(range.bytes(size)));
            // Only what is free; the host may name anything.
            for page in free.range(range.start..end.max(range.start)).copied() {
                if worth_claiming && !self.unreachable.contains(&page) {
                    pass.wanted.insert(page);
                }
                if let Some(block_bytes) = block_bytes {
                    *per_block.entry(page.0 / block_bytes).or_default() += backed_bytes / u64::from(range.count.max(1));
                }
            }
        }
        if let Some(block_bytes) = block_bytes {
            self.refused_blocks.retain(|_, until| *until > now);
            let mut blocks: Vec<(u64, u64)> = per_block
                .into_iter()
                .filter(|(block, backed)| {
                    let start = GuestAddress(block * block_bytes);
                    let all = free.range(start..GuestAddress(start.0 + block_bytes)).count() as u64;
                    *backed >= self.policy.min_block_bytes
                        && all == block_bytes / size.bytes()
                        && self.is_proven(start, block_bytes)
                        && !self.refused_blocks.contains_key(&BlockNumber(*block))
                })
                .collect();
            let backed: u64 = blocks.iter().map(|(_, backed)| backed).sum();
            if pass.means == Means::BigFree && backed < self.big_free_bytes() {
                blocks.clear();
            }
            blocks.sort_unstable_by_key(|(_, backed)| std::cmp::Reverse(*backed));
            pass.blocks = blocks.into_iter().map(|(block, _)| BlockNumber(block)).collect();
            if pass.blocks.is_empty() && self.self_test == SelfTest::Open {
                // Any free block will do for the self-test, and now it costs no time that matters.
                pass.blocks.extend(self.free_block(&free, block_bytes));
            }
        }
        pass.max_misses = (pass.wanted.len() as u64 * MISSES_PERCENT / 100).max(u64::from(self.policy.claim_slice));
        pass.stage = Stage::Working;
        self.pass = Some(pass);
    }

    /// The highest free block, which is the least likely to be wanted soon.
    fn free_block(&self, free: &BTreeSet<GuestAddress>, block_bytes: u64) -> Option<BlockNumber> {
        let pages = block_bytes / self.facts.size.bytes();
        let last = free.last()?.0 / block_bytes;
        (0..=last).rev().map(BlockNumber).find(|block| {
            let start = GuestAddress(block.0 * block_bytes);
            free.range(start..GuestAddress(start.0 + block_bytes)).count() as u64 == pages
                && self.is_proven(start, block_bytes)
                && !self.refused_blocks.contains_key(block)
        })
    }

    /// Starts whatever the pass can start now, and ends it when there is nothing left.
    pub(super) fn pump(&mut self, now: Duration) {
        match &self.pass {
            Some(Pass { stage: Stage::Aging { until }, .. }) if *until <= now => self.plan(now),
            Some(Pass { stage: Stage::Working, .. }) => {}
            _ => return,
        }
        self.offline_next();
        let under_way = self.held.count(|held| {
            matches!(held.unit, Unit::Block(_))
                && matches!(held.step, Step::Isolating | Step::Isolated | Step::Reported { .. })
        });
        let Some(pass) = &mut self.pass else { return };
        if !pass.blocks.is_empty() || under_way > 0 {
            return;
        }
        if pass.fruitful_blocks > 0 && pass.rounds < MAX_ROUNDS {
            pass.stage = Stage::Looking;
            self.actions.push(Action::Look);
            return;
        }
        self.claim_next();
        let under_way = self.held.count(|held| {
            matches!(held.step, Step::Isolating | Step::Isolated | Step::Reported { .. })
                && !self.proof_holds(held.unit)
        });
        if under_way == 0 && self.pass.as_ref().is_some_and(|pass| pass.claims == Claims::Over) {
            self.finish_pass(now);
        }
    }

    /// The pass has done what it can.
    fn finish_pass(&mut self, now: Duration) {
        let Some(pass) = &mut self.pass else { return };
        let useful_bytes = pass.useful.min(pass.dropped) * self.facts.size.bytes();
        let gave_back = useful_bytes >= self.policy.min_reclaim_bytes;
        if pass.misses >= pass.max_misses && pass.max_misses > 0 {
            // Deeper in the free lists than it pays to dig: not wanted again until memory moves.
            self.unreachable.extend(std::mem::take(&mut pass.wanted));
        }
        let outcome = match (gave_back, pass.refused) {
            (true, _) => PassOutcome::GaveBack,
            (false, 0) => PassOutcome::FoundNothing,
            (false, _) => PassOutcome::Refused,
        };
        self.demand_served(outcome);
        self.end_pass(outcome, now);
        self.return_free_units();
    }

    fn offline_next(&mut self) {
        let Some(block_bytes) = self.facts.block_bytes else { return };
        let huge_pages = block_bytes / self.facts.size.bytes();
        loop {
            let blocks = self.held.count(|held| matches!(held.unit, Unit::Block(_)));
            let at_most = if self.self_test == SelfTest::Passed { self.policy.max_blocks } else { 1 };
            let (room, in_flight) = (self.room(block_bytes), self.fits_in_flight(huge_pages));
            // A block larger than what may be in flight never fits, and one that will not come online frees no place.
            let stuck = (blocks == 0 && !(room && in_flight)) || self.retry_online.len() >= at_most;
            let Some(pass) = &mut self.pass else { return };
            if !self.facts.offline.is_usable() || stuck {
                pass.blocks.clear();
            }
            if blocks >= at_most || !room || !in_flight {
                return;
            }
            let Some(block) = pass.blocks.pop_front() else { return };
            self.held.isolate(Unit::Block(block), huge_pages);
            self.actions.push(Action::Offline(block));
        }
    }

    fn claim_next(&mut self) {
        let slice = self.policy.claim_slice;
        let claiming = self.held.count(|held| matches!((held.unit, held.step), (Unit::Batch(_), Step::Isolating)));
        let in_flight = self.held.count(|held| matches!(held.step, Step::Reported { .. }));
        let room = self.room(u64::from(slice) * self.facts.size.bytes());
        let fits = self.fits_in_flight(u64::from(slice));
        let Some(pass) = &mut self.pass else { return };
        if pass.claims == Claims::Over {
            return;
        }
        let wanted_bytes = pass.wanted.len() as u64 * self.facts.size.bytes();
        let never_fits = !fits && in_flight == 0 && claiming == 0;
        if !self.facts.claims.is_usable() || wanted_bytes < self.policy.min_reclaim_bytes || !room || never_fits {
            pass.claims = Claims::Over;
            return;
        }
        if claiming > 0 || in_flight >= self.policy.max_slices_in_flight || !fits {
            return;
        }
        let batch = BatchId(self.next_batch);
        self.next_batch += 1;
        self.held.isolate(Unit::Batch(batch), u64::from(slice));
        self.actions.push(Action::Claim(batch, slice));
    }

    /// Whether the workload keeps its floor when so many more bytes are isolated. What is on its way out is not missing
    /// from free memory yet.
    fn room(&self, bytes: u64) -> bool {
        let isolating = self.held.iter().filter(|held| matches!(held.step, Step::Isolating));
        let huge_pages: u64 = isolating.map(|held| held.huge_pages).sum();
        let wanted = bytes.saturating_add(huge_pages.saturating_mul(self.facts.size.bytes()));
        self.free_bytes.saturating_sub(wanted) >= self.policy.floor_bytes
    }

    fn fits_in_flight(&self, huge_pages: u64) -> bool {
        let isolating = self.held.count(|held| matches!(held.step, Step::Isolating)) as u64;
        self.session.as_ref().is_some_and(|session| {
            self.held.huge_pages_in_flight() + huge_pages * (1 + isolating)
                <= u64::from(session.welcome.limits.max_huge_pages_in_flight)
        })
    }

    pub(super) fn offlined(&mut self, block: BlockNumber, result: OfflineResult, now: Duration) {
        let unit = Unit::Block(block);
        match result {
            OfflineResult::Isolated => {}
            OfflineResult::InUse => {
                self.held.remove(unit);
                self.refused_blocks.insert(block, now + BLOCK_PAUSE);
                return;
            }
            OfflineResult::Refused => {
                self.held.remove(unit);
                self.refused_blocks.insert(block, now + BLOCK_PAUSE);
                // The guest is busy enough to take pages under the agent's eyes: claims do the rest, and each refusal
                // may have cost a page dump in the guest's log.
                self.offline_rest.begin(now);
                if let Some(pass) = &mut self.pass {
                    pass.blocks.clear();
                }
                return;
            }
            OfflineResult::Failed(why) => {
                self.held.remove(unit);
                return self.switch_off_offlining(why);
            }
        }
        self.isolated(unit, Vec::new());
        self.offline_rest.succeeded();
        self.totals.huge_pages_offlined += self.facts.block_bytes.unwrap_or(0) / self.facts.size.bytes();
        match self.self_test {
            SelfTest::Open => self.self_test = SelfTest::Running(block, Some(now + self.policy.self_test)),
            SelfTest::Running(..) => {}
            SelfTest::Passed => return self.report_block(block, now),
        }
        if self.pass.is_none() {
            // The pass was called off meanwhile.
            self.self_test = SelfTest::Open;
            self.return_unit(unit);
        }
    }

    pub(super) fn block_checked(&mut self, block: BlockNumber, offline: bool, now: Duration) {
        if !matches!(self.self_test, SelfTest::Running(tested, _) if tested == block) {
            return;
        }
        if offline {
            self.self_test = SelfTest::Passed;
            self.report_block(block, now);
        } else {
            // Also when its state could not be read: it must not stay offline with nobody to remember it.
            self.return_unit(Unit::Block(block));
            self.self_test = SelfTest::Open;
            self.switch_off_offlining(
                "self-test: a block taken offline was brought back by somebody else; look for udev rules that write \
                 to /sys/devices/system/memory/*/state"
                    .to_owned(),
            );
        }
    }

    fn report_block(&mut self, block: BlockNumber, now: Duration) {
        let unit = Unit::Block(block);
        let (Some(block_bytes), true) = (self.facts.block_bytes, self.pass.is_some() && self.may_isolate()) else {
            return self.return_unit(unit);
        };
        let Some(start) = block.0.checked_mul(block_bytes).map(GuestAddress) else { return self.return_unit(unit) };
        let count = u32::try_from(block_bytes / self.facts.size.bytes()).unwrap_or(u32::MAX);
        if let Some(pass) = &mut self.pass {
            let inside: Vec<GuestAddress> =
                pass.wanted.range(start..GuestAddress(start.0 + block_bytes)).copied().collect();
            for page in &inside {
                pass.wanted.remove(page);
            }
            pass.fruitful_blocks += 1;
            pass.useful += inside.len() as u64;
        }
        let range = ReportedRange { range: HugePageRange { start, count }, isolation: Isolation::Offlined };
        self.send_report(unit, vec![range], now);
    }

    fn send_report(&mut self, unit: Unit, ranges: Vec<ReportedRange>, now: Duration) -> u64 {
        let sequence = self.sequence();
        let until = now + self.lease_over();
        if let Some(held) = self.held.get_mut(unit) {
            held.step = Step::Reported { sequence, until };
        }
        self.actions.push(Action::Send(Message::Report(Report { sequence, sent_at_ns: nanos(now), ranges })));
        sequence
    }

    pub(super) fn claimed(
        &mut self,
        batch: BatchId,
        pages: Vec<GuestAddress>,
        short: Option<ClaimShort>,
        now: Duration,
    ) {
        let unit = Unit::Batch(batch);
        self.isolated(unit, pages.clone());
        self.totals.huge_pages_claimed += pages.len() as u64;
        let failed = match &short {
            Some(ClaimShort::Failed(why)) => Some(why.clone()),
            _ => None,
        };
        if let Some(why) = failed {
            self.switch_off_claims(why);
        }
        if self.proof_claimed(batch, &pages, now) {
            return;
        }
        let nonce = self.session.as_ref().map(|session| session.welcome.session_nonce);
        let may_report = self.may_report_claims();
        let (Some(pass), Some(nonce), true, false) = (&mut self.pass, nonce, may_report, pages.is_empty()) else {
            if let Some(pass) = &mut self.pass {
                pass.claims = Claims::Over;
            }
            return self.return_unit(unit);
        };
        let met = pages.iter().filter(|page| pass.wanted.remove(page)).count() as u64;
        pass.useful += met;
        pass.misses += pages.len() as u64 - met;
        // Whatever was met is reported: claiming has backed it.
        if short.is_some() || pass.misses >= pass.max_misses {
            pass.claims = Claims::Over;
        }
        // `send_report` takes this very sequence.
        let cookies = cookies(nonce, self.next_sequence, &pages);
        self.actions.push(Action::WriteCookies(batch, cookies));
        let ranges = runs(pages, self.facts.size)
            .into_iter()
            .map(|range| ReportedRange { range, isolation: Isolation::Claimed })
            .collect();
        self.send_report(unit, ranges, now);
    }

    fn may_report_claims(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.gates.is_empty() && session.ponged)
    }

    pub(super) fn pass_answered(&mut self, dropped: u64, refused: u64, last_refusal: Option<Refusal>) {
        if let Some(pass) = &mut self.pass {
            pass.dropped += dropped;
            pass.refused += refused;
            pass.last_refusal = last_refusal.or(pass.last_refusal);
        }
    }

    pub(super) fn end_pass(&mut self, outcome: PassOutcome, now: Duration) {
        let Some(pass) = self.pass.take() else { return };
        self.totals.passes += 1;
        // Whoever still waits for this pass does so because it did not get to its end.
        self.demand_served(PassOutcome::Pressed);
        self.pace.passed(outcome, now);
        let Pass { dropped, refused, last_refusal, .. } = pass;
        self.actions.push(Action::Note(Note::Passed { outcome, dropped, refused, last_refusal }));
    }
}
