//! What must be put right after a benchmark, however it ends.
//!
//! A destructor does not run when the process is killed. So a child waits for the end of its standard input, which the kernel closes for us
//! whatever happens, and does the work then. Signals of the terminal go to the whole foreground group, hence the trap.

use std::io::Write;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// A shell script that runs when this is dropped or the process ends in any other way.
#[derive(Debug)]
pub(super) struct Aftermath(Child);

impl Aftermath {
    /// Runs `script` afterwards with `arguments` as `$1` and so on.
    pub(super) fn new(script: &str, arguments: &[&str]) -> Result<Self> {
        let waits = format!("trap '' INT TERM HUP QUIT; cat >/dev/null; {script}");
        let child = Command::new("sh")
            .args(["-c", &waits, "aftermath"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start sh")?;
        Ok(Self(child))
    }
}

impl Drop for Aftermath {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let done = self.0.wait().is_ok_and(|status| status.success());
        if !done {
            // Nobody is left to return an error to.
            let _ = writeln!(std::io::stderr(), "the benchmark could not put everything back as it was");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn it_runs_afterwards_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("done");
        let aftermath = Aftermath::new("printf %s \"$2\" >\"$1\"", &[path.to_str().unwrap(), "value"]).unwrap();
        assert!(!path.exists());
        drop(aftermath);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "value");
    }
}
