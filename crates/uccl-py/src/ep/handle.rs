//! The state of a dispatch that its combine needs.

use std::sync::Arc;

use pyo3::prelude::*;
use uccl_ep::{Phase, dispatch::Handle};

use super::{PyRouting, detached_drop::DetachedDrop, exception};

/// The state of a dispatch that its combine needs.
#[pyclass(name = "EpHandle", module = "uccl._core", frozen)]
pub(crate) struct PyHandle {
    pub(super) handle: DetachedDrop<Arc<Handle>>,
}

#[pymethods]
impl PyHandle {
    /// The routing of this rank's own tokens.
    #[getter]
    fn routing(&self) -> PyRouting {
        PyRouting { routing: Arc::clone(&self.handle.routing) }
    }

    /// The number of nodes over which tokens were relayed; 1 if they were not.
    #[getter]
    fn relays(&self) -> usize {
        self.handle.relayed.len()
    }

    /// Fills the tables of low latency mode, with `rows` rows for each local expert: the token of
    /// each row (i32), and, by expert and rank, the first row and the number of rows (i64).
    fn fill_low_latency(&self, py: Python<'_>, src_info: usize, layout_range: usize, rows: usize) {
        let handle = &self.handle;
        py.detach(|| {
            let (src_info, layout_range) = (src_info as *mut i32, layout_range as *mut i64);
            for entry in handle.table.chunks_exact(handle.width()) {
                for row in entry[2..].iter().filter(|row| **row >= 0) {
                    // SAFETY: `uccl.ep` passes a tensor with an integer for each row.
                    unsafe { src_info.add(*row as usize).write(entry[0]) };
                }
            }
            let (ranks, local) = (handle.group.ranks(), handle.routing.local_experts());
            for expert in 0..local {
                let mut begin = 0;
                for rank in 0..ranks {
                    let count = i64::from(handle.counts.per_expert[rank * local + expert]);
                    // SAFETY: `uccl.ep` passes a tensor with an integer for each expert and rank.
                    unsafe { layout_range.add(expert * ranks + rank).write(begin << 32 | count) };
                    begin += count;
                }
                debug_assert!(begin <= rows as i64, "rows of an expert");
            }
        });
    }

    /// Fills `[m, K + 2]` i32 for the received tokens: `rank * max_tokens + token`, `rank * K + k`
    /// with the last choice `k` that is of this rank, and, by choice, its row by experts, or -1.
    fn fill_source_metadata(&self, py: Python<'_>, out: usize, max_tokens: i32) {
        let handle = &self.handle;
        py.detach(|| {
            let (out, width) = (out as *mut i32, handle.width());
            let top_k = handle.routing.top_k() as i32;
            for (at, entry) in handle.table.chunks_exact(width).enumerate() {
                let (token, rank, last_choice) =
                    (entry[0], entry[1], i32::from(handle.last_choices[at]));
                // SAFETY: `uccl.ep` passes a tensor with as many integers as the table has.
                unsafe {
                    let row = out.add(at * width);
                    row.copy_from_nonoverlapping(entry.as_ptr(), width);
                    // A token that was counted and did not arrive has no place.
                    row.write(if rank < 0 { -1 } else { rank * max_tokens + token });
                    row.add(1).write(if rank < 0 { -1 } else { rank * top_k + last_choice });
                }
            }
        });
    }

    /// Raises if ranks have connected or left since the dispatch.
    fn check_is_last(&self) -> PyResult<()> {
        self.handle.group.check_is_last(Phase::Dispatch).map_err(|e| exception(&e))
    }

    /// By rank, the number of tokens received from it.
    fn counts(&self) -> Vec<u32> {
        self.handle.counts.per_rank.clone()
    }
}
