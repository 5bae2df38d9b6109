//! The columns that `status` and `top` show of a VM, and the table of `status`.
//!
//! A column names fields of the registry; its cells are text for people and a key to sort by.

use super::Field;
use serde_json::Value;
use std::cmp::Ordering;
use std::fmt::Write;

/// Longest name of a VM that is shown in full; the table has to fit 120 columns.
const MAX_NAME: usize = 16;

/// One column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Its head, and what `--sort` calls it, in any case.
    pub header: &'static str,
    /// On which side it is flush.
    pub align: Align,
    /// What it shows.
    pub shows: Shows,
}

/// On which side a column is flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// What a column shows. Names are those of metrics in the registry.
#[derive(Clone, Copy, Debug)]
pub enum Shows {
    /// The VM's name.
    Name,
    /// The process of its front end.
    FrontEnd,
    /// The state of a field of that kind.
    State(&'static str),
    /// The balloon: `-` none, `absent` no front end, `silent` or `reporting`.
    Kernel,
    /// Bytes, summed over all labels.
    Bytes(&'static str),
    /// The first pair of which both are there: bytes of one less the other.
    Difference(&'static [(&'static str, &'static str)]),
    /// Share of the first in the second, in percent.
    Share(&'static str, &'static str),
    /// What the label `gate` of a field says; `open` if nothing.
    Gates(&'static str),
}

/// What `status` and `top` show, in order.
pub const COLUMNS: &[Column] = &[
    left("VM", Shows::Name),
    right("PID", Shows::FrontEnd),
    left("AGENT", Shows::State("fpr_agent_state")),
    left("KERNEL", Shows::Kernel),
    right("SIZE", Shows::Bytes("fpr_memory_size_bytes")),
    right("BACKED", Shows::Bytes("fpr_memory_backed_bytes")),
    right("COST", Shows::Bytes("fpr_cost_high_bytes")),
    right("CLAIMED", Shows::Difference(USED)),
    right("DROPPED", Shows::Bytes("fpr_dropped_bytes_total")),
    right("REFUSED", Shows::Bytes("fpr_refused_bytes_total")),
    right("BACK", Shows::Share("fpr_refault_minute_returned_bytes_total", "fpr_refault_minute_watched_bytes_total")),
    left("GATES", Shows::Gates("fpr_gate_closed_seconds")),
];

/// What the guest says it uses: by its agent's word, else by its kernel's.
const USED: &[(&str, &str)] = &[
    ("fpr_guest_claimed_memory_total_bytes", "fpr_guest_claimed_memory_available_bytes"),
    ("fpr_guest_claimed_balloon_memory_total_bytes", "fpr_guest_claimed_balloon_memory_available_bytes"),
];

const fn left(header: &'static str, shows: Shows) -> Column {
    Column { header, align: Align::Left, shows }
}

const fn right(header: &'static str, shows: Shows) -> Column {
    Column { header, align: Align::Right, shows }
}

/// What a column says of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// For people.
    pub text: String,
    /// For sorting; what is not known comes last.
    pub key: Key,
}

/// By what rows are sorted.
#[derive(Clone, Debug, PartialEq)]
pub enum Key {
    /// Largest first.
    Number(f64),
    /// In alphabetical order.
    Text(String),
    /// Last.
    Unknown,
}

impl Key {
    /// The order of rows.
    #[must_use]
    pub fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Number(a), Self::Number(b)) => b.total_cmp(a),
            (Self::Text(a), Self::Text(b)) => a.cmp(b),
            (Self::Unknown, Self::Unknown) => Ordering::Equal,
            (Self::Unknown, _) => Ordering::Greater,
            (_, Self::Unknown) => Ordering::Less,
            (Self::Number(_), Self::Text(_)) => Ordering::Less,
            (Self::Text(_), Self::Number(_)) => Ordering::Greater,
        }
    }
}

impl Column {
    /// Its cell for one VM of `status`.
    #[must_use]
    pub fn cell(&self, vm: &Value) -> Cell {
        let sum = |name: &str| Field::named(name)?.sum(vm);
        match self.shows {
            Shows::Name => word(&printable(vm["name"].as_str().unwrap_or("?"))),
            Shows::FrontEnd => match &vm["front_end"] {
                Value::Null => unknown(),
                front_end => match front_end["pid"].as_u64() {
                    Some(pid) => word(&pid.to_string()),
                    None => word("?"),
                },
            },
            Shows::State(name) => word(&label(name, "state", vm).into_iter().next().unwrap_or_else(|| "?".to_owned())),
            Shows::Kernel => match &vm["balloon"] {
                Value::Null => unknown(),
                balloon if balloon["kernel_reporting"] == true => word("reporting"),
                balloon if balloon["front_end"].is_null() => word("absent"),
                _ => word("silent"),
            },
            Shows::Bytes(name) => sum(name).map_or_else(unknown, |bytes| number(size(bytes), bytes)),
            Shows::Difference(pairs) => {
                let used = pairs.iter().find_map(|(all, rest)| Some((sum(all)? - sum(rest)?).max(0.0)));
                used.map_or_else(unknown, |bytes| number(size(bytes), bytes))
            }
            Shows::Share(part, whole) => match (sum(part), sum(whole)) {
                (Some(part), Some(whole)) if whole > 0.0 => {
                    let percent = 100.0 * part / whole;
                    number(format!("{percent:.0}%"), percent)
                }
                _ => unknown(),
            },
            Shows::Gates(name) => {
                let mut gates = label(name, "gate", vm);
                gates.dedup();
                match &gates[..] {
                    // Nobody answered for it.
                    [] if vm["gates"].is_null() => word(vm["state"].as_str().unwrap_or("?")),
                    [] => word("open"),
                    [gate] => word(gate),
                    [gate, others @ ..] => word(&format!("{gate} +{}", others.len())),
                }
            }
        }
    }
}

/// The values of a label over the samples that are not 0, in order.
fn label(name: &str, label: &str, vm: &Value) -> Vec<String> {
    let mut values = Vec::new();
    let Some(field) = Field::named(name) else { return values };
    field.samples(vm, &mut |labels, number| {
        let value = labels.iter().find(|(key, _)| *key == label);
        // A gate that closed within this second is closed, too.
        if let Some((_, value)) = value
            && (label != "state" || number.as_f64() > 0.0)
        {
            values.push((*value).to_owned());
        }
    });
    values
}

fn word(text: &str) -> Cell {
    let key = match text.parse() {
        Ok(number) => Key::Number(number),
        Err(_) => Key::Text(text.to_owned()),
    };
    Cell { text: text.to_owned(), key }
}

fn number(text: String, key: f64) -> Cell {
    Cell { text, key: Key::Number(key) }
}

fn unknown() -> Cell {
    Cell { text: "-".to_owned(), key: Key::Unknown }
}

/// Bytes as people read them: `0`, `512K`, `1.5G`; three digits at most, in powers of 1,024.
#[must_use]
pub fn size(bytes: f64) -> String {
    let mut value = bytes.max(0.0);
    let mut unit = "";
    for next in ["K", "M", "G", "T", "P"] {
        // 1,000 would be four digits.
        if value < 999.5 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    let rounded = (value * 10.0).round() / 10.0;
    if rounded < 10.0 && rounded.fract() > 0.0 && !unit.is_empty() {
        format!("{rounded:.1}{unit}")
    } else {
        format!("{value:.0}{unit}")
    }
}

/// A name that fits its column.
#[must_use]
pub fn shortened(name: &str) -> String {
    if name.chars().count() <= MAX_NAME {
        return name.to_owned();
    }
    name.chars().take(MAX_NAME - 1).chain(['…']).collect()
}

/// The table of `status`, then the details: closed gates, what each source returned, refusals.
#[must_use]
pub fn status(status: &Value) -> String {
    let vms = status["vms"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut rows: Vec<Vec<String>> = vec![COLUMNS.iter().map(|column| column.header.to_owned()).collect()];
    rows.extend(vms.iter().map(|vm| COLUMNS.iter().map(|column| shortened(&column.cell(vm).text)).collect()));
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (index, (cell, column)) in row.iter().zip(COLUMNS).enumerate() {
            let width =
                rows.iter().filter_map(|row| row.get(index)).map(|cell| cell.chars().count()).max().unwrap_or(0);
            let _ = match column.align {
                Align::Left => write!(line, "{cell:width$}  "),
                Align::Right => write!(line, "{cell:>width$}  "),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    let details: String = vms.iter().flat_map(details).map(|line| line + "\n").collect();
    if !details.is_empty() {
        text.push('\n');
        text.push_str(&details);
    }
    text
}

/// Lines below the table: why memory is not coming back, and from where it came.
#[must_use]
pub fn details(vm: &Value) -> Vec<String> {
    let name = vm["name"].as_str().unwrap_or("?");
    let mut lines = Vec::new();
    if let Some(detail) = vm["state_detail"].as_str() {
        lines.push(format!("{name}: {}: {detail}", vm["state"].as_str().unwrap_or("?")));
    }
    for gate in vm["gates"].as_array().into_iter().flatten() {
        let (gate, detail) = (gate["gate"].as_str().unwrap_or("?"), gate["detail"].as_str().unwrap_or("?"));
        lines.push(format!("{name}: {gate}: {detail}"));
    }
    let bytes = |value: &Value| value.as_f64().map_or("-".to_owned(), size);
    let budget = &vm["accounting"]["budget"];
    if let Some(state @ ("over" | "unconfirmed")) = budget["state"].as_str() {
        let (cost, limit) = (bytes(&budget["cost_bytes"]), bytes(&budget["budget_bytes"]));
        lines.push(format!("{name}: budget: {state}: costs {cost} of {limit}"));
    }
    for (source, of) in vm["counters"]["sources"].as_object().into_iter().flatten() {
        if of["reported_bytes"].as_u64().is_some_and(|reported| reported > 0) {
            let (dropped, reported) = (bytes(&of["dropped_bytes"]), bytes(&of["reported_bytes"]));
            lines.push(format!("{name}: {source}: dropped {dropped} of {reported}"));
        }
        for (reason, refused) in of["refused_bytes_by_reason"].as_object().into_iter().flatten() {
            lines.push(format!("{name}: {source}: refused {}: {reason}", bytes(refused)));
        }
    }
    lines.iter().map(|line| printable(line)).collect()
}

/// In a VM directory, names are those of folders; they must not steer the reader's terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::sample;
    use super::*;

    #[test]
    fn sizes_have_three_digits_at_most() {
        let mib = f64::from(1 << 20);
        for (bytes, shown) in [
            (0.0, "0"),
            (999.0, "999"),
            (1000.0, "1K"),
            (4096.0, "4K"),
            (1536.0, "1.5K"),
            (512.0 * mib, "512M"),
            (1000.0 * mib, "1G"),
            (1536.0 * mib, "1.5G"),
            (9.97 * 1024.0 * mib, "10G"),
            (123.4 * 1024.0 * mib, "123G"),
            (3.0 * 1024.0 * 1024.0 * mib, "3T"),
        ] {
            assert_eq!(size(bytes), shown, "{bytes}");
        }
    }

    #[test]
    fn every_column_names_fields_of_the_registry() {
        for Column { header, shows, .. } in COLUMNS {
            let names: Vec<&str> = match *shows {
                Shows::Name | Shows::FrontEnd | Shows::Kernel => Vec::new(),
                Shows::State(name) | Shows::Bytes(name) | Shows::Gates(name) => vec![name],
                Shows::Share(part, whole) => vec![part, whole],
                Shows::Difference(pairs) => pairs.iter().flat_map(|(a, b)| [*a, *b]).collect(),
            };
            for name in names {
                assert!(Field::named(name).is_some(), "{header} shows {name}, which is no field");
            }
        }
    }

    #[test]
    fn the_table_fits_120_columns_and_shows_each_vm_in_order() {
        let mut daemon = sample::daemon();
        let long = "x".repeat(64);
        daemon.vms.push(sample::report(&long));
        let text = status(&serde_json::to_value(&daemon).unwrap());
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[..3].iter().all(|line| line.chars().count() <= 120), "{text}");
        let cells: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(
            cells,
            ["web1", "4711", "active", "reporting", "1G", "300M", "320M", "250M", "32M", "8M", "25%", "operator"],
            "{text}"
        );
        assert!(lines[2].starts_with(&format!("{}…  4711", "x".repeat(15))), "{text}");
        for line in [
            "web1: operator: backup at noon",
            "web1: budget: over: costs 305M of 256M",
            "web1: agent-offlined: dropped 8M of 10M",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn nothing_in_it_can_steer_a_terminal() {
        let gate = serde_json::json!({"gate": "operator", "detail": "\u{1b}[2J"});
        let vm = serde_json::json!({"name": "a\u{1b}]0;x\u{7}\n", "gates": [gate]});
        let text = status(&serde_json::json!({"vms": [vm]}));
        assert!(text.lines().count() == 4 && !text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_sorts_last() {
        let vm = serde_json::json!({"name": "a", "agent": {"state": "absent"}, "gates": [], "counters": {}});
        let cells: Vec<String> = COLUMNS.iter().map(|column| column.cell(&vm).text).collect();
        assert_eq!(cells, ["a", "-", "absent", "-", "-", "-", "-", "-", "-", "-", "-", "open"]);
        let mut keys = [Key::Unknown, Key::Number(1.0), Key::Text("b".into()), Key::Number(2.0), Key::Text("a".into())];
        keys.sort_by(Key::order);
        assert_eq!(
            keys,
            [Key::Number(2.0), Key::Number(1.0), Key::Text("a".into()), Key::Text("b".into()), Key::Unknown]
        );
    }
}
