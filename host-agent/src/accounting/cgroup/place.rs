//! Which memory cgroup a process is in, and where that is mounted.
//!
//! The memory controller is on one hierarchy only: on a v1 hierarchy of its own, alone or beside a v2 tree (hybrid), or on
//! the v2 tree. `/proc/PID/cgroup` says the path in each (cgroups(7)).

use super::super::{Absent, AbsentReason, Roots};
use std::path::{Component, Path, PathBuf};

/// Which interface a cgroup has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V2,
}

impl Version {
    /// The file with the hierarchical usage.
    pub(super) fn usage_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.usage_in_bytes",
            Self::V2 => "memory.current",
        }
    }
}

/// A cgroup of the memory controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cgroup {
    /// Where the hierarchy is mounted.
    pub(super) mount: PathBuf,
    /// Its path below that, without a slash in front; never the root.
    pub(super) path: PathBuf,
    pub(super) version: Version,
}

impl Cgroup {
    pub(super) fn directory(&self) -> PathBuf {
        self.mount.join(&self.path)
    }

    /// The one above, unless that is the root.
    pub(super) fn parent(&self) -> Option<Self> {
        let path = self.path.parent().filter(|path| !path.as_os_str().is_empty())?;
        Some(Self { path: path.to_owned(), ..self.clone() })
    }
}

fn none(detail: impl Into<String>) -> Absent {
    Absent::new(AbsentReason::NoCgroup, detail)
}

/// What `/proc/PID/cgroup` says about the memory controller and the v2 tree.
fn paths(text: &str) -> Option<(Option<&str>, Option<&str>)> {
    let (mut v1, mut v2) = (None, None);
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        if !path.starts_with('/') {
            return None;
        }
        if hierarchy == "0" && controllers.is_empty() {
            v2 = Some(path);
        } else if controllers.split(',').any(|controller| controller == "memory") {
            v1 = Some(path);
        }
    }
    Some((v1, v2))
}

/// The cgroup of a process, by the text of its `cgroup` file.
pub(super) fn of_process(roots: &Roots, text: &str) -> Result<Cgroup, Absent> {
    let Some((v1, v2)) = paths(text) else {
        let shown: String = text.chars().take(80).collect();
        return Err(Absent::new(AbsentReason::Malformed, format!("/proc/PID/cgroup: cannot understand {shown:?}")));
    };
    let (path, mount, version) = match (v1, v2) {
        (Some(path), _) => (path, roots.cgroup.join("memory"), Version::V1),
        (None, Some(path)) => (path, v2_mount(roots)?, Version::V2),
        (None, None) => {
            return Err(none("the kernel has no memory controller: boot it with cgroup_enable=memory, or use pss"));
        }
    };
    if !mount.is_dir() {
        let remedy = "mount the memory controller there, or run this outside of the container";
        return Err(none(format!("{} is not mounted: {remedy}", mount.display())));
    }
    if path.ends_with(" (deleted)") {
        return Err(none(format!("its cgroup {path} was removed: start the VM in a cgroup of its own")));
    }
    if path.split('/').any(|part| part == "..") {
        return Err(none(format!("its cgroup {path} is outside of this cgroup namespace: run this in the host's")));
    }
    let path = path.trim_start_matches('/');
    if path.is_empty() {
        return Err(none(
            "it is in the root cgroup, whose usage is the whole host's: start the VM in a cgroup of its own",
        ));
    }
    Ok(Cgroup { mount, path: path.into(), version })
}

/// Where the v2 tree is that has the memory controller: it may be the only tree, or beside those of v1.
fn v2_mount(roots: &Roots) -> Result<PathBuf, Absent> {
    for mount in [roots.cgroup.clone(), roots.cgroup.join("unified")] {
        if let Ok(controllers) = std::fs::read_to_string(mount.join("cgroup.controllers")) {
            if controllers.split_ascii_whitespace().any(|controller| controller == "memory") {
                return Ok(mount);
            }
            return Err(none(format!(
                "the v2 tree {} has no memory controller: boot the kernel with cgroup_enable=memory, or mount v1's",
                mount.display()
            )));
        }
    }
    let remedy = "mount cgroup2 there, or run this outside of the container";
    Err(none(format!("no cgroup tree is mounted at {}: {remedy}", roots.cgroup.display())))
}

/// The cgroup that somebody named: below the root of the hierarchy, or with the path of its directory.
pub(super) fn named(roots: &Roots, name: &Path) -> Result<Cgroup, Absent> {
    if name.components().any(|component| component == Component::ParentDir) {
        return Err(none(format!("{}: name the cgroup without ..", name.display())));
    }
    let mounts = [
        (roots.cgroup.join("memory"), Version::V1),
        (roots.cgroup.clone(), Version::V2),
        (roots.cgroup.join("unified"), Version::V2),
    ];
    let below = name.strip_prefix("/").unwrap_or(name);
    for (mount, version) in &mounts {
        for path in [name.strip_prefix(mount).ok(), Some(below)].into_iter().flatten() {
            if path.as_os_str().is_empty() {
                continue;
            }
            let cgroup = Cgroup { mount: mount.clone(), path: path.to_owned(), version: *version };
            if cgroup.directory().join(version.usage_file()).exists() {
                return Ok(cgroup);
            }
        }
    }
    Err(none(format!(
        "there is no memory cgroup {} below {}, or it is the root: `cat /proc/PID/cgroup` shows the path of a process",
        name.display(),
        roots.cgroup.display()
    )))
}

/// Whether it is a part of a VM's cgroup that libvirt makes for threads (`src/util/vircgroup.c`).
pub(super) fn is_part(cgroup: &Cgroup) -> bool {
    let Some(name) = cgroup.path.file_name().and_then(|name| name.to_str()) else { return false };
    let numbered = |prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    name == "libvirt" || name == "emulator" || numbered("vcpu") || numbered("iothread")
}

/// Whether its name says that it was made for one VM: then the VM's helpers are in it as well.
pub(super) fn is_named_for_a_vm(cgroup: &Cgroup) -> bool {
    let name = cgroup.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let parent = cgroup.path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    // libvirt with and without systemd (`virSystemdMakeScopeName`, `virCgroupNewMachineManual`); Proxmox VE.
    (name.starts_with("machine-") && name.ends_with(".scope"))
        || name.ends_with(".libvirt-qemu")
        || (parent == Some("qemu.slice")
            && name
                .strip_suffix(".scope")
                .is_some_and(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cgroup(path: &str) -> Cgroup {
        Cgroup { mount: "/sys/fs/cgroup".into(), path: path.into(), version: Version::V2 }
    }

    #[test]
    fn the_memory_controller_is_on_one_hierarchy() {
        assert_eq!(paths("0::/a:b\n"), Some((None, Some("/a:b"))));
        assert_eq!(paths("5:cpu,cpuacct:/x\n4:memory:/m\n1:name=systemd:/s\n0::/u\n"), Some((Some("/m"), Some("/u"))));
        assert_eq!(paths("5:hugetlb,memory:/m\n"), Some((Some("/m"), None)));
        assert_eq!(paths(""), Some((None, None)));
        assert_eq!(paths("0::relative"), None);
        assert_eq!(paths("nonsense"), None);
    }

    #[test]
    fn names_of_libvirt_and_proxmox() {
        for part in ["m.scope/libvirt", "m.scope/libvirt/emulator", "a/vcpu0", "a/iothread12"] {
            assert!(is_part(&cgroup(part)), "{part}");
        }
        for whole in ["machine.slice/machine-qemu.scope", "a/vcpu", "a/vcpus", "vm/iothreads"] {
            assert!(!is_part(&cgroup(whole)), "{whole}");
        }
        for vm in [
            r"machine.slice/machine-qemu\x2d3\x2dweb1.scope",
            "machine/qemu-3-web1.libvirt-qemu",
            "qemu.slice/113.scope",
        ] {
            assert!(is_named_for_a_vm(&cgroup(vm)), "{vm}");
        }
        for other in ["user.slice/session-3.scope", "system.slice/virt.service", "qemu.slice/x.scope", "113.scope"] {
            assert!(!is_named_for_a_vm(&cgroup(other)), "{other}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = (paths(&text), is_part(&cgroup(&text)), is_named_for_a_vm(&cgroup(&text)));
        }
    }
}
