//! What the service manager is told (sd_notify(3)), and when its watchdog is fed.
//!
//! Fed by the fleet's task, and only after every VM's task has answered: a task that hangs ends in a restart by the
//! service manager, because it holds a guest's report and nobody else can answer it. The VMs' tasks block on nothing, so a
//! slow disk or a slow VMM does not stop the feeding; the workers may take as long as they need.

use sd_notify::NotifyState;
use std::time::Duration;

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

/// The line that `systemctl status` shows. A newline would begin another message.
pub(super) fn status_line(running: usize, failed: usize, config_error: Option<&str>) -> String {
    let mut line = format!("serving {running} VM{}", if running == 1 { "" } else { "s" });
    if failed > 0 {
        line.push_str(&format!(", {failed} failed"));
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
    fn the_status_is_one_line() {
        assert_eq!(status_line(1, 0, None), "serving 1 VM");
        let line = status_line(2, 1, Some("host.toml: line 3\nREADY=1"));
        assert_eq!(line, "serving 2 VMs, 1 failed; old configuration in force: host.toml: line 3 READY=1");
    }
}
