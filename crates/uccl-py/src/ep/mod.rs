//! Expert parallelism: the engine's calls, with memory as addresses. `uccl.ep` passes its tensors
//! as these.

mod block;
mod calls;
mod cuda;
mod detached_drop;
mod group;
mod handle;
mod scales;

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
    calls::{PyCombine, PyDispatch, PyReceiveCounts},
    cuda::{
        PyCudaGroup, PyDispatchLayout, PyDispatchPlan, PyDispatchResult, PyLayoutWorkspace,
        PyLowLatencyCombine, PyLowLatencyDispatch, PyLowLatencyHandle, PyLowLatencyWorkspace,
        PyNormalCombine, PyNormalHandle, PyPoolHold, PyRowLayout, PyWorkspaceLayout,
        PyZeroCopyView, cuda_combine_scratch_len, cuda_layout,
    },
    group::{PyGroup, PyRouting},
    handle::PyHandle,
};

/// The exception of an error.
fn exception(error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Invalid(_) | Error::TooManyTokens(_) => PyValueError::new_err(text),
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

/// The nodes of a group.
#[pyclass(name = "EpNodes", module = "uccl._core", frozen, get_all)]
pub(crate) struct PyNodes {
    /// The number of nodes.
    count: usize,
    /// Ranks of each node.
    ranks: usize,
}

#[pymethods]
impl PyNodes {
    #[new]
    fn new(count: usize, ranks: usize) -> Self {
        Self { count, ranks }
    }
}

impl PyNodes {
    fn of(nodes: Nodes) -> Self {
        Self { count: nodes.count, ranks: nodes.ranks }
    }

    fn nodes(&self) -> Nodes {
        Nodes { count: self.count.max(1), ranks: self.ranks }
    }
}

/// Bytes of a dispatch's place with `slots` slots for tokens of each rank. With several nodes
/// tokens are relayed.
#[pyfunction(name = "ep_dispatch_len")]
#[pyo3(signature = (*, payload, scales, top_k, local_experts, slots, nodes))]
pub(crate) fn dispatch_len(
    payload: usize,
    scales: usize,
    top_k: usize,
    local_experts: usize,
    slots: usize,
    nodes: PyRef<'_, PyNodes>,
) -> usize {
    let record = Record { payload, scales, top_k };
    Areas { record, local_experts, nodes: nodes.nodes() }.place(slots)
}

/// Bytes of a combine's place.
#[pyfunction(name = "ep_row_place_len")]
#[pyo3(signature = (*, values, weights, slots, tokens))]
pub(crate) fn row_place_len(values: usize, weights: usize, slots: usize, tokens: usize) -> usize {
    Row { values, weights, slots }.place(tokens)
}

/// The number of rows of a token in a combine's place if each rank sends one.
#[pyfunction(name = "ep_row_slots")]
pub(crate) fn row_slots(top_k: usize, nodes: PyRef<'_, PyNodes>) -> usize {
    slots_of(nodes.nodes(), top_k)
}

/// Bytes that identify the node of this process: the one of this number, or of the processes that
/// can see it.
#[pyfunction(name = "ep_node")]
#[pyo3(signature = (node))]
pub(crate) fn node(py: Python<'_>, node: Option<u64>) -> PyResult<Bound<'_, PyBytes>> {
    let node = Node::of_this_process(node).map_err(|e| exception(&e))?;
    Ok(PyBytes::new(py, &node.to_bytes()))
}

/// The nodes, from the `ep_node` of all ranks. It is one node, unless all have the same number of
/// consecutive ranks.
#[pyfunction(name = "ep_nodes")]
pub(crate) fn nodes(of_ranks: Vec<Vec<u8>>) -> PyNodes {
    PyNodes::of(Nodes::of(&of_ranks.into_iter().map(Some).collect::<Vec<_>>()))
}
