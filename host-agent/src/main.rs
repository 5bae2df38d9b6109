//! `fpr-host-agent`: the daemon and its control commands.
//!
//! Exit codes: 0 done, 1 failed or `doctor` says `no` to something, 2 wrong usage, 69 the daemon is not reachable, 71
//! the operating system refused, 77 no permission, 78 wrong configuration (sysexits.h).

mod command;
mod render;

use anyhow::Context;
use clap::Parser;
use fpr_host_agent::cli::{Cli, Command, LogFormat};
use fpr_host_agent::config::{Config, ConfigError, Flags};
use fpr_host_agent::control::{self, ClientError};
use fpr_host_agent::doctor::{self, Colour, Style, Surroundings, Verdict};
use fpr_host_agent::fields::table;
use fpr_host_agent::serve::{ServeError, serve};
use fpr_host_agent::top::{self, TopError};
use nix::unistd::Pid;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            // stderr may be closed; the exit code still tells.
            let _ = writeln!(std::io::stderr(), "fpr-host-agent: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let done: anyhow::Result<()> = match cli.command {
        Command::Doctor { pid, control, json } => return examine(pid, &control, json),
        Command::Memory(arguments) => return command::memory::run(&arguments),
        Command::Serve { flags, log_format, log_level } => {
            start_log(log_format, &log_level)?;
            let flags = Flags::from(flags);
            let config = Config::load(&flags)?;
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .context("cannot start the runtime")?;
            let served = runtime.block_on(serve(config, flags));
            // A precise read of a large process may still go on; nobody wants it any more.
            runtime.shutdown_timeout(Duration::from_secs(1));
            Ok(served?)
        }
        Command::Validate { flags } => {
            let config = Config::load(&Flags::from(flags))?;
            print(&format!("{} VMs, control socket {}\n", config.vms.len(), config.control.display()))
        }
        Command::Status { control, json } => {
            let status = control::ask(&control, &control::Command::Status)?;
            print(&if json { format!("{status:#}\n") } else { table::status(&status) })
        }
        Command::Top { control, interval, sort } => {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot start the runtime")?;
            Ok(runtime.block_on(top::run(top::Options { control, interval, sort }))?)
        }
        Command::Rank { top, control, json } => command::rank::run(top, &control, json),
        Command::Inhibit { vm, reason, control } => {
            control::ask(&control, &control::Command::Inhibit { vm, reason })?;
            Ok(())
        }
        Command::Drain { vm, wait, control } => {
            let drained = control::ask(&control, &control::Command::Drain { vm: vm.clone(), wait_s: wait })?;
            print(&render::drained(&vm, &drained))
        }
        Command::Vm { command } => command::vm::run(command),
        Command::Reload { control } => command::vm::reload(&control),
        Command::Resume { vm, control } => {
            control::ask(&control, &control::Command::Resume { vm })?;
            Ok(())
        }
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn examine(pid: Option<i32>, control: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let report = doctor::examine(&Surroundings::real(control), pid.map(Pid::from_raw));
    let text = if json {
        format!("{}\n", serde_json::to_string_pretty(&report).context("cannot write JSON")?)
    } else {
        doctor::text(&report, terminal_style())
    };
    print(&text)?;
    Ok(if report.verdict == Verdict::No { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

/// Plain and unwrapped unless stdout is a terminal; <https://no-color.org>.
fn terminal_style() -> Style {
    let stdout = std::io::stdout();
    let width = terminal_size::terminal_size_of(&stdout).map(|(width, _)| usize::from(width.0));
    let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let colour = if stdout.is_terminal() && wanted && !dumb { Colour::Ansi } else { Colour::Plain };
    Style { colour, width }
}

/// Data goes to stdout; a reader that has enough is no error.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to stdout"),
    }
}

fn start_log(format: LogFormat, level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level)
        .map_err(ConfigFlag)
        .with_context(|| format!("--log-level {level}: use error, warn, info, debug or trace"))?;
    // Our own crates' lines are written so that a guest cannot flood; the vhost crates' are not.
    let filter = ["vhost=off", "vhost_user_backend=off", "virtio_queue=off"]
        .into_iter()
        .filter_map(|directive| directive.parse().ok())
        .fold(filter, EnvFilter::add_directive);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// Marks a flag with a wrong value for [`exit_code`].
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct ConfigFlag(tracing_subscriber::filter::ParseError);

fn exit_code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<ConfigFlag>() {
            return 2;
        }
        match cause.downcast_ref() {
            Some(TopError::NoTerminal) => return 2,
            Some(TopError::Terminal(_) | TopError::Os(_)) => return 71,
            Some(TopError::Daemon(_)) | None => {}
        }
        if cause.is::<ConfigError>() {
            return 78;
        }
        if matches!(
            cause.downcast_ref(),
            Some(ClientError::Unreachable { .. } | ClientError::NoConnection { .. } | ClientError::NoAnswer { .. })
        ) {
            return permission(error).unwrap_or(69);
        }
        if cause.is::<ServeError>() {
            return permission(error).unwrap_or(71);
        }
    }
    1
}

fn permission(error: &anyhow::Error) -> Option<u8> {
    let denied = error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::PermissionDenied)
    });
    denied.then_some(77)
}
