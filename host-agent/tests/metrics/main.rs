//! `/metrics` of the built daemon: what it answers to whom, that every metric is set by something, and what is written
//! about them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation, unreachable_pub)]
#![allow(dead_code)] // Of what the tests share, each uses another part.

#[path = "../daemon/mod.rs"]
mod daemon;
#[path = "../mock_guest/mod.rs"]
mod mock_guest;

mod board;
mod docs;
mod http;
mod scenarios;
mod scrape;
