//! Groups of ranks: `uccl.collective` and `uccl.distributed` pass their tensors here.

mod group;
mod work;

use std::{sync::Arc, time::Duration};

use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
    types::PyBytes,
};
use uccl_collective::{Buffer, CallOptions, Error, Group};

pub(crate) use self::{group::PyRankGroup, work::PyRankWork};
use crate::{args, endpoint::PyEndpoint, memory::Memory, stream};

/// The exception of an error.
fn exception(error: &Error) -> PyErr {
    match error {
        Error::NoSuchRank { .. } | Error::Invalid(_) | Error::Card { .. } => {
            PyValueError::new_err(error.to_string())
        }
        Error::Engine(error) => crate::error::exception(error),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// The bytes with which other ranks find an endpoint.
#[pyfunction]
pub(crate) fn rank_card<'py>(py: Python<'py>, endpoint: &PyEndpoint) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &Group::card(&endpoint.core))
}

/// The memory of a tensor, which is kept.
fn buffer(tensor: &Bound<'_, PyAny>) -> PyResult<Buffer> {
    let memory = Memory::of_tensor(tensor)?;
    let len = memory.sized(None)?;
    // SAFETY: the tensor keeps its memory allocated; that nobody else uses it during the call is
    // the caller's part, as for every tensor that this package takes.
    Ok(unsafe { Buffer::new(memory.addr, len, Arc::new(tensor.clone().unbind())) })
}

fn buffers(tensors: &[Bound<'_, PyAny>]) -> PyResult<Vec<Buffer>> {
    tensors.iter().map(buffer).collect()
}

/// The options of a call, from seconds and the stream that it follows.
fn options(
    given: Option<(Option<f64>, Option<Bound<'_, PyAny>>)>,
    endpoint: &uccl_p2p::Endpoint,
) -> PyResult<CallOptions> {
    let Some((timeout, after)) = given else { return Ok(CallOptions::default()) };
    let timeout = timeout.map(args::seconds).transpose()?;
    let after = after.map(|after| stream::of(endpoint, &after)).transpose()?;
    Ok(CallOptions { timeout, after })
}

/// The time that a call may take; the endpoint's if none is given.
fn time(endpoint: &uccl_p2p::Endpoint, seconds: Option<f64>) -> PyResult<Duration> {
    Ok(seconds.map(args::seconds).transpose()?.unwrap_or(endpoint.config().transfer_timeout))
}
