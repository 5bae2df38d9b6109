//! What `top` shows: rows of the last status, rates and histories between the last ones, order and selection.
//!
//! Pure: statuses and the time come in, rows go out.

use crate::fields::Field;
use crate::fields::table::{Align, COLUMNS, Cell, Column, Key, details, shortened, size};
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Looks remembered per VM, one character each.
pub(super) const HISTORY: usize = 20;

/// What the history shows.
const COST: &str = "fpr_memory_backed_bytes";

/// Columns that need two looks: header and the counter whose rise per second they show.
const RATES: [(&str, &str); 2] =
    [("DROP/S", "fpr_dropped_bytes_total"), ("BACK/S", "fpr_refault_minute_returned_bytes_total")];

/// Of `status`, these are left out to make room.
const LEFT_OUT: [&str; 2] = ["PID", "REFUSED"];

/// What the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Do {
    /// End.
    Quit,
    /// Select the row above.
    Up,
    /// Select the row below.
    Down,
    /// Sort by the column to the left; left of the first is the order of the configuration.
    Left,
    /// Sort by the column to the right.
    Right,
    /// The other way round.
    Reverse,
}

/// One column of the view.
#[derive(Clone, Copy, Debug)]
enum Shown {
    Field(&'static Column),
    Rate(usize),
    History,
}

impl Shown {
    fn header(self) -> &'static str {
        match self {
            Self::Field(column) => column.header,
            Self::Rate(index) => RATES.get(index).map_or("", |(header, _)| header),
            Self::History => "HISTORY",
        }
    }
}

/// What is remembered of a VM between looks.
#[derive(Debug, Default)]
struct Past {
    at: Duration,
    counters: [Option<f64>; RATES.len()],
    rates: [Option<f64>; RATES.len()],
    /// Share of its memory that is backed, in eighths.
    history: VecDeque<u8>,
}

/// One VM as it is shown.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) cells: Vec<Cell>,
    pub(super) details: Vec<String>,
}

/// All that is shown.
#[derive(Debug)]
pub struct Top {
    shown: Vec<Shown>,
    /// Index in `shown`; the order of the configuration without one.
    sort: Option<usize>,
    reversed: bool,
    selected: Option<String>,
    rows: Vec<Row>,
    past: BTreeMap<String, Past>,
    /// What the daemon says of itself.
    pub(super) daemon: String,
    /// Why there is nothing new.
    pub(super) problem: Option<String>,
}

impl Top {
    /// Nothing seen yet; sorted by the column of this header, if there is one.
    #[must_use]
    pub fn new(sort: Option<&str>) -> Self {
        let mut shown: Vec<Shown> =
            COLUMNS.iter().filter(|column| !LEFT_OUT.contains(&column.header)).map(Shown::Field).collect();
        // The last one is as long as the gates are; the figures of change stand before it.
        let last = shown.pop();
        shown.extend((0..RATES.len()).map(Shown::Rate));
        shown.push(Shown::History);
        shown.extend(last);
        let sort = sort.and_then(|name| shown.iter().position(|shown| shown.header().eq_ignore_ascii_case(name)));
        Self {
            shown,
            sort,
            reversed: false,
            selected: None,
            rows: Vec::new(),
            past: BTreeMap::new(),
            daemon: String::new(),
            problem: None,
        }
    }

    /// What `--sort` takes.
    #[must_use]
    pub fn sortable() -> Vec<&'static str> {
        let top = Self::new(None);
        top.shown.iter().filter(|shown| !matches!(shown, Shown::History)).map(|shown| shown.header()).collect()
    }

    /// The daemon was not there, or said something else.
    pub fn failed(&mut self, why: String) {
        self.problem = Some(why);
    }

    /// A status that came at `now`.
    pub fn update(&mut self, status: &Value, now: Duration) {
        self.problem = None;
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let vms = status["vms"].as_array().map(Vec::as_slice).unwrap_or_default();
        self.daemon = format!("fpr {}, pid {}, {} VMs", text(&status["version"]), status["pid"], vms.len());
        let mut past = std::mem::take(&mut self.past);
        self.rows.clear();
        for vm in vms {
            let name = text(&vm["name"]);
            // A VM that is gone is forgotten.
            let mut of_vm = past.remove(&name).unwrap_or_default();
            of_vm.note(vm, now);
            let cells = self.shown.iter().map(|shown| cell(*shown, vm, &of_vm)).collect();
            self.rows.push(Row { name: name.clone(), cells, details: details(vm) });
            self.past.insert(name, of_vm);
        }
    }

    /// What the user did; false when it was enough.
    pub fn act(&mut self, action: Do) -> bool {
        let names: Vec<String> = self.rows().iter().map(|row| row.name.clone()).collect();
        let at = self.selected_index(&names);
        match action {
            Do::Quit => return false,
            Do::Up => self.selected = names.get(at.saturating_sub(1)).cloned(),
            Do::Down => self.selected = names.get(at + 1).or(names.last()).cloned(),
            Do::Left => self.sort = self.sort.and_then(|sort| sort.checked_sub(1)),
            Do::Right => {
                let next = self.sort.map_or(0, |sort| sort + 1);
                self.sort = Some(next.min(self.shown.len().saturating_sub(1)));
            }
            Do::Reverse => self.reversed = !self.reversed,
        }
        true
    }

    /// Headers, and on which side the column is flush.
    pub(super) fn headers(&self) -> impl Iterator<Item = (&'static str, Align)> + '_ {
        self.shown.iter().map(|shown| match shown {
            Shown::Field(column) => (column.header, column.align),
            Shown::Rate(_) => (shown.header(), Align::Right),
            Shown::History => (shown.header(), Align::Left),
        })
    }

    /// The column that rows are sorted by.
    pub(super) fn sorted_by(&self) -> Option<usize> {
        self.sort
    }

    /// The rows in the order in which they are shown.
    pub(super) fn rows(&self) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.rows.iter().collect();
        if let Some(sort) = self.sort {
            let key = |row: &Row| row.cells.get(sort).map_or(Key::Unknown, |cell| cell.key.clone());
            // Stable: equal ones keep the order of the configuration.
            rows.sort_by(|a, b| key(a).order(&key(b)));
        }
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    /// Which row is selected: the VM that was, wherever it stands now, else the first.
    pub(super) fn selected(&self) -> usize {
        self.selected_index(&self.rows().iter().map(|row| row.name.clone()).collect::<Vec<_>>())
    }

    fn selected_index(&self, names: &[String]) -> usize {
        names.iter().position(|name| Some(name) == self.selected.as_ref()).unwrap_or(0)
    }
}

impl Past {
    fn note(&mut self, vm: &Value, now: Duration) {
        let sum = |name: &str| Field::named(name)?.sum(vm);
        let passed = now.saturating_sub(self.at).as_secs_f64();
        for ((rate, before), (_, counter)) in self.rates.iter_mut().zip(&mut self.counters).zip(RATES) {
            let count = sum(counter);
            *rate = match (*before, count) {
                // A daemon that was started anew counts from zero: nothing is known of the time between.
                (Some(before), Some(count)) if count >= before && passed > 0.0 => Some((count - before) / passed),
                _ => None,
            };
            *before = count;
        }
        self.at = now;
        let eighths = match (sum(COST), sum("fpr_memory_size_bytes")) {
            (Some(cost), Some(size)) if size > 0.0 => share_in_eighths(cost, size),
            _ => 0,
        };
        self.history.push_back(eighths);
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }
}

/// From 1 to 8; 0 is for nothing known.
fn share_in_eighths(cost: f64, size: f64) -> u8 {
    (1..=8u8).find(|eighth| cost <= size * f64::from(*eighth) / 8.0).unwrap_or(8)
}

const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

fn cell(shown: Shown, vm: &Value, past: &Past) -> Cell {
    match shown {
        Shown::Field(column) => {
            let cell = column.cell(vm);
            Cell { text: shortened(&cell.text), ..cell }
        }
        Shown::Rate(index) => match past.rates.get(index).copied().flatten() {
            Some(rate) => Cell { text: size(rate), key: Key::Number(rate) },
            None => Cell { text: "-".to_owned(), key: Key::Unknown },
        },
        Shown::History => {
            let bars = past.history.iter().filter_map(|eighths| BARS.get(usize::from(*eighths)));
            Cell { text: bars.collect(), key: Key::Number(f64::from(past.history.back().copied().unwrap_or(0))) }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::control::DaemonStatus;
    use crate::fields::sample;
    use crate::session::counters::MemorySource;

    const GIB: u64 = 1 << 30;

    /// Two VMs, `small` and `large`; the large one has dropped and got back so many bytes.
    fn status(dropped: u64, back: u64, backed: u64) -> Value {
        let mut daemon: DaemonStatus = sample::daemon();
        daemon.vms = vec![sample::report("small"), sample::report("large")];
        let large = daemon.vms[1].answered().unwrap();
        large.memory.as_mut().unwrap().backed_bytes = Some(backed);
        large.counters.sources.get_mut(&MemorySource::KernelReported).unwrap().dropped_bytes += dropped;
        large.counters.refault_minute_returned_bytes = back;
        serde_json::to_value(daemon).unwrap()
    }

    fn shown(top: &Top, header: &str) -> Vec<(String, String)> {
        let index = top.headers().position(|(name, _)| name == header).unwrap();
        top.rows().iter().map(|row| (row.name.clone(), row.cells[index].text.clone())).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[test]
    fn rates_are_what_the_counters_rose_by_per_second() {
        let mut top = Top::new(Some("drop/s"));
        top.update(&status(0, 0, GIB), s(1));
        assert_eq!(shown(&top, "DROP/S"), pairs(&[("small", "-"), ("large", "-")]), "one look is no rate");
        top.update(&status(GIB, GIB / 2, GIB), s(3));
        assert_eq!(shown(&top, "DROP/S"), pairs(&[("large", "512M"), ("small", "0")]));
        assert_eq!(shown(&top, "BACK/S"), pairs(&[("large", "256M"), ("small", "0")]));
        // The daemon was started anew.
        top.update(&status(0, 0, GIB), s(5));
        assert_eq!(shown(&top, "DROP/S"), pairs(&[("small", "0"), ("large", "-")]));
    }

    #[test]
    fn order_reverses_and_the_selection_stays_with_its_vm() {
        let mut top = Top::new(None);
        top.update(&status(0, 0, GIB), s(1));
        let order = |top: &Top| top.rows().iter().map(|row| row.name.clone()).collect::<Vec<_>>();
        assert_eq!(order(&top), ["small", "large"], "as configured");
        assert!(top.act(Do::Down) && top.act(Do::Down));
        assert_eq!(top.selected(), 1);
        top.act(Do::Right);
        assert_eq!((order(&top), top.selected()), (vec!["large".to_owned(), "small".to_owned()], 0), "by name");
        top.act(Do::Reverse);
        assert_eq!((order(&top)[0].as_str(), top.selected()), ("small", 1));
        top.act(Do::Up);
        assert_eq!(top.selected(), 0);
        for _ in 0..50 {
            top.act(Do::Right);
        }
        assert!(top.sorted_by().is_some_and(|column| column < top.headers().count()));
        for _ in 0..50 {
            top.act(Do::Left);
        }
        assert_eq!(top.sorted_by(), None);
        assert!(!top.act(Do::Quit));
    }

    #[test]
    fn the_history_is_the_share_of_its_memory_that_a_vm_costs() {
        let mut top = Top::new(None);
        for (at, backed) in [(1, 0), (2, GIB / 2), (3, GIB), (4, 2 * GIB)] {
            top.update(&status(0, 0, backed), s(at));
        }
        assert_eq!(shown(&top, "HISTORY")[1].1, "▁▄██");
        for at in 5..500 {
            top.update(&status(0, 0, GIB), s(at));
        }
        assert_eq!(shown(&top, "HISTORY")[1].1.chars().count(), HISTORY);
        // A VM that is gone leaves nothing behind.
        top.update(&serde_json::json!({"version": "1", "pid": 1, "vms": []}), s(600));
        assert!(top.past.is_empty() && top.rows().is_empty());
        assert!(top.act(Do::Down) && top.act(Do::Up));
        assert_eq!(top.selected(), 0);
    }

    #[test]
    fn every_column_but_the_history_can_be_sorted_by() {
        let sortable = Top::sortable();
        assert!(sortable.contains(&"BACKED") && sortable.contains(&"DROP/S"), "{sortable:?}");
        assert!(sortable.iter().all(|name| Top::new(Some(name)).sorted_by().is_some()));
    }
}
