#![allow(clippy::unwrap_used)]
use super::super::cost::Basis;
use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const BUDGET: u64 = 1600 * MIB;
const TICK: Duration = Duration::from_secs(5);

fn between(low_mib: u64, high_mib: u64) -> Result<Estimate, Absent> {
    Ok(Estimate { basis: Basis::Process, low_bytes: low_mib * MIB, high_bytes: high_mib * MIB })
}

fn exactly(mib: u64) -> Result<Estimate, Absent> {
    between(mib, mib)
}

fn absent(reason: AbsentReason) -> Absent {
    Absent { reason, detail: "smaps_rollup: not permitted".to_owned() }
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn raised(mib: u64) -> Vec<Action> {
    vec![Action::Note(Note::Raised { cost_bytes: mib * MIB })]
}

fn cleared(mib: u64) -> Vec<Action> {
    vec![Action::Note(Note::Cleared { cost_bytes: Some(mib * MIB) })]
}

#[test]
fn an_exact_figure_needs_no_second_look() {
    let mut watch = Watch::new(BUDGET, at(0));
    assert_eq!(watch.estimated(exactly(1600), at(5)), [], "the budget may be used up");
    assert_eq!(watch.state(), &State::Below);
    assert_eq!(watch.estimated(exactly(1601), at(10)), raised(1601));
    assert_eq!(watch.estimated(exactly(1700), at(15)), []);
    assert_eq!(watch.estimated(exactly(1501), at(20)), [], "not far enough below");
    assert_eq!(watch.estimated(exactly(1500), at(25)), cleared(1500));
    let status = watch.status(at(27));
    assert_eq!((status.state, status.since_s, status.alarms, status.precise_reads), ("below", 2, 1, 0));
    assert_eq!((status.cost_bytes, status.cost_age_s), (Some(1500 * MIB), Some(2)));
}

#[test]
fn an_approximate_figure_raises_nothing_by_itself() {
    let mut watch = Watch::new(BUDGET, at(0));
    assert_eq!(watch.estimated(between(0, 1600), at(5)), []);
    assert_eq!(watch.estimated(between(0, 1601), at(10)), [Action::ReadPrecisely], "within its error of the budget");
    assert_eq!(watch.estimated(between(0, 9000), at(15)), [], "one is under way");
    assert_eq!(watch.state(), &State::Below);
    assert_eq!(watch.confirmed(Ok(1600 * MIB), at(0), at(16)), []);
    assert_eq!(watch.state(), &State::Below, "a false alarm is none");
    // Even one that must be above for certain is confirmed: the figure that is told is a precise one.
    assert_eq!(watch.estimated(between(1700, 9900), at(30)), [Action::ReadPrecisely]);
    assert_eq!(watch.confirmed(Ok(1750 * MIB), at(0), at(31)), raised(1750));
}

#[test]
fn an_alarm_ends_with_a_precise_figure_well_below() {
    let mut watch = Watch::new(BUDGET, at(0));
    watch.estimated(between(0, 1700), at(0));
    assert_eq!(watch.confirmed(Ok(1650 * MIB), at(0), at(0)), raised(1650));
    assert_eq!(watch.estimated(between(0, 100), at(5)), [], "two reads have a pause between them");
    assert_eq!(watch.estimated(between(0, 100), at(10)), [Action::ReadPrecisely]);
    assert_eq!(watch.confirmed(Ok(1501 * MIB), at(0), at(10)), []);
    assert_eq!(watch.state(), &State::Over);
    watch.estimated(between(0, 100), at(70));
    assert_eq!(watch.confirmed(Ok(90 * MIB), at(0), at(70)), cleared(90));
}

#[test]
fn without_a_precise_figure_the_alarm_says_so() {
    let mut watch = Watch::new(BUDGET, at(0));
    watch.estimated(between(0, 1700), at(0));
    let reason = absent(AbsentReason::NotPermitted);
    let note = Note::Unconfirmed { absent: reason.clone(), at_most_bytes: Some(1700 * MIB) };
    assert_eq!(watch.confirmed(Err(reason.clone()), at(0), at(0)), [Action::Note(note)]);
    let status = watch.status(at(1));
    assert_eq!((status.state, status.alarms, status.cost_bytes), ("unconfirmed", 0, None));
    assert!(status.detail.unwrap().contains("not permitted"));
    // The same again is not told again.
    watch.estimated(between(0, 1700), at(60));
    assert_eq!(watch.confirmed(Err(reason), at(0), at(60)), []);
    // The upper bound alone says that it is over.
    assert_eq!(watch.estimated(between(0, 1600), at(65)), []);
    assert_eq!(watch.state(), &State::Below);
    assert_eq!(watch.status(at(65)).detail, None);
}

#[test]
fn an_alarm_survives_two_bad_reads() {
    let mut watch = Watch::new(BUDGET, at(0));
    watch.estimated(exactly(1700), at(0));
    let failed = || Err(absent(AbsentReason::Failed));
    assert_eq!(watch.estimated(failed(), at(5)), []);
    assert_eq!(watch.estimated(failed(), at(10)), []);
    assert_eq!(watch.state(), &State::Over);
    assert_eq!(watch.estimated(failed(), at(15)).len(), 1);
    assert_eq!(watch.state(), &State::Unconfirmed(AbsentReason::Failed));
}

#[test]
fn the_end_of_the_process_is_the_end_of_the_alarm() {
    let mut watch = Watch::new(BUDGET, at(0));
    watch.estimated(exactly(1700), at(0));
    let gone = Action::Note(Note::Cleared { cost_bytes: None });
    assert_eq!(watch.estimated(Err(absent(AbsentReason::NoProcess)), at(5)), std::slice::from_ref(&gone));
    assert_eq!(watch.state(), &State::Idle);
    // A result for the process before is nobody's.
    watch.estimated(between(0, 1700), at(10));
    assert_eq!(watch.restarted(at(11)), []);
    assert_eq!(watch.confirmed(Ok(1700 * MIB), at(0), at(12)), []);
    assert_eq!(watch.state(), &State::Idle);
    watch.estimated(exactly(1700), at(15));
    assert_eq!(watch.restarted(at(16)), [gone]);
}

#[test]
fn reads_rest_and_come_back_when_something_moves() {
    let mut watch = Watch::new(BUDGET, at(0));
    let mut reads = Vec::new();
    for tick in 0..60 {
        let now = TICK * tick;
        if watch.estimated(between(0, 2000), now) == [Action::ReadPrecisely] {
            reads.push(now.as_secs());
            watch.confirmed(Ok(1000 * MIB), Duration::from_millis(1), now);
        }
    }
    assert_eq!(reads, [0, 10, 30, 70, 130, 190, 250]);
    // What was missing, 600 MiB, is there now by the cheap figure.
    assert_eq!(watch.estimated(between(0, 2599), at(261)), []);
    assert_eq!(watch.estimated(between(0, 2600), at(262)), [Action::ReadPrecisely]);
    // A slow read earns its rest whatever moves.
    watch.confirmed(Ok(1000 * MIB), Duration::from_secs(2), at(264));
    assert_eq!(watch.estimated(between(0, 9000), at(463)), []);
    assert_eq!(watch.estimated(between(0, 9000), at(464)), [Action::ReadPrecisely]);
}

#[test]
fn another_budget_is_looked_at_at_once() {
    let mut watch = Watch::new(BUDGET, at(0));
    watch.estimated(between(0, 1700), at(0));
    watch.confirmed(Ok(1650 * MIB), at(0), at(0));
    watch.set_budget(1700 * MIB);
    assert_eq!(watch.estimated(between(0, 1701), at(5)), [Action::ReadPrecisely]);
    watch.set_budget(1700 * MIB);
    assert_eq!(watch.confirmed(Ok(1500 * MIB), at(0), at(5)), cleared(1500));
}

/// One tick of a VM: its true cost, how far above it the upper bound is, and how long a precise read takes.
#[derive(Clone, Debug)]
struct Step {
    cost_mib: u64,
    blur_mib: u64,
    took_ms: u64,
    precise_fails: bool,
}

fn steps(failures: bool) -> impl Strategy<Value = Vec<Step>> {
    // Around the budget for most of the time, and for long enough on one side of it.
    let level = prop_oneof![0u64..4000, 1550u64..1650, Just(1601), Just(1600)];
    let phase = (level, prop_oneof![Just(0u64), 0u64..100, Just(5000)], 0u64..600, any::<bool>(), 1usize..40);
    proptest::collection::vec(phase, 1..12).prop_map(move |phases| {
        phases
            .into_iter()
            .flat_map(|(cost_mib, blur_mib, took_ms, fails, ticks)| {
                vec![Step { cost_mib, blur_mib, took_ms, precise_fails: failures && fails }; ticks]
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn no_alarm_without_a_precise_figure_and_no_figure_too_many(steps in steps(true)) {
        let mut watch = Watch::new(BUDGET, at(0));
        let (mut reads, mut read_ms) = (0u64, 0u64);
        // Raised and not cleared; the state may be unconfirmed meanwhile.
        let mut alarm = false;
        for (tick, step) in (0u32..).zip(&steps) {
            let now = TICK * tick;
            let truth = step.cost_mib * MIB;
            let was_over = alarm;
            let estimate = between(step.cost_mib.saturating_sub(step.blur_mib), step.cost_mib + step.blur_mib);
            let exact = step.blur_mib == 0;
            let mut actions = watch.estimated(estimate, now);
            if actions == [Action::ReadPrecisely] {
                prop_assert!(!exact);
                (reads, read_ms) = (reads + 1, read_ms + step.took_ms);
                let took = Duration::from_millis(step.took_ms);
                let result = if step.precise_fails { Err(absent(AbsentReason::Failed)) } else { Ok(truth) };
                actions = watch.confirmed(result, took, now + took);
            } else if !exact {
                prop_assert!(actions.is_empty(), "an approximate figure decides nothing: {actions:?}");
            }
            let is_over = *watch.state() == State::Over;
            match actions.as_slice() {
                [] => prop_assert!(was_over || !is_over, "told"),
                [Action::Note(Note::Raised { cost_bytes })] => {
                    alarm = true;
                    prop_assert!(*cost_bytes == truth && truth > BUDGET && !was_over && is_over);
                }
                [Action::Note(Note::Cleared { cost_bytes })] => {
                    alarm = false;
                    prop_assert!(*cost_bytes == Some(truth) && truth <= watch.clear_bytes() && was_over && !is_over);
                }
                [Action::Note(Note::Unconfirmed { .. })] => prop_assert!(step.precise_fails && !is_over),
                other => prop_assert!(false, "{other:?}"),
            }
            let elapsed = now + TICK;
            prop_assert!(reads <= 1 + elapsed.as_secs() / SHORTEST_PAUSE.as_secs());
            // A read that has just been made has its rest before it.
            prop_assert!(u128::from(read_ms.saturating_sub(600)) <= elapsed.as_millis() / 100 + 600);
        }
        prop_assert_eq!(watch.status(at(0)).precise_reads, reads);
    }

    #[test]
    fn every_crossing_raises_an_alarm_in_time(steps in steps(false)) {
        let mut watch = Watch::new(BUDGET, at(0));
        let mut above_since: Option<Duration> = None;
        for (tick, step) in (0u32..).zip(&steps) {
            let now = TICK * tick;
            let estimate = between(step.cost_mib.saturating_sub(step.blur_mib), step.cost_mib + step.blur_mib);
            if watch.estimated(estimate, now) == [Action::ReadPrecisely] {
                let took = Duration::from_millis(step.took_ms);
                watch.confirmed(Ok(step.cost_mib * MIB), took, now + took);
            }
            above_since = (step.cost_mib * MIB > BUDGET).then(|| above_since.unwrap_or(now));
            // Reads of up to 0.6 s rest for a minute at most; then the next tick asks.
            let late = above_since.is_some_and(|since| now - since > LONGEST_PAUSE + TICK);
            prop_assert!(!late || *watch.state() == State::Over, "tick {tick}: above since {above_since:?}");
        }
    }
}
