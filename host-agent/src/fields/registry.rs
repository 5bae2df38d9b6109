//! The table of fields. Order is that of `/metrics` and docs/metrics.md.

use super::{Field, Kind, Origin, Unit};
use crate::fleet::State;

/// Figures of the daemon.
#[rustfmt::skip] // one line per field
pub const DAEMON: &[Field] =
    &[
        host("/version", "fpr_build_info", Kind::Info("version"), Unit::Count, "Version of the daemon"),
        host("/config_error", "fpr_config_outdated", Kind::Presence, Unit::Count, "Whether the daemon still has an older configuration than its file's, which is wrong"),
    ];

/// Figures of one VM; each has the label `vm` besides those of its path.
#[rustfmt::skip] // one line per field
pub const VM: &[Field] = &[
    host("/state", "fpr_vm_state", Kind::State(&State::WORDS), Unit::Count, "What the daemon does with the VM"),
    host("/agent/state", "fpr_agent_state", Kind::State(&["absent", "fencing", "active"]), Unit::Count, "State of the guest agent's session"),
    host("/agent/regions_proven/0", "fpr_agent_regions_proven", Kind::Gauge, Unit::Count, "Memory regions that passed the address check of this session"),
    host("/agent/regions_proven/1", "fpr_agent_regions", Kind::Gauge, Unit::Count, "Memory regions of the session"),
    host("/gates/[gate,source]/closed_for_s", "fpr_gate_closed_seconds", Kind::Gauge, Unit::Seconds, "How long a gate has been closed, and who closed it; no sample while it is open"),
    host("/{device=vsock|balloon}/front_end", "fpr_front_end_connected", Kind::Presence, Unit::Count, "Whether the VMM is connected to the device"),
    host("/memory/guest_bytes", "fpr_memory_size_bytes", Kind::Gauge, Unit::Bytes, "Guest memory as the VMM has set it up"),
    host("/memory/backed_bytes", "fpr_memory_backed_bytes", Kind::Gauge, Unit::Bytes, "Allocated blocks of the memory files: what the guest's memory costs the host"),
    host("/accounting/age_s", "fpr_accounting_age_seconds", Kind::Gauge, Unit::Seconds, "How old the figures of accounting are"),
    host("/accounting/figures/{method}/bytes", "fpr_accounting_bytes", Kind::Gauge, Unit::Bytes, "What the VM costs the host, by method; no sample where there is no figure"),
    host("/accounting/figures/{method}/error_bound_bytes", "fpr_accounting_error_bound_bytes", Kind::Gauge, Unit::Bytes, "By how much an approximate figure may be wrong; no sample for a precise one"),
    host("/accounting/figures/{method}/read_ns", "fpr_accounting_read_seconds", Kind::Gauge, Unit::Nanoseconds, "What reading the figure took"),
    host("/accounting/cost/low_bytes", "fpr_cost_low_bytes", Kind::Gauge, Unit::Bytes, "What the VM costs the host at least, by the figure that budgets are about"),
    host("/accounting/cost/high_bytes", "fpr_cost_high_bytes", Kind::Gauge, Unit::Bytes, "What it costs at most"),
    host("/accounting/budget/budget_bytes", "fpr_budget_bytes", Kind::Gauge, Unit::Bytes, "The VM's budget"),
    host("/accounting/budget/clear_bytes", "fpr_budget_clear_bytes", Kind::Gauge, Unit::Bytes, "An alarm ends at this cost"),
    host("/accounting/budget/state", "fpr_budget_state", Kind::State(&["idle", "below", "over", "unconfirmed"]), Unit::Count, "Where the budget stands, by precise figures only"),
    host("/accounting/budget/since_s", "fpr_budget_state_seconds", Kind::Gauge, Unit::Seconds, "For how long"),
    host("/accounting/budget/cost_bytes", "fpr_budget_cost_bytes", Kind::Gauge, Unit::Bytes, "The last precise figure of what the VM costs"),
    host("/accounting/budget/cost_age_s", "fpr_budget_cost_age_seconds", Kind::Gauge, Unit::Seconds, "How old that is"),
    host("/accounting/budget/alarms", "fpr_budget_alarms_total", Kind::Counter, Unit::Count, "Alarms that were raised"),
    host("/accounting/budget/precise_reads", "fpr_budget_precise_reads_total", Kind::Counter, Unit::Count, "Precise reads that the budget asked for"),
    host("/counters/sources/{source}/reported_bytes", "fpr_reported_bytes_total", Kind::Counter, Unit::Bytes, "Memory that the guest gave away, by who gave it"),
    host("/counters/sources/{source}/dropped_bytes", "fpr_dropped_bytes_total", Kind::Counter, Unit::Bytes, "Memory whose backing was dropped"),
    host("/counters/sources/{source}/refused_bytes", "fpr_refused_bytes_total", Kind::Counter, Unit::Bytes, "Memory that was given away and not dropped"),
    host("/counters/sources/{source}/refused_bytes_by_reason/{reason}", "fpr_refused_by_reason_bytes_total", Kind::Counter, Unit::Bytes, "The same by reason"),
    host("/counters/freed_bytes", "fpr_freed_bytes_total", Kind::Counter, Unit::Bytes, "By how much the allocated blocks fell across drops; blurred by what else the guest did"),
    host("/counters/refault_watched_bytes", "fpr_refault_watched_bytes_total", Kind::Counter, Unit::Bytes, "Offlined memory that was dropped and looked at again 10 s later"),
    host("/counters/refault_returned_bytes", "fpr_refault_returned_bytes_total", Kind::Counter, Unit::Bytes, "Of that: backed again"),
    host("/counters/refault_minute_watched_bytes", "fpr_refault_minute_watched_bytes_total", Kind::Counter, Unit::Bytes, "Dropped memory whose fate within a minute is known, whoever gave it away"),
    host("/counters/refault_minute_returned_bytes", "fpr_refault_minute_returned_bytes_total", Kind::Counter, Unit::Bytes, "Of that, by sample: backed again"),
    host("/counters/sessions", "fpr_agent_sessions_total", Kind::Counter, Unit::Count, "Sessions of the guest agent that began"),
    host("/counters/closed_by_reason/{reason}", "fpr_agent_connections_closed_total", Kind::Counter, Unit::Count, "Connections of the guest agent that the host closed"),
    host("/counters/fences_waited", "fpr_agent_fences_waited_total", Kind::Counter, Unit::Count, "Sessions that waited for drops of an earlier one"),
    host("/counters/reports", "fpr_agent_reports_total", Kind::Counter, Unit::Count, "Reports of the guest agent"),
    host("/counters/surveys", "fpr_agent_surveys_total", Kind::Counter, Unit::Count, "Surveys of the guest agent that were answered"),
    host("/counters/huge_pages_reported", "fpr_agent_huge_pages_reported_total", Kind::Counter, Unit::Count, "Huge pages in reports of the guest agent"),
    host("/counters/huge_pages_offlined", "fpr_agent_huge_pages_offlined_total", Kind::Counter, Unit::Count, "Of these: isolated by taking memory blocks offline"),
    host("/counters/huge_pages_claimed", "fpr_agent_huge_pages_claimed_total", Kind::Counter, Unit::Count, "Of these: isolated by claims"),
    host("/counters/huge_pages_dropped", "fpr_agent_huge_pages_dropped_total", Kind::Counter, Unit::Count, "Of these: dropped"),
    host("/counters/huge_pages_refused", "fpr_agent_huge_pages_refused_total", Kind::Counter, Unit::Count, "Of these: refused"),
    host("/counters/refused_by_reason/{reason}", "fpr_agent_huge_pages_refused_by_reason_total", Kind::Counter, Unit::Count, "Refused huge pages by reason"),
    host("/counters/busy_ns", "fpr_busy_seconds_total", Kind::Counter, Unit::Nanoseconds, "Time the VM's workers spent in checks, drops and looks"),
    host("/vsock/packets_received", "fpr_vsock_packets_received_total", Kind::Counter, Unit::Count, "Packets from the guest"),
    host("/vsock/packets_sent", "fpr_vsock_packets_sent_total", Kind::Counter, Unit::Count, "Packets to the guest"),
    host("/vsock/connections_accepted", "fpr_vsock_connections_accepted_total", Kind::Counter, Unit::Count, "Connections that were accepted"),
    host("/vsock/refused_by_reason/{reason}", "fpr_vsock_refused_total", Kind::Counter, Unit::Count, "Packets and connections that were refused, by fault"),
    host("/balloon/kernel_reporting", "fpr_balloon_kernel_reporting", Kind::Flag, Unit::Count, "Whether the guest's kernel has reported since its driver started the device"),
    host("/balloon/{queue=reporting|inflate}/chains", "fpr_balloon_chains_total", Kind::Counter, Unit::Count, "Chains that were taken off the queue and returned"),
    host("/balloon/{queue=reporting|inflate}/chains_malformed", "fpr_balloon_chains_malformed_total", Kind::Counter, Unit::Count, "Of these: could not be read to their end"),
    host("/balloon/{queue=reporting|inflate}/descriptors", "fpr_balloon_descriptors_total", Kind::Counter, Unit::Count, "Descriptors in all chains"),
    host("/balloon/{queue=reporting|inflate}/ranges", "fpr_balloon_ranges_total", Kind::Counter, Unit::Count, "Ranges the guest named"),
    host("/balloon/{queue=reporting|inflate}/named_bytes", "fpr_balloon_named_bytes_total", Kind::Counter, Unit::Bytes, "Bytes in these ranges"),
    host("/balloon/{queue=reporting|inflate}/ranges_dropped", "fpr_balloon_ranges_dropped_total", Kind::Counter, Unit::Count, "Ranges that were dropped, at least in part"),
    host("/balloon/{queue=reporting|inflate}/dropped_bytes", "fpr_balloon_dropped_bytes_total", Kind::Counter, Unit::Bytes, "Bytes dropped of these ranges"),
    host("/balloon/{queue=reporting|inflate}/refused_by_reason/{reason}/ranges", "fpr_balloon_ranges_refused_total", Kind::Counter, Unit::Count, "Ranges that were refused, by reason"),
    host("/balloon/{queue=reporting|inflate}/refused_by_reason/{reason}/bytes", "fpr_balloon_refused_bytes_total", Kind::Counter, Unit::Bytes, "Bytes in refused ranges, by reason"),
    host("/balloon/deflate_chains", "fpr_balloon_deflate_chains_total", Kind::Counter, Unit::Count, "Chains of the deflate queue"),
    host("/balloon/chains_delayed", "fpr_balloon_chains_delayed_total", Kind::Counter, Unit::Count, "Chains that waited in their ring because the guest gave memory away too fast"),
    host("/balloon/statistics_received", "fpr_balloon_statistics_received_total", Kind::Counter, Unit::Count, "Buffers of statistics that were read"),
    host("/balloon/front_ends_broken_off", "fpr_balloon_front_ends_broken_off_total", Kind::Counter, Unit::Count, "Front ends disconnected because of what they sent"),
    host("/balloon/refused_by_reason/{reason}", "fpr_balloon_refused_total", Kind::Counter, Unit::Count, "What was refused by fault of the guest, by fault"),

    guest("/guest_claims/memory_total_bytes", "fpr_guest_claimed_memory_total_bytes", Kind::Gauge, Unit::Bytes, "MemTotal, as the agent says"),
    guest("/guest_claims/memory_free_bytes", "fpr_guest_claimed_memory_free_bytes", Kind::Gauge, Unit::Bytes, "MemFree, as the agent says"),
    guest("/guest_claims/memory_available_bytes", "fpr_guest_claimed_memory_available_bytes", Kind::Gauge, Unit::Bytes, "MemAvailable, as the agent says"),
    guest("/guest_claims/page_cache_bytes", "fpr_guest_claimed_page_cache_bytes", Kind::Gauge, Unit::Bytes, "Cached, as the agent says"),
    guest("/guest_claims/psi_some_avg10_percent", "fpr_guest_claimed_psi_some_avg10_ratio", Kind::Gauge, Unit::Percent, "Memory pressure, some, over 10 s, as the agent says"),
    guest("/guest_claims/psi_full_avg10_percent", "fpr_guest_claimed_psi_full_avg10_ratio", Kind::Gauge, Unit::Percent, "Memory pressure, full, over 10 s, as the agent says"),
    guest("/guest_claims/huge_pages_offlined", "fpr_guest_claimed_huge_pages_offlined", Kind::Gauge, Unit::Count, "Huge pages taken offline, as the agent says"),
    guest("/guest_claims/huge_pages_claimed", "fpr_guest_claimed_huge_pages_claimed", Kind::Gauge, Unit::Count, "Huge pages claimed, as the agent says"),
    guest("/guest_claims/agent_cpu_s", "fpr_guest_claimed_agent_cpu_seconds_total", Kind::Counter, Unit::Seconds, "CPU time of the agent, as it says"),
    guest("/balloon/guest_claims/age_s", "fpr_guest_claimed_balloon_age_seconds", Kind::Gauge, Unit::Seconds, "How old the statistics of the guest's kernel are"),
    guest("/balloon/guest_claims/memory_total_bytes", "fpr_guest_claimed_balloon_memory_total_bytes", Kind::Gauge, Unit::Bytes, "MemTotal, as the guest's kernel says"),
    guest("/balloon/guest_claims/memory_free_bytes", "fpr_guest_claimed_balloon_memory_free_bytes", Kind::Gauge, Unit::Bytes, "MemFree, as the guest's kernel says"),
    guest("/balloon/guest_claims/memory_available_bytes", "fpr_guest_claimed_balloon_memory_available_bytes", Kind::Gauge, Unit::Bytes, "MemAvailable, as the guest's kernel says"),
    guest("/balloon/guest_claims/page_cache_bytes", "fpr_guest_claimed_balloon_page_cache_bytes", Kind::Gauge, Unit::Bytes, "Page cache, as the guest's kernel says"),
    guest("/balloon/guest_claims/swap_in_bytes", "fpr_guest_claimed_balloon_swap_in_bytes_total", Kind::Counter, Unit::Bytes, "Swapped in since boot, as the guest's kernel says"),
    guest("/balloon/guest_claims/swap_out_bytes", "fpr_guest_claimed_balloon_swap_out_bytes_total", Kind::Counter, Unit::Bytes, "Swapped out since boot, as the guest's kernel says"),
    guest("/balloon/guest_claims/major_faults", "fpr_guest_claimed_balloon_major_faults_total", Kind::Counter, Unit::Count, "Major faults since boot, as the guest's kernel says"),
    guest("/balloon/guest_claims/oom_kills", "fpr_guest_claimed_balloon_oom_kills_total", Kind::Counter, Unit::Count, "Processes killed for want of memory since boot, as the guest's kernel says"),
];

/// Leaves of `status` that make no metric, and why. Paths of a VM; `/pid` is the daemon's.
pub const NO_METRIC: &[(&str, &str)] = &[
    ("/pid", "an identity; the service manager's metrics have it"),
    ("/name", "is the label vm"),
    ("/origin", "configuration"),
    ("/state_detail", "a text for people"),
    ("/front_end/pid", "an identity"),
    ("/front_end/uid", "an identity"),
    ("/{device=vsock|balloon}/front_end/pid", "an identity"),
    ("/{device=vsock|balloon}/front_end/uid", "an identity"),
    ("/{device=vsock|balloon}/socket", "configuration"),
    ("/agent/agent_version", "a text of the guest: as a label it could take any number of values"),
    ("/agent/kernel_release", "a text of the guest: as a label it could take any number of values"),
    ("/accounting/figures/{method}/source", "a text for people"),
    ("/accounting/figures/{method}/precision", "fpr_accounting_error_bound_bytes tells"),
    ("/accounting/figures/{method}/absent/reason", "fpr_accounting_bytes has no sample"),
    ("/accounting/figures/{method}/absent/detail", "a text for people"),
    ("/accounting/cost/basis", "fpr_accounting_bytes tells: cgroup where that is there"),
    ("/accounting/budget/detail", "a text for people"),
    ("/gates/[gate,source]/gate", "is a label of fpr_gate_closed_seconds"),
    ("/gates/[gate,source]/source", "is a label of fpr_gate_closed_seconds"),
    ("/gates/[gate,source]/detail", "a text for people"),
];

const fn host(path: &'static str, name: &'static str, kind: Kind, unit: Unit, help: &'static str) -> Field {
    Field { path, name, kind, unit, origin: Origin::Host, help }
}

const fn guest(path: &'static str, name: &'static str, kind: Kind, unit: Unit, help: &'static str) -> Field {
    Field { path, name, kind, unit, origin: Origin::Guest, help }
}
