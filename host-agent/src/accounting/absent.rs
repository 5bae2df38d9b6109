//! From what the kernel said to why there is no figure, and what would help.

use super::parse::Malformed;
use super::{Absent, AbsentReason};
use std::io;
use std::path::Path;

/// What helps where reading another process's files is not permitted.
const RIGHTS: &str =
    "run as root, as the VMM's user with the same capabilities, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH";

impl Absent {
    pub(super) fn new(reason: AbsentReason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }

    /// The file is there and says nonsense.
    pub(super) fn malformed(path: &Path, malformed: &Malformed) -> Self {
        Self::new(AbsentReason::Malformed, format!("{}: {malformed}", path.display()))
    }

    /// The file of a process that exists could not be read; `missing` is what it means if it is not there.
    pub(super) fn unreadable(path: &Path, error: &io::Error, missing: (AbsentReason, &str)) -> Self {
        let path = path.display();
        if error.raw_os_error() == Some(libc::ESRCH) {
            return Self::new(
                AbsentReason::NoProcess,
                format!("{path}: the process has exited; a running VM has another pid"),
            );
        }
        // ENODEV: a file of a cgroup that was removed while it was open (kernfs).
        match error.kind() {
            _ if error.raw_os_error() == Some(libc::ENODEV) => Self::new(missing.0, format!("{path}: {}", missing.1)),
            io::ErrorKind::NotFound => Self::new(missing.0, format!("{path}: {}", missing.1)),
            io::ErrorKind::PermissionDenied => {
                Self::new(AbsentReason::NotPermitted, format!("{path}: {error}; {RIGHTS}"))
            }
            _ => Self::new(AbsentReason::Failed, format!("{path}: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_names_the_remedy() {
        let missing = (AbsentReason::NotSupported, "use a newer kernel");
        for (errno, reason, words) in [
            (libc::ESRCH, AbsentReason::NoProcess, "exited"),
            (libc::ENOENT, AbsentReason::NotSupported, "newer kernel"),
            (libc::ENODEV, AbsentReason::NotSupported, "newer kernel"),
            (libc::EACCES, AbsentReason::NotPermitted, "CAP_SYS_PTRACE"),
            (libc::EPERM, AbsentReason::NotPermitted, "CAP_SYS_PTRACE"),
            (libc::EIO, AbsentReason::Failed, "/proc/1/statm"),
        ] {
            let error = io::Error::from_raw_os_error(errno);
            let absent = Absent::unreadable(Path::new("/proc/1/statm"), &error, missing);
            assert_eq!(absent.reason, reason);
            assert!(absent.detail.contains(words), "{absent}");
        }
    }
}
