//! Skipped tests, counted. A test that cannot run here says so with [`skip`] and returns; `cargo xtask test` counts and bounds the lines.

use std::io::Write;

/// Environment variable with the path of the file that collects skips, one `NAME: REASON` per line.
pub const SKIPS_FILE: &str = "FPR_TEST_SKIPS";

/// Records that `test` did not run and why.
pub fn skip(test: &str, reason: &str) {
    // One line per skip is what is counted.
    let reason = reason.lines().map(str::trim).collect::<Vec<_>>().join("; ");
    eprintln!("skipped {test}: {reason}");
    let Some(path) = std::env::var_os(SKIPS_FILE) else { return };
    let written = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .and_then(|mut file| writeln!(file, "{test}: {reason}"));
    if let Err(error) = written {
        eprintln!("cannot record the skip in {}: {error}", path.display());
    }
}
