//! The folder of plugins for NIXL.

use std::path::PathBuf;

use pyo3::{
    exceptions::{PyFileNotFoundError, PyOSError},
    prelude::*,
};
use uccl_nixl_dir::{Error, provide, provide_instead_of_ucx};

/// The folder for `NIXL_PLUGIN_DIR`, which links this project's plugin, under UCX's name too if so
/// asked, and those in NIXL's own folder.
#[pyfunction]
pub(crate) fn _nixl_plugin_dir(
    py: Python<'_>,
    ours: PathBuf,
    theirs: PathBuf,
    instead_of_ucx: bool,
) -> PyResult<PathBuf> {
    let provide = if instead_of_ucx { provide_instead_of_ucx } else { provide };
    py.detach(|| provide(&ours, &theirs)).map_err(|error| match error {
        Error::NoPlugin(_) | Error::NoNixl(_) => PyFileNotFoundError::new_err(error.to_string()),
        error => PyOSError::new_err(error.to_string()),
    })
}
