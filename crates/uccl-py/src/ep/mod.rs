//! Expert parallelism: the engine's calls, with memory as addresses. `uccl.ep` makes tensors of them.

mod block;
mod calls;
mod cuda;
mod group;
mod handle;

use pyo3::{
    exceptions::{PyOSError, PyRuntimeError, PyTimeoutError, PyValueError},
    prelude::*,
    types::PyBytes,
};
use uccl_ep::{
    Error, Exchange, Result,
    record::{Record, Row},
};

pub(crate) use self::{
    block::PyBlock,
    calls::{PyCombine, PyDispatch},
    cuda::{
        PyCudaCombine, PyCudaDispatch, PyCudaGroup, PyCudaHandle, cuda_combine_scratch_len,
        cuda_scratch_len,
    },
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

/// A call was asked for what it has done before.
fn over() -> Error {
    Error::Invalid("this call is over; a hook is called once".into())
}

/// Joins with an exchange of Python's: `exchange(bytes)` returns what all ranks gave it, in order of rank; None for one that is
/// not there. What it raises is raised.
fn with_exchange<T>(
    exchange: &Bound<'_, PyAny>,
    join: impl FnOnce(&mut Exchange<'_>) -> Result<T>,
) -> PyResult<T> {
    let mut raised = None;
    let mut all = |mine: Vec<u8>| {
        let given = exchange.call1((PyBytes::new(exchange.py(), &mine),));
        given.and_then(|all| all.extract::<Vec<Option<Vec<u8>>>>()).map_err(|e| {
            let why = Error::Invalid(format!("the exchange among ranks failed: {e}"));
            raised = Some(e);
            why
        })
    };
    let joined = join(&mut all);
    match raised {
        Some(e) => Err(e),
        None => joined.map_err(|e| exception(&e)),
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
