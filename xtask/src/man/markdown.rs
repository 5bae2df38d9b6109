//! The part of Markdown that the documentation uses, as man page source. The pages take their sections from the documents that
//! people read on the web, so that neither can say what the other does not.

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};
use roff::{Inline, Roff, bold, italic, roman};

/// The text below a heading such as `## Exit codes`, up to the next heading of that or a higher level.
pub(crate) fn section<'a>(markdown: &'a str, heading: &str) -> Option<&'a str> {
    let level = heading.bytes().take_while(|byte| *byte == b'#').count();
    let mut start = None;
    let mut offset = 0;
    let mut fenced = false;
    for line in markdown.split_inclusive('\n') {
        fenced ^= line.starts_with("```");
        let hashes = line.bytes().take_while(|byte| *byte == b'#').count();
        let is_heading = !fenced && hashes > 0 && line.as_bytes().get(hashes) == Some(&b' ');
        match start {
            None if is_heading && line.trim_end() == heading => start = Some(offset + line.len()),
            Some(start) if is_heading && hashes <= level => return markdown.get(start..offset),
            _ => {}
        }
        offset += line.len();
    }
    markdown.get(start?..)
}

/// The second-level headings of a text and what is below each.
pub(crate) fn sections(markdown: &str) -> Vec<(&str, &str)> {
    let headings = markdown.lines().filter(|line| line.starts_with("## "));
    headings.filter_map(|line| Some((line.strip_prefix("## ")?, section(markdown, line)?))).collect()
}

/// The body of a section. Links lose their target, which only a browser could follow.
pub(crate) fn to_roff(markdown: &str) -> String {
    let mut writer = Writer::default();
    Parser::new_ext(markdown, Options::ENABLE_TABLES).for_each(|event| writer.take(event));
    let text = writer.roff.to_roff();
    // Right below a heading a paragraph is no new one.
    text.strip_prefix(".PP\n").map(str::to_owned).unwrap_or(text)
}

#[derive(Default)]
struct Writer {
    roff: Roff,
    line: Vec<Inline>,
    emphasis: Option<fn(String) -> Inline>,
    /// Next numbers of the open lists; `None` for one with bullets.
    lists: Vec<Option<u64>>,
    /// The first block of a list item stands beside its bullet.
    after_bullet: bool,
    code: Option<String>,
    headings: Vec<String>,
    row: Vec<Vec<Inline>>,
}

impl Writer {
    fn take(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => self.start(&tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text) => match &mut self.code {
                Some(code) => code.push_str(&text),
                None => self.line.push(self.emphasis.unwrap_or(roman)(text.into_string())),
            },
            Event::Code(code) => self.line.push(bold(code.into_string())),
            Event::SoftBreak => self.line.push(roman(" ")),
            Event::HardBreak => self.line.push(roff::line_break()),
            _ => {}
        }
    }

    fn start(&mut self, tag: &Tag<'_>) {
        match tag {
            Tag::Paragraph if !std::mem::take(&mut self.after_bullet) => self.control("PP", &[]),
            Tag::Heading { .. } => self.control("SS", &[]),
            Tag::Strong => self.emphasis = Some(bold),
            Tag::Emphasis => self.emphasis = Some(italic),
            Tag::List(first) => {
                // An item with a list in it: its own text ends here.
                self.flush();
                if !self.lists.is_empty() {
                    self.control("RS", &["4"]);
                }
                self.lists.push(*first);
            }
            Tag::Item => {
                let mark = match self.lists.last_mut() {
                    Some(Some(number)) => {
                        let mark = format!("{number}.");
                        *number += 1;
                        mark
                    }
                    _ => "\u{2022}".to_owned(),
                };
                self.control("IP", &[&mark, "4"]);
                self.after_bullet = true;
            }
            Tag::CodeBlock(CodeBlockKind::Fenced(_) | CodeBlockKind::Indented) => {
                self.flush();
                self.code = Some(String::new());
            }
            Tag::TableHead => self.headings.clear(),
            Tag::TableRow => self.row.clear(),
            Tag::TableCell => self.line.clear(),
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Paragraph | TagEnd::Heading(_) | TagEnd::Item => self.flush(),
            TagEnd::Strong | TagEnd::Emphasis => self.emphasis = None,
            TagEnd::List(_) => {
                self.lists.pop();
                if !self.lists.is_empty() {
                    self.control("RE", &[]);
                }
            }
            TagEnd::CodeBlock => self.code_block(),
            TagEnd::TableCell => self.row.push(std::mem::take(&mut self.line)),
            TagEnd::TableHead => {
                self.headings = std::mem::take(&mut self.row).iter().map(|cell| plain(cell)).collect();
            }
            TagEnd::TableRow => self.table_row(),
            _ => {}
        }
    }

    fn code_block(&mut self) {
        let code = self.code.take().unwrap_or_default();
        for name in ["PP", "RS", "nf"] {
            self.control(name, if name == "RS" { &["4"] } else { &[] });
        }
        code.lines().for_each(|line| {
            self.roff.text([roman(if line.is_empty() { " " } else { line })]);
        });
        self.control("fi", &[]);
        self.control("RE", &[]);
    }

    /// A row becomes an entry of a list: the first cell is the term, what follows the second is named by its column.
    fn table_row(&mut self) {
        let row = std::mem::take(&mut self.row);
        let mut cells = row.into_iter().zip(self.headings.clone());
        let Some((term, _)) = cells.next() else { return };
        self.control("TP", &[]);
        self.roff.text(term);
        let mut text = Vec::new();
        for (index, (cell, heading)) in cells.enumerate().filter(|(_, (cell, _))| !cell.is_empty()) {
            if !text.is_empty() {
                text.push(roman("; "));
            }
            if index > 0 {
                text.push(roman(format!("{heading}: ")));
            }
            text.extend(cell);
        }
        self.roff.text(if text.is_empty() { vec![roman("\u{2013}")] } else { text });
    }

    fn flush(&mut self) {
        let line = std::mem::take(&mut self.line);
        if !line.is_empty() {
            self.roff.text(line);
        }
    }

    fn control(&mut self, name: &str, arguments: &[&str]) {
        self.roff.control(name, arguments.iter().copied());
    }
}

fn plain(inlines: &[Inline]) -> String {
    let text = inlines.iter().map(|inline| match inline {
        Inline::Roman(text) | Inline::Bold(text) | Inline::Italic(text) => text.as_str(),
        Inline::LineBreak => " ",
    });
    text.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_ends_at_the_next_heading_of_its_level_and_not_in_a_code_block() {
        let text = "# A\n## B\none\n### C\n```\n## no\n```\n## D\ntwo\n";
        assert_eq!(section(text, "## B"), Some("one\n### C\n```\n## no\n```\n"));
        assert_eq!(section(text, "## D"), Some("two\n"));
        assert_eq!(section(text, "## E"), None);
    }

    #[test]
    fn tables_lists_and_code_become_man_page_source() {
        let table =
            to_roff("| key | meaning | default |\n| - | - | - |\n| `a.b` | what *it* is | `1` |\n| `c` | more | |\n");
        assert!(table.contains(".TP\n\\fBa.b\\fR\nwhat \\fIit\\fR is; default: \\fB1\\fR\n"), "{table}");
        assert!(table.ends_with(".TP\n\\fBc\\fR\nmore\n"), "{table}");
        let rest = to_roff("One [link](x.md).\n\n- first\n- second\n\n```\n.ls -l\n```\n");
        assert!(rest.starts_with("One link.\n"), "{rest}");
        assert!(rest.contains(".IP \u{2022} 4\nfirst\n"), "{rest}");
        // A line that begins with a dot would be a request.
        assert!(rest.contains(".nf\n\\&.ls \\-l\n.fi\n"), "{rest}");
    }
}
