//! The owner of a VM, reduced to a thread: drops what is reported from the guest's memory file, by the poison value it
//! was told, and passes every event on to the test.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use fpr_host_agent::device::balloon::{BalloonConfig, BalloonHandle, spawn};
use fpr_host_agent::device::{Answer, DeviceEvent, Done, MemoryRegion};
use fpr_host_agent::reporting::GuestRange;
use fpr_protocol::Refusal;
use nix::fcntl::{FallocateFlags, fallocate};

use super::mock_guest::WAIT;

pub struct Owner {
    pub device: BalloonHandle,
    events: mpsc::Receiver<DeviceEvent>,
    hold: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Owner {
    pub fn new(socket: &Path) -> Self {
        let (device, mut from_device) =
            spawn(BalloonConfig { vm: "test".into(), socket: socket.into(), rings: Arc::default() }).unwrap();
        let (sender, events) = mpsc::channel();
        let hold = Arc::new(AtomicBool::new(false));
        let held = Arc::clone(&hold);
        let thread = std::thread::spawn(move || {
            let mut vm = Vm::default();
            while let Some(mut event) = from_device.blocking_recv() {
                vm.note(&event);
                if !held.load(Ordering::SeqCst) {
                    vm.settle(&mut event);
                }
                // The test may have seen enough.
                let _ = sender.send(event);
            }
        });
        Self { device, events, hold, thread: Some(thread) }
    }

    /// From now on fences and reports stay with the test instead of being settled at once.
    pub fn hold(&self, hold: bool) {
        self.hold.store(hold, Ordering::SeqCst);
    }

    pub fn next(&self) -> DeviceEvent {
        self.events.recv_timeout(WAIT).expect("an event in time")
    }

    /// Takes events until one fits.
    pub fn find<T>(&self, mut wanted: impl FnMut(DeviceEvent) -> Option<T>) -> T {
        loop {
            if let Some(found) = wanted(self.next()) {
                return found;
            }
        }
    }

    /// Ends the device and waits until it has.
    pub fn shutdown(&mut self) {
        self.device.shutdown();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.device.shutdown();
    }
}

#[derive(Default)]
struct Vm {
    regions: Vec<MemoryRegion>,
    poison_val: Option<u32>,
}

impl Vm {
    fn note(&mut self, event: &DeviceEvent) {
        match event {
            DeviceEvent::MemoryMap { regions, .. } => self.regions.clone_from(regions),
            DeviceEvent::FrontEndGone { .. } => self.regions.clear(),
            DeviceEvent::PagePoison { poison_val } => self.poison_val = *poison_val,
            _ => {}
        }
    }

    fn settle(&self, event: &mut DeviceEvent) {
        match event {
            DeviceEvent::MemoryMap { done, .. }
            | DeviceEvent::Stopped { done }
            | DeviceEvent::FrontEndGone { done } => {
                drop(std::mem::replace(done, Done::new().0));
            }
            DeviceEvent::Reported { ranges, answer, .. } => {
                let results = ranges.iter().map(|range| self.discard(range)).collect();
                std::mem::replace(answer, Answer::new().0).send(results);
            }
            _ => {}
        }
    }

    fn discard(&self, range: &GuestRange) -> Result<u64, Refusal> {
        if self.poison_val.is_some_and(|value| value != 0) {
            return Err(Refusal::Gated);
        }
        let end = range.start.0.checked_add(range.bytes).ok_or(Refusal::Overflow)?;
        let inside = |region: &&MemoryRegion| {
            region.guest_address.0 <= range.start.0 && end <= region.guest_address.0 + region.size
        };
        let region = self.regions.iter().find(inside).ok_or(Refusal::OutsideMemory)?;
        if range.bytes == 0 {
            return Err(Refusal::Empty);
        }
        let offset = range.start.0 - region.guest_address.0 + region.file_offset;
        let [offset, bytes] = [offset, range.bytes].map(|value| i64::try_from(value).unwrap());
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&*region.file, flags, offset, bytes).map_err(|_| Refusal::DropFailed)?;
        Ok(range.bytes)
    }
}
