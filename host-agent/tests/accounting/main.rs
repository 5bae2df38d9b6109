//! The accounting readers: fake trees of /proc, /sys and cgroups in every layout, every failure, and real processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

#[path = "../daemon/mod.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod daemon;
mod failures;
mod layouts;
mod program;
mod real;
mod tree;
