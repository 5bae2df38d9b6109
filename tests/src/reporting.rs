//! The ways a guest can report its free memory, as benchmarks and the demo compare them.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::daemon::{Devices, HostAgent};
use crate::vm::{Device, QemuChoice, Vm, VmBuilder};
use crate::{poll, process};

/// Name of the VM at the host agent.
pub const VM_NAME: &str = "guest";
/// In the guest.
const GUEST_LOG: &str = "/run/fpr-guest-agent.log";
/// From the start of the guest agent to its session: address check included, on a busy machine.
const SESSION_DEADLINE: Duration = Duration::from_secs(120);
/// An answer to the guest takes milliseconds.
const SETTLED: Duration = Duration::from_secs(2);

/// Who reports free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reporting {
    /// Nobody.
    None,
    /// The guest's kernel, to QEMU's own virtio-balloon.
    Stock,
    /// The guest agent.
    Agent,
    /// The guest agent with memory-block offlining switched off.
    AgentClaims,
    /// As [`Reporting::Stock`], on the QEMU that [`Reporting::Kernel`] needs, to compare that with.
    StockGeneric,
    /// The guest's kernel, to the host agent's balloon device. There is no agent in the guest.
    Kernel,
}

impl Reporting {
    /// All, in the order of a comparison.
    pub const ALL: [Self; 6] =
        [Self::None, Self::Stock, Self::Agent, Self::AgentClaims, Self::StockGeneric, Self::Kernel];

    /// Whether an agent runs in the guest.
    #[must_use]
    pub fn uses_guest_agent(self) -> bool {
        matches!(self, Self::Agent | Self::AgentClaims)
    }

    /// Whether it needs the host agent.
    #[must_use]
    pub fn uses_host_agent(self) -> bool {
        self.uses_guest_agent() || self == Self::Kernel
    }

    /// Whether it needs the QEMU with a generic vhost-user device.
    #[must_use]
    pub fn uses_generic_qemu(self) -> bool {
        matches!(self, Self::StockGeneric | Self::Kernel)
    }

    /// Boots a guest that reports this way.
    ///
    /// # Errors
    /// The guest or one of the agents does not start.
    pub fn boot(self, builder: VmBuilder) -> Result<ReportingVm> {
        match self {
            Self::None => ReportingVm::boot_alone(builder),
            Self::Stock => ReportingVm::boot_alone(builder.device(Device::FreePageReporting)),
            Self::StockGeneric => {
                ReportingVm::boot_alone(builder.device(Device::FreePageReporting).qemu(QemuChoice::Generic))
            }
            Self::Agent => ReportingVm::boot_with_agents(builder, &[], ""),
            Self::AgentClaims => ReportingVm::boot_with_agents(builder, &[], "--no-offline"),
            Self::Kernel => ReportingVm::boot_with_devices(Devices::Balloon, builder, &[]),
        }
    }
}

impl fmt::Display for Reporting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Stock => "stock",
            Self::Agent => "agent",
            Self::AgentClaims => "agent-claims",
            Self::StockGeneric => "stock-generic",
            Self::Kernel => "kernel",
        })
    }
}

impl FromStr for Reporting {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        let names = Self::ALL.map(|reporting| reporting.to_string());
        let found = Self::ALL.into_iter().find(|reporting| reporting.to_string() == name);
        found.with_context(|| format!("{name}: must be one of {}", names.join(", ")))
    }
}

/// A guest and whatever reports for it.
#[derive(Debug)]
pub struct ReportingVm {
    /// The guest.
    pub vm: Vm,
    /// The host agent, if this configuration has one.
    pub host: Option<HostAgent>,
    guest_pid: Option<u32>,
}

impl ReportingVm {
    /// Boots a guest with the vsock device of a host agent of its own, starts the guest agent in it and waits for their session.
    ///
    /// # Errors
    /// One of them does not start; the message holds the logs.
    pub fn boot_with_agents(builder: VmBuilder, host_arguments: &[&str], guest_arguments: &str) -> Result<Self> {
        let mut this = Self::boot_with_devices(Devices::Vsock, builder, host_arguments)?;
        this.start_guest_agent(guest_arguments)?;
        Ok(this)
    }

    /// Boots a guest with these devices of a host agent of its own. No agent is started in it.
    ///
    /// # Errors
    /// One of them does not start; the message holds the logs.
    pub fn boot_with_devices(devices: Devices, builder: VmBuilder, host_arguments: &[&str]) -> Result<Self> {
        let host = HostAgent::start_with(devices, &[VM_NAME], host_arguments)?;
        let mut builder = builder;
        if devices.vsock() {
            builder = builder.device(Device::VhostUserVsock(host.socket(VM_NAME)));
        }
        if devices.balloon() {
            builder = builder.device(Device::VhostUserBalloon(host.balloon_socket(VM_NAME)));
        }
        let vm = builder.boot().with_context(|| format!("host agent said: {}", host.log()))?;
        Ok(Self { vm, host: Some(host), guest_pid: None })
    }

    fn boot_alone(builder: VmBuilder) -> Result<Self> {
        Ok(Self { vm: builder.boot()?, host: None, guest_pid: None })
    }

    /// Starts the guest agent (again, after a test has killed it) and waits for a new session.
    ///
    /// # Errors
    /// It ends, or gets no session; the message holds its log.
    pub fn start_guest_agent(&mut self, arguments: &str) -> Result<()> {
        let sessions_before = self.sessions()?;
        let command = format!("fpr-guest-agent run {arguments} >>{GUEST_LOG} 2>&1 & echo $!");
        let pid = self.vm.run(&command)?.stdout;
        self.guest_pid = Some(pid.trim().parse().with_context(|| format!("pid of the guest agent: {pid:?}"))?);
        let look = || {
            self.guest_agent_cpu_time().context("fpr-guest-agent ended")?;
            self.sessions()
        };
        poll::until("the agents' session", SESSION_DEADLINE, look, |sessions| *sessions > sessions_before)
            .map(drop)
            .with_context(|| format!("guest agent said: {}\nhost agent said: {}", self.guest_log(), self.host_log()))
    }

    /// The host agent, if this configuration has one.
    #[must_use]
    pub fn host_agent(&self) -> Option<&HostAgent> {
        self.host.as_ref()
    }

    /// What the host agent says about this VM.
    ///
    /// # Errors
    /// This configuration has no host agent, or it does not answer.
    pub fn host_status(&self) -> Result<Value> {
        self.host_agent().context("no host agent in this configuration")?.vm_status(VM_NAME)
    }

    /// A counter of the host agent for this VM.
    ///
    /// # Errors
    /// As [`ReportingVm::host_status`], or there is no such counter.
    pub fn counter(&self, name: &str) -> Result<u64> {
        let status = self.host_status()?;
        status
            .pointer(&format!("/counters/{name}"))
            .and_then(Value::as_u64)
            .with_context(|| format!("no counter {name} in {status}"))
    }

    /// A counter once what was under way is counted, too: it has stood still for as long as an answer takes. What a closed gate
    /// interrupts is counted a moment after the gate can be seen.
    ///
    /// # Errors
    /// As [`ReportingVm::counter`], or it does not stand still within `deadline`.
    pub fn settled_counter(&self, name: &str, deadline: Duration) -> Result<u64> {
        let (mut last, mut since) = (self.counter(name)?, Instant::now());
        let look = || {
            let now = self.counter(name)?;
            if now != last {
                (last, since) = (now, Instant::now());
            }
            Ok((since.elapsed(), now))
        };
        poll::until(&format!("{name} to stand still"), deadline, look, |(quiet, _)| *quiet >= SETTLED)
            .map(|(_, value)| value)
    }

    /// Bytes by a source of memory (`agent-offlined`, `agent-claimed`, `kernel-reported`, `kernel-inflated`): `field` is `reported_bytes`,
    /// `dropped_bytes` or `refused_bytes`.
    ///
    /// # Errors
    /// As [`ReportingVm::counter`].
    pub fn source_bytes(&self, source: &str, field: &str) -> Result<u64> {
        self.counter(&format!("sources/{source}/{field}"))
    }

    /// The guest agent's pid in the guest.
    ///
    /// # Errors
    /// This configuration has no guest agent.
    pub fn guest_pid(&self) -> Result<u32> {
        self.guest_pid.context("no guest agent in this configuration")
    }

    /// CPU time the guest agent has consumed so far, in steps of 10 ms.
    ///
    /// # Errors
    /// There is no guest agent, or it has ended.
    pub fn guest_agent_cpu_time(&self) -> Result<Duration> {
        let stat = self.vm.read(&format!("/proc/{}/stat", self.guest_pid()?))?;
        process::cpu_time_of(&stat).with_context(|| format!("the guest agent's stat is malformed: {stat}"))
    }

    /// Resident bytes of the guest agent.
    ///
    /// # Errors
    /// There is no guest agent, or it has ended.
    pub fn guest_agent_resident_bytes(&self) -> Result<u64> {
        let status = self.vm.read(&format!("/proc/{}/status", self.guest_pid()?))?;
        process::status_bytes_of(&status, "VmRSS")
            .with_context(|| format!("the guest agent's status has no VmRSS: {status}"))
    }

    /// All that the guest agent has logged.
    #[must_use]
    pub fn guest_log(&self) -> String {
        self.vm.read(GUEST_LOG).unwrap_or_default()
    }

    fn host_log(&self) -> String {
        self.host_agent().map(HostAgent::log).unwrap_or_default()
    }

    fn sessions(&self) -> Result<u64> {
        self.counter("sessions")
    }
}
