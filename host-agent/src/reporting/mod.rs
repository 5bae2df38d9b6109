//! Free page reporting by the guest's kernel: what a report is, how it is read from a virtqueue, and who drops it.
//!
//! The guest's kernel isolates free pages (`mm/page_reporting.c`), puts them as buffers on the balloon's reporting queue
//! (`virtballoon_free_page_report` in `drivers/virtio/virtio_balloon.c`) and waits, without a time limit, until the
//! device has returned them. So the ranges below belong to nobody from the moment the buffers are seen until they are
//! returned, and [`Discard::discard`] is the whole of that time: it returns only when nothing of it is under way.
//!
//! # For authors of a VMM
//! [`ReportingQueue`] is the device's side of the queue and [`LocalMemory`] the [`Discard`] for memory that the VMM has
//! mapped itself. Whenever the guest rings the queue's doorbell, and once after the queue has been activated:
//!
//! ```no_run
//! # use fpr_host_agent::reporting::{LocalMemory, ReportingQueue, Source};
//! # use virtio_queue::{Queue, QueueT};
//! # use vm_memory::GuestMemoryMmap;
//! # fn raise_the_queues_interrupt() {}
//! # fn set_device_needs_reset() {}
//! # fn device(memory: &GuestMemoryMmap, queue: &mut Queue) -> Result<(), Box<dyn std::error::Error>> {
//! let mut discard = LocalMemory::new(memory)?;
//! let mut reporting = ReportingQueue::new(Source::Reported);
//! loop {
//!     let processed = reporting.process(memory, queue, &mut discard);
//!     if processed.chains_returned > 0 {
//!         raise_the_queues_interrupt();
//!     }
//!     if processed.fault.is_some() {
//!         set_device_needs_reset();
//!         break;
//!     }
//!     if !processed.more {
//!         break;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Offer VIRTIO_BALLOON_F_REPORTING (bit 5) **and** VIRTIO_BALLOON_F_PAGE_POISON (bit 4): without the latter Linux does
//! not report at all when it poisons pages or runs with `init_on_free`. When the driver writes anything but 0 to
//! `poison_val`, close [`fpr_protocol::Gate::PagePoison`] in [`LocalMemory::gates`]. `examples/in_process_reporting.rs`
//! is a whole program to start from.
//!
//! # What is trusted
//! The guest with nothing: whatever it puts on the queue, no chain takes unbounded time or memory, nothing outside its
//! own memory is touched, and every chain is returned.

mod chain;
mod counters;
mod gates;
mod local;
mod queue;

pub use chain::{MAX_RANGES, PFN_BYTES};
pub use counters::{QueueCounters, Refused};
pub use gates::Gates;
pub use local::{LocalError, LocalMemory};
pub use queue::{MAX_CHAINS_PER_CALL, Processed, QueueFault, ReportingQueue};

use fpr_protocol::{GuestAddress, Refusal};

/// Bytes of guest-physical memory as a guest named them: unchecked, of any size and alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestRange {
    /// First byte.
    pub start: GuestAddress,
    /// Number of bytes.
    pub bytes: u64,
}

/// How a guest gave memory away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The reporting queue: free pages, the guest takes them back whenever it likes.
    Reported,
    /// The balloon's inflate queue: pages that the guest's balloon driver holds.
    Inflated,
}

/// Whoever decides about reported memory and drops it.
pub trait Discard {
    /// Drops what may be dropped of `ranges`, and returns when nothing of it is under way any more: one result per range
    /// in order, the bytes dropped (rounded inward to pages of the backing) or why none of it was.
    fn discard(&mut self, source: Source, ranges: &[GuestRange]) -> Vec<Result<u64, Refusal>>;
}
