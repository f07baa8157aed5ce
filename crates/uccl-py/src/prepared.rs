//! Transfers that are checked once and posted often.

use pyo3::prelude::*;
use uccl_p2p::{ConnId, Endpoint, PreparedTransfer};

use crate::{
    args::{Keywords, Positional},
    buffer, call, descs,
    endpoint::PyEndpoint,
    error::{CallError, settle},
    signatures,
};

/// A read or write that `prepare` has checked. It keeps no region: a post after one of its regions
/// was deregistered is refused.
#[pyclass(name = "PreparedTransfer", module = "uccl._core", frozen)]
pub(crate) struct PyPreparedTransfer {
    core: Endpoint,
    prepared: PreparedTransfer,
}

#[pymethods]
impl PyPreparedTransfer {
    /// Starts it over a connection to the endpoint of its adverts: `(ok, transfer_id)`. The cost
    /// does not depend on the number of its pieces. `notif` goes with this post alone.
    #[pyo3(signature = (conn_id, notif=None))]
    fn post(
        &self,
        py: Python<'_>,
        conn_id: u64,
        notif: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(bool, u64)> {
        let notif = notif.map(|notif| buffer::bytes(notif).map(|bytes| bytes.into_owned()));
        let (notif, Self { core, prepared }) = (notif.transpose()?, self);
        let posted = py.detach(|| core.post_prepared(ConnId(conn_id), prepared, notif.as_deref()));
        settle(posted.map(|transfer| (true, transfer.0)).map_err(CallError::from), (false, 0))
    }

    /// The number of bytes that each post moves.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.prepared.len_bytes()
    }
}

/// `prepare(op_name, mr_id_v, ptr_v, size_v, meta_v)`: `(ok, prepared)`.
pub(crate) fn prepare(
    ep: &PyEndpoint,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> PyResult<(bool, Option<PyPreparedTransfer>)> {
    settle(checked(ep, args, kwargs).map(|prepared| (true, Some(prepared))), (false, None))
}

fn checked(
    ep: &PyEndpoint,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<PyPreparedTransfer, CallError> {
    let a = signatures::PREPARE.bind(args, kwargs)?;
    let op = descs::op_of(&a)?;
    let (iovs, adverts) = call::one_sided_pieces(ep, op, &a)?;
    let prepared = ep.core.prepare(op, &iovs, &adverts)?;
    Ok(PyPreparedTransfer { core: ep.core.clone(), prepared })
}
