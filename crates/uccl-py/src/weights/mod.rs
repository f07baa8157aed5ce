//! Weights that trainers publish and inference ranks read: `uccl.weights` passes its tensors as
//! addresses.

mod input;
mod publisher;
mod reader;

use pyo3::{
    exceptions::{PyRuntimeError, PyTimeoutError, PyValueError},
    prelude::*,
    types::PyBytes,
};
use uccl_shards::{
    Error, Peer,
    plan::area::{Area, Axis},
};

use self::input::{PlanOptions, party};
pub(crate) use self::{publisher::PyPublisher, reader::PyReader};

/// The exception of an error.
fn exception(error: &Error) -> PyErr {
    match error {
        Error::Engine(error) => crate::error::exception(error),
        Error::Plan(_) | Error::Manifest(_) | Error::Invalid(_) => {
            PyValueError::new_err(error.to_string())
        }
        Error::Timeout { .. } => PyTimeoutError::new_err(error.to_string()),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// A piece: target's buffer and offset, source's buffer and offset, length.
type Piece = (usize, u64, usize, u64, u64);
/// A read: whether it is from a source, the rank, the pieces.
type Read = (bool, usize, Vec<Piece>);

/// The reads of each target, by step: `(is_source, rank, pieces)`. A piece is the target's buffer
/// and offset there, the source's buffer and offset there, and a length, all in bytes.
#[pyfunction]
#[pyo3(signature = (sources, targets, options=None))]
pub(crate) fn weights_plan(
    py: Python<'_>,
    sources: Vec<Bound<'_, PyBytes>>,
    targets: Vec<Bound<'_, PyBytes>>,
    options: Option<PlanOptions>,
) -> PyResult<Vec<Vec<Vec<Read>>>> {
    let party = party(&sources, &targets, options)?;
    let plan = py.detach(|| party.plan()).map_err(|e| exception(&e))?;
    let target = |target: uccl_shards::TargetPlan| {
        let steps = target.steps.into_iter();
        steps.map(|step| step.reads.into_iter().map(read).collect()).collect()
    };
    Ok(plan.targets.into_iter().map(target).collect())
}

fn read(read: uccl_shards::Read) -> Read {
    let (is_source, rank) = match read.from {
        Peer::Source(rank) => (true, rank),
        Peer::Target(rank) => (false, rank),
    };
    let piece = |piece: uccl_shards::Piece| {
        (piece.to_buffer, piece.to, piece.from_buffer, piece.from, piece.len)
    };
    (is_source, rank, read.pieces.into_iter().map(piece).collect())
}

/// The elements of one rank of a mesh, cut as PyTorch's `chunk` does: `(offsets, sizes)`. Each axis
/// is `(ranks, rank, dimension)`; None is a dimension of replicas.
#[pyfunction]
pub(crate) fn weights_area(
    shape: Vec<u64>,
    axes: Vec<(u64, u64, Option<usize>)>,
) -> PyResult<(Vec<u64>, Vec<u64>)> {
    let axis = |(ranks, rank, dim)| Axis { ranks, rank, dim };
    let axes: Vec<_> = axes.into_iter().map(axis).collect();
    let Some(Area { offsets, sizes }) = Area::of_rank(&shape, &axes) else {
        let text = format!("the axes {axes:?} do not cut a tensor of shape {shape:?}");
        return Err(PyValueError::new_err(text));
    };
    Ok((offsets, sizes))
}
