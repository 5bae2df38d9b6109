//! A guest that reports its free memory while it runs: what it reported is really gone, and nothing else is.
//!
//! The guest's view: reported pages read zero, all others keep their pattern, also those that a second processor writes
//! to meanwhile, and pages that were taken back keep what was written then. The host's view, between the drop and the
//! guest's answer: pagemap shows no page of what was reported and every page of the rest.

use crate::machine::{Machine, Plan, backed_pages, memory};
use crate::program::{FIRST, HUGE_PAGE, HUGE_PAGES, PAGE, pattern};
use crate::runs_here;
use anyhow::{Result, ensure};
use fpr_host_agent::reporting::{Discard, GuestRange, LocalMemory, Source};
use fpr_protocol::{GuestAddress, Refusal};
use kvm_ioctls::Kvm;
use vm_memory::GuestMemoryMmap;

type Results = Vec<Result<u64, Refusal>>;

/// A discard, watched: after each drop it notes every huge page whose backing is not what it must be.
struct Watched<'a, D> {
    discard: D,
    memory: &'a GuestMemoryMmap,
    wrong: Vec<String>,
}

impl<D: Discard> Discard for Watched<'_, D> {
    fn discard(&mut self, source: Source, ranges: &[GuestRange]) -> Results {
        let results = self.discard.discard(source, ranges);
        let reported = |page: u64| ranges.iter().any(|range| range.start.0 == FIRST + page * HUGE_PAGE);
        match backed_pages(self.memory) {
            Ok(pages) => {
                for (page, backed) in (0..).zip(pages) {
                    if backed as u64 != if reported(page) { 0 } else { HUGE_PAGE / PAGE } {
                        self.wrong.push(format!("huge page {page} has {backed} pages, reported: {}", reported(page)));
                    }
                }
            }
            Err(error) => self.wrong.push(format!("{error:#}")),
        }
        results
    }
}

/// Every fourth huge page belongs to processor 1, so that each of them has neighbours that are reported; the last one
/// belongs to processor 0.
fn plan(processors: u8) -> Plan {
    let all = (1 << HUGE_PAGES) - 1;
    let second = if processors > 1 { 0x0044_4444 } else { 0 };
    let first = all & !second;
    let rounds = [
        // One, the first, the last, all, alternating ones, runs of three, and twice the same.
        0x00_0010, 0x00_0001, 0x80_0000, all, 0x55_5555, 0xb8_8bb8, 0x33_3333, 0x33_3333,
    ];
    Plan { first, second, rounds: rounds.into_iter().map(|round| round & first).collect() }
}

#[test]
fn a_guest_keeps_all_but_what_it_reports() -> Result<()> {
    if !runs_here("a_guest_keeps_all_but_what_it_reports") {
        return Ok(());
    }
    let processors = if Kvm::new()?.get_max_vcpus() > 1 { 2 } else { 1 };
    let plan = plan(processors);
    let memory = memory()?;
    let machine = Machine::new(&memory, &plan)?;
    let mut watched = Watched { discard: LocalMemory::new(&memory)?, memory: &memory, wrong: Vec::new() };
    let outcome = machine.run(&mut watched)?;
    ensure!(watched.wrong.is_empty(), "{:#?}", watched.wrong);
    let reported: u64 = plan.rounds.iter().map(|round| u64::from(round.count_ones()) * HUGE_PAGE).sum();
    let counters = outcome.counters;
    ensure!(counters.dropped_bytes == reported, "{reported} bytes reported: {counters:?}");
    ensure!(counters.refused_by_reason.is_empty() && counters.chains_malformed == 0, "{counters:?}");
    ensure!(processors == 1 || outcome.sweeps > 0, "processor 1 did nothing");
    println!("{processors} processors, {} sweeps, {reported} bytes dropped", outcome.sweeps);
    Ok(())
}

/// Ways to be wrong, each of which the guest must notice.
enum Wrong {
    /// Drops a page behind each range as well.
    OnePageTooMany,
    /// Returns before it drops, which it does when the next report comes.
    TooLate,
    /// Drops in time, and once more when the next report comes: the guest has taken its memory back by then.
    Again,
}

struct WrongDiscard {
    how: Wrong,
    right: LocalMemory,
    /// What was reported before.
    before: Vec<GuestRange>,
}

impl Discard for WrongDiscard {
    fn discard(&mut self, source: Source, ranges: &[GuestRange]) -> Results {
        let before = std::mem::replace(&mut self.before, ranges.to_vec());
        match self.how {
            Wrong::OnePageTooMany => {
                let more = ranges.iter().map(|range| GuestRange { bytes: range.bytes + PAGE, ..*range });
                self.right.discard(source, &more.collect::<Vec<_>>())
            }
            Wrong::TooLate => {
                self.right.discard(source, &before);
                ranges.iter().map(|range| Ok(range.bytes)).collect()
            }
            Wrong::Again => {
                self.right.discard(source, &before);
                self.right.discard(source, ranges)
            }
        }
    }
}

/// What the guest found, and what pagemap showed. One huge page is reported each round.
fn run_wrong(how: Wrong) -> Result<(String, Vec<String>)> {
    let plan = Plan { first: (1 << HUGE_PAGES) - 1, second: 0, rounds: vec![0b1, 0b10, 0b1000] };
    let memory = memory()?;
    let machine = Machine::new(&memory, &plan)?;
    let wrong = WrongDiscard { how, right: LocalMemory::new(&memory)?, before: Vec::new() };
    let mut watched = Watched { discard: wrong, memory: &memory, wrong: Vec::new() };
    match machine.run(&mut watched) {
        Ok(_) => Err(anyhow::anyhow!("the guest noticed nothing; pagemap: {:?}", watched.wrong)),
        Err(found) => Ok((found.to_string(), watched.wrong)),
    }
}

fn found(found: u64, expected: u64, at: u64) -> String {
    format!("processor 0: {found:#x} instead of {expected:#x} at {at:#x}")
}

#[test]
fn a_wrong_discard_is_noticed_by_the_guest_and_by_pagemap() -> Result<()> {
    if !runs_here("a_wrong_discard_is_noticed_by_the_guest_and_by_pagemap") {
        return Ok(());
    }
    let first = FIRST;
    let second = FIRST + HUGE_PAGE;
    let seen = |page: u64, backed: u64, reported: bool| {
        vec![format!("huge page {page} has {backed} pages, reported: {reported}")]
    };
    let pages = HUGE_PAGE / PAGE;

    let too_many = run_wrong(Wrong::OnePageTooMany)?;
    assert_eq!(too_many, (found(0, pattern(second, 1), second), seen(1, pages - 1, false)));

    let too_late = run_wrong(Wrong::TooLate)?;
    assert_eq!(too_late, (found(pattern(first, 1), 0, first), seen(0, pages, true)));

    // In round 2 the guest finds zeros where it had written the pattern of its second generation.
    let again = run_wrong(Wrong::Again)?;
    assert_eq!(again, (found(0, pattern(first, 2), first), seen(0, 0, false)));
    Ok(())
}

#[test]
fn the_pattern_fits_the_words_and_the_queue_the_report() {
    use crate::program::{BASE, GENERATIONS, MAX_ROUNDS, QUEUE_SIZE, REPORTED};
    assert!(pattern(FIRST + HUGE_PAGES * HUGE_PAGE, 0) < 1 << 32);
    assert!(HUGE_PAGES <= u64::from(QUEUE_SIZE) && GuestAddress(BASE + GENERATIONS + HUGE_PAGES * 8).0 < FIRST);
    assert!(REPORTED + (MAX_ROUNDS + 1) * 8 <= GENERATIONS && plan(2).rounds.len() as u64 <= MAX_ROUNDS);
}
