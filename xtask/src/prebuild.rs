//! Makes the builds of later steps beside the tests in Rust, which wait as long as they compute.

use std::{
    fs::{self, File},
    path::Path,
};

use anyhow::Result;

use crate::{
    shell::{BackgroundProgram, EarlyProgram, Program},
    tree,
};

static BUILDING: EarlyProgram = EarlyProgram::nothing();

/// Begins the builds, at the lowest priority. The step that needs a build repeats a failed one and
/// reports it.
pub(crate) fn begin() {
    BUILDING.keep(start());
}

fn start() -> Result<BackgroundProgram> {
    fs::create_dir_all(tree::scratch())?;
    let log = File::create(tree::scratch().join("prebuild.log"))?;
    // Cargo may have put another file in the place of this program.
    let this = Path::new("/proc").join(std::process::id().to_string()).join("exe");
    let idle = Program::new("nice").args(["-n".as_ref(), "19".as_ref(), this.as_os_str()]);
    idle.args(["prebuild"]).beside(log)
}

/// Waits for the end of the builds, if they were begun.
pub(crate) fn wait() {
    if let Some(begun) = BUILDING.take() {
        let _ = begun.wait();
    }
}
