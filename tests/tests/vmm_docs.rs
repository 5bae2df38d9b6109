//! The command lines of `docs/vmm/qemu.md`, read out of the page and started: QEMU takes them, the daemon sees its front ends, and `doctor`
//! finds nothing to change. What reporting does over them is the matter of other tests.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fpr_tests::daemon::HostAgent;
use fpr_tests::environment::Environment;
use fpr_tests::process::workspace;
use fpr_tests::skip::skip;
use fpr_tests::{artifacts, poll};
use serde_json::Value;

/// QEMU connects within a second on an idle machine; the rest is for a busy one.
const DEADLINE: Duration = Duration::from_secs(90);

/// Ends with the test.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The words of the block that is marked with this name.
fn block(name: &str) -> Result<Vec<String>> {
    let page = std::fs::read_to_string(workspace().join("docs/vmm/qemu.md"))?;
    let marker = format!("<!-- block: {name} -->\n```\n");
    let (_, rest) = page.split_once(&marker).with_context(|| format!("docs/vmm/qemu.md has no {marker:?}"))?;
    let (block, _) = rest.split_once("```").context("the block does not end")?;
    Ok(block.split_whitespace().map(str::to_owned).collect())
}

/// Starts QEMU, paused and without a guest, with these blocks of the page, and returns what doctor says about its channels.
fn channels(qemu: &Path, blocks: &[&str], host: &HostAgent, sockets: &[(&str, &Path)]) -> Result<Value> {
    let mut command = Command::new(qemu);
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-S", "-m", "4G"]);
    for name in blocks {
        for word in block(name)? {
            // Only what belongs to a machine is replaced: where the daemon's sockets are.
            let word = sockets.iter().fold(word, |word, (documented, real)| {
                word.replace(&format!("path={documented}"), &format!("path={}", real.display()))
            });
            command.arg(word);
        }
    }
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut child = Qemu(child);
    let pid = child.0.id();
    let doctor = || -> Result<Value> {
        // Its exit code is about this machine, too, which may have no KVM.
        let output = Command::new(artifacts::host_agent()?)
            .args(["doctor", "--json", "--pid", &pid.to_string(), "--control"])
            .arg(host.control())
            .output()?;
        serde_json::from_slice(&output.stdout).context("doctor printed no JSON")
    };
    let line = |report: &Value, check: &str| -> Value {
        let lines = report["lines"].as_array().map_or(&[][..], Vec::as_slice);
        lines.iter().find(|line| line["check"] == check).cloned().unwrap_or_default()
    };
    let devices = if blocks.contains(&"kernel") { &["vsock", "balloon"][..] } else { &["vsock"] };
    let alive = |child: &mut Child| -> Result<()> {
        let Some(status) = child.try_wait()? else { return Ok(()) };
        let mut said = String::new();
        std::io::Read::read_to_string(child.stderr.as_mut().context("no stderr")?, &mut said)?;
        anyhow::bail!("QEMU ended ({status}): {said}")
    };
    // Each has its own connection, and doctor is to see both.
    poll::until(
        "each device to have its front end",
        DEADLINE,
        || alive(&mut child.0).and_then(|()| host.vm_status("web1")),
        |status| devices.iter().all(|device| status[device]["front_end"]["pid"] == pid),
    )?;
    let report = poll::until("doctor to see the daemon's front end", DEADLINE, doctor, |report| {
        line(report, "connected")["verdict"] == "ok"
    })?;
    for check in ["process", "memory", "memory-locked", "assigned-device", "usable"] {
        let line = line(&report, check);
        ensure!(line["verdict"] == "ok", "doctor about `{check}`: {line}");
    }
    Ok(line(&report, "usable")["figures"]["channels_present"].clone())
}

#[test]
#[ignore = "starts QEMU"]
fn the_documented_agent_channel_works_with_the_machines_own_qemu() -> Result<()> {
    let environment = Environment::get()?;
    let host = HostAgent::start(&["web1"], &[])?;
    let socket = host.socket("web1");
    let sockets = [("/run/fpr/web1.sock", socket.as_path())];
    let found = channels(&environment.packages.qemu.binary, &["memory", "agent"], &host, &sockets)?;
    assert_eq!(found, serde_json::json!(["agent-channel"]));
    Ok(())
}

#[test]
#[ignore = "starts QEMU"]
fn the_documented_devices_work_side_by_side_with_a_qemu_that_has_the_generic_one() -> Result<()> {
    let qemu = match Environment::get()?.generic_qemu() {
        Ok(qemu) => qemu,
        Err(error) => {
            let name = "the_documented_devices_work_side_by_side_with_a_qemu_that_has_the_generic_one";
            skip(name, &format!("{error:#}"));
            return Ok(());
        }
    };
    let dir = tempfile::tempdir()?;
    let balloon = dir.path().join("balloon.sock");
    let host = HostAgent::start(&["web1"], &["--balloon", &format!("web1={}", balloon.display())])?;
    let socket = host.socket("web1");
    let sockets = [("/run/fpr/web1.sock", socket.as_path()), ("/run/fpr/web1-balloon.sock", balloon.as_path())];
    let found = channels(&qemu.binary, &["memory", "agent", "kernel"], &host, &sockets)?;
    assert_eq!(found, serde_json::json!(["agent-channel", "kernel-channel"]));
    Ok(())
}
