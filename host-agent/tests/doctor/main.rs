//! `doctor` on fake trees of /proc, /sys and cgroups, with fake QEMUs, and as a built program on this machine.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

#[path = "../daemon/mod.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod daemon;
mod host;
mod program;
mod tree;
mod vm;
