//! Memory cgroups for a benchmark's VMs, v1 or v2, made below one of the benchmark's own and removed afterwards.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::aftermath::Aftermath;

const MOUNT: &str = "/sys/fs/cgroup";
/// Removes the leaves and then the top, as soon as the last process has gone: QEMU ends with the thread that started it.
const REMOVE: &str =
    r#"for i in $(seq 50); do rmdir "$1"/*/ 2>/dev/null; rmdir "$1" 2>/dev/null && exit 0; sleep 0.1; done; exit 1"#;

/// One cgroup with a cgroup for each VM below it.
#[derive(Debug)]
pub(super) struct Cgroups {
    top: PathBuf,
    _removal: Aftermath,
}

impl Cgroups {
    /// Makes the top.
    ///
    /// # Errors
    /// Not root, or no hierarchy has the memory controller.
    pub(super) fn new(name: &str) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "cgroups for the VMs can be made by root only: run it with sudo");
        let v1 = Path::new(MOUNT).join("memory");
        let parent = if v1.join("memory.usage_in_bytes").exists() { v1 } else { v2()? };
        let top = parent.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&top).with_context(|| format!("making the cgroup {}", top.display()))?;
        let removal = Aftermath::new(REMOVE, &[&top.to_string_lossy()])?;
        let control = top.join("cgroup.subtree_control");
        if control.exists() {
            fs::write(&control, "+memory").with_context(|| control.display().to_string())?;
        }
        Ok(Self { top, _removal: removal })
    }

    /// Makes one below it.
    pub(super) fn make(&self, name: &str) -> Result<PathBuf> {
        let directory = self.top.join(name);
        fs::create_dir(&directory).with_context(|| format!("making the cgroup {}", directory.display()))?;
        Ok(directory)
    }
}

/// The v2 tree, with the controller handed down to what is below its root.
fn v2() -> Result<PathBuf> {
    for root in [PathBuf::from(MOUNT), Path::new(MOUNT).join("unified")] {
        let Ok(controllers) = fs::read_to_string(root.join("cgroup.controllers")) else { continue };
        if !controllers.split_whitespace().any(|controller| controller == "memory") {
            continue;
        }
        let control = root.join("cgroup.subtree_control");
        let enabled = fs::read_to_string(&control).with_context(|| control.display().to_string())?;
        if !enabled.split_whitespace().any(|controller| controller == "memory") {
            fs::write(&control, "+memory").with_context(|| format!("enabling memory in {}", control.display()))?;
        }
        return Ok(root);
    }
    bail!("no cgroup hierarchy with the memory controller is mounted at {MOUNT}: boot with cgroup_enable=memory")
}
