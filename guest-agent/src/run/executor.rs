//! Does what the state machine says to the guest's kernel: looking, isolating, returning.
//!
//! Looking and cookies happen at once; offlining and claiming go to a worker each, so that both can go on while the
//! main loop listens. Answers come back as events.

use crate::agent::held::BatchId;
use crate::agent::{Action, ClaimShort, Event, OfflineResult, OnlineResult};
use crate::isolate::claim::{Batch, ClaimError, HugePageClaims};
use crate::isolate::journal::Journal;
use crate::isolate::offline::{self, BlockState, OfflineOutcome};
use crate::isolate::worker::{Command, Completion, Worker};
use crate::kernel::buddyinfo::BuddyInfoReader;
use crate::kernel::kpageflags::{Depth, PageFlags, Survey};
use crate::kernel::memory_blocks::BlockNumber;
use crate::kernel::vmstat::VmEventsReader;
use crate::kernel::zoneinfo::ZoneInfoReader;
use crate::kernel::{PfnRange, ReadError, Roots};
use crate::run::block_check::{BlockCheck, Looked};
use crate::run::facts::Guest;
use crate::run::log;
use fpr_protocol::{Cookie, HugePageSize};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Free huge pages that must remain beside a claim: with fewer the kernel might compact memory to serve the next one.
const CLAIM_RESERVE: u64 = 8;

/// Why the executor cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// A kernel file.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// No thread, eventfd or timer.
    #[error("cannot start the isolation workers")]
    Worker(#[source] io::Error),
}

/// Executor of one running agent.
pub struct Executor {
    size: HugePageSize,
    /// Where free memory can be.
    ranges: Vec<PfnRange>,
    flags: PageFlags,
    survey: Survey,
    /// For the block worker's check.
    looked: Arc<Looked>,
    events: VmEventsReader,
    buddy: BuddyInfoReader,
    blocks: offline::MemoryBlocks,
    offline_limit: Duration,
    block_worker: Worker,
    claim_worker: Worker,
    /// Batches asked for, in order: the worker answers in that order.
    claiming: VecDeque<(BatchId, u32)>,
    batches: BTreeMap<BatchId, Batch>,
    recovery: Option<HugePageClaims>,
}

impl Executor {
    /// Opens the kernel's files and starts the workers.
    ///
    /// # Errors
    /// See [`ExecutorError`].
    pub fn new(roots: &Roots, guest: Guest, journal: &Journal, offline_limit: Duration) -> Result<Self, ExecutorError> {
        let size = guest.facts.size;
        let ranges = match &guest.blocks {
            // Offline ones as well: what a dead agent left comes back later, and until then its frames have no page.
            Some(blocks) => blocks.blocks().iter().map(|block| blocks.pfns(block.number, size.page_bytes())).collect(),
            None => ZoneInfoReader::open(roots)?.read()?.iter().map(|zone| zone.span.clone()).collect(),
        };
        let blocks = offline::MemoryBlocks::new(&roots.sys, journal.clone());
        let claims = || HugePageClaims::new(guest.huge_pages.clone(), journal.clone());
        let looked = Arc::new(Looked::default());
        let mut check = BlockCheck::new(roots, &guest, Arc::clone(&looked))?;
        let is_free = move |block| check.is_free(block);
        Ok(Self {
            size,
            ranges,
            flags: PageFlags::open(roots, size)?,
            survey: Survey::new(size),
            looked: Arc::clone(&looked),
            events: VmEventsReader::open(roots)?,
            buddy: BuddyInfoReader::open(roots)?,
            offline_limit,
            block_worker: Worker::spawn_checked("fpr-blocks", blocks.clone(), claims(), is_free)
                .map_err(ExecutorError::Worker)?,
            claim_worker: Worker::spawn("fpr-claims", blocks.clone(), claims()).map_err(ExecutorError::Worker)?,
            claiming: VecDeque::new(),
            batches: BTreeMap::new(),
            recovery: Some(claims()),
            blocks,
        })
    }

    /// Readable when [`Executor::completed`] has something.
    #[must_use]
    pub fn wake_fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.block_worker.wake_fd(), self.claim_worker.wake_fd()]
    }

    /// Does one action that is about the kernel; an answer that is there at once comes back.
    pub fn execute(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Look => return Some(Event::Looked(self.look())),
            Action::Offline(block) => return self.offline(block),
            Action::CheckBlock(block) => return Some(Event::BlockChecked(block, self.is_offline(block))),
            Action::Online(block) => return self.online(block),
            Action::Claim(batch, count) => return self.claim(batch, count),
            Action::WriteCookies(batch, cookies) => self.write_cookies(batch, &cookies),
            Action::Release(batch) => self.release(batch),
            Action::Recover => self.recover(),
            // Not about the kernel; the main loop keeps these.
            Action::Send(_) | Action::Disconnect(_) | Action::Note(_) => {}
        }
        None
    }

    /// What the workers have done.
    pub fn completed(&mut self) -> Vec<Event> {
        let mut completions = self.block_worker.completions();
        completions.extend(self.claim_worker.completions());
        completions.into_iter().filter_map(|completion| self.event_of(completion)).collect()
    }

    /// The workload needs the memory: whatever is being isolated ends as soon as the kernel lets go.
    pub fn cut_short(&self) {
        for worker in [&self.block_worker, &self.claim_worker] {
            if let Err(error) = worker.cancel() {
                log::warn(&format!("cannot interrupt isolation: {error}"));
            }
        }
    }

    /// Lowers the hugetlb limit to what is held.
    pub fn settle(&mut self) {
        if let Err(error) = self.claim_worker.submit(Command::SettleClaims) {
            log::warn(&format!("isolation worker: {error}"));
        }
    }

    /// Ends the workers and restores what the agent changed, as far as nothing is held.
    pub fn finish(self) {
        drop(self.block_worker);
        let (claims, _) = self.claim_worker.finish();
        if let Some(Err(error)) = claims.map(HugePageClaims::close) {
            log::warn(&crate::error_chain(&error));
        }
    }

    fn look(&mut self) -> Vec<fpr_protocol::GuestAddress> {
        match self.flags.survey(self.ranges.iter().cloned(), Depth::Probed, &mut self.survey) {
            Ok(()) => {
                let counted = self.buddy.free_huge_pages(self.size.order());
                let exact = counted.is_ok_and(|counted| counted == self.survey.free_count());
                let allocated = self.events.read().ok().filter(|_| exact).map(|events| events.pgalloc);
                self.looked.set(allocated);
                self.survey.free().collect()
            }
            Err(error) => {
                log::warn(&crate::error_chain(&error));
                Vec::new()
            }
        }
    }

    fn offline(&mut self, block: BlockNumber) -> Option<Event> {
        let command = Command::Offline { block, limit: self.offline_limit };
        let failed = self.block_worker.submit(command).err()?;
        Some(Event::Offline(block, OfflineResult::Failed(format!("isolation worker: {failed}"))))
    }

    fn is_offline(&self, block: BlockNumber) -> bool {
        matches!(self.blocks.state(block), Ok(BlockState::Offline))
    }

    fn online(&mut self, block: BlockNumber) -> Option<Event> {
        // A block whose state cannot be read is tried all the same, and tried again while that fails.
        if matches!(self.blocks.state(block), Ok(BlockState::Online)) {
            // Forgets the journal's entry.
            if let Err(error) = self.blocks.online(block) {
                log::warn(&crate::error_chain(&error));
            }
            return Some(Event::Online(block, OnlineResult::StolenOnline));
        }
        let failed = self.block_worker.submit(Command::Online { block }).err()?;
        Some(Event::Online(block, OnlineResult::Failed(format!("isolation worker: {failed}"))))
    }

    fn claim(&mut self, batch: BatchId, count: u32) -> Option<Event> {
        let free = self.buddy.free_huge_pages(self.size.order()).unwrap_or(0);
        if free < u64::from(count) + CLAIM_RESERVE {
            return Some(Event::Claimed(batch, Vec::new(), Some(ClaimShort::Exhausted)));
        }
        match self.claim_worker.submit(Command::Claim { pages: count }) {
            Ok(()) => {
                self.claiming.push_back((batch, count));
                None
            }
            Err(error) => {
                let why = ClaimShort::Failed(format!("isolation worker: {error}"));
                Some(Event::Claimed(batch, Vec::new(), Some(why)))
            }
        }
    }

    fn event_of(&mut self, completion: Completion) -> Option<Event> {
        match completion {
            Completion::Offline { block, outcome, .. } => {
                let result = match outcome {
                    OfflineOutcome::Offlined => OfflineResult::Isolated,
                    OfflineOutcome::Busy => OfflineResult::Refused,
                    OfflineOutcome::Interrupted
                    | OfflineOutcome::InUse
                    | OfflineOutcome::AlreadyOffline
                    | OfflineOutcome::NotThere => OfflineResult::InUse,
                    OfflineOutcome::StolenOnline => OfflineResult::Failed(
                        "a block taken offline was online again at once: look for udev rules that write to \
                         /sys/devices/system/memory/*/state"
                            .to_owned(),
                    ),
                    OfflineOutcome::Failed(error) => {
                        // This block will not do; others may.
                        log::info(&crate::error_chain(&error));
                        OfflineResult::InUse
                    }
                };
                Some(Event::Offline(block, result))
            }
            Completion::Online { block, result, .. } => {
                let result = match result {
                    Ok(()) => OnlineResult::Online,
                    Err(error) => {
                        log::warn(&crate::error_chain(&error));
                        OnlineResult::Failed(error.to_string())
                    }
                };
                Some(Event::Online(block, result))
            }
            Completion::Claim { result, .. } => {
                let (id, wanted) = self.claiming.pop_front()?;
                Some(self.claimed(id, wanted, result))
            }
            Completion::SettleClaims { result } => {
                if let Err(error) = result {
                    log::warn(&crate::error_chain(&error));
                }
                None
            }
        }
    }

    fn claimed(&mut self, id: BatchId, wanted: u32, result: Result<Batch, ClaimError>) -> Event {
        match result {
            Ok(batch) => {
                let mut pages = batch.pages().to_vec();
                pages.sort_unstable();
                let short = (pages.len() < wanted as usize).then_some(ClaimShort::Exhausted);
                self.batches.insert(id, batch);
                Event::Claimed(id, pages, short)
            }
            Err(ClaimError::NoneFree | ClaimError::Cancelled) => {
                Event::Claimed(id, Vec::new(), Some(ClaimShort::Exhausted))
            }
            Err(error) => Event::Claimed(id, Vec::new(), Some(ClaimShort::Failed(crate::error_chain(&error)))),
        }
    }

    fn write_cookies(&mut self, id: BatchId, cookies: &[Cookie]) {
        let Some(batch) = self.batches.get_mut(&id) else { return };
        let by_address: BTreeMap<_, _> = cookies.iter().map(|cookie| (cookie.address, cookie)).collect();
        for number in 0..batch.pages().len() {
            let cookie = batch.pages().get(number).and_then(|address| by_address.get(address));
            // Without its cookie the host refuses the page; nothing else depends on it.
            if let Some(cookie) = cookie
                && let Err(error) = batch.write_cookie(number, &cookie.to_bytes())
            {
                log::warn(&crate::error_chain(&error));
            }
        }
    }

    fn release(&mut self, id: BatchId) {
        if let Some(Err(error)) = self.batches.remove(&id).map(Batch::release) {
            log::warn(&crate::error_chain(&error));
        }
    }

    fn recover(&mut self) {
        let Some(mut claims) = self.recovery.take() else { return };
        match self.blocks.recover() {
            Ok(recovered) => {
                let blocks = recovered.brought_online.len();
                log::info(&format!("{blocks} memory blocks of an earlier agent are online again"));
                for error in recovered.failed {
                    log::warn(&crate::error_chain(&error));
                    // Its failure reaches the state machine, which tries again for as long as it takes.
                    if let Err(failed) = self.block_worker.submit(Command::Online { block: error.block() }) {
                        log::warn(&format!("isolation worker: {failed}"));
                    }
                }
            }
            Err(error) => log::warn(&crate::error_chain(&error)),
        }
        match claims.recover() {
            Ok(recovered) => log::info(&format!("{} claims of an earlier agent are free again", recovered.files)),
            Err(error) => log::warn(&crate::error_chain(&error)),
        }
    }
}
