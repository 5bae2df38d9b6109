//! A status in which everything is there and nothing is zero, for tests. The compiler sees to it that nothing is missing.

use crate::accounting::books::{Accounting, CostStatus, FigureStatus};
use crate::accounting::cost::{Basis, Estimate};
use crate::accounting::watch::BudgetStatus;
use crate::accounting::{Absent, AbsentReason, Figure, Precision};
use crate::control::DaemonStatus;
use crate::fleet::{Figures, State, VmReport};
use crate::reporting::{QueueCounters, Refused};
use crate::session::AgentStatus;
use crate::session::counters::{Counters, MemorySource, SourceCounters};
use crate::session::gates::{ClosedGate, GateSource};
use crate::vm::Origin;
use crate::vm::status::{
    BalloonClaims, BalloonStatus, FrontEnd, GateStatus, GuestClaims, Memory, VmStatus, VsockStatus,
};
use fpr_protocol::{CloseReason, Gate, Refusal};
use std::collections::BTreeMap;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// The daemon with one VM.
pub(crate) fn daemon() -> DaemonStatus {
    let config_error = Some("host.toml: line 3".to_owned());
    DaemonStatus { version: "0.1.0", pid: 7, config_error, vms: vec![report("web1")] }
}

/// A VM as the daemon reports it.
pub(crate) fn report(name: &str) -> VmReport {
    VmReport {
        figures: Figures::Answered(Box::new(vm(name))),
        origin: Origin::Config,
        state: State::Running,
        state_detail: Some("waits for its front end to go".to_owned()),
    }
}

/// A VM of 1 GiB with both devices and a closed gate.
pub(crate) fn vm(name: &str) -> VmStatus {
    let front_end = Some(FrontEnd { pid: Some(4711), uid: 64055 });
    let gate = ClosedGate {
        gate: Gate::Operator,
        source: GateSource::Operator,
        detail: "backup at noon".to_owned(),
        since: Duration::ZERO,
    };
    VmStatus {
        name: name.to_owned(),
        front_end,
        agent: AgentStatus::Active {
            agent_version: "0.1.0".to_owned(),
            kernel_release: "6.12".to_owned(),
            stats: None,
            regions_proven: (1, 2),
        },
        gates: vec![GateStatus { gate, closed_for_s: 90 }],
        memory: Some(Memory { guest_bytes: 1024 * MIB, backed_bytes: Some(300 * MIB) }),
        accounting: Some(accounting()),
        counters: counters(),
        guest_claims: Some(GuestClaims {
            memory_total_bytes: 1000 * MIB,
            memory_free_bytes: 600 * MIB,
            memory_available_bytes: 750 * MIB,
            page_cache_bytes: 90 * MIB,
            psi_some_avg10_percent: 1.5,
            psi_full_avg10_percent: 0.5,
            huge_pages_offlined: 64,
            huge_pages_claimed: 3,
            agent_cpu_s: 0.25,
        }),
        vsock: Some(VsockStatus {
            socket: "/run/fpr/web1.sock".into(),
            front_end,
            packets_received: 20,
            packets_sent: 21,
            connections_accepted: 2,
            refused_by_reason: BTreeMap::from([("unknown_port".to_owned(), 1)]),
        }),
        balloon: Some(BalloonStatus {
            socket: "/run/fpr/web1-balloon.sock".into(),
            front_end,
            kernel_reporting: true,
            reporting: queue(),
            inflate: queue(),
            deflate_chains: 4,
            chains_delayed: 6,
            statistics_received: 5,
            front_ends_broken_off: 1,
            refused_by_reason: BTreeMap::from([("bad_statistics".to_owned(), 1)]),
            guest_claims: Some(BalloonClaims {
                age_s: 3,
                memory_total_bytes: Some(1000 * MIB),
                memory_free_bytes: Some(600 * MIB),
                memory_available_bytes: Some(750 * MIB),
                page_cache_bytes: Some(90 * MIB),
                swap_in_bytes: Some(4096),
                swap_out_bytes: Some(8192),
                major_faults: Some(11),
                oom_kills: Some(1),
            }),
        }),
    }
}

fn accounting() -> Accounting {
    let figure = |precision| {
        let (source, read) = ("statm resident".to_owned(), Duration::from_micros(5));
        FigureStatus::Present(Figure { bytes: 310 * MIB, source, precision, read })
    };
    let absent = || Absent { reason: AbsentReason::NoCgroup, detail: "shared with others".to_owned() };
    Accounting {
        age_s: 4,
        figures: BTreeMap::from([
            ("rss", figure(Precision::Approximate { error_bound_bytes: MIB })),
            ("backing", figure(Precision::Precise)),
            ("cgroup", FigureStatus::Absent { absent: absent() }),
        ]),
        cost: CostStatus::Present(Estimate { basis: Basis::Process, low_bytes: 300 * MIB, high_bytes: 320 * MIB }),
        budget: Some(BudgetStatus {
            budget_bytes: 256 * MIB,
            clear_bytes: 240 * MIB,
            state: "over",
            since_s: 60,
            detail: Some("shared with others".to_owned()),
            cost_bytes: Some(305 * MIB),
            cost_age_s: Some(7),
            alarms: 2,
            precise_reads: 9,
        }),
        at: Duration::ZERO,
    }
}

fn counters() -> Counters {
    let source = SourceCounters {
        reported_bytes: 10 * MIB,
        dropped_bytes: 8 * MIB,
        refused_bytes: 2 * MIB,
        refused_bytes_by_reason: BTreeMap::from([(Refusal::Gated, 2 * MIB)]),
    };
    Counters {
        sessions: 2,
        closed_by_reason: BTreeMap::from([(CloseReason::Flood, 1)]),
        fences_waited: 1,
        reports: 6,
        huge_pages_reported: 10,
        huge_pages_offlined: 7,
        huge_pages_claimed: 3,
        huge_pages_dropped: 8,
        huge_pages_refused: 2,
        refused_by_reason: BTreeMap::from([(Refusal::Gated, 2)]),
        sources: MemorySource::ALL.map(|of| (of, source.clone())).into(),
        freed_bytes: 30 * MIB,
        surveys: 4,
        refault_watched_bytes: 16 * MIB,
        refault_returned_bytes: 2 * MIB,
        refault_minute_watched_bytes: 32 * MIB,
        refault_minute_returned_bytes: 8 * MIB,
        busy_ns: 12_345_678,
    }
}

fn queue() -> QueueCounters {
    QueueCounters {
        chains: 3,
        chains_malformed: 1,
        descriptors: 9,
        ranges: 8,
        named_bytes: 10 * MIB,
        ranges_dropped: 7,
        dropped_bytes: 8 * MIB,
        refused_by_reason: BTreeMap::from([(Refusal::Gated, Refused { ranges: 1, bytes: 2 * MIB })]),
    }
}
