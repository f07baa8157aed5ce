//! What a combine needs of its dispatch.

use std::sync::Arc;

use pyo3::prelude::*;
use uccl_ep::dispatch::Handle;

use super::PyRouting;

/// What a combine needs of its dispatch.
#[pyclass(name = "EpHandle", module = "uccl._core", frozen)]
pub(crate) struct PyHandle {
    pub(super) handle: Arc<Handle>,
}

#[pymethods]
impl PyHandle {
    /// Where this rank's own tokens went.
    #[getter]
    fn routing(&self) -> PyRouting {
        PyRouting { routing: Arc::clone(&self.handle.routing) }
    }

    /// For each token that arrived: its number, its rank, and, by choice, the row that it has by experts, or -1.
    fn table(&self) -> Vec<i32> {
        self.handle.table.clone()
    }

    /// For each token that arrived, the last of its choices that is this rank's.
    fn masters(&self) -> Vec<u16> {
        self.handle.masters.iter().copied().map(u16::from).collect()
    }

    /// By rank, how many tokens came from it.
    fn counts(&self) -> Vec<u32> {
        self.handle.counts.from.clone()
    }

    /// By rank and local expert, how many rows came.
    fn per_expert(&self) -> Vec<u32> {
        self.handle.counts.per_expert.clone()
    }
}
