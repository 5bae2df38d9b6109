//! The choice of the VM to ask for memory, made for a live set of VMs.
//!
//! Called by the control socket for `rank`. Asks all VMs' tasks at once, reads what they hold on a thread for blocking
//! work, and leaves the order to [`super::rank`].

use super::rank::{self, Candidate, Obstacle, Ranked};
use super::{Reader, Roots, Subject, cost};
use crate::vm::{ANSWER_LIMIT, Request, VmHandle, ask_all};
use serde::Serialize;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::task::spawn_blocking;

/// Longest time that the reads of one ranking may take before the control socket gives up on them.
pub const LIMIT: Duration = Duration::from_secs(60);

/// What a VM's task says for the choice.
#[derive(Clone, Debug)]
pub struct Account {
    /// Whose memory is meant.
    pub subject: Subject,
    /// Size of the guest's memory, if a front end is connected.
    pub guest_bytes: Option<u64>,
    /// What the guest's agent says is free.
    pub guest_claimed_free_bytes: Option<u64>,
    /// Why nothing can be reclaimed, as far as the task knows.
    pub obstacle: Option<Obstacle>,
}

impl Account {
    /// What the guest says it uses, at most the size of its memory; also if it claims more free memory than it has.
    fn guest_claimed_used_bytes(&self) -> Option<u64> {
        Some(self.guest_bytes?.saturating_sub(self.guest_claimed_free_bytes?))
    }
}

/// The first VMs in their order.
#[derive(Clone, Debug, Serialize)]
pub struct Ranking {
    /// The first is the one to ask.
    pub vms: Vec<Ranked>,
    /// How many there are in all.
    pub vms_total: usize,
    /// How many of them had to be read precisely: their cheap figure was not exact and they could have come in.
    pub precise_reads: usize,
    /// What the choice took after the VMs' tasks had answered.
    pub read_ns: u64,
}

/// Ranks these VMs and returns the first `top`.
pub async fn rank(vms: Vec<VmHandle>, roots: Roots, top: usize) -> Ranking {
    let vms = vms.into_iter().map(|vm| (vm.name.clone(), Some(vm)));
    let accounts = ask_all(vms, ANSWER_LIMIT, Request::Account).await;
    let accounts: Vec<_> = accounts.into_iter().map(|(name, account)| (name, account.ok())).collect();
    let vms_total = accounts.len();
    let ranking = spawn_blocking(move || choose(&roots, accounts, top)).await;
    // It does not panic; if it does all the same, nobody is ranked rather than somebody wrongly.
    ranking.unwrap_or(Ranking { vms: Vec::new(), vms_total, precise_reads: 0, read_ns: 0 })
}

fn choose(roots: &Roots, accounts: Vec<(String, Option<Account>)>, top: usize) -> Ranking {
    let start = Instant::now();
    let vms_total = accounts.len();
    let mut readers: HashMap<String, Reader> = HashMap::new();
    let candidates = accounts.into_iter().map(|(name, account)| {
        let guest_claimed_used_bytes = account.as_ref().and_then(Account::guest_claimed_used_bytes);
        let held = match account {
            None => Err(Obstacle::NoAnswer),
            Some(Account { obstacle: Some(obstacle), .. }) => Err(obstacle),
            Some(_) if guest_claimed_used_bytes.is_none() => Err(Obstacle::NoClaim),
            Some(account) => {
                let reader = readers.entry(name.clone()).or_insert_with(|| Reader::new(roots, &account.subject));
                cost::held(reader).map_err(Obstacle::NoFigure)
            }
        };
        Candidate { name, guest_claimed_used_bytes, held }
    });
    let candidates = candidates.collect();
    let mut precise_reads = 0;
    let vms = rank::first(candidates, top, |candidate| {
        precise_reads += 1;
        match readers.get_mut(&candidate.name) {
            Some(reader) => cost::held_precise(reader),
            None => cost::held_precise(&mut Reader::new(roots, &Subject::default())),
        }
    });
    let read_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ranking { vms, vms_total, precise_reads, read_ns }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn account(file: std::fs::File, free: Option<u64>, obstacle: Option<Obstacle>) -> Account {
        let subject = Subject { files: vec![Arc::new(file)], ..Subject::default() };
        Account { subject, guest_bytes: Some(8 << 20), guest_claimed_free_bytes: free, obstacle }
    }

    #[test]
    #[allow(clippy::unwrap_used)]
    fn the_vm_with_most_to_give_comes_first() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut files = Vec::new();
        let mut file = |name: &str, mib: u64| {
            let file =
                std::fs::File::options().read(true).write(true).create_new(true).open(dir.path().join(name)).unwrap();
            for page in 0..mib << 8 {
                file.write_all_at(&[1], page << 12).unwrap();
            }
            files.push(file.try_clone().unwrap());
            file
        };
        let accounts = vec![
            ("full".to_owned(), Some(account(file("a", 8), Some(1 << 20), None))),
            ("free".to_owned(), Some(account(file("b", 6), Some(5 << 20), None))),
            ("liar".to_owned(), Some(account(file("c", 2), Some(u64::MAX), None))),
            ("mute".to_owned(), Some(account(file("d", 8), None, None))),
            ("lost".to_owned(), Some(account(file("e", 8), Some(8 << 20), Some(Obstacle::NoAgent)))),
            ("hung".to_owned(), None),
        ];
        let ranking = choose(&Roots::default(), accounts, 10);
        let order: Vec<_> = ranking.vms.iter().map(|vm| (vm.name.as_str(), vm.reclaimable_bytes >> 20)).collect();
        assert_eq!(order, [("free", 3), ("liar", 2), ("full", 1), ("hung", 0), ("lost", 0), ("mute", 0)]);
        assert_eq!((ranking.vms_total, ranking.precise_reads), (6, 0), "blocks of a file are exact");
        assert_eq!(ranking.vms[5].obstacle, Some(Obstacle::NoClaim));
    }
}
