//! Benchmarks. Each writes one JSON document of the same shape ([`report`]).

pub mod accounting;
mod aftermath;
mod cgroup;
pub mod curve;
pub mod discard;
pub mod rank;
pub mod report;
pub mod return_memory;
pub mod scale;
pub mod usage;
