//! The command line, as the program parses it and as man pages and completions are generated from it.

use crate::accounting::Method;
use crate::config::{DEFAULT_CONTROL, DEFAULT_PATH, Flags};
use crate::control::MAX_DRAIN_WAIT;
use crate::top::{self, Top};
use clap::builder::PossibleValuesParser;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use fpr_protocol::ByteSize;
use std::path::PathBuf;
use std::time::Duration;

/// Drops the backing of free guest memory, or says by name why not.
#[derive(Debug, Parser)]
#[command(name = "fpr-host-agent", version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The whole command line, for generators of man pages and completions.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon in the foreground
    Serve {
        /// File and flags.
        #[command(flatten)]
        flags: ConfigFlags,
        /// How log lines on stderr look
        #[arg(long, value_enum, default_value_t = LogFormat::Text)]
        log_format: LogFormat,
        /// Least important level to log: error, warn, info, debug or trace
        #[arg(long, default_value = "info")]
        log_level: String,
    },
    /// Check the configuration and say what it means
    Validate {
        /// File and flags.
        #[command(flatten)]
        flags: ConfigFlags,
    },
    /// Show what each VM holds, what came back, and why memory is not coming back where it is not
    Status {
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show all VMs live: what they cost, what is dropped and what comes back, and why not
    Top {
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
        /// Between two looks, with ms, s or m
        #[arg(long, value_name = "TIME", default_value = "2s", value_parser = top::interval)]
        interval: Duration,
        /// Column to sort by; without it, the order of the configuration
        #[arg(long, value_name = "COLUMN", ignore_case = true, value_parser = PossibleValuesParser::new(Top::sortable()))]
        sort: Option<String>,
    },
    /// Say what this host can do and what a VM's process would allow; exit code 1 if something does not work
    Doctor {
        /// The VMM's process to look at, too
        #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
        pid: Option<i32>,
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Read what VMs cost the host, in each way there is, with error bound and price
    Memory(MemoryArgs),
    /// Say which VM to ask for memory: what each holds that its guest does not use, and why not where nothing can be had
    Rank {
        /// Only the first so many; fewer have to be read precisely then
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
        top: Option<u16>,
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Drop nothing of a VM until `resume`
    Inhibit {
        /// Name of the VM
        vm: String,
        /// Why, for `status`
        #[arg(long, default_value = "inhibited by an operator")]
        reason: String,
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
    },
    /// Ask a VM's agent for memory now, whatever its age, and say what came back
    Drain {
        /// Name of the VM
        vm: String,
        /// Wait so long for the agent's pass to end
        #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=MAX_DRAIN_WAIT))]
        wait: u64,
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
    },
    /// Add, remove and list VMs while the daemon runs
    Vm {
        /// What to do.
        #[command(subcommand)]
        command: VmCommand,
    },
    /// Read the configuration again, as SIGHUP does, and say what has changed
    Reload {
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
    },
    /// Take back `inhibit`
    Resume {
        /// Name of the VM
        vm: String,
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
    },
}

/// What `memory` takes.
#[derive(Debug, Args)]
pub struct MemoryArgs {
    /// Name of the VM; all of the daemon's VMs if neither it nor --pid nor --cgroup is given
    #[arg(conflicts_with_all = ["pid", "cgroup"])]
    pub vm: Option<String>,
    /// A VMM's process, whether the daemon knows it or not
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// A VM's memory cgroup, instead of the one its process is in: path below the hierarchy's root, or its directory
    #[arg(long, value_name = "PATH")]
    pub cgroup: Option<PathBuf>,
    /// Read in this way only; may be repeated
    #[arg(long = "method", value_name = "METHOD", value_enum)]
    pub methods: Vec<Method>,
    /// The daemon's control socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
    pub control: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The subcommands of `vm`.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Serve one more VM until it is removed or the daemon ends
    Add {
        /// Its name
        name: String,
        /// The socket of its vsock device; with neither socket, both devices are in its folder of the VM directory
        #[arg(long, value_name = "PATH")]
        socket: Option<PathBuf>,
        /// The socket of its balloon device
        #[arg(long, value_name = "PATH")]
        balloon: Option<PathBuf>,
        /// The guest's vsock CID [default: 3]
        #[arg(long, value_name = "CID")]
        guest_cid: Option<u64>,
        /// Raise an alarm when it costs its host more, like 6G
        #[arg(long, value_name = "SIZE")]
        budget: Option<ByteSize>,
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
    },
    /// Serve a VM no more; refused while a front end is connected
    Remove {
        /// Its name
        name: String,
        /// Cut off its front end
        #[arg(long)]
        force: bool,
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
    },
    /// Which VMs there are, who wants each of them, and what it is doing
    List {
        /// The daemon's control socket
        #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// What `serve` and `validate` take.
#[derive(Debug, Args)]
pub struct ConfigFlags {
    /// Configuration file [default: /etc/fpr/host.toml, if it is there]
    #[arg(long, value_name = "FILE", help = format!("Configuration file [default: {DEFAULT_PATH}, if it is there]"))]
    config: Option<PathBuf>,
    /// Control socket
    #[arg(long, value_name = "PATH", help = format!("Control socket [default: {DEFAULT_CONTROL}]"))]
    control: Option<PathBuf>,
    /// A VM and the socket of its vsock device; may be repeated
    #[arg(long = "vm", value_name = "NAME=SOCKET")]
    vms: Vec<String>,
    /// A VM and the socket of its balloon device; may be repeated
    #[arg(long = "balloon", value_name = "NAME=SOCKET")]
    balloons: Vec<String>,
}

impl From<ConfigFlags> for Flags {
    fn from(flags: ConfigFlags) -> Self {
        Self { config: flags.config, control: flags.control, vms: flags.vms, balloons: flags.balloons }
    }
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogFormat {
    /// One readable line
    Text,
    /// One JSON object
    Json,
}
