//! `cargo xtask dist`: Debian packages of both agents, with all an administrator expects in them.
//!
//! Staged by hand and built by `dpkg-deb`: the binaries are static, so nothing has to be found out that debhelper would find
//! out. The same source at the same path gives the same packages ([`SourceDate`]).

mod licences;
mod stage;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use fpr_tests::process::{self, run};
use fpr_tests::{artifacts, packages};

use crate::man::{self, Agent};
use crate::source_date::SourceDate;
use stage::{Mode, Stage};

/// The static binaries are built for x86-64 only ([`artifacts`]).
const ARCHITECTURE: &str = "amd64";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Builds both packages into a directory.
pub(crate) fn run_all(out: &Path) -> Result<()> {
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    for agent in Agent::ALL {
        let package = package(agent, out)?;
        println!("{} ({} KiB)", package.display(), fs::metadata(&package)?.len() / 1024);
    }
    Ok(())
}

fn package(agent: Agent, out: &Path) -> Result<PathBuf> {
    let date = SourceDate::get()?;
    let binary = match agent {
        Agent::Host => artifacts::host_agent()?,
        Agent::Guest => artifacts::guest_agent()?,
    };
    fs::create_dir_all(packages::cache())?;
    let directory = tempfile::tempdir_in(packages::cache())?;
    let mut stage = Stage::new(directory.path())?;
    stage.add(&format!("usr/bin/{}", agent.name()), &fs::read(&binary)?, Mode::Executable)?;
    settings(agent, &mut stage)?;
    documentation(agent, date, &mut stage)?;
    control(agent, &mut stage)?;
    let package = out.join(format!("{}_{VERSION}_{ARCHITECTURE}.deb", agent.name()));
    let mut dpkg_deb = Command::new("dpkg-deb");
    dpkg_deb.args(["--root-owner-group", "-Zxz", "--build"]).arg(stage.root()).arg(&package);
    // Later times of files become this one.
    run(dpkg_deb.env("SOURCE_DATE_EPOCH", date.seconds().to_string()))?;
    Ok(package)
}

fn source(path: &str) -> Result<Vec<u8>> {
    fs::read(process::workspace().join(path)).with_context(|| path.to_owned())
}

fn settings(agent: Agent, stage: &mut Stage) -> Result<()> {
    let name = agent.name();
    let unit = source(&format!("pkg/systemd/{name}.service"))?;
    stage.add(&format!("usr/lib/systemd/system/{name}.service"), &unit, Mode::Data)?;
    let config = source(&format!("pkg/etc/{}", agent.config()))?;
    stage.add(&format!("etc/fpr/{}", agent.config()), &config, Mode::Data)?;
    if agent == Agent::Host {
        for kind in ["sysusers", "tmpfiles"] {
            let content = source(&format!("pkg/{kind}/{name}.conf"))?;
            stage.add(&format!("usr/lib/{kind}.d/{name}.conf"), &content, Mode::Data)?;
        }
    }
    for completion in man::completions(agent) {
        stage.add(&format!("usr/share/{}", completion.path), &completion.text, Mode::Data)?;
    }
    Ok(())
}

fn documentation(agent: Agent, date: SourceDate, stage: &mut Stage) -> Result<()> {
    let name = agent.name();
    for page in man::pages(agent)? {
        stage.add_compressed(&format!("usr/share/man/{}", page.path()), page.text.as_bytes())?;
    }
    let doc = |inside: &str| format!("usr/share/doc/{name}/{inside}");
    stage.add(&doc("copyright"), &source("pkg/debian/copyright")?, Mode::Data)?;
    stage.add_compressed(&doc("third-party-licenses"), &licences::collect(name)?)?;
    stage.add_compressed(&doc("changelog"), changelog(name, date)?.as_bytes())?;
    stage.add_compressed(&doc("NEWS.md"), &source("CHANGELOG.md")?)?;
    stage.add(&doc("README.md"), &source("README.md")?, Mode::Data)?;
    stage.add(&doc("ARCHITECTURE.md"), &source("ARCHITECTURE.md")?, Mode::Data)?;
    let overrides = source(&format!("pkg/debian/{name}/lintian-overrides"))?;
    stage.add(&format!("usr/share/lintian/overrides/{name}"), &overrides, Mode::Data)?;
    let others = match agent {
        Agent::Host => ["docs/guest-agent.md"].as_slice(),
        // What happens on the host is for whoever runs one.
        Agent::Guest => &["docs/host-agent.md", "docs/accounting.md", "docs/metrics.md", "docs/vmm"],
    };
    stage.add_tree(&process::workspace(), "docs", &doc(""), others)?;
    if agent == Agent::Host {
        for examples in ["grafana", "prometheus"] {
            stage.add_tree(
                &process::workspace(),
                &format!("pkg/{examples}"),
                &doc(&format!("examples/{examples}")),
                &[],
            )?;
        }
    }
    Ok(())
}

/// dpkg's own format, which `apt` shows; what changed stands in `NEWS.md`.
fn changelog(name: &str, date: SourceDate) -> Result<String> {
    let maintainer = control_field(&template(name)?, "Maintainer").context("no maintainer")?;
    let (what, date) = ("  * See NEWS.md.gz.", date.rfc_2822()?);
    Ok(format!("{name} ({VERSION}) unstable; urgency=medium\n\n{what}\n\n -- {maintainer}  {date}\n"))
}

fn template(name: &str) -> Result<String> {
    Ok(String::from_utf8(source(&format!("pkg/debian/{name}/control"))?)?)
}

fn control_field(control: &str, field: &str) -> Option<String> {
    control.lines().find_map(|line| Some(line.strip_prefix(field)?.strip_prefix(": ")?.to_owned()))
}

fn control(agent: Agent, stage: &mut Stage) -> Result<()> {
    let name = agent.name();
    let fields = format!("Version: {VERSION}\nArchitecture: {ARCHITECTURE}\nInstalled-Size: {}\n", stage.size_kib());
    // The description comes last by custom.
    let control = template(name)?.replacen("Description:", &format!("{fields}Description:"), 1);
    let sums = stage.md5sums()?;
    stage.add_control("control", control.as_bytes(), Mode::Data)?;
    stage.add_control("md5sums", sums.as_bytes(), Mode::Data)?;
    // What an administrator may change: dpkg asks before it replaces it.
    stage.add_control("conffiles", format!("/etc/fpr/{}\n", agent.config()).as_bytes(), Mode::Data)?;
    for script in ["postinst", "prerm", "postrm"] {
        stage.add_control(script, &source(&format!("pkg/debian/{name}/{script}"))?, Mode::Executable)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_shipped_files_are_there_and_scripts_are_shell() {
        for agent in Agent::ALL {
            let directory = tempfile::tempdir().unwrap();
            let mut stage = Stage::new(directory.path()).unwrap();
            settings(agent, &mut stage).unwrap();
            control(agent, &mut stage).unwrap();
            let control = fs::read_to_string(stage.root().join("DEBIAN/control")).unwrap();
            assert_eq!(control_field(&control, "Package").as_deref(), Some(agent.name()));
            assert_eq!(control_field(&control, "Version").as_deref(), Some(VERSION));
            assert!(control.find("Installed-Size").unwrap() < control.find("Description").unwrap(), "{control}");
            for script in ["postinst", "prerm", "postrm"] {
                run(Command::new("sh").arg("-n").arg(stage.root().join("DEBIAN").join(script))).unwrap();
            }
        }
    }
}
