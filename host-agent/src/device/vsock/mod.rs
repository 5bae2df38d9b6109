//! The vhost-user virtio-vsock device of one VM: stream connections from the guest to the agent's port.
//!
//! ```text
//!   front end (QEMU) ── vhost-user ──> serve ──> backend ──> muxer ──> connection
//!                                                  │           ^
//!                                      DeviceEvent │           │ DeviceHandle
//!                                                  v           │
//!                                              the owner of the VM
//! ```
//! [`spawn`] is called by whoever sets up a VM; the owner's task receives the events and holds the [`DeviceHandle`].
//! Other ports than the agent's are refused with RST.

mod backend;
mod connection;
pub(crate) mod counters;
pub(crate) mod fault;
mod muxer;
mod packet;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

pub use counters::Counters;

use self::backend::VsockBackend;
use self::fault::Fault;
use self::muxer::Muxer;
use super::serve::{Control, Device, Events};
use super::{ConnectionId, DeviceEvent, ListenError, Rings};

/// CID a guest gets unless the operator says otherwise: the first that is not reserved (0 hypervisor, 1 local, 2 host).
pub const DEFAULT_GUEST_CID: u64 = 3;

/// Events that may wait for the owner. One carries at most 64 KiB, so 64 bound the memory of a slow owner to 4 MiB.
const EVENT_CHANNEL: usize = 64;

/// What makes up the vsock device of one VM.
#[derive(Clone, Debug)]
pub struct VsockConfig {
    /// Name of the VM, for logs.
    pub vm: String,
    /// Where the front end connects.
    pub socket: PathBuf,
    /// The guest's CID, at least 3, below 2^32. Only the guest sees it; two VMs may have the same.
    pub guest_cid: u64,
    /// The port to listen on, `fpr_protocol::PORT`.
    pub port: u32,
    /// The rings of all devices of the VM.
    pub rings: Arc<Rings>,
}

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The CID is reserved (virtio 1.2, section 5.10.4).
    #[error("guest CID {cid} is reserved: use a number from 3 to 4294967294")]
    GuestCid {
        /// The number.
        cid: u64,
    },
    /// No socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No eventfd or no thread.
    #[error("cannot set up the vsock device of VM {vm}: raise the limits of open files and tasks")]
    Os {
        /// Name of the VM.
        vm: String,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
}

/// Why bytes could not be queued for a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The connection is gone, as an event says or will say.
    #[error("the connection is gone")]
    Gone,
    /// The guest does not read. The connection was reset, and no event will say so.
    #[error("the guest does not read what it is sent: connection reset")]
    PeerNotReading,
}

/// Makes the device and its thread. The receiver ends when the device has ended and its socket is removed.
///
/// # Errors
/// See [`SpawnError`]. Nothing is left behind.
pub fn spawn(config: VsockConfig) -> Result<(DeviceHandle, mpsc::Receiver<DeviceEvent>), SpawnError> {
    if !(3..u64::from(u32::MAX)).contains(&config.guest_cid) {
        return Err(SpawnError::GuestCid { cid: config.guest_cid });
    }
    let os = |source| SpawnError::Os { vm: config.vm.clone(), source };
    let socket = super::listen::bind_listener(&config.socket)?;
    let shared = Arc::new(Shared {
        control: Arc::new(Control::new(config.vm.clone()).map_err(os)?),
        rings: Arc::clone(&config.rings),
        guest_cid: config.guest_cid,
        muxer: Mutex::new(Muxer::new(config.guest_cid, config.port)),
    });
    let (sender, receiver) = mpsc::channel(EVENT_CHANNEL);
    let make = {
        let shared = Arc::clone(&shared);
        move |events, memory| VsockBackend::new(Arc::clone(&shared), events, memory)
    };
    Device::spawn(Arc::clone(&shared.control), config.socket.clone(), socket, Events::new(sender), make).map_err(os)?;
    Ok((DeviceHandle { shared }, receiver))
}

/// The owner's way to the device. None of the calls waits for the guest or the front end.
#[derive(Clone)]
pub struct DeviceHandle {
    shared: Arc<Shared>,
}

impl DeviceHandle {
    /// Queues bytes for the guest, all or nothing. Bytes the guest has said it will not receive go nowhere.
    ///
    /// # Errors
    /// See [`SendError`]; either way the connection is no more.
    pub fn send(&self, connection: ConnectionId, bytes: &[u8]) -> Result<(), SendError> {
        self.with_muxer(|muxer| muxer.send(connection, bytes)).map_err(|fault| match fault {
            Fault::PeerNotReading => SendError::PeerNotReading,
            _ => SendError::Gone,
        })
    }

    /// Gives the guest credit for `bytes` of [`DeviceEvent::Data`]: call it when they have been dealt with or copied
    /// out, at the latest when more data is needed to go on. Credit is 64 KiB per connection.
    pub fn consumed(&self, connection: ConnectionId, bytes: usize) {
        self.with_muxer(|muxer| muxer.consume(connection, bytes));
    }

    /// Ends a connection in order: what was sent still arrives. Events that are under way may still name it; no
    /// `Closed` will.
    pub fn close(&self, connection: ConnectionId) {
        self.with_muxer(|muxer| muxer.close(connection));
    }

    /// Ends a connection at once, for a guest that broke the protocol. As with [`close`](Self::close), no `Closed`.
    pub fn reset(&self, connection: ConnectionId) {
        self.with_muxer(|muxer| muxer.reset(connection));
    }

    fn with_muxer<T>(&self, step: impl FnOnce(&mut Muxer) -> T) -> T {
        let mut muxer = self.shared.muxer();
        let result = step(&mut muxer);
        // Most reads announce no credit and need no packet, so the queue thread sleeps on.
        if muxer.has_packet() {
            self.shared.control.wake();
        }
        result
    }

    /// What passed so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.muxer().counters().clone()
    }

    /// Begins the end of the device: the front end is disconnected and the socket removed. The events go on until
    /// their channel ends, and the owner must receive them.
    pub fn shutdown(&self) {
        self.shared.control.shutdown();
    }
}

impl std::fmt::Debug for DeviceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceHandle").field("vm", &self.shared.control.vm()).finish_non_exhaustive()
    }
}

/// What the threads of a device and its handles share.
struct Shared {
    control: Arc<Control>,
    rings: Arc<Rings>,
    guest_cid: u64,
    /// Locked for single steps only, never while anything waits.
    muxer: Mutex<Muxer>,
}

impl Shared {
    /// A panic under the lock is a bug, but no step leaves the muxer half-changed in a way that could harm memory.
    fn muxer(&self) -> MutexGuard<'_, Muxer> {
        self.muxer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
