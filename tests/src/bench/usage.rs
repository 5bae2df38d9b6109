//! CPU time consumed on both sides, sampled while memory comes back, so that it can be cut off afterwards at the moment that turns out to matter.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::process::{self, MILLIS_PER_TICK};
use crate::reporting::ReportingVm;

/// CPU time since each counter began.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    at: Instant,
    /// All of the guest's virtual CPUs together, idle and I/O wait excluded.
    pub guest: Duration,
    /// The guest agent.
    pub guest_agent: Option<Duration>,
    /// The host agent.
    pub host_agent: Option<Duration>,
    /// QEMU, including the virtual CPUs.
    pub vmm: Duration,
}

impl Usage {
    /// Takes one sample. Reads two files in the guest and starts no process there.
    ///
    /// # Errors
    /// One of the processes is gone.
    pub fn sample(guest: &ReportingVm) -> Result<Self> {
        let stat = guest.vm.read("/proc/stat")?;
        let at = Instant::now();
        let guest_agent = guest.guest_pid().ok().map(|_| guest.guest_agent_cpu_time()).transpose()?;
        let host_agent = guest.host_agent().map(|agent| agent.cpu_time()).transpose()?;
        let busy = busy_time(&stat).with_context(|| format!("/proc/stat of the guest is malformed: {stat}"))?;
        Ok(Self { at, guest: busy, guest_agent, host_agent, vmm: process::cpu_time(guest.vm.pid())? })
    }

    /// What was consumed from the first of `samples` to the first one at or after `until`. None if there is no such sample.
    #[must_use]
    pub fn between(samples: &[Self], until: Instant) -> Option<Self> {
        let (first, last) = (samples.first()?, samples.iter().find(|sample| sample.at >= until)?);
        let less = |last: Option<Duration>, first: Option<Duration>| Some(last?.saturating_sub(first?));
        Some(Self {
            at: last.at,
            guest: last.guest.saturating_sub(first.guest),
            guest_agent: less(last.guest_agent, first.guest_agent),
            host_agent: less(last.host_agent, first.host_agent),
            vmm: last.vmm.saturating_sub(first.vmm),
        })
    }
}

/// The first line of `/proc/stat` (proc_stat(5)): user nice system idle iowait irq softirq steal.
fn busy_time(stat: &str) -> Option<Duration> {
    let ticks: Vec<u64> =
        stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks[..] else { return None };
    Some(Duration::from_millis((user + nice + system + irq + softirq) * MILLIS_PER_TICK))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn idle_and_steal_are_not_busy() {
        assert_eq!(busy_time("cpu  1 2 4 1000 1000 8 16 1000 0 0\ncpu0 9\n"), Some(Duration::from_millis(310)));
        assert_eq!(busy_time("cpu  1 2\n"), None);
        assert_eq!(busy_time(""), None);
    }

    #[test]
    fn a_difference_ends_at_the_first_sample_that_is_late_enough() {
        let start = Instant::now();
        let sample = |second: u64| Usage {
            at: start + Duration::from_secs(second),
            guest: Duration::from_secs(10 + second),
            guest_agent: None,
            host_agent: Some(Duration::from_secs(second * second)),
            vmm: Duration::ZERO,
        };
        let samples: Vec<_> = (0..5).map(sample).collect();
        let used = Usage::between(&samples, start + Duration::from_millis(1500)).unwrap();
        assert_eq!(
            (used.guest, used.host_agent, used.guest_agent),
            (Duration::from_secs(2), Some(Duration::from_secs(4)), None)
        );
        assert!(Usage::between(&samples, start + Duration::from_secs(9)).is_none());
    }
}
