//! `top`: a live view of all VMs in the terminal.
//!
//! ```text
//!  thread: asks the control socket ---- status ---> loop: Top::update, draw
//!  thread: reads the keyboard -------- keys ------>       Top::act
//!  SIGTERM, SIGINT, SIGHUP ---------------------->        ends
//! ```
//! [`state`] holds what is shown and needs neither terminal nor daemon, [`draw`] paints it, [`terminal`] does the I/O. It
//! trusts the daemon for the figures; text of guests was made printable there.

mod draw;
mod state;
mod terminal;

use crate::control::ClientError;
use std::path::PathBuf;
use std::time::Duration;

pub use state::{Do, Top};
pub use terminal::run;

/// What the command line says.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon's control socket.
    pub control: PathBuf,
    /// Between two looks.
    pub interval: Duration,
    /// Header of the column to sort by, in any case; the order of the configuration without one.
    pub sort: Option<String>,
}

/// Why there is no view.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// Output or input is a file or a pipe.
    #[error("top needs a terminal on standard input and output: use `fpr-host-agent status` in a script")]
    NoTerminal,
    /// The terminal does not do what it is told.
    #[error("cannot use the terminal: is TERM right? `fpr-host-agent status` needs none")]
    Terminal(#[source] std::io::Error),
    /// Threads or signals.
    #[error("cannot set up the view")]
    Os(#[source] std::io::Error),
    /// The daemon, at the first look.
    #[error("no status to show")]
    Daemon(#[from] ClientError),
}

/// Shortest interval: a look asks every VM's task.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// Longest interval.
const MAX_INTERVAL: Duration = Duration::from_secs(3600);

/// What `--interval` takes: `500ms`, `2s`, `1m`.
///
/// # Errors
/// A text that says what would be right.
pub fn interval(text: &str) -> Result<Duration, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let unit_ms = match unit {
        "ms" => Some(1),
        "s" => Some(1000),
        "m" => Some(60_000),
        _ => None,
    };
    let ms = unit_ms.and_then(|unit_ms| digits.parse::<u64>().ok()?.checked_mul(unit_ms));
    ms.map(Duration::from_millis)
        .filter(|interval| (MIN_INTERVAL..=MAX_INTERVAL).contains(interval))
        .ok_or_else(|| format!("{text:?} is no interval: write it like 2s, with ms, s or m, from 100ms to 60m"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_a_unit_and_bounds() {
        assert_eq!(interval("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(interval("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(interval("60m"), Ok(Duration::from_secs(3600)));
        for text in ["", "2", "s", "0s", "99ms", "61m", "2h", "-1s", "99999999999999999999s"] {
            assert!(interval(text).is_err_and(|error| error.contains("2s")), "{text}");
        }
    }
}
