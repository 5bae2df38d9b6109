//! The lines about the host: each thing that can be wrong, alone.

use super::tree::{Host, OLD_QEMU, line, says, says_line};
use fpr_host_agent::doctor::{Check, Verdict};
use fpr_host_agent::kvm::Ability;
use serde_json::json;
use std::time::{Duration, Instant};

use Verdict::{No, Ok as Fine, Warn};

#[test]
fn an_ordinary_host_lacks_nothing_but_the_daemon() {
    let host = Host::ordinary();
    let report = host.examine();
    let not_ok: Vec<Check> = report.lines.iter().filter(|line| line.verdict != Fine).map(|line| line.check).collect();
    assert_eq!(not_ok, [Check::Daemon], "{report:#?}");
    assert_eq!(report.verdict, Warn);

    let figure = |check, name: &str| line(&report, check).figures[name].clone();
    assert_eq!(figure(Check::Cgroup, "cgroup_version"), "v2");
    assert_eq!(figure(Check::Psi, "some_avg10_percent"), 1.5);
    assert_eq!(figure(Check::Psi, "full_avg10_percent"), 0.25);
    assert_eq!(figure(Check::Swap, "used_bytes"), 3 << 20);
    let kinds: Vec<_> =
        figure(Check::Swap, "devices").as_array().unwrap().iter().map(|device| device["kind"].clone()).collect();
    assert_eq!(kinds, ["zram", "file", "disk"]);
    assert_eq!(
        figure(Check::Hugetlb, "pools"),
        json!([{
            "page_bytes": 2 << 20, "total_pages": 8, "free_pages": 6, "reserved_pages": 1, "surplus_pages": 0,
            "overcommit_pages": 4
        }])
    );
    assert!(line(&report, Check::Hugetlb).reason.contains("5 of 8 free"));
    assert_eq!(figure(Check::Ksm, "sharing_pages"), 40);
    assert_eq!(figure(Check::DropGuard, "sigpending_limit"), 1000);
    assert_eq!(figure(Check::QemuGeneric, "device"), "vhost-user-test-device-pci");
}

#[test]
fn each_thing_that_is_wrong_is_a_line_with_a_remedy() {
    type Break = fn(&mut Host);
    let cases: &[(Break, Check, Verdict, &[&str])] = &[
        (|host| host.surroundings.kvm = || Ability::Absent, Check::Kvm, No, &["no /dev/kvm", "load kvm_intel"]),
        (|host| host.surroundings.kvm = || Ability::NotPermitted, Check::Kvm, Warn, &["unknown", "group"]),
        (|host| host.surroundings.kvm = || Ability::NoStockKernel("hangs".into()), Check::Kvm, No, &["VEX", "tcg"]),
        (
            |host| host.write("proc/sys/kernel/osrelease", "6.1.0-37-amd64\n"),
            Check::Kernel,
            Warn,
            &["6.1.0", "cachestat", "6.5"],
        ),
        (|host| host.remove("proc/sys/kernel/osrelease"), Check::Kernel, Warn, &["unknown", "osrelease"]),
        (|host| host.remove("proc/pressure"), Check::Psi, Warn, &["psi=1"]),
        (|host| host.remove("cgroup"), Check::Cgroup, Warn, &["no memory controller", "mount cgroup2"]),
        (
            |host| host.write("cgroup/cgroup.controllers", "cpu\n"),
            Check::Cgroup,
            Warn,
            &["without the memory", "cgroup_disable"],
        ),
        (
            |host| host.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never]\n"),
            Check::Thp,
            Warn,
            &["shmem_enabled=never", "echo advise"],
        ),
        (
            |host| host.remove("sys/kernel/mm/transparent_hugepage"),
            Check::Thp,
            Warn,
            &["without transparent huge pages"],
        ),
        (|host| host.write("proc/swaps", "Filename\nnonsense\n"), Check::Swap, Warn, &["nonsense"]),
        (|host| host.remove("bin"), Check::Qemu, Warn, &["no qemu-system-", "PATH"]),
        (
            |host| {
                host.qemu("bin", "exit 1");
            },
            Check::Qemu,
            Warn,
            &["cannot be asked", "-device help"],
        ),
        (
            |host| {
                host.qemu("bin", &says("QEMU 7.2", OLD_QEMU));
            },
            Check::QemuGeneric,
            Warn,
            &["lacks", "10.2"],
        ),
        (
            |host| {
                host.qemu("bin", &says("QEMU 7.2", &["e1000"]));
            },
            Check::QemuVsock,
            No,
            &["lacks vhost-user-vsock-pci"],
        ),
        (
            |host| host.link("proc/self/ns/pid", "pid:[4026532222]"),
            Check::PidNamespace,
            Warn,
            &["uninspectable", "--pid=host"],
        ),
        (|host| host.remove("proc/self/ns"), Check::PidNamespace, Warn, &["unknown", "ns/pid"]),
        (
            |host| host.write("proc/self/status", "Uid:\t7\t7\t7\t7\nSigQ:\t3/1000\nCapEff:\t0000000000000000\n"),
            Check::Inspect,
            Warn,
            &["uid 7", "uninspectable", "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"],
        ),
        (
            // CAP_SYS_PTRACE alone: the directory fd of another user's process cannot be opened.
            |host| host.write("proc/self/status", "Uid:\t7\t7\t7\t7\nSigQ:\t3/1000\nCapEff:\t0000000000080000\n"),
            Check::Inspect,
            Warn,
            &["uid 7", "uninspectable", "without CAP_DAC_READ_SEARCH"],
        ),
        (
            |host| host.write("proc/self/status", "Uid:\t0\t0\t0\t0\nSigQ:\t990/1000\nCapEff:\t000001ffffffffff\n"),
            Check::DropGuard,
            Warn,
            &["10 of 1000", "LimitSIGPENDING"],
        ),
        (|host| host.write("proc/self/status", ""), Check::DropGuard, Warn, &["unknown", "SigQ"]),
        (
            |host| host.write("proc/self/limits", "Max open files  100  100 files\n"),
            Check::Descriptors,
            Warn,
            &["about 0 VMs", "LimitNOFILE"],
        ),
        (|host| host.write("host.sock", ""), Check::Daemon, Warn, &["nobody listens"]),
    ];
    for (break_it, check, verdict, words) in cases {
        let mut host = Host::ordinary();
        break_it(&mut host);
        says_line(&host.examine(), *check, *verdict, words);
    }
}

#[test]
fn control_groups_of_version_1_and_hybrid() {
    let host = Host::ordinary();
    host.remove("cgroup");
    host.write("cgroup/memory/memory.usage_in_bytes", "0");
    says_line(&host.examine(), Check::Cgroup, Fine, &["version 1"]);
    host.write("cgroup/unified/cgroup.controllers", "");
    says_line(&host.examine(), Check::Cgroup, Fine, &["hybrid"]);
}

#[test]
fn what_the_kernel_was_built_without_is_no_fault() {
    let host = Host::ordinary();
    host.remove("sys/kernel/mm/ksm");
    host.remove("sys/kernel/mm/hugepages");
    host.remove("proc/swaps");
    let report = host.examine();
    for check in [Check::Ksm, Check::Hugetlb, Check::Swap] {
        says_line(&report, check, Fine, &[]);
    }
}

#[test]
fn a_qemu_that_hangs_or_babbles_is_left_alone() {
    let mut host = Host::ordinary();
    host.surroundings.qemu_limit = Duration::from_millis(300);
    host.qemu("bin", "exec sleep 600");
    let start = Instant::now();
    says_line(&host.examine(), Check::Qemu, Warn, &["did not answer in time"]);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());

    host.surroundings.qemu_limit = Duration::from_secs(20);
    host.qemu("bin", "exec cat /dev/zero");
    says_line(&host.examine(), Check::Qemu, Warn, &["it says of itself"]);
}
