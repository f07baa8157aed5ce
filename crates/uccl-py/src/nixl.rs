//! The folder of plugins for NIXL.

use std::path::PathBuf;

use pyo3::{
    exceptions::{PyFileNotFoundError, PyOSError},
    prelude::*,
};
use uccl_nixl_dir::{Error, provide};

/// The folder for `NIXL_PLUGIN_DIR`, which links this project's plugin and those in NIXL's own
/// folder.
#[pyfunction]
pub(crate) fn _nixl_plugin_dir(
    py: Python<'_>,
    ours: PathBuf,
    theirs: PathBuf,
) -> PyResult<PathBuf> {
    py.detach(|| provide(&ours, &theirs)).map_err(|error| match error {
        Error::NoPlugin(_) | Error::NoNixl(_) => PyFileNotFoundError::new_err(error.to_string()),
        error => PyOSError::new_err(error.to_string()),
    })
}
