//! `docs/host-agent.md` and `README.md` against the program: flags, keys, words and counters, so that they cannot rot.

#![allow(clippy::unwrap_used)]

use fpr_host_agent::config::{Config, Flags};
use fpr_host_agent::device::{Fault, balloon};
use fpr_host_agent::session::counters::{Counters, MemorySource};
use fpr_protocol::{CloseReason, Gate, Refusal};
use std::path::{Path, PathBuf};
use std::process::Command;

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(workspace(path)).unwrap()
}

/// Asserts that each word stands in the text as code, alone or at the end of a dotted path.
fn assert_documented(path: &str, words: impl IntoIterator<Item = impl AsRef<str>>) {
    let text = read(path);
    let missing: Vec<String> = words
        .into_iter()
        .map(|word| word.as_ref().to_owned())
        .filter(|word| {
            ![format!("`{word}`"), format!("`{word} "), format!(".{word}`")].iter().any(|code| text.contains(code))
        })
        .collect();
    assert!(missing.is_empty(), "{path} does not document {missing:?}");
}

fn help(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_fpr-host-agent")).args(arguments).arg("--help").output().unwrap();
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

/// The keys that a table of the configuration takes, by what the error for an unknown one says.
fn keys(config: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("host.toml");
    std::fs::write(&path, config).unwrap();
    let error = Config::load(&Flags { config: Some(path), ..Flags::default() }).unwrap_err();
    let chain = fpr_protocol::error_chain(&error);
    let (_, expected) = chain.split_once("expected ").unwrap();
    expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn every_command_and_flag_is_documented() {
    let top = help(&[]);
    let names = commands(&top);
    assert!(names.contains(&"serve") && names.len() >= 5, "{names:?}");
    assert_documented("docs/host-agent.md", &names);
    let nested = help(&["vm"]);
    assert_documented("docs/host-agent.md", commands(&nested).iter().map(|name| format!("vm {name}")));
    let nested = commands(&nested).into_iter().map(|name| vec!["vm", name]);
    for name in names.into_iter().filter(|name| *name != "vm").map(|name| vec![name]).chain(nested) {
        let text = help(&name);
        let flags = flags(&text);
        assert!(flags.contains(&"--control"), "{name:?}: {flags:?}");
        assert_documented("docs/host-agent.md", flags);
    }
}

#[test]
fn every_configuration_key_is_documented() {
    let (top, vm) = (keys("nonsense = 1\n"), keys("[vm.a]\nsocket = \"/a\"\nnonsense = 1\n"));
    assert!(top.len() >= 2 && vm.len() >= 3, "{top:?} {vm:?}");
    assert_documented("docs/host-agent.md", top.into_iter().chain(vm));
}

#[test]
fn every_gate_refusal_close_reason_and_fault_is_documented() {
    assert_documented("README.md", Gate::ALL.iter().map(|gate| gate.word()));
    assert_documented("docs/host-agent.md", Gate::ALL.iter().map(|gate| gate.word()));
    assert_documented("docs/host-agent.md", Refusal::ALL.iter().map(|refusal| refusal.word()));
    assert_documented("docs/host-agent.md", CloseReason::ALL.iter().map(|reason| reason.word()));
    assert_documented("docs/host-agent.md", Fault::ALL.iter().map(|fault| fault.name()));
    assert_documented("docs/host-agent.md", balloon::Fault::ALL.iter().map(|fault| fault.name()));
}

#[test]
fn every_counter_is_documented() {
    let counters = serde_json::to_value(Counters::default()).unwrap();
    assert_documented("docs/host-agent.md", counters.as_object().unwrap().keys());
    for source in MemorySource::ALL {
        let of = &counters["sources"][source.word()];
        assert_documented(
            "docs/host-agent.md",
            of.as_object().unwrap().keys().map(String::as_str).chain([source.word()]),
        );
    }
}

#[test]
fn every_accounting_method_reason_and_field_is_documented() {
    use fpr_host_agent::accounting::{AbsentReason, KsmStat, Method};
    assert_documented("docs/accounting.md", Method::ALL.iter().map(|method| method.word()));
    let reasons = AbsentReason::ALL.iter().map(|reason| serde_json::to_value(reason).unwrap());
    assert_documented("docs/accounting.md", reasons.map(|reason| reason.as_str().unwrap().to_owned()));
    let ksm = KsmStat { merging_bytes: 0, zero_bytes: 0, profit_bytes: None };
    let ksm = serde_json::to_value(ksm).unwrap();
    assert_documented("docs/accounting.md", ksm.as_object().unwrap().keys());
    let text = read("docs/accounting.md");
    for flag in flags(&help(&["memory"])).iter().filter(|flag| **flag != "--help") {
        assert!(text.contains(flag), "docs/accounting.md does not document {flag}");
    }
}

#[test]
fn the_shipped_configuration_is_valid() {
    let load = |path: PathBuf| Config::load(&Flags { config: Some(path), ..Flags::default() }).unwrap();
    let config = load(workspace("pkg/etc/host.toml"));
    // VMs come by `vm add`; one in the file would be listened for on every machine with the package.
    assert!(config.vms.is_empty() && config.directory.is_some());
    // What is offered as a comment has to work, too.
    let text = read("pkg/etc/host.toml");
    let lines = text.lines().map(|line| line.strip_prefix('#').filter(|line| !line.starts_with(' ')).unwrap_or(line));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("host.toml");
    std::fs::write(&path, lines.collect::<Vec<_>>().join("\n")).unwrap();
    let config = load(path);
    assert_eq!(config.vms.iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>(), ["web1"]);
    assert!(config.vms[0].balloon.is_some());
}
