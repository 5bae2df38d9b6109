//! What a front end says the guest's memory is, in the words of the owner.

use std::io;
use std::sync::Arc;

use fpr_protocol::GuestAddress;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::MemoryRegion;

/// Most regions of one guest: as many as `vhost-user-backend` announces for VHOST_USER_GET_MAX_MEM_SLOTS (`MAX_MEM_SLOTS`,
/// the kernel's vhost has the same). It does not enforce them, and each region costs the daemon a descriptor.
const MAX_REGIONS: usize = 509;

/// The regions of `memory` in order of guest address.
///
/// # Errors
/// If there are too many, or if one came without a descriptor; the front end is disconnected.
pub(super) fn regions(memory: &GuestMemoryMmap) -> io::Result<Vec<MemoryRegion>> {
    let regions = memory.num_regions();
    if regions > MAX_REGIONS {
        return Err(io::Error::other(format!("{regions} memory regions, but a guest may have {MAX_REGIONS}")));
    }
    memory.iter().map(region).collect()
}

fn region(region: &impl GuestMemoryRegion) -> io::Result<MemoryRegion> {
    let file = region.file_offset().ok_or_else(|| io::Error::other("a memory region came without a descriptor"))?;
    Ok(MemoryRegion {
        guest_address: GuestAddress(region.start_addr().0),
        size: region.len(),
        file: Arc::clone(file.arc()),
        file_offset: file.start(),
    })
}
