//! The Debian packages as an administrator meets them: installed, started, used, upgraded and purged in a container with
//! systemd, under the units that ship.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fpr_tests::container::{Container, SHARED};
use fpr_tests::{poll, process, skip};
use tempfile::TempDir;

/// Far more than a unit's state takes to change, on a busy machine, too.
const DEADLINE: Duration = Duration::from_secs(60);
const HOST: &str = "fpr-host-agent";
const GUEST: &str = "fpr-guest-agent";
/// What the package manager, the user database and the journal keep by themselves. Names are compared, not contents.
const KEPT_BY_OTHERS: &str =
    r"^/var/(log|cache|lib/(dpkg|systemd|apt))/|^/etc/(passwd|group|g?shadow|sub[ug]id)-$|^/etc/\.pwd\.lock$";

/// The packages, built as they ship, and a container that sees them; or a counted skip.
fn prepare(test: &str) -> Result<Option<(Container, TempDir)>> {
    if let Err(reason) = Container::possible() {
        skip::skip(test, &format!("{reason:#}"));
        return Ok(None);
    }
    let packages = dist()?;
    // What a machine lets a container do shows only when one boots: a sandbox may forbid mounts or cgroups to root, too.
    match Container::boot(packages.path()) {
        Ok(container) => Ok(Some((container, packages))),
        Err(error) => {
            skip::skip(test, &format!("{error:#}"));
            Ok(None)
        }
    }
}

fn dist() -> Result<TempDir> {
    let out = tempfile::tempdir()?;
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["run", "--quiet", "--package", "xtask", "--", "dist", "--out"]).arg(out.path());
    process::run(cargo.current_dir(process::workspace()))?;
    Ok(out)
}

fn install(container: &Container, package: &str) -> Result<String> {
    container.run(&format!("dpkg --install {SHARED}/{package}_*.deb 2>&1"))
}

/// Names, kinds, owners and modes of what is installed; runtime directories apart.
fn files(container: &Container) -> Result<String> {
    container.run(&format!(
        "find /etc /usr /var /opt /root /srv -xdev -printf '%p %y %u:%g %m\\n' | grep -vE '{KEPT_BY_OTHERS}' | sort"
    ))
}

fn property(container: &Container, unit: &str, name: &str) -> Result<String> {
    Ok(container.run(&format!("systemctl show --value --property {name} {unit}"))?.trim().to_owned())
}

fn wait_for(container: &Container, unit: &str, name: &str, wanted: &str) -> Result<()> {
    let what = format!("{name} of {unit} to be {wanted}");
    poll::until(&what, DEADLINE, || property(container, unit, name), |value| value == wanted)
        .map(drop)
        .with_context(|| container.run(&format!("journalctl --no-pager -n 50 -u {unit}")).unwrap_or_default())
}

/// The exposure that `docs/service.md` gives for a unit, such as 1.2.
fn documented_exposure(unit: &str) -> Result<f64> {
    let text = std::fs::read_to_string(process::workspace().join("docs/service.md"))?;
    let row = text.lines().find(|line| line.starts_with(&format!("| `{unit}.service` |"))).context("no such row")?;
    Ok(row.split('|').nth(2).unwrap_or_default().trim().parse()?)
}

/// systemd's own opinion of an installed unit: no mistakes, and as little exposed as documented.
fn assert_unit(container: &Container, unit: &str) -> Result<()> {
    let path = format!("/usr/lib/systemd/system/{unit}.service");
    let said = container.run(&format!("systemd-analyze verify --man=no {path} 2>&1"))?;
    // Settings of systemd 254, which the unit names as such.
    let complaints: Vec<_> = said
        .lines()
        .filter(|line| !["RestartSteps", "RestartMaxDelaySec"].iter().any(|known| line.contains(known)))
        .collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    let security = container.run(&format!("systemd-analyze security --offline=true --no-pager {path}"))?;
    let (_, figure) = security.rsplit_once("Overall exposure level for").context("no overall level")?;
    let figure = figure.split_whitespace().find_map(|word| word.parse::<f64>().ok()).context("no figure")?;
    let documented = documented_exposure(unit)?;
    assert!(
        (figure - documented).abs() < 0.05,
        "{unit}: exposure {figure}, docs/service.md says {documented}\n{security}"
    );
    Ok(())
}

fn assert_man_pages(container: &Container, package: &str) -> Result<()> {
    let pages = container.run(&format!("dpkg --listfiles {package} | grep /man/.*gz$"))?;
    assert!(pages.lines().count() >= 6, "{pages}");
    // What clap_mangen writes has a paragraph too many here and there.
    let said = container.run(&format!(
        "for page in {}; do mandoc -T lint -W warning $page; done | grep -v 'skipping paragraph macro' || true",
        pages.split_whitespace().collect::<Vec<_>>().join(" ")
    ))?;
    assert!(said.is_empty(), "{said}");
    Ok(())
}

/// A setting for the test that the shipped unit does not have.
fn drop_in(container: &Container, unit: &str, settings: &str) -> Result<()> {
    container.write(&format!("/run/systemd/system/{unit}.service.d/test.conf"), settings)?;
    container.run("systemctl daemon-reload").map(drop)
}

#[test]
#[ignore = "boots a container"]
fn the_host_package_installs_serves_and_purges() -> Result<()> {
    let Some((container, _packages)) = prepare("the_host_package_installs_serves_and_purges")? else { return Ok(()) };
    let before = files(&container)?;
    install(&container, HOST)?;

    wait_for(&container, HOST, "ActiveState", "active")?;
    assert_eq!(property(&container, HOST, "UnitFileState")?, "enabled");
    assert_unit(&container, HOST)?;
    assert_man_pages(&container, HOST)?;
    assert_permissions(&container)?;
    assert_an_unprivileged_daemon_can_inspect(&container)?;
    assert_reload(&container)?;
    assert_watchdog(&container, HOST, "")?;
    container.run("fpr-host-agent status")?;

    // An upgrade leaves the daemon alone, and says so.
    let pid = property(&container, HOST, "MainPID")?;
    let said = install(&container, HOST)?;
    assert!(said.contains("service.md"), "{said}");
    assert_eq!(property(&container, HOST, "MainPID")?, pid);

    // An administrator's choice outlives an upgrade.
    container.run("systemctl disable --now fpr-host-agent 2>&1")?;
    install(&container, HOST)?;
    assert_eq!(property(&container, HOST, "UnitFileState")?, "disabled");

    container.run("rm -r /run/systemd/system/fpr-*")?;
    container.run("dpkg --purge fpr-host-agent 2>&1")?;
    assert_nothing_left(&container, &before)?;
    container.run("! getent passwd fpr && ! getent group fpr && ! test -e /run/fpr").map(drop)
}

fn assert_nothing_left(container: &Container, before: &str) -> Result<()> {
    let after = files(container)?;
    let left: Vec<_> = after.lines().filter(|line| !before.lines().any(|known| known == *line)).collect();
    // The one thing that is not undone: the group of the VMMs, which others may have come to use.
    assert!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

/// Who reaches which socket.
fn assert_permissions(container: &Container) -> Result<()> {
    assert_eq!(container.run("stat -c '%U:%G %a' /run/fpr/host.sock /run/fpr/vm")?, "fpr:fpr 660\nfpr:kvm 2750\n");
    container.run("fpr-host-agent vm add web1")?;
    let sockets = container.run("find /run/fpr/vm -type s -printf '%u:%g %m\\n' | sort -u")?;
    assert_eq!(sockets, "fpr:kvm 660\n");
    assert_eq!(container.run("stat -c '%U:%G %a' /run/fpr/vm/web1")?, "fpr:kvm 2750\n");
    let socket = "/run/fpr/vm/web1/vsock.sock";
    // As libvirt runs QEMU on Debian: any user, group kvm. Write permission on the socket is what connect(2) asks for, and
    // on its way the directories must let it through.
    let as_vmm = |line: &str| container.run(&format!("setpriv --reuid=nobody --regid=kvm --clear-groups {line}"));
    as_vmm(&format!("test -w {socket}")).context("a VMM's user must reach its socket")?;
    ensure!(as_vmm("test -w /run/fpr/vm/web1").is_err(), "a VMM must not put a socket in another's place");
    ensure!(as_vmm("test -w /run/fpr/host.sock").is_err(), "a VMM must not reach the control socket");
    let code = container.run("setpriv --reuid=nobody --regid=kvm --clear-groups fpr-host-agent status; echo $?")?;
    assert_eq!(code.lines().last(), Some("77"), "{code}");
    let status = container.run("setpriv --reuid=nobody --regid=fpr --clear-groups fpr-host-agent status")?;
    assert!(status.contains("web1"), "{status}");
    container.run("fpr-host-agent vm remove web1").map(drop)
}

/// The sandbox of the unit leaves the daemon what it needs: another user's process can be looked into, cachestat(2) works.
fn assert_an_unprivileged_daemon_can_inspect(container: &Container) -> Result<()> {
    container.run(
        "systemd-run --unit=vmm --uid=nobody --gid=kvm sleep infinity
         pid=$(systemctl show --value --property MainPID vmm)
         sed -e \"s|^ExecStart=.*|ExecStart=/usr/bin/fpr-host-agent doctor --json --pid $pid|\" -e '/^Restart/d; /^Watchdog/d' \
             -e 's|^Type=.*|Type=oneshot\\nStandardOutput=truncate:/run/fpr-doctor.json|; /^ExecReload/d' /usr/lib/systemd/system/fpr-host-agent.service \
             > /run/systemd/system/fpr-doctor.service
         systemctl daemon-reload
         systemctl start fpr-doctor || true",
    )?;
    // In the journal, lines of systemd stand between those of the document.
    let said = container.run("cat /run/fpr-doctor.json")?;
    let report: serde_json::Value = serde_json::from_str(&said).with_context(|| said.clone())?;
    let verdict = |check: &str| {
        let lines = report["lines"].as_array().map(Vec::as_slice).unwrap_or_default();
        lines.iter().find(|line| line["check"] == check).cloned().with_context(|| format!("no {check} in {report:#}"))
    };
    for check in ["inspect", "drop-guard", "assigned-device", "memory-locked"] {
        let line = verdict(check)?;
        assert_eq!(line["verdict"], "ok", "{line}");
    }
    let descriptors = verdict("assigned-device")?;
    assert!(descriptors["reason"].as_str().unwrap_or_default().contains("descriptors"), "{descriptors}");
    container.run("systemctl stop vmm").map(drop)
}

/// `systemctl reload` takes a good file, and says so of a bad one and goes on with the old.
fn assert_reload(container: &Container) -> Result<()> {
    let pid = property(container, HOST, "MainPID")?;
    container.run("cp /etc/fpr/host.toml /root/host.toml && echo 'nonsense = 1' >> /etc/fpr/host.toml")?;
    ensure!(container.run("systemctl reload fpr-host-agent").is_err(), "a bad file must be an error");
    container.run("mv /root/host.toml /etc/fpr/host.toml && systemctl reload fpr-host-agent")?;
    wait_for(container, HOST, "ActiveState", "active")?;
    assert_eq!(property(container, HOST, "MainPID")?, pid);
    Ok(())
}

/// An agent that hangs is started anew. `unit` are settings that the test needs beside.
fn assert_watchdog(container: &Container, name: &str, unit: &str) -> Result<()> {
    assert_eq!(property(container, name, "WatchdogUSec")?, "30s");
    drop_in(container, name, &format!("{unit}[Service]\nWatchdogSec=2\nRestartSec=0\n"))?;
    container.run(&format!("systemctl restart {name} && systemctl kill --kill-whom=main --signal=STOP {name}"))?;
    wait_for(container, name, "NRestarts", "1")?;
    wait_for(container, name, "ActiveState", "active")
}

#[test]
#[ignore = "boots a container"]
fn the_guest_package_installs_runs_and_purges() -> Result<()> {
    let Some((container, _packages)) = prepare("the_guest_package_installs_runs_and_purges")? else { return Ok(()) };
    let before = files(&container)?;
    install(&container, GUEST)?;
    assert_eq!(property(&container, GUEST, "UnitFileState")?, "enabled");
    // A container is no VM.
    assert_eq!(property(&container, GUEST, "ConditionResult")?, "no");
    assert_eq!(property(&container, GUEST, "ActiveState")?, "inactive");
    assert_unit(&container, GUEST)?;
    assert_man_pages(&container, GUEST)?;

    drop_in(&container, GUEST, "[Unit]\nConditionVirtualization=\n")?;
    container.run("systemctl start fpr-guest-agent")?;
    wait_for(&container, GUEST, "ActiveState", "active")?;
    let pid = property(&container, GUEST, "MainPID")?;
    // Its claims would not outlive it in a mount namespace of its own.
    let namespaces = container.run(&format!("readlink /proc/{pid}/ns/mnt /proc/1/ns/mnt"))?;
    let namespaces: Vec<_> = namespaces.lines().collect();
    assert!(namespaces.len() == 2 && namespaces[0] == namespaces[1], "{namespaces:?}");

    assert_watchdog(&container, GUEST, "[Unit]\nConditionVirtualization=\n")?;
    let pid = property(&container, GUEST, "MainPID")?;

    // An upgrade restarts it, which costs nothing.
    install(&container, GUEST)?;
    wait_for(&container, GUEST, "ActiveState", "active")?;
    assert_ne!(property(&container, GUEST, "MainPID")?, pid);

    container.run("rm -r /run/systemd/system/fpr-*")?;
    container.run("dpkg --purge fpr-guest-agent 2>&1")?;
    assert_nothing_left(&container, &before)?;
    container.run("! test -e /run/fpr-guest && ! pgrep fpr-guest-agent").map(drop)
}

#[test]
#[ignore = "builds what ships"]
fn the_same_source_makes_the_same_packages() -> Result<()> {
    let (first, second) = (dist()?, dist()?);
    for package in [HOST, GUEST] {
        let bytes = |dir: &Path| {
            let mut files = std::fs::read_dir(dir)?.filter_map(|entry| Some(entry.ok()?.path()));
            let file =
                files.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(package)));
            Ok::<_, anyhow::Error>(std::fs::read(file.context("no such package")?)?)
        };
        ensure!(bytes(first.path())? == bytes(second.path())?, "{package} differs");
    }
    Ok(())
}
