//! The file tree that becomes a package. Modes are set, never inherited from the machine's umask or from a checkout.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use fpr_tests::process;

/// What may be done with a file; its owner is root.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode {
    Data,
    Executable,
}

/// A tree with `DEBIAN/` in it, as `dpkg-deb --build` takes it.
pub(crate) struct Stage {
    root: PathBuf,
    /// Paths of the package's own files, without a leading slash.
    files: Vec<String>,
}

impl Stage {
    /// Stages below an existing, empty directory.
    pub(crate) fn new(root: &Path) -> Result<Self> {
        let stage = Self { root: root.to_owned(), files: Vec::new() };
        fs::set_permissions(root, fs::Permissions::from_mode(0o755))?;
        Ok(stage)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Adds a file of the package.
    pub(crate) fn add(&mut self, path: &str, content: &[u8], mode: Mode) -> Result<()> {
        self.write(path, content, mode)?;
        self.files.push(path.to_owned());
        Ok(())
    }

    /// Adds a file compressed with gzip, without time and name in it, as `path.gz`.
    pub(crate) fn add_compressed(&mut self, path: &str, content: &[u8]) -> Result<()> {
        let mut gzip = Command::new("gzip")
            .arg("-9n")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("`gzip -9n`")?;
        let mut input = gzip.stdin.take().context("gzip has no input")?;
        let content = content.to_owned();
        // gzip writes while it reads: both ends at once, or both wait.
        let writer = std::thread::spawn(move || input.write_all(&content));
        let output = gzip.wait_with_output()?;
        writer.join().map_err(|_| anyhow::anyhow!("the thread that feeds gzip panicked"))??;
        ensure!(output.status.success(), "`gzip -9n` failed");
        self.add(&format!("{path}.gz"), &output.stdout, Mode::Data)
    }

    /// Adds what is below `from` in the source, but not the paths in `without`. A directory that is not there adds nothing.
    pub(crate) fn add_tree(&mut self, source: &Path, from: &str, to: &str, without: &[&str]) -> Result<()> {
        let directory = source.join(from);
        if !directory.is_dir() {
            return Ok(());
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(&directory).with_context(|| directory.display().to_string())? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        for name in names {
            let (inside, target) = (format!("{from}/{name}"), format!("{}/{name}", to.trim_end_matches('/')));
            if without.contains(&inside.as_str()) {
                continue;
            }
            if source.join(&inside).is_dir() {
                self.add_tree(source, &inside, &target, without)?;
            } else {
                self.add(&target, &fs::read(source.join(&inside)).with_context(|| inside.clone())?, Mode::Data)?;
            }
        }
        Ok(())
    }

    /// Adds a file for dpkg itself.
    pub(crate) fn add_control(&self, name: &str, content: &[u8], mode: Mode) -> Result<()> {
        self.write(&format!("DEBIAN/{name}"), content, mode)
    }

    /// deb-md5sums(5).
    pub(crate) fn md5sums(&self) -> Result<String> {
        let mut files = self.files.clone();
        files.sort();
        process::run(Command::new("md5sum").args(&files).current_dir(&self.root))
    }

    /// deb-substvars(5), `Installed-Size`: each file rounded up to KiB.
    pub(crate) fn size_kib(&self) -> u64 {
        let sizes = self.files.iter().filter_map(|file| fs::metadata(self.root.join(file)).ok());
        sizes.map(|metadata| metadata.len().div_ceil(1024)).sum()
    }

    fn write(&self, path: &str, content: &[u8], mode: Mode) -> Result<()> {
        let mut directory = self.root.clone();
        let parents = Path::new(path).parent().map(Path::iter).into_iter().flatten();
        for part in parents {
            directory.push(part);
            if !directory.is_dir() {
                fs::create_dir(&directory).with_context(|| directory.display().to_string())?;
                fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
            }
        }
        let file = self.root.join(path);
        fs::write(&file, content).with_context(|| file.display().to_string())?;
        let mode = match mode {
            Mode::Data => 0o644,
            Mode::Executable => 0o755,
        };
        Ok(fs::set_permissions(&file, fs::Permissions::from_mode(mode))?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_is_staged_is_listed_with_its_sum_and_size() {
        let directory = tempfile::tempdir().unwrap();
        let mut stage = Stage::new(directory.path()).unwrap();
        stage.add("usr/bin/a", b"", Mode::Executable).unwrap();
        stage.add_compressed("usr/share/b", &vec![7; 1 << 20]).unwrap();
        stage.add_control("control", b"Package: a\n", Mode::Data).unwrap();
        let sums = stage.md5sums().unwrap();
        assert!(sums.starts_with("d41d8cd98f00b204e9800998ecf8427e  usr/bin/a\n"), "{sums}");
        assert_eq!(sums.lines().count(), 2, "{sums}");
        // 1 MiB of one byte is about a KiB when compressed.
        assert_eq!(stage.size_kib(), 2);
        let mode = |path: &str| fs::metadata(directory.path().join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!(
            [mode("usr/bin/a"), mode("usr/share/b.gz"), mode("usr/share"), mode("DEBIAN")],
            [0o755, 0o644, 0o755, 0o755]
        );
    }
}
