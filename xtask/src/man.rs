//! Man pages and shell completions of both agents, made from their command lines, their documentation and `pkg/man/`.
//!
//! Called by `cargo xtask man` and by `dist`. Nothing of it is kept in the repository, so nothing of it can be out of date.

mod markdown;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap_complete::Shell;
use clap_mangen::Man;
use fpr_tests::process;
use roff::{Roff, bold, roman};

use crate::source_date::SourceDate;

/// Commands of administrators (man-pages(7)).
const COMMANDS: u8 = 8;
/// File formats.
const FILES: u8 = 5;
const MANUAL: &str = "fpr";

/// One of the two agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agent {
    Host,
    Guest,
}

impl Agent {
    pub(crate) const ALL: [Self; 2] = [Self::Host, Self::Guest];

    /// Name of the binary, of the package and of the unit.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Host => "fpr-host-agent",
            Self::Guest => "fpr-guest-agent",
        }
    }

    /// Its configuration file in `/etc/fpr`.
    pub(crate) const fn config(self) -> &'static str {
        match self {
            Self::Host => "host.toml",
            Self::Guest => "guest.toml",
        }
    }

    fn command(self) -> clap::Command {
        match self {
            Self::Host => fpr_host_agent::cli::command(),
            Self::Guest => fpr_guest_agent::cli::command(),
        }
    }

    fn document(self) -> &'static str {
        match self {
            Self::Host => "docs/host-agent.md",
            Self::Guest => "docs/guest-agent.md",
        }
    }
}

/// A man page.
#[derive(Debug)]
pub(crate) struct Page {
    /// Such as `fpr-host-agent-status`.
    pub(crate) name: String,
    /// Such as 8.
    pub(crate) section: u8,
    /// Its source.
    pub(crate) text: String,
}

impl Page {
    /// Where it belongs below `/usr/share/man`.
    pub(crate) fn path(&self) -> String {
        format!("man{0}/{1}.{0}", self.section, self.name)
    }
}

/// A completion script.
#[derive(Debug)]
pub(crate) struct Completion {
    /// Where its shell looks for it, below `/usr/share`.
    pub(crate) path: String,
    pub(crate) text: Vec<u8>,
}

/// Writes the pages and completions of both agents below a directory, laid out as below `/usr/share`.
pub(crate) fn run(out: &Path) -> Result<()> {
    let mut files = 0;
    for agent in Agent::ALL {
        let pages = pages(agent)?.into_iter().map(|page| (format!("man/{}", page.path()), page.text.into_bytes()));
        let completions = completions(agent).into_iter().map(|completion| (completion.path, completion.text));
        for (path, text) in pages.chain(completions) {
            let path = out.join(path);
            fs::create_dir_all(path.parent().unwrap_or(out)).with_context(|| out.display().to_string())?;
            fs::write(&path, text).with_context(|| path.display().to_string())?;
            files += 1;
        }
    }
    println!("{files} files written to {}; look at one with `man -l FILE`", out.display());
    Ok(())
}

/// A page for the agent, one for each of its commands, and one for its configuration file.
pub(crate) fn pages(agent: Agent) -> Result<Vec<Page>> {
    let read = |path: &str| fs::read_to_string(process::workspace().join(path)).with_context(|| path.to_owned());
    let document = read(agent.document())?;
    let sources = Sources {
        agent,
        extra: read(&format!("pkg/man/{}.md", agent.name()))?,
        day: SourceDate::get()?.day()?,
        exit_status: below(&document, "## Exit codes", agent.document())?.to_owned(),
    };
    let mut command = agent.command().disable_help_subcommand(true);
    command.build();
    let mut names = Vec::new();
    page_names(&command, &mut names);
    let mut pages = Vec::new();
    sources.command_pages(&command, &names, &mut pages)?;
    let configuration = below(&document, "## Configuration", agent.document())?;
    pages.push(sources.configuration_page(configuration));
    Ok(pages)
}

fn below<'a>(markdown: &'a str, heading: &str, path: &str) -> Result<&'a str> {
    markdown::section(markdown, heading).with_context(|| format!("{path} has no section {heading}"))
}

fn page_names(command: &clap::Command, names: &mut Vec<String>) {
    names.push(page_name(command));
    command.get_subcommands().filter(|command| !command.is_hide_set()).for_each(|command| page_names(command, names));
}

fn page_name(command: &clap::Command) -> String {
    command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned()
}

/// What the pages of an agent are made of beside its command line.
struct Sources {
    agent: Agent,
    /// `pkg/man/AGENT.md`: a first-level heading per page, its sections below.
    extra: String,
    exit_status: String,
    day: String,
}

impl Sources {
    fn command_pages(&self, command: &clap::Command, names: &[String], pages: &mut Vec<Page>) -> Result<()> {
        pages.push(self.command_page(command, names)?);
        for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            self.command_pages(command, names, pages)?;
        }
        Ok(())
    }

    fn command_page(&self, command: &clap::Command, names: &[String]) -> Result<Page> {
        let name = page_name(command);
        let man = Man::new(command.clone())
            .section(COMMANDS.to_string())
            .date(&self.day)
            .source(format!("fpr {}", env!("CARGO_PKG_VERSION")))
            .manual(MANUAL);
        let mut text = Vec::new();
        man.render_title(&mut text)?;
        man.render_name_section(&mut text)?;
        man.render_synopsis_section(&mut text)?;
        man.render_description_section(&mut text)?;
        man.render_options_section(&mut text)?;
        if command.get_subcommands().next().is_some() {
            man.render_subcommands_section(&mut text)?;
        }
        let mut text = String::from_utf8(text)?;
        heading(&mut text, "EXIT STATUS");
        text.push_str(&markdown::to_roff(&self.exit_status));
        let extra = markdown::section(&self.extra, &format!("# {name}")).unwrap_or_default();
        for (title, body) in markdown::sections(extra) {
            heading(&mut text, &title.to_uppercase());
            text.push_str(&markdown::to_roff(body));
        }
        let others = names.iter().filter(|other| **other != name).map(|other| (other.clone(), COMMANDS));
        see_also(&mut text, others.chain([(self.configuration_name(), FILES)]));
        Ok(Page { name, section: COMMANDS, text })
    }

    fn configuration_name(&self) -> String {
        format!("fpr-{}", self.agent.config())
    }

    fn configuration_page(&self, configuration: &str) -> Page {
        let name = self.configuration_name();
        let (version, agent) = (format!("fpr {}", env!("CARGO_PKG_VERSION")), self.agent.name());
        let mut roff = Roff::new();
        roff.control("TH", [name.as_str(), &FILES.to_string(), &self.day, &version, MANUAL]);
        roff.control("SH", ["NAME"]);
        roff.text([roman(format!("{name} - configuration of {agent}"))]);
        roff.control("SH", ["SYNOPSIS"]);
        roff.text([bold(format!("/etc/fpr/{}", self.agent.config()))]);
        let mut text = roff.to_roff();
        heading(&mut text, "DESCRIPTION");
        text.push_str(&markdown::to_roff(configuration));
        heading(&mut text, "SEE ALSO");
        text.push_str(&references([(agent.to_owned(), COMMANDS)]));
        Page { name, section: FILES, text }
    }
}

fn heading(text: &mut String, title: &str) {
    text.push_str(&Roff::new().control("SH", [title]).to_roff());
}

fn see_also(text: &mut String, pages: impl IntoIterator<Item = (String, u8)>) {
    heading(text, "SEE ALSO");
    text.push_str(&references(pages));
}

fn references(pages: impl IntoIterator<Item = (String, u8)>) -> String {
    let mut line = Vec::new();
    for (name, section) in pages {
        if !line.is_empty() {
            line.push(roman(", "));
        }
        line.extend([bold(name), roman(format!("({section})"))]);
    }
    Roff::new().text(line).to_roff()
}

/// Scripts for bash, zsh and fish, at the places where Debian's shells look.
pub(crate) fn completions(agent: Agent) -> Vec<Completion> {
    let name = agent.name();
    let shells = [
        (Shell::Bash, format!("bash-completion/completions/{name}")),
        (Shell::Zsh, format!("zsh/vendor-completions/_{name}")),
        (Shell::Fish, format!("fish/vendor_completions.d/{name}.fish")),
    ];
    let script = |(shell, path)| {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut agent.command(), name, &mut text);
        Completion { path, text }
    };
    shells.into_iter().map(script).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SECTIONS: [&str; 6] = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO"];

    fn headings(page: &Page) -> Vec<String> {
        let titles = page.text.lines().filter_map(|line| line.strip_prefix(".SH "));
        titles.map(|title| title.replace(['"', '\\'], "")).collect()
    }

    fn subcommands(command: &clap::Command) -> Vec<String> {
        command.get_subcommands().map(|command| command.get_name().to_owned()).filter(|name| name != "help").collect()
    }

    #[test]
    fn every_command_has_a_page_with_the_usual_sections() {
        for agent in Agent::ALL {
            let pages = pages(agent).unwrap();
            for subcommand in subcommands(&agent.command()) {
                let name = format!("{}-{subcommand}", agent.name());
                assert!(pages.iter().any(|page| page.name == name && page.section == 8), "{name}");
            }
            for page in pages.iter().filter(|page| page.section == 8) {
                let headings = headings(page);
                let missing: Vec<_> = SECTIONS.iter().filter(|title| !headings.iter().any(|h| h == *title)).collect();
                assert!(missing.is_empty(), "{}: {missing:?} of {headings:?}", page.name);
            }
            let root = pages.iter().find(|page| page.name == agent.name()).unwrap();
            for title in ["SIGNALS", "FILES", "EXAMPLES"] {
                assert!(headings(root).iter().any(|heading| heading == title), "{}: {title}", root.name);
            }
        }
    }

    #[test]
    fn what_is_written_for_a_page_belongs_to_one() {
        for agent in Agent::ALL {
            let names: Vec<_> = pages(agent).unwrap().into_iter().map(|page| page.name).collect();
            let path = format!("pkg/man/{}.md", agent.name());
            let text = fs::read_to_string(process::workspace().join(&path)).unwrap();
            let titles: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("# ")).collect();
            assert!(!titles.is_empty() && titles.iter().all(|title| names.iter().any(|name| name == title)), "{path}");
        }
    }

    #[test]
    fn the_configuration_pages_name_every_key_of_the_shipped_files() {
        for agent in Agent::ALL {
            let page = pages(agent).unwrap().into_iter().find(|page| page.section == 5).unwrap();
            let shipped = format!("pkg/etc/{}", agent.config());
            let shipped = fs::read_to_string(process::workspace().join(&shipped)).unwrap();
            let keys: Vec<_> = shipped
                .lines()
                .filter_map(|line| Some(line.strip_prefix('#').unwrap_or(line).split_once(" = ")?.0))
                .collect();
            assert!(keys.len() >= 3, "{keys:?}");
            let missing: Vec<_> = keys.iter().filter(|key| !page.text.contains(&format!("\\fB{key}\\fR"))).collect();
            assert!(missing.is_empty(), "{missing:?}\n{}", page.text);
        }
    }

    #[test]
    fn every_shell_completes_every_command() {
        for agent in Agent::ALL {
            let completions = completions(agent);
            assert_eq!(completions.len(), 3);
            for completion in completions {
                let text = String::from_utf8(completion.text).unwrap();
                for subcommand in subcommands(&agent.command()) {
                    assert!(text.contains(&subcommand), "{}: {subcommand}", completion.path);
                }
            }
        }
    }
}
