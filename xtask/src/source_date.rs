//! The date that generated files carry: that of the source, so that the same source makes the same files
//! (<https://reproducible-builds.org/specs/source-date-epoch/>).

use std::process::Command;

use anyhow::{Context, Result};
use fpr_tests::process::{self, run};

/// `SOURCE_DATE_EPOCH`, else the time of the last commit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceDate {
    seconds: u64,
}

impl SourceDate {
    pub(crate) fn get() -> Result<Self> {
        let text = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(text) => text,
            Err(_) => run(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(process::workspace()))
                .context("the source has no date: set SOURCE_DATE_EPOCH to one, in seconds")?,
        };
        let seconds = text.trim().parse().with_context(|| format!("SOURCE_DATE_EPOCH={text}: give seconds"))?;
        Ok(Self { seconds })
    }

    /// Since 1970-01-01 UTC.
    pub(crate) fn seconds(self) -> u64 {
        self.seconds
    }

    /// Such as 2026-12-01.
    pub(crate) fn day(self) -> Result<String> {
        self.format("+%F")
    }

    /// As changelogs of Debian have it.
    pub(crate) fn rfc_2822(self) -> Result<String> {
        self.format("-R")
    }

    fn format(self, format: &str) -> Result<String> {
        let mut date = Command::new("date");
        date.args(["-u", "-d", &format!("@{}", self.seconds), format]).env("LC_ALL", "C");
        Ok(run(&mut date)?.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn dates_are_those_of_the_source_in_utc() {
        let date = SourceDate { seconds: 1_700_000_000 };
        assert_eq!(date.day().unwrap(), "2023-11-14");
        assert_eq!(date.rfc_2822().unwrap(), "Tue, 14 Nov 2023 22:13:20 +0000");
    }
}
