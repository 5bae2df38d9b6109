//! Dropping: what a worker does right before, during and after, for the agent's reports and for the kernel's.
//!
//! Called on a worker's thread with what the session has allowed. Checked again here, as late as can be: cancellation, the
//! VMM's processes, the devices' own rings, cookies, the deadline.

use super::boot_now;
use super::worker::{Target, gate, inspect};
use crate::backing::{ArmError, DropGuard, DropOutcome, GuestBacking, Span};
use crate::reporting::GuestRange;
use crate::session::job::{CookieKey, DropItem, DropOutput};
use fpr_protocol::{Cookie, Gate, GuestAddress, HugePageSize, Refusal};
use std::ops::ControlFlow;
use std::time::Duration;

/// Drops stop by themselves this long before the deadline at which the kernel would kill this process. One call of
/// `MAX_CALL_BYTES` takes about a millisecond; the rest is for a busy machine.
const DEADLINE_SLACK: Duration = Duration::from_millis(500);

/// The same for a kernel report, whose guest waits without a limit: little is left of it after 20 ms, and a host that swaps
/// can hold one call for a second. So it stops early and dies late.
const KERNEL_SLACK: Duration = Duration::from_millis(3500);

/// Of what a kernel report dropped, at most so much is looked at to see whether it is gone. Linux reports 128 MiB at most.
const LOOK_BYTES: u64 = 256 << 20;

/// Drops huge pages that the agent has isolated.
pub(super) fn drop_items(
    items: &[DropItem],
    size: HugePageSize,
    key: CookieKey,
    deadline: Duration,
    target: &Target,
    cancelled: &dyn Fn() -> bool,
) -> DropOutput {
    if let Some(refused) = refused_before(items.len(), target, cancelled) {
        return refused;
    }
    let rings = target.rings.hold();
    let locate = |item: &DropItem| match target.backing.map().locate(item.range, size)? {
        span if rings.lie_in(&span.guest) => Err(Refusal::DeviceRing),
        _ if !has_cookies(&target.backing, key, item, size) => Err(Refusal::CookieMismatch),
        span => Ok(vec![span]),
    };
    let located = items.iter().map(locate).collect();
    let until = Until { kill_at: deadline, slack: DEADLINE_SLACK };
    drop_located(located, until, target, cancelled, &|dropped, freed| still_backed(dropped, size, target, freed))
}

/// Drops what the guest's kernel has given away, and waits for.
pub(super) fn discard(
    ranges: &[GuestRange],
    deadline: Duration,
    target: &Target,
    cancelled: &dyn Fn() -> bool,
) -> DropOutput {
    if let Some(refused) = refused_before(ranges.len(), target, cancelled) {
        return refused;
    }
    let rings = target.rings.hold();
    let beside_rings = |spans: Vec<Span>| {
        if spans.iter().any(|span| rings.lie_in(&span.guest)) { Err(Refusal::DeviceRing) } else { Ok(spans) }
    };
    let located = target.backing.map().locate_kernel_report(ranges);
    let located = located.into_iter().map(|spans| spans.and_then(beside_rings)).collect();
    let until = Until { kill_at: deadline, slack: KERNEL_SLACK };
    drop_located(located, until, target, cancelled, &|dropped, _| still_backed_bytes(dropped, target))
}

/// What makes looking at the ranges pointless.
fn refused_before(items: usize, target: &Target, cancelled: &dyn Fn() -> bool) -> Option<DropOutput> {
    if cancelled() {
        return Some(DropOutput::refused(Refusal::Cancelled, items));
    }
    let process_gates: Vec<_> = inspect(target).into_iter().map(gate).collect();
    let closed = !process_gates.is_empty();
    closed.then(|| DropOutput { process_gates, ..DropOutput::refused(Refusal::Gated, items) })
}

/// When a drop has to be over: no call begins in the `slack` before `kill_at`.
#[derive(Clone, Copy)]
struct Until {
    kill_at: Duration,
    slack: Duration,
}

/// Drops items that consist of one or more spans each, or were refused. An item counts as dropped only as a whole.
fn drop_located(
    located: Vec<Result<Vec<Span>, Refusal>>,
    until: Until,
    target: &Target,
    cancelled: &dyn Fn() -> bool,
    look: &dyn Fn(&[&Span], u64) -> u64,
) -> DropOutput {
    let spans: Vec<Span> = located.iter().flatten().flatten().cloned().collect();
    let before = target.backing.allocated_bytes().unwrap_or(0);
    let outcomes = match drop_before(until, &spans, target, cancelled) {
        Ok(outcomes) => outcomes,
        Err(error) => {
            let error = Some(format!("{error}"));
            return DropOutput { error, ..DropOutput::refused(Refusal::DropFailed, located.len()) };
        }
    };
    let stopped_by = if cancelled() { Refusal::Cancelled } else { Refusal::LeaseExpired };
    let errno = outcomes.iter().find_map(|outcome| match outcome {
        DropOutcome::Failed { errno, .. } => Some(errno),
        _ => None,
    });
    let error = errno.map(|errno| format!("fallocate(PUNCH_HOLE) on guest memory: {errno}"));
    let mut outcomes_left = outcomes.iter().copied();
    let results = located
        .into_iter()
        .map(|item| item.and_then(|spans| judge(outcomes_left.by_ref().take(spans.len()), stopped_by)))
        .collect();
    let whole = |(outcome, _): &(&DropOutcome, &Span)| matches!(outcome, DropOutcome::Dropped { .. });
    let dropped: Vec<&Span> = outcomes.iter().zip(&spans).filter(whole).map(|(_, span)| span).collect();
    let after = target.backing.allocated_bytes().unwrap_or(before);
    DropOutput {
        still_backed_bytes: look(&dropped, before.saturating_sub(after)),
        allocated_bytes: (before, after),
        raced: inspect(target)
            .into_iter()
            .find(|finding| finding.gate == Gate::AssignedDevice)
            .map(|finding| finding.detail),
        results,
        error,
        process_gates: Vec::new(),
    }
}

/// The bytes dropped of an item, or why it is not dropped as a whole. Only an untouched item may be called anything but
/// failed.
fn judge(outcomes: impl Iterator<Item = DropOutcome>, stopped_by: Refusal) -> Result<u64, Refusal> {
    let (mut dropped, mut refusal) = (0, None);
    for outcome in outcomes {
        let bytes = match outcome {
            DropOutcome::Dropped { bytes } => bytes,
            DropOutcome::Stopped { bytes } => {
                refusal.get_or_insert(stopped_by);
                bytes
            }
            DropOutcome::Failed { bytes, .. } => {
                refusal = Some(Refusal::DropFailed);
                bytes
            }
        };
        dropped += bytes;
    }
    match refusal {
        None => Ok(dropped),
        Some(_) if dropped > 0 => Err(Refusal::DropFailed),
        Some(refusal) => Err(refusal),
    }
}

/// Drops with the kernel's promise that nothing is dropped after the deadline.
fn drop_before(
    until: Until,
    spans: &[Span],
    target: &Target,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<DropOutcome>, ArmError> {
    let stop_at = until.kill_at.saturating_sub(until.slack);
    let mut keep_going = || {
        if cancelled() || boot_now() >= stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    // Arming a deadline that has passed would kill at once.
    if keep_going().is_break() {
        return Ok(vec![DropOutcome::Stopped { bytes: 0 }; spans.len()]);
    }
    let _guard = DropGuard::arm(until.kill_at)?;
    Ok(target.backing.drop_spans(spans, &mut keep_going))
}

/// Bytes of the dropped spans that are still backed although the guest is locked out.
fn still_backed(dropped: &[&Span], size: HugePageSize, target: &Target, freed_bytes: u64) -> u64 {
    let bytes = |span: &Span| span.extent.end - span.extent.start;
    if !target.backing.sees_holes() {
        // The file's block count is all there is; what the guest touches elsewhere blurs it.
        let dropped_bytes: u64 = dropped.iter().map(|span| bytes(span)).sum();
        return dropped_bytes.saturating_sub(freed_bytes);
    }
    dropped
        .iter()
        .filter_map(|span| target.backing.backed(span, size, &mut || ControlFlow::Continue(())).ok())
        .flatten()
        .map(|range| range.backed_bytes)
        .sum()
}

fn has_cookies(backing: &GuestBacking, key: CookieKey, item: &DropItem, size: HugePageSize) -> bool {
    let Some(first) = item.first_cookie else { return true };
    (0..item.range.count).all(|number| {
        let page = GuestAddress(item.range.start.0 + u64::from(number) * size.bytes());
        first.checked_add(number).is_some_and(|index| has_cookie(backing, key, index, page))
    })
}

pub(super) fn has_cookie(backing: &GuestBacking, key: CookieKey, index: u32, address: GuestAddress) -> bool {
    let CookieKey { session_nonce, sequence } = key;
    let wanted = Cookie { session_nonce, sequence, index, address }.to_bytes();
    let mut found = [0; Cookie::LEN];
    backing.read_at(address, &mut found).is_ok() && found == wanted
}

/// The same for a kernel report, whose ranges need not be huge pages. Where holes are invisible nothing is said: the
/// kernel reports memory that was never touched, too, and dropping that frees nothing.
fn still_backed_bytes(dropped: &[&Span], target: &Target) -> u64 {
    if !target.backing.sees_holes() {
        return 0;
    }
    let mut left = LOOK_BYTES;
    let mut backed = 0;
    for span in dropped {
        let bytes = span.extent.end - span.extent.start;
        if bytes > left {
            break;
        }
        left -= bytes;
        backed += target.backing.whole_pages_backed(span).unwrap_or(0);
    }
    backed
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::backing::{MemoryMap, Region};
    use crate::device::DeviceKind;
    use fpr_protocol::HugePageRange;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    const PAGE: u64 = 4096;

    /// 64 pages of a memfd, full of 0xaa, in two neighbouring regions.
    fn target() -> (Arc<File>, Target) {
        let file = File::from(memfd_create("guest", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all_at(&vec![0xaa; 64 * 4096], 0).unwrap();
        let file = Arc::new(file);
        let region = |page: u64| Region {
            guest_address: GuestAddress(page * PAGE),
            bytes: 32 * PAGE,
            file: Arc::clone(&file),
            file_offset: page * PAGE,
        };
        let backing = GuestBacking::new(MemoryMap::new(vec![region(0), region(32)]).unwrap()).unwrap();
        (
            file,
            Target {
                backing: Arc::new(backing),
                processes: Vec::new(),
                mappings: Vec::new(),
                proc_root: "/proc".into(),
                rings: Arc::default(),
            },
        )
    }

    fn in_use(file: &File) -> Vec<bool> {
        let mut content = vec![0; 64 * 4096];
        file.read_exact_at(&mut content, 0).unwrap();
        content.chunks(4096).map(|page| page.contains(&0xaa)).collect()
    }

    fn soon() -> Duration {
        boot_now() + Duration::from_secs(60)
    }

    fn pages(first: u64, count: u64) -> GuestRange {
        GuestRange { start: GuestAddress(first * PAGE), bytes: count * PAGE }
    }

    #[test]
    fn a_kernel_report_is_dropped_to_whole_pages_across_regions() {
        let (file, target) = target();
        let ragged = GuestRange { start: GuestAddress(10), bytes: 2 * PAGE };
        let output = discard(&[ragged, pages(30, 4), pages(63, 2), pages(31, 1)], soon(), &target, &|| false);
        let refused = |refusal| Err(refusal);
        assert_eq!(
            output.results,
            [Ok(PAGE), Ok(4 * PAGE), refused(Refusal::OutsideMemory), refused(Refusal::Overlapping)]
        );
        let gone: Vec<usize> = (0..64).filter(|page| !in_use(&file)[*page]).collect();
        assert_eq!(gone, [1, 30, 31, 32, 33]);
        assert_eq!((output.still_backed_bytes, output.error), (0, None));
        assert_eq!(output.allocated_bytes.0 - output.allocated_bytes.1, 5 * PAGE);
    }

    #[test]
    fn what_holds_a_ring_is_refused_and_the_rest_is_dropped() {
        let (file, target) = target();
        // The last descriptor of the one lies in page 4, the used ring of the other in page 33, in another region.
        target.rings.set(DeviceKind::Balloon, 2, [3 * PAGE + 16..4 * PAGE + 16, 20..22, 20..22]);
        target.rings.set(DeviceKind::Vsock, 0, [20..22, 20..22, 33 * PAGE + 7..33 * PAGE + 8]);
        let ranges = [pages(1, 2), pages(4, 1), pages(5, 1), pages(31, 3), pages(34, 1), pages(63, 2)];
        let output = discard(&ranges, soon(), &target, &|| false);
        let ring = Err(Refusal::DeviceRing);
        assert_eq!(output.results, [Ok(2 * PAGE), ring, Ok(PAGE), ring, Ok(PAGE), Err(Refusal::OutsideMemory)]);
        let gone: Vec<usize> = (0..64).filter(|page| !in_use(&file)[*page]).collect();
        assert_eq!(gone, [1, 2, 5, 34]);

        let size = HugePageSize::new(4096, 1).unwrap();
        let item = |page: u64, count| DropItem {
            range: HugePageRange { start: GuestAddress(page * PAGE), count },
            first_cookie: None,
        };
        let key = CookieKey { session_nonce: 1, sequence: 1 };
        let output = drop_items(&[item(8, 2), item(16, 9), item(2, 1)], size, key, soon(), &target, &|| false);
        assert_eq!(output.results, [Ok(4 * PAGE), Err(Refusal::CrossesRegions), ring]);
        target.rings.clear(DeviceKind::Balloon);
        let output = drop_items(&[item(2, 1)], size, key, soon(), &target, &|| false);
        assert_eq!(output.results, [Ok(2 * PAGE)], "a device that has stopped has no rings");
    }

    #[test]
    fn nothing_is_dropped_late_or_after_it_was_cancelled() {
        let (file, target) = target();
        let late = discard(&[pages(1, 2), pages(9, 1)], boot_now() + KERNEL_SLACK, &target, &|| false);
        assert_eq!(late.results, [Err(Refusal::LeaseExpired); 2]);
        // Long ago: arming the guard for it would kill this process.
        let late = discard(&[pages(1, 2)], Duration::from_nanos(1), &target, &|| false);
        assert_eq!(late.results, [Err(Refusal::LeaseExpired)]);
        let cancelled = discard(&[pages(1, 2)], soon(), &target, &|| true);
        assert_eq!(cancelled.results, [Err(Refusal::Cancelled)]);
        assert!(in_use(&file).iter().all(|page| *page));
    }

    #[test]
    fn either_front_ends_process_closes_the_gate() {
        let (file, mut target) = target();
        target.processes = vec![Some(nix::unistd::Pid::this()), None];
        let output = discard(&[pages(1, 2)], soon(), &target, &|| false);
        assert_eq!(output.results, [Err(Refusal::Gated)]);
        assert_eq!(output.process_gates[0].0, Gate::Uninspectable);
        assert!(in_use(&file).iter().all(|page| *page));
    }
}
