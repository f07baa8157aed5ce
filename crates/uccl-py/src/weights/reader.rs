//! The side that reads weights.

use pyo3::{prelude::*, types::PyBytes};
use uccl_shards::{Reader, Shard};

use super::{
    exception,
    input::{PlanOptions, WeightShard, party},
};
use crate::{args, endpoint::PyEndpoint, interrupt::listening};

/// A rank that reads shards into its memory.
#[pyclass(name = "WeightsReader", module = "uccl._core", frozen)]
pub(crate) struct PyReader {
    reader: Reader,
    /// Keeps the memory allocated.
    owners: Option<Py<PyAny>>,
}

#[pymethods]
impl PyReader {
    /// Registers the memory of shards with an endpoint, which accepts every peer from now on.
    /// `owners` keeps it allocated.
    #[new]
    fn new(
        endpoint: &PyEndpoint,
        shards: Vec<WeightShard>,
        owners: Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let shards: Vec<Shard> = shards.into_iter().map(Shard::from).collect();
        // SAFETY: `owners` keeps the memory allocated as long as this object lives, which ends the
        // regions first, and for ever if that fails. Callers keep off it during a fetch.
        let reader = unsafe { Reader::new(&endpoint.core, &shards) };
        let reader = reader.map_err(|e| exception(&e))?;
        Ok(Self { reader, owners: Some(owners.unbind()) })
    }

    /// The description of this rank, for all others.
    fn manifest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = self.reader.manifest().and_then(|manifest| manifest.encode());
        Ok(PyBytes::new(py, &encoded.map_err(|e| exception(&e))?))
    }

    /// Plans with the manifests of all ranks. It is target `index` of them.
    #[pyo3(signature = (sources, targets, index, options=None))]
    fn join(
        &self,
        py: Python<'_>,
        sources: Vec<Bound<'_, PyBytes>>,
        targets: Vec<Bound<'_, PyBytes>>,
        index: usize,
        options: Option<PlanOptions>,
    ) -> PyResult<()> {
        let (reader, party) = (&self.reader, party(&sources, &targets, options)?);
        py.detach(|| reader.join(&party, index)).map_err(|e| exception(&e))
    }

    /// Reads the newest version that all its sources have, which is `version` or a later one, and
    /// waits for it: `(version, bytes, retries)`.
    #[pyo3(signature = (version=0, timeout=None))]
    fn fetch(
        &self,
        py: Python<'_>,
        version: u64,
        timeout: Option<f64>,
    ) -> PyResult<(u64, u64, u32)> {
        let (reader, timeout) = (&self.reader, timeout.map(args::seconds).transpose()?);
        let fetched = listening(py, |interrupt| reader.fetch(version, timeout, interrupt))?
            .map_err(|e| exception(&e))?;
        Ok((fetched.version, fetched.bytes, fetched.retries))
    }

    /// Says that the memory is about to change by other means than a fetch.
    fn begin(&self, py: Python<'_>) {
        let reader = &self.reader;
        py.detach(|| reader.begin());
    }

    /// Ends the fetch of another thread. When this returns, no byte of it lands any more.
    fn abort(&self, py: Python<'_>) {
        let reader = &self.reader;
        py.detach(|| reader.abort());
    }

    /// The version of the last fetch, and whether all bytes are of it.
    #[getter]
    fn mark(&self) -> (u64, bool) {
        let mark = self.reader.mark();
        (mark.version(), mark.is_whole())
    }

    /// Waits until every target that reads from this one has a version.
    #[pyo3(signature = (version, timeout=None))]
    fn wait_taken(&self, py: Python<'_>, version: u64, timeout: Option<f64>) -> PyResult<()> {
        let (reader, timeout) = (&self.reader, timeout.map(args::seconds).transpose()?);
        listening(py, |interrupt| reader.wait_taken(version, timeout, interrupt))?
            .map_err(|e| exception(&e))
    }

    /// Aborts a fetch and ends the regions. If a peer may still read, this fails, and the same call
    /// waits again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let reader = &self.reader;
        py.detach(|| reader.close()).map_err(|e| exception(&e))
    }
}

impl Drop for PyReader {
    fn drop(&mut self) {
        let reader = &self.reader;
        let closed = Python::try_attach(|py| py.detach(|| reader.close()));
        if closed.unwrap_or_else(|| reader.close()).is_err() {
            // Memory that peers may still touch is never freed.
            std::mem::forget(self.owners.take());
        }
    }
}
