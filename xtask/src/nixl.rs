//! The tests with NIXL as it comes from PyPI, each release in an environment of its own.

use std::{fs, path::PathBuf};

use anyhow::{Result, anyhow};

use crate::{done::Done, prefetch, python, shell::Program, tree};

/// The newest release, the oldest that the plugin works with, and one that must be refused.
const RELEASES: [&str; 3] = ["1.5.1", "1.0.1", "0.10.1"];

/// Runs tests/nixl with every release that can be had.
pub(crate) fn tests() -> Result<Done> {
    if let Some(reason) = python::lacking() {
        return Ok(Done::skipped(reason));
    }
    let wheel = python::build()?;
    let (mut absent, mut details, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    for release in RELEASES {
        let python = match environment(release)? {
            Ok(python) => python,
            Err(reason) => {
                absent.push(format!("lacks NIXL {release}: {reason}"));
                continue;
            }
        };
        python::install(&python, wheel)?;
        let mut done = Done::default();
        if let Err(error) = python::pytest(&python, &["tests/nixl"], &mut done) {
            failed.push(format!("NIXL {release}: {error:#}"));
        }
        details.push(format!("{release}: {}", done.detail));
        absent.extend(done.absent.iter().map(|what| format!("NIXL {release}: {what}")));
    }
    if details.is_empty() {
        return Ok(Done::skipped(absent.join("; ")));
    }
    let result = if failed.is_empty() { Ok(()) } else { Err(anyhow!(failed.join("\n"))) };
    let mut done = Done::without(absent);
    done.detail = details.join("; ");
    done.or_failed(result)
}

/// Makes their environments, unless they are there.
pub(crate) fn fetch() -> Result<()> {
    RELEASES.iter().try_for_each(|release| environment(release).map(drop))
}

/// The environment of a release, made unless it is there; or why the release cannot be had.
fn environment(release: &str) -> Result<Result<PathBuf, String>> {
    prefetch::wait();
    let folder = tree::scratch().join(format!("nixl-{release}"));
    let requirements = fs::read_to_string(tree::root().join("tests/requirements.txt"))?;
    // It declares CUDA's stack, which it does not need here.
    let nixl = [format!("nixl-cu12=={release}"), format!("nixl=={release}")];
    let wanted = format!("{}\n{requirements}", nixl.join("\n"));
    let stamp = folder.join("requirements.txt");
    let python = folder.join("bin/python");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(Ok(python));
    }
    python::make_environment(&folder, true)?;
    let fetch = |program: Program| -> Result<Option<String>> {
        let (well, said) = program.ask()?;
        Ok((!well).then(|| said.lines().last().unwrap_or("pip failed").to_owned()))
    };
    println!("NIXL {release} into {}", folder.display());
    let test = python::pip(&python).args(["--requirement", "tests/requirements.txt"]);
    for program in [python::pip(&python).args(["--no-deps"]).args(&nixl), test] {
        if let Some(reason) = fetch(program)? {
            return Ok(Err(reason));
        }
    }
    fs::write(stamp, wanted)?;
    Ok(Ok(python))
}
