//! What a VM's owner holds per device: the front end behind it, the memory map it sent, the worker that drops through it.
//!
//! Both devices of a VM usually belong to one VMM process and show the same memory file; nothing here relies on it. A
//! report is dropped through the map of the device it came by. What is found out about either process or map closes a
//! gate of the VM and so holds for both.

use super::owner::Owner;
use super::worker::{Mapping, Target, Work, Worker};
use super::{Connected, boot_now};
use crate::accounting::Subject;
use crate::accounting::choose::Account;
use crate::accounting::rank::Obstacle;
use crate::backing::{self, GuestBacking, MemoryMap};
use crate::device::{DeviceKind, Done as Fence, MemoryRegion, PeerProcess};
use crate::session::clock::on_grid;
use crate::session::drain::DrainError;
use crate::session::gates::GateSource;
use crate::session::{AgentStatus, Event, Layout};
use fpr_protocol::message::Region;
use fpr_protocol::{Gate, GuestAddress, HugePageRange, HugePageSize, Refusal};
use nix::unistd::Pid;
use std::sync::Arc;
use std::time::Duration;

/// Between two looks into the VMM's process while reports come or its gates are closed. Each report is preceded by a
/// look of its own, so this only decides how soon `status` and the guest hear of a change.
const INSPECT_BUSY: Duration = Duration::from_secs(1);
/// The same for a VM that reports nothing. A look costs a quarter of a millisecond, and most VMs of a host are idle.
const INSPECT_IDLE: Duration = Duration::from_secs(15);
/// A VM is idle when it has reported nothing for so long.
const IDLE_AFTER: Duration = Duration::from_secs(10);
/// Looks at idle VMs begin together, several per wake-up of this process, but not all at once.
const IDLE_GRID: Duration = Duration::from_secs(1);

/// One device of the VM.
pub(super) struct FrontEnd {
    pub(super) worker: Worker,
    pub(super) connection: Connection,
    pub(super) backing: Option<Arc<GuestBacking>>,
    /// How the process maps its files; absent where that cannot be known.
    mapping: Option<Arc<Mapping>>,
    /// What speaks against this memory map.
    gates: Vec<(Gate, String)>,
}

/// Who is at the other end of the device's socket.
#[derive(Clone, Copy, Debug)]
pub(super) enum Connection {
    None,
    /// A front end whose process is not known.
    Unknown,
    Process(PeerProcess),
}

impl Connection {
    pub(super) fn peer(self) -> Option<PeerProcess> {
        match self {
            Self::Process(peer) => Some(peer),
            Self::None | Self::Unknown => None,
        }
    }

    fn pid(self) -> Option<Pid> {
        self.peer().and_then(|peer| peer.pid).map(Pid::from_raw)
    }
}

impl FrontEnd {
    pub(super) fn new(worker: Worker) -> Self {
        Self { worker, connection: Connection::None, backing: None, mapping: None, gates: Vec::new() }
    }
}

impl Owner {
    pub(super) fn connected(&mut self, device: DeviceKind, peer: std::io::Result<PeerProcess>) {
        self.log.front_end(device, &peer);
        let connection = peer.map_or(Connection::Unknown, Connection::Process);
        let other = self.front_ends.iter().find(|(other, _)| **other != device).map(|(_, other)| other.connection);
        if let (Some(Connection::Process(other)), Connection::Process(peer)) = (other, connection)
            && other.pid != peer.pid
        {
            self.log.two_processes(other.pid, peer.pid);
        }
        if let Some(front_end) = self.front_ends.get_mut(&device) {
            front_end.connection = connection;
        }
    }

    pub(super) fn front_end_gone(&mut self, device: DeviceKind, done: Fence) {
        let fence = self.hold(done);
        if device == DeviceKind::Vsock {
            self.decoders.clear();
        }
        self.handle(Event::Stopped { device, fence });
        self.set_backing(device, None, Vec::new());
        if let Some(front_end) = self.front_ends.get_mut(&device) {
            front_end.connection = Connection::None;
        }
        // What the other device's process holds is looked at again; without one there is nobody left to blame.
        self.next_inspection = Duration::ZERO;
        if self.front_ends.values().all(|front_end| matches!(front_end.connection, Connection::None)) {
            self.handle(Event::Gates(GateSource::Process, Vec::new()));
            // Not before: a guest that has lost its balloon only goes on, and its kernel with its pattern.
            self.handle(Event::PagePoison(None));
        }
        self.log.front_end_gone(device);
        self.leave_if_unused();
    }

    /// A front end that is connected, of either device.
    pub(super) fn front_end(&self) -> Option<Connected> {
        let connections = self.front_ends.values().map(|front_end| front_end.connection);
        let mut connected = connections.filter(|connection| !matches!(connection, Connection::None));
        connected.next().map(|connection| Connected { pid: connection.peer().and_then(|peer| peer.pid) })
    }

    pub(super) fn is_connected(&self, device: DeviceKind) -> bool {
        self.front_ends.get(&device).is_some_and(|front_end| !matches!(front_end.connection, Connection::None))
    }

    pub(super) fn memory_map(&mut self, device: DeviceKind, regions: Vec<MemoryRegion>, done: Fence) {
        let fence = self.hold(done);
        self.handle(Event::MapChanged { device, fence });
        let regions = regions
            .into_iter()
            .map(|region| backing::Region {
                guest_address: region.guest_address,
                bytes: region.size,
                file: region.file,
                file_offset: region.file_offset,
            })
            .collect();
        let unsuitable = |detail: String| vec![(Gate::BackingUnsuitable, detail)];
        let built = MemoryMap::new(regions)
            .map_err(|error| unsuitable(error.to_string()))
            .and_then(|map| GuestBacking::new(map).map_err(|error| unsuitable(crate::error_chain(&error))))
            .and_then(|backing| {
                let taken = self.take_files(device, Some(&backing));
                taken.map(|()| backing).map_err(|other| {
                    unsuitable(format!("VM {other} has the same memory file: give each VM its own memory backend"))
                })
            });
        match built {
            Ok(backing) => {
                let pid = self.front_ends.get(&device).and_then(|front_end| front_end.connection.pid());
                let mapping = pid.map(|pid| Arc::new(Mapping::new(pid, backing.file_ids().collect())));
                self.set_backing(device, Some(Arc::new(backing)), Vec::new());
                if let Some(front_end) = self.front_ends.get_mut(&device) {
                    front_end.mapping = mapping;
                }
            }
            Err(gates) => self.set_backing(device, None, gates),
        }
        // What the process holds is looked at before the first report anyway.
        self.next_inspection = Duration::ZERO;
    }

    /// Takes the memory files of both devices, with this map for `device`.
    fn take_files(&self, device: DeviceKind, backing: Option<&GuestBacking>) -> Result<(), String> {
        let others = self.front_ends.iter().filter(|(other, _)| **other != device);
        let others = others.filter_map(|(_, other)| other.backing.as_deref());
        let files: Vec<_> = others.chain(backing).flat_map(GuestBacking::file_ids).collect();
        self.config.memory_files.take(&self.config.name, &files)
    }

    pub(super) fn set_backing(
        &mut self,
        device: DeviceKind,
        backing: Option<Arc<GuestBacking>>,
        gates: Vec<(Gate, String)>,
    ) {
        if device == DeviceKind::Vsock {
            let layout = backing.clone().map(|backing| Box::new(MapLayout(backing)) as Box<dyn Layout>);
            self.session.set_layout(layout);
            self.page_size_gates.clear();
        }
        if backing.is_none() {
            // Taking less conflicts with nobody.
            let _ = self.take_files(device, None);
        }
        if let Some(front_end) = self.front_ends.get_mut(&device) {
            front_end.backing = backing;
            front_end.mapping = None;
            front_end.gates = gates;
        }
        self.backing_gates();
    }

    /// The agent has named its huge page size.
    pub(super) fn check_huge_page_size(&mut self) {
        let backing = self.front_ends.get(&DeviceKind::Vsock).and_then(|front_end| front_end.backing.as_ref());
        if let (Some(size), Some(backing)) = (self.session.huge_page_size(), backing) {
            let checked = backing.check_huge_page_size(size);
            self.page_size_gates =
                checked.err().map(|error| (Gate::BackingUnsuitable, error.to_string())).into_iter().collect();
            self.backing_gates();
        }
    }

    /// One gate closes for one reason that a person reads; the first found will do.
    fn backing_gates(&mut self) {
        let of_maps = self.front_ends.values().flat_map(|front_end| &front_end.gates);
        let mut gates: Vec<(Gate, String)> = Vec::new();
        for (gate, detail) in of_maps.chain(&self.page_size_gates) {
            if gates.iter().all(|(known, _)| known != gate) {
                gates.push((*gate, detail.clone()));
            }
        }
        self.handle(Event::Gates(GateSource::Backing, gates));
    }

    /// Whose memory the VM is: both devices show the same guest.
    pub(super) fn subject(&self) -> Subject {
        let pid = self.front_ends.values().find_map(|front_end| front_end.connection.pid());
        let backing = self.front_ends.values().find_map(|front_end| front_end.backing.as_deref());
        let files = backing.map(GuestBacking::files).unwrap_or_default();
        Subject { pid: pid.map(Pid::as_raw), cgroup: None, files }
    }

    pub(super) fn account(&self) -> Account {
        let backing = self.front_ends.values().find_map(|front_end| front_end.backing.as_deref());
        let guest_claimed_free_bytes = match self.session.agent() {
            AgentStatus::Active { stats: Some(stats), .. } => Some(stats.memory_free_bytes),
            _ => None,
        };
        let obstacle = match self.session.drain_obstacle() {
            Some(DrainError::Gated(gates)) => Some(Obstacle::Gated { gates }),
            Some(_) => Some(Obstacle::NoAgent),
            None => None,
        };
        let guest_bytes = backing.map(|backing| backing.map().bytes());
        Account { subject: self.subject(), guest_bytes, guest_claimed_free_bytes, obstacle }
    }

    /// When to look into the processes again; `None` while that is under way or there is nothing to look at.
    pub(super) fn inspection_due(&self) -> Option<Duration> {
        let any = self.front_ends.values().any(|front_end| front_end.backing.is_some());
        (any && !self.inspecting).then_some(self.next_inspection)
    }

    pub(super) fn inspect(&mut self) {
        let now = boot_now();
        let busy = now.saturating_sub(self.last_report) < IDLE_AFTER
            || self.session.closed_gates().iter().any(|gate| gate.source == GateSource::Process);
        self.next_inspection = if busy { now + INSPECT_BUSY } else { on_grid(now + INSPECT_IDLE, IDLE_GRID) };
        let device = self.front_ends.keys().copied().find(|device| self.target(*device).is_some());
        if let Some((device, target)) = device.and_then(|device| Some((device, self.target(device)?)))
            && let Some(front_end) = self.front_ends.get(&device)
        {
            self.inspecting = true;
            front_end.worker.order(Work::Inspect(target));
        }
    }

    /// What a worker of this device works on. It looks into the processes of both front ends.
    pub(super) fn target(&self, device: DeviceKind) -> Option<Target> {
        let backing = Arc::clone(self.front_ends.get(&device)?.backing.as_ref()?);
        let mut processes: Vec<Option<Pid>> = Vec::new();
        for front_end in self.front_ends.values() {
            let pid = front_end.connection.pid();
            if !matches!(front_end.connection, Connection::None) && !processes.contains(&pid) {
                processes.push(pid);
            }
        }
        let mappings = self.front_ends.values().filter_map(|front_end| front_end.mapping.clone()).collect();
        let (proc_root, rings) = (self.config.proc_root.clone(), Arc::clone(&self.rings));
        Some(Target { backing, processes, mappings, proc_root, rings })
    }
}

/// The session's view of a VM's memory.
struct MapLayout(Arc<GuestBacking>);

impl Layout for MapLayout {
    fn regions(&self) -> Vec<Region> {
        let regions = self.0.map().regions().iter();
        regions.map(|region| Region { start: region.guest_address, bytes: region.bytes }).collect()
    }

    fn check(&self, ranges: &[HugePageRange], size: HugePageSize) -> Vec<Result<usize, Refusal>> {
        self.0.map().locate_report(ranges, size).into_iter().map(|span| span.map(|span| span.region)).collect()
    }

    fn region_of(&self, address: GuestAddress) -> Option<usize> {
        self.0.map().locate_bytes(address, 1).ok().map(|span| span.region)
    }
}
