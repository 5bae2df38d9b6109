//! Where in guest memory the devices of a VM have their rings.
//!
//! The daemon reads and writes them through its own mapping. A guest that gives such memory away loses nothing that it
//! needs, and no other VM does, but the next touch has to allocate the page again: where the tmpfs or the pool of huge
//! pages is exhausted, that is a SIGBUS, and the end of a daemon that serves others. So a range with a ring in it is
//! refused, whoever names it and whichever of the VM's devices has the ring.
//!
//! A device says where its rings are before it serves the queue; a worker asks right before it drops, and a device waits
//! until drops that did not know of its ring are over ([`Rings::hold`]). So a drop either sees a ring or is over when the
//! queue is first served. A device that has stopped has no rings.
//!
//! Not covered: memory that has no page *before* it becomes a ring or a buffer, because it was never touched or was given
//! away earlier. Its first touch, by `vhost-user-backend` when the front end names the ring or by the device, allocates
//! it, with the same result where the host has none left; the host must not let its memory for guests run out
//! ([`crate::doctor`] looks at it).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use vhost_user_backend::{VringMutex, VringT};
use virtio_queue::QueueT;

use super::DeviceKind;

/// Guest-physical bytes of one split virtqueue: descriptor table, available ring, used ring.
pub(crate) type RingRanges = [Range<u64>; 3];

/// The rings of all devices of one VM.
#[derive(Debug, Default)]
pub struct Rings {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    rings: BTreeMap<(DeviceKind, usize), RingRanges>,
    /// Drops under way, in the order of their beginning.
    held: BTreeSet<u64>,
    next: u64,
}

impl Rings {
    /// Queue `queue` of the device uses these from now on. Waits for the drops that have begun without knowing of it, those
    /// of the VM's other device, too; their deadlines bound that. One that begins later knows of it.
    pub(crate) fn set(&self, device: DeviceKind, queue: usize, ranges: RingRanges) {
        let mut state = self.lock();
        state.rings.insert((device, queue), ranges);
        let next = state.next;
        while state.held.first().is_some_and(|held| *held < next) {
            state = self.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The device touches none any more. Waits for nothing: whoever stops a device has yet to cancel its drops.
    pub(crate) fn clear(&self, device: DeviceKind) {
        self.lock().rings.retain(|(of, _), _| *of != device);
    }

    /// While the value lives, no ring that it does not know of is used.
    pub(crate) fn hold(&self) -> HeldRings<'_> {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.held.insert(number);
        HeldRings { rings: self, number, ranges: state.rings.values().flatten().cloned().collect() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is whole whoever panicked after it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rings as they were when a drop began.
pub(crate) struct HeldRings<'a> {
    rings: &'a Rings,
    number: u64,
    ranges: Vec<Range<u64>>,
}

impl HeldRings<'_> {
    /// Whether a byte of a ring lies in these guest-physical bytes.
    pub(crate) fn lie_in(&self, guest: &Range<u64>) -> bool {
        self.ranges.iter().any(|ring| ring.start < guest.end && guest.start < ring.end)
    }
}

impl Drop for HeldRings<'_> {
    fn drop(&mut self) {
        self.rings.lock().held.remove(&self.number);
        self.rings.released.notify_all();
    }
}

/// One device's side: what it has said already.
#[derive(Debug)]
pub(super) struct OwnRings {
    device: DeviceKind,
    said: BTreeMap<usize, RingRanges>,
}

impl OwnRings {
    pub(super) fn new(device: DeviceKind) -> Self {
        Self { device, said: BTreeMap::new() }
    }

    /// Before a queue is served: says where its rings are, if that is news.
    pub(super) fn note(&mut self, rings: &Rings, queue: usize, vring: &VringMutex) {
        let ranges = ranges(vring.get_ref().get_queue());
        if self.said.get(&queue) != Some(&ranges) {
            rings.set(self.device, queue, ranges.clone());
            self.said.insert(queue, ranges);
        }
    }

    /// The device has stopped. A queue that goes on nevertheless is noted again.
    pub(super) fn clear(&mut self, rings: &Rings) {
        self.said.clear();
        rings.clear(self.device);
    }
}

/// Sizes of virtio 1.2, 2.7: 16 bytes per descriptor; flags, index and event index of 2 bytes each around the entries of
/// the available ring (2 bytes each) and the used ring (8 bytes each).
fn ranges(queue: &impl QueueT) -> RingRanges {
    let entries = u64::from(queue.size());
    let range = |start: u64, bytes: u64| start..start.saturating_add(bytes);
    [
        range(queue.desc_table(), 16 * entries),
        range(queue.avail_ring(), 6 + 2 * entries),
        range(queue.used_ring(), 6 + 8 * entries),
    ]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::{Arc, mpsc};
    use std::time::Duration;
    use virtio_queue::Queue;

    #[test]
    fn each_ring_of_each_device_counts_to_its_last_byte() {
        let mut queue = Queue::new(64).unwrap();
        queue.set_size(16);
        queue.set_desc_table_address(Some(0x1000), Some(0));
        queue.set_avail_ring_address(Some(0x2000), Some(1));
        queue.set_used_ring_address(Some(0x3000), Some(0));
        assert_eq!(ranges(&queue), [0x1000..0x1100, 0x1_0000_2000..0x1_0000_2026, 0x3000..0x3086]);

        let rings = Rings::default();
        rings.set(DeviceKind::Balloon, 2, ranges(&queue));
        rings.set(DeviceKind::Vsock, 0, [0x5000..0x5100, 0x5200..0x5226, 0x5300..0x5386]);
        for (guest, inside) in [
            (0..0x1000, false),
            (0..0x1001, true),
            (0x10ff..0x2000, true),
            (0x1100..0x3000, false),
            (0x1_0000_2025..0x1_0000_2026, true),
            (0x1_0000_2026..u64::MAX, false),
            (0x5385..0x5386, true),
        ] {
            assert_eq!(rings.hold().lie_in(&guest), inside, "{guest:#x?}");
        }
        rings.clear(DeviceKind::Vsock);
        assert!(!rings.hold().lie_in(&(0x5000..0x6000)) && rings.hold().lie_in(&(0..u64::MAX)));
    }

    #[test]
    fn a_ring_is_added_when_the_drop_under_way_is_over() {
        let rings = Arc::new(Rings::default());
        let held = rings.hold();
        let (sender, added) = mpsc::channel();
        let adding = std::thread::spawn({
            let rings = Arc::clone(&rings);
            move || {
                rings.set(DeviceKind::Balloon, 0, [0..1, 1..2, 2..3]);
                sender.send(()).unwrap();
            }
        });
        assert!(added.recv_timeout(Duration::from_millis(50)).is_err(), "added under a drop");
        assert!(!held.lie_in(&(0..3)));
        assert!(rings.hold().lie_in(&(0..3)), "a drop that begins later knows of it");
        rings.clear(DeviceKind::Vsock);
        drop(held);
        added.recv_timeout(Duration::from_secs(60)).unwrap();
        adding.join().unwrap();
        assert!(rings.hold().lie_in(&(0..3)));
    }
}
