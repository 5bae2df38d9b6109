//! A guest without operating system: one piece of 64-bit machine code in its own memory, which talks by port I/O.
//!
//! The processor starts in long mode with flat segments, the first 4 GiB mapped one to one, interrupts off and no
//! interrupt table: any fault is a triple fault, [`Exit::Shutdown`]. Called by [`super::probe`] and by tests.
//!
//! # Time
//!
//! A guest can loop for ever, so [`Vcpu::run`] has a deadline. A POSIX timer sends a signal to the running thread, which
//! blocks it; only inside KVM_RUN it is let through, where a pending signal means EINTR and nothing else
//! (KVM_SET_SIGNAL_MASK). So no handler exists, no other thread sees the signal, one that comes early is not lost, and
//! the thread's mask is afterwards as it was.

use super::sys::{self, MappedVm};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use nix::errno::Errno;
use nix::sys::signal::{SigEvent, SigSet, SigevNotify, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;
use nix::unistd::gettid;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Guest-physical address of the program's first byte, where execution starts.
pub const CODE: u64 = 0x1_0000;
/// Bytes below this address belong to the page tables, the program and the stacks; the program may use all others.
pub const RESERVED: u64 = 0x10_0000;
/// The stack of processor n begins 4 KiB below that of processor n - 1.
const STACK: u64 = RESERVED;
const STACK_BYTES: u64 = 0x1000;
/// Most processors of a guest, by the room for stacks.
pub const MAX_VCPUS: u8 = 16;
/// Where the program must end.
const CODE_END: u64 = STACK - STACK_BYTES * MAX_VCPUS as u64;

/// Page tables: one PML4, one page-directory-pointer table, four page directories of 2 MiB pages.
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const DIRECTORIES: Range<u64> = 0x3000..0x7000;
/// Present and writable (Intel SDM volume 3, 5.5.4).
const TABLE: u64 = 0b11;
/// The same, and PS: the entry maps a page of 2 MiB.
const PAGE_2M: u64 = 0b1000_0011;

/// Control register bits (Intel SDM volume 3, 2.5): PE, ET, NE, WP, PG and PAE, OSFXSR, OSXMMEXCPT.
const CR0: u64 = 1 << 31 | 1 << 16 | 1 << 5 | 1 << 4 | 1;
const CR4: u64 = 1 << 10 | 1 << 9 | 1 << 5;
/// LME and LMA (Intel SDM volume 3, 2.2.1).
const EFER: u64 = 1 << 10 | 1 << 8;

/// What interrupts KVM_RUN. Nothing in this project uses it otherwise.
const ALARM: Signal = Signal::SIGVTALRM;

/// How long a program of the probe may take. One that works takes microseconds.
const PROBE_DEADLINE: Duration = Duration::from_millis(500);

/// Programs of the probe. Each ends with `out %al, $0x10`.
pub(super) mod program {
    /// The port that says "done".
    pub(in crate::kvm) const DONE: u16 = 0x10;

    /// `out %al, $0x10`
    pub(in crate::kvm) const PLAIN: &[u8] = &[0xe6, 0x10];

    /// Sets CR4.OSXSAVE and the x87, SSE and AVX bits of XCR0, as a kernel does, and adds two vectors.
    pub(in crate::kvm) const VEX: &[u8] = &[
        0x0f, 0x20, 0xe0, // mov %cr4, %rax
        0x48, 0x0f, 0xba, 0xe8, 0x12, // bts $18, %rax
        0x0f, 0x22, 0xe0, // mov %rax, %cr4
        0x31, 0xc9, // xor %ecx, %ecx
        0x31, 0xd2, // xor %edx, %edx
        0xb8, 0x07, 0x00, 0x00, 0x00, // mov $7, %eax
        0x0f, 0x01, 0xd1, // xsetbv
        0xc5, 0xf4, 0x58, 0xc2, // vaddps %ymm2, %ymm1, %ymm0
        0xe6, 0x10, // out %al, $0x10
    ];
}

/// Why a guest cannot be made or run: the host's fault.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A request to KVM failed.
    #[error("{request} failed: does this host's KVM support small 64-bit guests?")]
    Request {
        /// Its name in `linux/kvm.h`.
        request: &'static str,
        /// What it returned.
        #[source]
        source: Errno,
    },
    /// The program, the tables or the stacks are not inside the memory.
    #[error("guest memory must cover the first {RESERVED:#x} bytes and the program fit below {CODE_END:#x}")]
    Layout,
    /// More processors than there are stacks.
    #[error("processor {0} of at most {MAX_VCPUS}")]
    TooManyVcpus(u8),
    /// The timer that bounds the guest's time.
    #[error("cannot bound the guest's time ({call}): raise RLIMIT_SIGPENDING, which counts timers")]
    Alarm {
        /// The call that failed.
        call: &'static str,
        /// What it returned.
        #[source]
        source: Errno,
    },
}

fn request(request: &'static str) -> impl Fn(kvm_ioctls::Error) -> Error {
    move |error| Error::Request { request, source: Errno::from_raw(error.errno()) }
}

/// Why a processor stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The guest wrote to a port; [`Vcpu::run`] again continues behind the instruction.
    Out {
        /// The port.
        port: u16,
        /// What was written, of 1, 2 or 4 bytes.
        value: u32,
    },
    /// The guest executed `hlt`.
    Halted,
    /// The deadline passed; the guest can be continued.
    TimedOut,
    /// Triple fault.
    Shutdown,
    /// Anything else, in the words of KVM: the guest cannot go on.
    Failed(String),
}

/// A VM with memory and a program.
#[derive(Clone, Debug)]
pub struct Guest {
    vm: Arc<MappedVm>,
}

impl Guest {
    /// A VM with `memory`, which must cover the first [`RESERVED`] bytes, and `code` at [`CODE`].
    ///
    /// # Errors
    /// KVM refuses, or something does not fit.
    pub fn new(kvm: &Kvm, memory: GuestMemoryMmap, code: &[u8]) -> Result<Self, Error> {
        write_tables(&memory).map_err(|_| Error::Layout)?;
        if code.len() as u64 > CODE_END - CODE {
            return Err(Error::Layout);
        }
        memory.write_slice(code, GuestAddress(CODE)).map_err(|_| Error::Layout)?;
        let vm = kvm.create_vm().map_err(request("KVM_CREATE_VM"))?;
        let vm = MappedVm::new(vm, memory)
            .map_err(|source| Error::Request { request: "KVM_SET_USER_MEMORY_REGION", source })?;
        Ok(Self { vm: Arc::new(vm) })
    }

    /// The guest's memory, shared with the running guest.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        self.vm.memory()
    }

    /// Processor `index`, ready to start at [`CODE`] with its index in RDI and its stack in RSP. All features that KVM
    /// supports are offered to it.
    ///
    /// # Errors
    /// KVM refuses, or there are too many.
    pub fn vcpu(&self, kvm: &Kvm, index: u8) -> Result<Vcpu, Error> {
        if index >= MAX_VCPUS {
            return Err(Error::TooManyVcpus(index));
        }
        let fd = self.vm.vm().create_vcpu(index.into()).map_err(request("KVM_CREATE_VCPU"))?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(request("KVM_GET_SUPPORTED_CPUID"))?;
        fd.set_cpuid2(&cpuid).map_err(request("KVM_SET_CPUID2"))?;
        enter_long_mode(&fd)?;
        let regs = kvm_regs {
            rip: CODE,
            rsp: STACK - STACK_BYTES * u64::from(index),
            rdi: index.into(),
            rflags: 1 << 1, // always set (Intel SDM volume 1, 3.4.3)
            ..kvm_regs::default()
        };
        fd.set_regs(&regs).map_err(request("KVM_SET_REGS"))?;
        sys::interruptible_by(&fd, ALARM)
            .map_err(|source| Error::Request { request: "KVM_SET_SIGNAL_MASK", source })?;
        Ok(Vcpu { fd, _vm: Arc::clone(&self.vm) })
    }
}

/// One processor of a guest. Belongs to the thread that runs it, which may change between runs.
#[derive(Debug)]
pub struct Vcpu {
    // Declared first, hence dropped first: no processor outlives its memory.
    fd: VcpuFd,
    _vm: Arc<MappedVm>,
}

impl Vcpu {
    /// Runs until the guest does something for the host to see, or until `deadline`.
    ///
    /// # Errors
    /// The host's fault. Whatever the guest does is an [`Exit`].
    pub fn run(&mut self, deadline: Instant) -> Result<Exit, Error> {
        let alarm = Alarm::set(deadline)?;
        loop {
            match self.fd.run() {
                Ok(VcpuExit::IoOut(port, data)) => {
                    let value = data.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte));
                    return Ok(Exit::Out { port, value });
                }
                Ok(VcpuExit::Hlt) => return Ok(Exit::Halted),
                Ok(VcpuExit::Shutdown) => return Ok(Exit::Shutdown),
                // What a KVM that emulates says to an instruction it does not know.
                Ok(VcpuExit::InternalError) => return Ok(Exit::Failed("KVM_EXIT_INTERNAL_ERROR".to_owned())),
                Ok(other) => return Ok(Exit::Failed(format!("{other:?}"))),
                // Stopping and continuing the process gives EINTR as well.
                Err(error) if error.errno() == libc::EINTR || error.errno() == libc::EAGAIN => {
                    if alarm.rang() || Instant::now() >= deadline {
                        return Ok(Exit::TimedOut);
                    }
                }
                Err(error) => return Err(request("KVM_RUN")(error)),
            }
        }
    }
}

/// Sends [`ALARM`] to this thread at a deadline; the thread blocks it meanwhile.
struct Alarm {
    timer: Option<Timer>,
    signals: SigSet,
    /// What the thread blocked before.
    before: SigSet,
}

impl Alarm {
    fn set(deadline: Instant) -> Result<Self, Error> {
        let failed = |call| move |source| Error::Alarm { call, source };
        let mut signals = SigSet::empty();
        signals.add(ALARM);
        let before = SigSet::thread_get_mask().map_err(failed("pthread_sigmask"))?;
        signals.thread_block().map_err(failed("pthread_sigmask"))?;
        // From here on dropping it restores the mask.
        let mut alarm = Self { timer: None, signals, before };
        let notify = SigevNotify::SigevThreadId { signal: ALARM, thread_id: gettid().as_raw(), si_value: 0 };
        let mut timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(notify)).map_err(failed("timer_create"))?;
        // All zero would mean "never" (timer_settime(2)).
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        timer
            .set(Expiration::OneShot(TimeSpec::from(left)), TimerSetTimeFlags::empty())
            .map_err(failed("timer_settime"))?;
        alarm.timer = Some(timer);
        Ok(alarm)
    }

    /// Whether the deadline has passed. Answers yes once.
    fn rang(&self) -> bool {
        sys::take_pending(&self.signals)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // In this order: a signal sent before the timer was deleted must not meet the old mask.
        drop(self.timer.take());
        sys::take_pending(&self.signals);
        // Fails for a bad `how` only.
        let _ = self.before.thread_set_mask();
    }
}

fn write_tables(memory: &GuestMemoryMmap) -> Result<(), vm_memory::GuestMemoryError> {
    let entry = |table: u64, index: u64, value: u64| memory.write_obj(value.to_le(), GuestAddress(table + index * 8));
    entry(PML4, 0, PDPT | TABLE)?;
    for (index, directory) in (0..).zip(DIRECTORIES.step_by(0x1000)) {
        entry(PDPT, index, directory | TABLE)?;
    }
    for page in 0..(DIRECTORIES.end - DIRECTORIES.start) / 8 {
        entry(DIRECTORIES.start, page, page << 21 | PAGE_2M)?;
    }
    // The last byte that the guest relies on.
    memory.write_obj(0u8, GuestAddress(RESERVED - 1))
}

fn enter_long_mode(vcpu: &VcpuFd) -> Result<(), Error> {
    let mut sregs = vcpu.get_sregs().map_err(request("KVM_GET_SREGS"))?;
    // Segment types of the Intel SDM volume 3, 3.4.5.1: execute/read and read/write, both accessed.
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 0x10,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    sregs.cs = kvm_segment { selector: 0x8, type_: 11, db: 0, l: 1, ..data };
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.idt.limit = 0;
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0, PML4, CR4, EFER);
    vcpu.set_sregs(&sregs).map_err(request("KVM_SET_SREGS"))
}

/// Why a program of the probe did not get to its end; completes a sentence that begins with it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Incomplete {
    #[error("could not be run: {}", crate::error_chain(.0))]
    NotRun(#[from] Error),
    #[error("did not end within {PROBE_DEADLINE:?}")]
    TimedOut,
    #[error("ended in an exception")]
    Faulted,
    #[error("failed ({0})")]
    Failed(String),
}

/// Runs a program of the probe.
pub(super) fn completes(kvm: &Kvm, code: &[u8]) -> Result<(), Incomplete> {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).map_err(|_| Error::Layout)?;
    let guest = Guest::new(kvm, memory, code)?;
    match guest.vcpu(kvm, 0)?.run(Instant::now() + PROBE_DEADLINE)? {
        Exit::Out { port: program::DONE, .. } => Ok(()),
        Exit::TimedOut => Err(Incomplete::TimedOut),
        Exit::Shutdown => Err(Incomplete::Faulted),
        Exit::Failed(exit) => Err(Incomplete::Failed(exit)),
        other => Err(Incomplete::Failed(format!("{other:?}"))),
    }
}

/// Whether guests are told of AVX: CPUID leaf 1, ECX bit 28 (Intel SDM volume 1, 14.3).
pub(super) fn offers_avx(kvm: &Kvm) -> bool {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .is_ok_and(|cpuid| cpuid.as_slice().iter().any(|leaf| leaf.function == 1 && leaf.ecx & 1 << 28 != 0))
}
