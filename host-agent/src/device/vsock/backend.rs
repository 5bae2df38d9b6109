//! The vhost-user side: queues and requests of one front end.
//!
//! Two threads take turns at it ([`serve`](crate::device::serve)): while a request of the front end waits for the owner
//! behind a fence, the queue thread cannot take a single packet.
//!
//! Descriptor chains and everything in them come from the guest. Every chain goes back to the guest exactly once,
//! whatever it contains, and no guest can make [`handle_event`](VhostUserBackendMut::handle_event) fail, because the
//! crate ends the queue thread when it does.
//!
//! EVENT_IDX is not offered: without it the driver kicks for every chain unless told not to, which costs an exit per
//! packet on a channel of a few packets per second and cannot lose a notification. Neither is INDIRECT_DESC.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackendMut, VringMutex, VringT};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT, Reader, Writer};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryLoadGuard, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use super::Shared;
use super::fault::Fault;
use super::muxer::Outcome;
use super::packet::{HEADER_LEN, Header, MAX_PAYLOAD};
use crate::device::rings::OwnRings;
use crate::device::serve::{Backend, Events, PROTOCOL_FEATURES};
use crate::device::{DeviceEvent, DeviceKind, EndReason, PeerProcess};
use crate::log_limit::RateLimited;

/// rx, tx and event queue (virtio 1.2, section 5.10.2). QEMU serves the event queue itself and sets up the other two.
pub(super) const QUEUES: usize = 3;
const RX: u16 = 0;
const TX: u16 = 1;

/// Largest queue accepted. QEMU makes 128 entries, Cloud Hypervisor 256; more helps nobody here.
const MAX_QUEUE_SIZE: usize = 1024;

/// Chains served per turn. Between turns the lock is free, so that a guest that never pauses cannot keep a request of
/// the front end waiting.
const CHAINS_PER_TURN: usize = 256;

/// `struct virtio_vsock_config`: the guest's CID (virtio 1.2, section 5.10.4).
const CONFIG_LEN: usize = 8;

type Memory = GuestMemoryLoadGuard<GuestMemoryMmap>;
type Chain = DescriptorChain<Memory>;

/// Device state of one front end.
pub(super) struct VsockBackend {
    shared: Arc<Shared>,
    events: Events,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    rings: OwnRings,
    faults: RateLimited,
    ended: bool,
}

impl VsockBackend {
    /// State for a front end that is about to be accepted; `memory` is the map the crate will keep up to date.
    pub(super) fn new(shared: Arc<Shared>, events: Events, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> Self {
        let rings = OwnRings::new(DeviceKind::Vsock);
        Self { shared, events, memory, rings, faults: RateLimited::guest_caused(), ended: false }
    }

    fn end_connections(&self, reason: EndReason) {
        let ended = self.shared.muxer().end_all(reason);
        for event in ended {
            self.events.emit(event);
        }
    }

    /// Ends what ran so far and waits until the owner says that nothing of it is in flight.
    fn stop(&mut self) {
        self.rings.clear(&self.shared.rings);
        self.end_connections(EndReason::DeviceStopped);
        self.events.emit_and_wait(|done| DeviceEvent::Stopped { done });
    }

    fn fault(&mut self, fault: Fault, header: Option<&Header>) {
        if let Some(suppressed) = self.faults.admit(Instant::now()) {
            tracing::warn!(
                vm = %self.shared.control.vm(),
                reason = fault.name(),
                guest_port = header.map(|header| header.src_port),
                port = header.map(|header| header.dst_port),
                suppressed,
                "refused the guest on its vsock device"
            );
        }
    }

    /// A fault below the packet layer, where the muxer does not count.
    fn queue_fault(&mut self, fault: Fault) {
        self.shared.muxer().count(fault);
        self.fault(fault, None);
    }

    fn next_chain(&mut self, queue: u16, vring: &VringMutex) -> Option<Chain> {
        let ready = {
            let state = vring.get_ref();
            state.is_enabled() && state.get_queue().ready()
        };
        if !ready {
            return None;
        }
        self.rings.note(&self.shared.rings, usize::from(queue), vring);
        let mut state = vring.get_mut();
        let next = state.get_queue_mut().iter(self.memory.memory()).map(|mut chains| chains.next());
        drop(state);
        // An index that jumped or a ring outside of memory. The driver is broken and only its own device stops.
        next.unwrap_or_else(|_| {
            self.queue_fault(Fault::BadDescriptor);
            None
        })
    }

    /// Gives a chain back. An index outside of the ring has no descriptor to give back.
    fn give_back(&mut self, vring: &VringMutex, head: u16, written: u32) {
        if vring.add_used(head, written).is_err() {
            self.queue_fault(Fault::BadDescriptor);
        }
    }

    fn signal(&self, vring: &VringMutex) {
        // The call eventfd is the front end's. If it is broken, the guest misses an interrupt, and the front end will
        // notice before we do.
        if let Err(error) = vring.signal_used_queue() {
            tracing::debug!(vm = %self.shared.control.vm(), %error, "cannot signal the guest");
        }
    }

    /// Takes packets from the guest until its queue is empty or the turn is over; true if chains may be left.
    fn serve_tx(&mut self, vring: &VringMutex) -> bool {
        for served in 0..CHAINS_PER_TURN {
            let Some(chain) = self.next_chain(TX, vring) else {
                if served > 0 {
                    self.signal(vring);
                }
                return false;
            };
            let head = chain.head_index();
            let packet = read_packet(&chain);
            self.give_back(vring, head, 0);
            match packet {
                Ok((header, payload)) => {
                    let Outcome { event, fault } = self.shared.muxer().receive(&header, payload);
                    if let Some(fault) = fault {
                        self.fault(fault, Some(&header));
                    }
                    if let Some(event) = event {
                        self.events.emit(event);
                    }
                }
                Err(fault) => self.queue_fault(fault),
            }
        }
        self.signal(vring);
        true
    }

    /// Puts packets into the guest's buffers until either runs out or the turn is over; true if both may be left.
    fn serve_rx(&mut self, vring: &VringMutex) -> bool {
        for served in 0..CHAINS_PER_TURN {
            let chain = if self.shared.muxer().has_packet() { self.next_chain(RX, vring) } else { None };
            let Some(chain) = chain else {
                if served > 0 {
                    self.signal(vring);
                }
                return false;
            };
            let head = chain.head_index();
            let written = self.write_packet(&chain).unwrap_or_else(|fault| {
                self.queue_fault(fault);
                0
            });
            self.give_back(vring, head, written);
        }
        self.signal(vring);
        true
    }

    fn write_packet(&self, chain: &Chain) -> Result<u32, Fault> {
        let mut writer: Writer<'_, ()> = chain.clone().writer(chain.memory()).map_err(|_| Fault::BadDescriptor)?;
        let room = writer.available_bytes().checked_sub(HEADER_LEN).ok_or(Fault::BadLength)?;
        // Only payload is waiting and the buffer has room for none.
        let packet = self.shared.muxer().next_packet(room).ok_or(Fault::BadLength)?;
        // Both fit, and the memory behind the writer was checked when it was made.
        writer.write_all(&packet.header.to_bytes()).map_err(|_| Fault::BadDescriptor)?;
        writer.write_all(&packet.payload).map_err(|_| Fault::BadDescriptor)?;
        u32::try_from(writer.bytes_written()).map_err(|_| Fault::BadLength)
    }
}

/// Copies a packet out of guest memory, once, so that the guest cannot change it after the checks. The payload is as
/// long as the header says or, if the chain is shorter or the length absurd, shorter; the muxer refuses that.
fn read_packet(chain: &Chain) -> Result<(Header, Vec<u8>), Fault> {
    let mut reader: Reader<'_, ()> = chain.clone().reader(chain.memory()).map_err(|_| Fault::BadDescriptor)?;
    let mut bytes = [0; HEADER_LEN];
    reader.read_exact(&mut bytes).map_err(|_| Fault::BadLength)?;
    let header = Header::parse(&bytes);
    let announced = usize::try_from(header.len).unwrap_or(usize::MAX);
    let mut payload = vec![0; announced.min(MAX_PAYLOAD).min(reader.available_bytes())];
    reader.read_exact(&mut payload).map_err(|_| Fault::BadDescriptor)?;
    Ok((header, payload))
}

impl Backend for VsockBackend {
    const NAME: &'static str = "vsock";
    const WAKE: u16 = 4;

    fn announce(&mut self, peer: io::Result<(PeerProcess, OwnedFd)>) {
        let peer = peer.map(|(peer, _)| peer);
        self.events.emit(DeviceEvent::FrontEndConnected { peer });
    }

    fn end(&mut self) {
        self.ended = true;
        self.rings.clear(&self.shared.rings);
        self.end_connections(EndReason::FrontEndGone);
    }
}

impl VhostUserBackendMut for VsockBackend {
    type Bitmap = ();
    type Vring = VringMutex;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        MAX_QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        (1 << VIRTIO_F_VERSION_1) | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        PROTOCOL_FEATURES
    }

    fn set_event_idx(&mut self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let config: [u8; CONFIG_LEN] = self.shared.guest_cid.to_le_bytes();
        let range = usize::try_from(offset).ok().zip(usize::try_from(size).ok());
        let bytes = range.and_then(|(offset, size)| config.get(offset..offset.checked_add(size)?));
        // Empty is the crate's word for "no such part"; the front end gets an error.
        bytes.unwrap_or_default().to_vec()
    }

    fn update_memory(&mut self, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> io::Result<()> {
        self.memory = memory;
        self.events.memory_map(&self.memory)
    }

    fn reset_device(&mut self) {
        self.stop();
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
        let (Some(rx), Some(tx)) = (vrings.get(usize::from(RX)), vrings.get(usize::from(TX))) else { return Ok(()) };
        // A kick of one queue may have been consumed while the other was not ready yet, so each event serves both.
        let more_tx = self.serve_tx(tx);
        let more_rx = self.serve_rx(rx);
        if more_tx || more_rx {
            self.shared.control.wake();
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "backend_tests.rs"]
mod tests;
