//! How connections become the session and how they end: `Hello`, the fence, `Welcome`, `Goodbye`.

use super::{Action, Active, MAX_WAITING, Note, Phase, Session, active};
use crate::device::{ConnectionId, DeviceKind};
use crate::session::gates::GateSource;
use fpr_protocol::message::{FreedPages, Hello, Limits, Welcome};
use fpr_protocol::{CloseReason, Gate, Message, VersionRange};
use std::time::Duration;

impl Session {
    pub(super) fn connected(&mut self, connection: ConnectionId, now: Duration) {
        if self.waiting.len() >= MAX_WAITING {
            return self.refuse(connection, CloseReason::Flood);
        }
        self.waiting.insert(connection, now);
    }

    /// A message on a connection that has no session: only `Hello` will do.
    pub(super) fn first_message(&mut self, connection: ConnectionId, message: Message, now: Duration) {
        let Message::Hello(hello) = message else {
            return self.refuse(connection, CloseReason::UnexpectedMessage);
        };
        if self.waiting.remove(&connection).is_none() {
            return self.refuse(connection, CloseReason::UnexpectedMessage);
        }
        if !matches!(self.phase, Phase::Idle) {
            return self.refuse(connection, CloseReason::SecondSession);
        }
        if hello.versions.newest_common(VersionRange::SUPPORTED).is_none() {
            return self.refuse(connection, CloseReason::UnsupportedVersion);
        }
        if !active::is_valid(&hello) {
            return self.refuse(connection, CloseReason::InvalidValue);
        }
        if self.jobs_of(DeviceKind::Vsock) == 0 {
            self.welcome(connection, hello, now);
        } else {
            self.counters.fences_waited += 1;
            self.cancel_jobs(DeviceKind::Vsock);
            self.phase = Phase::Fencing(connection, Box::new(hello));
        }
    }

    pub(super) fn welcome(&mut self, connection: ConnectionId, hello: Hello, now: Duration) {
        self.effect.reset();
        self.gates.replace(GateSource::Guest, guest_gates(&hello), now);
        let regions = self.layout.as_ref().map(|layout| layout.regions()).unwrap_or_default();
        let nonce = self.next_nonce;
        self.next_nonce = self.next_nonce.wrapping_add(1);
        let Some(version) = hello.versions.newest_common(VersionRange::SUPPORTED) else {
            return self.refuse(connection, CloseReason::UnsupportedVersion);
        };
        let mut active = match Active::new(connection, nonce, &hello, regions.len(), now) {
            Ok(active) => active,
            Err(reason) => return self.refuse(connection, reason),
        };
        active.told_gates = Some(self.gates.words());
        let welcome = Welcome {
            version,
            session_nonce: nonce,
            limits: Limits {
                max_report_ranges: u32::try_from(fpr_protocol::MAX_REPORT_RANGES).unwrap_or(u32::MAX),
                max_huge_pages_in_flight: self.config.max_huge_pages_in_flight,
                lease_ms: millis(self.config.lease),
                grace_ms: millis(self.config.grace),
            },
            gates: self.gates.words(),
            regions,
        };
        self.counters.sessions += 1;
        self.actions.push(Action::Send(connection, Message::Welcome(welcome)));
        self.actions.push(Action::Note(Note::SessionStarted {
            agent_version: hello.agent_version.clone(),
            kernel_release: hello.kernel_release.clone(),
        }));
        self.phase = Phase::Active(Box::new(active));
    }

    pub(super) fn disconnected(&mut self, connection: ConnectionId, reason: Option<CloseReason>) {
        self.waiting.remove(&connection);
        let ours = match &self.phase {
            Phase::Active(active) => active.connection == connection,
            Phase::Fencing(fencing, _) => *fencing == connection,
            Phase::Idle => false,
        };
        if ours {
            self.end_session(reason);
        }
    }

    /// Ends a connection for a reason that the guest gave; ends the session if it was its connection.
    pub(super) fn refuse(&mut self, connection: ConnectionId, reason: CloseReason) {
        self.counters.closed(reason);
        self.actions.push(Action::Send(connection, Message::Goodbye { reason }));
        self.actions.push(Action::Close(connection, reason));
        let ours = match &self.phase {
            Phase::Active(active) => active.connection == connection,
            Phase::Fencing(fencing, _) => *fencing == connection,
            Phase::Idle => false,
        };
        self.waiting.remove(&connection);
        if ours {
            self.end_session(Some(reason));
        }
    }

    /// Ends every connection, in order; the agent may come back at once, `Welcome` waits for the jobs.
    pub(super) fn close_all(&mut self, reason: CloseReason) {
        let of_session = match &self.phase {
            Phase::Active(active) => Some(active.connection),
            Phase::Fencing(connection, _) => Some(*connection),
            Phase::Idle => None,
        };
        let connections: Vec<ConnectionId> = self.waiting.keys().copied().chain(of_session).collect();
        for connection in connections {
            self.refuse(connection, reason);
        }
        self.end_session(Some(reason));
    }

    pub(super) fn end_session(&mut self, reason: Option<CloseReason>) {
        if !matches!(self.phase, Phase::Idle) {
            self.phase = Phase::Idle;
            self.actions.push(Action::Note(Note::SessionEnded(reason)));
        }
        self.effect.reset();
        self.gates.replace(GateSource::Guest, Vec::new(), Duration::ZERO);
        self.end_drains();
        self.cancel_jobs(DeviceKind::Vsock);
    }
}

fn guest_gates(hello: &Hello) -> Vec<(Gate, String)> {
    let mut gates = Vec::new();
    match hello.freed_pages {
        FreedPages::Zeroed => gates.push((
            Gate::WriteOnFree,
            "the guest's kernel zeroes pages when it frees them: boot it without init_on_free=1".to_owned(),
        )),
        FreedPages::Poisoned => gates.push((
            Gate::PagePoison,
            "the guest's kernel poisons freed pages: boot it without page_poison, KASAN or debug_pagealloc".to_owned(),
        )),
        FreedPages::Untouched | FreedPages::Unknown => {}
    }
    if hello.confidential {
        gates.push((
            Gate::ConfidentialGuest,
            "the guest's memory is encrypted (SEV or TDX): the host cannot drop it".to_owned(),
        ));
    }
    gates
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}
