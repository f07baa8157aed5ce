//! Ray on CPUs with this project's tensor transport, in an environment of its own.

use std::path::PathBuf;

use anyhow::Result;

use crate::{
    ep,
    outcome::Outcome,
    python::{self, Requirements},
};

/// The newest Ray: its tensor transports are alpha, and change from release to release.
const RAY: &str = "ray==2.60.0";

/// Runs the tests against the wheel.
pub(crate) fn tests() -> Result<Outcome> {
    python::tests_in(environment, RAY, &["--numprocesses=0", ep::RAYS_TESTS])
}

/// Makes the environment unless it is there.
pub(crate) fn fetch() -> Result<()> {
    environment().map(drop)
}

/// The Python of the tests' environment, which is made unless it is there; or the reason why Ray
/// cannot be had. Its torch is that of the tests of expert parallelism, which takes gigabytes.
fn environment() -> Result<Result<PathBuf, String>> {
    let beneath = match ep::environment()? {
        Ok(python) => python,
        Err(reason) => return Ok(Err(reason)),
    };
    let wanted = Requirements { whole: &[RAY], beneath: Some(&beneath), ..Requirements::default() };
    let folder = python::environment_of("ray", &wanted)?;
    Ok(folder.map(|folder| folder.join("bin/python")))
}
