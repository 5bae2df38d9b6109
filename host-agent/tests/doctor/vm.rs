//! The lines about a VM: what its process shows, and what follows from it.

use super::tree::{Host, OLD_QEMU, PID, SHARED, line, says, says_line};
use fpr_host_agent::doctor::{Check, Verdict};
use serde_json::json;
use std::os::unix::fs::PermissionsExt;

use Verdict::{No, Ok as Fine, Warn};

const VSOCK: &[&str] = &["-device", "vhost-user-vsock-pci,chardev=fpr"];
const BOTH: &[&str] = &[
    "-device",
    "vhost-user-vsock-pci,chardev=fpr",
    "-device",
    "{\"driver\":\"vhost-user-test-device-pci\",\"virtio-id\":5,\"chardev\":\"fprb\"}",
];
const MEMFD: &[&str] = &["anon_inode:kvm-vm", "/memfd:pc.ram (deleted)"];

#[test]
fn a_vm_as_it_should_be() {
    let host = Host::ordinary();
    host.vm(BOTH, &[SHARED], MEMFD);
    let report = host.examine_vm();
    assert_eq!(report.pid, Some(PID));
    says_line(&report, Check::Process, Fine, &["uid 64055", "holds a KVM VM", "vhost-user-vsock-pci"]);
    says_line(&report, Check::Memory, Fine, &["2G of shared memfd /memfd:pc.ram"]);
    says_line(&report, Check::MemoryLocked, Fine, &["64K of 2G"]);
    says_line(&report, Check::AssignedDevice, Fine, &["none among 3"]);
    says_line(&report, Check::VmCgroup, Fine, &["/machine.slice/vm.scope uses 1G, without a limit"]);
    says_line(&report, Check::Connected, Warn, &["no daemon"]);
    says_line(&report, Check::Usable, Fine, &["agent-channel and kernel-channel"]);
    let usable = line(&report, Check::Usable);
    assert_eq!(usable.figures["channels_present"], json!(["agent-channel", "kernel-channel"]));
    assert_eq!(line(&report, Check::Memory).figures["guest_bytes"], 2_u64 << 30);
    // All checks, in their order, each once.
    let checks: Vec<Check> = report.lines.iter().map(|line| line.check).collect();
    assert_eq!(checks, Check::ALL);
}

#[test]
fn memory_that_cannot_be_dropped_names_the_option_to_change() {
    let anonymous = "7f0000000000-7f0080000000 rw-p 00000000 00:00 0 ";
    let private = "7f0000000000-7f0080000000 rw-p 00000000 00:01 4711  /memfd:pc.ram (deleted)";
    let read_only = "7f0000000000-7f0080000000 r--s 00000000 00:01 4711  /memfd:pc.ram (deleted)";
    let zero = "7f0000000000-7f0080000000 rw-s 00000000 00:01 4711  /dev/zero (deleted)";
    let small = "7f0000000000-7f0000800000 rw-s 00000000 00:01 4711  /memfd:pc.ram (deleted)";
    let object = "memory-backend-memfd,id=mem,size=2G,share=off";
    let cases: &[(&[&str], &str, &[&str])] = &[
        (
            &[],
            anonymous,
            &["private anonymous", "-object memory-backend-memfd,id=mem,size=2G,share=on -machine memory-backend=mem"],
        ),
        (
            &["-object", object],
            private,
            &["is private", "share=on in `-object memory-backend-memfd,id=mem,size=2G,share=off`"],
        ),
        (
            &["-object", "memory-backend-ram,id=mem"],
            anonymous,
            &["memory-backend-memfd and share=on in `-object memory-backend-ram,id=mem`"],
        ),
        (&[], read_only, &["read-only"]),
        (&[], zero, &["no descriptor"]),
        (&[], small, &["no mapping of 16M"]),
    ];
    for (words, mapping, said) in cases {
        let host = Host::ordinary();
        host.vm(&[VSOCK, words].concat(), &[mapping], MEMFD);
        let report = host.examine_vm();
        says_line(&report, Check::Memory, No, said);
        says_line(&report, Check::Usable, No, &["memory"]);
        assert_eq!(report.verdict, No);
    }
}

#[test]
fn one_node_that_cannot_be_dropped_is_enough() {
    let host = Host::ordinary();
    let other = "7f1000000000-7f1040000000 rw-p 00000000 00:00 0 ";
    host.vm(VSOCK, &[SHARED, other], MEMFD);
    let report = host.examine_vm();
    says_line(&report, Check::Memory, No, &["2G of shared memfd", "1G of private anonymous"]);
    // A heap is none.
    let heap = "7f1000000000-7f1010000000 rw-p 00000000 00:00 0 ";
    host.vm(VSOCK, &[SHARED, heap], MEMFD);
    says_line(&host.examine_vm(), Check::Memory, Fine, &["2G"]);
}

#[test]
fn devices_and_locks_block_as_they_do_in_the_daemon() {
    let host = Host::ordinary();
    host.vm(VSOCK, &[SHARED], &["/dev/vfio/12"]);
    let report = host.examine_vm();
    says_line(&report, Check::AssignedDevice, No, &["descriptor 3 is /dev/vfio/12", "detach"]);
    says_line(&report, Check::Usable, No, &["assigned-device"]);

    host.vm(VSOCK, &[SHARED], &["/dev/null"]);
    host.write(&format!("proc/{PID}/status"), "Name:\tqemu\nUid:\t0\t0\t0\t0\nVmLck:\t 2097152 kB\nVmPin:\t 4 kB\n");
    let report = host.examine_vm();
    says_line(&report, Check::MemoryLocked, No, &["2097152 kB", "mem-lock"]);
    says_line(&report, Check::AssignedDevice, No, &["VmPin is 4 kB"]);
    assert_eq!(line(&report, Check::MemoryLocked).figures["locked_bytes"], 2_u64 << 30);
}

#[test]
fn what_may_not_be_read_is_unknown_and_never_fine() {
    for (missing, checks) in [
        ("maps", &[Check::Memory, Check::Usable][..]),
        ("fd", &[Check::AssignedDevice, Check::MemoryLocked, Check::Usable]),
        ("cgroup", &[Check::VmCgroup]),
    ] {
        let host = Host::ordinary();
        host.vm(VSOCK, &[SHARED], MEMFD);
        host.remove(&format!("proc/{PID}/{missing}"));
        for check in checks {
            says_line(&host.examine_vm(), *check, Warn, &[]);
        }
    }
}

#[test]
fn channels_by_what_is_there_and_what_could_be() {
    let host = Host::ordinary();
    host.vm(&[], &[SHARED], MEMFD);
    let report = host.examine_vm();
    says_line(&report, Check::AgentChannel, Warn, &["possible", "-device vhost-user-vsock-pci,chardev=fpr"]);
    says_line(
        &report,
        Check::KernelChannel,
        Warn,
        &["possible", "vhost-user-test-device-pci", "virtio-id=5", "config_size=16"],
    );
    says_line(&report, Check::Usable, Warn, &["agent-channel or kernel-channel", "start the VM anew"]);

    // Another device behind the generic one is no balloon.
    host.vm(&["-device", "vhost-user-test-device-pci,virtio-id=55,chardev=x"], &[SHARED], MEMFD);
    says_line(&host.examine_vm(), Check::KernelChannel, Warn, &["not on its command line"]);

    host.vm(&["-device", "virtio-balloon-pci,free-page-reporting=on"], &[SHARED], MEMFD);
    says_line(&host.examine_vm(), Check::KernelChannel, Warn, &["QEMU's own balloon"]);

    host.qemu("bin", &says("QEMU emulator version 7.2.22", OLD_QEMU));
    host.vm(VSOCK, &[SHARED], MEMFD);
    let report = host.examine_vm();
    says_line(&report, Check::KernelChannel, Warn, &["no device for any vhost-user back end"]);
    says_line(&report, Check::Usable, Fine, &["yes, by agent-channel"]);
}

#[test]
fn the_vms_own_qemu_is_asked_unless_others_can_write_to_it() {
    let host = Host::ordinary();
    host.vm(VSOCK, &[SHARED], MEMFD);
    let own = host.qemu("own", &says("QEMU emulator version 7.2.22", OLD_QEMU));
    host.link(&format!("proc/{PID}/exe"), &own);
    let report = host.examine_vm();
    says_line(&report, Check::Qemu, Fine, &["7.2.22", own.to_str().unwrap()]);
    says_line(&report, Check::QemuGeneric, Warn, &[]);

    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o777)).unwrap();
    let report = host.examine_vm();
    says_line(&report, Check::Qemu, Warn, &["11.1.0", "others may write to it"]);
}

#[test]
fn a_qemu_behind_a_loader_or_another_name_is_recognized() {
    for words in [
        &["/nix/store/x/bin/.qemu-system-x86_64-wrapped"][..],
        &["/usr/bin/kvm", "-id", "100"],
        &["/opt/lib/ld-linux-x86-64.so.2", "--library-path", "/opt/lib", "/opt/bin/qemu-system-x86_64"],
    ] {
        let host = Host::ordinary();
        host.vm(VSOCK, &[SHARED], MEMFD);
        let words = [words, VSOCK].concat();
        host.write(&format!("proc/{PID}/cmdline"), &format!("{}\0", words.join("\0")));
        host.write(&format!("proc/{PID}/comm"), "vm-100\n");
        host.link(&format!("proc/{PID}/exe"), words[0]);
        says_line(&host.examine_vm(), Check::Usable, Fine, &["agent-channel"]);
    }
}

#[test]
fn the_smallest_limit_of_the_control_groups_counts() {
    let host = Host::ordinary();
    host.vm(VSOCK, &[SHARED], MEMFD);
    host.write("cgroup/machine.slice/vm.scope/memory.max", "4294967296\n");
    says_line(&host.examine_vm(), Check::VmCgroup, Fine, &["/machine.slice/vm.scope limits it to 4G"]);
    host.write("cgroup/machine.slice/memory.max", "1073741824\n");
    let report = host.examine_vm();
    says_line(&report, Check::VmCgroup, Warn, &["/machine.slice limits it to 1G", "less than the guest's 2G"]);
    assert_eq!(line(&report, Check::VmCgroup).figures["limit_bytes"], 1 << 30);

    host.write(&format!("proc/{PID}/cgroup"), "4:memory:/vms/a\n3:cpu:/\n0::/\n");
    host.write("cgroup/memory/vms/a/memory.usage_in_bytes", "2097152\n");
    host.write("cgroup/memory/vms/a/memory.limit_in_bytes", "9223372036854771712\n");
    says_line(&host.examine_vm(), Check::VmCgroup, Fine, &["/vms/a uses 2M, without a limit"]);
}

#[test]
fn a_process_cannot_steer_the_readers_terminal() {
    let host = Host::ordinary();
    host.vm(&["\u{1b}]0;owned\u{7}", &"x".repeat(100_000)], &[SHARED], MEMFD);
    let report = host.examine_vm();
    let said = serde_json::to_string(&report).unwrap();
    assert!(!said.contains("\\u001b") && !said.contains("\\u0007"), "{said}");
    assert!(line(&report, Check::Process).reason.chars().count() < 700);
}
