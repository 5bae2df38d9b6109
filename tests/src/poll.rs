//! Waiting with a deadline. A wait that fails says what it last saw.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Pause between two looks. Short against everything that is waited for here.
const INTERVAL: Duration = Duration::from_millis(20);

/// Looks again and again until `done` accepts what `look` returns.
///
/// # Errors
/// `look` failed, or `deadline` passed; the message then holds `what` and the last value.
pub fn until<T: Debug>(
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> Result<T>,
    done: impl Fn(&T) -> bool,
) -> Result<T> {
    let end = Instant::now() + deadline;
    loop {
        let value = look()?;
        if done(&value) {
            return Ok(value);
        }
        if Instant::now() >= end {
            bail!("waited {deadline:?} for {what}; last seen: {value:?}");
        }
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn returns_the_accepted_value() {
        let mut n = 0;
        let got = until(
            "three",
            Duration::from_secs(5),
            || {
                n += 1;
                Ok(n)
            },
            |n| *n == 3,
        )
        .unwrap();
        assert_eq!(got, 3);
    }

    #[test]
    fn a_missed_deadline_reports_the_last_value() {
        let error = until("the impossible", Duration::ZERO, || Ok(41), |n| *n == 42).unwrap_err().to_string();
        assert!(error.contains("the impossible") && error.contains("41"), "{error}");
    }
}
