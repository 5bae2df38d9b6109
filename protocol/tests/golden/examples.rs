//! One example of every message, with its bytes.
//!
//! The bytes were made by a separate encoder that follows `docs/protocol.md`, not by this crate, so that the crate and
//! the document check each other. A byte that changes here is a new major version of the protocol.

use fpr_protocol::message::{
    Ack, FreedPages, Hello, Limits, Prove, Proven, RangeResult, Region, Report, Stats, Survey, SurveyReply, Welcome,
};
use fpr_protocol::{
    BackedRange, CloseReason, Gate, GuestAddress, HugePageRange, Isolation, Message, PassEnd, Refusal, ReportedRange,
    Version, VersionRange,
};

/// A message and the bytes of its frame.
pub(crate) struct Golden {
    /// What is being said, one sentence.
    pub(crate) what: &'static str,
    pub(crate) message: Message,
    /// The frame in pieces: hexadecimal bytes and what they are. The first piece is the header.
    pub(crate) lines: &'static [(&'static str, &'static str)],
}

impl Golden {
    /// The frame.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.lines
            .iter()
            .flat_map(|(hex, _)| hex.split(' '))
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect()
    }
}

/// In the order of their ids.
pub(crate) fn all() -> Vec<Golden> {
    vec![
        Golden {
            what: "An agent opens a session: x86-64, 4 KiB pages, blocks of 128 MiB, 2 GiB of memory.",
            message: Message::Hello(Hello {
                versions: VersionRange { oldest: Version(0x0100), newest: Version(0x0100) },
                agent_version: "0.1.0".into(),
                boot_id: *b"\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f",
                page_size: 4096,
                huge_page_order: 9,
                memory_block_bytes: 128 << 20,
                memory_total_bytes: 2 << 30,
                kernel_release: "6.12.0".into(),
                freed_pages: FreedPages::Untouched,
                confidential: false,
                now_ns: 5_000_000_000,
            }),
            lines: &[
                ("46 50 52 50 00 01 01 00 3c 00 00 00", "version 1.0, id 1 Hello, payload 60"),
                ("fb 00 01", "versions.oldest 1.0"),
                ("fb 00 01", "versions.newest 1.0"),
                ("05 30 2e 31 2e 30", "agent_version \"0.1.0\""),
                ("10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f", "boot_id"),
                ("fb 00 10", "page_size 4096"),
                ("09", "huge_page_order 9 (u8: raw)"),
                ("fc 00 00 00 08", "memory_block_bytes 128 MiB"),
                ("fc 00 00 00 80", "memory_total_bytes 2 GiB"),
                ("06 36 2e 31 32 2e 30", "kernel_release \"6.12.0\""),
                ("00", "freed_pages untouched"),
                ("00", "confidential false"),
                ("fd 00 f2 05 2a 01 00 00 00", "now_ns 5,000,000,000"),
            ],
        },
        Golden {
            what: "Two claimed pages whose cookies the host is to check.",
            message: Message::Prove(Prove {
                sequence: 1,
                pages: vec![GuestAddress(0x20_0000), GuestAddress(0x1_0000_0000)],
            }),
            lines: &[
                ("46 50 52 50 00 01 02 00 10 00 00 00", "version 1.0, id 2 Prove, payload 16"),
                ("01", "sequence"),
                ("02", "2 pages"),
                ("fc 00 00 20 00", "page 0x200000"),
                ("fd 00 00 00 00 01 00 00 00", "page 0x100000000"),
            ],
        },
        Golden {
            what: "Two runs of free huge pages.",
            message: Message::Survey(Survey {
                sequence: 2,
                ranges: vec![
                    HugePageRange { start: GuestAddress(0x20_0000), count: 3 },
                    HugePageRange { start: GuestAddress(0x800_0000), count: 64 },
                ],
            }),
            lines: &[
                ("46 50 52 50 00 01 03 00 0e 00 00 00", "version 1.0, id 3 Survey, payload 14"),
                ("02", "sequence"),
                ("02", "2 ranges"),
                ("fc 00 00 20 00", "start 0x200000"),
                ("03", "count 3"),
                ("fc 00 00 00 08", "start 0x8000000"),
                ("40", "count 64"),
            ],
        },
        Golden {
            what: "One memory block offlined, two huge pages claimed.",
            message: Message::Report(Report {
                sequence: 3,
                sent_at_ns: 6_000_000_000,
                ranges: vec![
                    ReportedRange {
                        range: HugePageRange { start: GuestAddress(0x800_0000), count: 64 },
                        isolation: Isolation::Offlined,
                    },
                    ReportedRange {
                        range: HugePageRange { start: GuestAddress(0x20_0000), count: 2 },
                        isolation: Isolation::Claimed,
                    },
                ],
            }),
            lines: &[
                ("46 50 52 50 00 01 04 00 19 00 00 00", "version 1.0, id 4 Report, payload 25"),
                ("03", "sequence"),
                ("fd 00 bc a0 65 01 00 00 00", "sent_at_ns 6,000,000,000"),
                ("02", "2 ranges"),
                ("fc 00 00 00 08", "start 0x8000000"),
                ("40", "count 64"),
                ("00", "isolation offlined"),
                ("fc 00 00 20 00", "start 0x200000"),
                ("02", "count 2"),
                ("01", "isolation claimed"),
            ],
        },
        Golden {
            what: "The guest's own figures.",
            message: Message::Stats(Stats {
                memory_total_bytes: 2 << 30,
                memory_free_bytes: 1 << 30,
                memory_available_bytes: 3 << 29,
                page_cache_bytes: 250,
                psi_some_avg10_centipercent: 251,
                psi_full_avg10_centipercent: 0,
                huge_pages_offlined: 640,
                huge_pages_claimed: 65_536,
                agent_cpu_ms: 12,
            }),
            lines: &[
                ("46 50 52 50 00 01 05 00 1d 00 00 00", "version 1.0, id 5 Stats, payload 29"),
                ("fc 00 00 00 80", "memory_total_bytes 2 GiB"),
                ("fc 00 00 00 40", "memory_free_bytes 1 GiB"),
                ("fc 00 00 00 60", "memory_available_bytes 1.5 GiB"),
                ("fa", "page_cache_bytes 250, largest in one byte"),
                ("fb fb 00", "psi_some_avg10_centipercent 2.51 %, smallest in three bytes"),
                ("00", "psi_full_avg10_centipercent"),
                ("fb 80 02", "huge_pages_offlined 640"),
                ("fc 00 00 01 00", "huge_pages_claimed 65,536, smallest in five bytes"),
                ("0c", "agent_cpu_ms"),
            ],
        },
        Golden {
            what: "The guest's clock, in answer to ping 7.",
            message: Message::Pong { id: 7, now_ns: u64::MAX },
            lines: &[
                ("46 50 52 50 00 01 06 00 0a 00 00 00", "version 1.0, id 6 Pong, payload 10"),
                ("07", "id"),
                ("fd ff ff ff ff ff ff ff ff", "now_ns, the largest value"),
            ],
        },
        Golden {
            what: "The end.",
            message: Message::Goodbye { reason: CloseReason::SecondSession },
            lines: &[
                ("46 50 52 50 00 01 07 00 01 00 00 00", "version 1.0, id 7 Goodbye, payload 1"),
                ("05", "reason second-session"),
            ],
        },
        Golden {
            what: "The pass that reclaim 3 asked for has ended.",
            message: Message::Reclaimed { id: 3, end: PassEnd::FoundNothing },
            lines: &[
                ("46 50 52 50 00 01 08 00 02 00 00 00", "version 1.0, id 8 Reclaimed, payload 2"),
                ("03", "id"),
                ("01", "end found-nothing"),
            ],
        },
        Golden {
            what: "The session is open; nothing is dropped while a gate is closed.",
            message: Message::Welcome(Welcome {
                version: Version(0x0100),
                session_nonce: 0x1122_3344_5566_7788,
                limits: Limits { max_report_ranges: 512, max_huge_pages_in_flight: 512, lease_ms: 2000, grace_ms: 200 },
                gates: vec![Gate::WriteOnFree],
                regions: vec![
                    Region { start: GuestAddress(0), bytes: 0xa_0000 },
                    Region { start: GuestAddress(0xc_0000), bytes: 0x7ff4_0000 },
                ],
            }),
            lines: &[
                ("46 50 52 50 00 01 80 00 29 00 00 00", "version 1.0, id 128 Welcome, payload 41"),
                ("fb 00 01", "version 1.0"),
                ("fd 88 77 66 55 44 33 22 11", "session_nonce 0x1122334455667788"),
                ("fb 00 02", "limits.max_report_ranges 512"),
                ("fb 00 02", "limits.max_huge_pages_in_flight 512"),
                ("fb d0 07", "limits.lease_ms 2000"),
                ("c8", "limits.grace_ms 200"),
                ("01", "1 gate"),
                ("04", "write-on-free"),
                ("02", "2 regions"),
                ("00", "start 0x0"),
                ("fc 00 00 0a 00", "bytes 0xa0000"),
                ("fc 00 00 0c 00", "start 0xc0000"),
                ("fc 00 00 f4 7f", "bytes 0x7ff40000"),
            ],
        },
        Golden {
            what: "The second region passed, the first did not.",
            message: Message::Proven(Proven { sequence: 1, regions: vec![false, true], mismatches: 0 }),
            lines: &[
                ("46 50 52 50 00 01 81 00 05 00 00 00", "version 1.0, id 129 Proven, payload 5"),
                ("01", "sequence"),
                ("02", "2 regions"),
                ("00", "region 0 not proven"),
                ("01", "region 1 proven"),
                ("00", "mismatches"),
            ],
        },
        Golden {
            what: "Of the survey, two huge pages are backed, one of them by a single base page.",
            message: Message::SurveyReply(SurveyReply {
                sequence: 2,
                backed: vec![BackedRange {
                    range: HugePageRange { start: GuestAddress(0x20_0000), count: 2 },
                    backed_bytes: 0x20_1000,
                }],
            }),
            lines: &[
                ("46 50 52 50 00 01 82 00 0d 00 00 00", "version 1.0, id 130 SurveyReply, payload 13"),
                ("02", "sequence"),
                ("01", "1 range"),
                ("fc 00 00 20 00", "start 0x200000"),
                ("02", "count 2"),
                ("fc 00 10 20 00", "backed_bytes 0x201000"),
            ],
        },
        Golden {
            what: "The block was dropped, the claimed pages were not.",
            message: Message::Ack(Ack {
                sequence: 3,
                results: vec![RangeResult::Dropped { bytes: 128 << 20 }, RangeResult::Refused(Refusal::CookieMismatch)],
            }),
            lines: &[
                ("46 50 52 50 00 01 83 00 0a 00 00 00", "version 1.0, id 131 Ack, payload 10"),
                ("03", "sequence"),
                ("02", "2 results"),
                ("00", "dropped"),
                ("fc 00 00 00 08", "bytes 128 MiB"),
                ("01", "refused"),
                ("08", "cookie-mismatch"),
            ],
        },
        Golden {
            what: "Two gates are closed.",
            message: Message::Inhibit(vec![Gate::AssignedDevice, Gate::Operator]),
            lines: &[
                ("46 50 52 50 00 01 84 00 03 00 00 00", "version 1.0, id 132 Inhibit, payload 3"),
                ("02", "2 gates"),
                ("00", "assigned-device"),
                ("09", "operator"),
            ],
        },
        Golden {
            what: "All gates are open: a header and nothing else.",
            message: Message::Resume,
            lines: &[("46 50 52 50 00 01 85 00 00 00 00 00", "version 1.0, id 133 Resume, payload 0")],
        },
        Golden {
            what: "Are you there?",
            message: Message::Ping { id: 7 },
            lines: &[("46 50 52 50 00 01 86 00 01 00 00 00", "version 1.0, id 134 Ping, payload 1"), ("07", "id")],
        },
        Golden {
            what: "What can be spared, please.",
            message: Message::Reclaim { id: 3 },
            lines: &[("46 50 52 50 00 01 87 00 01 00 00 00", "version 1.0, id 135 Reclaim, payload 1"), ("03", "id")],
        },
        Golden {
            what: "Of 1 GiB dropped, 64 MiB came back.",
            message: Message::Refaults { dropped_bytes: 1 << 30, returned_bytes: 64 << 20 },
            lines: &[
                ("46 50 52 50 00 01 88 00 0a 00 00 00", "version 1.0, id 136 Refaults, payload 10"),
                ("fc 00 00 00 40", "dropped_bytes 1 GiB"),
                ("fc 00 00 00 04", "returned_bytes 64 MiB"),
            ],
        },
        Golden {
            what: "The guest's kernel reports by itself.",
            message: Message::KernelReporting { active: true },
            lines: &[
                ("46 50 52 50 00 01 89 00 01 00 00 00", "version 1.0, id 137 KernelReporting, payload 1"),
                ("01", "active"),
            ],
        },
    ]
}
