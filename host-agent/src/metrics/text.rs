//! The figures of one status as Prometheus reads them.

use crate::fields::{DAEMON, Field, Kind, Number, VM};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{self, DescriptorEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use serde_json::Value;
use std::fmt;

/// Which text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The text format 0.0.4 of Prometheus.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// What goes into `Content-Type`.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => encoding::prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// What a scraper that sends this `Accept` understands.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Prometheus }
    }
}

/// Writes all metrics of a daemon's status, as `status --json` prints it.
///
/// # Errors
/// None that a `String` can cause.
pub fn text(status: Value, format: Format) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot(status)));
    let mut text = String::new();
    match format {
        Format::Prometheus => encoding::prometheus_text::encode(&mut text, &registry)?,
        Format::OpenMetrics => encoding::text::encode(&mut text, &registry)?,
    }
    Ok(text)
}

#[derive(Debug)]
struct Snapshot(Value);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for field in DAEMON {
            family(field, &mut encoder, &mut std::iter::once((None, &self.0)))?;
        }
        let vms = self.0["vms"].as_array().map(Vec::as_slice).unwrap_or_default();
        for field in VM {
            family(field, &mut encoder, &mut vms.iter().map(|vm| (vm["name"].as_str(), vm)))?;
        }
        Ok(())
    }
}

/// HELP, TYPE and the samples of one field, for the daemon or for each VM.
fn family<'a>(
    field: &Field,
    encoder: &mut DescriptorEncoder<'_>,
    statuses: &mut dyn Iterator<Item = (Option<&'a str>, &'a Value)>,
) -> fmt::Result {
    let (name, kind) = match field.kind {
        // The encoder adds the suffix.
        Kind::Counter => (field.name.strip_suffix("_total").unwrap_or(field.name), MetricType::Counter),
        _ => (field.name, MetricType::Gauge),
    };
    let mut family = encoder.encode_descriptor(name, field.help, None, kind)?;
    let mut result = Ok(());
    for (vm, status) in statuses {
        field.samples(status, &mut |labels, number| {
            let labels: Vec<(&str, &str)> = vm.map(|vm| ("vm", vm)).into_iter().chain(labels.iter().copied()).collect();
            result = result.and(family.encode_family(&labels).and_then(|mut sample| match (kind, number) {
                (MetricType::Counter, Number::Integer(value)) => sample.encode_counter::<Labels, _, u64>(&value, None),
                (MetricType::Counter, Number::Float(value)) => sample.encode_counter::<Labels, _, f64>(&value, None),
                (_, Number::Integer(value)) => sample.encode_gauge(&value),
                (_, Number::Float(value)) => sample.encode_gauge(&value),
            }));
        });
    }
    result
}

/// Of exemplars, of which there are none.
type Labels = Vec<(&'static str, &'static str)>;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fields::sample;

    #[test]
    fn families_have_help_type_and_a_sample_per_vm() {
        let mut daemon = sample::daemon();
        daemon.vms.push(sample::report("db"));
        let status = serde_json::to_value(&daemon).unwrap();
        let text = text(status, Format::Prometheus).unwrap();
        for line in [
            "# TYPE fpr_build_info gauge",
            "fpr_build_info{version=\"0.1.0\"} 1",
            "# TYPE fpr_dropped_bytes_total counter",
            "# HELP fpr_dropped_bytes_total Memory whose backing was dropped",
            "fpr_dropped_bytes_total{vm=\"web1\",source=\"agent-offlined\"} 8388608",
            "fpr_dropped_bytes_total{vm=\"db\",source=\"kernel-inflated\"} 8388608",
            "fpr_gate_closed_seconds{vm=\"db\",gate=\"operator\",source=\"operator\"} 90",
            "fpr_agent_state{vm=\"db\",state=\"absent\"} 0",
            "fpr_agent_state{vm=\"db\",state=\"active\"} 1",
            "fpr_guest_claimed_psi_full_avg10_ratio{vm=\"web1\"} 0.005",
        ] {
            assert!(text.lines().any(|has| has == line), "no {line:?} in\n{text}");
        }
    }

    #[test]
    fn openmetrics_ends_with_eof_and_names_families_without_total() {
        let text = text(serde_json::to_value(sample::daemon()).unwrap(), Format::OpenMetrics).unwrap();
        assert!(text.ends_with("# EOF\n"), "{text}");
        assert!(text.contains("# TYPE fpr_dropped_bytes counter\n"), "{text}");
        assert!(text.contains("\nfpr_dropped_bytes_total{vm=\"web1\",source=\"agent-claimed\"} 8388608\n"), "{text}");
    }

    /// Run by hand, with --release: what a scrape costs. Seen: 18 ms on a busy machine (docs/metrics.md).
    #[test]
    #[ignore = "a measurement"]
    fn what_a_scrape_of_200_vms_costs() {
        let daemon = || {
            let mut daemon = sample::daemon();
            daemon.vms = (0..200).map(|n| sample::report(&format!("vm{n}"))).collect();
            daemon
        };
        let mut times: Vec<_> = (0..20)
            .map(|_| {
                let daemon = daemon();
                let started = std::time::Instant::now();
                let text = text(serde_json::to_value(daemon).unwrap(), Format::Prometheus).unwrap();
                (started.elapsed(), text.len())
            })
            .collect();
        times.sort();
        println!("median {:?}, most {:?}, {} bytes", times[10].0, times[19].0, times[0].1);
        assert!(times[10].0.as_millis() < 500);
    }

    #[test]
    fn what_a_label_holds_cannot_break_out() {
        let mut daemon = sample::daemon();
        daemon.vms[0] = sample::report("a\"} 1\nfpr_evil 1\n\\");
        let text = text(serde_json::to_value(&daemon).unwrap(), Format::Prometheus).unwrap();
        assert!(!text.lines().any(|line| line.starts_with("fpr_evil")), "{text}");
    }
}
