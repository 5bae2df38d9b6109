//! One VM's figures, read again and again.
//!
//! Held by the daemon for each VM, made anew by the `memory` command. What is found once (the process's directory, the
//! cgroup, the memory files) is kept; the files that are read on every tick stay open, so that a tick costs a pread each.
//! Nothing kept keeps guest memory alive: the memory files are not held. Time is the caller's; only the price of a read is
//! taken here.

use super::backing::Files;
use super::cgroup::{Kept, VmCgroup};
use super::ksm::{self, KsmStat};
use super::percpu::Kernel;
use super::process::{self, Process};
use super::{Absent, AbsentReason, Measured, Method, Reading, Roots, Subject};
use std::path::PathBuf;
use std::time::Instant;

/// Fields of `smaps_rollup` that are in transparent huge pages, mapped as such.
const THP_FIELDS: &[&str] = &["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"];

/// Reads what one VM costs.
#[derive(Debug)]
pub struct Reader {
    roots: Roots,
    kernel: Kernel,
    pid: Option<i32>,
    named_cgroup: Option<PathBuf>,
    process: Result<Process, Absent>,
    statm: Option<Kept>,
    status: Option<Kept>,
    cgroup: Result<VmCgroup, Absent>,
    files: Result<Files, Absent>,
    buffer: Vec<u8>,
}

impl Reader {
    /// Finds the VM's process, cgroup and files. What cannot be found is absent from each reading, with the reason.
    #[must_use]
    pub fn new(roots: &Roots, subject: &Subject) -> Self {
        let process = match subject.pid {
            Some(pid) => Process::open(roots, pid),
            None => Err(Absent::new(
                AbsentReason::NoProcess,
                "the VM's process is not known: no front end is connected, or only a cgroup was named",
            )),
        };
        let files = match &process {
            _ if !subject.files.is_empty() => Ok(Files::held(&subject.files)),
            Ok(process) => Files::find(process),
            Err(absent) => Err(absent.clone()),
        };
        let nowhere = Err(Absent::new(AbsentReason::NoCgroup, "not looked for"));
        let mut reader = Self {
            roots: roots.clone(),
            kernel: Kernel::look(roots),
            pid: subject.pid,
            named_cgroup: subject.cgroup.clone(),
            process,
            statm: None,
            status: None,
            cgroup: nowhere,
            files,
            buffer: Vec::new(),
        };
        reader.find_cgroup();
        reader
    }

    fn find_cgroup(&mut self) {
        self.cgroup = match (&self.named_cgroup, &self.process, self.pid) {
            (Some(name), _, _) => VmCgroup::named(&self.roots, name),
            (None, Ok(process), Some(pid)) => VmCgroup::of_process(&self.roots, process, pid),
            (None, Err(absent), _) => Err(absent.clone()),
            (None, Ok(_), None) => Err(Absent::new(AbsentReason::NoCgroup, "neither process nor cgroup is known")),
        };
    }

    /// Looks again who is in the cgroup. Worth it every few minutes: somebody else may have been put into it.
    pub fn refresh(&mut self) {
        self.find_cgroup();
    }

    /// The cgroup's path below the hierarchy's root, if the VM has one of its own.
    #[must_use]
    pub fn cgroup_path(&self) -> Option<PathBuf> {
        self.cgroup.as_ref().ok().map(VmCgroup::path)
    }

    /// One figure, from the cheapest source that has it.
    pub fn read(&mut self, method: Method) -> Reading {
        timed(|| match method {
            Method::Rss => self.rss(),
            Method::Pss => process::rollup(self.process()?, &["Pss"]),
            Method::Cgroup => self.usage(),
            Method::RssCgroup => {
                self.check_cgroup()?;
                self.cgroup.as_ref().map_err(Clone::clone)?.resident(&self.roots, &self.kernel)
            }
            Method::Backing => self.files.as_ref().map_err(Clone::clone)?.allocated(),
            Method::Swap => self.swap(),
            Method::Ksm => ksm::merged(self.process()?, &self.kernel),
            Method::Thp => process::rollup(self.process()?, THP_FIELDS),
        })
    }

    /// One figure to decide on: where the cheap source of the resident set is approximate, its page tables are walked.
    pub fn read_precise(&mut self, method: Method) -> Reading {
        match method {
            Method::Rss if !self.kernel.sums_precisely() => timed(|| process::rollup(self.process()?, &["Rss"])),
            method => self.read(method),
        }
    }

    /// Anonymous memory of the process, resident and swapped out: the part of its cost that is in no file. An upper bound
    /// where some of it is shared.
    pub(super) fn anonymous(&mut self) -> Reading {
        let start = Instant::now();
        Ok(self.of_status(process::anonymous_of_status)?.after(start.elapsed()))
    }

    /// The same by its share and precisely.
    pub(super) fn anonymous_precise(&mut self) -> Reading {
        timed(|| process::rollup(self.process()?, &["Pss_Anon", "SwapPss"]))
    }

    /// One figure from each source that has it, the cheapest first.
    pub fn read_all(&mut self, method: Method) -> Vec<Reading> {
        let mut readings = vec![self.read(method)];
        // If the first says why the process cannot be read, the others say the same.
        if readings[0].is_ok() {
            match method {
                Method::Rss if !self.kernel.counts_per_thread() => {
                    readings.push(timed(|| self.of_status(process::rss_of_status)));
                }
                Method::Swap => readings.push(timed(|| process::rollup(self.process()?, &["SwapPss"]))),
                _ => {}
            }
            if method == Method::Rss {
                readings.push(timed(|| process::rollup(self.process()?, &["Rss"])));
            }
        }
        readings
    }

    /// Page cache in the cgroup's usage. Not cheap.
    pub fn page_cache(&mut self) -> Reading {
        timed(|| {
            self.check_cgroup()?;
            self.cgroup.as_ref().map_err(Clone::clone)?.page_cache()
        })
    }

    /// What KSM merged and what that saves.
    ///
    /// # Errors
    /// There is no process, or this kernel does not say.
    pub fn ksm(&self) -> Result<KsmStat, Absent> {
        ksm::stat(self.process()?, &self.kernel)
    }

    fn process(&self) -> Result<&Process, Absent> {
        self.process.as_ref().map_err(Clone::clone)
    }

    fn rss(&mut self) -> Result<Measured, Absent> {
        if self.kernel.counts_per_thread() {
            return self.of_status(process::rss_of_status);
        }
        let process = self.process.as_ref().map_err(Clone::clone)?;
        let path = process.path("statm");
        let text = kept(&mut self.statm, process, "statm")?.text(&mut self.buffer)?;
        process::rss_of_statm(&text, &path, &self.kernel)
    }

    fn swap(&mut self) -> Result<Measured, Absent> {
        self.of_status(process::swap_of_status)
    }

    fn of_status(
        &mut self,
        parse: fn(&str, &std::path::Path, &Kernel) -> Result<Measured, Absent>,
    ) -> Result<Measured, Absent> {
        let process = self.process.as_ref().map_err(Clone::clone)?;
        let path = process.path("status");
        let text = kept(&mut self.status, process, "status")?.text(&mut self.buffer)?;
        parse(&text, &path, &self.kernel)
    }

    fn usage(&mut self) -> Result<Measured, Absent> {
        self.check_cgroup()?;
        self.cgroup.as_ref().map_err(Clone::clone)?.usage(&self.kernel, &mut self.buffer)
    }

    /// Looks for the cgroup again if the process has moved; one that has none keeps its reason until [`Self::refresh`].
    fn check_cgroup(&mut self) -> Result<(), Absent> {
        let Ok(cgroup) = &self.cgroup else { return Ok(()) };
        if !cgroup.is_current(&mut self.buffer)? {
            self.find_cgroup();
        }
        Ok(())
    }
}

/// The file, opened the first time it is read.
fn kept<'a>(slot: &'a mut Option<Kept>, process: &Process, name: &str) -> Result<&'a Kept, Absent> {
    match slot {
        Some(kept) => Ok(kept),
        None => Ok(slot.insert(Kept::new(process.file(name, "mount procfs")?, process.path(name)))),
    }
}

fn timed(read: impl FnOnce() -> Result<Measured, Absent>) -> Reading {
    let start = Instant::now();
    let measured = read()?;
    Ok(measured.after(start.elapsed()))
}
