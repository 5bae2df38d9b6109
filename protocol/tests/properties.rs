//! What holds for every message, every stream and every stranger's bytes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use fpr_protocol::codec::{CodecError, MAX_PAYLOAD};
use fpr_protocol::frame::{self, HEADER_LEN, MAGIC};
use fpr_protocol::message::{
    Ack, FreedPages, Hello, Limits, Prove, Proven, RangeResult, Region, Report, Stats, Survey, SurveyReply, Welcome, id,
};
use fpr_protocol::{
    BackedRange, CloseReason, Frame, FrameDecoder, FrameError, Gate, GuestAddress, HugePageRange, Isolation,
    MAX_PROOFS, MAX_REGIONS, MAX_REPORT_RANGES, MAX_STRING, MAX_SURVEY_RANGES, Message, PassEnd, Refusal,
    ReportedRange, Version, VersionRange,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

// Most numbers in the world are small; the encoding has a different length for each size.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..300u64, any::<u16>().prop_map(u64::from), any::<u32>().prop_map(u64::from), any::<u64>()]
}

fn number32() -> impl Strategy<Value = u32> {
    prop_oneof![0..300u32, any::<u16>().prop_map(u32::from), any::<u32>()]
}

fn versions() -> impl Strategy<Value = VersionRange> {
    (any::<u16>(), any::<u16>()).prop_map(|(o, n)| VersionRange { oldest: Version(o), newest: Version(n) })
}

fn range() -> impl Strategy<Value = HugePageRange> {
    (number(), number32()).prop_map(|(start, count)| HugePageRange { start: GuestAddress(start), count })
}

fn hello() -> impl Strategy<Value = Message> {
    let freed = select(vec![FreedPages::Untouched, FreedPages::Zeroed, FreedPages::Poisoned, FreedPages::Unknown]);
    let words = (".{0,20}", any::<[u8; 16]>(), ".{0,20}");
    (versions(), words, (number32(), any::<u8>(), number(), number()), (freed, any::<bool>(), number())).prop_map(
        |(versions, (agent_version, boot_id, kernel_release), sizes, (freed_pages, confidential, now_ns))| {
            Message::Hello(Hello {
                versions,
                agent_version,
                boot_id,
                page_size: sizes.0,
                huge_page_order: sizes.1,
                memory_block_bytes: sizes.2,
                memory_total_bytes: sizes.3,
                kernel_release,
                freed_pages,
                confidential,
                now_ns,
            })
        },
    )
}

fn welcome() -> impl Strategy<Value = Message> {
    let limits = (number32(), number32(), number32(), number32()).prop_map(|l| Limits {
        max_report_ranges: l.0,
        max_huge_pages_in_flight: l.1,
        lease_ms: l.2,
        grace_ms: l.3,
    });
    let region = (number(), number()).prop_map(|(start, bytes)| Region { start: GuestAddress(start), bytes });
    (any::<u16>(), number(), limits, vec(select(Gate::ALL), 0..12), vec(region, 0..20)).prop_map(
        |(version, session_nonce, limits, gates, regions)| {
            Message::Welcome(Welcome { version: Version(version), session_nonce, limits, gates, regions })
        },
    )
}

fn report() -> impl Strategy<Value = Message> {
    let isolation = select(vec![Isolation::Offlined, Isolation::Claimed]);
    let reported = (range(), isolation).prop_map(|(range, isolation)| ReportedRange { range, isolation });
    (number(), number(), vec(reported, 0..40))
        .prop_map(|(sequence, sent_at_ns, ranges)| Message::Report(Report { sequence, sent_at_ns, ranges }))
}

fn ack() -> impl Strategy<Value = Message> {
    let result = prop_oneof![
        number().prop_map(|bytes| RangeResult::Dropped { bytes }),
        select(Refusal::ALL).prop_map(RangeResult::Refused),
    ];
    (number(), vec(result, 0..40)).prop_map(|(sequence, results)| Message::Ack(Ack { sequence, results }))
}

fn stats() -> impl Strategy<Value = Message> {
    ((number(), number(), number(), number()), (number32(), number32()), (number(), number(), number())).prop_map(
        |(memory, psi, agent)| {
            Message::Stats(Stats {
                memory_total_bytes: memory.0,
                memory_free_bytes: memory.1,
                memory_available_bytes: memory.2,
                page_cache_bytes: memory.3,
                psi_some_avg10_centipercent: psi.0,
                psi_full_avg10_centipercent: psi.1,
                huge_pages_offlined: agent.0,
                huge_pages_claimed: agent.1,
                agent_cpu_ms: agent.2,
            })
        },
    )
}

fn message() -> impl Strategy<Value = Message> {
    let backed = (range(), number()).prop_map(|(range, backed_bytes)| BackedRange { range, backed_bytes });
    prop_oneof![
        hello(),
        welcome(),
        report(),
        ack(),
        stats(),
        (number(), vec(number().prop_map(GuestAddress), 0..20))
            .prop_map(|(sequence, pages)| Message::Prove(Prove { sequence, pages })),
        (number(), vec(any::<bool>(), 0..20), number32())
            .prop_map(|(sequence, regions, mismatches)| Message::Proven(Proven { sequence, regions, mismatches })),
        (number(), vec(range(), 0..40)).prop_map(|(sequence, ranges)| Message::Survey(Survey { sequence, ranges })),
        (number(), vec(backed, 0..40))
            .prop_map(|(sequence, backed)| Message::SurveyReply(SurveyReply { sequence, backed })),
        vec(select(Gate::ALL), 0..12).prop_map(Message::Inhibit),
        Just(Message::Resume),
        number().prop_map(|id| Message::Ping { id }),
        (number(), number()).prop_map(|(id, now_ns)| Message::Pong { id, now_ns }),
        number().prop_map(|id| Message::Reclaim { id }),
        (number(), 0..PassEnd::ALL.len()).prop_map(|(id, end)| Message::Reclaimed { id, end: PassEnd::ALL[end] }),
        any::<bool>().prop_map(|active| Message::KernelReporting { active }),
        (number(), number())
            .prop_map(|(dropped_bytes, returned_bytes)| Message::Refaults { dropped_bytes, returned_bytes }),
        select(CloseReason::ALL).prop_map(|reason| Message::Goodbye { reason }),
    ]
}

/// A frame around any payload.
fn frame_of(version: u16, id: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// What the decoder makes of `bytes`, given all at once.
fn decode(bytes: &[u8]) -> Result<Option<Frame>, FrameError> {
    let mut decoder = FrameDecoder::default();
    decoder.push(bytes);
    decoder.next_frame()
}

proptest! {
    #[test]
    fn messages_survive_any_cut_of_the_stream(
        messages in vec(message(), 1..6),
        cuts in vec(1..80usize, 1..8),
    ) {
        let stream: Vec<u8> = messages.iter().flat_map(|m| frame::encode(m).unwrap()).collect();
        let mut decoder = FrameDecoder::default();
        let mut decoded = Vec::new();
        let mut rest = stream.as_slice();
        for cut in cuts.into_iter().cycle() {
            let (piece, later) = rest.split_at(cut.min(rest.len()));
            decoder.push(piece);
            while let Some(frame) = decoder.next_frame().unwrap() {
                decoded.push(frame);
            }
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(decoder.pending(), 0);
        prop_assert_eq!(decoded, messages.into_iter().map(Frame::Message).collect::<Vec<_>>());
    }

    #[test]
    fn arbitrary_bytes_never_panic_nor_pile_up(
        valid_header in any::<bool>(),
        (id, length) in (select(id::ALL), 0..=MAX_PAYLOAD),
        pieces in vec((vec(any::<u8>(), 1..40), 1..200usize), 0..30),
    ) {
        let mut decoder = FrameDecoder::default();
        if valid_header {
            let header = frame_of(0x0100, id.0, &[]);
            decoder.push(&header[..8]);
            decoder.push(&u32::try_from(length).unwrap().to_le_bytes());
        }
        'stream: for (bytes, times) in pieces {
            decoder.push(&bytes.repeat(times));
            loop {
                match decoder.next_frame() {
                    Ok(Some(_)) => {}
                    // What is kept is less than one whole frame.
                    Ok(None) => break prop_assert!(decoder.pending() < HEADER_LEN + MAX_PAYLOAD),
                    Err(_) => break 'stream,
                }
            }
        }
    }

    #[test]
    fn a_truncated_frame_waits_and_a_truncated_payload_is_refused(message in message(), cut in any::<prop::sample::Index>()) {
        let whole = frame::encode(&message).unwrap();
        let payload = &whole[HEADER_LEN..];
        prop_assert!(matches!(decode(&whole[..cut.index(whole.len())]), Ok(None)));
        if !payload.is_empty() {
            let short = frame_of(0x0100, message.id(), &payload[..cut.index(payload.len())]);
            let error = decode(&short).unwrap_err();
            prop_assert!(
                matches!(error, FrameError::Payload { id, source: CodecError::Decode { .. } } if id == message.id()),
                "{:?}", error
            );
        }
    }

    #[test]
    fn trailing_bytes_are_counted_and_refused(message in message(), extra in vec(any::<u8>(), 1..20)) {
        let mut payload = frame::encode(&message).unwrap()[HEADER_LEN..].to_vec();
        payload.extend_from_slice(&extra);
        let error = decode(&frame_of(0x0100, message.id(), &payload)).unwrap_err();
        prop_assert!(
            matches!(error, FrameError::Payload { source: CodecError::Trailing { trailing }, .. } if trailing == extra.len()),
            "{:?}", error
        );
    }

    #[test]
    fn an_oversized_length_is_refused_from_the_header_alone(
        id in any::<u16>(),
        length in u32::try_from(MAX_PAYLOAD + 1).unwrap()..,
    ) {
        let mut header = frame_of(0x0100, id, &[]);
        header[8..].copy_from_slice(&length.to_le_bytes());
        let refused = matches!(decode(&header), Err(FrameError::Oversized { length: l }) if l == length);
        prop_assert!(refused);
    }

    #[test]
    fn a_wrong_magic_is_refused_after_four_bytes(found in any::<[u8; 4]>()) {
        prop_assume!(found != MAGIC);
        let refused = matches!(decode(&found), Err(FrameError::Magic { found: f }) if f == found);
        prop_assert!(refused);
    }

    #[test]
    fn another_major_version_is_refused(version in any::<u16>(), id in any::<u16>()) {
        prop_assume!(version >> 8 != 1);
        let result = decode(&frame_of(version, id, &[]));
        let refused = matches!(result, Err(FrameError::Version { found }) if found == Version(version));
        prop_assert!(refused);
    }

    #[test]
    fn an_unknown_id_is_an_error_today_and_skipped_from_a_newer_minor(
        unknown in any::<u16>(),
        minor in 1..=0xffu16,
        payload in vec(any::<u8>(), 0..100),
    ) {
        prop_assume!(id::ALL.iter().all(|(id, _)| *id != unknown));
        let result = decode(&frame_of(0x0100, unknown, &payload));
        let refused = matches!(result, Err(FrameError::UnknownMessage { id, .. }) if id == unknown);
        prop_assert!(refused);

        let mut decoder = FrameDecoder::default();
        decoder.push(&frame_of(0x0100 | minor, unknown, &payload));
        decoder.push(&frame::encode(&Message::Resume).unwrap());
        prop_assert_eq!(decoder.next_frame().unwrap(), Some(Frame::Skipped { id: unknown }));
        prop_assert_eq!(decoder.next_frame().unwrap(), Some(Frame::Message(Message::Resume)));
    }

    #[test]
    fn negotiation_agrees_with_trying_every_version(
        (a, b) in ((0..30u16, 0..30u16), (0..30u16, 0..30u16)),
    ) {
        let range = |(o, n): (u16, u16)| VersionRange { oldest: Version(o), newest: Version(n) };
        let naive = (0..30u16).rev().find(|v| (a.0..=a.1).contains(v) && (b.0..=b.1).contains(v)).map(Version);
        prop_assert_eq!(range(a).newest_common(range(b)), naive);
        prop_assert_eq!(range(b).newest_common(range(a)), naive);
    }
}

#[test]
fn the_largest_allowed_messages_fit_into_a_frame_and_back() {
    let page = HugePageRange { start: GuestAddress(u64::MAX), count: u32::MAX };
    let region = Region { start: GuestAddress(u64::MAX), bytes: u64::MAX };
    let limits = Limits {
        max_report_ranges: u32::MAX,
        max_huge_pages_in_flight: u32::MAX,
        lease_ms: u32::MAX,
        grace_ms: u32::MAX,
    };
    let reported = ReportedRange { range: page, isolation: Isolation::Claimed };
    let backed = BackedRange { range: page, backed_bytes: u64::MAX };
    for message in [
        Message::Hello(Hello {
            versions: VersionRange::SUPPORTED,
            agent_version: "v".repeat(MAX_STRING),
            boot_id: [0xff; 16],
            page_size: u32::MAX,
            huge_page_order: u8::MAX,
            memory_block_bytes: u64::MAX,
            memory_total_bytes: u64::MAX,
            kernel_release: "k".repeat(MAX_STRING),
            freed_pages: FreedPages::Unknown,
            confidential: true,
            now_ns: u64::MAX,
        }),
        Message::Welcome(Welcome {
            version: Version(u16::MAX),
            session_nonce: u64::MAX,
            limits,
            gates: Gate::ALL.to_vec(),
            regions: vec![region; MAX_REGIONS],
        }),
        Message::Prove(Prove { sequence: u64::MAX, pages: vec![GuestAddress(u64::MAX); MAX_PROOFS] }),
        Message::Proven(Proven { sequence: u64::MAX, regions: vec![true; MAX_REGIONS], mismatches: u32::MAX }),
        Message::Survey(Survey { sequence: u64::MAX, ranges: vec![page; MAX_SURVEY_RANGES] }),
        Message::SurveyReply(SurveyReply { sequence: u64::MAX, backed: vec![backed; MAX_SURVEY_RANGES] }),
        Message::Report(Report { sequence: u64::MAX, sent_at_ns: u64::MAX, ranges: vec![reported; MAX_REPORT_RANGES] }),
        Message::Ack(Ack {
            sequence: u64::MAX,
            results: vec![RangeResult::Dropped { bytes: u64::MAX }; MAX_REPORT_RANGES],
        }),
    ] {
        let bytes = frame::encode(&message).unwrap_or_else(|e| panic!("{}: {e}", message.name()));
        assert_eq!(decode(&bytes).unwrap(), Some(Frame::Message(message)));
    }
}

#[test]
fn a_message_over_the_limit_is_not_encoded() {
    let range = HugePageRange { start: GuestAddress(u64::MAX), count: u32::MAX };
    let message = Message::Survey(Survey { sequence: 0, ranges: vec![range; 5000] });
    assert!(matches!(frame::encode(&message), Err(CodecError::Encode { .. })));
}

#[test]
fn the_payload_limit_is_exact() {
    // A message nobody knows, so that only the length is judged.
    let largest = frame_of(0x0101, 0xffff, &[0; MAX_PAYLOAD]);
    assert_eq!(decode(&largest).unwrap(), Some(Frame::Skipped { id: 0xffff }));
    let larger = frame_of(0x0101, 0xffff, &[0; MAX_PAYLOAD + 1]);
    assert!(matches!(decode(&larger), Err(FrameError::Oversized { .. })));
}
