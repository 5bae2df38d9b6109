//! What a VM's memory costs its host: the allocated blocks of the memory file.
//!
//! RSS is not it: a page of a memfd stays allocated when nobody maps it. `fstat` on the descriptor QEMU holds is exact and O(1).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// `st_blocks` counts units of 512 bytes whatever the block size (inode(7)).
const STAT_BLOCK: u64 = 512;
/// Pause between two samples of a series.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// The memory file of a running VM.
#[derive(Debug, Clone)]
pub struct HostMemory {
    descriptor: PathBuf,
}

impl HostMemory {
    /// Finds the memory file among the descriptors of QEMU.
    ///
    /// # Errors
    /// QEMU is gone, or has no memfd because it runs on another kind of memory.
    pub fn of(pid: u32) -> Result<Self> {
        let dir = format!("/proc/{pid}/fd");
        let descriptors = fs::read_dir(&dir).with_context(|| dir.clone())?.filter_map(|entry| Some(entry.ok()?.path()));
        let is_memory = |path: &PathBuf| {
            fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:memory-backend-memfd"))
        };
        let descriptor =
            descriptors.into_iter().find(is_memory).with_context(|| format!("{dir} holds no memory-backend-memfd"))?;
        Ok(Self { descriptor })
    }

    /// Bytes of guest memory the host holds at this moment.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn allocated_bytes(&self) -> Result<u64> {
        // stat(2) follows the magic link to the open file itself.
        Ok(fs::metadata(&self.descriptor).with_context(|| self.descriptor.display().to_string())?.blocks() * STAT_BLOCK)
    }

    /// Starts to record.
    #[must_use]
    pub fn record(&self) -> Recording {
        let (stop, memory) = (Arc::new(AtomicBool::new(false)), self.clone());
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut samples = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let Ok(bytes) = memory.allocated_bytes() else { break };
                samples.push(Sample { at: Instant::now(), bytes });
                std::thread::sleep(SAMPLE_INTERVAL);
            }
            samples
        });
        Recording { stop, thread: Some(thread) }
    }
}

/// One look at the memory file.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// Allocated bytes.
    pub bytes: u64,
}

/// A recording in progress; it ends with [`Recording::stop`], or when it is dropped.
#[derive(Debug)]
pub struct Recording {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<Sample>>>,
}

impl Recording {
    /// Ends the recording and returns its samples in order.
    #[must_use]
    pub fn stop(mut self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
