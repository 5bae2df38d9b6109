//! The owner of a VM with a balloon: drops what is reported from the guest's memory file, by the poison value it was told.

use std::path::Path;
use std::sync::Arc;

use fpr_host_agent::device::balloon::{BalloonConfig, BalloonHandle, spawn};
use fpr_host_agent::device::{Answer, DeviceEvent, MemoryRegion};
use fpr_host_agent::reporting::GuestRange;
use fpr_protocol::Refusal;
use nix::fcntl::{FallocateFlags, fallocate};

use super::mock_owner::{self, Device, Settle, release};

pub type Owner = mock_owner::Owner<BalloonHandle>;

/// A device and its owner.
pub fn start(socket: &Path) -> Owner {
    let config = BalloonConfig { vm: "test".into(), socket: socket.into(), rings: Arc::default() };
    Owner::of(spawn(config).unwrap(), Vm::default())
}

impl Device for BalloonHandle {
    fn shutdown(&self) {
        BalloonHandle::shutdown(self);
    }
}

#[derive(Default)]
struct Vm {
    regions: Vec<MemoryRegion>,
    poison_val: Option<u32>,
}

impl Settle for Vm {
    fn note(&mut self, event: &DeviceEvent) {
        match event {
            DeviceEvent::MemoryMap { regions, .. } => self.regions.clone_from(regions),
            DeviceEvent::FrontEndGone { .. } => self.regions.clear(),
            DeviceEvent::PagePoison { poison_val } => self.poison_val = *poison_val,
            _ => {}
        }
    }

    fn settle(&mut self, event: &mut DeviceEvent) {
        release(event);
        if let DeviceEvent::Reported { ranges, answer, .. } = event {
            let results = ranges.iter().map(|range| self.discard(range)).collect();
            std::mem::replace(answer, Answer::new().0).send(results);
        }
    }
}

impl Vm {
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
