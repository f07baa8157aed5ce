//! Downloads the tests' packages from PyPI beside the first steps, which compile.

use crate::shell::EarlyProgram;

static FETCHING: EarlyProgram = EarlyProgram::nothing();

/// Begins the download.
pub(crate) fn begin() {
    FETCHING.begin("fetch", "10");
}

/// Waits for the end of the download, if it was begun.
pub(crate) fn wait() {
    FETCHING.wait();
}
