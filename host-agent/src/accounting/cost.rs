//! The figure that a budget is about: what a VM costs its host.
//!
//! Used by the daemon's tick and its precise reads. Two bases; each has a cheap figure and a precise one of the same
//! quantity:
//!
//! | basis | quantity | cheap | precise |
//! | --- | --- | --- | --- |
//! | `cgroup` | what the VM's own cgroup is charged with | the charge: exact | the same |
//! | `process` | allocated blocks of the memory files, and anonymous memory and swap of the VMM's process by its share | blocks: exact; anonymous memory and swap: at most `RssAnon` and `VmSwap` with their error | blocks, `Pss_Anon` and `SwapPss` |
//!
//! The charge of a cgroup is one counter and not one per CPU (`page_counter` in `mm/page_counter.c`): it is exactly what
//! the kernel compares with `memory.max`. That some of it is not in use yet, up to a batch per CPU, is an error of the
//! cgroup as a measure of *use*, and has no precise figure; the budget is about the charge. Memory that is shared with
//! others after a fork or by KSM makes `RssAnon` larger than the share, never smaller, so it is an upper bound.

use super::{Absent, AbsentReason, Figure, Method, Precision, Reader, Reading};
use serde::Serialize;

/// What the quantity is; decided by whether the VM has a cgroup of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// The charge of the VM's own cgroup.
    Cgroup,
    /// Memory files and the VMM's process.
    Process,
}

/// A cost between two bounds; with both the same it is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// Of what.
    pub basis: Basis,
    /// At least this.
    pub low_bytes: u64,
    /// At most this.
    pub high_bytes: u64,
}

impl Estimate {
    /// The cost, if it is exact.
    #[must_use]
    pub fn exact(&self) -> Option<u64> {
        (self.low_bytes == self.high_bytes).then_some(self.low_bytes)
    }

    fn exactly(basis: Basis, bytes: u64) -> Self {
        Self { basis, low_bytes: bytes, high_bytes: bytes }
    }
}

/// The cheap figure: a few reads of files that stay open.
///
/// # Errors
/// Nothing of the VM can be read.
pub fn estimate(reader: &mut Reader) -> Result<Estimate, Absent> {
    let (cgroup, backing) = (reader.read(Method::Cgroup), reader.read(Method::Backing));
    estimate_from(reader, cgroup, backing)
}

/// The same with readings of `cgroup` and `backing` that were just made.
///
/// # Errors
/// Nothing of the VM can be read.
pub(super) fn estimate_from(reader: &mut Reader, cgroup: Reading, backing: Reading) -> Result<Estimate, Absent> {
    if let Some(charge) = charge(cgroup)? {
        return Ok(charge);
    }
    let backing = in_files(backing)?;
    let high_bytes = backing.saturating_add(at_most(&reader.anonymous()?));
    Ok(Estimate { basis: Basis::Process, low_bytes: backing, high_bytes })
}

/// The precise figure: may walk the page tables of the process.
///
/// # Errors
/// There is none.
pub fn precise(reader: &mut Reader) -> Result<Estimate, Absent> {
    if let Some(charge) = charge(reader.read(Method::Cgroup))? {
        return Ok(charge);
    }
    let anonymous = reader.anonymous_precise()?;
    let backing = in_files(reader.read(Method::Backing))?;
    Ok(Estimate::exactly(Basis::Process, backing.saturating_add(anonymous.bytes)))
}

/// What the host holds for the guest, cheaply: the blocks of its memory files; of a guest with private memory, the
/// anonymous memory of its process.
///
/// # Errors
/// Neither can be read.
pub fn held(reader: &mut Reader) -> Result<Estimate, Absent> {
    match reader.read(Method::Backing) {
        Ok(Figure { bytes, .. }) => Ok(Estimate::exactly(Basis::Process, bytes)),
        Err(absent) if absent.reason == AbsentReason::NotShared => {
            let anonymous = reader.anonymous()?;
            Ok(Estimate { basis: Basis::Process, low_bytes: 0, high_bytes: at_most(&anonymous) })
        }
        Err(absent) => Err(absent),
    }
}

/// The same precisely.
///
/// # Errors
/// It cannot be read.
pub fn held_precise(reader: &mut Reader) -> Result<u64, Absent> {
    match reader.read(Method::Backing) {
        Ok(Figure { bytes, .. }) => Ok(bytes),
        Err(absent) if absent.reason == AbsentReason::NotShared => Ok(reader.anonymous_precise()?.bytes),
        Err(absent) => Err(absent),
    }
}

fn at_most(figure: &Figure) -> u64 {
    match figure.precision {
        Precision::Precise => figure.bytes,
        Precision::Approximate { error_bound_bytes } => figure.bytes.saturating_add(error_bound_bytes),
    }
}

fn charge(cgroup: Reading) -> Result<Option<Estimate>, Absent> {
    match cgroup {
        Ok(Figure { bytes, .. }) => Ok(Some(Estimate::exactly(Basis::Cgroup, bytes))),
        // Shared with others, or a host without the memory controller.
        Err(Absent { reason: AbsentReason::NoCgroup | AbsentReason::NotSupported, .. }) => Ok(None),
        Err(absent) => Err(absent),
    }
}

/// Private guest memory is in no file, and then in the process's anonymous memory.
fn in_files(backing: Reading) -> Result<u64, Absent> {
    match backing {
        Ok(Figure { bytes, .. }) => Ok(bytes),
        Err(absent) if absent.reason == AbsentReason::NotShared => Ok(0),
        Err(absent) => Err(absent),
    }
}
