//! The binaries under test, built as they are shipped: all of them static, what runs in the guest made small.
//! `cargo xtask dist` packages the same files.
//!
//! `FPR_TEST_HOST_AGENT` and `FPR_TEST_GUEST_AGENT` name prebuilt ones instead.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::process;

/// Naming the target keeps the static flags away from build scripts and from the machine's own builds.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The host agent.
///
/// # Errors
/// It does not build, or the override names no file.
pub fn host_agent() -> Result<PathBuf> {
    prebuilt("FPR_TEST_HOST_AGENT").unwrap_or_else(|| static_binary("release", "fpr-host-agent", "fpr-host-agent"))
}

/// The guest agent.
///
/// # Errors
/// It does not build, or the override names no file.
pub fn guest_agent() -> Result<PathBuf> {
    prebuilt("FPR_TEST_GUEST_AGENT").unwrap_or_else(|| static_binary("guest", "fpr-guest-agent", "fpr-guest-agent"))
}

/// The command server of the test guest and the workloads that verify memory.
///
/// # Errors
/// They do not build.
pub fn guest_binaries() -> Result<Vec<(&'static str, PathBuf)>> {
    ["fpr-guest-shell", "fpr-hold"]
        .into_iter()
        .map(|name| Ok((name, static_binary("guest", "fpr-tests", name)?)))
        .collect()
}

/// A VM without a guest, for `bench scale`. It is no part of what is shipped, so it is not static.
///
/// # Errors
/// It does not build.
pub fn mock_vm() -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.args(["--release", "--package", "fpr-host-agent", "--example", "mock_vm"]);
    executable(cargo, "mock_vm")
}

fn prebuilt(variable: &str) -> Option<Result<PathBuf>> {
    let path = PathBuf::from(std::env::var_os(variable)?);
    Some(if path.is_file() { Ok(path) } else { Err(anyhow::anyhow!("{variable}={}: no such file", path.display())) })
}

fn static_binary(profile: &str, package: &str, binary: &str) -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.args(["--profile", profile, "--target", TARGET, "--package", package, "--bin", binary]);
    if package == "fpr-tests" {
        cargo.arg("--no-default-features");
    }
    cargo.env("RUSTFLAGS", "-C target-feature=+crt-static").env_remove("CARGO_ENCODED_RUSTFLAGS");
    executable(cargo, binary)
}

fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(process::workspace()).args(["build", "--quiet", "--message-format", "json-render-diagnostics"]);
    command
}

/// Builds, and takes the path of the binary from cargo's own report. Compiler messages go to standard error as usual.
fn executable(mut cargo: Command, binary: &str) -> Result<PathBuf> {
    let line = process::command_line(&cargo);
    let output = cargo.stdin(Stdio::null()).stderr(Stdio::inherit()).output().with_context(|| line.clone())?;
    ensure!(output.status.success(), "`{line}` failed");
    for message in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(message) else { continue };
        let is_it = message.pointer("/target/name").and_then(Value::as_str) == Some(binary);
        if let (true, Some(path)) = (is_it, message.get("executable").and_then(Value::as_str)) {
            return Ok(PathBuf::from(path));
        }
    }
    bail!("`{line}` built no executable named {binary}")
}
