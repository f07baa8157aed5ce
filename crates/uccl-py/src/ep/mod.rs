//! Expert parallelism: the engine's calls, with memory as addresses. `uccl.ep` passes its tensors
//! as these.

mod block;
mod calls;
mod cuda;
mod detached_drop;
mod group;
mod handle;

use std::time::Duration;

use pyo3::{
    exceptions::{PyOSError, PyRuntimeError, PyTimeoutError, PyValueError},
    prelude::*,
    types::PyBytes,
};
use uccl_ep::{
    Error, Exchange, Result,
    combine::slots_of,
    nodes::{Node, Nodes},
    record::{Areas, Record, Row},
};

pub(crate) use self::{
    block::PyBlock,
    calls::{PyCombine, PyDispatch},
    cuda::{
        PyCudaGroup, PyDispatchLayout, PyDispatchShape, PyLowLatencyCombine, PyLowLatencyDispatch,
        PyLowLatencyHandle, PyNormalCombine, PyNormalDispatch, PyNormalHandle, PyRowLayout,
        PyWorkspaceLayout, PyZeroCopyView, cuda_combine_scratch_len, cuda_layout, cuda_max_tokens,
        cuda_records_len, cuda_scratch_len,
    },
    group::{PyGroup, PyRouting},
    handle::PyHandle,
};

/// The exception of an error.
fn exception(error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Invalid(_) => PyValueError::new_err(text),
        Error::Overdue { .. } => PyTimeoutError::new_err(text),
        Error::Os { .. } | Error::Network { .. } => PyOSError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

/// The error of a call that has ended before.
fn call_over() -> Error {
    Error::Invalid("this call is over; a hook is called once".into())
}

/// Converts a timeout in seconds.
fn timeout_of(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|e| PyValueError::new_err(e.to_string()))
}

/// Joins with an exchange of Python: `exchange(bytes)` returns the bytes of all ranks, by rank;
/// None for a missing rank. An exception of it is raised. Other threads run while this rank waits
/// for its peers.
fn with_exchange<T: Send>(
    py: Python<'_>,
    exchange: &Py<PyAny>,
    join: impl FnOnce(&mut Exchange<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let mut all = |mine: Vec<u8>| {
        Python::attach(|py| {
            let given = exchange.call1(py, (PyBytes::new(py, &mine),));
            given.and_then(|all| all.extract::<Vec<Option<Vec<u8>>>>(py)).map_err(|e| {
                let why = Error::Invalid(format!("the exchange among ranks failed: {e}"));
                raised = Some(e);
                why
            })
        })
    };
    let joined = py.detach(|| join(&mut all));
    match raised {
        Some(e) => Err(e),
        None => joined.map_err(|e| exception(&e)),
    }
}

/// Bytes of a dispatch's place with `slots` slots for tokens of each rank. `spread` is the number
/// of nodes, and of ranks of each: with several nodes tokens are relayed.
#[pyfunction(name = "ep_dispatch_len")]
pub(crate) fn dispatch_len(
    payload: usize,
    scales: usize,
    top_k: usize,
    local_experts: usize,
    slots: usize,
    spread: (usize, usize),
) -> usize {
    let record = Record { payload, scales, top_k };
    Areas { record, local_experts, nodes: nodes_of(spread) }.place(slots)
}

/// Bytes of a combine's place.
#[pyfunction(name = "ep_row_place_len")]
pub(crate) fn row_place_len(values: usize, weights: usize, slots: usize, tokens: usize) -> usize {
    Row { values, weights, slots }.place(tokens)
}

/// The number of rows of a token in a combine's place if each rank sends one. `spread` as for a
/// dispatch.
#[pyfunction(name = "ep_row_slots")]
pub(crate) fn row_slots(top_k: usize, spread: (usize, usize)) -> usize {
    slots_of(nodes_of(spread), top_k)
}

fn nodes_of((count, ranks): (usize, usize)) -> Nodes {
    Nodes { count: count.max(1), ranks }
}

/// Bytes that identify the node of this process: the one of this number, or of the processes that
/// can see it.
#[pyfunction(name = "ep_node")]
#[pyo3(signature = (node))]
pub(crate) fn node(py: Python<'_>, node: Option<u64>) -> PyResult<Bound<'_, PyBytes>> {
    let node = Node::of_this_process(node).map_err(|e| exception(&e))?;
    Ok(PyBytes::new(py, &node.to_bytes()))
}

/// The number of nodes, and of ranks of each, from the `ep_node` of all ranks. It is one node,
/// unless all have the same number of consecutive ranks.
#[pyfunction(name = "ep_nodes")]
pub(crate) fn nodes(of_ranks: Vec<Vec<u8>>) -> (usize, usize) {
    let Nodes { count, ranks } = Nodes::of(&of_ranks.into_iter().map(Some).collect::<Vec<_>>());
    (count, ranks)
}
