//! The wire format, byte by byte, and the document that describes it.
//!
//! `docs/protocol.md` is what the author of another agent reads, so it is tested like code: its examples are these
//! bytes, its tables name every message and every reason with its number. After a change that is meant, run
//! `FPR_UPDATE_DOCS=1 cargo test -p fpr-protocol --test golden` to rewrite the examples.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "golden/examples.rs"]
mod examples;

use fpr_protocol::codec::MAX_PAYLOAD;
use fpr_protocol::message::id;
use fpr_protocol::{
    CloseReason, Cookie, Frame, FrameDecoder, Gate, GuestAddress, Message, PassEnd, Refusal, frame,
    message::RangeResult,
};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;

const BEGIN: &str = "<!-- examples: begin, written by protocol/tests/golden.rs -->\n";
const END: &str = "<!-- examples: end -->\n";

fn document_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/protocol.md")
}

fn document() -> String {
    std::fs::read_to_string(document_path()).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn messages_encode_to_the_golden_bytes() {
    for golden in examples::all() {
        let bytes = frame::encode(&golden.message).unwrap();
        assert_eq!(hex(&bytes), hex(&golden.bytes()), "{}", golden.message.name());
    }
}

#[test]
fn golden_bytes_decode_to_the_messages() {
    for golden in examples::all() {
        let mut decoder = FrameDecoder::default();
        decoder.push(&golden.bytes());
        assert_eq!(decoder.next_frame().unwrap(), Some(Frame::Message(golden.message)));
        assert_eq!(decoder.pending(), 0);
    }
}

#[test]
fn every_message_id_has_an_example() {
    let examples: BTreeSet<u16> = examples::all().iter().map(|g| g.message.id()).collect();
    let ids: BTreeSet<u16> = id::ALL.iter().map(|(id, _)| *id).collect();
    assert_eq!(examples, ids);
    assert_eq!(ids.len(), id::ALL.len(), "an id is used twice");
}

#[test]
fn a_cookie_is_these_bytes() {
    let cookie =
        Cookie { session_nonce: 0x1122_3344_5566_7788, sequence: 3, index: 1, address: GuestAddress(0x1_0020_0000) };
    let wanted = "66 70 72 2d 70 61 67 65 88 77 66 55 44 33 22 11 03 00 00 00 00 00 00 00 01 00 00 00 00 00 20 00 01 00 \
                  00 00";
    assert_eq!(hex(&cookie.to_bytes()), wanted);
    // The document prints the same bytes, broken up by field.
    let printed: String = document()
        .split_once("### Cookie example\n")
        .expect("the document has a cookie example")
        .1
        .split("```")
        .nth(1)
        .unwrap()
        .lines()
        .skip(1)
        .map(|line| line.split("  ").next().unwrap().to_owned() + " ")
        .collect();
    assert_eq!(printed.trim(), wanted);
}

/// The examples as the document shows them.
fn rendered_examples() -> String {
    let mut text = String::new();
    for golden in examples::all() {
        let width = golden.lines.iter().map(|(hex, _)| hex.len()).max().unwrap();
        writeln!(text, "\n### Example: {}\n\n{}\n\n```text", golden.message.name(), golden.what).unwrap();
        for (hex, meaning) in golden.lines {
            writeln!(text, "{hex:width$}  {meaning}").unwrap();
        }
        text.push_str("```\n");
    }
    text.push('\n');
    text
}

#[test]
fn the_document_shows_the_golden_bytes() {
    let document = document();
    let (before, rest) = document.split_once(BEGIN).expect("the document marks where the examples begin");
    let (shown, after) = rest.split_once(END).expect("the document marks where the examples end");
    let wanted = rendered_examples();
    if std::env::var_os("FPR_UPDATE_DOCS").is_some() {
        // By rename: the other tests read the document at the same time.
        let new = document_path().with_extension("md.new");
        std::fs::write(&new, format!("{before}{BEGIN}{wanted}{END}{after}")).unwrap();
        std::fs::rename(new, document_path()).unwrap();
        return;
    }
    assert_eq!(shown, wanted, "run again with FPR_UPDATE_DOCS=1 if the change is meant");
}

/// Rows `| number | `word` | …` in the section under `heading`.
fn table(document: &str, heading: &str) -> Vec<(usize, String)> {
    let section = document.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no heading {heading}")).1;
    let section = section.split("\n#").next().unwrap();
    section
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
            let number = cells.next()?.parse().ok()?;
            Some((number, cells.next()?.trim_matches('`').to_owned()))
        })
        .collect()
}

#[test]
fn the_document_lists_every_message() {
    let wanted: Vec<(usize, String)> =
        id::ALL.iter().map(|(id, name)| (usize::from(*id), (*name).to_owned())).collect();
    assert_eq!(table(&document(), "## Messages"), wanted);
}

#[test]
fn the_document_lists_every_reason_by_its_wire_number() {
    /// Last byte of the frame: the number on the wire of a reason that the message ends with.
    fn last_byte(message: &Message) -> usize {
        usize::from(*frame::encode(message).unwrap().last().unwrap())
    }
    let document = document();
    let gates: Vec<_> =
        Gate::ALL.iter().map(|g| (last_byte(&Message::Inhibit(vec![*g])), g.word().to_owned())).collect();
    assert_eq!(table(&document, "### Gates"), gates);
    let refusals: Vec<_> = Refusal::ALL
        .iter()
        .map(|r| {
            let ack = fpr_protocol::message::Ack { sequence: 0, results: vec![RangeResult::Refused(*r)] };
            (last_byte(&Message::Ack(ack)), r.word().to_owned())
        })
        .collect();
    assert_eq!(table(&document, "### Refusals"), refusals);
    let reasons: Vec<_> =
        CloseReason::ALL.iter().map(|r| (last_byte(&Message::Goodbye { reason: *r }), r.word().to_owned())).collect();
    assert_eq!(table(&document, "### Close reasons"), reasons);
    let ends: Vec<_> = PassEnd::ALL
        .iter()
        .map(|end| (last_byte(&Message::Reclaimed { id: 0, end: *end }), end.word().to_owned()))
        .collect();
    assert_eq!(table(&document, "### Ends of a pass"), ends);
}

#[test]
fn the_document_states_the_limits_of_the_code() {
    let document = document();
    for (name, value) in [
        ("port", u64::from(fpr_protocol::PORT)),
        ("payload of a frame, bytes", MAX_PAYLOAD as u64),
        ("ranges in a `Report`", fpr_protocol::MAX_REPORT_RANGES as u64),
        ("ranges in a `Survey` or `SurveyReply`", fpr_protocol::MAX_SURVEY_RANGES as u64),
        ("pages in a `Prove`", fpr_protocol::MAX_PROOFS as u64),
        ("regions in a `Welcome`", fpr_protocol::MAX_REGIONS as u64),
        ("bytes in a string", fpr_protocol::MAX_STRING as u64),
        ("bytes in a cookie", Cookie::LEN as u64),
    ] {
        let row = format!("| {name} | {value} |");
        assert!(document.contains(&row), "missing: {row}");
    }
}
