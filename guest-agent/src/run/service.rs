//! What the service manager is told (sd_notify(3)) while `run` runs, and its watchdog.
//!
//! Used by the main loop only, which owns the agent's state: a loop that hangs feeds no watchdog. `once` and `recover` tell
//! nothing, as they are no services. What cannot be told is no reason to stop.

use super::Until;
use sd_notify::NotifyState;
use std::time::Duration;

/// The watchdog is fed so often in its time.
const FEEDS: u32 = 3;

#[derive(Debug)]
pub(super) struct Service {
    active: bool,
    /// Between two feeds, if there is a watchdog.
    period: Option<Duration>,
    next: Duration,
}

impl Service {
    pub(super) fn new(until: Until) -> Self {
        let active = until == Until::Stopped;
        let watchdog = active.then(sd_notify::watchdog_enabled).flatten();
        let period = watchdog.map(|time| (time / FEEDS).max(Duration::from_millis(1)));
        Self { active, period, next: Duration::ZERO }
    }

    fn tell(&self, states: &[NotifyState<'_>]) {
        if self.active {
            let _ = sd_notify::notify(states);
        }
    }

    pub(super) fn ready(&self) {
        self.tell(&[NotifyState::Ready, NotifyState::Status("no session with the host agent yet")]);
    }

    /// One line for `systemctl status`; no text of the host's is in it.
    pub(super) fn status(&self, line: &str) {
        self.tell(&[NotifyState::Status(line)]);
    }

    pub(super) fn stopping(&self) {
        self.tell(&[NotifyState::Stopping]);
    }

    /// Feeds the watchdog when it is time to.
    pub(super) fn turn(&mut self, at: Duration) {
        if let Some(period) = self.period
            && at >= self.next
        {
            self.next = at + period;
            self.tell(&[NotifyState::Watchdog]);
        }
    }

    /// When the loop has to come round.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.period.map(|_| self.next)
    }
}
