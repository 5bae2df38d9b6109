//! A KVM VFIO device without hardware: what a process with an assigned device holds, as far as anybody outside it can see.

use std::os::fd::{AsRawFd, RawFd};

use anyhow::{Context, Result};
use kvm_bindings::{kvm_create_device, kvm_device_type_KVM_DEV_TYPE_VFIO};
use kvm_ioctls::{DeviceFd, Kvm, VmFd};

/// An open KVM VFIO device (Documentation/virt/kvm/devices/vfio.rst); in `/proc/PID/fd` it reads `anon_inode:kvm-vfio`.
#[derive(Debug)]
pub struct KvmVfioDevice {
    device: DeviceFd,
    _vm: VmFd,
}

impl KvmVfioDevice {
    /// Creates one in a VM of its own.
    ///
    /// # Errors
    /// `/dev/kvm` cannot be opened, or KVM was built without VFIO.
    pub fn create() -> Result<Self> {
        let vm = Kvm::new().context("/dev/kvm")?.create_vm().context("KVM_CREATE_VM")?;
        let mut request = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
        let device = vm.create_device(&mut request).context("KVM_CREATE_DEVICE with KVM_DEV_TYPE_VFIO")?;
        Ok(Self { device, _vm: vm })
    }
}

/// For [`crate::qmp::Qmp::add_fd`].
impl AsRawFd for KvmVfioDevice {
    fn as_raw_fd(&self) -> RawFd {
        self.device.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn shows_as_kvm_vfio_among_the_descriptors() {
        if Kvm::new().is_err() {
            return crate::skip::skip("shows_as_kvm_vfio_among_the_descriptors", "no usable /dev/kvm");
        }
        let device = KvmVfioDevice::create().unwrap();
        let link = std::fs::read_link(format!("/proc/self/fd/{}", device.as_raw_fd())).unwrap();
        assert_eq!(link.to_string_lossy(), "anon_inode:kvm-vfio");
    }
}
