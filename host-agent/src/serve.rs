//! The daemon: VMs from the configuration, the control socket, signals, the service manager.

use crate::accounting::Roots;
use crate::accounting::task::{self, Watched};
use crate::config::{Config, Flags};
use crate::control::{self, Reload};
use crate::device::{ListenError, bind_service};
use crate::fleet::{self, Fleet, FleetError};
use crate::metrics;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tracing::{info, warn};

/// Why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A VM's socket, threads or CID, or the VM directory.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// The control socket.
    #[error("control socket")]
    Control(#[from] ListenError),
    /// Where Prometheus scrapes.
    #[error(transparent)]
    Metrics(#[from] metrics::BindError),
    /// Signals or the runtime.
    #[error("cannot set up the daemon")]
    Os(#[from] std::io::Error),
}

/// Runs until SIGTERM or SIGINT. `flags` are what the configuration was read with; SIGHUP reads it so again.
///
/// # Errors
/// See [`ServeError`]; nothing is left behind.
pub async fn serve(config: Config, flags: Flags) -> Result<(), ServeError> {
    raise_descriptor_limit();
    let (listener, _socket_file) = bind_service(&config.control)?;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let metrics = config.metrics.as_ref().map(metrics::Listener::bind).transpose()?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut hangup = signal(SignalKind::hangup())?;

    let fleet = Fleet::start(&config).await?;
    let reload = Reload::new(flags);
    let control = tokio::spawn(control::serve(listener, fleet.clone(), reload.clone()));
    let scraped = fleet.clone();
    let metrics = metrics.map(|listener| {
        tokio::spawn(metrics::serve(listener, move || {
            let fleet = scraped.clone();
            async move { control::status(&fleet).await }
        }))
    });
    let watched = fleet.clone();
    let accounting = tokio::spawn(task::run(Roots::default(), move || {
        let view = watched.view();
        let watched = view.members.iter().filter_map(|member| {
            let budget_bytes = member.config.as_ref().and_then(|config| config.budget_bytes);
            Some(Watched { handle: member.handle.clone()?, budget_bytes })
        });
        watched.collect()
    }));
    info!(control = %config.control.display(), vms = fleet.view().members.len(), "serving");
    fleet::notify(&[NotifyState::Ready]);
    // Not awaited in the branch of its signal: a file system that hangs must not hold up SIGTERM.
    let mut reloads = JoinSet::new();
    loop {
        tokio::select! {
            _ = hangup.recv(), if reloads.is_empty() => {
                info!("SIGHUP: reading the configuration again");
                let (fleet, reload) = (fleet.clone(), reload.clone());
                reloads.spawn(async move {
                    // What came of it is in the log and in `status`.
                    let _ = reload.run(&fleet).await;
                });
            }
            Some(_) = reloads.join_next() => {}
            _ = terminate.recv() => {
                info!("SIGTERM: stopping");
                break;
            }
            _ = interrupt.recv() => {
                info!("SIGINT: stopping");
                break;
            }
        }
    }
    fleet::notify(&[NotifyState::Stopping]);
    accounting.abort();
    control.abort();
    if let Some(metrics) = metrics {
        metrics.abort();
    }
    fleet.shut_down().await;
    Ok(())
}

/// A VM with both devices and its memory takes about 40 descriptors, and the usual soft limit of 1,024 is there for
/// programs that use select(2), which this one does not.
fn raise_descriptor_limit() {
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(errno) = raised {
        warn!(error = %std::io::Error::from(errno), "cannot raise the limit of open files");
    }
}
