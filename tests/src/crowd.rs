//! Many real processes that each hold some memory of its own, for benchmarks of reading them all.
//!
//! They are forked from one process that does nothing else, so that they are small, wait until they are told to touch
//! their memory, and end with whoever made them, also if that is killed.

#[allow(unsafe_code)]
mod sys;

use std::fs;
use std::io::Read;
use std::io::Write;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::OFlag;
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, pipe2};

use crate::units::MIB;

/// What a process costs beside the memory it holds: kernel stack, page tables, copied pages. Measured: 150 to 250 KiB.
const OVERHEAD: u64 = MIB / 4;

/// The processes. Dropping it ends them.
#[derive(Debug)]
pub struct Crowd {
    /// In the order of what they hold.
    pub pids: Vec<i32>,
    maker: Pid,
    ready: fs::File,
    go: Option<OwnedFd>,
    /// Closed to end them.
    end: Option<OwnedFd>,
}

impl Crowd {
    /// Makes one process for each of `pages`, which says how many pages it is to hold. They hold nothing yet.
    ///
    /// # Errors
    /// The machine has not enough memory, or does not allow as many processes.
    pub fn new(pages: &[usize]) -> Result<Self> {
        let held: u64 = pages.iter().map(|pages| *pages as u64 * 4096).sum();
        let needed = held + pages.len() as u64 * OVERHEAD;
        let available = available().context("how much memory there is")?;
        ensure!(
            needed < available,
            "{} processes need about {} MiB and {} MiB are available: end something, or ask for fewer",
            pages.len(),
            needed / MIB,
            available / MIB
        );
        // Ends that another child of this process inherited would never end.
        let pipe = || pipe2(OFlag::O_CLOEXEC);
        let ((pids_out, pids_in), (ready_out, ready_in)) = (pipe()?, pipe()?);
        let ((go_out, go_in), (end_out, end_in)) = (pipe()?, pipe()?);
        let maker = sys::fork_maker(pages, &sys::Ends { pids: &pids_in, ready: &ready_in, go: &go_out, end: &end_out })
            .context("cannot fork")?;
        drop((pids_in, ready_in, go_out, end_out));
        let mut crowd = Self { pids: Vec::new(), maker, ready: ready_out.into(), go: Some(go_in), end: Some(end_in) };
        let mut bytes = Vec::new();
        fs::File::from(pids_out).read_to_end(&mut bytes).context("the pids of the processes")?;
        crowd.pids = bytes.chunks_exact(4).map(|pid| i32::from_ne_bytes([pid[0], pid[1], pid[2], pid[3]])).collect();
        if crowd.pids.len() < pages.len() {
            bail!(
                "only {} of {} processes could be made: raise `ulimit -u`, kernel.pid_max, kernel.threads-max or pids.max of the cgroup",
                crowd.pids.len(),
                pages.len()
            );
        }
        Ok(crowd)
    }

    /// Has them take their memory, and waits until they have.
    ///
    /// # Errors
    /// One of them has ended.
    pub fn hold(&mut self) -> Result<()> {
        self.go = None;
        let mut answers = vec![0; self.pids.len()];
        self.ready.read_exact(&mut answers).context("not every process has taken its memory: was there enough?")?;
        Ok(())
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.go = None;
        self.end = None;
        // It waits for all of them, so nobody is left when it has ended.
        if let Err(error) = waitpid(self.maker, None) {
            // stderr may be closed; nothing else can be done.
            let _ = writeln!(std::io::stderr(), "the processes of the benchmark may be there still: {error}");
        }
    }
}

fn available() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).context("no MemAvailable")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn resident_pages(pid: i32) -> Option<u64> {
        let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
        text.split_whitespace().nth(1)?.parse().ok()
    }

    #[test]
    fn they_hold_what_they_should_and_end() {
        let mut crowd = Crowd::new(&[16, 256]).unwrap();
        let pids = crowd.pids.clone();
        let before: Vec<u64> = pids.iter().map(|pid| resident_pages(*pid).unwrap()).collect();
        crowd.hold().unwrap();
        let more: Vec<u64> =
            pids.iter().zip(&before).map(|(pid, before)| resident_pages(*pid).unwrap() - before).collect();
        assert!(more[0] >= 16 && more[1] >= 256 && more[1] - more[0] >= 200, "{more:?}");
        drop(crowd);
        assert!(pids.iter().all(|pid| resident_pages(*pid).is_none()), "still there");
    }
}
