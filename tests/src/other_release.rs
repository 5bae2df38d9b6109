//! Packages of another Debian release, without a trace on the machine: an apt with lists, state and cache of its own.
//!
//! Called by [`crate::qemu`]. Mirror and proxy are the machine's own, from its apt configuration. What is fetched is as trustworthy as apt
//! makes it: the release file is signed with a key of `debian-archive-keyring`, everything else is checked by its hashes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::process::run;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Where the machine's sources name no mirror of Debian.
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";

/// The packages of one release.
#[derive(Debug)]
pub(crate) struct OtherRelease {
    name: &'static str,
    dir: PathBuf,
}

impl OtherRelease {
    /// Fetches the package lists of a release into `dir`, about 11 MB for sid.
    ///
    /// # Errors
    /// There is no network, no apt, or no key for the release.
    pub(crate) fn open(name: &'static str, dir: &Path) -> Result<Self> {
        ensure!(Path::new(KEYRING).is_file(), "{KEYRING} is missing; install debian-archive-keyring");
        for inside in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(inside)).with_context(|| dir.display().to_string())?;
        }
        // apt takes nothing for installed.
        fs::write(dir.join("status"), "")?;
        // No translations, no appstream: nothing but the list itself.
        let source = format!("deb [arch=amd64 target=Packages signed-by={KEYRING}] {} {name} main\n", mirror());
        fs::write(dir.join("sources.list"), source)?;
        let release = Self { name, dir: dir.canonicalize()? };
        run(release.apt_get().args(["-o", "APT::Update::Error-Mode=any", "update"]))?;
        Ok(release)
    }

    /// Unpacks a package and all it depends on into `root`.
    ///
    /// # Errors
    /// The release has no such package, or it cannot be downloaded.
    pub(crate) fn unpack_with_dependencies(&self, package: &str, root: &Path) -> Result<()> {
        run(self.apt_get().args(["install", "-y", "--no-install-recommends", "--download-only", package]))?;
        fs::create_dir_all(root)?;
        let archives = self.dir.join("cache/archives");
        for entry in fs::read_dir(&archives).with_context(|| archives.display().to_string())? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                run(Command::new("dpkg-deb").arg("-x").arg(&path).arg(root))?;
            }
        }
        Ok(())
    }

    /// The machine's configuration holds, proxies for instance, except for what says which release and where things are kept.
    fn apt_get(&self) -> Command {
        let at = |inside: &str| self.dir.join(inside).display().to_string();
        let mut command = Command::new("apt-get");
        command.arg("-q");
        for option in [
            format!("Dir::State={}", at("")),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            format!("Dir::Cache::archives={}", at("cache/archives")),
            format!("Dir::Etc::SourceList={}", at("sources.list")),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            "Dir::Etc::Preferences=/dev/null".to_owned(),
            "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
            format!("APT::Default-Release={}", self.name),
            // The user _apt may not be able to look into the cache.
            "APT::Sandbox::User=root".to_owned(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }
}

/// The mirror from which the machine gets Debian itself.
pub(crate) fn mirror() -> String {
    let mut apt_get = Command::new("apt-get");
    apt_get.args(["indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages", "Component: main"]);
    run(&mut apt_get).ok().as_deref().and_then(mirror_of).unwrap_or_else(|| DEFAULT_MIRROR.to_owned())
}

/// From lines `URI LABEL`. Security updates and other vendors' packages have other labels; sid is not on a medium.
fn mirror_of(targets: &str) -> Option<String> {
    let uris = targets.lines().filter_map(|line| line.strip_suffix(" Debian"));
    uris.filter(|uri| uri.starts_with("http")).map(str::to_owned).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_where_debian_itself_comes_from() {
        let targets = "cdrom://d/ Debian\nhttp://a/debian-security/ Debian-Security\nhttps://docker.example/linux/debian/ Docker CE\nhttp://mirror.example/debian/ Debian\n";
        assert_eq!(mirror_of(targets).as_deref(), Some("http://mirror.example/debian/"));
        // Without package lists apt knows no labels.
        assert_eq!(mirror_of("http://a/debian/ $(LABEL)\n"), None);
    }
}
