//! The only place that knows bincode.
//!
//! bincode is unmaintained (RUSTSEC-2025-0141; version 3.0.0 does not compile), the project's owner chose it all the
//! same. So it stays behind these two functions, with a size limit, and `tests/golden.rs` pins the bytes: another
//! codec can take its place. Encoding: little-endian, variable-length integers, as bincode 2's standard configuration.

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};

/// Largest payload of a frame in bytes. Checked before anything is allocated.
pub const MAX_PAYLOAD: usize = 64 * 1024;

const CONFIG: Configuration<LittleEndian, Varint, Limit<MAX_PAYLOAD>> =
    bincode::config::standard().with_limit::<MAX_PAYLOAD>();

/// Why a payload is no message.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// Truncated, over the limit or not what the type allows.
    #[error("payload of {length} bytes does not decode")]
    Decode {
        /// Bytes in the payload.
        length: usize,
        /// What the codec says.
        #[source]
        source: DecodeError,
    },
    /// More bytes than the message has.
    #[error("{trailing} bytes left over after the message")]
    Trailing {
        /// How many.
        trailing: usize,
    },
    /// Our own message is larger than a frame may be.
    #[error("message does not fit into {MAX_PAYLOAD} bytes")]
    Encode {
        /// What the codec says.
        #[source]
        source: EncodeError,
    },
}

pub(crate) fn encode<T: Encode>(value: &T) -> Result<Vec<u8>, CodecError> {
    let bytes = bincode::encode_to_vec(value, CONFIG).map_err(|source| CodecError::Encode { source })?;
    if bytes.len() > MAX_PAYLOAD {
        return Err(CodecError::Encode { source: EncodeError::Other("over the payload limit") });
    }
    Ok(bytes)
}

pub(crate) fn decode<T: Decode<()>>(payload: &[u8]) -> Result<T, CodecError> {
    let (value, read) = bincode::decode_from_slice(payload, CONFIG)
        .map_err(|source| CodecError::Decode { length: payload.len(), source })?;
    if read != payload.len() {
        return Err(CodecError::Trailing { trailing: payload.len() - read });
    }
    Ok(value)
}
