//! The side that writes weights.

use pyo3::{prelude::*, types::PyBytes};
use uccl_shards::{Publisher, Shard};

use super::{
    exception,
    input::{PlanOptions, WeightShard, party},
};
use crate::{args, endpoint::PyEndpoint, interrupt::listening};

/// A rank that publishes its shards, version after version.
#[pyclass(name = "WeightsPublisher", module = "uccl._core", frozen)]
pub(crate) struct PyPublisher {
    publisher: Publisher,
    /// Keeps the memory allocated.
    owners: Option<Py<PyAny>>,
}

#[pymethods]
impl PyPublisher {
    /// Registers shards with an endpoint, which accepts every peer from now on. `owners` keeps
    /// their memory allocated.
    #[new]
    fn new(
        endpoint: &PyEndpoint,
        shards: Vec<WeightShard>,
        owners: Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let shards: Vec<Shard> = shards.into_iter().map(Shard::from).collect();
        // SAFETY: `owners` keeps the memory allocated as long as this object lives, which ends the
        // regions first, and for ever if that fails.
        let publisher = unsafe { Publisher::new(&endpoint.core, &shards) };
        let publisher = publisher.map_err(|e| exception(&e))?;
        Ok(Self { publisher, owners: Some(owners.unbind()) })
    }

    /// The description of this rank, for all others.
    fn manifest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = self.publisher.manifest().and_then(|manifest| manifest.encode());
        Ok(PyBytes::new(py, &encoded.map_err(|e| exception(&e))?))
    }

    /// Tells it the manifests of all ranks. It is source `index` of them.
    #[pyo3(signature = (sources, targets, index, options=None))]
    fn join(
        &self,
        py: Python<'_>,
        sources: Vec<Bound<'_, PyBytes>>,
        targets: Vec<Bound<'_, PyBytes>>,
        index: usize,
        options: Option<PlanOptions>,
    ) -> PyResult<()> {
        let (publisher, party) = (&self.publisher, party(&sources, &targets, options)?);
        py.detach(|| publisher.join(&party, index)).map_err(|e| exception(&e))
    }

    /// Says that bytes are about to change.
    fn begin(&self) {
        self.publisher.begin();
    }

    /// Says that all bytes are of a version, which is higher than those before.
    fn publish(&self, version: u64) -> PyResult<()> {
        self.publisher.publish(version).map_err(|e| exception(&e))
    }

    /// The last version, and whether all bytes are of it.
    #[getter]
    fn mark(&self) -> (u64, bool) {
        let mark = self.publisher.mark();
        (mark.version(), mark.is_whole())
    }

    /// Waits until every target that reads from this rank has a version.
    #[pyo3(signature = (version, timeout=None))]
    fn wait_taken(&self, py: Python<'_>, version: u64, timeout: Option<f64>) -> PyResult<()> {
        let (publisher, timeout) = (&self.publisher, timeout.map(args::seconds).transpose()?);
        listening(py, |interrupt| publisher.wait_taken(version, timeout, interrupt))?
            .map_err(|e| exception(&e))
    }

    /// Ends the regions. If a peer may still read, this fails, and the same call waits again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let publisher = &self.publisher;
        py.detach(|| publisher.close()).map_err(|e| exception(&e))
    }
}

impl Drop for PyPublisher {
    fn drop(&mut self) {
        let publisher = &self.publisher;
        let closed = Python::try_attach(|py| py.detach(|| publisher.close()));
        if closed.unwrap_or_else(|| publisher.close()).is_err() {
            // Memory that peers may still touch is never freed.
            std::mem::forget(self.owners.take());
        }
    }
}
