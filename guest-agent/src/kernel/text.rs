//! Text files of procfs and sysfs, read again and again into one buffer.
//!
//! Called by the readers of this folder. The kernel makes the text anew whenever it is read from offset 0
//! (`fs/seq_file.c`, `fs/kernfs/file.c`), so the file stays open between readings.

use super::ReadError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Longest file read. `/proc/zoneinfo` is the longest: about 500 bytes per zone and CPU.
const MAX_BYTES: usize = 4 << 20;

/// First size of the buffer: one page holds `/proc/meminfo`.
const FIRST_BYTES: usize = 4096;

/// What a parser does not understand. [`TextFile`] adds the path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A line is wrong.
    Line {
        /// Counted from 1.
        line: usize,
        wanted: &'static str,
        found: String,
    },
    /// A line is missing.
    Missing { wanted: &'static str },
}

impl Fault {
    /// A wrong line, numbered from 0 as `enumerate` does.
    pub(crate) fn at(index: usize, wanted: &'static str, found: &str) -> Self {
        Self::Line { line: index + 1, wanted, found: found.chars().take(80).collect() }
    }

    pub(crate) fn in_file(self, path: &Path) -> ReadError {
        let path = path.to_owned();
        match self {
            Self::Line { line, wanted, found } => ReadError::Malformed { path, line, wanted, found },
            Self::Missing { wanted } => ReadError::Missing { path, wanted },
        }
    }
}

/// An open text file and the buffer it is read into.
#[derive(Debug)]
pub(crate) struct TextFile {
    path: PathBuf,
    file: File,
    buffer: Vec<u8>,
}

impl TextFile {
    pub(crate) fn open(path: PathBuf) -> Result<Self, ReadError> {
        match File::open(&path) {
            Ok(file) => Ok(Self { path, file, buffer: Vec::new() }),
            Err(source) => Err(ReadError::io(&path, source)),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the text and hands it to `parser`.
    pub(crate) fn parse<T>(&mut self, parser: impl FnOnce(&str) -> Result<T, Fault>) -> Result<T, ReadError> {
        let length = self.fill()?;
        let bytes = self.buffer.get(..length).unwrap_or_default();
        let text = std::str::from_utf8(bytes).map_err(|e| {
            let before = bytes.get(..e.valid_up_to()).unwrap_or_default();
            let line = before.iter().filter(|byte| **byte == b'\n').count();
            Fault::at(line, "UTF-8 text", &String::from_utf8_lossy(bytes)).in_file(&self.path)
        })?;
        parser(text).map_err(|fault| fault.in_file(&self.path))
    }

    fn fill(&mut self) -> Result<usize, ReadError> {
        let mut length = 0;
        loop {
            if length == self.buffer.len() {
                if length >= MAX_BYTES {
                    return Err(ReadError::TooLong { path: self.path.clone(), limit: MAX_BYTES });
                }
                self.buffer.resize((length * 2).max(FIRST_BYTES), 0);
            }
            match self.file.read_at(self.buffer.get_mut(length..).unwrap_or_default(), length as u64) {
                Ok(0) => return Ok(length),
                Ok(read) => length += read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(ReadError::io(&self.path, source)),
            }
        }
    }
}

/// Reads a file that is needed once.
pub(crate) fn read_once<T>(path: PathBuf, parser: impl FnOnce(&str) -> Result<T, Fault>) -> Result<T, ReadError> {
    TextFile::open(path)?.parse(parser)
}

/// Reads a file with one value in it, `None` if there is no such file.
pub(crate) fn read_value<T>(
    path: PathBuf,
    wanted: &'static str,
    value: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, ReadError> {
    let parsed = read_once(path, |text| value(text.trim()).ok_or_else(|| Fault::at(0, wanted, text.trim())));
    match parsed {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::kernel::fake::Tree;

    #[test]
    fn reads_what_is_there_now() {
        let tree = Tree::new(&[("proc/x", &"a".repeat(10_000))]);
        let mut file = TextFile::open(tree.roots().proc.join("x")).unwrap();
        assert_eq!(file.parse(|text| Ok(text.len())).unwrap(), 10_000);
        tree.write("proc/x", b"short");
        assert_eq!(file.parse(|text| Ok(text.to_owned())).unwrap(), "short");
    }

    #[test]
    fn faults_name_file_and_line() {
        let tree = Tree::new(&[]);
        tree.write("proc/x", b"one\n\xff\n");
        let mut file = TextFile::open(tree.roots().proc.join("x")).unwrap();
        let error = file.parse(|_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("proc/x, line 2: wanted UTF-8 text"), "{error}");
    }

    #[test]
    fn endless_files_are_refused() {
        let mut file = TextFile::open("/dev/zero".into()).unwrap();
        assert!(matches!(file.parse(|_| Ok(())), Err(ReadError::TooLong { .. })));
    }

    #[test]
    fn missing_values_are_none() {
        let tree = Tree::new(&[("sys/a", "12\n"), ("sys/b", "twelve\n")]);
        let read = |name| read_value(tree.roots().sys.join(name), "a number", |text| text.parse::<u32>().ok());
        assert_eq!(read("a").unwrap(), Some(12));
        assert_eq!(read("c").unwrap(), None);
        let error = read("b").unwrap_err().to_string();
        assert!(error.ends_with("sys/b, line 1: wanted a number, found \"twelve\""), "{error}");
    }
}
