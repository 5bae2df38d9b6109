//! The owner of a VM with a vsock device.

use std::path::Path;
use std::sync::Arc;

use fpr_host_agent::device::vsock::{DeviceHandle, VsockConfig, spawn};
use fpr_host_agent::device::{ConnectionId, DeviceEvent};

use super::mock_owner::{self, Device, Settle};

pub type Owner = mock_owner::Owner<DeviceHandle>;

/// A device and its owner.
pub fn start(socket: &Path) -> Owner {
    let (vm, socket, rings) = ("test".into(), socket.into(), Arc::default());
    let config = VsockConfig { vm, socket, guest_cid: 3, port: super::PORT, rings };
    Owner::of(spawn(config).unwrap(), Vm)
}

impl Device for DeviceHandle {
    fn shutdown(&self) {
        DeviceHandle::shutdown(self);
    }
}

struct Vm;

impl Settle for Vm {}

pub fn next_connected(owner: &Owner) -> ConnectionId {
    match owner.next() {
        DeviceEvent::Connected { connection, .. } => connection,
        other => panic!("expected Connected, got {other:?}"),
    }
}

pub fn next_data(owner: &Owner, of: ConnectionId) -> Vec<u8> {
    match owner.next() {
        DeviceEvent::Data { connection, bytes } if connection == of => bytes,
        other => panic!("expected Data of {of:?}, got {other:?}"),
    }
}
