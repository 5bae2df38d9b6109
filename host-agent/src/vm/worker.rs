//! The thread of one device that does what the VM's session orders: looking, comparing cookies, dropping ([`super::drop`]).
//!
//! It takes work in order, one piece at a time. It trusts the session for *whether* a range may be dropped and re-checks
//! what can change until the last moment: cancellation, the VMM's processes, cookies, the deadline.

use super::boot_now;
use super::drop::{discard, drop_items, has_cookie};
use crate::backing::{FileId, GuestBacking, Span};
use crate::device::Rings;
use crate::process::{Finding, check_holdings, check_mappings};
use crate::reporting::GuestRange;
use crate::session::effect::Content;
use crate::session::job::{Job, JobId, JobOutput};
use fpr_protocol::{BackedRange, Gate, GuestAddress, HugePageRange, HugePageSize, MAX_SURVEY_RANGES};
use nix::unistd::Pid;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Numbers the jobs between two cancellations: work of an earlier epoch ends at its next check.
#[derive(Clone, Debug, Default)]
pub(super) struct Epoch(Arc<AtomicU64>);

impl Epoch {
    pub(super) fn cancel_all(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn current(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The VM as it was when the work was ordered.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) backing: Arc<GuestBacking>,
    /// The processes of the VM's front ends, mostly one; an unknown one closes the gate `uninspectable`.
    pub(super) processes: Vec<Option<Pid>>,
    /// How they map the memory files, one per device with a memory map.
    pub(super) mappings: Vec<Arc<Mapping>>,
    pub(super) proc_root: PathBuf,
    /// Memory that the devices themselves use.
    pub(super) rings: Arc<Rings>,
}

/// How a front end's process maps the files of one memory map. Looked at once, by the first worker that needs it and
/// before its first drop: the owner must not, because `/proc/PID/maps` waits for a lock of that process.
#[derive(Debug)]
pub(super) struct Mapping {
    pid: Pid,
    files: Vec<FileId>,
    findings: OnceLock<Vec<Finding>>,
}

impl Mapping {
    pub(super) fn new(pid: Pid, files: Vec<FileId>) -> Self {
        Self { pid, files, findings: OnceLock::new() }
    }

    fn findings(&self, proc_root: &Path) -> &[Finding] {
        self.findings.get_or_init(|| check_mappings(proc_root, self.pid, &self.files))
    }
}

/// One piece of work.
pub(super) enum Work {
    /// Ordered by the session.
    Job(JobId, Job, Option<Target>),
    /// Look into the VMM's process and nothing else.
    Inspect(Target),
}

/// What came of it.
#[derive(Debug)]
pub(super) enum Done {
    Job { id: JobId, output: JobOutput, busy: Duration },
    Inspected(Vec<(Gate, String)>),
}

/// The owner's end.
pub(super) struct Worker {
    work: mpsc::Sender<(u64, Work)>,
    epoch: Epoch,
}

impl Worker {
    /// Starts the thread; it ends when the worker is dropped.
    pub(super) fn start(name: &str, done: tokio::sync::mpsc::UnboundedSender<Done>) -> std::io::Result<Self> {
        let (work, orders) = mpsc::channel::<(u64, Work)>();
        let epoch = Epoch::default();
        let thread_epoch = epoch.clone();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            while let Ok((epoch, work)) = orders.recv() {
                let cancelled = || thread_epoch.current() != epoch;
                if done.send(do_work(work, &cancelled)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { work, epoch })
    }

    /// Queues work. The session bounds how much of it there is.
    pub(super) fn order(&self, work: Work) {
        // The thread ends only after this sender has gone.
        let _ = self.work.send((self.epoch.current(), work));
    }

    /// Makes all work ordered so far end at its next check.
    pub(super) fn cancel(&self) {
        self.epoch.cancel_all();
    }
}

fn do_work(work: Work, cancelled: &dyn Fn() -> bool) -> Done {
    match work {
        Work::Inspect(target) => Done::Inspected(inspect(&target).into_iter().map(gate).collect()),
        Work::Job(id, job, target) => {
            let started = boot_now();
            let output = match target {
                Some(target) => do_job(&job, &target, cancelled),
                None => JobOutput::Failed("the VM has no memory map".to_owned()),
            };
            Done::Job { id, output, busy: boot_now().saturating_sub(started) }
        }
    }
}

fn do_job(job: &Job, target: &Target, cancelled: &dyn Fn() -> bool) -> JobOutput {
    match job {
        Job::Drop { items, size, key, deadline } => {
            JobOutput::Drop(drop_items(items, *size, *key, *deadline, target, cancelled))
        }
        Job::Discard { ranges, deadline } => JobOutput::Drop(discard(ranges, *deadline, target, cancelled)),
        Job::Prove { pages, key } => JobOutput::Prove(
            (0..).zip(pages).map(|(index, page)| has_cookie(&target.backing, *key, index, *page)).collect(),
        ),
        Job::Survey { ranges, size } => survey(ranges, *size, target, cancelled),
        Job::LookBack { pieces, .. } => look_back(pieces, target, cancelled),
        Job::Look { ranges, size } => look(ranges, *size, target, cancelled),
    }
}

pub(super) fn inspect(target: &Target) -> Vec<Finding> {
    let check = |process: &Option<Pid>| match process {
        Some(pid) => check_holdings(&target.proc_root, *pid, target.backing.map().bytes()),
        None => vec![Finding {
            gate: Gate::Uninspectable,
            detail: "the VMM's process is not known: run the host agent in the host's pid namespace".to_owned(),
        }],
    };
    let mappings = target.mappings.iter().flat_map(|mapping| mapping.findings(&target.proc_root).iter().cloned());
    target.processes.iter().flat_map(check).chain(mappings).collect()
}

pub(super) fn gate(finding: Finding) -> (Gate, String) {
    (finding.gate, finding.detail)
}

/// Huge pages looked at before what was found is thinned out. A guest chooses the size of its huge pages and how it
/// scatters what it touches, so the runs of a whole span can be many: 1.5 MB of them per GiB at 8 KiB.
const SURVEY_PART: u64 = 16 * 1024;

fn survey(ranges: &[HugePageRange], size: HugePageSize, target: &Target, cancelled: &dyn Fn() -> bool) -> JobOutput {
    let mut backed: Vec<BackedRange> = Vec::new();
    let mut keep_going = || if cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    // Ranges that overlap are asked about once, so that a guest cannot multiply the cost.
    let spans = target.backing.map().locate_report(ranges, size).into_iter().flatten();
    for part in spans.flat_map(|span| parts(span, SURVEY_PART.saturating_mul(size.bytes()))) {
        match target.backing.backed(&part, size, &mut keep_going) {
            Ok(found) => backed.extend(found),
            Err(error) => return JobOutput::Failed(format!("{error}")),
        }
        if backed.len() > MAX_SURVEY_RANGES {
            // The fullest are worth most.
            backed.sort_unstable_by_key(|range| std::cmp::Reverse(range.backed_bytes));
            backed.truncate(MAX_SURVEY_RANGES);
        }
    }
    backed.sort_unstable_by_key(|range| range.range.start);
    JobOutput::Survey(backed)
}

/// Cuts a span into pieces of at most `bytes`.
fn parts(span: Span, bytes: u64) -> impl Iterator<Item = Span> {
    let length = span.extent.end.saturating_sub(span.extent.start);
    let step = bytes.max(1);
    (0..length.div_ceil(step)).map(move |number| {
        let (from, to) = (number * step, (number + 1).saturating_mul(step).min(length));
        Span {
            region: span.region,
            guest: span.guest.start + from..span.guest.start + to,
            extent: span.extent.start + from..span.extent.start + to,
        }
    })
}

fn look(ranges: &[HugePageRange], size: HugePageSize, target: &Target, cancelled: &dyn Fn() -> bool) -> JobOutput {
    if !target.backing.sees_holes() {
        return JobOutput::Failed("this backing does not show its holes".to_owned());
    }
    let spans: Vec<Span> = ranges.iter().filter_map(|range| target.backing.map().locate(*range, size).ok()).collect();
    let content = if spans.iter().all(|span| is_zero(span, size, target)) { Content::Zeros } else { Content::Used };
    let mut keep_going = || if cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let backed = spans.iter().filter_map(|span| target.backing.backed(span, size, &mut keep_going).ok());
    JobOutput::Look(backed.flatten().map(|range| range.backed_bytes).sum(), content)
}

fn look_back(pieces: &[GuestRange], target: &Target, cancelled: &dyn Fn() -> bool) -> JobOutput {
    if !target.backing.sees_holes() {
        return JobOutput::Failed("this backing does not show its holes".to_owned());
    }
    let (mut looked_bytes, mut backed_bytes) = (0, 0);
    // A piece that overlaps an earlier one is not looked at twice.
    for span in target.backing.map().locate_kernel_report(pieces).into_iter().flatten().flatten() {
        if cancelled() {
            return JobOutput::Failed("cancelled".to_owned());
        }
        if let Ok(backed) = target.backing.whole_pages_backed(&span) {
            looked_bytes += span.extent.end - span.extent.start;
            backed_bytes += backed;
        }
    }
    JobOutput::LookedBack { looked_bytes, backed_bytes }
}

/// Samples taken of one range: enough to meet what a workload wrote, few enough to cost nothing.
const SAMPLES: u64 = 32;

/// Whether samples of the range hold zeros only. Reads through the file: a hole stays one.
fn is_zero(span: &Span, size: HugePageSize, target: &Target) -> bool {
    let bytes = span.guest.end - span.guest.start;
    let step = (bytes / SAMPLES).max(size.page_bytes());
    let mut sample = [0; 64];
    (span.guest.start..span.guest.end).step_by(usize::try_from(step).unwrap_or(usize::MAX)).all(|address| {
        // What cannot be read says nothing.
        target.backing.read_at(GuestAddress(address), &mut sample).is_err() || sample.iter().all(|byte| *byte == 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_their_span_side_by_side() {
        let span = Span { region: 1, guest: 100..1125, extent: 5100..6125 };
        let cut: Vec<Span> = parts(span.clone(), 512).collect();
        assert_eq!(cut.iter().map(|part| part.guest.clone()).collect::<Vec<_>>(), [100..612, 612..1124, 1124..1125]);
        assert!(cut.iter().all(|part| part.extent.start - part.guest.start == 5000 && part.region == 1));
        assert_eq!(cut.last().map(|part| part.extent.end), Some(span.extent.end));
        assert_eq!(parts(span.clone(), u64::MAX).collect::<Vec<_>>(), [span]);
    }
}
