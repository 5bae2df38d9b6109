//! The VM directory: every folder in it is a VM, with its sockets inside.
//!
//! Used by the fleet's task, which looks at the start and whenever the [`Watcher`] says so. Who may create a folder there may
//! create a VM, and who owns the folder decides who connects; so the directory is writable for the daemon's user and group
//! and nobody else, and what is found there is bounded and checked: names, the kind of file, the number.
//!
//! inotify(7) says only *that* something happened; what is there is always read anew, so that lost events lose nothing.

use super::sys::{self, Watch};
use super::{MAX_VMS, Order};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

/// Owner and group may create VMs; see the module.
const MODE: u32 = 0o770;
/// Its group, the VMMs' under the shipped unit, reaches a VM's sockets and cannot put others in their place.
const FOLDER_MODE: u32 = 0o750;

/// Rest between two looks, so that somebody who makes and removes folders all the time costs next to nothing.
const REST: Duration = Duration::from_millis(50);

/// Between two attempts to watch a directory that has gone, or to read one that cannot be read.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// Folders read at most: those beyond could not be served anyway.
const MAX_FOLDERS: usize = MAX_VMS + 64;

/// Why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {remedy}", path.display())]
pub struct DirectoryError {
    action: &'static str,
    path: PathBuf,
    remedy: &'static str,
    #[source]
    source: io::Error,
}

/// One folder, told from another of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Folder {
    device: u64,
    inode: u64,
}

impl Folder {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// What is in the directory: names, and why one of them is no folder.
pub type Folders = BTreeMap<String, Result<Folder, String>>;

/// Looks into the directory. Plain files and names that begin with a dot are nobody's VM; a folder can so be prepared
/// under such a name and be renamed when it is ready.
///
/// # Errors
/// It cannot be read.
pub fn scan(directory: &Path) -> io::Result<Folders> {
    let mut folders = Folders::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        // A name is shown on terminals and in logs, and one with anything to escape in it is no VM's.
        let name = entry.file_name().display().to_string().escape_debug().to_string();
        // Gone since it was listed: as if it had not been there.
        let Ok(metadata) = entry.path().symlink_metadata() else { continue };
        let kind = metadata.file_type();
        if name.starts_with('.') || !(kind.is_dir() || kind.is_symlink()) {
            continue;
        }
        // Only what could be a VM counts: a thousand plain files hide no folder.
        if folders.len() == MAX_FOLDERS {
            break;
        }
        let folder = if kind.is_dir() {
            Ok(Folder::of(&metadata))
        } else {
            Err("is a symbolic link: make it a folder".to_owned())
        };
        folders.insert(name, folder);
    }
    Ok(folders)
}

/// Makes the folder of a VM, or takes the one that is there.
pub(super) fn make_folder(path: &Path) -> Result<Folder, DirectoryError> {
    let error = |action, remedy| move |source| DirectoryError { action, path: path.to_owned(), remedy, source };
    match std::fs::DirBuilder::new().mode(FOLDER_MODE).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.map_err(error("create folder", "the VM directory must be writable for the daemon"))?,
    }
    let metadata = path.symlink_metadata().map_err(error("look at", "is somebody removing it?"))?;
    if !metadata.is_dir() {
        return Err(error("use", "remove it, so that it can be a folder")(io::ErrorKind::NotADirectory.into()));
    }
    Ok(Folder::of(&metadata))
}

/// Removes the folder of a VM that was removed; false if it stays because something else is in it.
pub(super) fn remove_folder(path: &Path) -> bool {
    std::fs::remove_dir(path).is_ok()
}

/// Watches one directory.
pub(super) struct Watcher {
    directory: PathBuf,
    inotify: AsyncFd<Watch>,
    /// The kernel watches it; not so when it was removed.
    watching: bool,
}

impl Watcher {
    /// Makes the directory if it is not there, and watches it.
    pub(super) fn open(directory: &Path) -> Result<Self, DirectoryError> {
        let remedy = "its parent must exist, and it must be readable and writable for the daemon";
        let error =
            |action| move |source: io::Error| DirectoryError { action, path: directory.to_owned(), remedy, source };
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .map_err(|errno| error("watch")(errno.into()))?;
        let inotify = sys::register(inotify).map_err(error("watch"))?;
        let mut watcher = Self { directory: directory.to_owned(), inotify, watching: false };
        watcher.begin().map_err(error("use VM directory"))?;
        scan(directory).map_err(error("read VM directory"))?;
        Ok(watcher)
    }

    fn begin(&mut self) -> io::Result<()> {
        match std::fs::DirBuilder::new().mode(MODE).create(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        // IN_ATTRIB: a folder that was not writable for us may be now.
        let events = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        self.inotify.get_ref().inotify().add_watch(&self.directory, events)?;
        self.watching = true;
        Ok(())
    }

    /// Until something happened.
    async fn changed(&mut self) -> io::Result<()> {
        let mut ready = self.inotify.readable().await?;
        let gone = AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
        while let Ok(events) = ready.get_inner().inotify().read_events() {
            self.watching &= !events.iter().any(|event| event.mask.intersects(gone));
        }
        ready.clear_ready();
        Ok(())
    }

    /// Tells the fleet's task of every change, until that task has ended or this one is aborted.
    pub(super) async fn run(mut self, orders: mpsc::Sender<Order>) {
        loop {
            if self.watching {
                if let Err(error) = self.changed().await {
                    tracing::warn!(directory = %self.directory.display(), %error, "cannot watch the VM directory");
                    self.watching = false;
                }
                tokio::time::sleep(REST).await;
            } else {
                tokio::time::sleep(RETRY).await;
                // Missing until somebody restores it; its VMs leave meanwhile.
                let _ = self.begin();
            }
            if orders.send(Order::FoldersChanged).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[test]
    fn folders_are_vms_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["web1", "b d", ".web2.new"] {
            std::fs::create_dir(dir.path().join(folder)).unwrap();
        }
        std::fs::create_dir(dir.path().join("c\n\x1b[2J")).unwrap();
        std::os::unix::fs::symlink("web1", dir.path().join("link")).unwrap();
        // Wherever in the listing they are, they are more than would be read.
        for number in 0..3 * MAX_FOLDERS {
            std::fs::write(dir.path().join(format!("file{number}")), "").unwrap();
        }

        let folders = scan(dir.path()).unwrap();

        let found: Vec<_> = folders.iter().map(|(name, folder)| (name.as_str(), folder.is_ok())).collect();
        assert_eq!(found, [("b d", true), ("c\\n\\u{1b}[2J", true), ("link", false), ("web1", true)]);
    }

    #[tokio::test]
    async fn changes_are_told_and_a_directory_that_went_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let vms = dir.path().join("vm");
        let watcher = Watcher::open(&vms).unwrap();
        assert!(vms.is_dir());
        let (orders, mut told) = mpsc::channel(8);
        let task = tokio::spawn(watcher.run(orders));
        let mut until = async |wanted: &[&str]| {
            loop {
                let Some(Order::FoldersChanged) = told.recv().await else { panic!("the watcher ended") };
                let folders = scan(&vms).unwrap_or_default();
                if folders.keys().map(String::as_str).eq(wanted.iter().copied()) {
                    return;
                }
            }
        };
        let limit = Duration::from_secs(60);
        std::fs::create_dir(vms.join("web1")).unwrap();
        tokio::time::timeout(limit, until(&["web1"])).await.unwrap();
        std::fs::rename(vms.join("web1"), vms.join("web2")).unwrap();
        tokio::time::timeout(limit, until(&["web2"])).await.unwrap();
        std::fs::remove_dir_all(&vms).unwrap();
        tokio::time::timeout(limit, until(&[])).await.unwrap();
        while !vms.is_dir() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        std::fs::create_dir(vms.join("web3")).unwrap();
        tokio::time::timeout(limit, until(&["web3"])).await.unwrap();
        task.abort();
    }

    #[test]
    fn a_directory_without_a_parent_is_an_error_with_a_remedy() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        let error = Watcher::open(Path::new("/nonexistent/vm")).err().unwrap().to_string();
        assert!(error.contains("/nonexistent/vm") && error.contains("parent"), "{error}");
    }
}
