//! Which vhost-user devices a QEMU has, by its own `-device help`.
//!
//! It is the QEMU of the VM in question (`/proc/PID/exe`) if there is one, else the first in `PATH`. Running what a
//! process runs is only done if nobody but root and ourselves could have written it: otherwise a user could have
//! doctor run a program as root by naming it `qemu`. QEMU gets a time limit, and a bound on what it says.

use super::vmm::{Kind, Vmm};
use super::{Check, Line, Surroundings};
use nix::unistd::{AccessFlags, access, geteuid};
use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The device of the agent's channel.
pub(super) const VSOCK: &str = "vhost-user-vsock-pci";

/// Devices for any vhost-user back end, newest first: QEMU 10.2 renamed it when it let users create it. Older ones have
/// it too, but do not list what they refuse to create.
pub(super) const GENERIC: [&str; 2] = ["vhost-user-test-device-pci", "vhost-user-device-pci"];

/// QEMU's own balloon.
pub(super) const BALLOON: &str = "virtio-balloon-pci";

/// `-device help` of QEMU 11.1 has 40 KB.
const MAX_OUTPUT: u64 = 1 << 20;

/// Where Red Hat's distributions keep theirs, outside `PATH`.
const LIBEXEC: &str = "/usr/libexec/qemu-kvm";

/// What a QEMU said, or why none did.
pub(super) enum Qemu {
    /// It answered.
    Answered {
        /// Which one.
        path: PathBuf,
        /// First line of `--version`.
        version: String,
        /// The devices that users can create.
        devices: BTreeSet<String>,
        /// Why the VM's own could not be asked.
        instead_of: Option<String>,
    },
    /// None did.
    Silent {
        /// How that is reported.
        line: Line,
    },
}

impl Qemu {
    pub(super) fn ask(surroundings: &Surroundings, vmm: Option<&Vmm>) -> Self {
        let own = vmm.filter(|vmm| vmm.kind() == Kind::Qemu).map(Vmm::exe_link);
        let mut instead_of = None;
        if let Some(link) = own {
            let shown = std::fs::read_link(&link).unwrap_or_else(|_| link.clone());
            match may_run(&link).and_then(|()| question(&link, surroundings.qemu_limit)) {
                Ok((version, devices)) => return Self::Answered { path: shown, version, devices, instead_of },
                Err(why) => instead_of = Some(format!("{}: {why}", shown.display())),
            }
        }
        let name = format!("qemu-system-{}", std::env::consts::ARCH);
        let Some(path) = in_path(surroundings, &name) else {
            let why = instead_of.map_or_else(String::new, |why| format!("; the VM's own could not be asked: {why}"));
            let reason = format!("there is no {name} in PATH{why}");
            let remedy = "none is needed for other VMMs; otherwise install QEMU or add its directory to PATH";
            return Self::Silent { line: Line::warn(Check::Qemu, reason, remedy) };
        };
        match question(&path, surroundings.qemu_limit) {
            Ok((version, devices)) => Self::Answered { path, version, devices, instead_of },
            Err(why) => {
                let reason = format!("{} cannot be asked for its devices: {why}", path.display());
                Self::Silent {
                    line: Line::warn(Check::Qemu, reason, "run it with `-device help` and see what it says"),
                }
            }
        }
    }

    /// Whether the device can be used; `None` if no QEMU answered.
    pub(super) fn has(&self, device: &str) -> Option<bool> {
        match self {
            Self::Answered { devices, .. } => Some(devices.contains(device)),
            Self::Silent { .. } => None,
        }
    }

    /// The device for any vhost-user back end.
    pub(super) fn generic(&self) -> Option<&'static str> {
        GENERIC.into_iter().find(|device| self.has(device) == Some(true))
    }

    pub(super) fn lines(&self) -> Vec<Line> {
        let (path, version, instead_of) = match self {
            Self::Answered { path, version, instead_of, .. } => (path, version, instead_of),
            Self::Silent { line } => return vec![line.clone()],
        };
        let reason = format!("{version}: {}", path.display());
        let qemu = match instead_of {
            None => Line::ok(Check::Qemu, reason),
            Some(why) => Line::warn(
                Check::Qemu,
                format!("{reason}; the VM's own was not asked: {why}"),
                "what follows holds for the VM only if both are the same QEMU",
            ),
        };
        let qemu = qemu.figure("path", path.display().to_string()).figure("version", version.as_str());

        let (vsock, generic) = (self.has(VSOCK) == Some(true), self.generic());
        let vsock_line = match (vsock, generic) {
            (true, _) => Line::ok(Check::QemuVsock, format!("has {VSOCK}: the guest agent can report")),
            (false, Some(_)) => Line::warn(
                Check::QemuVsock,
                format!("lacks {VSOCK}: no guest agent"),
                "the guest's kernel can report without; or install a QEMU built with CONFIG_VHOST_USER_VSOCK",
            ),
            (false, None) => Line::no(
                Check::QemuVsock,
                format!("lacks {VSOCK}, and there is no other device either: nothing can be reported"),
                "install a QEMU built with CONFIG_VHOST_USER_VSOCK (Debian's qemu-system-x86 7.2 is)",
            ),
        };
        let generic_line = match generic {
            Some(device) => Line::ok(
                Check::QemuGeneric,
                format!(
                    "has {device}: the guest's kernel can report; unplug it before the daemon stops (docs/vmm/qemu.md)"
                ),
            ),
            None => Line::warn(
                Check::QemuGeneric,
                format!("lacks {}: the guest's kernel cannot report to fpr", GENERIC[0]),
                "the guest agent does it all; for kernel reports, install QEMU 10.2 or newer",
            ),
        };
        let balloon = if self.has(BALLOON) == Some(true) {
            Line::ok(
                Check::QemuBalloon,
                format!(
                    "has {BALLOON}: with free-page-reporting=on QEMU drops by itself, without fpr's gates and counts"
                ),
            )
        } else {
            Line::ok(Check::QemuBalloon, format!("lacks {BALLOON}; fpr does not need it"))
        };
        vec![
            qemu,
            vsock_line.figure("available", vsock),
            generic_line.figure("device", generic),
            balloon.figure("available", self.has(BALLOON)),
        ]
    }
}

fn in_path(surroundings: &Surroundings, name: &str) -> Option<PathBuf> {
    std::env::split_paths(&surroundings.path)
        // An empty or relative entry means the directory that doctor happens to run in.
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(name))
        .chain([PathBuf::from(LIBEXEC)])
        .find(|path| path.is_file() && access(path.as_path(), AccessFlags::X_OK).is_ok())
}

/// Whether the program behind the link is one that only root or we could have put there.
fn may_run(link: &Path) -> Result<(), String> {
    let metadata = std::fs::metadata(link).map_err(|error| error.to_string())?;
    let owner = metadata.uid();
    if owner != 0 && owner != geteuid().as_raw() {
        return Err(format!("it belongs to uid {owner}, and doctor runs no other user's programs"));
    }
    if metadata.mode() & 0o022 != 0 {
        return Err(format!("others may write to it (mode {:o})", metadata.mode() & 0o7777));
    }
    Ok(())
}

fn question(qemu: &Path, limit: Duration) -> Result<(String, BTreeSet<String>), String> {
    let end = Instant::now() + limit;
    let version = output(qemu, &["--version"], end)?.lines().next().unwrap_or_default().to_owned();
    if !version.starts_with("QEMU ") {
        return Err(format!("it says of itself {version:?}"));
    }
    Ok((version, devices(&output(qemu, &["-device", "help"], end)?)))
}

/// Lines of the help are `name "NAME", bus BUS, alias "ALIAS"`.
fn devices(help: &str) -> BTreeSet<String> {
    let names = help.lines().filter_map(|line| line.strip_prefix("name \"")?.split_once('"'));
    names.map(|(name, _)| name.to_owned()).collect()
}

/// Ends the program at the latest when doctor has its answer or gives up.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn output(program: &Path, arguments: &[&str], end: Instant) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = Owned(command.spawn().map_err(|error| error.to_string())?);
    let stdout = child.0.stdout.take().ok_or("it has no stdout")?;
    let (send, receive) = mpsc::channel();
    // Left behind if a child of the child keeps the pipe open; it ends with doctor.
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let read = stdout.take(MAX_OUTPUT).read_to_end(&mut text);
        let _ = send.send(read.map(|_| String::from_utf8_lossy(&text).into_owned()));
    });
    match receive.recv_timeout(end.saturating_duration_since(Instant::now())) {
        Ok(text) => text.map_err(|error| error.to_string()),
        Err(_) => Err("it did not answer in time".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_help_text() {
        let help = "Network devices:\nname \"e1000\", bus PCI, desc \"Intel\"\n\
                    name \"virtio-balloon-pci\", bus PCI, alias \"virtio-balloon\"\nnonsense\nname \"cut";
        assert_eq!(devices(help).into_iter().collect::<Vec<_>>(), ["e1000", "virtio-balloon-pci"]);
    }

    #[test]
    fn what_others_can_write_to_is_not_run() {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().unwrap_or_else(|error| unreachable!("{error}"));
        let mode = |mode| {
            let _ = std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode));
            may_run(file.path())
        };
        assert_eq!(mode(0o755), Ok(()));
        assert!(mode(0o757).is_err_and(|why| why.contains("757")));
        assert!(mode(0o775).is_err());
        assert!(may_run(Path::new("/nonexistent")).is_err());
    }
}
