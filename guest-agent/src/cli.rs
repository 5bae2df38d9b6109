//! The command line, as the program parses it and as man pages and completions are generated from it.

use crate::config::{DEFAULT_PATH, DEFAULT_RUN_DIR, Flags};
use clap::{Args, CommandFactory, Parser, Subcommand};
use std::path::PathBuf;

/// Reports free huge pages to the host, so that it can drop their memory.
#[derive(Debug, Parser)]
#[command(name = "fpr-guest-agent", version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// On top of the configuration file.
    #[command(flatten)]
    pub flags: ConfigFlags,
}

/// The whole command line, for generators of man pages and completions.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
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

/// What every subcommand takes.
#[derive(Debug, Args)]
pub struct ConfigFlags {
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
