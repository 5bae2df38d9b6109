//! The host side of fpr: takes reports of free guest memory and drops its backing, or says by name why not.
//!
//! Process model, data flow and trust boundary are in `ARCHITECTURE.md`. Layers, each knowing only those below it:
//! `serve` and `control` (the daemon) → `fleet` (all VMs) → `vm` (one task per VM) → `session` (pure decisions) and `device`, `backing`,
//! `process` (I/O).

#![deny(unsafe_code)]

pub mod accounting;
pub mod backing;
pub mod cli;
pub mod config;
pub mod control;
pub mod device;
pub mod doctor;
pub mod fields;
pub mod fleet;
pub mod kvm;
pub mod log_limit;
pub mod metrics;
pub mod process;
pub mod reporting;
pub mod serve;
pub mod session;
pub mod top;
pub mod vm;

pub use fpr_protocol::error_chain;
