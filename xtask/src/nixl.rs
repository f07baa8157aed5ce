//! The tests with NIXL's releases from PyPI, each in an environment of its own.

use std::path::PathBuf;

use anyhow::{Result, anyhow};

use crate::{
    optimized::For,
    outcome::Outcome,
    python::{self, Requirements},
};

/// The newest release, the oldest that the plugin works with, and one that must be refused.
const RELEASES: [&str; 3] = ["1.5.1", "1.0.1", "0.10.1"];

/// Runs tests/nixl with every release that can be had.
pub(crate) fn tests() -> Result<Outcome> {
    if let Some(reason) = python::lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let wheel = python::build(For::Tests)?;
    let (mut absent, mut details) = (Vec::new(), Vec::new());
    let (mut tests, mut errors) = (Vec::new(), Vec::new());
    for release in RELEASES {
        let python = match environment(release)? {
            Ok(python) => python,
            Err(reason) => {
                absent.push(format!("lacks NIXL {release}: {reason}"));
                continue;
            }
        };
        python::install(&python, wheel)?;
        let mut done = Outcome::default();
        if let Err(error) = python::pytest(&python, &["tests/nixl"], &mut done) {
            errors.push(format!("NIXL {release}: {error:#}"));
        }
        details.push(format!("{release}: {}", done.detail));
        let named = |what: &String| format!("NIXL {release}: {what}");
        absent.extend(done.absent.iter().map(named));
        tests.extend(done.failed.iter().map(named));
    }
    if details.is_empty() {
        return Ok(Outcome::skipped(absent.join("; ")));
    }
    let result = if errors.is_empty() { Ok(()) } else { Err(anyhow!(errors.join("\n"))) };
    let mut done = Outcome::without(absent);
    done.failed = tests;
    done.detail = details.join("; ");
    done.or_failed(result)
}

/// Makes the environments unless they are there.
pub(crate) fn fetch() -> Result<()> {
    RELEASES.iter().try_for_each(|release| environment(release).map(drop))
}

/// The Python of a release's environment, which is made unless it is there; or the reason why the
/// release cannot be had.
fn environment(release: &str) -> Result<Result<PathBuf, String>> {
    let nixl = [format!("nixl-cu12=={release}"), format!("nixl=={release}")];
    // The package declares CUDA's stack, which it does not need here.
    let alone = &nixl.each_ref().map(String::as_str);
    let wanted = Requirements { tests: true, ..Requirements::alone(alone) };
    let folder = python::environment_of(&format!("nixl-{release}"), &wanted)?;
    Ok(folder.map(|folder| folder.join("bin/python")))
}
