//! Free page reporting inside a Rust VMM: a program to start from. `cargo run --example in_process_reporting`.
//!
//! A VMM has its guest's memory mapped (here 64 MiB, private and anonymous, as `GuestMemoryMmap` makes it) and a
//! virtio-balloon device with a reporting queue. The queue's index depends on the features that were negotiated, because
//! Linux numbers the queues densely: with nothing but VIRTIO_BALLOON_F_REPORTING it is queue 2, after inflate and
//! deflate; each of STATS_VQ and FREE_PAGE_HINT adds one before it.
//!
//! There is no guest in this program. `Driver` plays the part of its kernel: it fills memory, puts two free huge pages on
//! the queue and looks at what the device has returned.

use fpr_host_agent::reporting::{Gates, LocalMemory, ReportingQueue, Source};
use fpr_protocol::Gate;
use std::error::Error;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const HUGE: u64 = 2 << 20;
const GUEST_BYTES: u64 = 32 * HUGE;

/// The part of a balloon device that serves the reporting queue.
struct Device {
    memory: GuestMemoryMmap,
    queue: Queue,
    reporting: ReportingQueue,
    discard: LocalMemory,
    /// Set by any thread of the VMM that learns of a reason not to drop.
    gates: Gates,
}

impl Device {
    fn new(memory: GuestMemoryMmap, queue: Queue) -> Result<Self, Box<dyn Error>> {
        // Fails with the reason if the memory is of a kind that cannot be dropped.
        let discard = LocalMemory::new(&memory)?;
        let gates = discard.gates();
        Ok(Self { memory, queue, reporting: ReportingQueue::new(Source::Reported), discard, gates })
    }

    /// The driver has rung the queue's doorbell.
    fn doorbell(&mut self) -> Result<(), Box<dyn Error>> {
        loop {
            let processed = self.reporting.process(&self.memory, &mut self.queue, &mut self.discard);
            if processed.chains_returned > 0 {
                self.interrupt();
            }
            if let Some(fault) = processed.fault {
                // A VMM sets DEVICE_NEEDS_RESET and goes on; its guest has broken its own balloon.
                return Err(fault.into());
            }
            if !processed.more {
                return Ok(());
            }
        }
    }

    /// The driver has written `poison_val` (config space, little-endian, offset 12 of `struct virtio_balloon_config`).
    /// A VMM calls it with 0 at a device reset, and for a driver that has not negotiated PAGE_POISON.
    fn poison_val(&self, value: u32) {
        match value {
            // Also what a guest with `init_on_free` writes: dropped pages read zero, as it expects.
            0 => self.gates.open(Gate::PagePoison),
            pattern => self.gates.close(Gate::PagePoison, format!("poison_val is {pattern:#x}")),
        }
    }

    /// A VMM writes to the interrupt's eventfd here.
    fn interrupt(&self) {
        println!("interrupt: {} chains returned so far", self.reporting.counters().chains);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), usize::try_from(GUEST_BYTES)?)])?;
    let (mut driver, queue) = Driver::new(memory.clone())?;
    let mut device = Device::new(memory, queue)?;
    driver.fill()?;
    println!("guest memory costs {} MiB", device.discard.allocated_bytes()? >> 20);

    driver.report(&[8 * HUGE, 20 * HUGE])?;
    device.doorbell()?;
    println!("after a report of two huge pages: {} MiB", device.discard.allocated_bytes()? >> 20);

    // The VMM is about to map guest memory for an assigned device. Once `close` has returned, nothing is dropped.
    device.gates.close(Gate::AssignedDevice, "0000:01:00.0 is attached: detach it to resume");
    driver.report(&[24 * HUGE])?;
    device.doorbell()?;
    println!("with a device attached: {} MiB", device.discard.allocated_bytes()? >> 20);
    device.gates.open(Gate::AssignedDevice);

    // The guest poisons free pages.
    device.poison_val(0xaaaa_aaaa);
    driver.report(&[26 * HUGE])?;
    device.doorbell()?;
    println!("with page poisoning: {} MiB", device.discard.allocated_bytes()? >> 20);

    println!("{}", serde_json::to_string_pretty(device.reporting.counters())?);
    Ok(())
}

/// What `mm/page_reporting.c` and `virtballoon_free_page_report` do in the guest.
struct Driver {
    memory: GuestMemoryMmap,
    available: u16,
}

impl Driver {
    const TABLE: u32 = 0x1000;
    const AVAILABLE: u32 = 0x2000;
    const USED: u32 = 0x3000;
    const ENTRIES: u16 = 32;
    /// Flags of a descriptor (virtio 1.2, 2.7.5).
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;

    fn new(memory: GuestMemoryMmap) -> Result<(Self, Queue), Box<dyn Error>> {
        let mut queue = Queue::new(Self::ENTRIES)?;
        queue.set_desc_table_address(Some(Self::TABLE), None);
        queue.set_avail_ring_address(Some(Self::AVAILABLE), None);
        queue.set_used_ring_address(Some(Self::USED), None);
        queue.set_ready(true);
        Ok((Self { memory, available: 0 }, queue))
    }

    fn fill(&self) -> Result<(), Box<dyn Error>> {
        for page in 1..GUEST_BYTES / HUGE {
            self.memory.write_slice(&vec![0xff; usize::try_from(HUGE)?], GuestAddress(page * HUGE))?;
        }
        Ok(())
    }

    /// One chain of device-writable buffers.
    fn report(&mut self, pages: &[u64]) -> Result<(), Box<dyn Error>> {
        for (index, page) in (0u16..).zip(pages) {
            let last = usize::from(index) + 1 == pages.len();
            let flags = Self::WRITE | if last { 0 } else { Self::NEXT };
            let descriptor = RawDescriptor::from(Descriptor::new(*page, u32::try_from(HUGE)?, flags, index + 1));
            self.memory.write_obj(descriptor, GuestAddress(u64::from(Self::TABLE) + u64::from(index) * 16))?;
        }
        let slot = u64::from(self.available % Self::ENTRIES);
        self.memory.write_obj(0u16, GuestAddress(u64::from(Self::AVAILABLE) + 4 + slot * 2))?;
        self.available = self.available.wrapping_add(1);
        self.memory.write_obj(self.available, GuestAddress(u64::from(Self::AVAILABLE) + 2))?;
        Ok(())
    }
}
