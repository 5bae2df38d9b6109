//! The owner of a VM, reduced to a thread that passes the device's events on to the test.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use fpr_host_agent::device::vsock::{DeviceHandle, VsockConfig, spawn};
use fpr_host_agent::device::{ConnectionId, DeviceEvent, Done};

use super::mock_guest::WAIT;

pub struct Owner {
    pub device: DeviceHandle,
    pub events: mpsc::Receiver<DeviceEvent>,
    hold: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Owner {
    pub fn new(socket: &Path) -> Self {
        let config = VsockConfig {
            vm: "test".into(),
            socket: socket.into(),
            guest_cid: 3,
            port: super::PORT,
            rings: Arc::default(),
        };
        let (device, mut from_device) = spawn(config).unwrap();
        let (sender, events) = mpsc::channel();
        let hold = Arc::new(AtomicBool::new(false));
        let hold_fences = Arc::clone(&hold);
        let thread = std::thread::spawn(move || {
            while let Some(mut event) = from_device.blocking_recv() {
                if !hold_fences.load(Ordering::SeqCst) {
                    release(&mut event);
                }
                if sender.send(event).is_err() {
                    break;
                }
            }
        });
        Self { device, events, hold, thread: Some(thread) }
    }

    /// From now on fences stay with the test instead of being released at once.
    pub fn hold_fences(&self, hold: bool) {
        self.hold.store(hold, Ordering::SeqCst);
    }

    pub fn next(&self) -> DeviceEvent {
        self.events.recv_timeout(WAIT).expect("an event in time")
    }

    pub fn next_connected(&self) -> ConnectionId {
        match self.next() {
            DeviceEvent::Connected { connection, .. } => connection,
            other => panic!("expected Connected, got {other:?}"),
        }
    }

    pub fn next_data(&self, of: ConnectionId) -> Vec<u8> {
        match self.next() {
            DeviceEvent::Data { connection, bytes } if connection == of => bytes,
            other => panic!("expected Data of {of:?}, got {other:?}"),
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

fn release(event: &mut DeviceEvent) {
    if let DeviceEvent::MemoryMap { done, .. } | DeviceEvent::Stopped { done } | DeviceEvent::FrontEndGone { done } =
        event
    {
        let (fresh, _) = Done::new();
        drop(std::mem::replace(done, fresh));
    }
}
