//! The device's side of a queue on which a guest gives memory away.
//!
//! Called by a device whenever the driver has rung the doorbell. Pops chains, has a [`Discard`] drop what they name and
//! returns every one of them, always, after its drop. Owns no thread, no descriptor and no memory.

use super::chain;
use super::{Discard, GuestRange, QueueCounters, Source};
use fpr_protocol::Refusal;
use std::sync::atomic::Ordering;
use virtio_queue::QueueT;
use vm_memory::GuestMemory;

/// Most chains of one call of [`ReportingQueue::process`], so that its caller sees stop orders and raises the interrupt
/// in time. Linux never has more than one report in flight (`page_reporting_cycle` in `mm/page_reporting.c`).
pub const MAX_CHAINS_PER_CALL: u16 = 16;

/// What one call did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "the driver waits for its interrupt"]
pub struct Processed {
    /// Chains returned to the driver. If there are any, it must be notified.
    pub chains_returned: u16,
    /// The call's bound was reached and more chains may be waiting: call again.
    pub more: bool,
    /// The queue cannot be used any more. What was returned before stays returned.
    pub fault: Option<QueueFault>,
}

/// Why a queue cannot be used: the guest's driver has broken it. A device stops serving it until it is reset (and sets
/// DEVICE_NEEDS_RESET where it can, virtio 1.2, 2.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum QueueFault {
    /// Not activated, or its rings or descriptor table are not in guest memory.
    #[error("the queue is not ready or its rings are not in guest memory: the driver must set it up again")]
    NotUsable,
    /// The driver claims to have made more chains available than the queue has entries.
    #[error("available index {index} is more than {size} ahead of {next}: the driver must reset the device")]
    AvailIndex {
        /// Index of the available ring, as the driver wrote it.
        index: u16,
        /// The next entry the device would take.
        next: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A chain that begins at no descriptor; there is nothing that could be returned.
    #[error("chain head {head} in a queue of {size}: the driver must reset the device")]
    Head {
        /// Index of the descriptor.
        head: u16,
        /// Entries of the queue.
        size: u16,
    },
}

impl QueueFault {
    /// Stable name for metrics, status and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotUsable => "queue_not_usable",
            Self::AvailIndex { .. } => "bad_avail_index",
            Self::Head { .. } => "bad_chain_head",
        }
    }
}

/// A queue on which a guest gives memory away, and what was counted on it.
#[derive(Debug)]
pub struct ReportingQueue {
    source: Source,
    counters: QueueCounters,
    /// Kept for its capacity.
    ranges: Vec<GuestRange>,
}

impl ReportingQueue {
    /// How the chains are read follows from `source`.
    #[must_use]
    pub fn new(source: Source) -> Self {
        Self { source, counters: QueueCounters::default(), ranges: Vec::new() }
    }

    /// What was counted since the queue was made; resets of the device do not clear it.
    #[must_use]
    pub fn counters(&self) -> &QueueCounters {
        &self.counters
    }

    /// Takes at most [`MAX_CHAINS_PER_CALL`] chains off `queue`, has `discard` drop what they name, and returns each of
    /// them with a used length of 0 once its drop is over. Blocks as long as `discard` does.
    ///
    /// `memory` is where the queue lives; what may be dropped is up to `discard`.
    pub fn process<M: GuestMemory>(
        &mut self,
        memory: &M,
        queue: &mut impl QueueT,
        discard: &mut (impl Discard + ?Sized),
    ) -> Processed {
        let mut processed = Processed::default();
        loop {
            if processed.chains_returned == MAX_CHAINS_PER_CALL {
                return match available(memory, queue) {
                    Ok(waiting) => Processed { more: waiting > 0, ..processed },
                    Err(fault) => Processed { fault: Some(fault), ..processed },
                };
            }
            match self.process_one(memory, queue, discard) {
                Ok(true) => processed.chains_returned += 1,
                Ok(false) => return processed,
                Err(fault) => return Processed { fault: Some(fault), ..processed },
            }
        }
    }

    fn process_one<M: GuestMemory>(
        &mut self,
        memory: &M,
        queue: &mut impl QueueT,
        discard: &mut (impl Discard + ?Sized),
    ) -> Result<bool, QueueFault> {
        let Some(head) = self.take(memory, queue)? else { return Ok(false) };
        let ranges = self.ranges();
        let results = if ranges.is_empty() { Vec::new() } else { discard.discard(self.source, ranges) };
        self.give_back(memory, queue, head, results)?;
        Ok(true)
    }

    /// Takes one chain off `queue` and reads it; `None` if none waits. For a device that must not hold the queue while it
    /// waits for a drop: what [`ranges`](Self::ranges) says belongs to nobody until [`give_back`](Self::give_back).
    ///
    /// # Errors
    /// See [`QueueFault`]; nothing has to be given back then.
    pub fn take<M: GuestMemory>(&mut self, memory: &M, queue: &mut impl QueueT) -> Result<Option<u16>, QueueFault> {
        // Also rules out that a chain is taken which could not be returned.
        if !queue.is_valid(memory) {
            return Err(QueueFault::NotUsable);
        }
        if available(memory, queue)? == 0 {
            return Ok(None);
        }
        // None only if the index has changed since it was looked at, for the worse.
        let chain = queue.pop_descriptor_chain(memory).ok_or(QueueFault::NotUsable)?;
        let head = chain.head_index();
        if head >= queue.size() {
            return Err(QueueFault::Head { head, size: queue.size() });
        }
        chain::read(self.source, chain, &mut self.ranges, &mut self.counters);
        Ok(Some(head))
    }

    /// What the chain that was taken last names.
    #[must_use]
    pub fn ranges(&self) -> &[GuestRange] {
        &self.ranges
    }

    /// Returns the chain that was taken last. `results` are in order of its [`ranges`](Self::ranges); one that is missing
    /// says that nothing was dropped.
    ///
    /// # Errors
    /// If the used ring is not in `memory` any more.
    pub fn give_back<M: GuestMemory>(
        &mut self,
        memory: &M,
        queue: &mut impl QueueT,
        head: u16,
        results: Vec<Result<u64, Refusal>>,
    ) -> Result<(), QueueFault> {
        let results = results.into_iter().chain(std::iter::repeat(Err(Refusal::Cancelled)));
        for (range, result) in self.ranges.iter().zip(results) {
            self.counters.result(range.bytes, result);
        }
        self.counters.chains += 1;
        queue.add_used(memory, head, 0).map_err(|_| QueueFault::NotUsable)
    }
}

/// How many chains wait.
fn available<M: GuestMemory>(memory: &M, queue: &impl QueueT) -> Result<u16, QueueFault> {
    let index = queue.avail_idx(memory, Ordering::Acquire).map_err(|_| QueueFault::NotUsable)?.0;
    let (next, size) = (queue.next_avail(), queue.size());
    let available = index.wrapping_sub(next);
    if available > size { Err(QueueFault::AvailIndex { index, next, size }) } else { Ok(available) }
}
