//! Whether fpr could be used with the VM of `--pid`, by which channel, and what to change.

use super::daemon::Daemon;
use super::guest_memory::{self, Block};
use super::qemu::{BALLOON, GENERIC, Qemu, VSOCK};
use super::vmm::{Kind, Vmm};
use super::{Check, Line, Surroundings, Verdict, size};
use crate::process::check_holdings;
use crate::process::status::kibibytes;
use fpr_protocol::Gate;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// virtio 1.2, section 5: device id of a memory balloon.
const VIRTIO_ID_BALLOON: &str = "virtio-id=5";

/// Mappings listed in the figures.
const MAX_LISTED: usize = 5;

pub(super) fn lines(surroundings: &Surroundings, vmm: &Vmm, qemu: &Qemu, daemon: &Daemon) -> Vec<Line> {
    let process = vmm.line();
    if process.verdict == Verdict::No {
        return vec![process];
    }
    let (memory, guest_bytes) = memory(vmm);
    let mut lines = vec![process, memory];
    lines.extend(holdings(&surroundings.proc, vmm, guest_bytes));
    let (agent, agent_line) = agent_channel(vmm, qemu);
    let (kernel, kernel_line) = kernel_channel(vmm, qemu);
    let usable = usable(&lines, [(Check::AgentChannel, agent), (Check::KernelChannel, kernel)]);
    lines.push(cgroup(surroundings, vmm, guest_bytes));
    lines.push(connected(vmm, daemon));
    lines.extend([agent_line, kernel_line, usable]);
    lines
}

/// The line, and how much memory the guest has.
fn memory(vmm: &Vmm) -> (Line, u64) {
    let blocks = match guest_memory::blocks(vmm) {
        Ok(blocks) => blocks,
        Err(finding) => {
            let remedy = "run doctor as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH";
            return (Line::warn(Check::Memory, format!("unknown: {}", finding.detail), remedy), 0);
        }
    };
    let guest_bytes = blocks.iter().fold(0_u64, |sum, block| sum.saturating_add(block.mapped_bytes));
    let allocated = blocks.iter().try_fold(0_u64, |sum, block| Some(sum.saturating_add(block.allocated_bytes?)));
    let described: Vec<String> = blocks.iter().take(MAX_LISTED).map(Block::describe).collect();
    let described = described.join("; ");
    let unsuitable = blocks.iter().find_map(|block| block.unsuitable(vmm));
    let line = match (blocks.first(), unsuitable) {
        (None, _) => Line::no(
            Check::Memory,
            "no mapping of 16M or more that could be a guest's memory",
            "take the pid of the process that runs the guest",
        ),
        (Some(_), Some(why)) => {
            Line::no(Check::Memory, format!("{described}: {why}"), guest_memory::remedy(vmm, guest_bytes))
        }
        (Some(_), None) => Line::ok(Check::Memory, described),
    };
    let listed: Vec<Value> = blocks.iter().take(MAX_LISTED).map(|block| json!(block)).collect();
    let line = line.figure("guest_bytes", guest_bytes).figure("allocated_bytes", allocated).figure("mappings", listed);
    (line, guest_bytes)
}

/// Locked memory and assigned devices, as the daemon's gates see them.
fn holdings(proc: &Path, vmm: &Vmm, guest_bytes: u64) -> [Line; 2] {
    let findings = check_holdings(proc, vmm.pid, guest_bytes);
    let of = |gate| findings.iter().filter(move |finding| finding.gate == gate).map(|finding| finding.detail.as_str());
    let status = vmm.status.as_deref().unwrap_or_default();
    let bytes = |key| kibibytes(status, key).map(|kib| kib.saturating_mul(1024));
    let (locked, pinned) = (bytes("VmLck:"), bytes("VmPin:"));
    let descriptors = vmm.descriptors.as_ref().map(Vec::len).unwrap_or_default();

    let line = |check, gate: Gate, fine: String, remedy: &str| {
        let seen: Vec<&str> = of(gate).collect();
        let unknown = of(Gate::Uninspectable).next();
        match unknown {
            _ if !seen.is_empty() => Line::no(check, seen.join("; "), remedy),
            Some(why) => Line::warn(
                check,
                format!("unknown: {why}"),
                "run doctor as root or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
            ),
            None => Line::ok(check, fine),
        }
    };
    let locked_line = if guest_bytes == 0 && locked.is_some_and(|bytes| bytes > 0) {
        Line::warn(
            Check::MemoryLocked,
            format!("VmLck is {}, and how much of the guest that is is unknown", size(locked.unwrap_or(0))),
            "see `memory`",
        )
    } else {
        line(
            Check::MemoryLocked,
            Gate::MemoryLocked,
            format!("VmLck is {} of {} of guest memory", size(locked.unwrap_or(0)), size(guest_bytes)),
            "start the VM without -overcommit mem-lock=on (libvirt: without locked in memoryBacking)",
        )
    };
    let assigned_line = line(
        Check::AssignedDevice,
        Gate::AssignedDevice,
        format!("none among {descriptors} descriptors, VmPin is {}", size(pinned.unwrap_or(0))),
        "detach the device (QMP device_del, virsh detach-device); there is no safe way around",
    );
    [
        locked_line.figure("locked_bytes", locked),
        assigned_line.figure("pinned_bytes", pinned).figure("descriptors", descriptors),
    ]
}

fn cgroup(surroundings: &Surroundings, vmm: &Vmm, guest_bytes: u64) -> Line {
    let path = vmm.directory.join("cgroup");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => return Line::unreadable(Check::VmCgroup, &path, &error),
    };
    // "hierarchy:controllers:path" (cgroups(7)); version 1 has the memory controller where it is mounted with one.
    let fields = |line: &'_ str| {
        let mut fields = line.splitn(3, ':');
        Some((fields.next()?.to_owned(), fields.next()?.to_owned(), fields.next()?.to_owned()))
    };
    let mut groups = text.lines().filter_map(fields);
    let version1 = groups.clone().find(|(_, controllers, _)| controllers.split(',').any(|name| name == "memory"));
    let (root, group, limit_file, usage_file) = match version1 {
        Some((_, _, group)) => {
            (surroundings.cgroup.join("memory"), group, "memory.limit_in_bytes", "memory.usage_in_bytes")
        }
        None => match groups.find(|(hierarchy, ..)| hierarchy == "0") {
            Some((_, _, group)) => (surroundings.cgroup.clone(), group, "memory.max", "memory.current"),
            None => {
                let remedy = "mount cgroup2; without it there is no limit either";
                return Line::warn(Check::VmCgroup, "in no control group with a memory controller", remedy);
            }
        },
    };
    let (limit, limited_by) = smallest_limit(&root, &group, limit_file);
    let usage = number(&root.join(group.trim_start_matches('/')).join(usage_file));
    let used = usage.map_or_else(|| "an unknown size".to_owned(), size);
    let line = match limit {
        _ if !root.join(group.trim_start_matches('/')).is_dir() => Line::warn(
            Check::VmCgroup,
            format!("unknown: {group} is not below {}", root.display()),
            "run doctor in the host's cgroup namespace",
        ),
        None => Line::ok(Check::VmCgroup, format!("{group} uses {used}, without a limit")),
        Some(limit) if limit < guest_bytes => Line::warn(
            Check::VmCgroup,
            format!(
                "{group} uses {used}; {limited_by} limits it to {}, less than the guest's {}: the guest can fill it and \
                 be killed",
                size(limit),
                size(guest_bytes)
            ),
            format!(
                "raise {limit_file} of {limited_by} above the guest's size, or count on memory coming back in time"
            ),
        ),
        Some(limit) => {
            Line::ok(Check::VmCgroup, format!("{group} uses {used}; {limited_by} limits it to {}", size(limit)))
        }
    };
    line.figure("path", group).figure("limit_bytes", limit).figure("usage_bytes", usage)
}

/// The smallest limit of the group and those around it, and whose it is.
fn smallest_limit(root: &Path, group: &str, file: &str) -> (Option<u64>, String) {
    let mut smallest: (Option<u64>, String) = (None, group.to_owned());
    for ancestor in PathBuf::from(group.trim_start_matches('/')).ancestors() {
        // "max" is no number; version 1 says LONG_MAX in whole pages for no limit.
        let Some(limit) = number(&root.join(ancestor).join(file)).filter(|limit| *limit < 1 << 62) else { continue };
        if smallest.0.is_none_or(|least| limit < least) {
            smallest = (Some(limit), format!("/{}", ancestor.display()));
        }
    }
    smallest
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether the process is a front end of the running daemon.
fn connected(vmm: &Vmm, daemon: &Daemon) -> Line {
    let Some(_) = daemon.pid() else {
        return Line::warn(Check::Connected, "unknown: no daemon answers", "see `daemon`").figure("vm", Value::Null);
    };
    let vm = daemon.vms().iter().find(|vm| has_front_end(vm, vmm.pid.as_raw()));
    let Some(vm) = vm else {
        let remedy = "start the VM with one of fpr's devices, on the socket that the daemon's configuration names";
        return Line::warn(Check::Connected, "no VM of the daemon has this process as its front end", remedy)
            .figure("vm", Value::Null);
    };
    let name = vm["name"].as_str().unwrap_or("?");
    let gates: Vec<String> = vm["gates"]
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(|gate| format!("{}: {}", gate["gate"].as_str().unwrap_or("?"), gate["detail"].as_str().unwrap_or("?")))
        .collect();
    let line = if gates.is_empty() {
        Line::ok(Check::Connected, format!("it is VM {name} of the daemon, and all gates are open"))
    } else {
        Line::no(
            Check::Connected,
            format!("it is VM {name} of the daemon, closed gates: {}", gates.join("; ")),
            "README.md says for each gate what to do",
        )
    };
    line.figure("vm", name)
}

/// A VM may have a front end per device; each is an object with a pid somewhere in its status.
fn has_front_end(status: &Value, pid: i32) -> bool {
    match status {
        Value::Object(fields) => {
            fields.get("pid").is_some_and(|value| *value == pid)
                || fields.values().any(|value| has_front_end(value, pid))
        }
        Value::Array(values) => values.iter().any(|value| has_front_end(value, pid)),
        _ => false,
    }
}

/// A way by which free memory can be reported.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Channel {
    /// Its device is on the command line.
    Present,
    /// It could be.
    Possible,
    /// Not with this VMM.
    Impossible,
}

fn agent_channel(vmm: &Vmm, qemu: &Qemu) -> (Channel, Line) {
    let check = Check::AgentChannel;
    let present = vmm.options("device").any(|device| device.contains(VSOCK));
    let (channel, line) = match vmm.kind() {
        Kind::Qemu if present => (Channel::Present, Line::ok(check, format!("{VSOCK} is on its command line"))),
        Kind::Qemu if qemu.has(VSOCK) == Some(false) => {
            (Channel::Impossible, Line::warn(check, format!("this QEMU lacks {VSOCK}"), "see `qemu-vsock`"))
        }
        Kind::Qemu => {
            let remedy = format!(
                "add -chardev socket,id=fpr,path=/run/fpr/NAME.sock -device {VSOCK},chardev=fpr (docs/vmm/qemu.md)"
            );
            let reason = format!("possible, but {VSOCK} is not on its command line");
            (Channel::Possible, Line::warn(check, reason, remedy))
        }
        kind => other_vmm(check, kind),
    };
    (channel, line.figure("device_present", present))
}

fn kernel_channel(vmm: &Vmm, qemu: &Qemu) -> (Channel, Line) {
    let check = Check::KernelChannel;
    let is_balloon = |device: &str| {
        let generic = GENERIC.iter().any(|name| device.contains(name));
        let id =
            device.split(',').any(|part| part == VIRTIO_ID_BALLOON || part.trim_end_matches('}') == "\"virtio-id\":5");
        generic && id
    };
    let present = vmm.options("device").find(|device| is_balloon(device));
    let own = vmm.options("device").find(|device| {
        device.contains(BALLOON.trim_end_matches("-pci"))
            && (device.contains("free-page-reporting=on") || device.contains("\"free-page-reporting\":true"))
    });
    let (channel, line) = match (vmm.kind(), present, qemu.generic()) {
        (Kind::Qemu, ..) if own.is_some() => {
            let line = Line::warn(
                check,
                "QEMU's own balloon takes the reports of the guest's kernel, which reports to one device only",
                "take free-page-reporting=on away from virtio-balloon to have fpr's gates and counts instead",
            );
            (Channel::Impossible, line)
        }
        (Kind::Qemu, Some(device), _) => {
            (Channel::Present, Line::ok(check, format!("-device {device} is on its command line")))
        }
        (Kind::Qemu, None, None) if matches!(qemu, Qemu::Answered { .. }) => {
            let reason = "this QEMU has no device for any vhost-user back end";
            (Channel::Impossible, Line::warn(check, reason, "the guest agent does without; see `qemu-generic`"))
        }
        (Kind::Qemu, None, device) => {
            let device = device.unwrap_or(GENERIC[0]);
            let reason = format!("possible, but {device} with {VIRTIO_ID_BALLOON} is not on its command line");
            let remedy = format!(
                "add -chardev socket,id=fprb,path=/run/fpr/NAME-balloon.sock -device \
                 {device},chardev=fprb,{VIRTIO_ID_BALLOON},num_vqs=4,config_size=16 (docs/vmm/qemu.md, which also says how to restart the daemon)"
            );
            (Channel::Possible, Line::warn(check, reason, remedy))
        }
        (kind, ..) => other_vmm(check, kind),
    };
    (channel, line.figure("device_present", present.is_some()))
}

fn other_vmm(check: Check, kind: Kind) -> (Channel, Line) {
    match kind {
        Kind::CloudHypervisor => {
            let line = Line::warn(
                check,
                "Cloud Hypervisor: its generic vhost-user device should do; that was never run",
                "docs/vmm/cloud-hypervisor.md has the options",
            );
            (Channel::Possible, line)
        }
        Kind::Firecracker => {
            let line = Line::warn(
                check,
                "Firecracker takes vhost-user back ends for block devices only",
                "use its own balloon device, with free page reporting where it has it",
            );
            (Channel::Impossible, line)
        }
        Kind::Qemu | Kind::Other => {
            let line = Line::warn(
                check,
                "not a VMM that doctor knows",
                "any VMM with a vhost-user device will do; one's own can use the library (docs/vmm/library.md)",
            );
            (Channel::Possible, line)
        }
    }
}

/// All in all.
fn usable(lines: &[Line], channels: [(Check, Channel); 2]) -> Line {
    let with = |verdict| {
        let names = lines.iter().filter(move |line| line.verdict == verdict && line.check != Check::Process);
        names.map(|line| line.check.word()).collect::<Vec<_>>().join(", ")
    };
    let that_are = |wanted| -> Vec<&str> {
        let channels = channels.iter().filter(move |(_, channel)| *channel == wanted);
        channels.map(|(check, _)| check.word()).collect()
    };
    let (blocked, unknown) = (with(Verdict::No), with(Verdict::Warn));
    let (present, possible) = (that_are(Channel::Present), that_are(Channel::Possible));
    let check = Check::Usable;
    let line = if !blocked.is_empty() {
        Line::no(check, format!("not as it is, because of: {blocked}"), "do what those lines say")
    } else if present.is_empty() && possible.is_empty() {
        Line::no(check, "no channel is left", "do what agent-channel or kernel-channel says")
    } else if !unknown.is_empty() {
        Line::warn(check, format!("cannot tell, because of: {unknown}"), "do what those lines say")
    } else if present.is_empty() {
        Line::warn(
            check,
            format!(
                "its memory is suitable, and {} could be used: no device of fpr is there yet",
                possible.join(" or ")
            ),
            "add what those lines say to its command line and start the VM anew",
        )
    } else {
        Line::ok(check, format!("yes, by {}", present.join(" and ")))
    };
    line.figure("channels_present", present).figure("channels_possible", possible)
}
