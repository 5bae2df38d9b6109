//! Which VM to ask for memory: an order by what could be reclaimed, on precise figures. Pure; reads are the caller's.
//!
//! Used by the `rank` command and by `bench rank`. What a VM holds is measured by the host; how much of it its guest does
//! not use is the guest's claim, bounded by the size of its memory. A guest that lies moves itself up or down and gains
//! nothing: what it is asked for it gives back or not.
//!
//! Two stages. The cheap upper bounds of all VMs decide in which order they are read precisely, and reading ends when no
//! upper bound that is left can beat what is known precisely: the result is the one of reading all precisely.

use super::Absent;
use super::cost::Estimate;
use fpr_protocol::Gate;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::cmp::Reverse;

/// Why nothing can be reclaimed of a VM now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// Nothing is dropped while these gates are closed.
    #[error("closed: {}", .gates.iter().map(|gate| gate.word()).collect::<Vec<_>>().join(", "))]
    Gated {
        /// Which.
        gates: Vec<Gate>,
    },
    /// Nobody in the guest can be asked.
    #[error("no agent in the guest")]
    NoAgent,
    /// The agent has not said yet how much memory its guest uses.
    #[error("no figures from the guest yet")]
    NoClaim,
    /// The host cannot measure what the VM holds.
    #[error("no figure: {0}")]
    NoFigure(Absent),
    /// The VM's task did not answer in time.
    #[error("the VM's task does not answer")]
    NoAnswer,
}

impl Obstacle {
    /// The word of JSON.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Gated { .. } => "gated",
            Self::NoAgent => "no-agent",
            Self::NoClaim => "no-claim",
            Self::NoFigure(_) => "no-figure",
            Self::NoAnswer => "no-answer",
        }
    }
}

impl Serialize for Obstacle {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("reason", self.word())?;
        if let Self::Gated { gates } = self {
            map.serialize_entry("gates", gates)?;
        }
        map.serialize_entry("detail", &self.to_string())?;
        map.end()
    }
}

/// What is known of a VM before anything is read precisely.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name; names are unique.
    pub name: String,
    /// What its guest uses of what it holds, claimed by the guest, at most its size.
    pub guest_claimed_used_bytes: Option<u64>,
    /// What the VM holds, cheaply; or why nothing can be reclaimed.
    pub held: Result<Estimate, Obstacle>,
}

impl Candidate {
    /// At most this can be reclaimed.
    fn at_most_bytes(&self) -> u64 {
        self.held.as_ref().map_or(0, |held| self.reclaimable(held.high_bytes))
    }

    fn reclaimable(&self, held_bytes: u64) -> u64 {
        held_bytes.saturating_sub(self.guest_claimed_used_bytes.unwrap_or(u64::MAX))
    }

    /// With what was read precisely, if anything was.
    fn rank(self, held: Result<u64, Obstacle>) -> Ranked {
        match held {
            Ok(held_bytes) => Ranked {
                reclaimable_bytes: self.reclaimable(held_bytes),
                name: self.name,
                held_bytes: Some(held_bytes),
                guest_claimed_used_bytes: self.guest_claimed_used_bytes,
                obstacle: None,
            },
            Err(obstacle) => Ranked {
                name: self.name,
                reclaimable_bytes: 0,
                held_bytes: None,
                guest_claimed_used_bytes: self.guest_claimed_used_bytes,
                obstacle: Some(obstacle),
            },
        }
    }
}

/// A VM in its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ranked {
    /// Its name.
    pub name: String,
    /// Could be reclaimed: held and not used. 0 with an obstacle.
    pub reclaimable_bytes: u64,
    /// What it holds of its host, measured precisely.
    pub held_bytes: Option<u64>,
    /// What its guest says it uses.
    pub guest_claimed_used_bytes: Option<u64>,
    /// Why nothing can be reclaimed.
    pub obstacle: Option<Obstacle>,
}

impl Ranked {
    /// Total order: most reclaimable first, then those without an obstacle, then by name.
    fn key(&self) -> (Reverse<u64>, bool, &str) {
        (Reverse(self.reclaimable_bytes), self.obstacle.is_some(), &self.name)
    }
}

/// The first `top` VMs in their order; `read` gives what a VM holds, precisely.
///
/// A VM whose estimate is exact is not read again, and neither is one that cannot come among the first any more.
pub fn first(
    mut candidates: Vec<Candidate>,
    top: usize,
    mut read: impl FnMut(&Candidate) -> Result<u64, Absent>,
) -> Vec<Ranked> {
    // Among equal bounds, a name that comes first can still win the tie: it has to be looked at first.
    candidates.sort_by(|a, b| (Reverse(a.at_most_bytes()), &a.name).cmp(&(Reverse(b.at_most_bytes()), &b.name)));
    let mut ranked: Vec<Ranked> = Vec::new();
    for candidate in candidates {
        if ranked.len() >= top && !can_come_in(&candidate, top.checked_sub(1).and_then(|last| ranked.get(last))) {
            // The bounds only fall from here, but ties are broken by more than the bound: the others are looked at, too.
            continue;
        }
        let held = match &candidate.held {
            Ok(estimate) => match estimate.exact() {
                Some(exact) => Ok(exact),
                None => read(&candidate).map_err(Obstacle::NoFigure),
            },
            Err(obstacle) => Err(obstacle.clone()),
        };
        let found = candidate.rank(held);
        let place = ranked.partition_point(|other| other.key() < found.key());
        ranked.insert(place, found);
        ranked.truncate(top);
    }
    ranked
}

/// Whether the best that this one can turn out to be comes before the last that is in.
fn can_come_in(candidate: &Candidate, last: Option<&Ranked>) -> bool {
    let Some(last) = last else { return false };
    (Reverse(candidate.at_most_bytes()), candidate.held.is_err(), candidate.name.as_str()) < last.key()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::AbsentReason;
    use super::super::cost::Basis;
    use super::*;
    use proptest::prelude::*;
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    /// A VM as it truly is.
    #[derive(Clone, Debug)]
    struct Vm {
        held: u64,
        blur: u64,
        used: Option<u64>,
        obstacle: Option<Obstacle>,
        unreadable: bool,
    }

    impl Vm {
        fn new(held: u64, blur: u64, used: u64) -> Self {
            Self { held, blur, used: Some(used), obstacle: None, unreadable: false }
        }

        fn candidate(&self, name: &str) -> Candidate {
            let estimate = Estimate {
                basis: Basis::Process,
                low_bytes: self.held - self.blur.min(self.held),
                high_bytes: self.held + self.blur,
            };
            let held = match &self.obstacle {
                Some(obstacle) => Err(obstacle.clone()),
                None => Ok(estimate),
            };
            Candidate { name: name.to_owned(), guest_claimed_used_bytes: self.used, held }
        }
    }

    fn failed() -> Absent {
        Absent { reason: AbsentReason::Failed, detail: "gone".to_owned() }
    }

    /// The ranking and the names that were read precisely.
    fn rank(vms: &BTreeMap<String, Vm>, top: usize) -> (Vec<Ranked>, Vec<String>) {
        let reads = RefCell::new(Vec::new());
        let candidates = vms.iter().map(|(name, vm)| vm.candidate(name)).collect();
        let ranked = first(candidates, top, |candidate| {
            reads.borrow_mut().push(candidate.name.clone());
            let vm = &vms[&candidate.name];
            if vm.unreadable { Err(failed()) } else { Ok(vm.held) }
        });
        (ranked, reads.into_inner())
    }

    /// Reads everything precisely, then sorts.
    fn naive(vms: &BTreeMap<String, Vm>) -> Vec<(String, u64)> {
        let mut all: Vec<(String, u64, bool)> = vms
            .iter()
            .map(|(name, vm)| {
                let blocked = vm.obstacle.is_some() || (vm.unreadable && vm.blur > 0);
                let reclaimable = if blocked { 0 } else { vm.held.saturating_sub(vm.used.unwrap_or(u64::MAX)) };
                (name.clone(), reclaimable, blocked)
            })
            .collect();
        all.sort_by_key(|(name, reclaimable, blocked)| (Reverse(*reclaimable), *blocked, name.clone()));
        all.into_iter().map(|(name, reclaimable, _)| (name, reclaimable)).collect()
    }

    fn named(vms: Vec<Vm>) -> BTreeMap<String, Vm> {
        vms.into_iter().enumerate().map(|(number, vm)| (format!("vm{number:02}"), vm)).collect()
    }

    #[test]
    fn what_is_held_and_not_used_comes_first() {
        let gated = Obstacle::Gated { gates: vec![Gate::Operator, Gate::PagePoison] };
        let vms = named(vec![
            Vm::new(100, 0, 90),
            Vm::new(80, 0, 20),
            Vm { obstacle: Some(gated.clone()), ..Vm::new(900, 0, 0) },
            Vm::new(50, 0, 70),
        ]);
        let (ranked, reads) = rank(&vms, usize::MAX);
        let order: Vec<_> = ranked.iter().map(|vm| (vm.name.as_str(), vm.reclaimable_bytes)).collect();
        assert_eq!(order, [("vm01", 60), ("vm00", 10), ("vm03", 0), ("vm02", 0)]);
        assert_eq!(ranked[3].obstacle.as_ref(), Some(&gated));
        assert_eq!(gated.to_string(), "closed: operator, page-poison");
        assert!(reads.is_empty(), "exact figures are not read again");
    }

    #[test]
    fn who_cannot_win_is_not_read() {
        // By their cheap figures vm00 leads; precisely it is vm01. vm02 and the rest cannot reach it.
        let vms = named(vec![Vm::new(100, 500, 0), Vm::new(400, 100, 0), Vm::new(300, 99, 0), Vm::new(10, 5, 0)]);
        let (ranked, reads) = rank(&vms, 1);
        assert_eq!((ranked[0].name.as_str(), ranked[0].held_bytes), ("vm01", Some(400)));
        assert_eq!(reads, ["vm00", "vm01"]);
        assert_eq!(rank(&vms, 2).1, ["vm00", "vm01", "vm02"]);
        assert_eq!(rank(&vms, 0).0, []);
    }

    #[test]
    fn a_lying_guest_is_bounded_by_what_is_measured() {
        let vms =
            named(vec![Vm { used: Some(u64::MAX), ..Vm::new(100, 0, 0) }, Vm { used: None, ..Vm::new(100, 0, 0) }]);
        assert!(rank(&vms, 2).0.iter().all(|vm| vm.reclaimable_bytes == 0));
    }

    fn vms() -> impl Strategy<Value = BTreeMap<String, Vm>> {
        // Few values, so that ties are common.
        let obstacle =
            prop_oneof![4 => Just(None), 1 => Just(Some(Obstacle::NoAgent)), 1 => Just(Some(Obstacle::NoClaim))];
        let vm = (0u64..20, prop_oneof![Just(0u64), 0u64..20], prop_oneof![Just(0u64), 0u64..20], obstacle, 0u8..8);
        let vm = vm.prop_map(|(held, blur, used, obstacle, luck)| Vm {
            obstacle,
            unreadable: luck == 0,
            ..Vm::new(held, blur, used)
        });
        proptest::collection::vec(vm, 0..16).prop_map(named)
    }

    proptest! {
        #[test]
        fn two_stages_choose_what_reading_everything_chooses(vms in vms(), top in 0usize..18) {
            let (ranked, reads) = rank(&vms, top);
            let order: Vec<_> = ranked.iter().map(|vm| (vm.name.clone(), vm.reclaimable_bytes)).collect();
            let mut wanted = naive(&vms);
            wanted.truncate(top);
            prop_assert_eq!(order, wanted);
            // Each at most once, and only who was not known exactly.
            let mut once = reads.clone();
            once.sort();
            once.dedup();
            prop_assert_eq!(once.len(), reads.len());
            prop_assert!(reads.iter().all(|name| vms[name].blur > 0 && vms[name].obstacle.is_none()));
        }

        #[test]
        fn no_precise_read_could_have_been_left_out(vms in vms()) {
            // Whoever was read could have been first, by its bound, when it was read: leaving it out would have been a guess.
            let (ranked, reads) = rank(&vms, 1);
            if let Some(best) = ranked.first() {
                for name in &reads {
                    let bound = vms[name].candidate(name).at_most_bytes();
                    prop_assert!(bound >= best.reclaimable_bytes, "{name}");
                }
            }
        }

        #[test]
        fn the_order_is_total_and_does_not_depend_on_the_input(vms in vms()) {
            let (ranked, _) = rank(&vms, usize::MAX);
            prop_assert_eq!(ranked.len(), vms.len());
            prop_assert!(ranked.windows(2).all(|pair| pair[0].key() < pair[1].key()));
            let reversed = vms.iter().rev().map(|(name, vm)| vm.candidate(name)).collect();
            let again = first(reversed, usize::MAX, |candidate| {
                let vm = &vms[&candidate.name];
                if vm.unreadable { Err(failed()) } else { Ok(vm.held) }
            });
            prop_assert_eq!(ranked, again);
        }
    }
}
