//! The report for a person: grouped, aligned, wrapped to the terminal.

use super::{Group, Line, Report, Verdict};
use std::fmt::Write;

/// Narrower than this beside the columns, text is not wrapped but left to the terminal.
const MIN_TEXT_WIDTH: usize = 30;

/// Two spaces, the verdict, two spaces.
const VERDICT_COLUMN: usize = 2 + 4 + 2;

/// Whether verdicts are coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// For files and pipes, and where NO_COLOR is set.
    Plain,
    /// With the escape sequences of ECMA-48.
    Ansi,
}

/// How it shall look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Of the verdicts.
    pub colour: Colour,
    /// Columns of the terminal; `None` wraps nothing.
    pub width: Option<usize>,
}

/// The table.
#[must_use]
pub fn text(report: &Report, style: Style) -> String {
    let names = report.lines.iter().map(|line| line.check.word().len()).max().unwrap_or(0);
    let indent = VERDICT_COLUMN + names + 2;
    let width = style.width.and_then(|width| width.checked_sub(indent)).filter(|width| *width >= MIN_TEXT_WIDTH);
    let mut text = String::new();
    let mut group = None;
    for line in &report.lines {
        if group != Some(line.group) {
            let gap = if group.is_some() { "\n" } else { "" };
            let _ = writeln!(text, "{gap}{}", title(line.group, report));
            group = Some(line.group);
        }
        entry(&mut text, line, style.colour, names, width);
    }
    let (no, warn) = (count(report, Verdict::No), count(report, Verdict::Warn));
    let _ = writeln!(text, "\n{no} no, {warn} warn, {} ok", report.lines.len() - no - warn);
    text
}

fn count(report: &Report, verdict: Verdict) -> usize {
    report.lines.iter().filter(|line| line.verdict == verdict).count()
}

fn title(group: Group, report: &Report) -> String {
    match (group, report.pid) {
        (Group::Host, _) => "Host".to_owned(),
        (Group::Qemu, _) => "QEMU".to_owned(),
        (Group::Agent, _) => "Host agent".to_owned(),
        (Group::Vm, Some(pid)) => format!("VM of process {pid}"),
        (Group::Vm, None) => "VM".to_owned(),
    }
}

fn entry(text: &mut String, line: &Line, colour: Colour, names: usize, width: Option<usize>) {
    let verdict = painted(line.verdict, colour);
    let mut lead = format!("  {verdict}  {:names$}  ", line.check.word());
    let indent = " ".repeat(VERDICT_COLUMN + names + 2);
    for (mark, said) in [("", Some(&line.reason)), ("-> ", line.remedy.as_ref())] {
        let Some(said) = said else { continue };
        let hang = " ".repeat(mark.len());
        for (number, part) in wrap(said, width.map(|width| width - mark.len())).iter().enumerate() {
            let _ = writeln!(text, "{lead}{}{part}", if number == 0 { mark } else { &hang });
            lead.clone_from(&indent);
        }
    }
}

fn painted(verdict: Verdict, colour: Colour) -> String {
    let word = format!("{:4}", verdict.word());
    // Select Graphic Rendition: green, yellow, red.
    let number = match (colour, verdict) {
        (Colour::Plain, _) => return word,
        (Colour::Ansi, Verdict::Ok) => 32,
        (Colour::Ansi, Verdict::Warn) => 33,
        (Colour::Ansi, Verdict::No) => 31,
    };
    format!("\x1b[{number}m{word}\x1b[0m")
}

/// At spaces; a word that is longer than the line stays whole, so that it can be copied.
fn wrap(text: &str, width: Option<usize>) -> Vec<String> {
    let Some(width) = width else { return vec![text.to_owned()] };
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split(' ') {
        let length = word.chars().count();
        let Some(line) = lines.last_mut() else { break };
        if used > 0 && used + 1 + length > width {
            lines.push(word.to_owned());
            used = length;
        } else {
            if used > 0 {
                line.push(' ');
                used += 1;
            }
            line.push_str(word);
            used += length;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::Check;
    use super::*;

    fn report() -> Report {
        let lines = vec![
            Line::ok(Check::Kernel, "6.18"),
            Line::warn(
                Check::Thp,
                "one two three four five six seven eight nine ten eleven",
                "do this and that, and then some more of it",
            ),
            Line::no(Check::Memory, "private", "share it"),
        ];
        Report { format: super::super::FORMAT, version: "0", verdict: Verdict::No, pid: Some(7), lines }
    }

    #[test]
    fn a_wide_table() {
        let text = text(&report(), Style { colour: Colour::Plain, width: None });
        assert_eq!(
            text,
            "Host\n  ok    kernel  6.18\n  warn  thp     one two three four five six seven eight nine ten eleven\n                \
             -> do this and that, and then some more of it\n\nVM of process 7\n  no    memory  private\n                \
             -> share it\n\n1 no, 1 warn, 1 ok\n"
        );
    }

    #[test]
    fn wrapped_lines_fit_and_lose_no_word() {
        let wide = text(&report(), Style { colour: Colour::Plain, width: None });
        let narrow = text(&report(), Style { colour: Colour::Plain, width: Some(48) });
        assert!(narrow.lines().all(|line| line.chars().count() <= 48), "{narrow}");
        assert!(narrow.lines().count() > wide.lines().count(), "{narrow}");
        assert!(wide.split_whitespace().eq(narrow.split_whitespace()));
        // Too narrow for columns: left alone.
        assert_eq!(text(&report(), Style { colour: Colour::Plain, width: Some(30) }), wide);
    }

    #[test]
    fn colours_are_of_the_verdicts_only() {
        let plain = text(&report(), Style { colour: Colour::Plain, width: None });
        let ansi = text(&report(), Style { colour: Colour::Ansi, width: None });
        assert!(!plain.contains('\x1b'));
        assert_eq!(ansi.matches("\x1b[").count(), 6);
        assert!(ansi.contains("\x1b[31mno  \x1b[0m  memory"), "{ansi:?}");
    }
}
