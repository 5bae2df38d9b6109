//! Reports, surveys and proofs of a live session, and the answers of the worker.

use super::effect::{Content, KernelReturned, Question, Watched};
use super::job::{CookieKey, DropItem, DropOutput, Job, JobId, JobOutput};
use super::{Action, Note, PendingJob, Phase, Ranges, Reply, STILL_BACKED, Session};
use crate::device::DeviceKind;
use crate::reporting::GuestRange;
use crate::session::gates::GateSource;
use fpr_protocol::message::{Ack, Prove, Proven, RangeResult, Report, Survey, SurveyReply};
use fpr_protocol::{
    CloseReason, Gate, HugePageRange, HugePageSize, Isolation, MAX_PROOFS, MAX_REPORT_RANGES, MAX_SURVEY_RANGES,
    Message, Refusal, ReportedRange,
};
use std::time::Duration;

/// A report whose drops are on the way.
pub(super) struct PendingReport {
    sequence: u64,
    size: HugePageSize,
    ranges: Vec<ReportedRange>,
    /// Per range the refusal so far; `None` for those that went into the job, in order.
    refused: Vec<Option<Refusal>>,
    /// Per range the region, for those in the job.
    regions: Vec<usize>,
    huge_pages_in_flight: u64,
}

impl Session {
    pub(super) fn prove(&mut self, prove: Prove) -> Result<(), CloseReason> {
        let Prove { sequence, pages } = prove;
        let jobs = self.jobs_of(DeviceKind::Vsock);
        let Phase::Active(active) = &mut self.phase else { return Err(CloseReason::UnexpectedMessage) };
        active.take_sequence(sequence)?;
        if pages.len() > MAX_PROOFS {
            return Err(CloseReason::InvalidValue);
        }
        if jobs >= self.config.max_jobs {
            return Err(CloseReason::Flood);
        }
        let key = CookieKey { session_nonce: active.nonce, sequence };
        let regions = match &self.layout {
            Some(layout) => pages.iter().map(|page| layout.region_of(*page)).collect(),
            None => vec![None; pages.len()],
        };
        self.start(Reply::Prove { sequence, regions }, Some(key.session_nonce), Job::Prove { pages, key });
        Ok(())
    }

    pub(super) fn survey(&mut self, survey: Survey) -> Result<(), CloseReason> {
        let Survey { sequence, ranges } = survey;
        let jobs = self.jobs_of(DeviceKind::Vsock);
        let Phase::Active(active) = &mut self.phase else { return Err(CloseReason::UnexpectedMessage) };
        active.take_sequence(sequence)?;
        if ranges.len() > MAX_SURVEY_RANGES {
            return Err(CloseReason::InvalidValue);
        }
        if jobs >= self.config.max_jobs {
            return Err(CloseReason::Flood);
        }
        let (nonce, size) = (active.nonce, active.size);
        // Ranges that cannot be dropped are not backed as far as the guest is concerned.
        let ranges = match &self.layout {
            Some(layout) => {
                let checked = layout.check(&ranges, size);
                ranges.into_iter().zip(checked).filter(|(_, check)| check.is_ok()).map(|(range, _)| range).collect()
            }
            None => Vec::new(),
        };
        self.counters.surveys += 1;
        self.start(Reply::Survey { sequence }, Some(nonce), Job::Survey { ranges, size });
        Ok(())
    }

    pub(super) fn report(&mut self, report: Report, now: Duration) -> Result<(), CloseReason> {
        let Report { sequence, sent_at_ns, ranges } = report;
        let Phase::Active(active) = &mut self.phase else { return Err(CloseReason::UnexpectedMessage) };
        active.take_sequence(sequence)?;
        if ranges.len() > MAX_REPORT_RANGES {
            return Err(CloseReason::InvalidValue);
        }
        let (connection, size) = (active.connection, active.size);
        let key = CookieKey { session_nonce: active.nonce, sequence };

        self.counters.reports += 1;
        for reported in &ranges {
            let count = u64::from(reported.range.count);
            self.counters.huge_pages_reported += count;
            match reported.isolation {
                Isolation::Offlined => self.counters.huge_pages_offlined += count,
                Isolation::Claimed => self.counters.huge_pages_claimed += count,
            }
        }

        let (checked, sent_at) = match self.judge(&ranges, sent_at_ns, now) {
            Ok(judged) => judged,
            Err(refusal) => {
                if matches!(refusal, Refusal::ClockUnknown | Refusal::LeaseExpired | Refusal::FromFuture)
                    && let Phase::Active(active) = &mut self.phase
                {
                    active.hurry_ping(now);
                }
                let results = ranges.iter().map(|_| RangeResult::Refused(refusal)).collect();
                for reported in &ranges {
                    self.counters.refused(refusal, u64::from(reported.range.count));
                    let bytes = reported.range.bytes(size);
                    self.counters.source(reported.isolation.into()).count(bytes, Err(refusal));
                }
                self.actions.push(Action::Send(connection, Message::Ack(Ack { sequence, results })));
                return Ok(());
            }
        };

        let mut items = Vec::new();
        let mut refused = Vec::new();
        let mut regions = Vec::new();
        let mut next_cookie: u32 = 0;
        let mut in_flight = 0;
        for (reported, check) in ranges.iter().zip(checked) {
            let first_cookie = (reported.isolation == Isolation::Claimed).then_some(next_cookie);
            if first_cookie.is_some() {
                next_cookie = next_cookie.saturating_add(reported.range.count);
            }
            match check {
                Ok(region) => {
                    items.push(DropItem { range: reported.range, first_cookie });
                    refused.push(None);
                    regions.push(region);
                    in_flight += u64::from(reported.range.count);
                }
                Err(refusal) => refused.push(Some(refusal)),
            }
        }
        let pending = PendingReport { sequence, size, ranges, refused, regions, huge_pages_in_flight: in_flight };
        if items.is_empty() {
            self.answer(pending, &[]);
            return Ok(());
        }
        if let Phase::Active(active) = &mut self.phase {
            active.huge_pages_in_flight += in_flight;
        }
        let deadline = sent_at + self.config.lease + self.config.grace;
        self.start(Reply::Ack(pending), Some(key.session_nonce), Job::Drop { items, size, key, deadline });
        Ok(())
    }

    /// What holds for the report as a whole, then for each range; with the earliest time it can have been sent.
    #[allow(clippy::type_complexity)]
    fn judge(
        &self,
        ranges: &[ReportedRange],
        sent_at_ns: u64,
        now: Duration,
    ) -> Result<(Vec<Result<usize, Refusal>>, Duration), Refusal> {
        let Phase::Active(active) = &self.phase else { return Err(Refusal::Gated) };
        if !self.gates.open_for(DeviceKind::Vsock) {
            return Err(Refusal::Gated);
        }
        let sent_at = active.clock.sent_at(sent_at_ns, now)?;
        if now.saturating_sub(sent_at) > self.config.lease {
            return Err(Refusal::LeaseExpired);
        }
        let layout = self.layout.as_ref().ok_or(Refusal::OutsideMemory)?;
        let plain: Vec<HugePageRange> = ranges.iter().map(|reported| reported.range).collect();
        let mut checked = layout.check(&plain, active.size);
        for (check, reported) in checked.iter_mut().zip(ranges) {
            // A claimed page proves itself by its cookie; offlined memory holds none.
            if let Ok(region) = check
                && reported.isolation == Isolation::Offlined
                && !active.proven.get(*region).copied().unwrap_or(false)
            {
                *check = Err(Refusal::AddressUnproven);
            }
        }
        let wanted: u64 = checked
            .iter()
            .zip(ranges)
            .filter(|(check, _)| check.is_ok())
            .map(|(_, reported)| u64::from(reported.range.count))
            .sum();
        if active.huge_pages_in_flight + wanted > u64::from(self.config.max_huge_pages_in_flight)
            || self.jobs_of(DeviceKind::Vsock) >= self.config.max_jobs
        {
            return Err(Refusal::TooMuchInFlight);
        }
        Ok((checked, sent_at))
    }

    pub(super) fn job_finished(&mut self, id: JobId, output: JobOutput, now: Duration) {
        let Some(PendingJob { session_nonce, reply, .. }) = self.jobs.remove(&id) else { return };
        let live = matches!(&self.phase, Phase::Active(active) if Some(active.nonce) == session_nonce);
        match (reply, output) {
            (Reply::Kernel(pending), output) => self.discard_finished(&pending, output, now),
            (Reply::Ack(pending), JobOutput::Drop(output)) => self.drop_finished(pending, &output, live, now),
            (Reply::Ack(pending), _) => {
                let output = DropOutput::refused(Refusal::DropFailed, pending.regions.len());
                self.drop_finished(pending, &output, live, now);
            }
            (Reply::Survey { sequence }, output) if live => {
                let backed = match output {
                    JobOutput::Survey(backed) => backed,
                    _ => Vec::new(),
                };
                self.send(Message::SurveyReply(SurveyReply { sequence, backed }));
            }
            (Reply::Prove { sequence, regions }, output) if live => {
                let fits = match output {
                    JobOutput::Prove(fits) => fits,
                    _ => vec![false; regions.len()],
                };
                self.proved(sequence, &regions, &fits);
            }
            (Reply::Refault { dropped_bytes }, JobOutput::LookedBack { looked_bytes, backed_bytes }) => {
                self.looked_back(dropped_bytes, looked_bytes, backed_bytes);
            }
            (Reply::Look(watched), JobOutput::Look(backed, content)) if live => {
                self.looked(watched, backed, content, now);
            }
            _ => {}
        }
    }

    fn proved(&mut self, sequence: u64, regions: &[Option<usize>], fits: &[bool]) {
        let Phase::Active(active) = &mut self.phase else { return };
        let mut mismatches = 0;
        for (index, region) in regions.iter().enumerate() {
            match region {
                Some(region) if fits.get(index).copied().unwrap_or(false) => {
                    if let Some(proven) = active.proven.get_mut(*region) {
                        *proven = true;
                    }
                }
                _ => mismatches += 1,
            }
        }
        // One wrong page means that the translation is not what both sides think: trust none of it.
        if mismatches > 0 {
            active.proven.fill(false);
        }
        let regions = active.proven.clone();
        self.send(Message::Proven(Proven { sequence, regions, mismatches }));
    }

    /// What a drop says of the VM, whoever reported.
    pub(super) fn dropped_somehow(&mut self, output: &DropOutput, now: Duration) {
        if !output.process_gates.is_empty() {
            self.gates.replace(GateSource::Process, output.process_gates.clone(), now);
        }
        if let Some(found) = &output.raced {
            self.actions.push(Action::Note(Note::DeviceRaced(found.clone())));
        }
        if let Some(error) = &output.error {
            self.actions.push(Action::Note(Note::DropFailed(error.clone())));
        }
        self.counters.freed_bytes += output.allocated_bytes.0.saturating_sub(output.allocated_bytes.1);
    }

    fn drop_finished(&mut self, pending: PendingReport, output: &DropOutput, live: bool, now: Duration) {
        self.dropped_somehow(output, now);
        if live && let Phase::Active(active) = &mut self.phase {
            active.huge_pages_in_flight = active.huge_pages_in_flight.saturating_sub(pending.huge_pages_in_flight);
        }
        let dropped: Vec<(usize, ReportedRange)> = pending
            .ranges
            .iter()
            .zip(&pending.refused)
            .filter(|(_, refused)| refused.is_none())
            .map(|(reported, _)| *reported)
            .enumerate()
            .filter(|(index, _)| matches!(output.results.get(*index), Some(Ok(_))))
            .collect();
        let dropped_bytes: u64 = dropped.iter().map(|(_, reported)| reported.range.bytes(pending.size)).sum();
        let ranges = |(_, reported): &(usize, ReportedRange)| GuestRange {
            start: reported.range.start,
            bytes: reported.range.bytes(pending.size),
        };
        let dropped_ranges: Vec<GuestRange> = dropped.iter().map(ranges).collect();
        self.watch_refaults(DeviceKind::Vsock, &dropped_ranges, dropped_bytes, now);
        if dropped_bytes > 0 && live {
            for (index, reported) in &dropped {
                if let (Isolation::Claimed, Phase::Active(active)) = (reported.isolation, &mut self.phase)
                    && let Some(proven) = pending.regions.get(*index).and_then(|region| active.proven.get_mut(*region))
                {
                    *proven = true;
                }
            }
            if self.effect.still_backed(dropped_bytes, output.still_backed_bytes) {
                self.gates.close(Gate::Ineffective, GateSource::Measured, STILL_BACKED.to_owned(), now);
            }
            let offlined = dropped.iter().all(|(_, reported)| reported.isolation == Isolation::Offlined);
            let returned = if offlined { KernelReturned::ToTail } else { KernelReturned::ToHead };
            let ranges: Vec<HugePageRange> = dropped.iter().map(|(_, reported)| reported.range).collect();
            self.effect.dropped(&(ranges, pending.size), dropped_bytes, returned, now);
        }
        if live {
            // While the session lives only a closed gate cancels.
            let gated = |result: &Result<u64, Refusal>| match result {
                Err(Refusal::Cancelled) => Err(Refusal::Gated),
                result => *result,
            };
            self.answer(pending, &output.results.iter().map(gated).collect::<Vec<_>>());
        } else {
            self.count_results(&pending, &output.results);
        }
    }

    fn looked(&mut self, watched: Watched<Ranges>, backed: u64, content: Content, now: Duration) {
        let dropped_bytes = watched.dropped_bytes;
        match watched.question {
            Question::WriteOnFree | Question::WriteOnFreeAtLast => {
                if self.effect.returned(watched, backed, content, now) {
                    let detail = "what the guest took back was backed again at once, report after report: its kernel \
                                  writes to pages when it frees them (init_on_free, KASAN)";
                    self.gates.close(Gate::WriteOnFree, GateSource::Measured, detail.to_owned(), now);
                }
            }
            Question::Refault => {
                let returned_bytes = backed.min(dropped_bytes);
                self.counters.refault_watched_bytes += dropped_bytes;
                self.counters.refault_returned_bytes += returned_bytes;
                self.send(Message::Refaults { dropped_bytes, returned_bytes });
            }
        }
    }

    /// What was looked at stands for all that was dropped with it.
    fn looked_back(&mut self, dropped_bytes: u64, looked_bytes: u64, backed_bytes: u64) {
        if looked_bytes == 0 {
            return;
        }
        let share = u128::from(dropped_bytes) * u128::from(backed_bytes.min(looked_bytes)) / u128::from(looked_bytes);
        let returned_bytes = u64::try_from(share).unwrap_or(dropped_bytes);
        let add = |sum: &mut u64, bytes: u64| *sum = sum.saturating_add(bytes);
        add(&mut self.counters.refault_minute_watched_bytes, dropped_bytes);
        add(&mut self.counters.refault_minute_returned_bytes, returned_bytes);
    }

    /// Counts and sends the `Ack`.
    fn answer(&mut self, pending: PendingReport, job_results: &[Result<u64, Refusal>]) {
        let results = self.count_results(&pending, job_results);
        self.send(Message::Ack(Ack { sequence: pending.sequence, results }));
    }

    fn count_results(&mut self, pending: &PendingReport, job_results: &[Result<u64, Refusal>]) -> Vec<RangeResult> {
        let mut job_results = job_results.iter();
        let mut results = Vec::with_capacity(pending.ranges.len());
        for (reported, refused) in pending.ranges.iter().zip(&pending.refused) {
            let result = match refused {
                Some(refusal) => Err(*refusal),
                None => job_results.next().copied().unwrap_or(Err(Refusal::DropFailed)),
            };
            let huge_pages = u64::from(reported.range.count);
            self.counters.source(reported.isolation.into()).count(reported.range.bytes(pending.size), result);
            results.push(match result {
                Ok(bytes) => {
                    self.counters.huge_pages_dropped += huge_pages;
                    RangeResult::Dropped { bytes }
                }
                Err(refusal) => {
                    self.counters.refused(refusal, huge_pages);
                    RangeResult::Refused(refusal)
                }
            });
        }
        results
    }

    fn send(&mut self, message: Message) {
        if let Phase::Active(active) = &self.phase {
            self.actions.push(Action::Send(active.connection, message));
        }
    }
}
