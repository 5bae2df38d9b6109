//! The project's own commands: `cargo xtask demo`, `test`, `bench`, `man`, `dist`.
//!
//! Run by people and by `.ci/run`. They do their own set-up: what is missing is built, fetched or, as root, installed.

mod bench;
mod demo;
mod dist;
mod man;
mod progress;
mod source_date;
mod test;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use fpr_tests::reporting::Reporting;

/// The project's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// About a minute: one guest with and one without reporting, side by side.
    Demo {
        /// Who reports in the guest that does.
        #[arg(long, default_value_t = Reporting::Agent)]
        reporting: Reporting,
    },
    /// All that CI runs: format, lints, tests, and tests with real guests.
    Test {
        /// Leaves out the tests that boot guests.
        #[arg(long)]
        quick: bool,
    },
    /// Measures and writes the result as JSON.
    #[command(subcommand)]
    Bench(Bench),
    /// Builds Debian packages of both agents.
    Dist {
        /// Where they go.
        #[arg(long, value_name = "DIR", default_value = "target/dist")]
        out: PathBuf,
    },
    /// Writes the man pages and shell completions of both agents.
    Man {
        /// Where they go.
        #[arg(long, value_name = "DIR", default_value = "target/man")]
        out: PathBuf,
    },
}

#[derive(Subcommand)]
enum Bench {
    /// How fast, how far and at what price the memory of an ended program comes back.
    Return {
        /// Where the result goes.
        #[arg(long)]
        json: PathBuf,
        /// Runs per configuration.
        #[arg(long, default_value_t = 3)]
        runs: usize,
        /// Which to compare, in the order in which they alternate.
        #[arg(long, value_delimiter = ',', default_values_t = Reporting::ALL)]
        configs: Vec<Reporting>,
    },
    /// What each way to read a VM's memory says and costs, on real guests, with KSM off and on. Wants root.
    Accounting {
        /// Where the result goes.
        #[arg(long)]
        json: PathBuf,
    },
    /// What one daemon with many VMs costs, how soon it answers them all, and what one VM does to the others. No guest; wants root.
    Scale {
        /// Where the result goes.
        #[arg(long)]
        json: PathBuf,
        /// How many VMs.
        #[arg(long, default_value_t = 200)]
        vms: usize,
        /// Runs per configuration.
        #[arg(long, default_value_t = 5)]
        runs: usize,
    },
    /// How long it takes to choose the VM to ask for memory on precise figures, among 40 and 10,000 processes and cgroups.
    Rank {
        /// Where the result goes.
        #[arg(long)]
        json: PathBuf,
        /// Runs per configuration.
        #[arg(long, default_value_t = 5)]
        runs: usize,
    },
    /// How fast memory is dropped, and what the reporting queue adds to the system calls. No guest; wants root.
    Discard {
        /// Where the result goes.
        #[arg(long)]
        json: PathBuf,
        /// Runs per configuration.
        #[arg(long, default_value_t = 15)]
        runs: usize,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Demo { reporting } => demo::run(reporting).map(|()| true),
        Command::Test { quick } => {
            test::run(if quick { test::Extent::WithoutGuests } else { test::Extent::Everything })
        }
        Command::Bench(Bench::Return { json, runs, configs }) => {
            bench::return_memory(&json, runs, configs).map(|()| true)
        }
        Command::Dist { out } => dist::run_all(&out).map(|()| true),
        Command::Man { out } => man::run(&out).map(|()| true),
        Command::Bench(Bench::Accounting { json }) => bench::accounting(&json).map(|()| true),
        Command::Bench(Bench::Scale { json, vms, runs }) => bench::scale(&json, vms, runs).map(|()| true),
        Command::Bench(Bench::Rank { json, runs }) => bench::rank(&json, runs).map(|()| true),
        Command::Bench(Bench::Discard { json, runs }) => bench::discard(&json, runs).map(|()| true),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
