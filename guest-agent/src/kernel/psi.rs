//! `/proc/pressure/memory`: how long tasks waited for memory (`kernel/sched/psi.c`).
//!
//! The agent reads it before and during a pass and stops when the guest waits. About 8 µs a reading. The averages move
//! only every 2 s (`PSI_FREQ`), the totals at once: a quick watch compares totals.

use super::text::{Fault, TextFile};
use super::{ReadError, Roots};

/// One line of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stall {
    /// Share of time in the last 10 s, in hundredths of a percent.
    pub avg10_centipercent: u32,
    /// Microseconds since boot.
    pub total_us: u64,
}

/// Pressure of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// At least one task waited.
    pub some: Stall,
    /// All tasks that were not idle waited.
    pub full: Stall,
}

/// Reader of the file, or the reason why there is none.
#[derive(Debug)]
pub enum PressureReader {
    /// The kernel counts pressure.
    Counted(PressureFile),
    /// It does not.
    Absent {
        /// Why, and what to do about it.
        reason: String,
    },
}

/// The open file.
#[derive(Debug)]
pub struct PressureFile(TextFile);

/// `EOPNOTSUPP`: the file is there, but PSI is switched off (`psi_show`).
const SWITCHED_OFF: i32 = nix::libc::EOPNOTSUPP;

impl PressureReader {
    /// Opens the file and reads it once. A kernel without PSI is no error.
    pub fn open(roots: &Roots) -> Result<Self, ReadError> {
        let path = roots.proc.join("pressure/memory");
        let opened = TextFile::open(path.clone()).and_then(|mut file| file.parse(parse).map(|_| file));
        match opened {
            Ok(file) => Ok(Self::Counted(PressureFile(file))),
            Err(error) if error.is_not_found() => Ok(Self::Absent {
                reason: format!(
                    "no {}: the kernel has no CONFIG_PSI, or needs psi=1 on its command line",
                    path.display()
                ),
            }),
            Err(ReadError::Io { source, .. }) if source.raw_os_error() == Some(SWITCHED_OFF) => {
                Ok(Self::Absent { reason: format!("{} is switched off: boot with psi=1", path.display()) })
            }
            Err(error) => Err(error),
        }
    }

    /// The figures of now, `None` if the kernel has none.
    pub fn read(&mut self) -> Result<Option<Pressure>, ReadError> {
        match self {
            Self::Counted(PressureFile(file)) => file.parse(parse).map(Some),
            Self::Absent { .. } => Ok(None),
        }
    }
}

fn parse(text: &str) -> Result<Pressure, Fault> {
    let mut pressure = Pressure::default();
    let mut some_seen = false;
    for (index, line) in text.lines().enumerate() {
        let stall = stall(line).ok_or_else(|| Fault::at(index, "some or full with avg10= and total=", line))?;
        if line.starts_with("some ") {
            pressure.some = stall;
            some_seen = true;
        } else {
            pressure.full = stall;
        }
    }
    if some_seen { Ok(pressure) } else { Err(Fault::Missing { wanted: "line \"some\"" }) }
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`
fn stall(line: &str) -> Option<Stall> {
    let fields = line.strip_prefix("some ").or_else(|| line.strip_prefix("full "))?;
    let value = |name: &str| {
        fields.split(' ').find_map(|field| field.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')))
    };
    let (percent, hundredths) = value("avg10")?.split_once('.')?;
    if hundredths.len() != 2 {
        return None;
    }
    let percent: u32 = percent.parse().ok()?;
    Some(Stall {
        avg10_centipercent: percent.checked_mul(100)?.checked_add(hundredths.parse().ok()?)?,
        total_us: value("total")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::kernel::fake::Tree;
    use proptest::prelude::*;

    const TEXT: &str =
        "some avg10=12.34 avg60=5.00 avg300=1.20 total=987654321\nfull avg10=0.07 avg60=0.00 avg300=0.00 total=42\n";

    #[test]
    fn a_real_file() {
        let tree = Tree::new(&[("proc/pressure/memory", TEXT)]);
        let mut reader = PressureReader::open(&tree.roots()).unwrap();
        let some = Stall { avg10_centipercent: 1234, total_us: 987_654_321 };
        let full = Stall { avg10_centipercent: 7, total_us: 42 };
        assert_eq!(reader.read().unwrap(), Some(Pressure { some, full }));
    }

    #[test]
    fn absence_has_a_reason() {
        let mut reader = PressureReader::open(&Tree::new(&[]).roots()).unwrap();
        assert_eq!(reader.read().unwrap(), None);
        let PressureReader::Absent { reason } = reader else { panic!("present") };
        assert!(reason.contains("CONFIG_PSI"), "{reason}");
    }

    #[test]
    fn wrong_lines() {
        for text in
            ["some avg10=1 total=1\n", "some avg10=1.5 total=1\n", "half avg10=1.50 total=1\n", "some avg10=1.50\n"]
        {
            assert!(matches!(parse(text), Err(Fault::Line { line: 1, .. })), "{text}");
        }
        assert!(matches!(parse("full avg10=0.00 total=1\n"), Err(Fault::Missing { .. })));
    }

    proptest! {
        #[test]
        fn never_panics(text in "((some|full) avg10=[0-9]{0,12}\\.[0-9]{0,3} total=[0-9]{0,25}\n){0,4}|\\PC*") {
            let _ = parse(&text);
        }
    }
}
