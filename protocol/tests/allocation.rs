//! A peer's length prefix cannot make the decoder allocate more than a frame may hold.

#![deny(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(unsafe_code)]
#[path = "allocation/sys/mod.rs"]
mod sys;

use fpr_protocol::codec::{CodecError, MAX_PAYLOAD};
use fpr_protocol::frame::MAGIC;
use fpr_protocol::message::id;
use fpr_protocol::{FrameDecoder, FrameError};

/// The bytes of each message up to a length prefix, and the size of one element in memory.
const PREFIXES: &[(u16, &[u8], u64)] = &[
    // `agent_version` of Hello.
    (id::Hello, &[1, 1], 1),
    // `gates` and `regions` of Welcome.
    (id::Welcome, &[1, 0, 0, 0, 0, 0], 1),
    (id::Welcome, &[1, 0, 0, 0, 0, 0, 0], 16),
    (id::Prove, &[0], 8),
    (id::Proven, &[0], 1),
    (id::Survey, &[0], 16),
    (id::SurveyReply, &[0], 24),
    (id::Report, &[0, 0], 24),
    (id::Ack, &[0], 16),
    (id::Inhibit, &[], 1),
];

fn frame(id: u16, prefix: &[u8], elements: u64, filler: &[u8]) -> Vec<u8> {
    let mut payload = prefix.to_vec();
    payload.push(0xfd);
    payload.extend_from_slice(&elements.to_le_bytes());
    payload.extend_from_slice(filler);
    payload.truncate(MAX_PAYLOAD);
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&0x0100u16.to_le_bytes());
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    bytes.extend_from_slice(&payload);
    bytes
}

/// Decodes one frame that must be refused; gives the largest allocation made for it.
fn refused(bytes: &[u8]) -> usize {
    let mut decoder = FrameDecoder::default();
    decoder.push(bytes);
    let (result, largest) = sys::largest_allocation(|| decoder.next_frame());
    assert!(
        matches!(result, Err(FrameError::Payload { source: CodecError::Decode { .. }, .. })),
        "{result:?} for {:02x?}",
        &bytes[..bytes.len().min(40)]
    );
    largest
}

#[test]
fn the_allocator_sees_what_is_asked_for() {
    let (_, largest) = sys::largest_allocation(|| Vec::<u64>::with_capacity(1000));
    assert_eq!(largest, 8000);
}

#[test]
fn a_claim_of_more_than_a_frame_allocates_nothing_for_it() {
    for (id, prefix, size) in PREFIXES {
        let over = MAX_PAYLOAD as u64 / size + 1;
        for elements in [over, 1 << 32, 1 << 60, u64::MAX] {
            for filler in [&[][..], &[0; MAX_PAYLOAD]] {
                let largest = refused(&frame(*id, prefix, elements, filler));
                assert!(largest < 256, "message {id}: {elements} elements made it allocate {largest} bytes");
            }
        }
    }
}

#[test]
fn a_claim_within_a_frame_allocates_at_most_a_frame() {
    for (id, prefix, size) in PREFIXES {
        let most = (MAX_PAYLOAD as u64 - 64) / size;
        let largest = refused(&frame(*id, prefix, most, &[]));
        assert!(largest <= MAX_PAYLOAD, "message {id}: {largest} bytes");
    }
}
