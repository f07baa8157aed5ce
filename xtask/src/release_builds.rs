//! The builds that [`prebuild`](crate::prebuild) begins.

use anyhow::Result;

use crate::{install, loom, optimized::For, python};

/// Builds in the order in which steps need the results, and in folders that no build of the tests
/// locks.
pub(crate) fn run() -> Result<()> {
    // The environment may still be made by another program.
    let wheel = || match python::has_environment()? {
        true => python::build(For::Tests).map(drop),
        false => Ok(()),
    };
    // A failed build does not keep the others from being made.
    for result in [loom::build(), install::build(For::Tests), wheel()] {
        if let Err(error) = result {
            println!("{error:#}");
        }
    }
    Ok(())
}
