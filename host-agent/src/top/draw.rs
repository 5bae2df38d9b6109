//! Painting [`Top`]: a head line, the table, the details of the selected VM, a line of keys.

use super::state::{HISTORY, Top};
use crate::fields::table::Align;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};

const KEYS: &str = "↑↓ select  ←→ sort by  r reverse  q quit";

/// Between two columns.
const SPACING: u16 = 2;

/// What gives way on a narrow screen, in this order, and down to which width.
const NARROWER: [(&str, usize); 2] = [("VM", 12), ("HISTORY", 8)];

/// Whether colours may be used; <https://no-color.org>. Bold and reverse video always are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Palette {
    Colour,
    Plain,
}

impl Palette {
    fn colour(self, colour: Color) -> Style {
        match self {
            Self::Colour => Style::new().fg(colour),
            Self::Plain => Style::new(),
        }
    }
}

/// Paints the whole frame.
pub(super) fn draw(top: &Top, palette: Palette, frame: &mut Frame<'_>) {
    let rows = top.rows();
    let selected = top.selected();
    let details = rows.get(selected).map(|row| row.details.clone()).unwrap_or_default();
    // Two thirds of the screen are the table's, if it needs them.
    let height = usize::from(frame.area().height);
    let details_height = details.len().clamp(1, (height / 3).max(1));
    let [head, table, below, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(u16::try_from(details_height + 1).unwrap_or(u16::MAX)),
        Constraint::Length(1),
    ])
    .areas(frame.area());

    let headline = match &top.problem {
        Some(problem) => {
            Line::styled(format!("{}: {problem}", top.daemon), palette.colour(Color::Red).add_modifier(Modifier::BOLD))
        }
        None => Line::styled(top.daemon.clone(), Style::new().add_modifier(Modifier::BOLD)),
    };
    frame.render_widget(headline, head);

    let headers: Vec<(&str, Align)> = top.headers().collect();
    let aligned = |text: String, align: Align| {
        let alignment = if align == Align::Right { Alignment::Right } else { Alignment::Left };
        Text::from(Line::from(text).alignment(alignment))
    };
    let header = headers.iter().enumerate().map(|(index, (header, align))| {
        let style = Style::new().add_modifier(if top.sorted_by() == Some(index) {
            Modifier::BOLD | Modifier::UNDERLINED
        } else {
            Modifier::BOLD
        });
        Cell::from(aligned((*header).to_owned(), *align)).style(style)
    });
    let widths = widths(&headers, &rows, usize::from(frame.area().width));
    let lines = rows.iter().map(|row| {
        Row::new(row.cells.iter().zip(&headers).zip(&widths).map(|((cell, (header, align)), width)| {
            let style = match (*header, cell.text.as_str()) {
                ("GATES", "open") => palette.colour(Color::Green),
                ("GATES", _) => palette.colour(Color::Yellow),
                ("HISTORY", _) => palette.colour(Color::Cyan),
                _ => Style::new(),
            };
            let text = if *header == "HISTORY" { latest(&cell.text, *width) } else { cell.text.clone() };
            Cell::from(aligned(text, *align)).style(style)
        }))
    });
    let lengths = widths.iter().map(|width| Constraint::Length(u16::try_from(*width).unwrap_or(u16::MAX)));
    let widget = Table::new(lines, lengths)
        .header(Row::new(header))
        .column_spacing(SPACING)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected((!rows.is_empty()).then_some(selected));
    frame.render_stateful_widget(widget, table, &mut state);

    let text = if details.is_empty() {
        let name = rows.get(selected).map_or("no VM", |row| &row.name);
        format!("\n{name}: nothing reported yet, nothing in the way")
    } else {
        format!("\n{}", details.join("\n"))
    };
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: false }), below);
    frame.render_widget(Line::styled(KEYS, Style::new().add_modifier(Modifier::DIM)), keys);
}

/// As wide as what stands in it; too wide for the screen, the names and the history give way before the figures do.
fn widths(headers: &[(&str, Align)], rows: &[&super::state::Row], screen: usize) -> Vec<usize> {
    let widest =
        |index: usize| rows.iter().filter_map(move |row| row.cells.get(index)).map(|cell| cell.text.chars().count());
    let least = |header: &str| if header == "HISTORY" { HISTORY } else { header.chars().count() };
    let mut widths: Vec<usize> = headers
        .iter()
        .enumerate()
        .map(|(index, (header, _))| widest(index).max().unwrap_or(0).max(least(header)))
        .collect();
    let spacing = usize::from(SPACING) * headers.len().saturating_sub(1);
    let mut excess = (widths.iter().sum::<usize>() + spacing).saturating_sub(screen);
    for (name, floor) in NARROWER {
        if let Some(width) = headers.iter().position(|(header, _)| *header == name).and_then(|i| widths.get_mut(i)) {
            let cut = width.saturating_sub(floor).min(excess);
            *width -= cut;
            excess -= cut;
        }
    }
    widths
}

/// The end of a history.
fn latest(bars: &str, width: usize) -> String {
    bars.chars().skip(bars.chars().count().saturating_sub(width)).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fields::sample;
    use crate::top::state::Do;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::time::Duration;

    fn painted(top: &Top, width: u16, height: u16) -> (Vec<String>, Terminal<TestBackend>) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(top, Palette::Plain, frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        ((0..height).map(line).collect(), terminal)
    }

    fn top(vms: usize) -> Top {
        let mut daemon = sample::daemon();
        daemon.vms = (0..vms).map(|n| sample::report(&format!("vm{n}"))).collect();
        daemon.vms.iter_mut().skip(1).for_each(|vm| vm.answered().unwrap().gates.clear());
        let mut top = Top::new(None);
        let status = serde_json::to_value(daemon).unwrap();
        top.update(&status, Duration::from_secs(1));
        top.update(&status, Duration::from_secs(3));
        top
    }

    #[test]
    fn a_row_per_vm_and_the_reasons_of_the_selected_one() {
        let mut top = top(3);
        let (lines, _) = painted(&top, 130, 24);
        assert_eq!(lines[0], "fpr 0.1.0, pid 7, 3 VMs");
        let header: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(
            header.join(" "),
            "VM AGENT KERNEL SIZE BACKED COST CLAIMED DROPPED BACK DROP/S BACK/S HISTORY GATES"
        );
        let row: Vec<&str> = lines[2].split_whitespace().collect();
        assert_eq!(row.join(" "), "vm0 active reporting 1G 300M 320M 250M 32M 25% 0 0 ▃▃ operator", "{lines:#?}");
        assert!(lines.iter().any(|line| line == "vm0: operator: backup at noon"), "{lines:#?}");
        assert_eq!(lines[23], KEYS);
        top.act(Do::Down);
        let (lines, terminal) = painted(&top, 130, 24);
        assert!(!lines.iter().any(|line| line.contains("backup at noon")), "{lines:#?}");
        let buffer = terminal.backend().buffer();
        assert!(
            buffer[(0, 3)].modifier.contains(Modifier::REVERSED)
                && !buffer[(0, 2)].modifier.contains(Modifier::REVERSED)
        );
        assert!((0..24).all(|y| (0..130).all(|x| buffer[(x, y)].fg == Color::Reset)), "colour in spite of NO_COLOR");
    }

    #[test]
    fn the_selected_row_is_in_sight_and_no_size_is_too_small() {
        let mut top = top(200);
        for _ in 0..150 {
            top.act(Do::Down);
        }
        let (lines, _) = painted(&top, 100, 20);
        assert!(lines.iter().any(|line| line.starts_with("vm150 ")), "{lines:#?}");
        for (width, height) in [(1, 1), (10, 2), (40, 3), (300, 100)] {
            painted(&top, width, height);
        }
        // Names give way before figures do.
        let (lines, _) = painted(&top, 118, 20);
        let row: Vec<&str> = lines[2].split_whitespace().collect();
        assert!(row[2] == "reporting" && row[11].ends_with('▃') && row[12] == "open", "{lines:#?}");
        top.failed("no answer from the daemon".to_owned());
        let (lines, _) = painted(&top, 100, 20);
        assert!(lines[0].ends_with(": no answer from the daemon"), "{lines:#?}");
        painted(&Top::new(None), 80, 24);
    }
}
