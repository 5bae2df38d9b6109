//! The command line.

use clap::{Args, Parser, Subcommand};
use fpr_guest_agent::config::{DEFAULT_PATH, DEFAULT_RUN_DIR, Flags};
use std::path::PathBuf;

/// Reports free huge pages to the host, so that it can drop their memory.
#[derive(Debug, Parser)]
#[command(name = "fpr-guest-agent", version, about)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) flags: ConfigFlags,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run in the foreground until SIGTERM
    Run,
    /// Make one pass over the free memory and say what came of it
    Once {
        /// Seconds to wait for the host agent
        #[arg(long, default_value_t = 30)]
        timeout: u64,
    },
    /// Give back what an agent that died had isolated, after the host can no longer drop it
    Recover,
    /// Print what this guest allows, what the agent would do, and why not
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Check the configuration and print it
    Validate,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigFlags {
    /// Configuration file
    #[arg(long, global = true, value_name = "FILE", help = format!("Configuration file [default: {DEFAULT_PATH}, if it is there]"))]
    config: Option<PathBuf>,
    /// Host agent
    #[arg(
        long,
        global = true,
        value_name = "ADDRESS",
        help = "Host agent: vsock:CID:PORT or unix:/path [default: vsock:2:6713458]"
    )]
    connect: Option<String>,
    /// Lock, journal and hugetlbfs mount
    #[arg(long, global = true, value_name = "DIR", help = format!("Lock, journal and hugetlbfs mount [default: {DEFAULT_RUN_DIR}]"))]
    run_dir: Option<PathBuf>,
    /// Do not take memory blocks offline
    #[arg(long, global = true)]
    no_offline: bool,
    /// Do not claim huge pages
    #[arg(long, global = true)]
    no_claims: bool,
    /// Do not make this check of how the kernel treats freed pages; may be repeated
    #[arg(long = "skip-check", global = true, value_name = "NAME")]
    skip_checks: Vec<String>,
}

impl From<ConfigFlags> for Flags {
    fn from(flags: ConfigFlags) -> Self {
        let avoid = [("offline", flags.no_offline), ("claims", flags.no_claims)];
        Self {
            config: flags.config,
            connect: flags.connect,
            run_dir: flags.run_dir,
            avoid: avoid.into_iter().filter(|(_, avoid)| *avoid).map(|(name, _)| name).collect(),
            skip_checks: flags.skip_checks,
        }
    }
}
