//! Formatting, clippy and documentation: each without a word of complaint.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::{
    outcome::Outcome,
    python::{self, Requirements},
    shell::Program,
    tree,
};

/// The linter and formatter of Python.
const RUFF: &str = "ruff==0.14.5";
/// The checker of types in Python, and the package whose types tests use.
const MYPY: &[&str] = &["mypy==1.18.2", "pytest==8.4.2"];
/// Code for the oldest Python.
const TYPED: &[&str] = &[
    "python/uccl",
    "python/build",
    "python/mooncake",
    "python/nixl_ep",
    "examples/python",
    "examples/moe",
];
/// Code for developers, some of which needs this version of Python.
const NEWER: [&str; 4] = ["--python-version", "3.11", "bench", "tests"];

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
    let packages = ["uccl-p2p", "uccl-capi", "uccl-nixl", "uccl-py"];
    for features in ["", "verbs", "libfabric"] {
        // Together: each crate passes the same features on, so that none changes another's.
        Program::cargo(&["clippy", "--locked", "--no-default-features"])
            .args(packages.map(|package| format!("--package={package}")))
            .args([format!("--features={features}")])
            .args(["--", "-D", "warnings"])
            .run()?;
    }
    Ok(())
}

pub(crate) fn doc() -> Result<()> {
    let flags = std::env::var("RUSTDOCFLAGS").unwrap_or_default();
    Program::cargo(&["doc", "--locked", "--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", format!("{flags} -D warnings").trim())
        .run()
}

/// Formatting, the order of imports, and unused and undefined names of Python, as pyproject.toml
/// asks for.
pub(crate) fn ruff() -> Result<Outcome> {
    if let Some(reason) = python::lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let folder = match ruff_environment()? {
        Ok(folder) => folder,
        Err(reason) => return Ok(Outcome::skipped(format!("lacks {RUFF}: {reason}"))),
    };
    let ruff = folder.join("bin/ruff");
    Program::new(&ruff).args(["check", "--quiet"]).run()?;
    Program::new(&ruff).args(["format", "--check", "--quiet"]).run()?;
    Ok(Outcome::default())
}

/// Types of Python, as pyproject.toml asks for.
pub(crate) fn mypy() -> Result<Outcome> {
    if let Some(reason) = python::lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let folder = match mypy_environment()? {
        Ok(folder) => folder,
        Err(reason) => return Ok(Outcome::skipped(format!("lacks {}: {reason}", MYPY[0]))),
    };
    let cache = tree::scratch().join("mypy-cache");
    let mypy = |files: &[&str]| {
        let program = Program::new(folder.join("bin/mypy")).args(["--no-error-summary"]);
        let program = program.args(["--cache-dir".as_ref(), cache.as_os_str()]);
        program.args(files).run()
    };
    mypy(TYPED)?;
    mypy(&NEWER)?;
    Ok(Outcome::default())
}

/// Compares the types of the extension module with the module in the wheel.
pub(crate) fn stubtest() -> Result<Outcome> {
    if let Some(reason) = python::lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let folder = match mypy_environment()? {
        Ok(folder) => folder,
        Err(reason) => return Ok(Outcome::skipped(format!("lacks {}: {reason}", MYPY[0]))),
    };
    let allowed = tree::root().join("crates/uccl-py/stubs/allowed.txt");
    let (well, packages) = Program::new(python::with_wheel()?).args(["-c", SITE]).ask()?;
    ensure!(well, "the folder of the wheel: {packages}");
    // In a folder without sources, so that it finds only the wheel's.
    let test = Program::new(folder.join("bin/stubtest")).args(["uccl._core", "--allowlist"]);
    let test = test.args([allowed.as_os_str()]).env("PYTHONPATH", packages.trim());
    let test = test.env("MYPYPATH", packages.trim()).in_folder(&folder);
    let (well, said) = test.ask()?;
    ensure!(well, "{said}");
    Ok(Outcome::default())
}

/// Prints the folder of the packages.
const SITE: &str = "import sysconfig; print(sysconfig.get_path('platlib'))";

/// Makes the linters' environments, unless they are there.
pub(crate) fn fetch() -> Result<()> {
    ruff_environment().map(drop)?;
    mypy_environment().map(drop)
}

fn ruff_environment() -> Result<Result<PathBuf, String>> {
    python::environment_of("ruff", &Requirements::alone(&[RUFF]))
}

fn mypy_environment() -> Result<Result<PathBuf, String>> {
    python::environment_of("mypy", &Requirements { whole: MYPY, ..Requirements::default() })
}
