//! The text of a release's page: the newest section of the changelog.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use crate::tree;

/// Writes RELEASE-NOTES.md.
pub(super) fn write(folder: &Path) -> Result<String> {
    let changelog =
        fs::read_to_string(tree::root().join("CHANGELOG.md")).context("CHANGELOG.md")?;
    let (title, text) =
        newest(&changelog).context("CHANGELOG.md has no section (a line that begins with ##)")?;
    let version = env!("CARGO_PKG_VERSION");
    let notes = folder.join("RELEASE-NOTES.md");
    fs::write(&notes, format!("# uccl-rs {version}\n\n{text}\n"))
        .with_context(|| notes.display().to_string())?;
    Ok(match title.starts_with(&format!("[{version}]")) {
        true => format!("from the section {title}"),
        false => format!("from the section {title}, which is not named {version} yet"),
    })
}

/// The title and the text of the first section.
fn newest(changelog: &str) -> Option<(&str, &str)> {
    let (_, section) = changelog.split_once("\n## ")?;
    let section = section.split("\n## ").next()?;
    let (title, text) = section.split_once('\n')?;
    Some((title, text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_section_is_cut_out() {
        let log =
            "# Changelog\n\n## [1.1.0] - 2026-01-01\n\n### Added\n\n- A.\n\n## [1.0.0]\n- B.\n";
        assert_eq!(newest(log), Some(("[1.1.0] - 2026-01-01", "### Added\n\n- A.")));
        assert_eq!(newest("# Changelog\n"), None);
    }
}
