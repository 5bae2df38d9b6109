//! Frames: a fixed little-endian header and one message.
//!
//! ```text
//! 0      4         6    8        12
//! | FPRP | version | id | length | payload …
//! ```
//! The length is checked against [`MAX_PAYLOAD`] before anything is stored, so a peer can make the decoder hold at
//! most one frame.

use crate::codec::{CodecError, MAX_PAYLOAD};
use crate::message::Message;
use crate::version::Version;

/// First four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"FPRP";

/// Length of the header in bytes.
pub const HEADER_LEN: usize = 12;

/// Why bytes are no frame. After any of these the stream cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Not our protocol.
    #[error("wrong magic {found:02x?}, expected {MAGIC:02x?}")]
    Magic {
        /// What was there.
        found: [u8; 4],
    },
    /// Another major version.
    #[error("unsupported version {found}, this build speaks {}", crate::VersionRange::SUPPORTED)]
    Version {
        /// What was there.
        found: Version,
    },
    /// More than a frame may hold.
    #[error("payload of {length} bytes is larger than {MAX_PAYLOAD}")]
    Oversized {
        /// What the header says.
        length: u32,
    },
    /// An id that the header's version does not have.
    #[error("unknown message id {id} in version {version}")]
    UnknownMessage {
        /// The id.
        id: u16,
        /// The header's version.
        version: Version,
    },
    /// The payload is not the message that the header says.
    #[error("message id {id}")]
    Payload {
        /// The id.
        id: u16,
        /// Why.
        #[source]
        source: CodecError,
    },
}

/// One decoded frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message.
    Message(Message),
    /// A message of a newer minor version that this build does not know; skip it.
    Skipped {
        /// Its id.
        id: u16,
    },
}

/// Writes `message` as one frame.
pub fn encode(message: &Message) -> Result<Vec<u8>, CodecError> {
    let payload = message.encode_payload()?;
    let mut bytes = Vec::with_capacity(HEADER_LEN + payload.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&Version::CURRENT.0.to_le_bytes());
    bytes.extend_from_slice(&message.id().to_le_bytes());
    // `encode_payload` keeps to MAX_PAYLOAD, which fits.
    bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&payload);
    Ok(bytes)
}

/// Cuts a byte stream into frames. Feed it with [`FrameDecoder::push`], then call [`FrameDecoder::next_frame`] until
/// it says `None`.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    read: usize,
}

struct Header {
    version: Version,
    id: u16,
    length: u32,
}

impl FrameDecoder {
    /// Adds bytes from the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.read > 0 {
            self.buffer.drain(..self.read);
            self.read = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Bytes held back because their frame is not whole yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.buffer.len() - self.read
    }

    /// The next frame, or `None` until more bytes come.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let bytes = &self.buffer[self.read..];
        // The magic is judged as soon as it is there, so that a stranger is not waited for.
        if bytes.len() >= 4 && bytes[..4] != MAGIC {
            return Err(FrameError::Magic { found: [bytes[0], bytes[1], bytes[2], bytes[3]] });
        }
        if bytes.len() < HEADER_LEN {
            return Ok(None);
        }
        let header = Header {
            version: Version(u16::from_le_bytes([bytes[4], bytes[5]])),
            id: u16::from_le_bytes([bytes[6], bytes[7]]),
            length: u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
        };
        if header.version.major() != Version::CURRENT.major() {
            return Err(FrameError::Version { found: header.version });
        }
        let length = match usize::try_from(header.length) {
            Ok(length) if length <= MAX_PAYLOAD => length,
            _ => return Err(FrameError::Oversized { length: header.length }),
        };
        let Some(payload) = bytes.get(HEADER_LEN..HEADER_LEN + length) else {
            return Ok(None);
        };
        let decoded = Message::decode_payload(header.id, payload);
        self.read += HEADER_LEN + length;
        match decoded {
            Some(Ok(message)) => Ok(Some(Frame::Message(message))),
            Some(Err(source)) => Err(FrameError::Payload { id: header.id, source }),
            None if header.version > Version::CURRENT => Ok(Some(Frame::Skipped { id: header.id })),
            None => Err(FrameError::UnknownMessage { id: header.id, version: header.version }),
        }
    }
}
