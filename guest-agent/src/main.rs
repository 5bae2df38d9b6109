//! `fpr-guest-agent`: the agent and its commands.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage, 69 no host agent, 71 the operating system refused, 77 no permission,
//! 78 wrong configuration (sysexits.h).

use anyhow::Context;
use clap::Parser;
use fpr_guest_agent::check;
use fpr_guest_agent::cli::{Cli, Command};
use fpr_guest_agent::config::{Config, ConfigError, Flags};
use fpr_guest_agent::kernel::Roots;
use fpr_guest_agent::run::facts::gather;
use fpr_guest_agent::run::{RunError, Until, run};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    match obey(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // stderr may be closed; the exit code still tells.
            let _ = writeln!(std::io::stderr(), "fpr-guest-agent: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

fn obey(cli: Cli) -> anyhow::Result<()> {
    let config = Config::load(&Flags::from(cli.flags))?;
    let roots = Roots::default();
    match cli.command {
        Command::Run => {
            run(&roots, &config, Until::Stopped)?;
        }
        Command::Once { timeout } => {
            let totals = run(&roots, &config, Until::FirstPass(Duration::from_secs(timeout)))?.totals;
            print(&format!(
                "{} huge pages dropped, {} refused; {} taken offline, {} claimed\n",
                totals.huge_pages_dropped,
                totals.huge_pages_refused,
                totals.huge_pages_offlined,
                totals.huge_pages_claimed
            ))?;
        }
        Command::Recover => {
            run(&roots, &config, Until::Recovered)?;
        }
        Command::Check { json } => {
            let report = check::report(&gather(&roots, &config).map_err(RunError::from)?, &config);
            let json_text = || serde_json::to_string_pretty(&report).context("cannot write JSON");
            print(&if json { json_text()? + "\n" } else { check::text(&report) })?;
        }
        Command::Validate => print(&format!("{config:#?}\n"))?,
    }
    Ok(())
}

/// Data goes to stdout; a reader that has enough is no error.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to stdout"),
    }
}

fn exit_code(error: &anyhow::Error) -> u8 {
    let denied = error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::PermissionDenied)
    });
    for cause in error.chain() {
        if cause.is::<ConfigError>() {
            return 78;
        }
        match cause.downcast_ref() {
            Some(RunError::NoHost(_)) => return 69,
            Some(_) if denied => return 77,
            Some(_) => return 71,
            None => {}
        }
    }
    1
}
