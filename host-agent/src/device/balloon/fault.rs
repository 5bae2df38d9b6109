//! What a guest can do wrong on its balloon device, by name.
//!
//! Every fault is counted, logged at a limited rate and hurts nothing but the guest's own device. What is wrong inside a
//! chain of memory is counted where it is read ([`crate::reporting::QueueCounters`]).

use crate::device::fault::faults;
use crate::reporting::QueueFault;

faults! {
    /// Why something the guest did on its balloon device was refused.
    pub enum Fault {
        /// A ring or a descriptor table that is not in the guest's memory.
        QueueNotUsable => "queue_not_usable",
        /// More chains made available than the queue has entries.
        BadAvailIndex => "bad_avail_index",
        /// A chain that begins at no descriptor of the queue.
        BadChainHead => "bad_chain_head",
        /// A front end that set an available index whose chain was returned before; serving goes on behind it.
        ReturnedBefore => "returned_before",
        /// A chain on a queue that does not exist under the negotiated features.
        UnusedQueue => "unused_queue",
        /// Statistics that are no readable list of whole `struct virtio_balloon_stat`.
        BadStatistics => "bad_statistics",
        /// A write that would change a word of the configuration space that the driver may only read.
        ConfigReadOnly => "config_read_only",
        /// A write behind the end of the configuration space.
        ConfigOutOfRange => "config_out_of_range",
    }
}

impl From<QueueFault> for Fault {
    fn from(fault: QueueFault) -> Self {
        match fault {
            QueueFault::NotUsable => Self::QueueNotUsable,
            QueueFault::AvailIndex { .. } => Self::BadAvailIndex,
            QueueFault::Head { .. } => Self::BadChainHead,
        }
    }
}
