//! The workspace's examples, built with what the tests have built already.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::shell::Program;

/// Where the things are that were built.
pub(crate) struct Built(Vec<Artifact>);

/// What cargo says of one thing that it built, as far as it is read here.
#[derive(Deserialize)]
struct Artifact {
    target: Target,
    filenames: Vec<PathBuf>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

/// Builds them as parts of the whole workspace: alone, their dependencies would be built anew.
pub(crate) fn build() -> Result<Built> {
    let arguments = ["build", "--locked", "--workspace", "--examples"];
    let program = Program::cargo(&arguments).args(["--message-format=json-render-diagnostics"]);
    match program.ask()? {
        (true, said) => Ok(Built::read(&said)),
        (false, said) => bail!("{said}"),
    }
}

impl Built {
    fn read(said: &str) -> Self {
        // Other messages have other shapes.
        Self(said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    /// An example's program.
    pub(crate) fn example(&self, name: &str) -> Result<&Path> {
        let found = self.0.iter().filter(|artifact| artifact.target.name == name);
        found.filter_map(|artifact| artifact.executable.as_deref()).next().context(name.to_owned())
    }

    /// A crate's library, for rustc.
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
        let built = Built::read(concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"a"},"filenames":["/d/liba.rmeta","/d/liba.rlib"],"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"b"},"filenames":["/b"],"executable":"/b"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        ));
        assert_eq!(built.library("a").expect("a library"), Path::new("/d/liba.rlib"));
        assert_eq!(built.example("b").expect("an example"), Path::new("/b"));
        assert!(built.example("a").is_err() && built.library("c").is_err());
    }
}
