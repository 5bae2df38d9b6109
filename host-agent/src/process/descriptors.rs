//! Assigned devices, by the descriptors a process holds. Pure: links in, findings out.
//!
//! An assigned device does DMA to the frames that guest memory had when it was pinned. Drop one, and device and guest
//! see different memory.

use super::{DescriptorLink, Finding, MAX_FINDINGS};
use fpr_protocol::Gate;
use std::path::Path;

/// Prefixes of what procfs shows for descriptors without a path.
///
/// `kvm-vfio`: `kvm_vfio_ops.name` in `virt/kvm/vfio.c`. `[vfio-device]`: `drivers/vfio/group.c`. `[iommufd-…]`: event
/// queues of `drivers/iommu/iommufd/eventq.c`.
const ANONYMOUS: &[&str] = &["anon_inode:kvm-vfio", "anon_inode:[vfio", "anon_inode:[iommufd"];

/// The first few descriptors through which a device may reach guest memory.
pub(super) fn assigned_devices(links: &[DescriptorLink]) -> Vec<Finding> {
    let finding = |link: &DescriptorLink| Finding {
        gate: Gate::AssignedDevice,
        detail: format!(
            "descriptor {} is {}: detach the device to resume reporting",
            link.number.display(),
            link.target.display()
        ),
    };
    links.iter().filter(|link| reaches_guest_memory(&link.target)).take(MAX_FINDINGS).map(finding).collect()
}

/// Looks at the end of a path only: libvirt gives each QEMU a /dev of its own, and procfs shows a path of another
/// mount namespace from whatever root it has there.
fn reaches_guest_memory(target: &Path) -> bool {
    let Some(text) = target.to_str() else { return false };
    if !text.starts_with('/') {
        return ANONYMOUS.iter().any(|prefix| text.starts_with(prefix));
    }
    let text = text.strip_suffix(" (deleted)").unwrap_or(text);
    let mut parts = text.rsplit('/');
    let (name, parent, grandparent) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
    // /dev/vfio/vfio, /dev/vfio/GROUP, /dev/vfio/noiommu-GROUP; /dev/vfio/devices/vfioN.
    parent == Some("vfio")
        || (parent == Some("devices") && grandparent == Some("vfio"))
        || name == "iommu"
        || name.starts_with("vhost-vdpa")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_reach_guest_memory() {
        for target in [
            "/dev/vfio/vfio",
            "/dev/vfio/12",
            "/dev/vfio/noiommu-0",
            "/dev/vfio/devices/vfio0",
            "/vfio/12",
            "/dev/vfio/12 (deleted)",
            "/dev/iommu",
            "/dev/vhost-vdpa-0",
            "anon_inode:kvm-vfio",
            "anon_inode:[vfio-device]",
            "anon_inode:[iommufd-pgfault]",
        ] {
            assert!(reaches_guest_memory(Path::new(target)), "{target}");
        }
    }

    #[test]
    fn what_an_ordinary_vmm_holds() {
        for target in [
            "/dev/kvm",
            "/dev/vhost-net",
            "/dev/vhost-vsock",
            "/dev/net/tun",
            "/dev/null",
            "/memfd:pc.ram (deleted)",
            "/dev/shm/vfio",
            "/var/lib/images/iommu.qcow2",
            "anon_inode:kvm-vm",
            "anon_inode:kvm-vcpu:0",
            "anon_inode:[eventfd]",
            "anon_inode:[io_uring]",
            "socket:[12345]",
            "pipe:[42]",
        ] {
            assert!(!reaches_guest_memory(Path::new(target)), "{target}");
        }
    }
}
