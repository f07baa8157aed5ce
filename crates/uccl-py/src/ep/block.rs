//! Memory that peers read where it is.

use std::sync::Arc;

use pyo3::prelude::*;
use uccl_ep::{Block, Group, let_go};

use super::{PyGroup, apart::Apart, exception};

/// Memory that peers read where it is. It lives as long as this, and as peers may read it.
#[pyclass(name = "EpBlock", module = "uccl._core", frozen)]
pub(crate) struct PyBlock {
    block: Arc<Block>,
    group: Apart<Arc<Group>>,
}

impl Drop for PyBlock {
    fn drop(&mut self) {
        let (group, block) = (Arc::clone(&self.group), Arc::clone(&self.block));
        // Another block that goes now may be the last of its group, whose end may wait for peers.
        Python::attach(|py| py.detach(|| let_go(group, block)));
    }
}

#[pymethods]
impl PyBlock {
    /// Makes one of `len` bytes.
    #[new]
    fn new(group: &PyGroup, len: usize) -> PyResult<Self> {
        let group = Apart::new(Arc::clone(&group.group));
        let block = group.block(len).map_err(|e| exception(&e))?;
        Ok(Self { block, group })
    }

    /// Its address.
    #[getter]
    fn address(&self) -> usize {
        self.block.as_ptr().addr()
    }

    /// Whether nobody reads it any more.
    fn is_read(&self) -> bool {
        self.group.is_read(&self.block)
    }
}
