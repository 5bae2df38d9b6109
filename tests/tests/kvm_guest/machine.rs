//! The host's side of the guest: a thread per processor, one for the device, and a look at what is really backed.

use crate::program::{
    AVAIL, BASE, DONE, DOORBELL, FIRST, FOUND, HUGE_PAGE, HUGE_PAGES, MISMATCH, OWNED, PAGE, QUEUE_SIZE, READY,
    REPORTED, ROUNDS, STOP, SWEEPS, USED,
};
use crate::sys::program;
use anyhow::{Context, Result, anyhow, bail, ensure};
use fpr_host_agent::kvm::guest::{Exit, Guest, Vcpu};
use fpr_host_agent::reporting::{Discard, QueueCounters, ReportingQueue, Source};
use kvm_ioctls::Kvm;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// The guest needs one or two seconds on a software KVM, on a loaded machine some more.
const DEADLINE: Duration = Duration::from_secs(60);

/// What a guest does: which huge pages, as bits, are whose, and which are reported in each round.
pub(crate) struct Plan {
    /// Of processor 0, which reports some of them.
    pub(crate) first: u64,
    /// Of processor 1; without any it is not started.
    pub(crate) second: u64,
    /// Subsets of `first`, none empty.
    pub(crate) rounds: Vec<u64>,
}

/// A guest that is ready to start.
pub(crate) struct Machine {
    guest: Guest,
    vcpus: Vec<Vcpu>,
    rounds: usize,
}

/// What became of it.
pub(crate) struct Outcome {
    pub(crate) counters: QueueCounters,
    /// How often processor 1 went through its pages.
    pub(crate) sweeps: u64,
}

/// Guest memory as a PC has it, in two regions: huge pages 0 to 9 lie in the first, which begins at 0.
pub(crate) fn memory() -> Result<GuestMemoryMmap> {
    let border = FIRST + 10 * HUGE_PAGE;
    let second = FIRST + HUGE_PAGES * HUGE_PAGE - border;
    let ranges = [(GuestAddress(0), usize::try_from(border)?), (GuestAddress(border), usize::try_from(second)?)];
    Ok(GuestMemoryMmap::from_ranges(&ranges)?)
}

impl Machine {
    /// Makes the guest and tells it the plan.
    pub(crate) fn new(memory: &GuestMemoryMmap, plan: &Plan) -> Result<Self> {
        let word = |offset: u64, value: u64| memory.write_obj(value, GuestAddress(BASE + offset));
        word(ROUNDS, plan.rounds.len() as u64)?;
        word(OWNED, plan.first)?;
        word(OWNED + 8, plan.second)?;
        word(READY, u64::from(plan.second == 0))?;
        for (round, reported) in (1..).zip(&plan.rounds) {
            word(REPORTED + round * 8, *reported)?;
        }
        let kvm = Kvm::new()?;
        let guest = Guest::new(&kvm, memory.clone(), program())?;
        let processors = if plan.second == 0 { 1 } else { 2 };
        let vcpus = (0..processors).map(|index| guest.vcpu(&kvm, index)).collect::<Result<_, _>>()?;
        Ok(Self { guest, vcpus, rounds: plan.rounds.len() })
    }

    /// Runs the guest to its end while `discard` serves its queue. The error is what the guest found.
    pub(crate) fn run(self, discard: &mut (impl Discard + Send)) -> Result<Outcome> {
        let memory = self.guest.memory();
        let deadline = Instant::now() + DEADLINE;
        let (doorbell, rings) = mpsc::channel();
        let (counters, ends) = std::thread::scope(|scope| {
            // The processors go on while the device works, as with an ioeventfd.
            let device = scope.spawn(move || serve(memory, &rings, discard));
            let processors: Vec<_> = (0..)
                .zip(self.vcpus)
                .map(|(index, vcpu)| {
                    let doorbell = doorbell.clone();
                    scope.spawn(move || {
                        let end = run_processor(index, vcpu, memory, &doorbell, deadline);
                        // One that failed must not let the other wait.
                        memory.write_obj(1u64, GuestAddress(BASE + STOP))?;
                        end
                    })
                })
                .collect();
            drop(doorbell);
            let ends: Vec<_> =
                processors.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("panicked"))).collect();
            (device.join().map_err(|_| anyhow!("the device's thread panicked")), ends)
        });
        for end in ends {
            end??;
        }
        let counters = counters??;
        ensure!(counters.chains == self.rounds as u64, "{} rounds: {counters:?}", self.rounds);
        Ok(Outcome { counters, sweeps: memory.read_obj(GuestAddress(BASE + SWEEPS))? })
    }
}

fn run_processor(
    index: u64,
    mut vcpu: Vcpu,
    memory: &GuestMemoryMmap,
    doorbell: &mpsc::Sender<()>,
    deadline: Instant,
) -> Result<()> {
    loop {
        match vcpu.run(deadline)? {
            Exit::Out { port: DOORBELL, .. } => doorbell.send(()).context("the device ended")?,
            Exit::Out { port: DONE, .. } => return Ok(()),
            Exit::Out { port: MISMATCH, .. } => {
                let [at, expected, found]: [u64; 3] = memory.read_obj(GuestAddress(BASE + FOUND + index * 32))?;
                bail!("processor {index}: {found:#x} instead of {expected:#x} at {at:#x}");
            }
            other => bail!("processor {index}: {other:?}"),
        }
    }
}

/// The device: serves the queue whenever the doorbell rings, until nobody can ring it any more.
fn serve(memory: &GuestMemoryMmap, rings: &mpsc::Receiver<()>, discard: &mut impl Discard) -> Result<QueueCounters> {
    let mut queue = Queue::new(QUEUE_SIZE)?;
    let low = |address: u64| u32::try_from(address).map(Some);
    queue.set_desc_table_address(low(BASE)?, Some(0));
    queue.set_avail_ring_address(low(BASE + AVAIL)?, Some(0));
    queue.set_used_ring_address(low(BASE + USED)?, Some(0));
    queue.set_ready(true);
    let mut reporting = ReportingQueue::new(Source::Reported);
    for () in rings {
        while {
            let processed = reporting.process(memory, &mut queue, discard);
            ensure!(processed.fault.is_none(), "{processed:?}");
            processed.more
        } {}
    }
    Ok(reporting.counters().clone())
}

/// How many pages of each huge page are backed, resident or swapped out, by this process's pagemap
/// (`Documentation/admin-guide/mm/pagemap.rst`: bit 63 present, bit 62 swapped).
pub(crate) fn backed_pages(memory: &GuestMemoryMmap) -> Result<Vec<usize>> {
    let pagemap = File::open("/proc/self/pagemap")?;
    (0..HUGE_PAGES)
        .map(|index| {
            let host = memory.get_host_address(GuestAddress(FIRST + index * HUGE_PAGE))? as u64;
            let mut entries = vec![0; usize::try_from(HUGE_PAGE / PAGE * 8)?];
            pagemap.read_exact_at(&mut entries, host / PAGE * 8)?;
            // The bits are the two highest of the last byte of each.
            Ok(entries.chunks_exact(8).filter(|entry| entry[7] & 0xc0 != 0).count())
        })
        .collect()
}
