//! `cargo xtask semver`: compares the interface of the crates with the last release's.

use anyhow::Result;

use crate::{shell::Program, tools};

/// The crates that programs use: the engine, and the crates that it re-exports whole.
const CHECKED: [&str; 3] = ["uccl-p2p", "uccl-device", "uccl-wire"];

/// Compares with the last release, if there is one.
pub(crate) fn run() -> Result<()> {
    let Some(tag) = last_release()? else {
        println!("there is no earlier release yet (no tag v*): nothing to compare with");
        return Ok(());
    };
    if !tools::cargo_has("semver-checks") {
        println!(
            "not compared with {tag}: cargo-semver-checks is missing \
             (cargo install --locked cargo-semver-checks)"
        );
        return Ok(());
    }
    let packages = CHECKED.iter().map(|name| format!("--package={name}"));
    Program::cargo(&["semver-checks", "--baseline-rev", &tag]).args(packages).run()
}

/// The newest tag before this commit, which may have a tag of its own already.
fn last_release() -> Result<Option<String>> {
    let describe = ["describe", "--tags", "--abbrev=0", "--match=v[0-9]*", "HEAD^"];
    let (found, tag) = Program::new("git").args(describe).ask()?;
    Ok(found.then_some(tag))
}
