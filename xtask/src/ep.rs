//! The tests of expert parallelism: several processes, with torch, in an environment of their own.

use std::{fs, path::PathBuf};

use anyhow::Result;

use crate::{done::Done, prefetch, python, tree};

/// What they need: the torch that users have, which comes with CUDA's libraries.
const TORCH: &str = "torch==2.11.0";

/// Runs them against the wheel.
pub(crate) fn tests() -> Result<Done> {
    if let Some(reason) = python::lacking() {
        return Ok(Done::skipped(reason));
    }
    let wheel = python::build()?;
    let python = match environment()? {
        Ok(python) => python,
        Err(reason) => return Ok(Done::skipped(format!("lacks {TORCH}: {reason}"))),
    };
    python::install(&python, wheel)?;
    let mut done = Done::default();
    let result = python::pytest(&python, &["tests/ep"], &mut done);
    done.or_failed(result)
}

/// Makes their environment, unless it is there.
pub(crate) fn fetch() -> Result<()> {
    environment().map(drop)
}

/// Their environment, made unless it is there; or why torch cannot be had.
fn environment() -> Result<Result<PathBuf, String>> {
    prefetch::wait();
    let folder = tree::scratch().join("ep");
    let requirements = fs::read_to_string(tree::root().join("tests/requirements.txt"))?;
    let wanted = format!("{TORCH}\n{requirements}");
    let stamp = folder.join("requirements.txt");
    let python = folder.join("bin/python");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(Ok(python));
    }
    let python = python::make_environment(&folder, true)?;
    println!("{TORCH} into {}", folder.display());
    let wanted_file = ["--requirement", "tests/requirements.txt"];
    let (well, said) = python::pip(&python).args([TORCH]).args(wanted_file).ask()?;
    if !well {
        return Ok(Err(said.lines().last().unwrap_or("pip failed").to_owned()));
    }
    fs::write(stamp, wanted)?;
    Ok(Ok(python))
}
