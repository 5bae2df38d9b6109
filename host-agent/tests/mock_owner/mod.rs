//! The owner of a VM, reduced to a thread that settles what a device waits for and passes every event on to the test.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use fpr_host_agent::device::{DeviceEvent, Done};

use super::mock_guest::WAIT;

/// What the owner has of a device.
pub trait Device: Clone + Send + 'static {
    fn shutdown(&self);
}

/// What the owner does with an event before the test has it.
pub trait Settle: Send + 'static {
    /// Takes note of it, whoever settles it.
    fn note(&mut self, _event: &DeviceEvent) {}

    /// Lets go of what the device waits for.
    fn settle(&mut self, event: &mut DeviceEvent) {
        release(event);
    }
}

pub struct Owner<D: Device> {
    pub device: D,
    events: mpsc::Receiver<DeviceEvent>,
    hold: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<D: Device> Owner<D> {
    pub fn of((device, mut from_device): (D, tokio::sync::mpsc::Receiver<DeviceEvent>), mut vm: impl Settle) -> Self {
        let (sender, events) = mpsc::channel();
        let hold = Arc::new(AtomicBool::new(false));
        let held = Arc::clone(&hold);
        let thread = std::thread::spawn(move || {
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

impl<D: Device> Drop for Owner<D> {
    fn drop(&mut self) {
        self.device.shutdown();
    }
}

/// Lets go of a fence.
pub fn release(event: &mut DeviceEvent) {
    if let DeviceEvent::MemoryMap { done, .. } | DeviceEvent::Stopped { done } | DeviceEvent::FrontEndGone { done } =
        event
    {
        drop(std::mem::replace(done, Done::new().0));
    }
}
