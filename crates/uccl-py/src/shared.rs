//! Memory that peers on the same host can map.

use pyo3::prelude::*;
use uccl_p2p::SharedBuf;

/// The memory of a `uccl.p2p.SharedBuffer`; freed when the last region and buffer over it are gone.
#[pyclass(name = "SharedMemory", module = "uccl._core", frozen)]
pub(crate) struct PySharedMemory(SharedBuf);

impl PySharedMemory {
    pub(crate) fn new(memory: SharedBuf) -> Self {
        Self(memory)
    }
}

#[pymethods]
impl PySharedMemory {
    /// The start address.
    #[getter]
    fn ptr(&self) -> usize {
        self.0.as_ptr() as usize
    }

    /// The length in bytes.
    #[getter]
    fn size(&self) -> usize {
        self.0.len()
    }
}
