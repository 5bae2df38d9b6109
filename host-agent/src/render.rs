//! What commands print for a person, other than the tables of [`fpr_host_agent::fields`].

use fpr_host_agent::fields::table::size;
use serde_json::Value;
use std::fmt::Write;

fn bytes(value: &Value) -> String {
    value.as_f64().map_or("-".to_owned(), size)
}

/// What `drain` brought.
pub(crate) fn drained(vm: &str, drained: &Value) -> String {
    let mut text = String::new();
    let came: Vec<String> = drained["dropped_bytes"]
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, dropped)| dropped.as_u64().is_some_and(|dropped| dropped > 0))
        .map(|(source, dropped)| format!("{source} {}", bytes(dropped)))
        .collect();
    let came = if came.is_empty() { "nothing".to_owned() } else { came.join(", ") };
    let pass = match drained["pass"].as_str() {
        Some(pass) => format!("pass ended: {pass}"),
        None => "the pass goes on".to_owned(),
    };
    let (before, after) = (bytes(&drained["backed_bytes"][0]), bytes(&drained["backed_bytes"][1]));
    let _ = writeln!(text, "{vm}: came back: {came}; {pass}; backed {before} before, {after} now");
    text
}
