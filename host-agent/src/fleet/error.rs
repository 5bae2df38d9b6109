//! Why the set of VMs cannot be changed; each message names the operand and what to do.

use super::{MAX_VMS, directory};
use crate::config::ConfigError;
use crate::vm::{Origin, SpawnError};

/// Why a VM could not be added or removed.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// There is one.
    #[error("VM {name} is there already ({origin}): choose another name, or remove it first with `fpr-host-agent vm remove {name}`", origin = origin.word())]
    Duplicate {
        /// The name.
        name: String,
        /// Who wants the other.
        origin: Origin,
    },
    /// Its devices are still being stopped.
    #[error("VM {name} is being stopped: try again in a moment")]
    Stopping {
        /// The name.
        name: String,
    },
    /// A path belongs to another VM.
    #[error("{path} is the socket of VM {other}: give each device a path of its own")]
    SocketTaken {
        /// The path.
        path: String,
        /// Whose it is.
        other: String,
    },
    /// No socket and no directory.
    #[error(
        "VM {name} has no device: say --socket PATH, --balloon PATH or both, or set `directory` in the configuration"
    )]
    NoDevice {
        /// The name.
        name: String,
    },
    /// [`MAX_VMS`].
    #[error("there are {MAX_VMS} VMs, and more are not served: remove some")]
    TooMany,
    /// No such VM.
    #[error("no VM {name}; there are: {known}")]
    Unknown {
        /// The name.
        name: String,
        /// Those that are there.
        known: String,
    },
    /// Somebody uses it.
    #[error("VM {name} has a front end ({front_end}): stop its VMM first, or say --force to cut it off")]
    InUse {
        /// The name.
        name: String,
        /// Its process.
        front_end: String,
    },
    /// Its task does not answer, or its devices did not stop in time.
    #[error("VM {name} does not answer: look at its state in `vm list` and at the daemon's log, then try again")]
    Silent {
        /// The name.
        name: String,
    },
    /// Socket, threads.
    #[error("VM {name}")]
    Spawn {
        /// The name.
        name: String,
        /// Why.
        #[source]
        source: SpawnError,
    },
    /// Its folder.
    #[error(transparent)]
    Folder(#[from] directory::DirectoryError),
    /// A name or a path.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The daemon ends.
    #[error("the daemon is being stopped")]
    Ending,
}

/// Why a reload changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The file.
    #[error("the old configuration stays in force")]
    Config(#[from] ConfigError),
    /// The daemon ends.
    #[error("the daemon is being stopped")]
    Ending,
}
