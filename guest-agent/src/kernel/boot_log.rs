//! The kernel's log of its own boot, from `/dev/kmsg` (`devkmsg_read`, `kernel/printk/printk.c`).
//!
//! Called by [`super::detect`] once at start. Records that processes wrote into the log are left out: the kernel gives
//! them a facility other than 0, so nobody can plant a finding.

use super::{ReadError, Roots};
use nix::libc::{EPIPE, O_NONBLOCK};
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::unix::fs::OpenOptionsExt;

/// Longest record, prefix and dictionary included (`PRINTK_MESSAGE_MAX`, `CONSOLE_EXT_LOG_MAX` before Linux 6.3). A
/// smaller buffer makes the kernel refuse to read.
const RECORD_BYTES: usize = 8192;

/// Most records read. What is looked for is written before the first process runs, among the first few hundred.
const MAX_RECORDS: usize = 4096;

/// Hands the kernel's own messages to `visit`, oldest first, until it breaks or the log ends. Never waits.
pub fn messages(roots: &Roots, mut visit: impl FnMut(&str) -> ControlFlow<()>) -> Result<(), ReadError> {
    let path = roots.dev.join("kmsg");
    let io = |source| ReadError::io(&path, source);
    let mut file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(&path).map_err(io)?;
    let mut buffer = [0; RECORD_BYTES];
    for _ in 0..MAX_RECORDS {
        let length = match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            // EPIPE: the record was overwritten while we read; the next read goes on with the oldest one left.
            Err(e) if e.kind() == io::ErrorKind::Interrupted || e.raw_os_error() == Some(EPIPE) => continue,
            Err(source) => return Err(io(source)),
        };
        let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
        for line in text.lines() {
            if let Some(message) = kernel_message(line)
                && visit(message).is_break()
            {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// `6,85,102734,-;mem auto-init: …`: priority and facility, sequence, microseconds, flags; then the message.
fn kernel_message(record: &str) -> Option<&str> {
    let (prefix, message) = record.split_once(';')?;
    let priority: u32 = prefix.split(',').next()?.parse().ok()?;
    (priority >> 3 == 0).then_some(message)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::fake::Tree;
    use proptest::prelude::*;

    fn all(roots: &Roots) -> Vec<String> {
        let mut found = Vec::new();
        messages(roots, |message| {
            found.push(message.to_owned());
            ControlFlow::Continue(())
        })
        .unwrap();
        found
    }

    #[test]
    fn only_what_the_kernel_said() {
        let log = "5,0,0,-;Linux version 6.12\n SUBSYSTEM=x\n14,1,7,-;mem auto-init: heap free:on\n6,2,9,-;one; two\nnonsense\n";
        assert_eq!(all(&Tree::new(&[("dev/kmsg", log)]).roots()), ["Linux version 6.12", "one; two"]);
    }

    #[test]
    fn stops_when_told() {
        let tree = Tree::new(&[("dev/kmsg", "6,0,0,-;a\n6,1,0,-;b\n")]);
        let mut seen = 0;
        messages(&tree.roots(), |_| {
            seen += 1;
            ControlFlow::Break(())
        })
        .unwrap();
        assert_eq!(seen, 1);
    }

    #[test]
    fn an_endless_log_ends() {
        let tree = Tree::new(&[]);
        tree.write("dev/x", b"");
        std::os::unix::fs::symlink("/dev/zero", tree.roots().dev.join("kmsg")).unwrap();
        assert!(all(&tree.roots()).is_empty());
    }

    proptest! {
        #[test]
        fn never_panics(text in "([0-9]{0,12},?[0-9]*;?\\PC{0,8}\n){0,4}|\\PC*") {
            for line in text.lines() {
                let _ = kernel_message(line);
            }
        }
    }
}
