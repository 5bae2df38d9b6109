//! What the service manager is told (sd_notify(3)), and when its watchdog is fed.
//!
//! Fed by the fleet's task after each round in which it has asked every VM's task, unless all of those that it asked were
//! silent: then it is the runtime that is stuck, or the daemon's only VM, and a restart costs nobody else anything. So the
//! watchdog is starved when this task stalls, and when no VM answers.
//!
//! One silent VM among others is not enough. A restart cuts every VM off from its daemon, and one VM, whose guest is
//! hostile, must not be able to do that to the others: the log says which it is, at a limited rate, `status` shows it as
//! `unresponsive`, the service manager's status counts it, and an operator decides when the daemon is started anew.
//!
//! The VMs' tasks block on nothing, so a slow disk or a slow VMM makes none of them silent; the workers may take as long
//! as they need.

use super::Order;
use super::task::Task;
use crate::vm::{ANSWER_LIMIT, Request, Unanswered, ask_all};
use sd_notify::NotifyState;
use std::time::{Duration, Instant};
use tracing::error;

/// Rounds per watchdog time: two may fail before the third is too late.
const ROUNDS: u32 = 3;

/// Tells the service manager, if there is one. What it cannot be told is no reason to stop serving.
pub fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "cannot tell the service manager");
    }
}

/// Between two rounds; `None` without a watchdog.
pub(super) fn period() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|time| (time / ROUNDS).max(Duration::from_millis(1)))
}

/// Half of the time between two rounds: generous beside microseconds, and over before the next.
fn round_limit() -> Duration {
    period().map_or(ANSWER_LIMIT, |period| period / 2)
}

/// Whether a round feeds the watchdog; see the module. VMs that have ended count as neither.
fn feeds(answered: usize, silent: usize) -> bool {
    answered > 0 || silent == 0
}

impl Task {
    pub(super) fn begin_round(&self) {
        let vms: Vec<_> = self.entries.iter().map(|entry| (entry.config.name.clone(), entry.handle.clone())).collect();
        let orders = self.orders.clone();
        tokio::spawn(async move {
            let answers = ask_all(vms, round_limit(), Request::Ping).await;
            let answered = answers.iter().filter(|(_, answer)| answer.is_ok()).count();
            let silent = answers.into_iter().filter(|(_, answer)| *answer == Err(Unanswered::Silent));
            let silent = silent.map(|(vm, _)| vm).collect();
            let _ = orders.send(Order::Round { answered, silent }).await;
        });
    }

    pub(super) fn end_round(&mut self, answered: usize, silent: &[String]) {
        self.silent = silent.len();
        let fed = feeds(answered, silent.len());
        if fed {
            notify(&[NotifyState::Watchdog]);
        }
        if !silent.is_empty()
            && let Some(suppressed) = self.silent_log.admit(Instant::now())
        {
            let vms = silent.join(", ");
            error!(vms, watchdog_fed = fed, suppressed, "a VM's task does not answer; please report this");
        }
    }
}

/// The line that `systemctl status` shows. A newline would begin another message.
pub(super) fn status_line(running: usize, failed: usize, silent: usize, config_error: Option<&str>) -> String {
    let mut line = format!("serving {running} VM{}", if running == 1 { "" } else { "s" });
    if failed > 0 {
        line.push_str(&format!(", {failed} failed"));
    }
    if silent > 0 {
        line.push_str(&format!(", {silent} unresponsive"));
    }
    if let Some(error) = config_error {
        line.push_str("; old configuration in force: ");
        line.push_str(error);
    }
    line.replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_silent_vm_does_not_end_the_daemon_for_the_others_and_a_stuck_runtime_does() {
        assert!(feeds(0, 0) && feeds(2, 0) && feeds(1, 99));
        assert!(!feeds(0, 1) && !feeds(0, 100));
    }

    #[test]
    fn the_status_is_one_line() {
        assert_eq!(status_line(1, 0, 0, None), "serving 1 VM");
        let line = status_line(2, 1, 1, Some("host.toml: line 3\nREADY=1"));
        assert_eq!(
            line,
            "serving 2 VMs, 1 failed, 1 unresponsive; old configuration in force: host.toml: line 3 READY=1"
        );
    }
}
