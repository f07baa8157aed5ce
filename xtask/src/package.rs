//! The crates, packaged as they would be published.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::{shell::Program, tree};

/// cargo's metadata, with the fields that are read here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Crate>,
    workspace_members: Vec<String>,
}

#[derive(Deserialize)]
struct Crate {
    id: String,
    name: String,
    version: String,
    description: Option<String>,
    license: Option<String>,
    readme: Option<PathBuf>,
    rust_version: Option<String>,
    keywords: Vec<String>,
    categories: Vec<String>,
    /// The registries that the crate may go to. `None`: any; an empty list: none.
    publish: Option<Vec<String>>,
}

impl Crate {
    fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }

    /// The missing fields that users would look for.
    fn lacking(&self) -> Vec<&'static str> {
        let there = [
            ("description", self.description.is_some()),
            ("license", self.license.is_some()),
            ("readme", self.readme.is_some()),
            ("rust-version", self.rust_version.is_some()),
            ("keywords", !self.keywords.is_empty()),
            ("categories", !self.categories.is_empty()),
        ];
        there.into_iter().filter(|(_, is_there)| !is_there).map(|(field, _)| field).collect()
    }
}

/// Packages all crates, and returns their number and size as text.
pub(crate) fn check() -> Result<String> {
    let files = crates(true)?;
    let sizes = files.iter().map(|file| Ok(fs::metadata(file)?.len()));
    let total_bytes: u64 = sizes.sum::<Result<_>>()?;
    Ok(format!("{} crates, {} KiB", files.len(), total_bytes >> 10))
}

/// Packages all crates and returns their files. `allow_dirty` admits uncommitted changes.
pub(crate) fn crates(allow_dirty: bool) -> Result<Vec<PathBuf>> {
    let (published, others): (Vec<_>, Vec<_>) =
        members()?.into_iter().partition(Crate::is_published);
    for one in &published {
        let lacking = one.lacking();
        ensure!(lacking.is_empty(), "{} lacks {} (Cargo.toml)", one.name, lacking.join(", "));
    }
    let others = others.iter().map(|other| format!("--exclude={}", other.name));
    // `cargo metadata` has downloaded the dependencies already, so that this needs no network. The
    // warning that no crate names a repository is known.
    Program::cargo(&["package", "--workspace", "--locked", "--offline", "--quiet", "--no-verify"])
        .args(allow_dirty.then_some("--allow-dirty"))
        .args(others)
        .run()?;
    Ok(published.iter().map(|one| file(&tree::target(), one)).collect())
}

/// Compiles the crates from their packages alone, as each other's dependencies. cargo's own
/// verification takes the sources of an earlier package for those of a new one of the same version.
pub(crate) fn compile(files: &[PathBuf]) -> Result<()> {
    let folder = tree::scratch().join("packages");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    for file in files {
        // All files of a package have the same old date, by which cargo would not notice that they
        // have changed.
        let unpack = Program::new("tar").args(["--extract", "--touch", "--file"]).args([file]);
        unpack.in_folder(&folder).run()?;
    }
    fs::write(folder.join("Cargo.toml"), workspace(files))?;
    fs::copy(tree::root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    Program::cargo(&["check", "--workspace", "--offline", "--target-dir"])
        .args([tree::target()])
        .in_folder(&folder)
        .run()
}

/// A workspace of unpacked crates, which depend on each other.
fn workspace(files: &[PathBuf]) -> String {
    let folders = files.iter().filter_map(|file| file.file_stem()?.to_str());
    let (mut members, mut patches) = (String::new(), String::new());
    for folder in folders {
        let name = folder.rsplit_once('-').map_or(folder, |(name, _)| name);
        members += &format!("    {folder:?},\n");
        patches += &format!("{name} = {{ path = {folder:?} }}\n");
    }
    format!(
        "[workspace]\nresolver = \"3\"\nmembers = [\n{members}]\n\n[patch.crates-io]\n{patches}"
    )
}

fn file(target: &Path, package: &Crate) -> PathBuf {
    target.join("package").join(format!("{}-{}.crate", package.name, package.version))
}

fn members() -> Result<Vec<Crate>> {
    let program = Program::cargo(&["metadata", "--locked", "--all-features", "--format-version=1"]);
    let (well, said) = program.ask()?;
    if !well {
        bail!("cargo metadata: {said}");
    }
    let Metadata { packages, workspace_members } =
        serde_json::from_str(&said).context("cargo metadata")?;
    Ok(packages.into_iter().filter(|package| workspace_members.contains(&package.id)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(more: &str) -> Crate {
        let text = format!(
            r#"{{"id": "a", "name": "a", "version": "1.0.0", "description": "A.", "license": "MIT",
            "keywords": ["a"], "rust_version": "1.95", {more}}}"#
        );
        serde_json::from_str(&text).expect("a package")
    }

    #[test]
    fn a_missing_field_is_named() {
        let sound = package(r#""readme": "README.md", "categories": ["b"], "publish": null"#);
        assert!(sound.is_published() && sound.lacking().is_empty());
        let bare = package(r#""readme": null, "categories": [], "publish": []"#);
        assert!(!bare.is_published());
        assert_eq!(bare.lacking(), ["readme", "categories"]);
    }

    #[test]
    fn packages_become_a_workspace() {
        let text = workspace(&["t/uccl-a-1.0.0.crate".into()]);
        assert!(text.contains("members = [\n    \"uccl-a-1.0.0\",\n]"), "{text}");
        assert!(text.contains("\nuccl-a = { path = \"uccl-a-1.0.0\" }\n"), "{text}");
    }

    #[test]
    fn a_package_lies_where_cargo_puts_it() {
        let package = package(r#""readme": null, "categories": [], "publish": null"#);
        assert_eq!(file(Path::new("t"), &package), Path::new("t/package/a-1.0.0.crate"));
    }
}
