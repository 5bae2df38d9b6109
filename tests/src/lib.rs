//! Virtual machines for tests and benchmarks: stock QEMU, a stock Debian kernel, the shipped agents; and a container with Debian in it.
//!
//! Called by the tests under `tests/tests/` and by `cargo xtask`. A test reads like this:
//!
//! ```no_run
//! use fpr_tests::{units::MIB, vm::Vm};
//! # fn main() -> anyhow::Result<()> {
//! let vm = Vm::builder().memory(512 * MIB).boot()?;
//! let before = vm.host_memory()?.allocated_bytes()?;
//! vm.run("memhog 200m")?;
//! assert!(vm.host_memory()?.allocated_bytes()? > before + 150 * MIB);
//! # Ok(())
//! # }
//! ```
//!
//! The crate trusts the machine it runs on and nothing that a guest prints: guest output is parsed with bounds and deadlines.
//! Built without the feature `harness` little is left of it; that is how the binaries that run inside the guest are built.

#![deny(unsafe_code)]

#[cfg(feature = "harness")]
pub mod accel;
#[cfg(feature = "harness")]
pub mod artifacts;
#[cfg(feature = "harness")]
pub mod bench;
#[cfg(feature = "harness")]
pub mod container;
#[cfg(feature = "harness")]
pub mod crowd;
#[cfg(feature = "harness")]
pub mod daemon;
#[cfg(feature = "harness")]
pub mod environment;
#[cfg(feature = "harness")]
pub mod host_memory;
#[cfg(feature = "harness")]
pub mod initramfs;
#[cfg(feature = "harness")]
mod other_release;
#[cfg(feature = "harness")]
pub mod packages;
#[cfg(feature = "harness")]
pub mod poll;
#[cfg(feature = "harness")]
pub mod process;
#[cfg(feature = "harness")]
pub mod qemu;
#[cfg(feature = "harness")]
pub mod qmp;
#[cfg(feature = "harness")]
pub mod reporting;
#[cfg(feature = "harness")]
pub mod shell;
#[cfg(feature = "harness")]
pub mod skip;
#[cfg(feature = "harness")]
#[allow(unsafe_code)]
mod sys;
#[cfg(feature = "harness")]
pub mod units;
#[cfg(feature = "harness")]
pub mod vfio;
#[cfg(feature = "harness")]
pub mod vm;
pub mod wire;
