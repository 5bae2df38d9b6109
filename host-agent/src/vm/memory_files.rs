//! Which VM has which memory file. Two VMs on one file would drop each other's memory, so the second is refused.
//!
//! Shared by the owners of all VMs of a daemon; locked for single steps only.

use crate::backing::FileId;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The files in use.
#[derive(Debug, Default)]
pub struct MemoryFiles(Mutex<HashMap<FileId, String>>);

impl MemoryFiles {
    /// Takes `files` for `vm`, those of both its devices, and lets go of what else it had; on conflict nothing changes and
    /// the other VM is named.
    pub(super) fn take(&self, vm: &str, files: &[FileId]) -> Result<(), String> {
        // A map of plain values is whole whoever panicked.
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(owner) = files.iter().filter_map(|file| taken.get(file)).find(|owner| *owner != vm) {
            return Err(owner.clone());
        }
        taken.retain(|_, owner| owner != vm);
        taken.extend(files.iter().map(|file| (*file, vm.to_owned())));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_belongs_to_one_vm() {
        let files = MemoryFiles::default();
        let [a, b] = [1, 2].map(|inode| FileId { device: 1, inode });
        assert_eq!(files.take("one", &[a]), Ok(()));
        assert_eq!(files.take("one", &[a, b]), Ok(()), "its own files again");
        assert_eq!(files.take("two", &[b]), Err("one".to_owned()));
        assert_eq!(files.take("one", &[a, a]), Ok(()), "both devices show the same file");
        assert_eq!(files.take("two", &[b]), Ok(()), "let go of");
    }
}
