#![allow(clippy::unwrap_used)]
use super::*;
use std::fs;
use std::path::PathBuf;

const PID: i32 = 4711;
const MIB: u64 = 1 << 20;
const BUDGET: u64 = 160 * MIB;

/// procfs with one process in the root cgroup, whose guest has private memory.
struct Tree {
    dir: tempfile::TempDir,
}

impl Tree {
    fn new() -> Self {
        let tree = Self { dir: tempfile::tempdir().unwrap() };
        let write = |path: &str, text: &str| {
            let path = tree.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/sys/kernel/osrelease", "6.18.0\n");
        write("sys/devices/system/cpu/possible", "0-1\n");
        fs::create_dir_all(tree.dir.path().join("cgroup")).unwrap();
        tree
    }

    fn process(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("proc/{PID}/{name}"))
    }

    /// The process as it is now: anonymous memory it maps, and its share of that.
    fn set(&self, anon_mib: u64, share_mib: u64) {
        fs::create_dir_all(self.process("")).unwrap();
        let (anon, share) = (anon_mib << 10, share_mib << 10);
        let status = format!("Name:\tqemu\nVmRSS:\t{anon} kB\nRssAnon:\t{anon} kB\nVmSwap:\t0 kB\nThreads:\t3\n");
        fs::write(self.process("status"), status).unwrap();
        fs::write(self.process("statm"), format!("{0} {0} 0 1 0 1 0\n", anon_mib << 8)).unwrap();
        fs::write(self.process("smaps_rollup"), format!("Pss:\t{share} kB\nPss_Anon:\t{share} kB\nSwapPss:\t0 kB\n"))
            .unwrap();
        fs::write(self.process("cgroup"), "0::/\n").unwrap();
        fs::write(self.process("maps"), "").unwrap();
    }

    fn books(&self) -> Books {
        let at = |name| self.dir.path().join(name);
        Books::new(Roots { proc: at("proc"), sys: at("sys"), cgroup: at("cgroup") })
    }
}

fn asked(budget_bytes: Option<u64>) -> Vec<Asked> {
    let subject = Some(Subject { pid: Some(PID), ..Subject::default() });
    vec![Asked { name: "web1".to_owned(), budget_bytes, subject }]
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn state(accounting: &Accounting) -> &'static str {
    accounting.budget.as_ref().unwrap().state
}

#[test]
fn a_suspicion_is_confirmed_off_the_tick() {
    let tree = Tree::new();
    let mut books = tree.books();
    // 200 MiB mapped; half of it shared, by KSM for example.
    tree.set(200, 100);
    let (figures, mut slow) = books.tick(asked(Some(BUDGET)), at(0));
    assert_eq!(state(&figures[0].1), "idle", "nothing is decided on the tick");
    let result = slow.pop().unwrap().read();
    let (name, now) = books.confirmed(result, at(1)).unwrap();
    assert_eq!((name.as_str(), state(&now)), ("web1", "below"));
    assert_eq!(now.budget.unwrap().cost_bytes, Some(100 * MIB));

    // No longer shared; the cheap figure sees nothing of it.
    tree.set(200, 190);
    assert!(books.tick(asked(Some(BUDGET)), at(5)).1.is_empty(), "rests");
    let (figures, mut slow) = books.tick(asked(Some(BUDGET)), at(70));
    assert_eq!(state(&figures[0].1), "below");
    let now = books.confirmed(slow.pop().unwrap().read(), at(71)).unwrap().1;
    let budget = now.budget.unwrap();
    assert_eq!((budget.state, budget.cost_bytes, budget.alarms), ("over", Some(190 * MIB), 1));
}

#[test]
fn figures_have_their_source_or_a_reason() {
    let tree = Tree::new();
    tree.set(200, 100);
    let (figures, slow) = tree.books().tick(asked(None), at(0));
    assert!(slow.is_empty(), "nobody asked");
    let json = serde_json::to_value(figures[0].1.aged(at(9))).unwrap();
    assert_eq!((&json["age_s"], &json["budget"]), (&9.into(), &serde_json::Value::Null));
    assert_eq!(json["figures"]["rss"]["bytes"], 200 * MIB);
    assert_eq!(json["figures"]["rss"]["precision"], "precise");
    assert_eq!(json["figures"]["backing"]["absent"]["reason"], "not-shared");
    assert_eq!(json["figures"]["cgroup"]["absent"]["reason"], "no-cgroup");
    assert_eq!((&json["cost"]["low_bytes"], &json["cost"]["high_bytes"]), (&0.into(), &(200 * MIB).into()));
}

#[test]
fn without_the_right_to_walk_page_tables_it_says_so() {
    let tree = Tree::new();
    tree.set(200, 100);
    fs::remove_file(tree.process("smaps_rollup")).unwrap();
    let mut books = tree.books();
    let result = books.tick(asked(Some(BUDGET)), at(0)).1.pop().unwrap().read();
    let budget = books.confirmed(result, at(1)).unwrap().1.budget.unwrap();
    assert_eq!((budget.state, budget.alarms), ("unconfirmed", 0));
    assert!(budget.detail.unwrap().contains("smaps_rollup"));
}

#[test]
fn another_process_is_another_vm() {
    let tree = Tree::new();
    tree.set(200, 190);
    let mut books = tree.books();
    let late = books.tick(asked(Some(BUDGET)), at(0)).1.pop().unwrap();
    let gone = vec![Asked { subject: Some(Subject::default()), ..asked(Some(BUDGET)).remove(0) }];
    let (figures, _) = books.tick(gone, at(5));
    assert_eq!(state(&figures[0].1), "idle");
    let json = serde_json::to_value(&figures[0].1).unwrap();
    assert_eq!(json["cost"]["absent"]["reason"], "no-process");
    assert!(books.confirmed(late.read(), at(6)).is_none(), "of the process before");
    // One that does not answer in time keeps what it had; one that is not there any more is forgotten.
    let silent = vec![Asked { subject: None, ..asked(None).remove(0) }];
    assert!(books.tick(silent, at(10)).0.is_empty() && books.vms.len() == 1);
    books.tick(Vec::new(), at(15));
    assert!(books.vms.is_empty());
}

#[test]
fn a_read_that_hangs_is_given_up_and_what_comes_of_it_counts_for_nothing() {
    let tree = Tree::new();
    tree.set(700, 100);
    let mut books = tree.books();
    let late = books.tick(asked(Some(BUDGET)), at(0)).1.pop().unwrap();
    let (_, shown) = books.given_up(late.ticket.clone(), Duration::from_secs(30), at(30)).unwrap();
    assert_eq!(state(&shown), "unconfirmed");
    assert!(shown.budget.unwrap().detail.unwrap().contains("30 s"));
    assert!(books.confirmed(late.read(), at(31)).is_none(), "late");
}

#[test]
fn a_read_of_a_removed_vm_is_not_one_of_the_next_by_its_name() {
    let tree = Tree::new();
    tree.set(700, 100);
    let mut books = tree.books();
    let late = books.tick(asked(Some(BUDGET)), at(0)).1.pop().unwrap();
    let _ = books.tick(Vec::new(), at(5));
    let _ = books.tick(asked(Some(BUDGET)), at(10));
    assert!(books.confirmed(late.read(), at(11)).is_none(), "of the VM before");
}
