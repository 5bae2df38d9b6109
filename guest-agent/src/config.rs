//! What the agent is told: a TOML file, then flags on top of it.
//!
//! ```toml
//! connect = "vsock:2:6713458"   # or "unix:/path"
//! run_dir = "/run/fpr-guest"
//! offline = true                # memory-block offlining
//! claims = true                 # huge-page claims
//! skip_checks = []              # names of checks not to make: command-line, boot-log, kernel-config, …
//!
//! [policy]
//! trigger = "32M"               # rise of free memory that starts a pass
//! min_reclaim = "8M"            # backing worth a pass
//! floor = "96M"                 # memory left free whatever the agent holds
//! min_free_age = "100ms"        # how long memory must be free
//! max_free_age = "30s"          # the same when what was dropped keeps coming back
//! max_interval = "300s"         # longest pause between passes
//! offline_limit = "500ms"       # time the kernel may take for one block
//! ```
//! An unknown key is an error that names key, file and line. A missing file is fine unless it was asked for.

use crate::agent::policy::Policy;
use crate::kernel::detect::Check;
use crate::run::channel::{Address, AddressError};
use fpr_protocol::ByteSize;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Read when no other file is named.
pub const DEFAULT_PATH: &str = "/etc/fpr/guest.toml";

/// Lock, journal and hugetlbfs mount; a tmpfs, because none of it outlives a boot.
pub const DEFAULT_RUN_DIR: &str = "/run/fpr-guest";

/// Why a configuration is none.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// It is not what is written above.
    #[error("{}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Key, line and what would be right.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A flag's address that is none.
    #[error("--connect: {0}")]
    Address(#[from] AddressError),
    /// A flag's check that there is none of.
    #[error("--skip-check: {0}")]
    Check(#[from] crate::kernel::detect::UnknownCheck),
    /// A value that cannot be used.
    #[error("{place}: {what}")]
    Value {
        /// File and key.
        place: String,
        /// What is wrong and what would be right.
        what: String,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    connect: Option<Text<Address>>,
    run_dir: Option<PathBuf>,
    offline: Option<bool>,
    claims: Option<bool>,
    skip_checks: Vec<Text<Check>>,
    policy: FilePolicy,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct FilePolicy {
    trigger: Option<ByteSize>,
    min_reclaim: Option<ByteSize>,
    floor: Option<ByteSize>,
    min_free_age: Option<Time>,
    max_free_age: Option<Time>,
    max_interval: Option<Time>,
    offline_limit: Option<Time>,
}

/// Whether a method may be used, by the operator's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// If the guest allows.
    Use,
    /// Not.
    Avoid,
}

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the host agent is.
    pub connect: Address,
    /// Lock, journal, mount.
    pub run_dir: PathBuf,
    /// Memory-block offlining.
    pub offline: Wish,
    /// Huge-page claims.
    pub claims: Wish,
    /// Checks that are not made.
    pub skip_checks: BTreeSet<Check>,
    /// Numbers of the state machine.
    pub policy: Policy,
    /// Time the kernel may take to take one block offline.
    pub offline_limit: Duration,
}

/// What the command line says.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--config`.
    pub config: Option<PathBuf>,
    /// `--connect`.
    pub connect: Option<String>,
    /// `--run-dir`.
    pub run_dir: Option<PathBuf>,
    /// `--no-offline`, `--no-claims`: methods not to use.
    pub avoid: BTreeSet<&'static str>,
    /// `--skip-check`.
    pub skip_checks: Vec<String>,
}

/// Default of `offline_limit`: a wholly free block takes 3 to 50 ms even in an emulated guest.
const OFFLINE_LIMIT: Duration = Duration::from_millis(500);

impl Config {
    /// Reads the file and puts the flags on top.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn load(flags: &Flags) -> Result<Self, ConfigError> {
        let path = flags.config.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_PATH));
        let file = match std::fs::read_to_string(&path) {
            Ok(text) => toml::from_str(&text)
                .map_err(|source| ConfigError::Parse { path: path.clone(), source: Box::new(source) })?,
            Err(error) if flags.config.is_none() && error.kind() == std::io::ErrorKind::NotFound => File::default(),
            Err(source) => return Err(ConfigError::Read { path, source }),
        };
        Self::merge(file, &path, flags)
    }

    fn merge(file: File, path: &Path, flags: &Flags) -> Result<Self, ConfigError> {
        let connect = match (&flags.connect, file.connect) {
            (Some(text), _) => text.parse()?,
            (None, Some(Text(address))) => address,
            (None, None) => Address::default(),
        };
        let wish = |name, configured: Option<bool>| {
            if flags.avoid.contains(name) || configured == Some(false) { Wish::Avoid } else { Wish::Use }
        };
        let mut skip_checks: BTreeSet<Check> = file.skip_checks.into_iter().map(|Text(check)| check).collect();
        for name in &flags.skip_checks {
            skip_checks.insert(name.parse()?);
        }
        let place = |key: &str| format!("{}: {key}", path.display());
        let defaults = Policy::default();
        let of = file.policy;
        let policy = Policy {
            trigger_bytes: of.trigger.map_or(defaults.trigger_bytes, |size| size.0),
            min_reclaim_bytes: of.min_reclaim.map_or(defaults.min_reclaim_bytes, |size| size.0),
            floor_bytes: of.floor.map_or(defaults.floor_bytes, |size| size.0),
            min_free_age: of.min_free_age.map_or(defaults.min_free_age, |time| time.0),
            max_free_age: of.max_free_age.map_or(defaults.max_free_age, |time| time.0),
            max_interval: of.max_interval.map_or(defaults.max_interval, |time| time.0),
            ..defaults
        };
        if policy.min_free_age > policy.max_free_age {
            let what =
                format!("{:?} is longer than max_free_age, which is {:?}", policy.min_free_age, policy.max_free_age);
            return Err(ConfigError::Value { place: place("policy.min_free_age"), what });
        }
        if policy.max_interval.is_zero() {
            let what = "must be longer than 0".to_owned();
            return Err(ConfigError::Value { place: place("policy.max_interval"), what });
        }
        Ok(Self {
            connect,
            run_dir: flags.run_dir.clone().or(file.run_dir).unwrap_or_else(|| Path::new(DEFAULT_RUN_DIR).to_owned()),
            offline: wish("offline", file.offline),
            claims: wish("claims", file.claims),
            skip_checks,
            policy,
            offline_limit: of.offline_limit.map_or(OFFLINE_LIMIT, |time| time.0),
        })
    }
}

/// A value written as text: where it is wrong, the error names file, line and key.
#[derive(Debug)]
struct Text<T>(T);

impl<'de, T> Deserialize<'de> for Text<T>
where
    T: FromStr,
    T::Err: Display,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

/// `10s`: with ms, s or m.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct Time(Duration);

impl TryFrom<String> for Time {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let error = || format!("{text:?} is no duration: write it like 10s, with ms, s or m");
        let (digits, unit) = split_unit(&text);
        let number: u64 = digits.parse().map_err(|_| error())?;
        // A year is longer than anything here means.
        let millis = match unit {
            "ms" => Some(number),
            "s" => number.checked_mul(1000),
            "m" => number.checked_mul(60_000),
            _ => None,
        };
        millis.filter(|ms| *ms <= 31_536_000_000).map(|ms| Self(Duration::from_millis(ms))).ok_or_else(error)
    }
}

fn split_unit(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn load(text: &str) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.toml");
        std::fs::write(&path, text).unwrap();
        Config::load(&Flags { config: Some(path), ..Flags::default() }).map_err(|error| crate::error_chain(&error))
    }

    #[test]
    fn sizes_and_durations() {
        let config = load("offline = false\n[policy]\ntrigger = \"1G\"\nmin_free_age = \"250ms\"\n").unwrap();
        assert_eq!(config.offline, Wish::Avoid);
        assert_eq!(config.claims, Wish::Use);
        assert_eq!(config.policy.trigger_bytes, 1 << 30);
        assert_eq!(config.policy.min_free_age, Duration::from_millis(250));
        assert_eq!(config.connect, Address::default());
    }

    #[test]
    fn errors_name_key_file_and_line() {
        for (text, wanted) in [
            ("offlin = true\n", &["guest.toml", "line 1", "offlin", "offline"][..]),
            ("[policy]\nfloor = 5\n", &["guest.toml", "line 2"]),
            ("[policy]\nfloor = \"5X\"\n", &["line 2", "write it like 64M"]),
            ("[policy]\nfloor = \"99999999999G\"\n", &["too large"]),
            ("[policy]\nmin_free_age = \"10\"\n", &["write it like 10s"]),
            ("[policy]\nmin_free_age = \"40s\"\n", &["guest.toml", "policy.min_free_age", "longer than max_free_age"]),
            ("[policy]\nmax_interval = \"0s\"\n", &["guest.toml", "policy.max_interval"]),
            ("connect = \"tcp:1\"\n", &["guest.toml", "line 1", "connect", "vsock:2:6713458"]),
            ("skip_checks = [\"x\"]\n", &["guest.toml", "line 1", "skip_checks", "\"x\"", "boot-log"]),
        ] {
            let error = load(text).unwrap_err();
            for word in wanted {
                assert!(error.contains(word), "{error:?} lacks {word:?}");
            }
        }
    }
}
