//! Named reasons: why nothing is dropped, why a range was refused, why a connection ended.
//!
//! A name is the same word on the wire's documentation, in `status`, in metrics and in logs.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Declares a reason enum with one spelling per variant.
macro_rules! reasons {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize)]
        $vis enum $name { $($(#[$doc])* #[serde(rename = $word)] $variant,)* }

        impl $name {
            /// All of them, in wire order.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The word operators read.
            #[must_use]
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }
    };
}

reasons! {
    /// Why nothing of a VM is dropped at the moment.
    pub enum Gate {
        /// The VMM holds VFIO, iommufd or vDPA descriptors, a KVM VFIO device or pinned pages: a device may do DMA
        /// to the dropped page's old frame.
        AssignedDevice = "assigned-device",
        /// Guest memory is locked (`VmLck`): the drop would be refused or undone.
        MemoryLocked = "memory-locked",
        /// Private, read-only or otherwise unpunchable mapping, or its pages are larger than the guest's huge pages.
        BackingUnsuitable = "backing-unsuitable",
        /// The guest fills freed pages with a pattern and checks it later: a dropped page would read zero.
        PagePoison = "page-poison",
        /// The guest writes to pages when it frees them: dropped memory is back at once.
        WriteOnFree = "write-on-free",
        /// Postcopy migration is running.
        MigrationPostcopy = "migration-postcopy",
        /// A snapshot is being taken.
        Snapshot = "snapshot",
        /// SEV, SEV-SNP or TDX guest: the host cannot drop encrypted memory this way.
        ConfidentialGuest = "confidential-guest",
        /// Drops succeed, but the backing does not shrink.
        Ineffective = "ineffective",
        /// An operator said so.
        Operator = "operator",
        /// The host cannot look into the VMM's process, so it cannot rule out an assigned device.
        Uninspectable = "uninspectable",
    }
}

reasons! {
    /// Why the host did not drop one reported range.
    pub enum Refusal {
        /// A gate is closed; `Inhibit` says which.
        Gated = "gated",
        /// The start is not aligned to the huge page size.
        Unaligned = "unaligned",
        /// No huge pages in it.
        Empty = "empty",
        /// It runs past the end of the address space.
        Overflow = "overflow",
        /// Not in the guest's memory.
        OutsideMemory = "outside-memory",
        /// It begins in one memory region and ends in another.
        CrossesRegions = "crosses-regions",
        /// It shares a huge page with an earlier range of the same report.
        Overlapping = "overlapping",
        /// Its memory region has not passed the address check of this session.
        AddressUnproven = "address-unproven",
        /// A huge page does not start with the cookie it should.
        CookieMismatch = "cookie-mismatch",
        /// The report was older than the lease when it came.
        LeaseExpired = "lease-expired",
        /// The report bears a time that is still to come.
        FromFuture = "from-future",
        /// The host has no estimate of the guest's clock yet.
        ClockUnknown = "clock-unknown",
        /// More memory is in flight than the limit in `Welcome`.
        TooMuchInFlight = "too-much-in-flight",
        /// The system call failed.
        DropFailed = "drop-failed",
        /// The session ended before the drop; seen in counters only, nobody is there to answer.
        Cancelled = "cancelled",
        /// A buffer on a virtqueue of the wrong direction: reported memory must be device-writable, a list of page frame
        /// numbers device-readable. Seen in counters only, a virtqueue has no answer.
        WrongDirection = "wrong-direction",
        /// More ranges in one chain of a virtqueue than the host takes. Seen in counters only.
        TooManyRanges = "too-many-ranges",
        /// A ring of one of the VM's own devices lies in it: the guest uses it, whatever it says.
        DeviceRing = "device-ring",
    }
}

reasons! {
    /// How a pass that the host asked for ended, as the guest says.
    pub enum PassEnd {
        /// Memory was reported and dropped.
        GaveBack = "gave-back",
        /// Nothing free was backed, or too little of it could be isolated.
        FoundNothing = "found-nothing",
        /// The host refused what was reported.
        Refused = "refused",
        /// The workload needed the memory, a gate closed, or the agent is stopping: the pass ended early.
        CutShort = "cut-short",
        /// A gate is closed, or the agent has no way to isolate memory in this guest.
        CannotIsolate = "cannot-isolate",
    }
}

reasons! {
    /// Why a peer ends the connection.
    pub enum CloseReason {
        /// The agent or the daemon is being stopped.
        Shutdown = "shutdown",
        /// No common protocol version.
        UnsupportedVersion = "unsupported-version",
        /// Bytes that are no frame: wrong magic, oversized, truncated or trailing bytes.
        MalformedFrame = "malformed-frame",
        /// A message that this peer must not send, or not now.
        UnexpectedMessage = "unexpected-message",
        /// A value out of bounds.
        InvalidValue = "invalid-value",
        /// Another session of this VM is alive.
        SecondSession = "second-session",
        /// The guest's memory map changed; say `Hello` again.
        MemoryMapChanged = "memory-map-changed",
        /// No answer to `Ping`.
        PingTimeout = "ping-timeout",
        /// The peer does not read.
        SlowReader = "slow-reader",
        /// Nothing arrived in the time allowed for `Hello`.
        HelloTimeout = "hello-timeout",
        /// More messages than the rate limit allows.
        Flood = "flood",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn words_are_unique_kebab_case() {
        let words: Vec<&str> = Gate::ALL
            .iter()
            .map(|r| r.word())
            .chain(Refusal::ALL.iter().map(|r| r.word()))
            .chain(PassEnd::ALL.iter().map(|r| r.word()))
            .chain(CloseReason::ALL.iter().map(|r| r.word()))
            .collect();
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), words.len());
        for word in words {
            assert!(word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{word}");
        }
    }
}
