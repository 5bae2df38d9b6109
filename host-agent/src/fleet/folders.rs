//! The task's dealings with the VM directory: VMs whose folders come and go.

use super::directory::{self, Folder, Folders, Watcher};
use super::task::{Entry, Task};
use super::{FleetError, Order, State};
use crate::config;
use crate::vm::{Origin, VmConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tracing::{info, warn};

/// Folders that cannot be VMs, kept for people to see.
const MAX_REFUSED: usize = 32;

impl Entry {
    pub(super) fn is_refused_folder(&self) -> bool {
        self.state == State::Failed && self.config.origin == Origin::Directory
    }
}

impl Task {
    pub(super) fn watch_directory(&mut self, directory: Option<PathBuf>) -> Result<(), FleetError> {
        // One that cannot be used changes nothing.
        let watcher = directory.as_deref().map(Watcher::open).transpose()?;
        if let Some(before) = self.watcher.take() {
            before.abort();
        }
        self.config.directory = directory;
        self.watcher = watcher.map(|watcher| tokio::spawn(watcher.run(self.orders.clone())).abort_handle());
        self.look_into_directory();
        Ok(())
    }

    /// Makes the VMs whose folders have come, and lets those go whose folders have gone.
    pub(super) fn look_into_directory(&mut self) {
        let directory = self.config.directory.clone();
        if let Some(look) = self.look_again.take() {
            look.abort();
        }
        let folders = match directory.as_deref().map_or_else(|| Ok(Folders::new()), directory::scan) {
            Ok(folders) => folders,
            // Removed, and its VMs with it. Its watcher waits for it to come back.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Folders::new(),
            Err(error) => {
                self.keep_folders(&error);
                return;
            }
        };
        let found = |name: &str| folders.get(name).and_then(|folder| folder.as_ref().ok().copied());
        self.given_up.retain(|name, folder| found(name) == Some(*folder));
        // What was wrong with a folder goes with it.
        self.entries.retain(|entry| !entry.is_refused_folder() || folders.contains_key(&entry.config.name));
        let is_gone = |entry: &&Entry| {
            entry.state == State::Running && entry.folder.is_some() && found(&entry.config.name) != entry.folder
        };
        let gone: Vec<String> = self.entries.iter().filter(is_gone).map(|entry| entry.config.name.clone()).collect();
        for name in gone {
            self.leave(&name, None);
        }
        for (name, folder) in folders {
            if let Some(directory) = &directory {
                self.look_at_folder(directory, &name, folder);
            }
        }
    }

    /// No descriptor left, no permission: says nothing about what is in the directory.
    fn keep_folders(&mut self, error: &io::Error) {
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            let directory = self.config.directory.as_ref().map(|path| path.display().to_string());
            warn!(directory, %error, suppressed, "cannot read the VM directory: its VMs stay as they are");
        }
        let orders = self.orders.clone();
        let look = tokio::spawn(async move {
            tokio::time::sleep(directory::RETRY).await;
            let _ = orders.send(Order::FoldersChanged).await;
        });
        self.look_again = Some(look.abort_handle());
    }

    fn look_at_folder(&mut self, directory: &Path, name: &str, folder: Result<Folder, String>) {
        let room = self.entries.iter().filter(|entry| entry.is_refused_folder()).count() < MAX_REFUSED;
        match self.entry(name) {
            None if !room => return,
            None => {}
            Some(entry) if entry.is_refused_folder() => {}
            Some(entry) if entry.folder.is_some() && folder.as_ref().ok() != entry.folder.as_ref() => {
                // Made anew while the VM of the old folder still waits for its front end.
                if let (Ok(config), Ok(folder)) = (config::of_directory(directory, name), folder) {
                    entry.next = Some((config, Some(folder)));
                    if entry.state == State::Leaving {
                        entry.state = State::Changing;
                    }
                }
                return;
            }
            // Running, or somebody else's name: then the folder has to wait.
            Some(_) => return,
        }
        match (config::of_directory(directory, name), folder) {
            (Ok(_), Ok(folder)) if self.given_up.get(name) == Some(&folder) => {}
            (Ok(config), Ok(folder)) => drop(self.make_or_fail(config, Some(folder))),
            (Err(error), _) => self.fail(refused_folder(name), error.to_string()),
            (_, Err(why)) => self.fail(refused_folder(name), why),
        }
    }

    /// A VM that was removed by command is not made again from its folder.
    pub(super) fn give_up_folder(&mut self, name: &str, folder: Option<Folder>) {
        let (Some(directory), Some(folder)) = (&self.config.directory, folder) else { return };
        let path = directory.join(name);
        if directory::remove_folder(&path) {
            self.given_up.remove(name);
        } else {
            info!(vm = name, folder = %path.display(), "the folder stays: it is not empty, or not ours to remove");
            self.given_up.insert(name.to_owned(), folder);
        }
    }
}

/// What stands for a folder that cannot be a VM.
fn refused_folder(name: &str) -> VmConfig {
    VmConfig { origin: Origin::Directory, ..VmConfig::new(name) }
}
