//! The task of one VM: takes what its devices, workers and operators say to the session and does what the session says.

use super::drain::Asker;
use super::front_end::FrontEnd;
use super::log::VmLog;
use super::status::{self, VmStatus};
use super::worker::{Done, Work, Worker};
use super::{Connected, Leave, Request, VmConfig, boot_now};
use crate::accounting::books::Accounting;
use crate::device::balloon::BalloonHandle;
use crate::device::vsock::{self, SendError};
use crate::device::{Answer, ConnectionId, DeviceEvent, DeviceKind, Done as Fence, Rings};
use crate::session::clock::on_grid;
use crate::session::drain::DrainId;
use crate::session::gates::GateSource;
use crate::session::job::{Job, JobId};
use crate::session::kernel::{KernelReport, KernelReportId};
use crate::session::{Action, Event, Note, Session};
use fpr_protocol::frame::encode;
use fpr_protocol::{FrameDecoder, Gate, Message};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Between two requests for the balloon's statistics; the agent sends its own as often.
const STATISTICS: Duration = Duration::from_secs(10);

/// A device and what comes from it.
type Device<T> = Option<(T, mpsc::Receiver<DeviceEvent>)>;

/// Everything that can wake the task.
pub(super) struct Inbox {
    vsock: mpsc::Receiver<DeviceEvent>,
    balloon: mpsc::Receiver<DeviceEvent>,
    results: mpsc::UnboundedReceiver<Done>,
    requests: mpsc::Receiver<Request>,
}

pub(super) struct Owner {
    pub(super) config: VmConfig,
    pub(super) session: Session,
    pub(super) vsock: Option<vsock::DeviceHandle>,
    pub(super) balloon: Option<BalloonHandle>,
    /// Of both devices.
    pub(super) rings: Arc<Rings>,
    pub(super) front_ends: BTreeMap<DeviceKind, FrontEnd>,
    pub(super) decoders: HashMap<ConnectionId, FrameDecoder>,
    fences: BTreeMap<u64, Fence>,
    next_fence: u64,
    /// Kernel reports that are not answered.
    answers: BTreeMap<KernelReportId, Answer>,
    next_report: u64,
    /// Operators who have closed the gate, and the first job that came after.
    inhibiting: Vec<(JobId, oneshot::Sender<()>)>,
    pub(super) askers: BTreeMap<DrainId, Asker>,
    pub(super) next_drain: u64,
    pub(super) inspecting: bool,
    pub(super) next_inspection: Duration,
    next_statistics: Duration,
    pub(super) last_report: Duration,
    /// What speaks against the huge pages that the agent has named.
    pub(super) page_size_gates: Vec<(Gate, String)>,
    busy: Duration,
    /// What accounting read last.
    accounting: Option<Box<Accounting>>,
    /// Not wanted any more: ends when no front end is connected.
    leaving: bool,
    pub(super) log: VmLog,
}

impl Owner {
    pub(super) fn new(
        config: VmConfig,
        vsock: Device<vsock::DeviceHandle>,
        balloon: Device<BalloonHandle>,
        rings: Arc<Rings>,
        requests: mpsc::Receiver<Request>,
    ) -> std::io::Result<(Self, Inbox)> {
        let (done, results) = mpsc::unbounded_channel();
        let mut front_ends = BTreeMap::new();
        let mut add = |device, name: &str| -> std::io::Result<()> {
            let worker = Worker::start(&format!("{name} {}", config.name), done.clone())?;
            front_ends.insert(device, FrontEnd::new(worker));
            Ok(())
        };
        if vsock.is_some() {
            add(DeviceKind::Vsock, "drop")?;
        }
        if balloon.is_some() {
            add(DeviceKind::Balloon, "ball")?;
        }
        let mut session = Session::new(config.session, random_u64());
        if let Some(reason) = &config.inhibit {
            let gates = vec![(Gate::Operator, reason.clone())];
            session.handle(Event::Gates(GateSource::Operator, gates), boot_now());
        }
        let ((vsock, vsock_events), (balloon, balloon_events)) = (split(vsock), split(balloon));
        let owner = Self {
            log: VmLog::new(&config.name),
            config,
            session,
            vsock,
            balloon,
            rings,
            front_ends,
            decoders: HashMap::new(),
            fences: BTreeMap::new(),
            next_fence: 0,
            answers: BTreeMap::new(),
            next_report: 0,
            inhibiting: Vec::new(),
            askers: BTreeMap::new(),
            next_drain: 0,
            inspecting: false,
            next_inspection: Duration::ZERO,
            next_statistics: Duration::ZERO,
            last_report: Duration::ZERO,
            page_size_gates: Vec::new(),
            busy: Duration::ZERO,
            accounting: None,
            leaving: false,
        };
        Ok((owner, Inbox { vsock: vsock_events, balloon: balloon_events, results, requests }))
    }

    pub(super) async fn run(mut self, mut inbox: Inbox) {
        let (mut asked, mut vsock, mut balloon) = (true, true, true);
        // When both devices have ended nothing can come any more.
        while vsock || balloon {
            let wait = self.next_deadline().saturating_sub(boot_now());
            tokio::select! {
                // Results first: they are what fences wait for. The agent last: however much it sends, the operator is heard,
                // and so are the balloon's events, each of which has somebody waiting for it.
                biased;
                Some(done) = inbox.results.recv() => self.worked(done),
                request = inbox.requests.recv(), if asked => match request {
                    Some(request) => self.request(request),
                    None => {
                        asked = false;
                        self.shut_down();
                    }
                },
                event = inbox.balloon.recv(), if balloon => match event {
                    Some(event) => self.device_event(DeviceKind::Balloon, event),
                    None => balloon = false,
                },
                event = inbox.vsock.recv(), if vsock => match event {
                    Some(event) => self.device_event(DeviceKind::Vsock, event),
                    None => vsock = false,
                },
                () = tokio::time::sleep(wait) => {}
            }
            self.tick();
        }
    }

    fn shut_down(&self) {
        if let Some(vsock) = &self.vsock {
            vsock.shutdown();
        }
        if let Some(balloon) = &self.balloon {
            balloon.shutdown();
        }
    }

    fn next_deadline(&self) -> Duration {
        let statistics = self.wants_statistics().then_some(self.next_statistics);
        let next = [self.session.next_deadline(), self.inspection_due(), statistics].into_iter().flatten().min();
        next.unwrap_or_else(|| boot_now() + Duration::from_secs(3600))
    }

    fn tick(&mut self) {
        let now = boot_now();
        if self.session.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.handle(Event::Tick);
        }
        if self.inspection_due().is_some_and(|due| due <= now) {
            self.inspect();
        }
        if self.wants_statistics() && self.next_statistics <= now {
            self.next_statistics = on_grid(now + STATISTICS / 2, STATISTICS);
            if let Some(balloon) = &self.balloon {
                balloon.request_stats();
            }
        }
    }

    fn wants_statistics(&self) -> bool {
        self.front_ends.get(&DeviceKind::Balloon).is_some_and(|front_end| front_end.backing.is_some())
    }

    fn device_event(&mut self, device: DeviceKind, event: DeviceEvent) {
        match event {
            DeviceEvent::FrontEndConnected { peer } => self.connected(device, peer),
            DeviceEvent::MemoryMap { regions, done } => self.memory_map(device, regions, done),
            DeviceEvent::Connected { connection, .. } => self.opened(connection),
            DeviceEvent::Data { connection, bytes } => self.data(connection, &bytes),
            DeviceEvent::PeerFinished { connection } => self.finished(connection),
            DeviceEvent::Closed { connection, reason } => self.closed(connection, reason),
            DeviceEvent::Stopped { done } => {
                let fence = self.hold(done);
                self.handle(Event::Stopped { device, fence });
                if device == DeviceKind::Vsock && !self.is_connected(DeviceKind::Balloon) {
                    // The guest may have been reset, and the next one's kernel has no balloon to say anything by.
                    self.handle(Event::PagePoison(None));
                }
            }
            DeviceEvent::Reported { source, ranges, taken_after, answer } => {
                self.last_report = boot_now();
                self.next_report += 1;
                let id = KernelReportId(self.next_report);
                self.answers.insert(id, answer);
                self.handle(Event::KernelReported(KernelReport { id, source, ranges, taken_after }));
            }
            DeviceEvent::PagePoison { poison_val } => self.handle(Event::PagePoison(poison_val)),
            DeviceEvent::FrontEndGone { done } => self.front_end_gone(device, done),
        }
    }

    pub(super) fn hold(&mut self, done: Fence) -> u64 {
        self.next_fence += 1;
        self.fences.insert(self.next_fence, done);
        self.next_fence
    }

    fn worked(&mut self, done: Done) {
        match done {
            Done::Job { id, output, busy } => {
                self.busy += busy;
                self.handle(Event::JobFinished(id, output));
                self.answer_inhibiting();
            }
            Done::Inspected(gates) => {
                self.inspecting = false;
                // What was found of a front end that is gone by now is nobody's.
                if self.front_ends.values().any(|front_end| front_end.backing.is_some()) {
                    self.handle(Event::Gates(GateSource::Process, gates));
                }
            }
        }
    }

    fn request(&mut self, request: Request) {
        // An asker that has gone needs no answer.
        match request {
            Request::Status(answer) => drop(answer.send(self.status())),
            Request::Subject(answer) => drop(answer.send(self.subject())),
            Request::Account(answer) => drop(answer.send(self.account())),
            Request::Accounted(accounting) => self.accounting = Some(accounting),
            Request::Inhibit(reason, answer) => {
                self.handle(Event::Gates(GateSource::Operator, vec![(Gate::Operator, reason)]));
                self.inhibiting.push((self.session.next_job(), answer));
                self.answer_inhibiting();
            }
            Request::Resume(answer) => {
                self.handle(Event::Gates(GateSource::Operator, Vec::new()));
                let _ = answer.send(());
            }
            Request::Drain(wait, answer) => self.drain(wait, answer),
            Request::Ping(answer) => drop(answer.send(())),
            // Who gave up waiting has been told that nothing came of it. For `WhenUnused` nobody waits.
            Request::Leave(when, answer) if when != Leave::WhenUnused && answer.is_closed() => {}
            Request::Leave(when, answer) => drop(answer.send(self.leave(when))),
            Request::Stay(answer) => {
                self.leaving = false;
                let _ = answer.send(());
            }
            Request::Shutdown => self.shut_down(),
        }
    }

    fn leave(&mut self, when: Leave) -> Result<(), Connected> {
        match (when, self.front_end()) {
            (Leave::IfUnused, Some(connected)) => return Err(connected),
            (Leave::WhenUnused, Some(_)) => self.leaving = true,
            (Leave::Now, _) | (_, None) => self.shut_down(),
        }
        Ok(())
    }

    /// A VM that is only waited for ends with its last front end.
    pub(super) fn leave_if_unused(&self) {
        if self.leaving && self.front_end().is_none() {
            self.shut_down();
        }
    }

    /// An operator relies on the answer: what was ordered before the gate closed has ended by then.
    fn answer_inhibiting(&mut self) {
        let oldest = self.session.oldest_job();
        let over = |(after, _): &mut (JobId, _)| oldest.is_none_or(|oldest| oldest >= *after);
        for (_, answer) in self.inhibiting.extract_if(.., over) {
            let _ = answer.send(());
        }
    }

    pub(super) fn handle(&mut self, event: Event) {
        for action in self.session.handle(event, boot_now()) {
            match action {
                Action::Send(connection, message) => self.send(connection, &message),
                Action::Close(connection, reason) => {
                    self.log.closed(reason);
                    self.decoders.remove(&connection);
                    if let Some(vsock) = &self.vsock {
                        vsock.close(connection);
                    }
                }
                Action::Start(id, job) => self.start(id, job),
                Action::CancelJobs(device) => {
                    if let Some(front_end) = self.front_ends.get(&device) {
                        front_end.worker.cancel();
                    }
                }
                Action::Answer(report, results) => {
                    if let Some(answer) = self.answers.remove(&report) {
                        answer.send(results);
                    }
                }
                Action::Drained(id, result) => self.drained(id, result),
                Action::FencePassed(fence) => drop(self.fences.remove(&fence)),
                Action::Note(note) => self.note(&note),
            }
        }
    }

    fn send(&mut self, connection: ConnectionId, message: &Message) {
        let Some(vsock) = &self.vsock else { return };
        match encode(message) {
            Ok(bytes) => {
                // A connection that is gone has an event of its own on the way.
                if vsock.send(connection, &bytes) == Err(SendError::PeerNotReading) {
                    self.log.not_reading();
                    // Comes after the actions of this event, so the session never sees itself half-way.
                    self.decoders.remove(&connection);
                    self.handle(Event::NotReading(connection));
                }
            }
            Err(error) => self.log.bug(&error),
        }
    }

    fn start(&mut self, id: JobId, job: Job) {
        let device = job.device();
        let target = self.target(device);
        if let Some(front_end) = self.front_ends.get(&device) {
            front_end.worker.order(Work::Job(id, job, target));
        }
    }

    fn note(&mut self, note: &Note) {
        self.log.note(note);
        if matches!(note, Note::SessionStarted { .. }) {
            self.check_huge_page_size();
        }
    }

    fn status(&self) -> VmStatus {
        status::VmStatus::new(&status::Parts {
            config: &self.config,
            session: &self.session,
            vsock: self.vsock.as_ref().map(vsock::DeviceHandle::counters),
            balloon: self.balloon.as_ref().map(|balloon| (balloon.counters(), balloon.statistics())),
            front_ends: &self.front_ends,
            busy: self.busy,
            accounting: self.accounting.as_deref(),
            now: boot_now(),
        })
    }
}

/// A device that the VM does not have says nothing from the start.
fn split<T>(device: Device<T>) -> (Option<T>, mpsc::Receiver<DeviceEvent>) {
    match device {
        Some((handle, events)) => (Some(handle), events),
        None => (None, mpsc::channel(1).1),
    }
}

fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Seeded from the kernel's random numbers; a nonce has to differ from the last daemon's, it is no secret.
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
