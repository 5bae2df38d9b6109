//! Log lines on stderr, with the level as journald reads it (sd-daemon(3): `<4>` warning, `<6>` info).
//!
//! The agent says little: what it says is caused by the host or by the guest's own kernel, never by a user.

use std::io::Write;

/// Something an operator should look at.
pub fn warn(text: &str) {
    line('4', text);
}

/// Something worth knowing.
pub fn info(text: &str) {
    line('6', text);
}

fn line(level: char, text: &str) {
    let mut stderr = std::io::stderr().lock();
    // A log that cannot be written has nobody to tell.
    let _ = if std::env::var_os("JOURNAL_STREAM").is_some() {
        writeln!(stderr, "<{level}>{text}")
    } else {
        writeln!(stderr, "{text}")
    };
}
