//! What the tests take from PyPI: all of it, downloaded.

use anyhow::Result;

use crate::{deny, ep, kernels, libfabric, nixl, python};

/// Downloads it, in the order in which it is needed.
pub(crate) fn run() -> Result<()> {
    if let Some(reason) = python::lacking() {
        println!("{reason}");
        return Ok(());
    }
    // One that cannot be had keeps nothing from the others.
    for fetch in
        [deny::fetch, kernels::fetch, python::fetch, nixl::fetch, ep::fetch, libfabric::fetch]
    {
        if let Err(error) = fetch() {
            println!("{error:#}");
        }
    }
    Ok(())
}
