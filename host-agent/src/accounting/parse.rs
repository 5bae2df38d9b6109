//! What the kernel's accounting files say. Pure: text in, numbers out.
//!
//! Called by the readers. Nothing in a text is trusted: a number that does not parse, or that no machine can have, is
//! [`Malformed`], never 0.

/// No machine has more memory: physical addresses of x86-64 and arm64 end at 52 bits. A counter that wrapped below zero
/// is printed as a number close to 2^64, in pages or KiB, and is beyond it, too.
const MAX_BYTES: u64 = 1 << 52;

/// What could not be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    /// A line or a word that must be there.
    #[error("there is no {0}")]
    Missing(&'static str),
    /// Not a number.
    #[error("{what} is {text:?}, not a number")]
    NotANumber {
        /// Which.
        what: &'static str,
        /// What stands there, cut.
        text: String,
    },
    /// A counter that wrapped, or nonsense.
    #[error("{what} is {text:?}, more than any machine has: the counter has wrapped or the file is no such file")]
    Impossible {
        /// Which.
        what: &'static str,
        /// What stands there, cut.
        text: String,
    },
}

/// What is shown of a bad text.
fn cut(text: &str) -> String {
    text.chars().take(32).collect()
}

/// `text` times `unit_bytes`.
pub(super) fn bytes(text: &str, what: &'static str, unit_bytes: u64) -> Result<u64, Malformed> {
    let digits = text.trim();
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return match digits.strip_prefix('-').filter(|rest| rest.bytes().all(|byte| byte.is_ascii_digit())) {
            Some(rest) if !rest.is_empty() => Err(Malformed::Impossible { what, text: cut(digits) }),
            _ => Err(Malformed::NotANumber { what, text: cut(digits) }),
        };
    }
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_bytes));
    number.filter(|bytes| *bytes <= MAX_BYTES).ok_or_else(|| Malformed::Impossible { what, text: cut(digits) })
}

/// The rest of the line that begins with `key` and one of the separators `:`, space or tab.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix([':', ' ', '\t'])).map(str::trim)
}

/// A field of `status` or `smaps_rollup`, which are in KiB: `VmRSS:     1234 kB`.
pub(super) fn kib(text: &str, key: &'static str) -> Result<u64, Malformed> {
    let value = field(text, key).ok_or(Malformed::Missing(key))?;
    match value.strip_suffix("kB") {
        Some(number) => bytes(number, key, 1024),
        None => Err(Malformed::NotANumber { what: key, text: cut(value) }),
    }
}

/// A field of `memory.stat`, `ksm_stat` or `status` without a unit of its own.
pub(super) fn count(text: &str, key: &'static str, unit_bytes: u64) -> Result<u64, Malformed> {
    bytes(field(text, key).ok_or(Malformed::Missing(key))?, key, unit_bytes)
}

/// A field that may be below zero: `ksm_process_profit`.
pub(super) fn signed(text: &str, key: &'static str) -> Result<i64, Malformed> {
    let value = field(text, key).ok_or(Malformed::Missing(key))?;
    let number: i64 = value.parse().map_err(|_| Malformed::NotANumber { what: key, text: cut(value) })?;
    if number.unsigned_abs() > MAX_BYTES {
        return Err(Malformed::Impossible { what: key, text: cut(value) });
    }
    Ok(number)
}

/// A word of `status`: the process's name.
pub(super) fn name(text: &str) -> &str {
    field(text, "Name").unwrap_or("?")
}

/// The second number of `statm` (proc_pid_statm(5)): pages in memory.
pub(super) fn resident(statm: &str, page_bytes: u64) -> Result<u64, Malformed> {
    let word = statm.split_ascii_whitespace().nth(1).ok_or(Malformed::Missing("second number"))?;
    bytes(word, "resident", page_bytes)
}

/// How many CPUs a list such as `0-3,8` names (`Documentation/admin-guide/cputopology.rst`).
pub(super) fn cpus(list: &str) -> Result<u64, Malformed> {
    /// More than any kernel is built for (`NR_CPUS` is at most 8192).
    const MAX_CPUS: u64 = 1 << 20;
    let what = "list of CPUs";
    let bad = || Malformed::NotANumber { what, text: cut(list.trim()) };
    let mut count = 0_u64;
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u64, u64) = (first.parse().map_err(|_| bad())?, last.parse().map_err(|_| bad())?);
        if last < first || last > MAX_CPUS {
            return Err(bad());
        }
        count += last - first + 1;
        if count > MAX_CPUS {
            return Err(bad());
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_of_real_files() {
        let status = "Name:\tqemu-system-x86\nVmHWM:\t  9 kB\nVmRSS:\t    1664 kB\nThreads:\t5\n";
        assert_eq!(kib(status, "VmRSS").unwrap(), 1664 << 10);
        assert_eq!(count(status, "Threads", 1).unwrap(), 5);
        assert_eq!(name(status), "qemu-system-x86");
        assert_eq!(kib("Pss:  360 kB\nPss_Dirty: 112 kB\n", "Pss").unwrap(), 360 << 10);
        assert_eq!(kib("Pss_Dirty: 112 kB\n", "Pss"), Err(Malformed::Missing("Pss")), "a longer name is another field");
        assert_eq!(count("ksm_merging_pages 10747\n", "ksm_merging_pages", 4096).unwrap(), 10747 * 4096);
        assert_eq!(signed("ksm_process_profit -64\n", "ksm_process_profit").unwrap(), -64);
        assert_eq!(resident("1000 250 100 1 0 50 0\n", 4096).unwrap(), 250 * 4096);
        assert_eq!(bytes("727617536\n", "memory.current", 1).unwrap(), 727_617_536);
        assert_eq!((cpus("0-1\n").unwrap(), cpus("0").unwrap(), cpus("0-3,8,10-11").unwrap()), (2, 1, 7));
    }

    #[test]
    fn a_wrapped_counter_is_no_figure() {
        for text in ["-4096", "18446744073709547520", "18446744073709551615", "99999999999999999999999"] {
            assert!(matches!(bytes(text, "x", 1), Err(Malformed::Impossible { .. })), "{text}");
        }
        assert!(matches!(kib("VmRSS: 18014398509481980 kB", "VmRSS"), Err(Malformed::Impossible { .. })));
        assert!(matches!(resident("1 4503599627370496 0", 4096), Err(Malformed::Impossible { .. })));
    }

    #[test]
    fn junk_is_no_figure() {
        for text in ["", "max", "12 13", "0x10", "1e9", "+5", "-", "12\u{0}"] {
            assert!(bytes(text, "x", 1).is_err(), "{text:?}");
        }
        for list in ["", "a", "3-1", "0-", "0-99999999999", ",", "0,,1"] {
            assert!(cpus(list).is_err(), "{list:?}");
        }
        assert!(kib("VmRSS: 12 MB", "VmRSS").is_err() && kib("VmRSS:", "VmRSS").is_err());
        assert!(resident("12", 4096).is_err() && resident("", 4096).is_err());
    }

    proptest! {
        #[test]
        fn nothing_panics(text in any::<String>(), unit in any::<u64>()) {
            let _ = (bytes(&text, "x", unit), resident(&text, unit), cpus(&text), signed(&text, "a"), name(&text));
            let _ = (kib(&text, "VmRSS"), count(&text, "anon", unit));
            let _ = (kib(&format!("VmRSS:{text}"), "VmRSS"), count(&format!("anon {text}"), "anon", unit));
        }

        #[test]
        fn what_is_printed_is_read(pages in 0..MAX_BYTES / 4096) {
            prop_assert_eq!(bytes(&format!("{pages}\n"), "x", 4096).unwrap(), pages * 4096);
            prop_assert_eq!(resident(&format!("9 {pages} 3 4"), 4096).unwrap(), pages * 4096);
            prop_assert_eq!(kib(&format!("a: 1\nVmRSS:\t {} kB\n", pages * 4), "VmRSS").unwrap(), pages * 4096);
        }
    }
}
