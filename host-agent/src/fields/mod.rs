//! Every figure of `status --json` that is a metric: one table, from which `/metrics`, the table of `status`, `top` and
//! docs/metrics.md are drawn.
//!
//! Used by [`crate::metrics`], [`table`], [`crate::top`] and the tests of the board and the alerts. It reads the JSON
//! that `status --json` prints, so a client needs nothing but that; what is missing or null there has no sample.
//!
//! # Adding a figure
//! 1. Add it to `VmStatus` (or what it holds) and, with a value, to [`sample`]: the compiler asks for it.
//! 2. Add one line to [`VM`](registry::VM), or to [`DAEMON`](registry::DAEMON) for a figure of the daemon. A leaf that
//!    makes no metric goes into [`NO_METRIC`](registry::NO_METRIC) with the reason.
//! 3. `FPR_UPDATE_DOCS=1 cargo test -p fpr-host-agent --test metrics` writes docs/metrics.md. The same test wants to see
//!    the metric set by a scenario: make one of them do it.
//!
//! # Paths
//! ```text
//! /memory/backed_bytes                       a member
//! /agent/regions_proven/0                    an element of an array
//! /counters/sources/{source}/dropped_bytes   each member; its name becomes the label `source`
//! /balloon/{queue=reporting|inflate}/chains  these members only
//! /gates/[gate,source]/closed_for_s          each element; its members `gate` and `source` become labels
//! ```

mod path;
mod registry;
#[cfg(test)]
pub(crate) mod sample;
pub mod table;
#[cfg(test)]
mod tests;

pub use path::{Labels, leaves, visit};
pub use registry::{DAEMON, NO_METRIC, VM};

use serde_json::Value;

/// One figure.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Where it is in the status of the daemon or of a VM; see the module.
    pub path: &'static str,
    /// Its name in Prometheus.
    pub name: &'static str,
    /// What it does over time.
    pub kind: Kind,
    /// In what the JSON counts.
    pub unit: Unit,
    /// Whose word it is.
    pub origin: Origin,
    /// One sentence without a full stop, for HELP and docs/metrics.md.
    pub help: &'static str,
}

/// What a figure does over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only rises while its writer lives.
    Counter,
    /// Rises and falls.
    Gauge,
    /// True or false: 1 or 0.
    Flag,
    /// 1 if there is anything at the path, 0 if it is null.
    Presence,
    /// One of these words; each has a sample with the label `state`, and the current one is 1.
    State(&'static [&'static str]),
    /// A text that becomes this label; the value is 1.
    Info(&'static str),
}

/// In what the JSON counts. Prometheus gets base units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Nanoseconds; seconds in Prometheus.
    Nanoseconds,
    /// Percent; a ratio in Prometheus.
    Percent,
    /// Things.
    Count,
}

impl Unit {
    /// The end of a metric's name, but for `_total`.
    #[must_use]
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Bytes => "_bytes",
            Self::Seconds | Self::Nanoseconds => "_seconds",
            Self::Percent => "_ratio",
            Self::Count => "",
        }
    }
}

/// Whose word a figure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The host counted or measured it.
    Host,
    /// The guest says so: an indication only.
    Guest,
}

/// How the name of a metric begins that is the guest's word, and no other.
pub const GUEST_CLAIMED: &str = "fpr_guest_claimed_";

/// A number as JSON has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// Exact.
    Integer(u64),
    /// With a fraction.
    Float(f64),
}

impl Number {
    /// For sums, ratios and sorting.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // 8 PiB are exact
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Integer(integer) => integer as f64,
            Self::Float(float) => float,
        }
    }
}

impl Field {
    /// The field of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        DAEMON.iter().chain(VM).find(|field| field.name == name)
    }

    /// Calls `each` with every sample of this field in `status`, in base units.
    pub fn samples<'a>(&self, status: &'a Value, each: &mut dyn FnMut(&Labels<'a>, Number)) {
        visit(self.path, status, &mut |labels, value| match self.kind {
            Kind::State(states) => {
                let Some(current) = value.as_str() else { return };
                let mut labels = labels.clone();
                for state in states {
                    labels.push(("state", state));
                    each(&labels, Number::Integer(u64::from(*state == current)));
                    labels.pop();
                }
            }
            Kind::Info(label) => {
                let Some(text) = value.as_str() else { return };
                let mut labels = labels.clone();
                labels.push((label, text));
                each(&labels, Number::Integer(1));
            }
            Kind::Presence => each(labels, Number::Integer(u64::from(!value.is_null()))),
            Kind::Flag => {
                if let Some(flag) = value.as_bool() {
                    each(labels, Number::Integer(u64::from(flag)));
                }
            }
            Kind::Counter | Kind::Gauge => {
                if let Some(number) = number(value, self.unit) {
                    each(labels, number);
                }
            }
        });
    }

    /// The sum over all labels; `None` if there is no sample.
    #[must_use]
    pub fn sum(&self, status: &Value) -> Option<f64> {
        let mut sum = None;
        self.samples(status, &mut |_, number| *sum.get_or_insert(0.0) += number.as_f64());
        sum
    }
}

fn number(value: &Value, unit: Unit) -> Option<Number> {
    match (unit, value.as_u64()) {
        (Unit::Bytes | Unit::Seconds | Unit::Count, Some(integer)) => Some(Number::Integer(integer)),
        (Unit::Nanoseconds, _) => value.as_f64().map(|nanoseconds| Number::Float(nanoseconds / 1e9)),
        (Unit::Percent, _) => value.as_f64().map(|percent| Number::Float(percent / 100.0)),
        (_, None) => value.as_f64().map(Number::Float),
    }
}
