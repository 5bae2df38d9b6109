//! The calls around KVM_RUN that have no safe wrapper.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{VcpuFd, VmFd};
use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use std::os::fd::AsRawFd;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// `KVM_SET_SIGNAL_MASK`, `_IOW(KVMIO, 0x8b, struct kvm_signal_mask)` with a structure of 4 bytes (`linux/kvm.h`).
const KVM_SET_SIGNAL_MASK: libc::c_ulong = 0x4004_ae8b;

/// `struct kvm_signal_mask` of `linux/kvm.h`, its flexible array as long as the kernel's signal set.
#[repr(C)]
struct SignalMask {
    len: u32,
    set: [u8; 8],
}

/// A VM and its memory, which is mapped at least as long as the VM can reach it.
#[derive(Debug)]
pub(super) struct MappedVm {
    // Declared first, hence dropped first.
    vm: VmFd,
    memory: GuestMemoryMmap,
}

impl MappedVm {
    /// Gives `memory` to `vm`: one slot per region.
    pub(super) fn new(vm: VmFd, memory: GuestMemoryMmap) -> Result<Self, Errno> {
        for (slot, region) in (0u32..).zip(memory.iter()) {
            let slot = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the guest may now read and write the given bytes of our address space at any time. They are
            // exactly one mapping of `memory`, which the same structure owns (regions are reference-counted, so a clone
            // elsewhere cannot unmap them either) and which outlives the VM's descriptor; vm-memory hands such memory
            // out by volatile accesses only, never as Rust references that a guest's write would invalidate. vCPUs keep
            // the VM alive beyond its descriptor; `Vcpu` therefore holds this structure (see `Guest::vcpu`).
            unsafe { vm.set_user_memory_region(slot) }.map_err(|error| Errno::from_raw(error.errno()))?;
        }
        Ok(Self { vm, memory })
    }

    pub(super) fn vm(&self) -> &VmFd {
        &self.vm
    }

    pub(super) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }
}

/// Makes KVM_RUN of `vcpu` block every signal but `alarm`, whatever the thread's own mask: a thread that blocks `alarm`
/// gets EINTR from KVM_RUN as soon as it is pending, and no handler ever runs.
pub(super) fn interruptible_by(vcpu: &VcpuFd, alarm: Signal) -> Result<(), Errno> {
    // Signal n is bit n - 1 (`sigmask` of `linux/signal.h`).
    let set = !(1u64 << (alarm as u32 - 1));
    let mask = SignalMask { len: 8, set: set.to_ne_bytes() };
    // SAFETY: the call reads 4 bytes at its argument and, as `len` says 8, the 8 that follow; it writes nothing.
    // `SignalMask` is these 12 bytes without padding and outlives the call. The descriptor is a vCPU's, open as long as
    // `vcpu` is borrowed.
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_SET_SIGNAL_MASK as _, &raw const mask) };
    Errno::result(result).map(drop)
}

/// Takes one pending signal of `set` off this thread, which blocks it; false if none is pending.
pub(super) fn take_pending(set: &SigSet) -> bool {
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call reads the set and the time at its first and third argument, both borrowed for longer than it
    // takes, and writes no details because the second is null, which sigtimedwait(2) allows.
    let signal = unsafe { libc::sigtimedwait(set.as_ref(), std::ptr::null_mut(), &raw const at_once) };
    signal > 0
}
