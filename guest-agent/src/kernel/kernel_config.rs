//! The options the running kernel was built with, where the distribution installs them as text.
//!
//! Called by [`super::detect`]. The file belongs to the release name, not to the running kernel itself: good enough for
//! defaults, weaker than the boot log and the command line.

use super::text::TextFile;
use super::{ReadError, Roots};
use std::path::{Path, PathBuf};

/// Kernel configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelConfig {
    path: PathBuf,
    enabled: Vec<&'static str>,
}

impl KernelConfig {
    /// Reads `/boot/config-RELEASE` or `/lib/modules/RELEASE/config` and keeps which of `options` are `y`. `None` if
    /// there is neither.
    pub fn read(roots: &Roots, release: &str, options: &[&'static str]) -> Result<Option<Self>, ReadError> {
        let candidates = [roots.boot.join(format!("config-{release}")), roots.modules.join(release).join("config")];
        for path in candidates {
            match TextFile::open(path) {
                Ok(mut file) => {
                    let enabled = file.parse(|text| Ok(enabled(text, options)))?;
                    return Ok(Some(Self { path: file.path().to_owned(), enabled }));
                }
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Whether `option`, one of those asked for, is `y`.
    #[must_use]
    pub fn is_enabled(&self, option: &str) -> bool {
        self.enabled.contains(&option)
    }

    /// Which file said so.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn enabled(text: &str, options: &[&'static str]) -> Vec<&'static str> {
    let lines = text.lines().filter_map(|line| line.strip_suffix("=y"));
    lines.filter_map(|name| options.iter().find(|option| **option == name).copied()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::fake::Tree;

    #[test]
    fn either_place() {
        let text = "# comment\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\nCONFIG_AB=y\n";
        for place in ["boot/config-6.12-x", "lib/modules/6.12-x/config"] {
            let tree = Tree::new(&[(place, text)]);
            let config =
                KernelConfig::read(&tree.roots(), "6.12-x", &["CONFIG_A", "CONFIG_B", "CONFIG_C"]).unwrap().unwrap();
            assert!(config.is_enabled("CONFIG_A"));
            assert!(!config.is_enabled("CONFIG_B"));
            assert!(!config.is_enabled("CONFIG_C"));
            assert!(config.path().ends_with(place));
            assert_eq!(KernelConfig::read(&tree.roots(), "6.1", &[]).unwrap(), None);
        }
    }
}
