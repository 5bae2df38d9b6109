//! `status` as a table for a person.

use serde_json::Value;
use std::fmt::Write;

const HEADER: [&str; 9] = ["VM", "FRONT END", "AGENT", "KERNEL", "GUEST", "BACKED", "DROPPED", "REFUSED", "GATES"];

/// The table, then the details: closed gates, what each source returned, refusals.
pub(crate) fn status(status: &Value) -> String {
    let no_vms = Vec::new();
    let vms = status["vms"].as_array().unwrap_or(&no_vms);
    let mut rows = vec![HEADER.map(str::to_owned)];
    let mut details = String::new();
    for vm in vms {
        let name = vm["name"].as_str().unwrap_or("?");
        let front_end = match &vm["front_end"] {
            Value::Null => "-".to_owned(),
            front_end => front_end["pid"].as_u64().map_or("pid ?".to_owned(), |pid| format!("pid {pid}")),
        };
        let counters = &vm["counters"];
        let sources: Vec<(&String, &Value)> = counters["sources"].as_object().into_iter().flatten().collect();
        let sum = |field: &str| Value::from(sources.iter().filter_map(|(_, of)| of[field].as_u64()).sum::<u64>());
        let kernel = match &vm["balloon"] {
            Value::Null => "-",
            balloon if balloon["kernel_reporting"] == true => "reporting",
            balloon if balloon["front_end"].is_null() => "absent",
            _ => "silent",
        };
        let gates: Vec<&str> =
            vm["gates"].as_array().unwrap_or(&no_vms).iter().filter_map(|gate| gate["gate"].as_str()).collect();
        rows.push([
            name.to_owned(),
            front_end,
            vm["agent"]["state"].as_str().unwrap_or("?").to_owned(),
            kernel.to_owned(),
            bytes(&vm["memory"]["guest_bytes"]),
            bytes(&vm["memory"]["backed_bytes"]),
            bytes(&sum("dropped_bytes")),
            bytes(&sum("refused_bytes")),
            if gates.is_empty() { "open".to_owned() } else { gates.join(",") },
        ]);
        for gate in vm["gates"].as_array().unwrap_or(&no_vms) {
            let (gate, detail) = (gate["gate"].as_str().unwrap_or("?"), gate["detail"].as_str().unwrap_or("?"));
            let _ = writeln!(details, "{name}: {gate}: {detail}");
        }
        for (source, of) in &sources {
            if of["reported_bytes"].as_u64().is_some_and(|reported| reported > 0) {
                let (dropped, reported) = (bytes(&of["dropped_bytes"]), bytes(&of["reported_bytes"]));
                let _ = writeln!(details, "{name}: {source}: dropped {dropped} of {reported}");
            }
            for (reason, refused) in of["refused_bytes_by_reason"].as_object().into_iter().flatten() {
                let _ = writeln!(details, "{name}: {source}: refused {}: {reason}", bytes(refused));
            }
        }
    }
    let mut text = table(&rows);
    if !details.is_empty() {
        text.push('\n');
        text.push_str(&details);
    }
    text
}

fn table(rows: &[[String; HEADER.len()]]) -> String {
    let widths: Vec<usize> =
        (0..HEADER.len()).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn bytes(value: &Value) -> String {
    value.as_u64().map_or("-".to_owned(), |bytes| format!("{}M", bytes >> 20))
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
