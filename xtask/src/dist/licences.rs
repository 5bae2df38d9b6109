//! Licences and notices of the crates in a binary. They are in it, so their terms come with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fpr_tests::process::{self, run};
use serde_json::Value;

/// How files with such texts are called.
const NAMES: [&str; 4] = ["LICENSE", "LICENCE", "COPYING", "NOTICE"];

/// Name, version, licence and texts of each crate that a package of the workspace is built from, without those that only run
/// while it is built.
pub(crate) fn collect(package: &str) -> Result<Vec<u8>> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["metadata", "--format-version", "1", "--filter-platform", "x86_64-unknown-linux-gnu"]);
    let metadata: Value = serde_json::from_str(&run(cargo.current_dir(process::workspace()))?)?;
    let crates = in_binary(&metadata, package);
    ensure!(!crates.is_empty(), "cargo metadata knows no package {package}");
    let mut text = String::new();
    for (name, about) in crates {
        let of = |field| about.get(field).and_then(Value::as_str).unwrap_or_default();
        text.push_str(&format!("{name}: {}\n{}\n\n", of("license"), of("repository")));
        let manifest = Path::new(of("manifest_path"));
        for (file, content) in texts(manifest.parent().context("a crate without a directory")?)? {
            text.push_str(&format!("----- {name}: {file}\n{}\n\n", content.trim_end()));
        }
    }
    Ok(text.into_bytes())
}

/// Crates by name and version, in order. Members of the workspace have the package's own licence.
fn in_binary<'a>(metadata: &'a Value, package: &str) -> BTreeMap<String, &'a Value> {
    fn array<'a>(value: &'a Value, field: &str) -> &'a [Value] {
        value.get(field).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }
    fn string<'a>(value: &'a Value, field: &str) -> &'a str {
        value.get(field).and_then(Value::as_str).unwrap_or_default()
    }
    let packages: BTreeMap<&str, &Value> =
        array(metadata, "packages").iter().map(|package| (string(package, "id"), package)).collect();
    let nodes = metadata.get("resolve").map_or(&[][..], |resolve| array(resolve, "nodes"));
    let nodes: BTreeMap<&str, &Value> = nodes.iter().map(|node| (string(node, "id"), node)).collect();
    let root = packages.iter().find(|(_, about)| string(about, "name") == package);
    let mut found = BTreeSet::new();
    let mut open: Vec<&str> = root.map(|(id, _)| *id).into_iter().collect();
    while let Some(id) = open.pop() {
        if !found.insert(id) {
            continue;
        }
        let dependencies = nodes.get(id).map_or(&[][..], |node| array(node, "deps"));
        // The kind of an ordinary dependency is null, else it is `dev` or `build`.
        let ordinary = |dependency: &&Value| array(dependency, "dep_kinds").iter().any(|kind| kind["kind"].is_null());
        open.extend(dependencies.iter().filter(ordinary).map(|dependency| string(dependency, "pkg")));
    }
    let crates = found.iter().filter_map(|id| packages.get(id));
    let foreign = crates.filter(|about| about.get("source").is_some_and(|source| !source.is_null()));
    foreign.map(|about| (format!("{} {}", string(about, "name"), string(about, "version")), *about)).collect()
}

fn texts(directory: &Path) -> Result<BTreeMap<String, String>> {
    let mut texts = BTreeMap::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_file() && NAMES.iter().any(|start| name.to_uppercase().starts_with(start)) {
            texts.insert(name, String::from_utf8_lossy(&fs::read(entry.path())?).into_owned());
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_the_binary_is_made_of_is_named_and_nothing_else() {
        let text = String::from_utf8(collect("fpr-guest-agent").unwrap()).unwrap();
        assert!(text.contains("\nnix 0."), "an ordinary dependency");
        assert!(text.contains("Permission is hereby granted"), "a text");
        for absent in ["\nproptest ", "\nfpr-protocol "] {
            assert!(!text.contains(absent), "{absent:?}: a test's dependency, or our own");
        }
    }
}
