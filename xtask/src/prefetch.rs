//! What the tests take from PyPI, downloaded beside their first steps, which compile.

use std::fs::{self, File};

use anyhow::Result;

use crate::{
    shell::{Begun, Beside, Program},
    tree,
};

static FETCHING: Begun = Begun::nothing();

/// Begins to download it, out of everybody's way. What went wrong is tried again, and told, by the step that needs it.
pub(crate) fn begin() {
    FETCHING.keep(start());
}

fn start() -> Result<Beside> {
    fs::create_dir_all(tree::scratch())?;
    let log = File::create(tree::scratch().join("fetch.log"))?;
    let this = std::env::current_exe()?;
    let idle = Program::new("nice").args(["-n".as_ref(), "10".as_ref(), this.as_os_str()]);
    idle.args(["fetch"]).beside(log)
}

/// Waits until that has ended, where it was begun.
pub(crate) fn wait() {
    if let Some(begun) = FETCHING.take() {
        let _ = begun.wait();
    }
}
