//! Reports of the guest's kernel: free pages on the balloon's reporting queue, and what its balloon driver inflates.
//!
//! ```text
//!  queue thread takes a chain -> Reported -> session: gates, bound -> Discard job
//!    worker: inspect processes -> arm the deadline guard -> drop, asking `cancelled` between calls -> disarm
//!    -> session -> Answer -> queue thread returns the chain -> the kernel has its pages back
//! ```
//! The pages belong to nobody from before the chain was taken until it is returned, and the kernel waits without a limit
//! (`wait_event` in `virtballoon_free_page_report`, drivers/virtio/virtio_balloon.c). So there is no lease, no cookie
//! and no address check: the driver names addresses from the same table that it fills the rings by.
//!
//! # Why a deadline nevertheless
//! The guest waits, but it may be reset, and what orders a reset to wait is this process (a stop order is answered when
//! no job runs). If it stands still, as under SIGSTOP or in a frozen cgroup, its VMM can be killed meanwhile and the next
//! one started on the same memory file, or cut the connection and reset the guest; the drop would come when somebody uses
//! the pages again. The guard kills a process that stands still past [`Config::kernel_deadline`](super::Config), counted
//! from before the chain was taken, instead of letting it drop. Linux reports at most 32 ranges of 4 MiB: 20 ms of work.
//!
//! Reports are answered exactly once: refused at once, or when their job has ended, cancelled or not.

use super::counters::MemorySource;
use super::job::{DropOutput, Job, JobOutput};
use super::{Action, Reply, Session};
use crate::device::{DeviceKind, UNKNOWN_POISON};
use crate::reporting::{GuestRange, Source};
use crate::session::gates::GateSource;
use fpr_protocol::{Gate, Message, Refusal};
use std::time::Duration;

/// Names one report until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelReportId(pub u64);

/// One chain of a balloon queue.
#[derive(Clone, Debug)]
pub struct KernelReport {
    /// Comes back in [`Action::Answer`].
    pub id: KernelReportId,
    /// Which queue.
    pub source: Source,
    /// What the guest named, unchecked.
    pub ranges: Vec<GuestRange>,
    /// Host time read before the chain was taken.
    pub taken_after: Duration,
}

/// A report whose drops are on the way.
pub(super) struct PendingKernelReport {
    id: KernelReportId,
    source: Source,
    ranges: Vec<GuestRange>,
}

impl Session {
    pub(super) fn kernel_reported(&mut self, report: KernelReport) {
        let KernelReport { id, source, ranges, taken_after } = report;
        if source == Source::Reported {
            self.kernel_reporting = true;
        }
        let pending = PendingKernelReport { id, source, ranges };
        let refusal = if !self.gates.open_for(DeviceKind::Balloon) {
            Some(Refusal::Gated)
        } else if self.fences.iter().any(|(device, _)| *device == DeviceKind::Balloon) {
            // The device is being stopped and sends nothing; if it did, nothing may start behind the fence.
            Some(Refusal::Cancelled)
        } else if self.kernel_jobs() >= self.config.max_kernel_jobs {
            Some(Refusal::TooMuchInFlight)
        } else {
            None
        };
        if refusal.is_some() || pending.ranges.is_empty() {
            let results = pending.ranges.iter().map(|_| Err(refusal.unwrap_or(Refusal::Empty))).collect();
            return self.answer_kernel(&pending, results);
        }
        let job = Job::Discard { ranges: pending.ranges.clone(), deadline: taken_after + self.config.kernel_deadline };
        self.start(Reply::Kernel(pending), None, job);
    }

    pub(super) fn page_poison(&mut self, poison_val: Option<u32>, now: Duration) {
        match poison_val {
            // Zero is `init_on_free`: a dropped page holds what the kernel wants to find.
            None | Some(0) => self.gates.open(Gate::PagePoison, GateSource::Balloon),
            Some(pattern) => {
                let detail = if pattern == UNKNOWN_POISON {
                    "what the guest's kernel wants to find in its free pages is not known, it said so (poison_val) to a \
                     daemon that is gone: plug the device again or reboot the guest"
                        .to_owned()
                } else {
                    format!(
                        "the guest's kernel wants to find {pattern:#x} in its free pages (poison_val): boot it without \
                         page_poison"
                    )
                };
                self.gates.close(Gate::PagePoison, GateSource::Balloon, detail, now);
                self.cancel_jobs(DeviceKind::Vsock);
                self.cancel_jobs(DeviceKind::Balloon);
            }
        }
    }

    /// The driver's queues have stopped: it reports no more until it does again.
    pub(super) fn balloon_stopped(&mut self) {
        self.kernel_reporting = false;
        self.kernel_effect.reset();
        self.gates.open(Gate::Ineffective, GateSource::Balloon);
        self.cancel_jobs(DeviceKind::Balloon);
    }

    pub(super) fn discard_finished(&mut self, pending: &PendingKernelReport, output: JobOutput, now: Duration) {
        let output = match output {
            JobOutput::Drop(output) => output,
            // The device has no memory map.
            _ => DropOutput::refused(Refusal::OutsideMemory, pending.ranges.len()),
        };
        self.dropped_somehow(&output, now);
        // A stopped device cancels, and a gate that closed meanwhile does: the guest should read which.
        let cancelled = if self.gates.open_for(DeviceKind::Balloon) { Refusal::Cancelled } else { Refusal::Gated };
        let result = |index| match output.results.get(index).copied() {
            Some(Err(Refusal::Cancelled)) => Err(cancelled),
            Some(result) => result,
            None => Err(Refusal::DropFailed),
        };
        let results: Vec<Result<u64, Refusal>> = (0..pending.ranges.len()).map(result).collect();
        let dropped: u64 = results.iter().flatten().fold(0, |sum, bytes| sum.saturating_add(*bytes));
        let went = |(range, result): (&GuestRange, &Result<u64, Refusal>)| result.is_ok().then_some(*range);
        let ranges: Vec<GuestRange> = pending.ranges.iter().zip(&results).filter_map(went).collect();
        self.watch_refaults(DeviceKind::Balloon, &ranges, dropped, now);
        if self.kernel_effect.still_backed(dropped, output.still_backed_bytes) {
            let detail = super::STILL_BACKED.to_owned();
            self.gates.close(Gate::Ineffective, GateSource::Balloon, detail, now);
        }
        self.answer_kernel(pending, results);
    }

    /// Reports on their way; a look back is nobody's who waits.
    fn kernel_jobs(&self) -> usize {
        self.jobs.values().filter(|job| matches!(job.reply, Reply::Kernel(_))).count()
    }

    fn answer_kernel(&mut self, pending: &PendingKernelReport, results: Vec<Result<u64, Refusal>>) {
        let counters = self.counters.source(MemorySource::from(pending.source));
        for (range, result) in pending.ranges.iter().zip(&results) {
            counters.count(range.bytes, *result);
        }
        self.actions.push(Action::Answer(pending.id, results));
    }

    /// The agent leaves small frees to a kernel that reports by itself.
    pub(super) fn tell_kernel_reporting(&mut self) {
        let reporting = self.kernel_reporting;
        if let super::Phase::Active(active) = &mut self.phase
            && active.told_kernel_reporting != reporting
        {
            active.told_kernel_reporting = reporting;
            let message = Message::KernelReporting { active: reporting };
            self.actions.push(Action::Send(active.connection, message));
        }
    }
}
