//! One live line on a terminal; plain lines where there is none.

use std::time::Duration;

use indicatif::ProgressBar;

/// A line that says what goes on at the moment.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn start() -> Self {
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// Replaces the live line.
    pub(crate) fn say(&self, what: &str) {
        if self.0.is_hidden() {
            eprintln!("{what}");
        } else {
            self.0.set_message(what.to_owned());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
