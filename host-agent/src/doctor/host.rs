//! The host's KVM, kernel, control groups and pressure information.

use super::{Check, Line, Surroundings};
use crate::kvm::Ability;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// First kernel with `cachestat`, by which a huge page with one page in use is told from a full one.
const CACHESTAT: (u32, u32) = (6, 5);

pub(super) fn lines(surroundings: &Surroundings) -> Vec<Line> {
    vec![kvm(&(surroundings.kvm)()), kernel(&surroundings.proc), cgroup(&surroundings.cgroup), psi(&surroundings.proc)]
}

fn kvm(ability: &Ability) -> Line {
    let line = match (ability, ability.remedy()) {
        (_, None) => Line::ok(Check::Kvm, ability.to_string()),
        // Other users' guests may run on it all the same.
        (Ability::NotPermitted, Some(remedy)) => Line::warn(Check::Kvm, format!("unknown: {ability}"), remedy),
        (_, Some(remedy)) => Line::no(Check::Kvm, ability.to_string(), remedy),
    };
    line.figure("ability", ability.name())
}

fn kernel(proc: &Path) -> Line {
    let path = proc.join("sys/kernel/osrelease");
    let release = match fs::read_to_string(&path) {
        Ok(release) => release.trim().to_owned(),
        Err(error) => return Line::unreadable(Check::Kernel, &path, &error),
    };
    let line = match version(&release) {
        Some(version) if version >= CACHESTAT => Line::ok(Check::Kernel, format!("{release}: has cachestat (6.5)")),
        Some(_) => Line::warn(
            Check::Kernel,
            format!("{release}: no cachestat, so a huge page with one page in use counts as wholly backed"),
            "Linux 6.5 or newer reports more exactly; everything else works",
        ),
        None => Line::warn(
            Check::Kernel,
            format!("{release:?} is no kernel version that doctor understands"),
            "check that it is 6.5 or newer",
        ),
    };
    line.figure("release", release)
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// By what is mounted where, as `systemd` lays it out: `cgroup.controllers` exists at the root of a version 2 tree only
/// (kernel: `Documentation/admin-guide/cgroup-v2.rst`).
fn cgroup(root: &Path) -> Line {
    let controllers = root.join("cgroup.controllers");
    match fs::read_to_string(&controllers) {
        Ok(text) => {
            let line = if text.split_whitespace().any(|controller| controller == "memory") {
                Line::ok(Check::Cgroup, "version 2, with the memory controller")
            } else {
                Line::warn(
                    Check::Cgroup,
                    "version 2 without the memory controller: what VMs are charged is unknown",
                    "remove cgroup_disable=memory from the kernel's command line",
                )
            };
            return line.figure("cgroup_version", "v2");
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Line::unreadable(Check::Cgroup, &controllers, &error),
    }
    let (memory, unified) = (root.join("memory").is_dir(), root.join("unified/cgroup.controllers").exists());
    match (memory, unified) {
        (true, false) => {
            Line::ok(Check::Cgroup, "version 1, with the memory controller").figure("cgroup_version", "v1")
        }
        (true, true) => {
            Line::ok(Check::Cgroup, "hybrid: the memory controller is version 1's").figure("cgroup_version", "hybrid")
        }
        (false, _) => Line::warn(
            Check::Cgroup,
            format!("no memory controller below {}", root.display()),
            "mount cgroup2 there; without it, what VMs are charged and their limits are unknown",
        )
        .figure("cgroup_version", Value::Null),
    }
}

fn psi(proc: &Path) -> Line {
    let path = proc.join("pressure/memory");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return Line::unreadable(Check::Psi, &path, &error);
        }
        // Not built in: no file. Built in and switched off: EOPNOTSUPP.
        Err(error) => {
            return Line::warn(
                Check::Psi,
                format!("no pressure information: {}: {error}", path.display()),
                "boot the host with psi=1; nothing of fpr depends on it, but memory pressure stays unseen",
            );
        }
    };
    let percent = |kind: &str| -> Option<f64> {
        let line = text.lines().find(|line| line.starts_with(kind))?;
        line.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
    };
    match (percent("some "), percent("full ")) {
        (Some(some), Some(full)) => {
            Line::ok(Check::Psi, format!("memory pressure of the last 10 s: some {some} %, full {full} %"))
                .figure("some_avg10_percent", json!(some))
                .figure("full_avg10_percent", json!(full))
        }
        _ => Line::warn(Check::Psi, format!("cannot understand {}", path.display()), "ask the host's kernel log"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_distributions() {
        for (release, wanted) in [
            ("6.18.44-cloud-amd64", Some((6, 18))),
            ("6.1.0-37-amd64", Some((6, 1))),
            ("6.5-rc1", Some((6, 5))),
            ("7.2", Some((7, 2))),
            ("linux", None),
            ("6", None),
        ] {
            assert_eq!(version(release), wanted, "{release}");
        }
    }
}
