//! Where VMs' cgroups are: v1, v2, hybrid, libvirt, Proxmox VE, and shared ones.

use crate::tree::{PID, Process, Tree, page_bytes};
use fpr_host_agent::accounting::{AbsentReason, Method, Precision, Reader, Reading, Subject, read};
use std::path::Path;

const MIB: u64 = 1 << 20;
const SCOPE: &str = r"machine.slice/machine-qemu\x2d3\x2dweb1.scope";

fn bytes(reading: Reading) -> u64 {
    reading.unwrap().bytes
}

fn reason(reading: &Reading) -> AbsentReason {
    reading.as_ref().expect_err("a figure, where there must be none").reason
}

#[test]
fn v2() {
    let tree = Tree::new();
    tree.v2();
    let subject = tree.vmm("0::/vms/web1\n");
    tree.cgroup("vms/web1", "memory.current", 300 * MIB, &[PID]);
    tree.write("cgroup/vms/web1/memory.stat", "anon 1048576\nfile 9437184\nkernel 4096\nshmem 1048576\n");
    let mut reader = Reader::new(&tree.roots(), &subject);
    let figure = reader.read(Method::Cgroup).unwrap();
    let bound = 4 * 65 * page_bytes();
    assert_eq!((figure.bytes, figure.source.as_str()), (300 * MIB, "memory.current"));
    assert_eq!(figure.precision, Precision::Approximate { error_bound_bytes: bound });
    assert_eq!(reader.cgroup_path().as_deref(), Some(Path::new("/vms/web1")));
    let cache = reader.page_cache().unwrap();
    assert_eq!((cache.bytes, cache.source.as_str()), (8 * MIB, "memory.stat file - shmem"));
    let sum = reader.read(Method::RssCgroup).unwrap();
    assert_eq!((sum.bytes, sum.precision), (100 * MIB, Precision::Precise));
}

#[test]
fn v1() {
    let tree = Tree::new();
    let subject = tree.vmm("5:cpu,cpuacct:/other\n4:memory:/web1\n");
    tree.cgroup("memory/web1", "memory.usage_in_bytes", 200 * MIB, &[PID]);
    tree.write("cgroup/memory/web1/memory.stat", "cache 1\ntotal_cache 9437184\nshmem 1\ntotal_shmem 1048576\n");
    let mut reader = Reader::new(&tree.roots(), &subject);
    assert_eq!(bytes(reader.read(Method::Cgroup)), 200 * MIB);
    assert_eq!(bytes(reader.page_cache()), 8 * MIB, "what is below is in it");
}

#[test]
fn v1_without_hierarchy_is_added_up() {
    let tree = Tree::new();
    let subject = tree.vmm("4:memory:/machine/qemu-3-web1.libvirt-qemu\n");
    let vm = "memory/machine/qemu-3-web1.libvirt-qemu";
    tree.cgroup(vm, "memory.usage_in_bytes", 200 * MIB, &[PID]);
    tree.cgroup(&format!("{vm}/emulator"), "memory.usage_in_bytes", 20 * MIB, &[]);
    let read = || bytes(read(&tree.roots(), &subject, Method::Cgroup));
    tree.write(&format!("cgroup/{vm}/memory.use_hierarchy"), "1\n");
    assert_eq!(read(), 200 * MIB, "the parent's usage has the child's in it");
    tree.write(&format!("cgroup/{vm}/memory.use_hierarchy"), "0\n");
    assert_eq!(read(), 220 * MIB);
}

#[test]
fn hybrid_with_the_controller_on_v1() {
    let tree = Tree::new();
    tree.write("cgroup/unified/cgroup.controllers", "\n");
    let subject = tree.vmm("4:memory:/web1\n1:name=systemd:/s\n0::/web1\n");
    tree.cgroup("memory/web1", "memory.usage_in_bytes", 200 * MIB, &[PID]);
    tree.cgroup("unified/web1", "memory.current", 999 * MIB, &[PID]);
    assert_eq!(bytes(read(&tree.roots(), &subject, Method::Cgroup)), 200 * MIB);
}

#[test]
fn hybrid_with_the_controller_on_v2() {
    let tree = Tree::new();
    tree.write("cgroup/unified/cgroup.controllers", "memory\n");
    let subject = tree.vmm("5:cpu:/web1\n0::/web1\n");
    tree.cgroup("unified/web1", "memory.current", 200 * MIB, &[PID]);
    assert_eq!(bytes(read(&tree.roots(), &subject, Method::Cgroup)), 200 * MIB);
    tree.write("cgroup/unified/cgroup.controllers", "\n");
    let reading = read(&tree.roots(), &subject, Method::Cgroup);
    assert_eq!(reason(&reading), AbsentReason::NoCgroup);
    assert!(reading.unwrap_err().detail.contains("cgroup_enable=memory"));
}

/// libvirt puts threads below the scope and helpers into it; each page is counted once.
#[test]
fn libvirt_on_v2() {
    let tree = Tree::new();
    tree.v2();
    let subject = tree.vmm(&format!("0::/{SCOPE}/libvirt/emulator\n"));
    tree.process(&Process::new(50, "virtiofsd"));
    tree.process(&Process::new(51, "swtpm"));
    tree.cgroup(SCOPE, "memory.current", 300 * MIB, &[50, 51]);
    tree.cgroup(&format!("{SCOPE}/libvirt"), "memory.current", 290 * MIB, &[PID]);
    for part in ["emulator", "vcpu0", "vcpu1"] {
        // Threaded: no controller of memory there.
        tree.write(&format!("cgroup/{SCOPE}/libvirt/{part}/cgroup.type"), "threaded\n");
        tree.procs(&format!("{SCOPE}/libvirt/{part}"), &[]);
    }
    let mut reader = Reader::new(&tree.roots(), &subject);
    let figure = reader.read(Method::Cgroup).unwrap();
    assert_eq!(figure.bytes, 300 * MIB);
    assert_eq!(
        figure.precision,
        Precision::Approximate { error_bound_bytes: 5 * 4 * 65 * page_bytes() },
        "each of the five cgroups may keep a batch per CPU"
    );
    assert_eq!(bytes(reader.read(Method::RssCgroup)), 116 * MIB);
}

#[test]
fn libvirt_on_v1() {
    let tree = Tree::new();
    let subject = tree.vmm(&format!("9:cpuset:/{SCOPE}/libvirt/emulator\n4:memory:/{SCOPE}/libvirt\n"));
    tree.cgroup(&format!("memory/{SCOPE}"), "memory.usage_in_bytes", 300 * MIB, &[]);
    tree.cgroup(&format!("memory/{SCOPE}/libvirt"), "memory.usage_in_bytes", 290 * MIB, &[PID]);
    assert_eq!(bytes(read(&tree.roots(), &subject, Method::Cgroup)), 300 * MIB);
}

#[test]
fn proxmox() {
    let tree = Tree::new();
    tree.v2();
    tree.process(&Process { rss_kib: Some(100 << 10), ..Process::new(PID, "kvm") });
    tree.write(&format!("proc/{PID}/cgroup"), "0::/qemu.slice/113.scope\n");
    tree.process(&Process::new(60, "swtpm"));
    tree.cgroup("qemu.slice/113.scope", "memory.current", 300 * MIB, &[PID, 60]);
    tree.cgroup("qemu.slice", "memory.current", 900 * MIB, &[]);
    let subject = Subject { pid: Some(PID), ..Subject::default() };
    assert_eq!(bytes(read(&tree.roots(), &subject, Method::Cgroup)), 300 * MIB);
    // A second VMM in it: whose is the memory?
    tree.process(&Process::new(61, "kvm"));
    tree.procs("qemu.slice/113.scope", &[PID, 60, 61]);
    let reading = read(&tree.roots(), &subject, Method::Cgroup);
    assert_eq!(reason(&reading), AbsentReason::NoCgroup);
    assert!(reading.unwrap_err().detail.contains("kvm (pid 61)"));
}

#[test]
fn a_shared_cgroup_is_nobodys() {
    let tree = Tree::new();
    tree.v2();
    let subject = tree.vmm("0::/user.slice/session-3.scope\n");
    tree.process(&Process::new(70, "editor"));
    tree.cgroup("user.slice/session-3.scope", "memory.current", 900 * MIB, &[PID, 70]);
    for method in [Method::Cgroup, Method::RssCgroup] {
        let reading = read(&tree.roots(), &subject, method);
        assert_eq!(reason(&reading), AbsentReason::NoCgroup);
        let detail = reading.unwrap_err().detail;
        assert!(detail.contains("editor (pid 70)") && detail.contains("--cgroup"), "{detail}");
    }
    // Unless the operator says that all in it is the VM's.
    let named = Subject { cgroup: Some("/user.slice/session-3.scope".into()), ..subject };
    assert_eq!(bytes(read(&tree.roots(), &named, Method::Cgroup)), 900 * MIB);
}

#[test]
fn children_and_kernel_threads_are_the_vms() {
    let tree = Tree::new();
    tree.v2();
    let subject = tree.vmm("0::/system.slice/web1.service\n");
    tree.process(&Process { parent: PID, ..Process::new(70, "passt") });
    tree.process(&Process { parent: 70, ..Process::new(71, "passt") });
    tree.process(&Process { rss_kib: None, parent: 2, ..Process::new(72, "vhost-4242") });
    tree.cgroup("system.slice/web1.service", "memory.current", 300 * MIB, &[PID, 70, 71, 72]);
    let mut reader = Reader::new(&tree.roots(), &subject);
    assert_eq!(bytes(reader.read(Method::Cgroup)), 300 * MIB);
    assert_eq!(bytes(reader.read(Method::RssCgroup)), 116 * MIB);
    assert_eq!(reader.read(Method::RssCgroup).unwrap().source, "statm resident of 3 processes");
}

/// With `hidepid`, /proc does not show other users' processes; outside of a pid namespace they have no number.
#[test]
fn members_that_cannot_be_seen_are_not_left_out() {
    let tree = Tree::new();
    tree.v2();
    let subject = tree.vmm("0::/web1\n");
    for (hidden, wanted) in [(73, AbsentReason::NotPermitted), (0, AbsentReason::NoCgroup)] {
        tree.cgroup("web1", "memory.current", 300 * MIB, &[PID]);
        let mut reader = Reader::new(&tree.roots(), &subject);
        assert_eq!(bytes(reader.read(Method::RssCgroup)), 100 * MIB);
        tree.procs("web1", &[PID, hidden]);
        assert_eq!(reason(&reader.read(Method::RssCgroup)), wanted, "the sum would be too low");
        reader.refresh();
        assert_eq!(reason(&reader.read(Method::Cgroup)), wanted, "it may be another VM's");
    }
}

/// The controller may be enabled only further up; what is there must still be the VM's alone.
#[test]
fn up_to_where_the_controller_is() {
    let tree = Tree::new();
    tree.v2();
    let subject = tree.vmm("0::/vms/web1/inner/more\n");
    tree.procs("vms/web1/inner/more", &[PID]);
    tree.procs("vms/web1/inner", &[]);
    tree.cgroup("vms/web1", "memory.current", 300 * MIB, &[]);
    let mut reader = Reader::new(&tree.roots(), &subject);
    assert_eq!(bytes(reader.read(Method::Cgroup)), 300 * MIB);
    assert_eq!(reader.cgroup_path().as_deref(), Some(Path::new("/vms/web1")));
}

#[test]
fn a_named_cgroup_needs_no_process() {
    let tree = Tree::new();
    tree.v2();
    tree.process(&Process::new(80, "qemu-system-x86"));
    tree.cgroup("vms/web2", "memory.current", 300 * MIB, &[80]);
    let directory = tree.path("cgroup/vms/web2");
    for name in [Path::new("/vms/web2"), Path::new("vms/web2"), &directory] {
        let subject = Subject { cgroup: Some(name.to_owned()), ..Subject::default() };
        assert_eq!(bytes(read(&tree.roots(), &subject, Method::Cgroup)), 300 * MIB, "{}", name.display());
        assert_eq!(bytes(read(&tree.roots(), &subject, Method::RssCgroup)), 8 * MIB);
        assert_eq!(reason(&read(&tree.roots(), &subject, Method::Rss)), AbsentReason::NoProcess);
    }
    for name in ["/vms/web3", "/", "../../etc", "vms/../vms/web2"] {
        let subject = Subject { cgroup: Some(name.into()), ..Subject::default() };
        assert_eq!(reason(&read(&tree.roots(), &subject, Method::Cgroup)), AbsentReason::NoCgroup, "{name}");
    }
}

/// A VM that moves is followed, and one that is joined by another is noticed.
#[test]
fn a_reader_follows() {
    let tree = Tree::new();
    tree.v2();
    let subject = tree.vmm("0::/a\n");
    tree.cgroup("a", "memory.current", 300 * MIB, &[PID]);
    let mut reader = Reader::new(&tree.roots(), &subject);
    assert_eq!(bytes(reader.read(Method::Cgroup)), 300 * MIB);
    tree.write("cgroup/a/memory.current", "104857600\n");
    assert_eq!(bytes(reader.read(Method::Cgroup)), 100 * MIB);
    tree.cgroup("b", "memory.current", 50 * MIB, &[PID]);
    tree.write(&format!("proc/{PID}/cgroup"), "0::/b\n");
    assert_eq!(bytes(reader.read(Method::Cgroup)), 50 * MIB);
    tree.process(&Process::new(70, "other"));
    tree.procs("b", &[PID, 70]);
    reader.refresh();
    assert_eq!(reason(&reader.read(Method::Cgroup)), AbsentReason::NoCgroup);
    assert_eq!(reader.cgroup_path(), None);
}
