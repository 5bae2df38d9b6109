//! The guest side of fpr: finds free huge pages, keeps everybody off them, reports them, and returns them after the
//! host's answer.
//!
//! Layers, each knowing only those below it: `run` (main loop) → `agent` (pure decisions) → `kernel` (readers) and
//! `isolate` (executors).

#![deny(unsafe_code)]

pub mod agent;
pub mod check;
pub mod cli;
pub mod config;
pub mod isolate;
pub mod kernel;
pub mod run;

pub use fpr_protocol::error_chain;
