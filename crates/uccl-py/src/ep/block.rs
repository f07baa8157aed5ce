//! Memory that peers read in place.

use std::sync::Arc;

use pyo3::prelude::*;
use uccl_ep::{Block, Group, release_block};

use super::{PyGroup, detached_drop::DetachedDrop, exception};

/// Memory that peers read in place. It lives as long as this object, and as peers may read it.
#[pyclass(name = "EpBlock", module = "uccl._core", frozen)]
pub(crate) struct PyBlock {
    block: Arc<Block>,
    group: DetachedDrop<Arc<Group>>,
}

impl Drop for PyBlock {
    fn drop(&mut self) {
        let (group, block) = (Arc::clone(&self.group), Arc::clone(&self.block));
        // This may free another block, the last one of its group, and the group's end may wait for
        // peers.
        Python::attach(|py| py.detach(|| release_block(group, block)));
    }
}

#[pymethods]
impl PyBlock {
    /// Makes a block of `len` bytes.
    #[new]
    fn new(group: &PyGroup, len: usize) -> PyResult<Self> {
        let group = DetachedDrop::new(Arc::clone(&group.group));
        let block = group.block(len).map_err(|e| exception(&e))?;
        Ok(Self { block, group })
    }

    /// The block's address.
    #[getter]
    fn address(&self) -> usize {
        self.block.as_ptr().addr()
    }

    /// Whether no peer reads it any more.
    fn is_read(&self) -> bool {
        self.group.is_read(&self.block)
    }
}
