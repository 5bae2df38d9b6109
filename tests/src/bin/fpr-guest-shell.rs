//! Command server inside the test guest.
//!
//! Started by init; the harness (`shell.rs` of this crate) is at the other end of a virtio-serial port and is trusted. One message per line,
//! words separated by a space, the last one escaped (`\n`, `\\`):
//!
//! | to the guest | answer |
//! | --- | --- |
//! | `run ID COMMAND` | `started ID PID`, any number of `output ID TEXT`, `exited ID STATUS`, `closed ID` |
//! | `input ID TEXT` | none; goes to the command's standard input |
//! | `signal ID NUMBER` | none; goes to the command's process group |
//! | `read ID PATH` | `content ID TEXT` or `failed ID TEXT`; no process is started, so watching costs the guest next to nothing |
//!
//! `exited` is sent the moment the command has ended, before what is left of its output: the harness takes its arrival as the time of exit.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fpr_tests::wire::{escape, unescape};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// The only port of the only virtio-serial device of the test guest.
const PORT: &str = "/dev/vport0p1";

#[derive(Clone)]
struct Wire(Arc<Mutex<File>>);

impl Wire {
    fn send(&self, message: &str) {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody is left to tell when the harness is gone.
        let _ = port.write_all(format!("{message}\n").as_bytes());
    }

    fn send_text(&self, kind: &str, id: &str, bytes: &[u8]) {
        self.send(&format!("{kind} {id} {}", escape(&String::from_utf8_lossy(bytes))));
    }
}

struct Job {
    group: Pid,
    input: Option<ChildStdin>,
}

type Jobs = Arc<Mutex<HashMap<String, Job>>>;

fn main() -> std::io::Result<()> {
    let port = loop {
        match OpenOptions::new().read(true).write(true).open(PORT) {
            Ok(port) => break port,
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    };
    let wire = Wire(Arc::new(Mutex::new(port.try_clone()?)));
    let jobs = Jobs::default();
    // On a line of its own, even if a reset cut the last message of an earlier boot.
    wire.send("\nready");
    for line in BufReader::new(port).lines() {
        let line = line?;
        let mut words = line.splitn(3, ' ');
        let (Some(verb), Some(id), Some(text)) = (words.next(), words.next(), words.next()) else { continue };
        let text = unescape(text);
        match verb {
            "run" => run(&wire, &jobs, id, &text),
            "read" => match std::fs::read(&text) {
                Ok(content) => wire.send_text("content", id, &content),
                Err(error) => wire.send_text("failed", id, format!("{text}: {error}").as_bytes()),
            },
            "input" => {
                if let Some(input) =
                    jobs.lock().unwrap_or_else(PoisonError::into_inner).get_mut(id).and_then(|job| job.input.as_mut())
                {
                    let _ = input.write_all(text.as_bytes()).and_then(|()| input.flush());
                }
            }
            "signal" => {
                let signal = text.parse().ok().and_then(|number: i32| Signal::try_from(number).ok());
                if let (Some(signal), Some(job)) = (signal, jobs.lock().unwrap_or_else(PoisonError::into_inner).get(id))
                {
                    let _ = killpg(job.group, signal);
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn run(wire: &Wire, jobs: &Jobs, id: &str, command: &str) {
    let spawned = std::io::pipe().and_then(|(read, write)| {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", command]).stdin(Stdio::piped()).stdout(write.try_clone()?).stderr(write).process_group(0);
        // `shell` holds the write ends and is dropped here, so that the pipe ends with its last user.
        Ok((shell.spawn()?, read))
    });
    let (mut child, mut output) = match spawned {
        Ok(spawned) => spawned,
        Err(error) => {
            wire.send_text("output", id, format!("cannot start: {error}").as_bytes());
            wire.send(&format!("exited {id} 127"));
            return wire.send(&format!("closed {id}"));
        }
    };
    wire.send(&format!("started {id} {}", child.id()));
    let job = Job { group: Pid::from_raw(child.id().cast_signed()), input: child.stdin.take() };
    jobs.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned(), job);

    let (out, out_id) = (wire.clone(), id.to_owned());
    let reader = thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = output.read(&mut buffer) {
            out.send_text("output", &out_id, &buffer[..length]);
        }
    });
    let (wire, id, jobs) = (wire.clone(), id.to_owned(), jobs.clone());
    thread::spawn(move || {
        let status =
            child.wait().ok().and_then(|status| status.code().or_else(|| status.signal().map(|signal| 128 + signal)));
        wire.send(&format!("exited {id} {}", status.unwrap_or(127)));
        jobs.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let _ = reader.join();
        wire.send(&format!("closed {id}"));
    });
}
