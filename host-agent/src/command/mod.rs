//! Subcommands with logic of their own.

pub(crate) mod memory;
pub(crate) mod rank;
pub(crate) mod vm;
