//! QEMU's monitor (QMP, docs/interop/qmp-spec.txt of QEMU): one command at a time, optionally with a file descriptor.

use std::io::{BufRead, BufReader, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};

/// QEMU answers at once unless it hangs.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Takes over the connected socket and leaves QMP's negotiation mode.
    ///
    /// # Errors
    /// What is at the other end does not speak QMP.
    pub fn new(socket: UnixStream) -> Result<Self> {
        socket.set_read_timeout(Some(ANSWER_DEADLINE))?;
        let mut qmp = Self { reader: BufReader::new(socket) };
        let greeting = qmp.receive()?;
        if greeting.get("QMP").is_none() {
            bail!("expected QEMU's greeting, got {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns what QEMU answers under `return`.
    ///
    /// # Errors
    /// QEMU refuses; the message holds its description.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.execute_with(command, arguments, None)
    }

    /// Puts a descriptor into a new descriptor set of QEMU and returns the set's number. QEMU holds it until [`Qmp::remove_fd`] or until the
    /// monitor connection closes.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn add_fd(&mut self, fd: &impl AsRawFd) -> Result<u64> {
        let answer = self.execute_with("add-fd", json!({}), Some(fd.as_raw_fd()))?;
        answer.get("fdset-id").and_then(Value::as_u64).with_context(|| format!("add-fd answered {answer}"))
    }

    /// Has QEMU close the descriptors of a set.
    ///
    /// # Errors
    /// There is no such set.
    pub fn remove_fd(&mut self, set: u64) -> Result<()> {
        self.execute("remove-fd", json!({ "fdset-id": set })).map(drop)
    }

    fn execute_with(&mut self, command: &str, arguments: Value, fd: Option<RawFd>) -> Result<Value> {
        let message = json!({ "execute": command, "arguments": arguments }).to_string();
        let fds: Vec<_> = fd.into_iter().collect();
        let control = if fds.is_empty() { vec![] } else { vec![ControlMessage::ScmRights(&fds)] };
        // Messages are far smaller than a socket buffer, so they go out whole.
        sendmsg::<()>(
            self.reader.get_ref().as_raw_fd(),
            &[IoSlice::new(message.as_bytes())],
            &control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
        .with_context(|| format!("QMP {command}"))?;
        loop {
            let mut answer = self.receive().with_context(|| format!("QMP {command}"))?;
            if let Some(error) = answer.get("error") {
                bail!("QMP {command}: {}", error.get("desc").unwrap_or(error));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            // Anything else is an event, which nobody here waits for.
        }
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("QEMU closed the monitor");
        }
        serde_json::from_str(&line).with_context(|| format!("not JSON: {line}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::Write;

    #[test]
    fn events_are_passed_over_and_errors_keep_their_description() {
        let (client, mut qemu) = UnixStream::pair().unwrap();
        qemu.write_all(b"{\"QMP\":{}}\n{\"return\":{}}\n{\"event\":\"RESUME\"}\n{\"return\":{\"running\":true}}\n{\"error\":{\"class\":\"X\",\"desc\":\"no such device\"}}\n").unwrap();
        let mut qmp = Qmp::new(client).unwrap();
        assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!({ "running": true }));
        let error = qmp.execute("device_del", json!({})).unwrap_err().to_string();
        assert!(error.contains("no such device"), "{error}");
        drop(qemu);
        assert!(qmp.execute("query-status", json!({})).is_err());
    }
}
