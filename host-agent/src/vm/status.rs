//! A VM's figures as `status` prints them. Host-measured and guest-claimed figures keep apart.

use super::VmConfig;
use super::front_end::FrontEnd as DeviceFrontEnd;
use crate::accounting::books::Accounting;
use crate::device::{DeviceKind, Fault, balloon, vsock};
use crate::reporting::QueueCounters;
use crate::session::counters::Counters;
use crate::session::gates::ClosedGate;
use crate::session::{AgentStatus, Session};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// One VM.
#[derive(Clone, Debug, Serialize)]
pub struct VmStatus {
    /// Its name.
    pub name: String,
    /// The process of the vsock device's front end, of the balloon's where there is no other.
    pub front_end: Option<FrontEnd>,
    /// The guest's agent.
    pub agent: AgentStatus,
    /// Closed gates; empty when memory is given back.
    pub gates: Vec<GateStatus>,
    /// Bytes of guest memory, and of its backing; measured by the host. Absent without a front end.
    pub memory: Option<Memory>,
    /// What it costs the host in each way that is cheap to read, and its budget; absent before the first tick.
    pub accounting: Option<Accounting>,
    /// What was counted, by the host.
    pub counters: Counters,
    /// The guest's own figures, an indication only.
    pub guest_claims: Option<GuestClaims>,
    /// The vsock device, if the VM has one.
    pub vsock: Option<VsockStatus>,
    /// The balloon device, if the VM has one.
    pub balloon: Option<BalloonStatus>,
}

/// The process behind the vhost-user socket.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FrontEnd {
    /// Process id, if it is in a namespace we can see.
    pub pid: Option<i32>,
    /// User id.
    pub uid: u32,
}

/// A closed gate and for how long.
#[derive(Clone, Debug, Serialize)]
pub struct GateStatus {
    /// Gate, source and detail.
    #[serde(flatten)]
    pub gate: ClosedGate,
    /// Closed for this many seconds.
    pub closed_for_s: u64,
}

/// Measured by the host.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// Size of all regions.
    pub guest_bytes: u64,
    /// Allocated blocks of the memory files (`fstat`), exact; `None` when they cannot be read.
    pub backed_bytes: Option<u64>,
}

/// Claimed by the guest.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct GuestClaims {
    /// `MemTotal`.
    pub memory_total_bytes: u64,
    /// `MemFree`.
    pub memory_free_bytes: u64,
    /// `MemAvailable`.
    pub memory_available_bytes: u64,
    /// `Cached`.
    pub page_cache_bytes: u64,
    /// PSI memory `some avg10` in percent.
    pub psi_some_avg10_percent: f64,
    /// PSI memory `full avg10` in percent.
    pub psi_full_avg10_percent: f64,
    /// Huge pages taken offline.
    pub huge_pages_offlined: u64,
    /// Huge pages claimed.
    pub huge_pages_claimed: u64,
    /// CPU time of the agent.
    pub agent_cpu_s: f64,
}

/// The vsock device and its packets.
#[derive(Clone, Debug, Serialize)]
pub struct VsockStatus {
    /// Where its front end connects.
    pub socket: PathBuf,
    /// The front end's process, if one is connected.
    pub front_end: Option<FrontEnd>,
    /// From the guest.
    pub packets_received: u64,
    /// To the guest.
    pub packets_sent: u64,
    /// Accepted connections.
    pub connections_accepted: u64,
    /// Refused packets and connections by reason.
    pub refused_by_reason: BTreeMap<String, u64>,
}

/// The balloon device: what passed through its queues, counted by the host, and what the guest says of itself.
#[derive(Clone, Debug, Serialize)]
pub struct BalloonStatus {
    /// Where its front end connects.
    pub socket: PathBuf,
    /// The front end's process, if one is connected.
    pub front_end: Option<FrontEnd>,
    /// The guest's kernel has reported free pages since its driver started the device.
    pub kernel_reporting: bool,
    /// The reporting queue.
    pub reporting: QueueCounters,
    /// The inflate queue.
    pub inflate: QueueCounters,
    /// Chains of the deflate queue.
    pub deflate_chains: u64,
    /// Chains that waited in their ring because the guest gave memory away faster than it may.
    pub chains_delayed: u64,
    /// Buffers of statistics that were read.
    pub statistics_received: u64,
    /// Front ends disconnected because of what they sent.
    pub front_ends_broken_off: u64,
    /// Refused by fault of the guest.
    pub refused_by_reason: BTreeMap<String, u64>,
    /// Statistics of the guest's kernel, an indication only.
    pub guest_claims: Option<BalloonClaims>,
}

/// Claimed by the guest's kernel on the statistics queue; absent what it did not send.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct BalloonClaims {
    /// So long ago.
    pub age_s: u64,
    /// `MemTotal`.
    pub memory_total_bytes: Option<u64>,
    /// `MemFree`.
    pub memory_free_bytes: Option<u64>,
    /// `MemAvailable`.
    pub memory_available_bytes: Option<u64>,
    /// Page cache.
    pub page_cache_bytes: Option<u64>,
    /// Since boot.
    pub swap_in_bytes: Option<u64>,
    /// Since boot.
    pub swap_out_bytes: Option<u64>,
    /// Since boot.
    pub major_faults: Option<u64>,
    /// Processes killed for want of memory since boot.
    pub oom_kills: Option<u64>,
}

impl From<balloon::Received> for BalloonClaims {
    fn from(received: balloon::Received) -> Self {
        let claims = received.statistics;
        Self {
            age_s: received.at.elapsed().as_secs(),
            memory_total_bytes: claims.total_bytes,
            memory_free_bytes: claims.free_bytes,
            memory_available_bytes: claims.available_bytes,
            page_cache_bytes: claims.caches_bytes,
            swap_in_bytes: claims.swap_in_bytes,
            swap_out_bytes: claims.swap_out_bytes,
            major_faults: claims.major_faults,
            oom_kills: claims.oom_kills,
        }
    }
}

pub(super) struct Parts<'a> {
    pub(super) config: &'a VmConfig,
    pub(super) session: &'a Session,
    pub(super) vsock: Option<vsock::Counters>,
    pub(super) balloon: Option<(balloon::Counters, Option<balloon::Received>)>,
    pub(super) front_ends: &'a BTreeMap<DeviceKind, DeviceFrontEnd>,
    pub(super) busy: Duration,
    pub(super) accounting: Option<&'a Accounting>,
    pub(super) now: Duration,
}

impl Parts<'_> {
    fn front_end(&self, device: DeviceKind) -> Option<FrontEnd> {
        let peer = self.front_ends.get(&device)?.connection.peer()?;
        Some(FrontEnd { pid: peer.pid, uid: peer.uid })
    }

    /// The memory of either device: both show the same guest.
    fn memory(&self) -> Option<Memory> {
        let backing = self.front_ends.values().find_map(|front_end| front_end.backing.as_deref())?;
        Some(Memory { guest_bytes: backing.map().bytes(), backed_bytes: backing.allocated_bytes().ok() })
    }

    fn vsock(&self) -> Option<VsockStatus> {
        let counters = self.vsock.as_ref()?;
        Some(VsockStatus {
            socket: self.config.socket.clone()?,
            front_end: self.front_end(DeviceKind::Vsock),
            packets_received: counters.packets_received,
            packets_sent: counters.packets_sent,
            connections_accepted: counters.connections_accepted,
            refused_by_reason: by_name(Fault::ALL.iter().map(|fault| (fault.name(), counters.refused(*fault)))),
        })
    }

    fn balloon(&self) -> Option<BalloonStatus> {
        let (counters, received) = self.balloon.as_ref()?;
        let faults = balloon::Fault::ALL.iter().map(|fault| (fault.name(), counters.refused(*fault)));
        Some(BalloonStatus {
            socket: self.config.balloon.clone()?,
            front_end: self.front_end(DeviceKind::Balloon),
            kernel_reporting: self.session.kernel_reporting(),
            reporting: counters.reporting.clone(),
            inflate: counters.inflate.clone(),
            deflate_chains: counters.deflate_chains,
            chains_delayed: counters.chains_delayed,
            statistics_received: counters.statistics_received,
            front_ends_broken_off: counters.front_ends_broken_off,
            refused_by_reason: by_name(faults),
            guest_claims: received.map(BalloonClaims::from),
        })
    }
}

fn by_name(faults: impl Iterator<Item = (&'static str, u64)>) -> BTreeMap<String, u64> {
    faults.filter(|(_, count)| *count > 0).map(|(name, count)| (name.to_owned(), count)).collect()
}

impl VmStatus {
    pub(super) fn new(parts: &Parts<'_>) -> Self {
        let agent = parts.session.agent();
        let guest_claims = match &agent {
            AgentStatus::Active { stats: Some(stats), .. } => Some(GuestClaims {
                memory_total_bytes: stats.memory_total_bytes,
                memory_free_bytes: stats.memory_free_bytes,
                memory_available_bytes: stats.memory_available_bytes,
                page_cache_bytes: stats.page_cache_bytes,
                psi_some_avg10_percent: f64::from(stats.psi_some_avg10_centipercent) / 100.0,
                psi_full_avg10_percent: f64::from(stats.psi_full_avg10_centipercent) / 100.0,
                huge_pages_offlined: stats.huge_pages_offlined,
                huge_pages_claimed: stats.huge_pages_claimed,
                agent_cpu_s: Duration::from_millis(stats.agent_cpu_ms).as_secs_f64(),
            }),
            _ => None,
        };
        let gates = parts
            .session
            .closed_gates()
            .into_iter()
            .map(|gate| GateStatus { closed_for_s: parts.now.saturating_sub(gate.since).as_secs(), gate });
        let counters = Counters {
            busy_ns: u64::try_from(parts.busy.as_nanos()).unwrap_or(u64::MAX),
            ..parts.session.counters().clone()
        };
        Self {
            name: parts.config.name.clone(),
            front_end: parts.front_end(DeviceKind::Vsock).or_else(|| parts.front_end(DeviceKind::Balloon)),
            agent,
            gates: gates.collect(),
            memory: parts.memory(),
            accounting: parts.accounting.map(|accounting| accounting.aged(parts.now)),
            counters,
            guest_claims,
            vsock: parts.vsock(),
            balloon: parts.balloon(),
        }
    }
}
