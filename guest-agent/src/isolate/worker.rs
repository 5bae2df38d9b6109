//! A thread that runs slow isolation calls beside the main loop.
//!
//! The main loop submits commands, polls [`Worker::wake_fd`] and takes completions. Commands run one after the other
//! in the order they came. Offlining has a time limit: a timer signals the thread, again and again until the kernel
//! lets go, because a signal that comes just before the system call interrupts nothing. [`Worker::cancel`] cuts
//! short whatever was submitted so far, except bringing blocks online, which always happens.
//!
//! A state machine that wants blocks and claims to go on side by side starts one worker for each.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::claim::{Batch, ClaimError, HugePageClaims};
use super::hugetlb::HugetlbError;
use super::offline::{BlockError, BlockNumber, MemoryBlocks, OfflineOutcome};
use super::sys::{self, InterruptTimer};

/// Stack of the worker thread: it calls into the kernel and formats short paths.
const STACK_BYTES: usize = 128 * 1024;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Take a block offline, giving up after `limit`.
    Offline {
        /// Which block.
        block: BlockNumber,
        /// How long the kernel may try.
        limit: Duration,
    },
    /// Bring a block of the journal online.
    Online {
        /// Which block.
        block: BlockNumber,
    },
    /// Claim up to so many huge pages as one batch. A few (8 to 32) at a time keep the reaction to demand quick.
    Claim {
        /// Most huge pages wanted.
        pages: u32,
    },
    /// Lower the hugetlb overcommit limit to what is still held; after the last release of a pass.
    SettleClaims,
}

/// What became of a command, and how long it took in the worker.
#[derive(Debug)]
pub enum Completion {
    /// Of [`Command::Offline`].
    Offline {
        /// Which block.
        block: BlockNumber,
        /// What became of it.
        outcome: OfflineOutcome,
        /// How long it took.
        took: Duration,
    },
    /// Of [`Command::Online`].
    Online {
        /// Which block.
        block: BlockNumber,
        /// Whether it is online.
        result: Result<(), BlockError>,
        /// How long it took.
        took: Duration,
    },
    /// Of [`Command::Claim`].
    Claim {
        /// The batch, or why there is none.
        result: Result<Batch, ClaimError>,
        /// How long it took.
        took: Duration,
    },
    /// Of [`Command::SettleClaims`].
    SettleClaims {
        /// Whether the limit is lowered.
        result: Result<(), HugetlbError>,
    },
}

/// Number of a command, counted from one in the order of submission.
type CommandNumber = u64;

/// What the main loop and the thread share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    timer: InterruptTimer,
    wake: File,
}

#[derive(Debug, Default)]
struct State {
    cancelled_up_to: CommandNumber,
    /// The timer may be armed only while this is set: a signal outside of it would hit another command.
    interruptible: bool,
    completions: VecDeque<Completion>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete when the lock is released, so poison means nothing here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_cancelled(&self, number: CommandNumber) -> bool {
        number <= self.state().cancelled_up_to
    }

    /// Runs `call` so that the timer interrupts it after `limit`, unless it is cancelled already.
    fn interruptible<T>(
        &self,
        number: CommandNumber,
        limit: Duration,
        call: impl FnOnce() -> T,
    ) -> io::Result<Option<T>> {
        {
            let mut state = self.state();
            if number <= state.cancelled_up_to {
                return Ok(None);
            }
            self.timer.arm(limit)?;
            state.interruptible = true;
        }
        let result = call();
        let mut state = self.state();
        state.interruptible = false;
        // What was done counts more than a timer that cannot be stopped (which the kernel has no reason for).
        let _ = self.timer.disarm();
        Ok(Some(result))
    }
}

/// Handle of the thread. Dropping it cancels what is cancellable and waits for the rest.
#[derive(Debug)]
pub struct Worker {
    commands: Option<mpsc::Sender<(CommandNumber, Command)>>,
    submitted: CommandNumber,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<HugePageClaims>>,
}

impl Worker {
    /// Starts a worker that acts on `blocks` and `claims`, and takes every block offline that it is told.
    pub fn spawn(name: &str, blocks: MemoryBlocks, claims: HugePageClaims) -> io::Result<Self> {
        Self::spawn_checked(name, blocks, claims, |_| true)
    }

    /// The same, but a block is taken offline only if `is_free` says so right before; else it is `InUse`.
    pub fn spawn_checked(
        name: &str,
        blocks: MemoryBlocks,
        claims: HugePageClaims,
        is_free: impl FnMut(BlockNumber) -> bool + Send + 'static,
    ) -> io::Result<Self> {
        let (commands, queue) = mpsc::channel();
        let (started, start) = mpsc::sync_channel(1);
        let wake = sys::eventfd()?;
        let thread = thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(move || {
            // The timer signals the thread that makes it, so it is made here.
            let shared = InterruptTimer::for_this_thread()
                .map(|timer| Arc::new(Shared { state: Mutex::default(), timer, wake }));
            match shared {
                Ok(shared) => {
                    let _ = started.send(Ok(Arc::clone(&shared)));
                    Executor { blocks, claims, is_free: Box::new(is_free), shared }.run(&queue)
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                    claims
                }
            }
        })?;
        let shared = start.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))??;
        Ok(Self { commands: Some(commands), submitted: 0, shared, thread: Some(thread) })
    }

    /// Readable while there are completions: for poll(2).
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Queues a command.
    pub fn submit(&mut self, command: Command) -> io::Result<()> {
        self.submitted += 1;
        let sent = self.commands.as_ref().map(|commands| commands.send((self.submitted, command)));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(io::Error::from(io::ErrorKind::BrokenPipe)),
        }
    }

    /// Ends every offlining and claim submitted so far as soon as the kernel lets go: within a few milliseconds.
    /// Each is still answered: `Interrupted`, or a smaller batch, or the full result if it was done already.
    pub fn cancel(&self) -> io::Result<()> {
        let mut state = self.shared.state();
        state.cancelled_up_to = self.submitted;
        if state.interruptible { self.shared.timer.arm(Duration::ZERO) } else { Ok(()) }
    }

    /// What has been done since the last call, in order.
    pub fn completions(&mut self) -> VecDeque<Completion> {
        // Cleared before the queue is taken: a completion that comes in between wakes once more.
        let _ = (&self.shared.wake).read(&mut [0; 8]);
        std::mem::take(&mut self.shared.state().completions)
    }

    /// Ends the thread and gives the claims back, for [`HugePageClaims::close`]. Completions that were not taken are
    /// returned as well: they may hold batches.
    pub fn finish(mut self) -> (Option<HugePageClaims>, VecDeque<Completion>) {
        let claims = self.join();
        (claims, self.completions())
    }

    fn join(&mut self) -> Option<HugePageClaims> {
        let _ = self.cancel();
        self.commands = None;
        self.thread.take().and_then(|thread| thread.join().ok())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.join();
    }
}

struct Executor {
    blocks: MemoryBlocks,
    claims: HugePageClaims,
    is_free: Box<dyn FnMut(BlockNumber) -> bool>,
    shared: Arc<Shared>,
}

impl Executor {
    fn run(mut self, queue: &mpsc::Receiver<(CommandNumber, Command)>) -> HugePageClaims {
        while let Ok((number, command)) = queue.recv() {
            let completion = self.execute(number, command);
            self.shared.state().completions.push_back(completion);
            // Fails only when the counter would overflow, and then the main loop is awake already.
            let _ = (&self.shared.wake).write(&1u64.to_ne_bytes());
        }
        self.claims
    }

    fn execute(&mut self, number: CommandNumber, command: Command) -> Completion {
        let start = Instant::now();
        match command {
            Command::Offline { block, limit } => {
                let free = !self.shared.is_cancelled(number) && (self.is_free)(block);
                let outcome = match self.shared.interruptible(number, limit, || {
                    if free { self.blocks.offline(block) } else { OfflineOutcome::InUse }
                }) {
                    Ok(Some(outcome)) => outcome,
                    Ok(None) => OfflineOutcome::Interrupted,
                    Err(source) => OfflineOutcome::Failed(BlockError::Timer { block, source }),
                };
                Completion::Offline { block, outcome, took: start.elapsed() }
            }
            Command::Online { block } => {
                let result = self.blocks.online(block);
                Completion::Online { block, result, took: start.elapsed() }
            }
            Command::Claim { pages } => {
                let shared = &self.shared;
                let result = self.claims.claim(pages, || shared.is_cancelled(number));
                Completion::Claim { result, took: start.elapsed() }
            }
            Command::SettleClaims => Completion::SettleClaims { result: self.claims.settle() },
        }
    }
}
