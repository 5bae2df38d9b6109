//! What the daemon is told: a TOML file, then flags on top of it.
//!
//! ```toml
//! control = "/run/fpr/host.sock"
//! metrics = "unix:/run/fpr/metrics.sock"  # or IP:PORT; absent: no /metrics
//! directory = "/run/fpr/vm"               # every folder in it is a VM
//!
//! [vm.web1]
//! socket = "/run/fpr/web1.sock"           # vsock device, for the guest's agent
//! balloon = "/run/fpr/web1-balloon.sock"  # balloon device, for the guest's kernel
//! guest_cid = 3                           # default 3
//! inhibit = "being debugged"              # close the gate `operator` from the start
//! budget = "6G"                           # raise an alarm when the VM costs its host more
//! ```
//! A VM has one of the two devices or both. An unknown key is an error that names key, file and line. A missing file is fine unless it was asked for.

use crate::device::vsock::DEFAULT_GUEST_CID;
use crate::metrics::MetricsAddress;
use crate::vm::{Origin, VmConfig};
use fpr_protocol::ByteSize;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Read when no other file is named.
pub const DEFAULT_PATH: &str = "/etc/fpr/host.toml";

/// Where the control socket is unless configured.
pub const DEFAULT_CONTROL: &str = "/run/fpr/host.sock";

/// Longest path of a Unix socket: `sun_path` of unix(7), less its terminating zero.
const MAX_SOCKET_PATH: usize = 107;

/// Largest configuration: 1,000 VMs with every key take a quarter of it.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Longest VM name. It becomes part of thread names, log lines and metrics.
const MAX_VM_NAME: usize = 64;

/// Why a configuration is none.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// It is not what is written above.
    #[error("{}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Key, line and what would be right.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A value that cannot be used.
    #[error("{place}: {what}")]
    Value {
        /// Flag, or file and key.
        place: String,
        /// What is wrong and what would be right.
        what: String,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    control: Option<PathBuf>,
    metrics: Option<MetricsAddress>,
    directory: Option<PathBuf>,
    #[serde(default)]
    vm: BTreeMap<String, FileVm>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileVm {
    socket: Option<PathBuf>,
    balloon: Option<PathBuf>,
    #[serde(default = "default_cid")]
    guest_cid: u64,
    inhibit: Option<String>,
    budget: Option<ByteSize>,
}

fn default_cid() -> u64 {
    DEFAULT_GUEST_CID
}

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where `status` and the other commands reach the daemon.
    pub control: PathBuf,
    /// Where Prometheus scrapes; nowhere unless configured.
    pub metrics: Option<MetricsAddress>,
    /// Every folder in it is a VM.
    pub directory: Option<PathBuf>,
    /// The VMs, by name.
    pub vms: Vec<VmConfig>,
}

/// What the command line says.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--config`.
    pub config: Option<PathBuf>,
    /// `--control`.
    pub control: Option<PathBuf>,
    /// `--vm NAME=SOCKET`, as given.
    pub vms: Vec<String>,
    /// `--balloon NAME=SOCKET`, as given.
    pub balloons: Vec<String>,
}

impl Config {
    /// Reads the file and puts the flags on top.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn load(flags: &Flags) -> Result<Self, ConfigError> {
        let path = flags.config.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_PATH));
        let mut told = true;
        let file: File = match read(&path) {
            Ok(text) => toml::from_str(&text)
                .map_err(|source| ConfigError::Parse { path: path.clone(), source: Box::new(source) })?,
            Err(ConfigError::Read { source, .. })
                if flags.config.is_none() && source.kind() == std::io::ErrorKind::NotFound =>
            {
                told = !flags.vms.is_empty() || !flags.balloons.is_empty();
                File::default()
            }
            Err(error) => return Err(error),
        };
        let mut vms = Vec::new();
        for (name, vm) in file.vm {
            let place = format!("{}: vm.{name}", path.display());
            let mut config = new_vm(&name, &place)?;
            for socket in vm.socket.iter().chain(&vm.balloon) {
                check_socket(socket, &place)?;
            }
            (config.socket, config.balloon) = (vm.socket, vm.balloon);
            check_cid(vm.guest_cid, &place)?;
            config.guest_cid = vm.guest_cid;
            config.inhibit = vm.inhibit;
            if vm.budget == Some(ByteSize(0)) {
                let what = "budget 0 would always be crossed: leave it out for none".to_owned();
                return Err(ConfigError::Value { place, what });
            }
            config.budget_bytes = vm.budget.map(|budget| budget.0);
            vms.push(config);
        }
        for flag in &flags.vms {
            let (name, socket, place) = name_and_socket("--vm", flag)?;
            vms.push(VmConfig { socket: Some(socket), origin: Origin::Flag, ..new_vm(name, &place)? });
        }
        for flag in &flags.balloons {
            let (name, socket, place) = name_and_socket("--balloon", flag)?;
            // The second device of a VM that is there already, or a VM of its own.
            match vms.iter_mut().find(|vm| vm.name == name) {
                Some(vm) if vm.balloon.is_some() => {
                    let what = format!("VM {name} has a balloon socket already: give it one");
                    return Err(ConfigError::Value { place, what });
                }
                Some(vm) => vm.balloon = Some(socket),
                None => {
                    vms.push(VmConfig { balloon: Some(socket), origin: Origin::Flag, ..new_vm(name, &place)? });
                }
            }
        }
        if !told {
            let what = "no VM: write that file, empty if VMs will be added later, or say --vm NAME=SOCKET or \
                        --balloon NAME=SOCKET"
                .to_owned();
            return Err(ConfigError::Value { place: path.display().to_string(), what });
        }
        let control = flags.control.clone().or(file.control).unwrap_or_else(|| PathBuf::from(DEFAULT_CONTROL));
        let config = Self { control, metrics: file.metrics, directory: file.directory, vms };
        config.check(&path)?;
        Ok(config)
    }

    fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let error = |what| ConfigError::Value { place: path.display().to_string(), what };
        check_socket(&self.control, "control")?;
        if let Some(directory) = self.directory.as_deref() {
            check_directory(directory, &path.display().to_string())?;
        }
        let mut sockets: BTreeMap<&Path, &str> = BTreeMap::from([(self.control.as_path(), "control")]);
        if let Some(MetricsAddress::Unix(socket)) = &self.metrics {
            check_socket(socket, "metrics")?;
            if sockets.insert(socket, "metrics").is_some() {
                return Err(error(format!("{} is the socket of control and of metrics", socket.display())));
            }
        }
        let mut names: BTreeMap<&str, ()> = BTreeMap::new();
        for vm in &self.vms {
            if names.insert(&vm.name, ()).is_some() {
                return Err(error(format!("VM {} is there twice: give each VM its own name", vm.name)));
            }
            if vm.socket.is_none() && vm.balloon.is_none() {
                return Err(error(format!("VM {} has no device: give it `socket`, `balloon` or both", vm.name)));
            }
            for socket in vm.socket.iter().chain(&vm.balloon) {
                if let Some(other) = sockets.insert(socket, &vm.name) {
                    let socket = socket.display();
                    return Err(error(format!("{socket} is the socket of {other} and of {}", vm.name)));
                }
            }
        }
        Ok(())
    }
}

/// Reads a file of a sane kind and size: whatever else is at the path must neither block nor fill the memory.
fn read(path: &Path) -> Result<String, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let wrong = |what| ConfigError::Value { place: path.display().to_string(), what };
    // A FIFO without a writer would wait for one.
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(wrong("it is not a regular file: write the configuration to one and name that".to_owned()));
    }
    let mut text = String::new();
    let length_bytes = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if length_bytes as u64 > MAX_FILE_BYTES {
        let what = format!("it has more than {MAX_FILE_BYTES} bytes: is it the right file?");
        return Err(wrong(what));
    }
    Ok(text)
}

/// The VM of a command.
///
/// # Errors
/// Its name, a path or the CID cannot be used.
pub fn commanded(
    name: &str,
    (socket, balloon): (Option<PathBuf>, Option<PathBuf>),
    guest_cid: Option<u64>,
) -> Result<VmConfig, ConfigError> {
    let mut config = new_vm(name, "vm add")?;
    for socket in socket.iter().chain(&balloon) {
        check_socket(socket, "vm add")?;
    }
    config.origin = Origin::Command;
    (config.socket, config.balloon) = (socket, balloon);
    if let Some(cid) = guest_cid {
        check_cid(cid, "vm add")?;
        config.guest_cid = cid;
    }
    Ok(config)
}

/// The VM of a folder in the VM directory.
///
/// # Errors
/// The folder's name is no VM name, or too long for its sockets.
pub fn of_directory(directory: &Path, name: &str) -> Result<VmConfig, ConfigError> {
    let place = directory.join(name).display().to_string();
    let mut config = new_vm(name, &place)?;
    config.origin = Origin::Directory;
    let [socket, balloon] = [VSOCK_IN_DIRECTORY, BALLOON_IN_DIRECTORY].map(|file| directory.join(name).join(file));
    check_socket(&balloon, &place)?;
    (config.socket, config.balloon) = (Some(socket), Some(balloon));
    Ok(config)
}

/// Names of the sockets in a VM's folder.
pub const VSOCK_IN_DIRECTORY: &str = "vsock.sock";
/// The balloon device's.
pub const BALLOON_IN_DIRECTORY: &str = "balloon.sock";

fn check_cid(cid: u64, place: &str) -> Result<(), ConfigError> {
    if (3..u64::from(u32::MAX)).contains(&cid) {
        return Ok(());
    }
    let what = format!("guest_cid {cid} is reserved: use a number from 3 to 4294967294");
    Err(ConfigError::Value { place: place.to_owned(), what })
}

fn relative(what: &str, path: &Path) -> String {
    format!("{what} {} is relative: the VMM may run in another directory, use an absolute one", path.display())
}

fn check_directory(directory: &Path, place: &str) -> Result<(), ConfigError> {
    let what = if !directory.is_absolute() {
        relative("directory", directory)
    } else if directory.join("x").join(BALLOON_IN_DIRECTORY).as_os_str().len() > MAX_SOCKET_PATH {
        format!(
            "directory {} leaves no room for VM names: a socket path has at most {MAX_SOCKET_PATH} bytes, choose a shorter one",
            directory.display()
        )
    } else {
        return Ok(());
    };
    Err(ConfigError::Value { place: place.to_owned(), what })
}

/// A VM that has no device yet.
fn new_vm(name: &str, place: &str) -> Result<VmConfig, ConfigError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    // `.` and `..` would be other folders of the VM directory.
    let dots = name.chars().all(|c| c == '.');
    if dots || name.len() > MAX_VM_NAME || !name.chars().all(allowed) {
        let what = format!("{name:?} is no VM name: use 1 to {MAX_VM_NAME} letters, digits, '-', '_' and '.'");
        return Err(ConfigError::Value { place: place.to_owned(), what });
    }
    Ok(VmConfig::new(name))
}

/// The two halves of NAME=SOCKET, and how to call the flag in an error.
fn name_and_socket<'a>(flag: &str, value: &'a str) -> Result<(&'a str, PathBuf, String), ConfigError> {
    let place = format!("{flag} {value}");
    let Some((name, socket)) = value.split_once('=') else {
        let what = "expected NAME=SOCKET, for example web1=/run/fpr/web1.sock".to_owned();
        return Err(ConfigError::Value { place, what });
    };
    check_socket(Path::new(socket), &place)?;
    Ok((name, PathBuf::from(socket), place))
}

fn check_socket(socket: &Path, place: &str) -> Result<(), ConfigError> {
    let length = socket.as_os_str().len();
    let what = if length == 0 {
        "the socket path is empty".to_owned()
    } else if length > MAX_SOCKET_PATH {
        format!("the socket path has {length} bytes, the kernel takes {MAX_SOCKET_PATH}: use a shorter one")
    } else if !socket.is_absolute() {
        relative("socket path", socket)
    } else {
        return Ok(());
    };
    Err(ConfigError::Value { place: place.to_owned(), what })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn load(text: &str, vms: &[&str]) -> Result<Config, String> {
        load_both(text, vms, &[])
    }

    fn load_both(text: &str, vms: &[&str], balloons: &[&str]) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host.toml");
        std::fs::write(&path, text).unwrap();
        let [vms, balloons] = [vms, balloons].map(|flags| flags.iter().map(|flag| (*flag).to_owned()).collect());
        let flags = Flags { config: Some(path), control: None, vms, balloons };
        Config::load(&flags).map_err(|error| crate::error_chain(&error))
    }

    #[test]
    fn file_and_flags_add_up() {
        let text = "[vm.a]\nsocket = \"/run/a\"\nguest_cid = 7\ninhibit = \"test\"\nbudget = \"6G\"\n";
        let config = load(text, &["b=/run/b"]).unwrap();
        assert_eq!(config.control, Path::new(DEFAULT_CONTROL));
        let vms: Vec<_> = config.vms.iter().map(|vm| (vm.name.as_str(), vm.guest_cid, vm.inhibit.as_deref())).collect();
        assert_eq!(vms, [("a", 7, Some("test")), ("b", 3, None)]);
        assert_eq!(config.vms.iter().map(|vm| vm.budget_bytes).collect::<Vec<_>>(), [Some(6 << 30), None]);
    }

    #[test]
    fn a_vm_has_either_device_or_both() {
        let text = "[vm.a]\nballoon = \"/a/b\"\n[vm.b]\nsocket = \"/b\"\n";
        let config = load_both(text, &["c=/c"], &["b=/b/b", "d=/d/b"]).unwrap();
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let vms: Vec<_> = config.vms.iter().map(|vm| (vm.name.clone(), path(&vm.socket), path(&vm.balloon))).collect();
        let vm = |name: &str, socket: &str, balloon: &str| {
            let path = |path: &str| (!path.is_empty()).then(|| path.to_owned());
            (name.to_owned(), path(socket), path(balloon))
        };
        assert_eq!(vms, [vm("a", "", "/a/b"), vm("b", "/b", "/b/b"), vm("c", "/c", ""), vm("d", "", "/d/b")]);
        for (balloons, wanted) in [
            (&["a=/x"][..], "VM a has a balloon socket already"),
            (&["e=/b"], "/b is the socket of b and of e"),
            (&["e"], "NAME=SOCKET"),
            (&["e=x"], "relative"),
        ] {
            let error = load_both(text, &[], balloons).unwrap_err();
            assert!(error.contains(wanted), "{error:?} lacks {wanted:?}");
        }
    }

    #[test]
    fn errors_name_key_file_and_line() {
        for (text, vms, wanted) in [
            ("[vm.a]\nsocket = \"/run/a\"\nsokcet = 1\n", &[][..], &["host.toml", "line 3", "sokcet", "socket"][..]),
            ("[vm.a]\nsocket = 5\n", &[], &["host.toml", "line 2"]),
            ("[vm.a]\n", &[], &["host.toml", "VM a has no device", "`socket`, `balloon`"]),
            ("[vm.a]\nsocket = \"/a\"\nballoon = \"b\"\n", &[], &["vm.a", "relative"]),
            ("[vm.a]\nsocket = \"/a\"\nballoon = \"/a\"\n", &[], &["/a is the socket of a and of a"]),
            ("control = 1 2\n", &[], &["host.toml", "line 1"]),
            ("[vm.a]\nsocket = \"/a\"\nbudget = \"6X\"\n", &[], &["host.toml", "line 3", "budget", "like 64M"]),
            ("[vm.a]\nsocket = \"/a\"\nbudget = 6\n", &[], &["host.toml", "line 3", "budget"]),
            ("[vm.a]\nsocket = \"/a\"\nbudget = \"0\"\n", &[], &["vm.a", "budget 0", "leave it out"]),
            ("metrics = \"localhost:1\"\n", &[], &["host.toml", "line 1", "localhost:1", "127.0.0.1:"]),
            ("control = \"/m\"\nmetrics = \"unix:/m\"\n", &["a=/x"], &["/m is the socket of control and of metrics"]),
            ("metrics = \"unix:/m\"\n", &["a=/m"], &["/m is the socket of metrics and of a"]),
            ("[vm.a]\nsocket = \"/a\"\nguest_cid = 2\n", &[], &["vm.a", "guest_cid 2", "from 3"]),
            ("directory = \"vms\"\n", &[], &["host.toml", "directory vms", "relative"]),
            ("", &["..=/x"], &["no VM name"]),
            ("", &["a"], &["--vm a", "NAME=SOCKET"]),
            ("", &["a=/x", "a=/y"], &["VM a is there twice"]),
            ("", &["a=/x", "b=/x"], &["/x is the socket of a and of b"]),
            ("", &["a=x"], &["relative"]),
            ("", &["a b=/x"], &["no VM name"]),
        ] {
            let error = load(text, vms).unwrap_err();
            for word in wanted {
                assert!(error.contains(word), "{error:?} lacks {word:?}");
            }
        }
        let long = format!("a=/{}", "x".repeat(120));
        assert!(load("", &[&long]).unwrap_err().contains("121 bytes"));
    }

    #[test]
    fn a_file_without_a_vm_is_fine_and_nothing_at_all_is_not() {
        assert!(load("", &[]).unwrap().vms.is_empty());
        let config = load("directory = \"/run/fpr/vm\"\n", &[]).unwrap();
        let vm = of_directory(config.directory.as_deref().unwrap(), "web1").unwrap();
        assert_eq!(vm.balloon.unwrap(), Path::new("/run/fpr/vm/web1/balloon.sock"));
        if !Path::new(DEFAULT_PATH).exists() {
            let error = Config::load(&Flags::default()).unwrap_err().to_string();
            assert!(error.contains(DEFAULT_PATH) && error.contains("--vm NAME=SOCKET"), "{error}");
        }
    }

    #[test]
    fn only_a_regular_file_of_a_sane_size_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host.toml");
        let load = || {
            let flags = Flags { config: Some(path.clone()), ..Flags::default() };
            Config::load(&flags).unwrap_err().to_string()
        };
        // Would wait for a writer for ever.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(load().contains("host.toml: it is not a regular file"), "{}", load());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "#".repeat(1 << 20) + "\n").unwrap();
        assert!(load().contains("host.toml: it has more than 1048576 bytes"), "{}", load());
    }

    #[test]
    fn a_missing_file_is_an_error_only_if_asked_for() {
        let flags = Flags { config: Some(PathBuf::from("/nonexistent/x.toml")), ..Flags::default() };
        assert!(matches!(Config::load(&flags), Err(ConfigError::Read { .. })));
    }
}
