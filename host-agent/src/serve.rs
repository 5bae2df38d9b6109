//! The daemon: VMs from the configuration, the control socket, signals.

use crate::accounting::Roots;
use crate::accounting::task::{self, Watched};
use crate::config::Config;
use crate::control;
use crate::device::{ListenError, bind_listener};
use crate::metrics;
use crate::vm::{self, VmHandle};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tracing::info;

/// How long a VM may take to finish a drop when the daemon stops. Then the process ends and its drops with it.
const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// Why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A VM's socket, threads or CID.
    #[error("VM {vm}")]
    Vm {
        /// Its name.
        vm: String,
        /// Why.
        #[source]
        source: vm::SpawnError,
    },
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

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// See [`ServeError`]; nothing is left behind.
pub async fn serve(config: Config) -> Result<(), ServeError> {
    let (listener, _socket_file) = bind_listener(&config.control)?;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let metrics = config.metrics.as_ref().map(metrics::Listener::bind).transpose()?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);

    let mut handles: Vec<VmHandle> = Vec::new();
    let mut tasks: Vec<JoinHandle<()>> = Vec::new();
    let mut failed = None;
    let memory_files = Arc::default();
    let budgets: HashMap<String, u64> =
        config.vms.iter().filter_map(|vm| Some((vm.name.clone(), vm.budget_bytes?))).collect();
    for mut vm in config.vms {
        vm.memory_files = Arc::clone(&memory_files);
        let name = vm.name.clone();
        let [socket, balloon] =
            [&vm.socket, &vm.balloon].map(|path| path.as_ref().map(|path| path.display().to_string()));
        match vm::spawn(vm) {
            Ok((handle, task)) => {
                info!(vm = name, socket, balloon, "waiting for a front end");
                handles.push(handle);
                tasks.push(task);
            }
            Err(source) => {
                failed = Some(ServeError::Vm { vm: name, source });
                break;
            }
        }
    }
    if failed.is_none() {
        let control = tokio::spawn(control::serve(listener, handles.clone().into()));
        let metrics = metrics.map(|listener| {
            let vms: Arc<[VmHandle]> = handles.clone().into();
            tokio::spawn(metrics::serve(listener, move || {
                let vms = Arc::clone(&vms);
                async move { control::status(&vms).await }
            }))
        });
        let watched = handles.clone();
        let accounting = tokio::spawn(task::run(Roots::default(), move || {
            let watched = watched.iter();
            watched.map(|vm| Watched { handle: vm.clone(), budget_bytes: budgets.get(&vm.name).copied() }).collect()
        }));
        info!(control = %config.control.display(), vms = handles.len(), "serving");
        tokio::select! {
            _ = terminate.recv() => info!("SIGTERM: stopping"),
            _ = interrupt.recv() => info!("SIGINT: stopping"),
        }
        accounting.abort();
        control.abort();
        if let Some(metrics) = metrics {
            metrics.abort();
        }
    }
    stop(&handles.into(), tasks).await;
    failed.map_or(Ok(()), Err)
}

/// Stops all devices at once: running drops are finished or cancelled, descriptors are back with their guests.
async fn stop(handles: &Arc<[VmHandle]>, tasks: Vec<JoinHandle<()>>) {
    for handle in handles.iter() {
        handle.shut_down().await;
    }
    let all = async {
        for task in tasks {
            // A task that panicked has ended, too.
            let _ = task.await;
        }
    };
    if tokio::time::timeout(STOP_DEADLINE, all).await.is_err() {
        tracing::warn!("a VM did not stop within {} s", STOP_DEADLINE.as_secs());
    }
}
