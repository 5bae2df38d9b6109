//! The vhost-user side: queues, configuration space and requests of one front end.
//!
//! Two threads take turns at it ([`serve`](crate::device::serve)). The queue thread keeps its turn from before it takes a
//! chain until it has returned it. So a request of the front end that stops a queue, changes the memory map or the
//! poison value meets no chain in flight, and its answer says so; a guest whose VM was paused in the middle of a report
//! finds its buffers returned.
//!
//! # After the death of a daemon
//! Chains are returned in the order in which they were taken, and the buffer of the statistics stays in its ring
//! until it is returned. So the used index alone says what was served: a front end that lost its daemon sets the next
//! one's available index to it (QEMU's `virtio_queue_restore_last_avail_idx`), and a report that was in flight is served
//! again. That is safe, since the guest has not got it back.
//!
//! # What is trusted
//! The guest with nothing, see [`ReportingQueue`](crate::reporting::ReportingQueue). Every chain goes back to the guest
//! exactly once, and no guest can make [`handle_event`](VhostUserBackendMut::handle_event) fail, because the crate
//! ends the queue thread when it does.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fpr_protocol::Refusal;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackendMut, VringMutex, VringT};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use super::Shared;
use super::config_space::{ConfigSpace, Refused};
use super::fault::Fault;
use super::pace::Cost;
use super::queues::{self, PAGE_POISON, QUEUES, REPORTING, Role, STATS_VQ};
use super::stats::{self, Received, Statistics};
use crate::backing::boot_time;
use crate::device::rings::OwnRings;
use crate::device::serve::{Backend, Events, PROTOCOL_FEATURES};
use crate::device::{Answer, DeviceEvent, DeviceKind, PeerProcess};
use crate::log_limit::RateLimited;
use crate::reporting::{GuestRange, Source};

/// Largest queue accepted. Linux wants 32 entries for reporting (`PAGE_REPORTING_CAPACITY`), QEMU makes 64 to 128.
const MAX_QUEUE_SIZE: usize = 1024;

/// The buffer of the statistics queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Buffer {
    /// The next one goes back unread: nobody asked for what is in it, and it may be as old as the guest's last pause.
    Unasked,
    /// The next one holds what the guest was asked for.
    Asked,
    /// It was read and waits in its ring until somebody wants to know again.
    Read,
}

/// Device state of one front end.
pub(super) struct BalloonBackend {
    shared: Arc<Shared>,
    events: Events,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    features: u64,
    config: ConfigSpace,
    /// The poison value the owner knows of; `None` before this front end has negotiated features.
    told: Option<Option<u32>>,
    buffer: Buffer,
    rings: OwnRings,
    /// A chain waits in its ring for its time ([`pace`](super::pace)), and is counted.
    waiting: bool,
    faults: RateLimited,
    /// The connection, to see whether the front end is still there.
    connection: Option<OwnedFd>,
    ended: bool,
}

impl BalloonBackend {
    /// State for a front end that is about to be accepted; `memory` is the map the crate will keep up to date.
    pub(super) fn new(shared: Arc<Shared>, events: Events, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> Self {
        Self {
            shared,
            events,
            memory,
            features: 0,
            config: ConfigSpace::new(),
            told: None,
            buffer: Buffer::Unasked,
            rings: OwnRings::new(DeviceKind::Balloon),
            waiting: false,
            faults: RateLimited::guest_caused(),
            connection: None,
            ended: false,
        }
    }

    /// Waits until the owner says that nothing is in flight.
    fn stop(&mut self) {
        self.buffer = Buffer::Unasked;
        self.rings.clear(&self.shared.rings);
        self.events.emit_and_wait(|done| DeviceEvent::Stopped { done });
    }

    /// Tells the owner what free pages of the guest hold, if that is news. Reports follow on the same channel.
    fn tell_poison(&mut self) {
        let poison_val = (self.features & PAGE_POISON != 0).then(|| self.config.poison_val());
        if self.told != Some(poison_val) {
            self.told = Some(poison_val);
            self.events.emit(DeviceEvent::PagePoison { poison_val });
        }
    }

    fn fault(&mut self, fault: Fault, queue: Option<usize>) {
        self.shared.state().counters.refuse(fault);
        if let Some(suppressed) = self.faults.admit(Instant::now()) {
            let reason = fault.name();
            tracing::warn!(vm = %self.shared.control.vm(), reason, queue, suppressed, "refused the guest on its balloon device");
        }
    }

    /// Serves at most one chain, so that a guest that never pauses cannot keep a request waiting for longer than one
    /// drop takes; true if there may be more.
    fn serve(&mut self, queue: usize, vring: &VringMutex) -> bool {
        if !is_ready(vring) || self.cut_off() {
            return false;
        }
        self.rings.note(&self.shared.rings, queue, vring);
        self.skip_returned(queue, vring);
        let role = queues::role(queue, self.features);
        // A buffer of statistics goes back when the daemon asks for it, and no sooner.
        if role != Some(Role::Stats) && self.must_wait(vring) {
            return false;
        }
        let served = match role {
            Some(Role::Reporting) => self.give_away(Source::Reported, vring),
            Some(Role::Inflate) => self.give_away(Source::Inflated, vring),
            Some(Role::Stats) => self.serve_stats(vring),
            Some(Role::Deflate) => self.return_unread(vring).inspect(|returned| {
                self.shared.state().counters.deflate_chains += u64::from(*returned);
            }),
            None => self.return_unread(vring).and_then(
                |returned| {
                    if returned { Err(Fault::UnusedQueue) } else { Ok(false) }
                },
            ),
        };
        served.unwrap_or_else(|fault| {
            // The front end takes no turn to stop a queue, only to have that answered: so it may be stopped since it was
            // looked at, and no fault of the guest.
            if fault == Fault::QueueNotUsable && !is_ready(vring) {
                return false;
            }
            self.fault(fault, Some(queue));
            // A chain was returned then; a broken ring is looked at again when the guest kicks.
            fault == Fault::UnusedQueue
        })
    }

    /// Between two chains both indices are the same, since chains are returned in order and one at a time. If a front end
    /// says otherwise, it read the used index before the last chain was returned, and that chain, which the guest has
    /// back, must not be taken again.
    fn skip_returned(&mut self, queue: usize, vring: &VringMutex) {
        let returned = {
            let mut state = vring.get_mut();
            let rings = state.get_queue_mut();
            let (next, returned) = (rings.next_avail(), rings.next_used());
            rings.set_next_avail(returned);
            next != returned
        };
        if returned {
            self.fault(Fault::ReturnedBefore, Some(queue));
        }
    }

    /// Whether chains have to wait in their rings. If one waits in this queue, the queue thread is woken in time.
    fn must_wait(&mut self, vring: &VringMutex) -> bool {
        let Some(wait) = self.shared.wait_for_pace() else {
            self.waiting = false;
            return false;
        };
        let waits = {
            let memory = self.memory.memory();
            let state = vring.get_ref();
            let rings = state.get_queue();
            rings.avail_idx(&*memory, Ordering::Acquire).is_ok_and(|index| index.0 != rings.next_avail())
        };
        if waits {
            if !std::mem::replace(&mut self.waiting, true) {
                self.shared.state().counters.chains_delayed += 1;
            }
            self.shared.control.wake_after(wait);
        }
        true
    }

    /// Whether the connection of the front end has ended. It has then taken the used index for final, so nothing is
    /// returned any more: the next front end's device serves it again. The rings may be another guest's soon.
    fn cut_off(&self) -> bool {
        let Some(connection) = &self.connection else { return false };
        let mut fds = [PollFd::new(connection.as_fd(), PollFlags::empty())];
        let ended = PollFlags::POLLHUP | PollFlags::POLLERR;
        match poll(&mut fds, PollTimeout::ZERO) {
            Ok(_) => fds[0].revents().is_none_or(|found| found.intersects(ended)),
            // Nothing is known; the indices still tell what was returned.
            Err(_) => false,
        }
    }

    /// Takes one chain of memory, has the owner decide and drop, returns the chain.
    fn give_away(&mut self, source: Source, vring: &VringMutex) -> Result<bool, Fault> {
        // Before the chain is taken, see `DeviceEvent::Reported`.
        let taken_after = boot_time().ok();
        let (head, ranges) = {
            let mut state = self.shared.state();
            let queue = state.queue(source);
            let before = queue.counters().descriptors;
            let Some(head) = queue.take(&*self.memory.memory(), vring.get_mut().get_queue_mut())? else {
                return Ok(false);
            };
            let ranges = queue.ranges().to_vec();
            let descriptors = usize::try_from(queue.counters().descriptors - before).unwrap_or(usize::MAX);
            state.pace.charge(Cost::Ranges(ranges.len().max(descriptors)));
            (head, ranges)
        };
        let results = match taken_after {
            Some(taken_after) if !ranges.is_empty() => self.ask_owner(source, ranges, taken_after),
            // Without a clock there is no deadline, and without a deadline no drop.
            _ => Vec::new(),
        };
        if self.cut_off() {
            return Ok(false);
        }
        {
            let mut state = self.shared.state();
            let queue = state.queue(source);
            queue.give_back(&*self.memory.memory(), vring.get_mut().get_queue_mut(), head, results)?;
        }
        self.signal(vring);
        Ok(true)
    }

    /// Blocks until the owner has answered. An owner that is gone drops nothing.
    fn ask_owner(&self, source: Source, ranges: Vec<GuestRange>, taken_after: Duration) -> Vec<Result<u64, Refusal>> {
        let (answer, waiter) = Answer::new();
        self.events.emit(DeviceEvent::Reported { source, ranges, taken_after, answer });
        waiter.wait().unwrap_or_default()
    }

    /// Reads the guest's buffer if it was asked to fill it, gives it back if it is to fill it.
    fn serve_stats(&mut self, vring: &VringMutex) -> Result<bool, Fault> {
        if self.shared.stats_wanted.swap(false, Ordering::SeqCst) && self.buffer == Buffer::Read {
            self.buffer = Buffer::Unasked;
        }
        match self.buffer {
            Buffer::Read => Ok(false),
            Buffer::Unasked => {
                let passed = self.pass_back(vring)?;
                if passed {
                    self.buffer = Buffer::Asked;
                }
                Ok(passed)
            }
            Buffer::Asked => {
                let Some(statistics) = self.read_stats(vring)? else { return Ok(false) };
                self.buffer = Buffer::Read;
                let statistics = statistics?;
                let mut state = self.shared.state();
                state.statistics = Some(Received { statistics, at: Instant::now() });
                state.counters.statistics_received += 1;
                Ok(false)
            }
        }
    }

    /// Reads the next buffer of the queue without taking it; `None` if there is none.
    fn read_stats(&self, vring: &VringMutex) -> Result<Option<Result<Statistics, Fault>>, Fault> {
        let memory = self.memory.memory();
        let mut state = vring.get_mut();
        let queue = state.get_queue_mut();
        // An index that jumped or a ring outside of memory.
        let next = queue.iter(memory).map(|mut chains| chains.next()).map_err(|_| Fault::QueueNotUsable)?;
        let Some(chain) = next else { return Ok(None) };
        queue.go_to_previous_position();
        let mut bytes = Vec::new();
        let read = chain.clone().reader(chain.memory()).map_err(io::Error::other).and_then(
            |reader: virtio_queue::Reader<'_, ()>| reader.take(stats::MAX_LEN as u64).read_to_end(&mut bytes),
        );
        Ok(Some(match read {
            Ok(1..) if bytes.len() % stats::STAT_LEN == 0 => Ok(Statistics::parse(&bytes)),
            _ => Err(Fault::BadStatistics),
        }))
    }

    /// [`pass_back`](Self::pass_back) at the guest's expense.
    fn return_unread(&self, vring: &VringMutex) -> Result<bool, Fault> {
        self.pass_back(vring).inspect(|returned| {
            if *returned {
                self.shared.state().pace.charge(Cost::PassedBack);
            }
        })
    }

    /// Returns the next chain of a queue as it is; false if there is none.
    fn pass_back(&self, vring: &VringMutex) -> Result<bool, Fault> {
        let memory = self.memory.memory();
        let mut state = vring.get_mut();
        let next = state.get_queue_mut().iter(memory).map(|mut chains| chains.next());
        let Some(chain) = next.map_err(|_| Fault::QueueNotUsable)? else { return Ok(false) };
        state.add_used(chain.head_index(), 0).map_err(|_| Fault::BadChainHead)?;
        drop(state);
        self.signal(vring);
        Ok(true)
    }

    fn signal(&self, vring: &VringMutex) {
        // The call eventfd is the front end's. If it is broken, the guest misses an interrupt, and the front end will
        // notice before we do.
        if let Err(error) = vring.signal_used_queue() {
            tracing::debug!(vm = %self.shared.control.vm(), %error, "cannot signal the guest");
        }
    }
}

/// Whether the front end has started the queue and not stopped it.
fn is_ready(vring: &VringMutex) -> bool {
    let state = vring.get_ref();
    state.is_enabled() && state.get_queue().ready()
}

impl Backend for BalloonBackend {
    const NAME: &'static str = "balloon";
    const WAKE: u16 = 6;

    fn announce(&mut self, peer: io::Result<(PeerProcess, OwnedFd)>) {
        let peer = peer.map(|(peer, connection)| {
            self.connection = Some(connection);
            peer
        });
        self.events.emit(DeviceEvent::FrontEndConnected { peer });
    }

    fn end(&mut self) {
        self.ended = true;
        self.rings.clear(&self.shared.rings);
        // The next front end may bring another guest.
        self.shared.state().statistics = None;
    }
}

impl VhostUserBackendMut for BalloonBackend {
    type Bitmap = ();
    type Vring = VringMutex;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        MAX_QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        let device = STATS_VQ | PAGE_POISON | REPORTING;
        device | (1 << VIRTIO_F_VERSION_1) | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn acked_features(&mut self, features: u64) {
        self.features = features;
        self.tell_poison();
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        PROTOCOL_FEATURES
    }

    fn set_event_idx(&mut self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        // Empty is the crate's word for "no such part"; the front end gets an error.
        self.config.read(offset, size).unwrap_or_default().to_vec()
    }

    /// Succeeds whatever the guest writes: a refusal would end the connection of the front end, which only passes on.
    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        match self.config.write(offset, bytes) {
            Ok(()) => {}
            Err(Refused::ReadOnly) => self.fault(Fault::ConfigReadOnly, None),
            Err(Refused::OutOfRange) => self.fault(Fault::ConfigOutOfRange, None),
        }
        if self.told.is_some() {
            self.tell_poison();
        }
        Ok(())
    }

    fn update_memory(&mut self, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> io::Result<()> {
        self.memory = memory;
        self.events.memory_map(&self.memory)
    }

    /// VHOST_USER_RESET_DEVICE: features and configuration space are as new. A guest's reset alone comes as
    /// GET_VRING_BASE, and so does a pause of the VM, after which nobody writes the poison value again: it stays.
    fn reset_device(&mut self) {
        self.stop();
        self.features = 0;
        self.config = ConfigSpace::new();
        self.tell_poison();
    }

    /// GET_VRING_BASE. The crate has marked the queue as not ready, and answers after this returns.
    fn stop_vring(&mut self, _queue_index: u32) -> io::Result<()> {
        self.stop();
        Ok(())
    }

    fn handle_event(
        &mut self,
        device_event: u16,
        _events: EventSet,
        vrings: &[VringMutex],
        _thread_id: usize,
    ) -> io::Result<()> {
        if self.ended {
            return Err(io::Error::other("the front end is gone"));
        }
        if device_event == Self::WAKE {
            self.shared.control.take_wake();
        }
        // A kick may have been consumed while its queue had no role yet, so each event serves all.
        let mut more = false;
        for (queue, vring) in vrings.iter().enumerate() {
            more |= self.serve(queue, vring);
        }
        if more {
            self.shared.control.wake();
        }
        Ok(())
    }
}
