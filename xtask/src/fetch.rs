//! What the tests take from PyPI: downloaded beside their first steps, which compile.

use std::{
    fs::{self, File},
    sync::{Mutex, PoisonError},
};

use anyhow::Result;

use crate::{
    kernels, libfabric, nixl, python,
    shell::{Beside, Program},
    tree,
};

/// What downloads it.
static FETCHING: Mutex<Option<Beside>> = Mutex::new(None);

/// Begins to download it, out of everybody's way. What went wrong is tried again, and told, by the step that needs it.
pub(crate) fn begin() {
    if let Ok(beside) = start() {
        *FETCHING.lock().unwrap_or_else(PoisonError::into_inner) = Some(beside);
    }
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
    if let Some(begun) = FETCHING.lock().unwrap_or_else(PoisonError::into_inner).take() {
        let _ = begun.wait();
    }
}

/// Downloads it, in the order in which it is needed.
pub(crate) fn run() -> Result<()> {
    if let Some(reason) = python::lacking() {
        println!("{reason}");
        return Ok(());
    }
    // One that cannot be had keeps nothing from the others.
    for fetch in [kernels::fetch, python::fetch, nixl::fetch, libfabric::fetch] {
        if let Err(error) = fetch() {
            println!("{error:#}");
        }
    }
    Ok(())
}
