//! `docs/guest-agent.md` and the shipped configuration against the program: flags, keys and words, so that they cannot rot.

#![allow(clippy::unwrap_used)]

use fpr_guest_agent::config::{Config, Flags};
use fpr_guest_agent::kernel::detect::Check;
use fpr_protocol::Gate;
use std::path::{Path, PathBuf};
use std::process::Command;

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Asserts that each word stands in the page as code.
fn assert_documented(words: impl IntoIterator<Item = impl AsRef<str>>) {
    let text = std::fs::read_to_string(workspace("docs/guest-agent.md")).unwrap();
    let missing: Vec<String> = words
        .into_iter()
        .map(|word| word.as_ref().to_owned())
        .filter(|word| ![format!("`{word}`"), format!("`{word} ")].iter().any(|code| text.contains(code)))
        .collect();
    assert!(missing.is_empty(), "docs/guest-agent.md does not document {missing:?}");
}

fn help(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_fpr-guest-agent")).args(arguments).arg("--help").output().unwrap();
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Names of the subcommands in a help text.
fn commands(help: &str) -> Vec<&str> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    listed.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect()
}

/// Long flags in a help text.
fn flags(help: &str) -> Vec<&str> {
    let words = help.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    words.filter(|word| word.len() > 2 && word.starts_with("--")).collect()
}

fn load(path: PathBuf) -> Result<Config, String> {
    Config::load(&Flags { config: Some(path), ..Flags::default() }).map_err(|error| fpr_protocol::error_chain(&error))
}

fn load_text(config: &str) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("guest.toml");
    std::fs::write(&path, config).unwrap();
    load(path)
}

/// The keys that a table of the configuration takes, by what the error for an unknown one says.
fn keys(config: &str) -> Vec<String> {
    let error = load_text(config).unwrap_err();
    let (_, expected) = error.split_once("expected ").unwrap();
    expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn every_command_and_flag_is_documented() {
    let top = help(&[]);
    let names = commands(&top);
    assert!(names.contains(&"run") && names.len() >= 5, "{names:?}");
    assert_documented(&names);
    for name in names {
        let text = help(&[name]);
        let flags = flags(&text);
        assert!(flags.contains(&"--run-dir"), "{name}: {flags:?}");
        assert_documented(flags);
    }
}

#[test]
fn every_configuration_key_is_documented() {
    let (top, policy) = (keys("nonsense = 1\n"), keys("[policy]\nnonsense = 1\n"));
    assert!(top.len() >= 6 && policy.len() >= 7, "{top:?} {policy:?}");
    assert_documented(top.into_iter().chain(policy));
}

#[test]
fn every_gate_and_check_is_documented() {
    assert_documented(Gate::ALL.iter().map(|gate| gate.word()));
    assert_documented(Check::ALL.iter().map(|check| check.word()));
}

#[test]
fn the_shipped_configuration_holds_the_defaults_and_every_key() {
    let path = workspace("pkg/etc/guest.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    for key in keys("nonsense = 1\n").into_iter().filter(|key| key != "policy").chain(keys("[policy]\nnonsense = 1\n"))
    {
        assert!(text.lines().any(|line| line.starts_with(&format!("{key} = "))), "{key} is missing");
    }
    assert_eq!(format!("{:#?}", load(path).unwrap()), format!("{:#?}", load_text("").unwrap()));
}
