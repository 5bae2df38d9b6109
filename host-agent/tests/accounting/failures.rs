//! What cannot be read is absent with its reason: never 0, never a guess.

use crate::tree::{PID, Process, Tree, page_bytes};
use fpr_host_agent::accounting::{AbsentReason, Method, Precision, Reader, Subject, read};
use proptest::prelude::*;
use std::fs;

/// A VM in v2 with every file in place.
fn whole() -> (Tree, Subject) {
    let tree = Tree::new();
    tree.v2();
    let subject = tree.vmm("0::/web1\n");
    tree.cgroup("web1", "memory.current", 300 << 20, &[PID]);
    tree.write(
        &format!("proc/{PID}/smaps_rollup"),
        "1000-2000 ---p 00000000 00:00 0 [rollup]\nRss: 102400 kB\nPss: 51200 kB\nAnonHugePages: 4096 kB\n\
         ShmemPmdMapped: 2048 kB\nFilePmdMapped: 0 kB\nSwapPss: 8 kB\n",
    );
    tree.write(
        &format!("proc/{PID}/ksm_stat"),
        "ksm_rmap_items 9\nksm_zero_pages 1\nksm_merging_pages 2\nksm_process_profit -64\nksm_merge_any: no\n",
    );
    (tree, subject)
}

fn reason(tree: &Tree, subject: &Subject, method: Method) -> AbsentReason {
    match read(&tree.roots(), subject, method) {
        Ok(figure) => panic!("{method:?} is {figure:?}, where there must be no figure"),
        Err(absent) => {
            assert!(absent.detail.len() > 20, "{absent:?} says too little");
            absent.reason
        }
    }
}

#[test]
fn all_is_well() {
    let (tree, subject) = whole();
    let read = |method| read(&tree.roots(), &subject, method).unwrap();
    assert_eq!((read(Method::Rss).bytes, read(Method::Rss).precision), (100 << 20, Precision::Precise));
    assert_eq!((read(Method::Pss).bytes, read(Method::Swap).bytes), (50 << 20, 12 << 10));
    assert_eq!((read(Method::Thp).bytes, read(Method::Ksm).bytes), (6 << 20, 3 * page_bytes()));
    let mut reader = Reader::new(&tree.roots(), &subject);
    let sources = |reader: &mut Reader, method| -> Vec<String> {
        reader.read_all(method).into_iter().map(|reading| reading.unwrap().source).collect()
    };
    assert_eq!(sources(&mut reader, Method::Rss), ["statm resident", "status VmRSS", "smaps_rollup Rss"]);
    assert_eq!(sources(&mut reader, Method::Swap), ["status VmSwap", "smaps_rollup SwapPss"]);
    let ksm = reader.ksm().unwrap();
    assert_eq!((ksm.merging_bytes, ksm.profit_bytes), (2 * page_bytes(), Some(-64)));
}

#[test]
fn the_kernel_decides_how_true_a_resident_set_is() {
    let (tree, subject) = whole();
    let mut found = Vec::new();
    for release in ["6.18.0", "6.6.30", "5.10.0-28-amd64"] {
        tree.write("proc/sys/kernel/osrelease", release);
        let mut reader = Reader::new(&tree.roots(), &subject);
        let figure = reader.read(Method::Rss).unwrap();
        found.push((figure.source, figure.precision));
        let precise = reader.read_precise(Method::Rss).unwrap();
        assert_eq!((precise.bytes, precise.precision), (100 << 20, Precision::Precise), "{release}");
    }
    let pages = |pages: u64| Precision::Approximate { error_bound_bytes: pages * page_bytes() };
    let around = (64 << 10) / page_bytes();
    let expected = [
        ("statm resident".to_owned(), Precision::Precise),
        ("statm resident".to_owned(), pages(3 * 4 * 32)),
        ("status VmRSS".to_owned(), pages((3 * 65 * around).max(3 * 4 * 32))),
    ];
    assert_eq!(found, expected);
    tree.remove("sys/devices/system/cpu/possible");
    assert_eq!(reason(&tree, &subject, Method::Rss), AbsentReason::NotSupported, "a figure without its bound is none");
}

#[test]
fn no_process() {
    let (tree, subject) = whole();
    for method in Method::ALL {
        for pid in [None, Some(0), Some(-1), Some(99)] {
            let subject = Subject { pid, ..Subject::default() };
            assert_eq!(reason(&tree, &subject, method), AbsentReason::NoProcess, "{method:?} of {pid:?}");
        }
    }
    // Exited while it was looked at: the directory is open, and what is in it is gone.
    let mut reader = Reader::new(&tree.roots(), &subject);
    tree.remove(&format!("proc/{PID}"));
    for method in [Method::Rss, Method::Pss, Method::Swap, Method::Ksm, Method::Thp] {
        assert_eq!(reader.read(method).unwrap_err().reason, AbsentReason::NoProcess, "{method:?}");
    }
    // Somebody else has the number now, and is not read.
    tree.vmm("0::/web1\n");
    assert_eq!(reader.read(Method::Rss).unwrap_err().reason, AbsentReason::NoProcess);
}

#[test]
fn a_process_without_memory_has_no_figure() {
    let (tree, subject) = whole();
    tree.process(&Process { rss_kib: None, ..Process::new(PID, "qemu-system-x86") });
    tree.write(&format!("proc/{PID}/smaps_rollup"), "");
    tree.write(&format!("proc/{PID}/ksm_stat"), "");
    for method in [Method::Rss, Method::Swap, Method::Pss, Method::Thp, Method::Ksm] {
        assert_eq!(reason(&tree, &subject, method), AbsentReason::NoProcess, "{method:?}");
    }
}

#[test]
fn an_old_kernel_has_no_such_file_or_field() {
    let (tree, subject) = whole();
    tree.write(&format!("proc/{PID}/smaps_rollup"), "Rss: 1 kB\nPss: 1 kB\nAnonHugePages: 0 kB\n");
    assert_eq!(reason(&tree, &subject, Method::Thp), AbsentReason::NotSupported);
    tree.remove(&format!("proc/{PID}/smaps_rollup"));
    tree.remove(&format!("proc/{PID}/ksm_stat"));
    for method in [Method::Pss, Method::Thp, Method::Ksm] {
        assert_eq!(reason(&tree, &subject, method), AbsentReason::NotSupported, "{method:?}");
    }
    // Linux 5.19 to 6.0.
    tree.write(&format!("proc/{PID}/ksm_merging_pages"), "7\n");
    assert_eq!(read(&tree.roots(), &subject, Method::Ksm).unwrap().bytes, 7 * page_bytes());
}

#[test]
fn cgroups_that_say_nothing() {
    let (tree, subject) = whole();
    for (text, word) in [
        ("0::/\n", "root cgroup"),
        ("0::/web1 (deleted)\n", "removed"),
        ("0::/../web1\n", "namespace"),
        ("", "no memory controller"),
        ("0::/nowhere\n", "memory.current"),
        ("4:memory:/web1\n", "not mounted"),
    ] {
        tree.write(&format!("proc/{PID}/cgroup"), text);
        let absent = read(&tree.roots(), &subject, Method::Cgroup).unwrap_err();
        assert_eq!(absent.reason, AbsentReason::NoCgroup, "{text:?}: {absent}");
        let detail = absent.detail.replace("cgroup.subtree_control", "memory.current");
        assert!(detail.contains(word), "{text:?}: {detail}");
    }
    tree.write(&format!("proc/{PID}/cgroup"), "0:/web1\n");
    assert_eq!(reason(&tree, &subject, Method::Cgroup), AbsentReason::Malformed);
    tree.remove(&format!("proc/{PID}/cgroup"));
    assert_eq!(reason(&tree, &subject, Method::Cgroup), AbsentReason::NotSupported);
    // No tree mounted at all, as in many containers.
    let (tree, subject) = whole();
    tree.remove("cgroup");
    assert_eq!(reason(&tree, &subject, Method::Cgroup), AbsentReason::NoCgroup);
}

#[test]
fn counters_that_wrapped_and_nonsense() {
    let (tree, subject) = whole();
    for usage in ["18446744073709547520\n", "-4096\n", "max\n", "", "12 apples\n"] {
        tree.write("cgroup/web1/memory.current", usage);
        assert_eq!(reason(&tree, &subject, Method::Cgroup), AbsentReason::Malformed, "{usage:?}");
    }
    tree.write(&format!("proc/{PID}/statm"), "18446744073709551615 18446744073709551611 0 0 0 0 0\n");
    tree.write(&format!("proc/{PID}/status"), "Name:\tx\nVmRSS:\t 18014398509481980 kB\nVmSwap: many kB\n");
    tree.write(&format!("proc/{PID}/smaps_rollup"), "Pss: 1.5 kB\nAnonHugePages: - kB\n");
    tree.write(&format!("proc/{PID}/ksm_stat"), "ksm_merging_pages -1\n");
    for method in [Method::Rss, Method::Swap, Method::Pss, Method::Thp, Method::Ksm] {
        assert_eq!(reason(&tree, &subject, method), AbsentReason::Malformed, "{method:?}");
    }
    tree.write("cgroup/web1/memory.stat", "file 5\nshmem 6\n");
    let mut reader = Reader::new(&tree.roots(), &subject);
    assert_eq!(reader.page_cache().unwrap_err().reason, AbsentReason::Malformed);
    tree.procs("web1", &[]);
    tree.write("cgroup/web1/cgroup.procs", "many\n");
    assert_eq!(reason(&tree, &subject, Method::Cgroup), AbsentReason::Malformed);
}

#[test]
fn a_file_that_is_none_is_said() {
    let (tree, subject) = whole();
    let statm = format!("proc/{PID}/statm");
    tree.remove(&statm);
    fs::create_dir(tree.path(&statm)).unwrap();
    assert_eq!(reason(&tree, &subject, Method::Rss), AbsentReason::Failed, "reading a directory fails otherwise");
}

proptest! {
    /// Whatever the files say: a figure is one that a machine can have, and nothing panics.
    #[test]
    fn junk_is_absent_or_possible(text in "[ -~\n]{0,200}", number in any::<u64>(), field in "(Pss|VmRSS|anon|0:)") {
        let (tree, subject) = whole();
        let line = format!("{field}: {number} kB\n{text}");
        for file in ["statm", "status", "smaps_rollup", "ksm_stat", "cgroup", "maps"] {
            tree.write(&format!("proc/{PID}/{file}"), &line);
        }
        tree.write("cgroup/web1/memory.current", &text);
        let mut reader = Reader::new(&tree.roots(), &subject);
        for method in Method::ALL {
            if let Ok(figure) = reader.read(method) {
                prop_assert!(figure.bytes <= 8 << 52, "{method:?}: {figure:?}");
            }
        }
    }
}
