//! Reads and writes that name memory by its addresses, and the regions that peers find so.

use std::time::Duration;

use pyo3::{prelude::*, types::PyBytes};
use uccl_p2p::{
    AddressPiece, AddressRequest, AddressTransfer, ConnId, Endpoint, Error, Interrupt, Iov, Op,
    Status, parse_address,
};

use crate::{
    advertise::readonly,
    args::{Keywords, Positional, Signature},
    call::{Spans, UNSIZED},
    column::{Column, same_length},
    endpoint::PyEndpoint,
    error::{self, CallError, settle},
    interrupt::{listening, waiting},
    methods::wait_timeout,
    params::Param,
    reuse::region_of,
};

/// `publish(mr_id)`.
pub(crate) fn publish(ep: &PyEndpoint, mr: u64) -> Result<(), CallError> {
    let mr = region_of(mr);
    if ep.regions.is_readonly(mr.0) {
        return Err(readonly(mr));
    }
    Ok(ep.core.publish(mr)?)
}

/// `reach(address)`: a name's addresses are tried in order.
pub(crate) fn reach(
    core: &Endpoint,
    py: Python<'_>,
    address: &str,
    timeout: Option<Duration>,
) -> Result<u64, CallError> {
    let addrs = py.detach(|| parse_address(address))?;
    let reach =
        |core: &Endpoint, interrupt: &mut dyn Interrupt| core.reach_any(&addrs, timeout, interrupt);
    Ok(waiting(py, core, reach)??.0)
}

/// `look_up(conn_id, addr, size)`.
pub(crate) fn look_up<'py>(
    core: &Endpoint,
    py: Python<'py>,
    conn: u64,
    (addr, size): (u64, u64),
    timeout: Option<Duration>,
) -> Result<Vec<Bound<'py, PyBytes>>, CallError> {
    let found = waiting(py, core, |core, interrupt| {
        core.look_up(ConnId(conn), addr, size, timeout, interrupt)
    })??;
    Ok(found.iter().map(|advert| PyBytes::new(py, &advert.encode())).collect())
}

/// A transfer in the caller's form.
pub(crate) struct Call {
    conn: ConnId,
    op: Op,
    pieces: Vec<AddressPiece>,
    timeout: Option<Duration>,
}

impl Call {
    /// `read_by_address(conn_id, ptr_v, remote_ptr_v, size_v)`, `write_by_address(...)`.
    pub(crate) fn of<const N: usize>(
        ep: &PyEndpoint,
        op: Op,
        signature: &'static Signature<N>,
        args: Positional<'_, '_>,
        kwargs: Keywords<'_, '_>,
    ) -> Result<Self, CallError> {
        let a = signature.bind(args, kwargs)?;
        let spans = Spans::of(&a)?;
        let remotes = a.with(Param::RemotePtrV, Column::of)?;
        let count = spans.len();
        same_length(a.function(), count, remotes.len())?;
        spans.expect(count)?;
        let mut iovs = vec![UNSIZED; count];
        spans.fill(op, &mut iovs)?;
        refuse_readonly(ep, op, &iovs)?;
        let piece = |iov: Iov| AddressPiece { local: iov.ptr, remote: 0, len: iov.len };
        let mut pieces: Vec<_> = iovs.into_iter().map(piece).collect();
        let filled = remotes.fill_integers(&mut pieces, |piece, addr| piece.remote = addr);
        a.named(Param::RemotePtrV, filled)?;
        let (conn, timeout) = (ConnId(a.id(Param::Conn)?), a.seconds(Param::Timeout)?);
        Ok(Self { conn, op, pieces, timeout })
    }

    fn request(&self) -> AddressRequest<'_> {
        let &Self { conn, op, ref pieces, timeout } = self;
        AddressRequest { conn, op, pieces, timeout }
    }
}

/// Refuses to read into memory that was registered from a read-only buffer.
fn refuse_readonly(ep: &PyEndpoint, op: Op, iovs: &[Iov]) -> Result<(), CallError> {
    if op != Op::Read || !ep.regions.has_readonly() {
        return Ok(());
    }
    for iov in iovs {
        if let Some(mr) = ep.core.region_holding(iov.ptr, iov.len)
            && ep.regions.is_readonly(mr.0)
        {
            return Err(CallError::refuse(format!("{mr} was registered from a read-only buffer")));
        }
    }
    Ok(())
}

/// Runs a transfer to its end.
pub(crate) fn run(
    ep: &PyEndpoint,
    py: Python<'_>,
    call: Result<Call, CallError>,
) -> PyResult<bool> {
    let ran = call.and_then(|call| {
        let request = call.request();
        waiting(py, &ep.core, |core, interrupt| core.run_by_address(&request, interrupt))??;
        Ok(true)
    });
    settle(ran, false)
}

/// Starts a transfer: `(ok, transfer)`.
pub(crate) fn post(
    ep: &PyEndpoint,
    py: Python<'_>,
    call: Result<Call, CallError>,
) -> PyResult<(bool, Option<PyAddressTransfer>)> {
    let core = &ep.core;
    let posted = call.and_then(|call| {
        let request = call.request();
        let transfer = py.detach(|| core.post_by_address(&request))?;
        Ok((true, Some(PyAddressTransfer(transfer))))
    });
    settle(posted, (false, None))
}

/// A transfer of `read_by_address_async` or `write_by_address_async`. It goes on as long as it is
/// polled or waited for.
#[pyclass(name = "AddressTransfer", module = "uccl._core", frozen)]
pub(crate) struct PyAddressTransfer(AddressTransfer);

#[pymethods]
impl PyAddressTransfer {
    /// Its state: `(True, False)` in flight, `(True, True)` done, `(False, True)` failed, with
    /// `last_error()`.
    fn poll(&self, py: Python<'_>) -> (bool, bool) {
        let transfer = &self.0;
        error::state(py.detach(|| transfer.poll()))
    }

    /// Waits for its end: the result of `poll`, or `(True, False)` if `timeout` seconds pass first.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(bool, bool)> {
        let (transfer, timeout) = (&self.0, wait_timeout(timeout)?);
        Ok(error::state(listening(py, |interrupt| transfer.wait(timeout, interrupt))?))
    }

    /// Whether it has failed because its deadline passed.
    #[getter]
    fn timed_out(&self, py: Python<'_>) -> bool {
        let transfer = &self.0;
        let status = py.detach(|| transfer.poll());
        matches!(status, Ok(Status::Failed(Error::DeadlineExceeded { .. })))
    }

    /// Ends it. When this returns True, no byte of it lands in either side's memory any more.
    fn cancel(&self, py: Python<'_>) -> bool {
        let transfer = &self.0;
        error::ok(py.detach(|| transfer.cancel()))
    }
}
