//! Bad input of a guest against the built daemon: each gets a named refusal or a closed connection and is counted,
//! nothing is dropped, and the daemon and its other VM go on.
//!
//! What the guest can send comes in three layers, one table each: packets on its vsock device (`packets`), frames and
//! messages on a connection (`frames`), ranges in a report (`reports`). Silence has tests of its own (`silence`).
//! `good_path` shows that the same mock guest, behaving well, gets its memory dropped: otherwise the tables could pass
//! because nothing works at all.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation, unreachable_pub)]

#[allow(dead_code)] // Each test uses another part of it.
#[path = "../daemon/mod.rs"]
mod daemon;
mod frames;
mod good_path;
#[allow(dead_code)]
#[path = "../mock_guest/mod.rs"]
mod mock_guest;
mod packets;
mod reports;
mod silence;
mod witness;
