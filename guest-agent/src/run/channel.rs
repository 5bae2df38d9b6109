//! The stream to the host agent: connecting, again and again, and frames over it. Never blocks.
//!
//! Over vsock the agent binds a port below 1024: that takes CAP_NET_BIND_SERVICE in the guest, so the host can tell it
//! from any other process (`LAST_RESERVED_PORT`, net/vmw_vsock/af_vsock.c).

use fpr_protocol::frame::encode;
use fpr_protocol::{Frame, FrameDecoder, Message};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrLike, UnixAddr, VsockAddr, bind, connect, getsockopt, socket, sockopt,
};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// CID of the host (`VMADDR_CID_HOST`, include/uapi/linux/vm_sockets.h).
const HOST_CID: u32 = 2;
/// Any CID of ours (`VMADDR_CID_ANY`).
const ANY_CID: u32 = u32::MAX;
/// Ports tried for our end, from the top.
const RESERVED_PORTS: std::ops::RangeInclusive<u32> = 512..=1023;

/// First pause before connecting again, and the longest.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Bytes waiting to be sent beyond which the host is taken for dead. A pass has a few reports of some KiB on the way.
const MAX_BACKLOG: usize = 1 << 20;
/// Bytes read at a time.
const READ: usize = 16 * 1024;

/// Where the host agent is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A vsock CID and port.
    Vsock {
        /// Context id; 2 is the host.
        cid: u32,
        /// Port.
        port: u32,
    },
    /// A Unix socket, for tests and proxies.
    Unix(PathBuf),
}

impl Default for Address {
    fn default() -> Self {
        Self::Vsock { cid: HOST_CID, port: fpr_protocol::PORT }
    }
}

/// What is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no address: write vsock:CID:PORT (vsock:2:6713458 is the default) or unix:/path")]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = || AddressError(text.to_owned());
        match text.split_once(':').ok_or_else(error)? {
            ("vsock", rest) => {
                let (cid, port) = rest.split_once(':').ok_or_else(error)?;
                let number = |text: &str| text.parse().map_err(|_| error());
                Ok(Self::Vsock { cid: number(cid)?, port: number(port)? })
            }
            ("unix", path) if path.starts_with('/') => Ok(Self::Unix(PathBuf::from(path))),
            _ => Err(error()),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// What the channel has to say.
#[derive(Debug)]
pub enum ChannelEvent {
    /// Connected.
    Up,
    /// Lost, and why. It is tried again by itself.
    Down(String),
    /// A message came.
    Message(Message),
}

enum State {
    /// Not before this time.
    Waiting(Duration),
    Connecting(File),
    Up(Box<Stream>),
}

struct Stream {
    file: File,
    decoder: FrameDecoder,
    outgoing: Vec<u8>,
}

/// The stream and its state.
pub struct Channel {
    address: Address,
    state: State,
    back_off: Duration,
    /// Pause is stretched at random by this so that guests do not come back all at once after a host restart.
    jitter: u64,
}

impl Channel {
    /// Nothing is connected before the first [`Channel::service`].
    #[must_use]
    pub fn new(address: Address, jitter: u64) -> Self {
        Self { address, state: State::Waiting(Duration::ZERO), back_off: BACK_OFF.0, jitter }
    }

    /// Descriptor and whether it is wanted for writing, for poll(2).
    #[must_use]
    pub fn interest(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        match &self.state {
            State::Waiting(_) => None,
            State::Connecting(file) => Some((file.as_fd(), Interest::Write)),
            State::Up(stream) if stream.outgoing.is_empty() => Some((stream.file.as_fd(), Interest::Read)),
            State::Up(stream) => Some((stream.file.as_fd(), Interest::Both)),
        }
    }

    /// When [`Channel::service`] is wanted although the descriptor is quiet.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        match self.state {
            State::Waiting(until) => Some(until),
            _ => None,
        }
    }

    /// Does what can be done without waiting.
    pub fn service(&mut self, now: Duration) -> Vec<ChannelEvent> {
        let mut events = Vec::new();
        if let Err(error) = self.step(now, &mut events) {
            self.close(now);
            events.push(ChannelEvent::Down(crate::error_chain(&error)));
        }
        events
    }

    fn step(&mut self, now: Duration, events: &mut Vec<ChannelEvent>) -> io::Result<()> {
        if let State::Waiting(until) = self.state {
            if until > now {
                return Ok(());
            }
            self.state = State::Connecting(open(&self.address)?);
        }
        if let State::Connecting(file) = &self.state {
            if !is_connected(file)? {
                return Ok(());
            }
            let file = file.try_clone()?;
            self.state = State::Up(Box::new(Stream { file, decoder: FrameDecoder::default(), outgoing: Vec::new() }));
            events.push(ChannelEvent::Up);
        }
        let State::Up(stream) = &mut self.state else { return Ok(()) };
        stream.flush()?;
        if stream.read(events)? {
            self.back_off = BACK_OFF.0;
        }
        Ok(())
    }

    /// Queues a message and sends what fits. Without a connection it goes nowhere: the agent starts over with `Hello`.
    pub fn send(&mut self, message: &Message, now: Duration) -> Option<ChannelEvent> {
        let State::Up(stream) = &mut self.state else { return None };
        let queued = match encode(message) {
            Ok(bytes) if stream.outgoing.len() + bytes.len() <= MAX_BACKLOG => {
                stream.outgoing.extend_from_slice(&bytes);
                stream.flush()
            }
            Ok(_) => Err(io::Error::new(ErrorKind::TimedOut, "the host does not read what it is sent")),
            Err(error) => Err(io::Error::new(ErrorKind::InvalidData, error)),
        };
        queued.err().map(|error| {
            self.close(now);
            ChannelEvent::Down(crate::error_chain(&error))
        })
    }

    /// Closes; the next attempt comes after the pause.
    pub fn close(&mut self, now: Duration) {
        let jitter = Duration::from_millis(self.jitter % 64);
        self.jitter = self.jitter.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.state = State::Waiting(now + self.back_off + jitter);
        self.back_off = (self.back_off * 2).min(BACK_OFF.1);
    }
}

/// What to poll for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// POLLIN.
    Read,
    /// POLLOUT.
    Write,
    /// Both.
    Both,
}

impl Stream {
    fn flush(&mut self) -> io::Result<()> {
        while !self.outgoing.is_empty() {
            match self.file.write(&self.outgoing) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.outgoing.drain(..written)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what is there; true if a whole message came.
    fn read(&mut self, events: &mut Vec<ChannelEvent>) -> io::Result<bool> {
        let mut any = false;
        let mut buffer = [0; READ];
        loop {
            match self.file.read(&mut buffer) {
                Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "the host closed the connection")),
                Ok(read) => self.decoder.push(buffer.get(..read).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(any),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            loop {
                match self.decoder.next_frame() {
                    Ok(Some(Frame::Message(message))) => {
                        any = true;
                        events.push(ChannelEvent::Message(message));
                    }
                    Ok(Some(Frame::Skipped { .. })) => {}
                    Ok(None) => break,
                    Err(error) => return Err(io::Error::new(ErrorKind::InvalidData, error)),
                }
            }
        }
    }
}

fn open(address: &Address) -> io::Result<File> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let family = match address {
        Address::Vsock { .. } => AddressFamily::Vsock,
        Address::Unix(_) => AddressFamily::Unix,
    };
    let socket = socket(family, SockType::Stream, flags, None)?;
    match address {
        Address::Vsock { cid, port } => {
            bind_reserved_port(&socket)?;
            start_connecting(&socket, &VsockAddr::new(*cid, *port))?;
        }
        Address::Unix(path) => start_connecting(&socket, &UnixAddr::new(path)?)?,
    }
    Ok(File::from(socket))
}

fn bind_reserved_port(socket: &OwnedFd) -> io::Result<()> {
    for port in RESERVED_PORTS.rev() {
        match bind(socket.as_raw_fd(), &VsockAddr::new(ANY_CID, port)) {
            Err(Errno::EADDRINUSE) => {}
            result => return Ok(result?),
        }
    }
    Err(Errno::EADDRINUSE.into())
}

fn start_connecting(socket: &OwnedFd, address: &dyn SockaddrLike) -> io::Result<()> {
    match connect(socket.as_raw_fd(), address) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn is_connected(file: &File) -> io::Result<bool> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut fds = [PollFd::new(file.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut fds, PollTimeout::ZERO)? == 0 {
        return Ok(false);
    }
    match getsockopt(file, sockopt::SocketError)? {
        0 => Ok(true),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn addresses() {
        assert_eq!("vsock:2:6713458".parse(), Ok(Address::default()));
        assert_eq!("unix:/run/x".parse(), Ok(Address::Unix("/run/x".into())));
        for text in ["", "vsock", "vsock:2", "vsock:x:1", "unix:rel", "tcp:1:2"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
        assert_eq!(Address::default().to_string().parse(), Ok(Address::default()));
    }

    #[test]
    fn it_connects_exchanges_frames_and_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let mut channel = Channel::new(Address::Unix(path.clone()), 0);
        let mut now = Duration::ZERO;
        assert!(matches!(channel.service(now)[..], [ChannelEvent::Down(_)]), "nobody listens");
        for _ in 0..20 {
            now = channel.next_deadline().unwrap();
            channel.service(now);
        }
        assert!(channel.next_deadline().unwrap() - now <= BACK_OFF.1 + Duration::from_millis(64));

        let listener = UnixListener::bind(&path).unwrap();
        now = channel.next_deadline().unwrap();
        assert!(matches!(channel.service(now)[..], [ChannelEvent::Up]));
        let (mut host, _) = listener.accept().unwrap();
        assert!(channel.send(&Message::Resume, now).is_none());
        let frame = encode(&Message::Resume).unwrap();
        let mut got = vec![0; frame.len()];
        host.read_exact(&mut got).unwrap();
        assert_eq!(got, frame);
        host.write_all(&frame).unwrap();
        assert!(matches!(channel.service(now)[..], [ChannelEvent::Message(Message::Resume)]));
        host.write_all(b"rubbish!").unwrap();
        let events = channel.service(now);
        assert!(matches!(&events[..], [ChannelEvent::Down(why)] if why.contains("magic")), "{events:?}");
        assert_eq!(channel.interest().map(|(_, interest)| interest), None);
    }

    #[test]
    fn a_host_that_does_not_read_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut channel = Channel::new(Address::Unix(path), 0);
        channel.service(Duration::ZERO);
        let _host = listener.accept().unwrap();
        let lost = (0..1_000_000).find_map(|_| channel.send(&Message::Ping { id: 1 }, Duration::ZERO));
        assert!(matches!(lost, Some(ChannelEvent::Down(_))));
    }
}
