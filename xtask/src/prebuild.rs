//! Makes the builds of later steps beside the tests in Rust, which wait as long as they compute.

use crate::shell::EarlyProgram;

static BUILDING: EarlyProgram = EarlyProgram::nothing();

/// Begins the builds, at the lowest priority.
pub(crate) fn begin() {
    BUILDING.begin("prebuild", "19");
}

/// Waits for the end of the builds, if they were begun.
pub(crate) fn wait() {
    BUILDING.wait();
}
