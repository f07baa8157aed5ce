//! Regions, and their names for peers: adverts and descriptors.

use pyo3::{exceptions::PyRuntimeError, prelude::*, types::PyBytes};

use super::{Args, Kwargs};
use crate::{
    advertise, advertise_ipc, buffer, descs,
    endpoint::PyEndpoint,
    error::{self, CallError, settle},
    registration,
    reuse::region_of,
    shared::PySharedMemory,
};

#[pymethods]
impl PyEndpoint {
    #[doc = signature!(REG)]
    /// Registers memory: `(ok, mr_id)`.
    ///
    /// Memory given by its address must stay allocated until `dereg`; an object is kept until then.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn reg(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        settle(registration::reg(self, py, args, kwargs).map(|mr| (true, mr)), (false, 0))
    }

    #[doc = signature!(REGV)]
    /// Registers many pieces of memory, all or none: `(ok, [mr_id])`.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn regv(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Vec<u64>)> {
        settle(
            registration::regv(self, py, args, kwargs).map(|mrs| (true, mrs)),
            (false, Vec::new()),
        )
    }

    /// Ends a region: no access of a peer lands in it any more. If a peer may still touch it, this
    /// fails, the memory has to stay allocated, and the same call waits once more. A region that
    /// several tensors of `register_memory` share ends with the last of their `mr_id`s.
    fn dereg(&self, py: Python<'_>, mr_id: u64) -> bool {
        error::ok(registration::remove(self, py, mr_id))
    }

    /// Information on a region: `addr`, `len`, `kind` ('host', 'pinned', 'cuda:0', ...),
    /// `numa_node` and the nearest `nic`, if they are known; None if there is no such region.
    fn region_info<'py>(&self, py: Python<'py>, mr_id: u64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let core = &self.core;
        // The first look at the machine's NICs takes a while.
        match py.detach(|| core.region_info(region_of(mr_id))) {
            Ok(info) => Ok(Some(crate::json::to_python(py, &info)?)),
            Err(e) => Ok(error::refuse(e, None)),
        }
    }

    /// Allocates memory that peers on this host can map; `uccl.p2p` makes it a buffer.
    fn _alloc(&self, py: Python<'_>, size: usize) -> PyResult<PySharedMemory> {
        let core = &self.core;
        let memory = py.detach(|| core.alloc(size)).map_err(|e| error::exception(&e))?;
        Ok(PySharedMemory::new(memory))
    }

    /// Registers tensors, all or none, and describes them.
    ///
    /// A tensor that lies in an earlier one shares its region: the keys are equal, each has an
    /// `mr_id` of its own, and each needs a `deregister_memory`.
    fn register_memory(
        &self,
        py: Python<'_>,
        tensor_list: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<descs::PyXferDesc>> {
        raising(descs::register(self, py, tensor_list))
    }

    /// Ends the regions of descriptors, each with the last descriptor that shares it.
    fn deregister_memory(&self, py: Python<'_>, desc_list: &Bound<'_, PyAny>) -> PyResult<()> {
        settle(descs::deregister(self, py, desc_list), ())
    }

    /// The bytes of descriptors, for a peer's `deserialize_descs`.
    fn get_serialized_descs<'py>(
        &self,
        py: Python<'py>,
        desc_list: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &descs::serialize(desc_list)?))
    }

    /// The descriptors in a peer's `get_serialized_descs`.
    fn deserialize_descs(
        &self,
        serialized_bytes: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<descs::PyXferDesc>> {
        descs::deserialize(&buffer::bytes(serialized_bytes)?)
    }

    #[doc = signature!(ADVERTISE)]
    /// Makes an advert, with which a peer can read and write memory of a region: `(ok, bytes)`, or
    /// `ok` with `out_buf`.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn advertise<'py>(
        &self,
        py: Python<'py>,
        args: Args<'_, 'py>,
        kwargs: Option<Kwargs<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        advertise::advertise(self, py, args, kwargs)
    }

    #[doc = signature!(ADVERTISEV)]
    /// Makes adverts, with which a peer can read and write many pieces of memory: `(ok, [bytes])`,
    /// or `ok` with `out_buf_list`: a buffer for each, or one of 64 bytes times the number of
    /// pieces.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn advertisev<'py>(
        &self,
        py: Python<'py>,
        args: Args<'_, 'py>,
        kwargs: Option<Kwargs<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        advertise::advertisev(self, py, args, kwargs)
    }

    #[doc = signature!(ADVERTISE_IPC)]
    /// Makes the info with which a peer of this host can read and write memory: `(ok, info)`.
    ///
    /// An object is advertised until its end, or until the end of the object that it is a view of.
    /// An object without weak references, such as a `bytearray`, is kept until the connection is
    /// removed, or until the first advertisement after the connection was lost. Memory given by its
    /// address must stay allocated for the same time.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn advertise_ipc<'py>(
        slf: &Bound<'py, Self>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Bound<'py, PyBytes>)> {
        let info = advertise_ipc::advertise(slf, args, kwargs)?;
        Ok((info.is_some(), PyBytes::new(slf.py(), info.as_deref().unwrap_or_default())))
    }

    #[doc = signature!(ADVERTISEV_IPC)]
    /// Makes infos with which a peer of this host can access many pieces of memory: `(ok, [info])`.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn advertisev_ipc<'py>(
        slf: &Bound<'py, Self>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Vec<Bound<'py, PyBytes>>)> {
        let (py, infos) = (slf.py(), advertise_ipc::advertisev(slf, args, kwargs)?);
        let ok = infos.is_some();
        let infos = infos.unwrap_or_default();
        Ok((ok, infos.iter().map(|info| PyBytes::new(py, info)).collect()))
    }
}

/// The value, or an exception: for calls without a failure value.
fn raising<T>(result: Result<T, CallError>) -> PyResult<T> {
    result.map_err(|stop| match stop {
        CallError::Raise(e) => e,
        CallError::Refuse(reason) => PyRuntimeError::new_err(reason),
    })
}
