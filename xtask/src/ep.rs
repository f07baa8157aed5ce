//! The tests of expert parallelism and of collectives: several processes, with torch, in an
//! environment of their own.

use std::path::PathBuf;

use anyhow::Result;

use crate::{
    outcome::Outcome,
    python::{self, Requirements},
};

/// The tests' dependency: the torch that users have, which comes with CUDA's libraries.
const TORCH: &str = "torch==2.11.0";

/// Tests of an environment that has Ray too.
pub(crate) const RAYS_TESTS: &str = "tests/weights/test_ray.py";

/// Runs the tests against the wheel.
pub(crate) fn tests() -> Result<Outcome> {
    let without_ray = format!("--ignore={RAYS_TESTS}");
    // The tests form a few groups.
    let folders = ["tests/ep", "tests/weights", "tests/collective"];
    let arguments = [&["--numprocesses=3", &without_ray][..], &folders].concat();
    python::tests_in(environment, TORCH, &arguments)
}

/// Makes the tests' environment unless it is there.
pub(crate) fn fetch() -> Result<()> {
    environment().map(drop)
}

/// The Python of the tests' environment, which is made unless it is there; or the reason why torch
/// cannot be had.
pub(crate) fn environment() -> Result<Result<PathBuf, String>> {
    let wanted = Requirements { whole: &[TORCH], tests: true, ..Requirements::default() };
    let folder = python::environment_of("ep", &wanted)?;
    Ok(folder.map(|folder| folder.join("bin/python")))
}
