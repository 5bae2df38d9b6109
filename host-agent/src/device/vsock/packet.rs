//! The virtio-vsock packet header: 44 bytes, packed, little-endian (virtio 1.2, section 5.10.6, `struct virtio_vsock_hdr`).
//!
//! Called by the backend, which copies headers out of and into descriptor chains, and by the muxer. Trusts nothing:
//! any 44 bytes parse into a [`Header`], and [`Header::validate`] says whether they make sense as a stream packet.
//!
//! The header is read here and not through the `virtio-vsock` crate because that crate wants the payload in one
//! descriptor, while Linux since 6.17 sends large payloads as several fragments (`virtio_transport_alloc_skb` makes
//! nonlinear buffers). A test checks that both agree on every field.

use super::fault::Fault;

/// Size of a packet header in bytes.
pub(super) const HEADER_LEN: usize = 44;

/// CID of the host (virtio 1.2, section 5.10.4: the well-known CID 2; `VMADDR_CID_HOST`).
pub(super) const HOST_CID: u64 = 2;

/// `VIRTIO_VSOCK_TYPE_STREAM` (virtio 1.2, section 5.10.6).
pub(super) const TYPE_STREAM: u16 = 1;

/// Most payload bytes in one packet: `VIRTIO_VSOCK_MAX_PKT_BUF_SIZE` of Linux (include/linux/virtio_vsock.h), which
/// no Linux driver exceeds. The specification itself names no limit.
pub(super) const MAX_PAYLOAD: usize = 64 * 1024;

/// `VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE`: the sender of the flag will receive no more data.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_F_SEND`: the sender of the flag will send no more data.
pub(super) const SHUTDOWN_SEND: u32 = 2;

/// `enum virtio_vsock_op` (virtio 1.2, section 5.10.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Operation {
    /// Connect.
    Request = 1,
    /// Accept.
    Response = 2,
    /// The connection is over, or never was.
    Rst = 3,
    /// One or both directions are finished; see the flags.
    Shutdown = 4,
    /// Payload.
    Rw = 5,
    /// The sender's `buf_alloc` and `fwd_cnt`, unasked or asked.
    CreditUpdate = 6,
    /// Asks for a credit update.
    CreditRequest = 7,
}

impl Operation {
    fn from_wire(op: u16) -> Option<Self> {
        [Self::Request, Self::Response, Self::Rst, Self::Shutdown, Self::Rw, Self::CreditUpdate, Self::CreditRequest]
            .into_iter()
            .find(|known| *known as u16 == op)
    }
}

/// A packet header, fields as on the wire, whatever their values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    /// Payload bytes that follow the header.
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    /// The sender's whole receive buffer for this stream, in bytes.
    pub(super) buf_alloc: u32,
    /// Bytes the sender has taken out of that buffer so far, modulo 2^32.
    pub(super) fwd_cnt: u32,
}

impl Header {
    /// Reads the fields; every bit pattern is a header.
    pub(super) fn parse(bytes: &[u8; HEADER_LEN]) -> Self {
        Self {
            src_cid: u64::from_le_bytes(field(bytes, 0)),
            dst_cid: u64::from_le_bytes(field(bytes, 8)),
            src_port: u32::from_le_bytes(field(bytes, 16)),
            dst_port: u32::from_le_bytes(field(bytes, 20)),
            len: u32::from_le_bytes(field(bytes, 24)),
            kind: u16::from_le_bytes(field(bytes, 28)),
            op: u16::from_le_bytes(field(bytes, 30)),
            flags: u32::from_le_bytes(field(bytes, 32)),
            buf_alloc: u32::from_le_bytes(field(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(field(bytes, 40)),
        }
    }

    /// The header as it goes on the wire.
    pub(super) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// The operation of a well-formed stream packet.
    ///
    /// # Errors
    /// [`Fault::UnknownType`], [`Fault::UnknownOperation`], or [`Fault::BadLength`] when the length is over
    /// [`MAX_PAYLOAD`] or an operation other than RW announces a payload.
    pub(super) fn validate(&self) -> Result<Operation, Fault> {
        if self.kind != TYPE_STREAM {
            return Err(Fault::UnknownType);
        }
        let op = Operation::from_wire(self.op).ok_or(Fault::UnknownOperation)?;
        let limit = if op == Operation::Rw { MAX_PAYLOAD } else { 0 };
        if usize::try_from(self.len).map_or(true, |len| len > limit) {
            return Err(Fault::BadLength);
        }
        Ok(op)
    }

    /// Whether the packet says that the connection is over; such a packet is never answered, or two peers could
    /// exchange resets for ever.
    pub(super) fn is_rst(&self) -> bool {
        self.op == Operation::Rst as u16
    }

    /// The reset that answers this packet: addresses swapped, same type, no payload.
    pub(super) fn rst_reply(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: Operation::Rst as u16,
            ..Self::default()
        }
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

/// A packet on its way into the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;
    use virtio_queue::desc::{RawDescriptor, split::Descriptor};
    use virtio_queue::mock::MockSplitQueue;
    use virtio_vsock::packet::VsockPacket;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    fn stream(op: u16, len: u32) -> Header {
        Header { kind: TYPE_STREAM, op, len, ..Header::default() }
    }

    #[test]
    fn validation_names_the_fault() {
        assert_eq!(stream(1, 0).validate(), Ok(Operation::Request));
        assert_eq!(stream(5, 65_536).validate(), Ok(Operation::Rw));
        assert_eq!(stream(5, 65_537).validate(), Err(Fault::BadLength));
        assert_eq!(stream(5, u32::MAX).validate(), Err(Fault::BadLength));
        assert_eq!(stream(1, 1).validate(), Err(Fault::BadLength));
        assert_eq!(stream(0, 0).validate(), Err(Fault::UnknownOperation));
        assert_eq!(stream(8, 0).validate(), Err(Fault::UnknownOperation));
        assert_eq!(Header { kind: 2, ..stream(1, 0) }.validate(), Err(Fault::UnknownType));
    }

    proptest! {
        #[test]
        fn bytes_round_trip(bytes in proptest::array::uniform32(any::<u8>()), tail in proptest::array::uniform12(any::<u8>())) {
            let mut wire = [0; HEADER_LEN];
            wire[..32].copy_from_slice(&bytes);
            wire[32..].copy_from_slice(&tail);
            prop_assert_eq!(Header::parse(&wire).to_bytes(), wire);
        }
    }

    /// An independent reader of the same structure sees the same fields.
    #[test]
    fn agrees_with_the_virtio_vsock_crate() {
        let header = Header {
            src_cid: 0x0102_0304_0506_0708,
            dst_cid: 2,
            src_port: 0x1112_1314,
            dst_port: 0x2122_2324,
            len: 16,
            kind: 1,
            op: 5,
            flags: 0x3132_3334,
            buf_alloc: 0x4142_4344,
            fwd_cnt: 0x5152_5354,
        };
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
        memory.write_slice(&header.to_bytes(), GuestAddress(0x8_0000)).unwrap();
        let queue = MockSplitQueue::new(&memory, 16);
        let descriptor = RawDescriptor::from(Descriptor::new(0x8_0000, 0x100, 0, 0));
        let mut chain = queue.build_desc_chain(&[descriptor]).unwrap();

        let seen = VsockPacket::from_tx_virtq_chain(&memory, &mut chain, 0x1000).unwrap();

        assert_eq!(seen.src_cid(), header.src_cid);
        assert_eq!(seen.dst_cid(), header.dst_cid);
        assert_eq!(seen.src_port(), header.src_port);
        assert_eq!(seen.dst_port(), header.dst_port);
        assert_eq!(seen.len(), header.len);
        assert_eq!(seen.type_(), header.kind);
        assert_eq!(seen.op(), header.op);
        assert_eq!(seen.flags(), header.flags);
        assert_eq!(seen.buf_alloc(), header.buf_alloc);
        assert_eq!(seen.fwd_cnt(), header.fwd_cnt);
    }
}
