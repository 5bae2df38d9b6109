//! The guest's root file system: busybox, memhog, the kernel modules it needs and the binaries under test, as one uncompressed newc archive.
//!
//! Cached by the hash of its content, so a test run writes it once.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cpio::newc;

use crate::packages::{self, Packages};

/// In the order they depend on each other. All are modules in Debian's cloud kernels; the rest of virtio is built in.
const MODULES: [&str; 5] = [
    "net/vmw_vsock/vsock.ko",
    "net/vmw_vsock/vmw_vsock_virtio_transport_common.ko",
    "net/vmw_vsock/vmw_vsock_virtio_transport.ko",
    "drivers/virtio/virtio_balloon.ko",
    "drivers/block/virtio_blk.ko",
];

/// Modules are unpacked first: busybox's insmod reads .xz too, but only after the kernel has complained about the compressed file.
/// Runs as pid 1 and leaves that to busybox's init, which reaps orphans and restarts the command server.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /run /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /ramfs
mount -t ramfs ramfs /ramfs
cd /modules
for module in $(cat order); do
    case $module in *.xz) unxz $module; module=${module%.xz};; esac
    insmod $module
done
cd /
rm -r /modules
exec /bin/busybox init
";
const INITTAB: &str = "::respawn:/bin/fpr-guest-shell\n";

/// Permissions with the file type (inode(7)).
const DIRECTORY: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const SYMLINK: u32 = 0o120_777;

/// Builds the archive, unless one with the same content exists, and returns its path.
///
/// # Errors
/// A source file cannot be read or the cache cannot be written.
pub fn build(packages: &Packages, binaries: &[(&str, PathBuf)]) -> Result<PathBuf> {
    let mut archive = Archive::default();
    archive.file("init", INIT.as_bytes())?;
    archive.file("etc/inittab", INITTAB.as_bytes())?;
    archive.copy("bin/busybox", &packages.busybox)?;
    archive.entry("bin/sh", SYMLINK, b"busybox")?;
    for (path, source) in &packages.memhog {
        archive.copy(path, source)?;
    }
    let mut order = String::new();
    for module in MODULES {
        // Compressed or not. A kernel may have one of them built in.
        for suffix in ["", ".xz"] {
            let source = packages.kernel.modules.join(format!("{module}{suffix}"));
            if let (true, Some(name)) = (source.is_file(), source.file_name().and_then(|name| name.to_str())) {
                archive.copy(&format!("modules/{name}"), &source)?;
                order.push_str(&format!("{name}\n"));
            }
        }
    }
    archive.file("modules/order", order.as_bytes())?;
    for (name, source) in binaries {
        archive.copy(&format!("bin/{name}"), source)?;
    }
    archive.store()
}

#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    directories: BTreeSet<PathBuf>,
    entries: u32,
}

impl Archive {
    fn copy(&mut self, path: &str, source: &Path) -> Result<()> {
        self.file(path, &fs::read(source).with_context(|| source.display().to_string())?)
    }

    fn file(&mut self, path: &str, content: &[u8]) -> Result<()> {
        self.entry(path, EXECUTABLE, content)
    }

    /// The kernel creates no parent directories; each must come before what is in it.
    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        let parents: Vec<_> = Path::new(path)
            .ancestors()
            .skip(1)
            .filter(|parent| !parent.as_os_str().is_empty())
            .map(Path::to_owned)
            .collect();
        for parent in parents.into_iter().rev() {
            if self.directories.insert(parent.clone()) {
                self.write(&parent.to_string_lossy(), DIRECTORY, b"")?;
            }
        }
        self.write(path, mode, content)
    }

    fn write(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.entries += 1;
        let size = u32::try_from(content.len()).with_context(|| format!("{path} does not fit a newc archive"))?;
        let mut writer = newc::Builder::new(path).ino(self.entries).nlink(1).mode(mode).write(&mut self.bytes, size);
        std::io::Write::write_all(&mut writer, content)?;
        writer.finish()?;
        Ok(())
    }

    fn store(mut self) -> Result<PathBuf> {
        newc::trailer(&mut self.bytes)?;
        let mut hasher = DefaultHasher::new();
        self.bytes.hash(&mut hasher);
        let dir = packages::cache().join("initramfs");
        let path = dir.join(format!("{:016x}.cpio", hasher.finish()));
        if !path.is_file() {
            fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
            let file = tempfile::NamedTempFile::new_in(&dir)?;
            fs::write(file.path(), &self.bytes)?;
            file.persist(&path)?;
        }
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parents_come_first_and_once() {
        let mut archive = Archive::default();
        archive.file("a/b/one", b"1").unwrap();
        archive.file("a/b/two", b"22").unwrap();
        newc::trailer(&mut archive.bytes).unwrap();
        let (mut names, mut rest) = (Vec::new(), archive.bytes.as_slice());
        loop {
            let reader = newc::Reader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            names.push(reader.entry().name().to_owned());
            rest = reader.finish().unwrap();
        }
        assert_eq!(names, ["a", "a/b", "a/b/one", "a/b/two"]);
    }
}
