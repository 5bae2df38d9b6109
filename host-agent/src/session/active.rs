//! A session that is past `Hello`: its clock, its pings, its proofs.

use super::clock::{GuestClock, on_grid};
use super::rate::RateLimit;
use super::{AgentStatus, Config};
use crate::device::ConnectionId;
use fpr_protocol::message::{Hello, Stats};
use fpr_protocol::{CloseReason, Gate, HugePageSize, MAX_STRING};
use std::time::Duration;

/// State of the one live session.
pub(super) struct Active {
    pub(super) connection: ConnectionId,
    pub(super) nonce: u64,
    pub(super) size: HugePageSize,
    /// Highest sequence seen; the next one must be above it.
    pub(super) last_sequence: u64,
    /// For each region whether a cookie in it was found where it should be.
    pub(super) proven: Vec<bool>,
    pub(super) clock: GuestClock,
    pub(super) huge_pages_in_flight: u64,
    pub(super) rate: RateLimit,
    pub(super) stats: Option<Stats>,
    pub(super) told_gates: Option<Vec<Gate>>,
    pub(super) told_kernel_reporting: bool,
    agent_version: String,
    kernel_release: String,
    /// The `Ping` on its way, and when it left.
    ping: Option<(u64, Duration)>,
    pings: u64,
    next_ping: Duration,
}

impl Active {
    pub(super) fn new(
        connection: ConnectionId,
        nonce: u64,
        hello: &Hello,
        regions: usize,
        now: Duration,
    ) -> Result<Self, CloseReason> {
        Ok(Self {
            connection,
            nonce,
            size: HugePageSize::new(hello.page_size, hello.huge_page_order).map_err(|_| CloseReason::InvalidValue)?,
            last_sequence: 0,
            proven: vec![false; regions],
            clock: GuestClock::default(),
            huge_pages_in_flight: 0,
            rate: RateLimit::new(now),
            stats: None,
            told_gates: None,
            told_kernel_reporting: false,
            agent_version: printable(&hello.agent_version),
            kernel_release: printable(&hello.kernel_release),
            ping: None,
            pings: 0,
            // At once: without a sample of the guest's clock no report can be judged.
            next_ping: now,
        })
    }

    pub(super) fn status(&self) -> AgentStatus {
        AgentStatus::Active {
            agent_version: self.agent_version.clone(),
            kernel_release: self.kernel_release.clone(),
            stats: self.stats,
            regions_proven: (self.proven.iter().filter(|proven| **proven).count(), self.proven.len()),
        }
    }

    /// Sequences only count up, so that a repeated or reordered message is seen.
    pub(super) fn take_sequence(&mut self, sequence: u64) -> Result<(), CloseReason> {
        if sequence <= self.last_sequence {
            return Err(CloseReason::InvalidValue);
        }
        self.last_sequence = sequence;
        Ok(())
    }

    pub(super) fn pong(&mut self, id: u64, guest_ns: u64, now: Duration) -> Result<(), CloseReason> {
        match self.ping.take() {
            Some((expected, sent)) if expected == id => {
                self.clock.sample(sent, now, guest_ns);
                Ok(())
            }
            _ => Err(CloseReason::UnexpectedMessage),
        }
    }

    pub(super) fn ping_if_due(&mut self, config: &Config, now: Duration) -> Option<u64> {
        if self.ping.is_some() || now < self.next_ping {
            return None;
        }
        self.pings += 1;
        self.ping = Some((self.pings, now));
        // The guests of a host are asked together, those of a tenth of the time at once.
        self.next_ping = on_grid(now + config.ping_interval, config.ping_interval / 10);
        Some(self.pings)
    }

    /// The next report's clock sample should be fresh: ask again soon.
    pub(super) fn hurry_ping(&mut self, now: Duration) {
        self.next_ping = now;
    }

    pub(super) fn pong_is_late(&self, config: &Config, now: Duration) -> bool {
        self.ping.is_some_and(|(_, sent)| now.saturating_sub(sent) >= config.pong_timeout)
    }

    pub(super) fn next_deadline(&self, config: &Config) -> Duration {
        match self.ping {
            Some((_, sent)) => sent + config.pong_timeout,
            None => self.next_ping,
        }
    }
}

/// Bounds on `Hello` beyond what the codec checks.
pub(super) fn is_valid(hello: &Hello) -> bool {
    hello.agent_version.len() <= MAX_STRING
        && hello.kernel_release.len() <= MAX_STRING
        && HugePageSize::new(hello.page_size, hello.huge_page_order).is_ok()
}

/// The guest's text goes to logs and terminals: no control characters.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
