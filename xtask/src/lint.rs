//! Formatting, clippy and documentation: each without a word of complaint.

use std::path::PathBuf;

use anyhow::Result;

use crate::{
    done::Done,
    python::{self, Wanted},
    shell::Program,
};

/// The linter and formatter of Python.
const RUFF: &str = "ruff==0.14.5";

pub(crate) fn fmt() -> Result<()> {
    Program::cargo(&["fmt", "--all", "--check"]).run()
}

pub(crate) fn clippy() -> Result<()> {
    let arguments = ["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"];
    Program::cargo(&arguments).run()
}

/// Checks the engine, and the crates that pass its features on, without optional links and with
/// each link alone. The step `clippy` checks them with both links.
pub(crate) fn features() -> Result<()> {
    for features in ["", "verbs", "libfabric"] {
        let packages = ["uccl-p2p", "uccl-capi", "uccl-nixl", "uccl-py"];
        for package in packages {
            let package = format!("--package={package}");
            let features = format!("--features={features}");
            let of = ["clippy", "--locked", "--no-default-features", &package, &features];
            Program::cargo(&of).args(["--", "-D", "warnings"]).run()?;
        }
    }
    Ok(())
}

pub(crate) fn doc() -> Result<()> {
    let flags = std::env::var("RUSTDOCFLAGS").unwrap_or_default();
    Program::cargo(&["doc", "--locked", "--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", format!("{flags} -D warnings").trim())
        .run()
}

/// Formatting, the order of imports, and unused and undefined names of Python, as pyproject.toml asks for.
pub(crate) fn ruff() -> Result<Done> {
    if let Some(reason) = python::lacking() {
        return Ok(Done::skipped(reason));
    }
    let folder = match ruff_environment()? {
        Ok(folder) => folder,
        Err(reason) => return Ok(Done::skipped(format!("lacks {RUFF}: {reason}"))),
    };
    let ruff = folder.join("bin/ruff");
    Program::new(&ruff).args(["check", "--quiet"]).run()?;
    Program::new(&ruff).args(["format", "--check", "--quiet"]).run()?;
    Ok(Done::default())
}

/// Makes the linter's environment, unless it is there.
pub(crate) fn fetch() -> Result<()> {
    ruff_environment().map(drop)
}

fn ruff_environment() -> Result<Result<PathBuf, String>> {
    python::environment_of("ruff", &Wanted::alone(&[RUFF]))
}
