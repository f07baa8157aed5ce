//! Calls under way.

use std::sync::Arc;

use pyo3::prelude::*;
use uccl_collective::Work;

use super::exception;
use crate::{args, interrupt::listening};

/// A call of a group that has begun.
#[pyclass(name = "RankWork", module = "uccl._core", frozen)]
pub(crate) struct PyRankWork {
    pub(super) work: Arc<Work>,
}

#[pymethods]
impl PyRankWork {
    /// The number of the call in its group.
    #[getter]
    fn id(&self) -> u64 {
        self.work.id()
    }

    /// Whether it has ended well. Raises if it has failed.
    fn poll(&self, py: Python<'_>) -> PyResult<bool> {
        let work = &self.work;
        py.detach(|| work.poll()).map_err(|e| exception(&e))
    }

    /// Waits for its end, for at most `timeout` seconds: whether it has ended. Raises if it has
    /// failed.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let (work, timeout) = (&self.work, timeout.map(args::seconds).transpose()?);
        listening(py, |interrupt| work.wait(timeout, interrupt))?.map_err(|e| exception(&e))
    }

    /// Ends it: when this returns, no byte of it lands any more.
    fn cancel(&self, py: Python<'_>) {
        let work = &self.work;
        py.detach(|| work.cancel());
    }
}
