//! Connections to peers.

use pyo3::{IntoPyObjectExt, exceptions::PyRuntimeError, prelude::*, types::PyBytes};
use uccl_p2p::ConnId;
use uccl_wire::metadata::{Device, Metadata};

use super::{Args, Kwargs};
use crate::{
    advertise_ipc, args, buffer,
    endpoint::PyEndpoint,
    error::{self, CallError, settle},
    peers,
    reuse::region_of,
};

#[pymethods]
impl PyEndpoint {
    #[doc = signature!(CONNECT)]
    /// Connects to the endpoint that listens at an address: `(ok, conn_id)`.
    ///
    /// The addresses of a name are tried in order, all within `timeout`. Without a port, the call
    /// uses the GPU's well-known port, and waits within `timeout` for an endpoint that does not
    /// listen yet. At a given port an endpoint must listen already.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn connect(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        settle(peers::connect(&self.core, py, args, kwargs).map(|conn| (true, conn)), (false, 0))
    }

    #[doc = signature!(CONNECT_LOCAL)]
    /// Connects to the endpoint of a GPU of this host, and waits within `timeout` until it listens:
    /// `(ok, conn_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn connect_local(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        settle(
            peers::connect_local(&self.core, py, args, kwargs).map(|conn| (true, conn)),
            (false, 0),
        )
    }

    /// Waits for a peer to connect: `(ok, ip, gpu_idx, conn_id)`.
    #[pyo3(signature = (*, timeout=None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(bool, String, i64, u64)> {
        let timeout = timeout.map(args::seconds).transpose()?;
        let accepted = self
            .peers
            .accept(&self.core, py, timeout)
            .map(|a| (true, a.ip.to_string(), i64::from(a.gpu_index), a.conn.0));
        settle(accepted, (false, String::new(), -1, 0))
    }

    /// Waits for a peer of this host to connect: `(ok, gpu_idx, conn_id)`.
    #[pyo3(signature = (*, timeout=None))]
    fn accept_local(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(bool, i64, u64)> {
        let timeout = timeout.map(args::seconds).transpose()?;
        let accepted = self
            .peers
            .accept_local(&self.core, py, timeout)
            .map(|a| (true, i64::from(a.gpu_index), a.conn.0));
        settle(accepted, (false, -1, 0))
    }

    /// Accepts connections in the background from now on; accept will not return them.
    fn start_passive_accept(&self) -> bool {
        error::ok(self.core.start_passive_accept())
    }

    /// Connects to the peer with this metadata, once: `(ok, conn_id)`. A lost connection is
    /// replaced by one to the endpoint that listens there now.
    fn add_remote_endpoint(
        &self,
        py: Python<'_>,
        metadata_bytes: &Bound<'_, PyAny>,
    ) -> PyResult<(bool, u64)> {
        let metadata = buffer::bytes(metadata_bytes)?;
        settle(self.peers.add(&self.core, py, &metadata).map(|conn| (true, conn)), (false, 0))
    }

    /// Closes a connection; its unfinished transfers fail.
    fn remove_remote_endpoint(&self, py: Python<'_>, conn_id: u64) -> bool {
        let removed = self.peers.remove(&self.core, py, ConnId(conn_id));
        let let_go = advertise_ipc::disconnected(self, py, ConnId(conn_id));
        error::ok(removed.and(let_go))
    }

    /// The address of this endpoint, for `add_remote_endpoint` of its peers.
    fn get_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes =
            self.core.metadata().encode().map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// `(ip, port, gpu)` of metadata; the GPU is an index or a PCI address, as in the metadata.
    #[staticmethod]
    fn parse_metadata<'py>(
        py: Python<'py>,
        metadata: &Bound<'py, PyAny>,
    ) -> PyResult<(String, u16, Bound<'py, PyAny>)> {
        let metadata = Metadata::decode(&buffer::bytes(metadata)?)
            .map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
        let gpu = match metadata.device {
            Device::Gpu(index) => index.into_bound_py_any(py)?,
            Device::Bdf(bdf) => bdf.into_bound_py_any(py)?,
        };
        Ok((metadata.ip.to_string(), metadata.port, gpu))
    }

    /// Information on a connection; None if there is no such connection.
    fn connection<'py>(
        &self,
        py: Python<'py>,
        conn_id: u64,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.core.connection(ConnId(conn_id)) {
            Ok(info) => Ok(Some(crate::json::to_python(py, &info)?)),
            Err(e) => Ok(error::refuse(e, None)),
        }
    }

    /// The path of one-sided transfers with this metadata: 'mapped', 'cma', 'cuda_ipc', 'shm',
    /// 'verbs', 'libfabric', 'udp', 'tcp' or 'fifo'; with a region of ours also 'owner', if the
    /// peer makes long copies.
    #[pyo3(signature = (conn_id, meta, mr_id=None))]
    fn path(
        &self,
        conn_id: u64,
        meta: &Bound<'_, PyAny>,
        mr_id: Option<u64>,
    ) -> PyResult<Option<&'static str>> {
        let advert = match crate::meta::advert(meta) {
            Ok(advert) => advert,
            Err(CallError::Raise(e)) => return Err(e),
            Err(CallError::Refuse(reason)) => return Ok(error::refuse(reason, None)),
        };
        let conn = ConnId(conn_id);
        let path = match mr_id {
            Some(mr) => self.core.path_from(conn, region_of(mr), &advert),
            None => self.core.path(conn, &advert),
        };
        Ok(path.map_or_else(|e| error::refuse(e, None), Some))
    }
}
