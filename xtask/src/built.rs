//! Parts of the workspace, built so that they share the tests' artifacts.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::shell::Program;

/// The artifacts of a build.
pub(crate) struct Artifacts(Vec<Artifact>);

/// cargo's message about an artifact, with the fields that are read here.
#[derive(Deserialize)]
struct Artifact {
    manifest_path: PathBuf,
    target: Target,
    filenames: Vec<PathBuf>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

pub(crate) fn examples() -> Result<Artifacts> {
    build(&["build", "--examples"])
}

/// Builds a program that the tests have not built. The examples are built along: they make cargo
/// choose the same features of dependencies as the tests.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    let built = build(&["build", "--examples", "--bin", name])?;
    built.executable(name).map(Path::to_owned)
}

/// Builds the tests of these names, in all crates that have some.
pub(crate) fn tests(names: &[&str]) -> Result<Artifacts> {
    let named = names.iter().flat_map(|name| ["--test", name]);
    build(&["test", "--no-run"].into_iter().chain(named).collect::<Vec<_>>())
}

/// Builds targets as parts of the whole workspace: alone, their dependencies would be built anew.
fn build(arguments: &[&str]) -> Result<Artifacts> {
    let always = ["--locked", "--workspace", "--message-format=json-render-diagnostics"];
    match Program::cargo(arguments).args(always).ask()? {
        (true, said) => Ok(Artifacts::read(&said)),
        (false, said) => bail!("{said}"),
    }
}

impl Artifacts {
    fn read(said: &str) -> Self {
        // Other messages have other shapes and are skipped.
        Self(said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    /// The path of a program or an example.
    pub(crate) fn executable(&self, name: &str) -> Result<&Path> {
        let found = self.0.iter().filter(|artifact| artifact.target.name == name);
        found.filter_map(|artifact| artifact.executable.as_deref()).next().context(name.to_owned())
    }

    /// The path of a crate's test binary of this name.
    pub(crate) fn tests_of(&self, package: &str, name: &str) -> Result<&Path> {
        let manifest = Path::new(package).join("Cargo.toml");
        let is_its = |artifact: &&Artifact| {
            artifact.manifest_path.ends_with(&manifest) && artifact.target.name == name
        };
        let found = self.0.iter().filter(is_its);
        // A crate's program is built along with its tests.
        let mut tests = found.filter(|artifact| artifact.target.kind.iter().any(|k| k == "test"));
        tests.find_map(|artifact| artifact.executable.as_deref()).context(package.to_owned())
    }

    /// The path of a crate's library, for rustc.
    pub(crate) fn library(&self, name: &str) -> Result<&Path> {
        let found = self.0.iter().filter(|artifact| artifact.target.name == name);
        let mut files = found.flat_map(|artifact| &artifact.filenames);
        let rlib = files.find(|file| file.extension().is_some_and(|extension| extension == "rlib"));
        Ok(rlib.context(name.to_owned())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifacts_are_found_among_messages() {
        let built = Artifacts::read(concat!(
            r#"{"reason":"compiler-artifact","manifest_path":"/r/a/Cargo.toml","target":{"name":"a","kind":["lib"]},"filenames":["/d/liba.rmeta","/d/liba.rlib"],"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/r/a/Cargo.toml","target":{"name":"b","kind":["example"]},"filenames":["/b"],"executable":"/b"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/r/a/Cargo.toml","target":{"name":"t","kind":["test"]},"filenames":["/t-1"],"executable":"/t-1"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        ));
        assert_eq!(built.library("a").expect("a library"), Path::new("/d/liba.rlib"));
        assert_eq!(built.executable("b").expect("an example"), Path::new("/b"));
        assert_eq!(built.tests_of("a", "t").expect("its tests"), Path::new("/t-1"));
        assert!(built.executable("a").is_err() && built.library("c").is_err());
        assert!(built.tests_of("c", "t").is_err() && built.tests_of("a", "b").is_err());
    }
}
