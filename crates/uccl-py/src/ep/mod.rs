//! Expert parallelism: the engine's calls, with memory as addresses. `uccl.ep` makes tensors of them.

mod block;
mod calls;
mod group;
mod handle;

use pyo3::{
    exceptions::{PyOSError, PyRuntimeError, PyTimeoutError, PyValueError},
    prelude::*,
};
use uccl_ep::{
    Error,
    record::{Record, Row},
};

pub(crate) use self::{
    block::PyBlock,
    calls::{PyCombine, PyDispatch},
    group::{PyGroup, PyRouting},
    handle::PyHandle,
};

/// An exception that says why.
fn exception(error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Invalid(_) => PyValueError::new_err(text),
        Error::Overdue { .. } => PyTimeoutError::new_err(text),
        Error::Os { .. } | Error::Network { .. } => PyOSError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

/// Bytes of one rank's area of a dispatch with so many slots.
#[pyfunction(name = "ep_record_len")]
pub(crate) fn record_len(
    payload: usize,
    scales: usize,
    top_k: usize,
    local_experts: usize,
    slots: usize,
) -> usize {
    Record { payload, scales, top_k }.area(local_experts, slots)
}

/// Bytes of a combine's place.
#[pyfunction(name = "ep_row_place_len")]
pub(crate) fn row_place_len(values: usize, weights: usize, slots: usize, tokens: usize) -> usize {
    Row { values, weights, slots }.place(tokens)
}
