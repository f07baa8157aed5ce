//! Reads and writes that name memory by its addresses, and the regions that peers find so.

use pyo3::{prelude::*, types::PyBytes};
use uccl_p2p::Op;

use super::{Args, Kwargs};
use crate::{
    args,
    by_address::{self, Call, PyAddressTransfer},
    endpoint::PyEndpoint,
    error::settle,
    signatures,
};

#[pymethods]
impl PyEndpoint {
    /// Publishes a region: connected peers read and write it by address, without an advert, until
    /// it is deregistered. The endpoint must have been made with `publish=True`.
    fn publish(&self, mr_id: u64) -> PyResult<bool> {
        settle(by_address::publish(self, mr_id).map(|()| true), false)
    }

    /// The connection to the endpoint that listens at `address` (`"10.0.0.1:28100"`), made when it
    /// is first needed and again when its peer has died: `(ok, conn_id)`. All threads share it.
    #[pyo3(signature = (address, *, timeout=None))]
    fn reach(&self, py: Python<'_>, address: &str, timeout: Option<f64>) -> PyResult<(bool, u64)> {
        let timeout = timeout.map(args::seconds).transpose()?;
        let reached = by_address::reach(&self.core, py, address, timeout);
        settle(reached.map(|conn| (true, conn)), (false, 0))
    }

    /// The adverts of the peer's published memory at an address: `(ok, [bytes])`, more than one
    /// where the range spans several regions. Asks the peer each time.
    #[pyo3(signature = (conn_id, addr, size, *, timeout=None))]
    fn look_up<'py>(
        &self,
        py: Python<'py>,
        conn_id: u64,
        addr: u64,
        size: u64,
        timeout: Option<f64>,
    ) -> PyResult<(bool, Vec<Bound<'py, PyBytes>>)> {
        let timeout = timeout.map(args::seconds).transpose()?;
        let found = by_address::look_up(&self.core, py, conn_id, (addr, size), timeout);
        settle(found.map(|adverts| (true, adverts)), (false, Vec::new()))
    }

    #[doc = signature!(READ_BY_ADDRESS)]
    /// Reads the peer's published memory into registered memory, both named by their addresses. The
    /// peer's regions are looked up once and kept; regions that it has registered anew are looked
    /// up again.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn read_by_address(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        let signature = &signatures::READ_BY_ADDRESS;
        by_address::run(self, py, Call::of(self, Op::Read, signature, args, kwargs))
    }

    #[doc = signature!(WRITE_BY_ADDRESS)]
    /// Writes registered memory to the peer's published memory, as `read_by_address` reads it.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn write_by_address(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        let signature = &signatures::WRITE_BY_ADDRESS;
        by_address::run(self, py, Call::of(self, Op::Write, signature, args, kwargs))
    }

    #[doc = signature!(READ_BY_ADDRESS_ASYNC)]
    /// Reads as `read_by_address`, without waiting: `(ok, transfer)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn read_by_address_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Option<PyAddressTransfer>)> {
        let signature = &signatures::READ_BY_ADDRESS_ASYNC;
        by_address::post(self, py, Call::of(self, Op::Read, signature, args, kwargs))
    }

    #[doc = signature!(WRITE_BY_ADDRESS_ASYNC)]
    /// Writes as `write_by_address`, without waiting: `(ok, transfer)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn write_by_address_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Option<PyAddressTransfer>)> {
        let signature = &signatures::WRITE_BY_ADDRESS_ASYNC;
        by_address::post(self, py, Call::of(self, Op::Write, signature, args, kwargs))
    }
}
