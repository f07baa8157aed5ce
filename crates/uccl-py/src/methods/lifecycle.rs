//! The endpoint's beginning and end, and its own numbers.

use pyo3::prelude::*;
use uccl_p2p::Endpoint;

use super::{Args, Kwargs};
use crate::{
    advertised::AdvertisedObjects, config, endpoint::PyEndpoint, error, implicit::ImplicitRegions,
    peers::Peers, regions::Regions, reuse::Reuse,
};

#[pymethods]
impl PyEndpoint {
    #[new]
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn new(py: Python<'_>, args: Args<'_, '_>, kwargs: Option<Kwargs<'_, '_>>) -> PyResult<Self> {
        let config = config::config(args, kwargs)?;
        let core = py.detach(|| Endpoint::new(config)).map_err(|e| error::exception(&e))?;
        Ok(Self {
            core,
            regions: Regions::default(),
            reuse: Reuse::default(),
            peers: Peers::default(),
            implicit: ImplicitRegions::default(),
            advertised: AdvertisedObjects::default(),
        })
    }

    /// Fails unfinished transfers, ends all regions, closes all connections and stops the endpoint.
    ///
    /// True when no byte lands in this endpoint's memory any more. If a peer may still touch some
    /// of it, the result is False, `last_error()` names the regions, their buffers are kept
    /// allocated, and the same call waits once more.
    fn close(&self, py: Python<'_>) -> bool {
        error::ok(self.shut(py))
    }

    fn __enter__(this: Bound<'_, Self>) -> Bound<'_, Self> {
        this
    }

    /// Closes the endpoint. A `RuntimeError` names the regions that a peer may still touch. If the
    /// block has raised an exception, that is raised instead, and `last_error()` names the regions.
    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: Args<'_, '_>) -> PyResult<()> {
        let Err(e) = self.shut(py) else { return Ok(()) };
        let is_in_flight = exception.iter().any(|part| !part.is_none());
        let raised = error::exception(&e);
        error::refuse(e, ());
        if is_in_flight { Ok(()) } else { Err(raised) }
    }

    fn __repr__(&self) -> &'static str {
        "<UCCL P2P Endpoint>"
    }

    /// The reason of the last failed call on this thread; None if none has failed.
    #[staticmethod]
    fn last_error() -> Option<String> {
        error::last()
    }

    /// Counters since the endpoint was made.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.core.stats().map_err(|e| error::exception(&e))?;
        crate::json::to_python(py, &stats)
    }

    /// The CPUs of the worker threads, near the GPU; None if they may run on all CPUs of the
    /// process.
    fn worker_cpus(&self) -> Option<Vec<u32>> {
        self.core.worker_cpus().map(|cpus| cpus.iter().collect())
    }

    /// Always 2**64 - 1: no connection belongs to a rank.
    fn conn_id_of_rank(&self, rank: i64) -> u64 {
        let _ = rank;
        u64::MAX
    }
}
