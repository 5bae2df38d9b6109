//! The rust-vmm crates pass each other's types around, so the lock file must hold one version of each.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

const RUST_VMM: [&str; 9] = [
    "kvm-bindings",
    "kvm-ioctls",
    "vhost",
    "vhost-user-backend",
    "virtio-bindings",
    "virtio-queue",
    "virtio-vsock",
    "vm-memory",
    "vmm-sys-util",
];

#[test]
fn each_rust_vmm_crate_resolves_to_one_version() -> Result<()> {
    let path = fpr_tests::process::workspace().join("Cargo.lock");
    let lock: toml::Table = std::fs::read_to_string(&path)?.parse().context("Cargo.lock")?;
    let mut versions: BTreeMap<&str, Vec<&str>> = RUST_VMM.into_iter().map(|name| (name, vec![])).collect();
    for package in lock.get("package").and_then(toml::Value::as_array).context("Cargo.lock has no packages")? {
        let field = |key| package.get(key).and_then(toml::Value::as_str).unwrap_or_default();
        if let Some(found) = versions.get_mut(field("name")) {
            found.push(field("version"));
        }
    }
    for (name, found) in versions {
        assert_eq!(found.len(), 1, "{name} resolves to {found:?}; `cargo tree --invert {name}` shows who wants which");
    }
    Ok(())
}
