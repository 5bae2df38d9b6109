//! Commands in the guest, over a virtio-serial port. The protocol is described at its other end, `bin/fpr-guest-shell.rs`.
//!
//! Called by [`crate::vm::Vm`]. What arrives is bounded: output beyond [`OUTPUT_LIMIT`] per command is dropped, unknown lines are ignored.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::wire::{escape, unescape};

/// What one command may print before the rest is dropped.
const OUTPUT_LIMIT: usize = 8 << 20;
/// How long the output of a command may stay open after its exit; a background grandchild can hold it for ever.
const OUTPUT_GRACE: Duration = Duration::from_secs(2);

/// The end of a command.
#[derive(Debug, Clone)]
pub struct Output {
    /// Exit status, or 128 plus the number of the signal that ended it.
    pub status: i32,
    /// Standard output and standard error, as they came.
    pub stdout: String,
    /// When the host learnt of the exit.
    pub exited_at: Instant,
}

#[derive(Debug, Default)]
struct Command {
    pid: Option<u32>,
    output: String,
    exited: Option<(i32, Instant)>,
    closed: bool,
    content: Option<Result<String, String>>,
}

#[derive(Debug, Default)]
struct State {
    ready: bool,
    gone: bool,
    last_id: u64,
    commands: HashMap<u64, Command>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `look` finds something.
    fn wait<T>(&self, what: &str, deadline: Duration, mut look: impl FnMut(&mut State) -> Option<T>) -> Result<T> {
        let end = Instant::now() + deadline;
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Ok(found);
            }
            if state.gone {
                bail!("the guest went away while waiting for {what}");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("waited {deadline:?} for {what}");
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn receive(&self, line: &str) {
        let now = Instant::now();
        let mut words = line.splitn(3, ' ');
        let (verb, id, text) = (words.next().unwrap_or_default(), words.next(), words.next().unwrap_or_default());
        let mut state = self.lock();
        if verb == "ready" {
            state.ready = true;
        } else if let Some(command) = id.and_then(|id| id.parse().ok()).and_then(|id: u64| state.commands.get_mut(&id))
        {
            match verb {
                "started" => command.pid = text.parse().ok(),
                "output" if command.output.len() < OUTPUT_LIMIT => command.output.push_str(&unescape(text)),
                "exited" => command.exited = Some((text.parse().unwrap_or(127), now)),
                "closed" => command.closed = true,
                "content" => command.content = Some(Ok(unescape(text))),
                "failed" => command.content = Some(Err(unescape(text))),
                _ => {}
            }
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// The harness's end of the guest's command server.
#[derive(Debug)]
pub struct Shell {
    shared: Arc<Shared>,
    port: Mutex<UnixStream>,
}

impl Shell {
    /// Takes over the connected port.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated.
    pub fn new(port: UnixStream) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let (reader, receiver) = (BufReader::new(port.try_clone()?), shared.clone());
        std::thread::spawn(move || {
            for line in reader.split(b'\n') {
                let Ok(line) = line else { break };
                receiver.receive(&String::from_utf8_lossy(&line));
            }
            receiver.lock().gone = true;
            receiver.changed.notify_all();
        });
        Ok(Self { shared, port: Mutex::new(port) })
    }

    /// Whether the guest has announced itself yet.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.shared.lock().ready
    }

    /// Before a reset: what ran in the guest is over, and it will announce itself again.
    pub fn forget(&self) {
        let mut state = self.shared.lock();
        (state.ready, state.commands) = (false, HashMap::new());
    }

    /// Starts a command line in the guest's shell and leaves it running.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn spawn(&self, command: &str) -> Result<Job<'_>> {
        Ok(Job { shell: self, id: self.request("run", command)?, command: command.to_owned() })
    }

    /// The content of a file in the guest, read without starting a process there.
    ///
    /// # Errors
    /// The file cannot be read, or no answer came within `deadline`.
    pub fn read(&self, path: &str, deadline: Duration) -> Result<String> {
        let id = self.request("read", path)?;
        let content = self.shared.wait(path, deadline, |state| state.commands.get_mut(&id)?.content.take());
        self.shared.lock().commands.remove(&id);
        content?.map_err(|error| anyhow::anyhow!("in the guest: {error}"))
    }

    fn request(&self, verb: &str, text: &str) -> Result<u64> {
        let id = {
            let mut state = self.shared.lock();
            state.last_id += 1;
            let id = state.last_id;
            state.commands.insert(id, Command::default());
            id
        };
        self.send(&format!("{verb} {id} {}\n", escape(text)))?;
        Ok(id)
    }

    fn send(&self, message: &str) -> Result<()> {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        port.write_all(message.as_bytes()).context("the guest's command port is closed")
    }
}

/// A command that runs in the guest.
#[derive(Debug)]
pub struct Job<'shell> {
    shell: &'shell Shell,
    id: u64,
    command: String,
}

impl Job<'_> {
    /// The pid, in the guest, of the shell that runs the command (of the command itself if that begins with `exec`).
    ///
    /// # Errors
    /// It did not start within `deadline`.
    pub fn pid(&self, deadline: Duration) -> Result<u32> {
        self.shell
            .shared
            .wait(&format!("the start of `{}`", self.command), deadline, |state| state.commands.get(&self.id)?.pid)
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// `deadline` passed; the message holds the output so far.
    pub fn wait(&self, deadline: Duration) -> Result<Output> {
        let what = format!("the end of `{}`", self.command);
        let (status, exited_at) = self
            .shell
            .shared
            .wait(&what, deadline, |state| state.commands.get(&self.id)?.exited)
            .with_context(|| format!("its output so far: {:?}", self.output()))?;
        // An output that stays open is no failure.
        let _ = self.shell.shared.wait(&what, OUTPUT_GRACE, |state| state.commands.get(&self.id)?.closed.then_some(()));
        Ok(Output { status, stdout: self.output(), exited_at })
    }

    /// When the host learnt of the command's exit, if it has ended.
    #[must_use]
    pub fn exited_at(&self) -> Option<Instant> {
        self.shell.shared.lock().commands.get(&self.id)?.exited.map(|(_, at)| at)
    }

    /// What the command has printed so far.
    #[must_use]
    pub fn output(&self) -> String {
        self.shell.shared.lock().commands.get(&self.id).map(|command| command.output.clone()).unwrap_or_default()
    }

    /// Waits until the command has printed `text`.
    ///
    /// # Errors
    /// It ended without, or `deadline` passed; the message holds the output so far.
    pub fn wait_for_output(&self, text: &str, deadline: Duration) -> Result<()> {
        self.wait_for_output_after(0, text, deadline)
    }

    /// Writes a line to the command's standard input and waits for `text` in what it prints from then on: what it has printed before is no
    /// answer.
    ///
    /// # Errors
    /// The guest is gone, or as [`Job::wait_for_output`].
    pub fn ask(&self, line: &str, text: &str, deadline: Duration) -> Result<()> {
        let before = self.output().len();
        self.input(line)?;
        self.wait_for_output_after(before, text, deadline)
    }

    /// `text` begins after so many bytes of output.
    fn wait_for_output_after(&self, before: usize, text: &str, deadline: Duration) -> Result<()> {
        let what = format!("{text:?} from `{}`", self.command);
        let ended = self.shell.shared.wait(&what, deadline, |state| {
            let command = state.commands.get(&self.id)?;
            let printed = command.output.get(before..).is_some_and(|output| output.contains(text));
            if printed { Some(false) } else { command.closed.then_some(true) }
        });
        if ended.with_context(|| format!("its output so far: {:?}", self.output()))? {
            bail!("`{}` ended without printing {text:?}; it printed {:?}", self.command, self.output());
        }
        Ok(())
    }

    /// Writes a line to the command's standard input.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn input(&self, line: &str) -> Result<()> {
        self.shell.send(&format!("input {} {}\\n\n", self.id, escape(line)))
    }

    /// Sends a signal to the command's process group.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn signal(&self, signal: nix::sys::signal::Signal) -> Result<()> {
        self.shell.send(&format!("signal {} {}\n", self.id, signal as i32))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn pair() -> (Shell, BufReader<UnixStream>) {
        let (host, guest) = UnixStream::pair().unwrap();
        (Shell::new(host).unwrap(), BufReader::new(guest))
    }

    fn line(guest: &mut BufReader<UnixStream>) -> String {
        let mut line = String::new();
        guest.read_line(&mut line).unwrap();
        line
    }

    #[test]
    fn a_command_returns_its_output_and_status() {
        let (shell, mut guest) = pair();
        let job = shell.spawn("echo hi\nexit 3").unwrap();
        assert_eq!(line(&mut guest), "run 1 echo hi\\nexit 3\n");
        guest.get_mut().write_all(b"started 1 77\nexited 1 3\noutput 1 hi\\n\nclosed 1\n").unwrap();
        let output = job.wait(Duration::from_secs(60)).unwrap();
        assert_eq!((output.status, output.stdout.as_str()), (3, "hi\n"));
        assert_eq!(job.pid(Duration::from_secs(60)).unwrap(), 77);
    }

    #[test]
    fn an_earlier_answer_is_no_answer() {
        let (shell, mut guest) = pair();
        let job = shell.spawn("cat").unwrap();
        guest.get_mut().write_all(b"started 1 77\noutput 1 same\\n\n").unwrap();
        job.wait_for_output("same", Duration::from_secs(60)).unwrap();
        let unanswered = format!("{:#}", job.ask("again", "same", Duration::from_millis(50)).unwrap_err());
        assert!(unanswered.contains("waited"), "{unanswered}");
        guest.get_mut().write_all(b"output 1 same\\n\n").unwrap();
        job.wait_for_output_after("same\n".len(), "same", Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_guest_that_dies_ends_every_wait() {
        let (shell, guest) = pair();
        let job = shell.spawn("true").unwrap();
        drop(guest);
        let error = format!("{:#}", job.wait(Duration::from_secs(60)).unwrap_err());
        assert!(error.contains("went away"), "{error}");
    }

    #[test]
    fn nonsense_from_the_guest_is_ignored() {
        let (shell, mut guest) = pair();
        let job = shell.spawn("true").unwrap();
        guest.get_mut().write_all(b"exited\nexited 99 0\nexited x 0\n\xff\xff\n\nexited 1 0\nclosed 1\n").unwrap();
        assert_eq!(job.wait(Duration::from_secs(60)).unwrap().status, 0);
    }
}
