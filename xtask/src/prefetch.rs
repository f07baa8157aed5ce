//! Downloads the tests' packages from PyPI beside the first steps, which compile.

use std::fs::{self, File};

use anyhow::Result;

use crate::{
    shell::{BackgroundProgram, EarlyProgram, Program},
    tree,
};

static FETCHING: EarlyProgram = EarlyProgram::nothing();

/// Begins the download at a low priority. The step that needs a package tries a failed download
/// again and reports it.
pub(crate) fn begin() {
    FETCHING.keep(start());
}

fn start() -> Result<BackgroundProgram> {
    fs::create_dir_all(tree::scratch())?;
    let log = File::create(tree::scratch().join("fetch.log"))?;
    let this = std::env::current_exe()?;
    let idle = Program::new("nice").args(["-n".as_ref(), "10".as_ref(), this.as_os_str()]);
    idle.args(["fetch"]).beside(log)
}

/// Waits for the end of the download, if it was begun.
pub(crate) fn wait() {
    if let Some(begun) = FETCHING.take() {
        let _ = begun.wait();
    }
}
