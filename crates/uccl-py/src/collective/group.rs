//! A rank's end of a group.

use pyo3::{prelude::*, types::PyBytes};
use uccl_collective::{Direction, Group, GroupRequest, Result, Work};
use uccl_p2p::Endpoint;

use super::{PyRankWork, buffer, buffers, exception, time};
use crate::{endpoint::PyEndpoint, interrupt::listening, memory::Memory};

/// The time of a call in seconds, and the stream that it follows.
type OptionPair<'py> = (Option<f64>, Option<Bound<'py, PyAny>>);

/// A rank's end of a group of ranks. `options` is `(timeout, stream)`: seconds that the messages
/// may take, and the stream whose work they follow.
#[pyclass(name = "RankGroup", module = "uccl._core", frozen)]
pub(crate) struct PyRankGroup {
    group: Group,
    endpoint: Endpoint,
}

impl PyRankGroup {
    fn call(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Group) -> Result<std::sync::Arc<Work>> + Send,
    ) -> PyResult<PyRankWork> {
        let group = &self.group;
        let work = py.detach(|| call(group)).map_err(|e| exception(&e))?;
        Ok(PyRankWork { work })
    }
}

#[pymethods]
impl PyRankGroup {
    /// Joins a group, and waits until all ranks have. `cards` are those of all ranks, from
    /// `rank_card`. With `needs_registration`, messages to ranks of other hosts need registered
    /// memory.
    #[new]
    #[pyo3(signature = (endpoint, rank, cards, *, timeout=None, needs_registration=false))]
    fn new(
        py: Python<'_>,
        endpoint: &PyEndpoint,
        rank: usize,
        cards: Vec<Bound<'_, PyBytes>>,
        timeout: Option<f64>,
        needs_registration: bool,
    ) -> PyResult<Self> {
        let endpoint = endpoint.core.clone();
        let cards: Vec<_> = cards.iter().map(|card| card.as_bytes().to_vec()).collect();
        let timeout = time(&endpoint, timeout)?;
        let group = listening(py, |interrupt| {
            let (endpoint, cards) = (&endpoint, &cards);
            let request = GroupRequest { endpoint, rank, cards, timeout, needs_registration };
            Group::join(&request, interrupt)
        })?;
        Ok(Self { group: group.map_err(|e| exception(&e))?, endpoint })
    }

    /// The number of this rank.
    #[getter]
    fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The number of ranks.
    #[getter]
    fn ranks(&self) -> usize {
        self.group.ranks()
    }

    /// The numbers that the ranks had in the first group.
    #[getter]
    fn members(&self) -> Vec<u32> {
        self.group.members().to_vec()
    }

    /// Whether a rank has this one's address.
    fn is_local(&self, rank: usize) -> bool {
        self.group.is_local(rank)
    }

    /// The connection to another rank.
    fn connection(&self, rank: usize) -> PyResult<u64> {
        Ok(self.group.connection(rank).map_err(|e| exception(&e))?.0)
    }

    /// Registers a tensor's memory, unless registered memory holds it: the region's number.
    fn register(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
        let (group, buffer) = (&self.group, buffer(tensor)?);
        Ok(py.detach(|| group.register(&buffer)).map_err(|e| exception(&e))?.0)
    }

    /// Ends the registration of exactly this tensor's memory; `False` if there is none.
    fn deregister(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (group, memory) = (&self.group, Memory::of_tensor(tensor)?);
        let len = memory.sized(None)?;
        py.detach(|| group.deregister(memory.addr, len)).map_err(|e| exception(&e))
    }

    /// The number of the region that holds a tensor's memory, if it was registered.
    fn registered(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let memory = Memory::of_tensor(tensor)?;
        Ok(self.group.registered(memory.addr, memory.sized(None)?).map(|mr| mr.0))
    }

    /// Sends a tensor to a rank.
    #[pyo3(signature = (tensor, peer, options=None))]
    fn send(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        peer: usize,
        options: Option<OptionPair<'_>>,
    ) -> PyResult<PyRankWork> {
        let options = super::options(options, &self.endpoint)?;
        let tensor = buffer(tensor)?;
        self.call(py, |group| group.message(Direction::Send, peer, tensor, options))
    }

    /// Receives a tensor from a rank.
    #[pyo3(signature = (tensor, peer, options=None))]
    fn recv(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        peer: usize,
        options: Option<OptionPair<'_>>,
    ) -> PyResult<PyRankWork> {
        let options = super::options(options, &self.endpoint)?;
        let tensor = buffer(tensor)?;
        self.call(py, |group| group.message(Direction::Recv, peer, tensor, options))
    }

    /// Every rank gets the input of every rank. The own part is the caller's to copy, as in all
    /// collectives.
    #[pyo3(signature = (input, outputs, options=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        outputs: Vec<Bound<'_, PyAny>>,
        options: Option<OptionPair<'_>>,
    ) -> PyResult<PyRankWork> {
        let options = super::options(options, &self.endpoint)?;
        let (input, outputs) = (buffer(input)?, buffers(&outputs)?);
        self.call(py, |group| group.all_gather(input, outputs, options))
    }

    /// Every rank gets a part of every rank's.
    #[pyo3(signature = (inputs, outputs, options=None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        inputs: Vec<Bound<'_, PyAny>>,
        outputs: Vec<Bound<'_, PyAny>>,
        options: Option<OptionPair<'_>>,
    ) -> PyResult<PyRankWork> {
        let options = super::options(options, &self.endpoint)?;
        let (inputs, outputs) = (buffers(&inputs)?, buffers(&outputs)?);
        self.call(py, |group| group.all_to_all(inputs, outputs, options))
    }

    /// Every rank gets the root's tensor.
    #[pyo3(signature = (root, tensor, options=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        root: usize,
        tensor: &Bound<'_, PyAny>,
        options: Option<OptionPair<'_>>,
    ) -> PyResult<PyRankWork> {
        let options = super::options(options, &self.endpoint)?;
        let tensor = buffer(tensor)?;
        self.call(py, |group| group.broadcast(root, tensor, options))
    }

    /// Every rank gets its part of the root's; other ranks have no `inputs`.
    #[pyo3(signature = (root, inputs, output, options=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        root: usize,
        inputs: Vec<Bound<'_, PyAny>>,
        output: &Bound<'_, PyAny>,
        options: Option<OptionPair<'_>>,
    ) -> PyResult<PyRankWork> {
        let options = super::options(options, &self.endpoint)?;
        let (inputs, output) = (buffers(&inputs)?, buffer(output)?);
        self.call(py, |group| group.scatter(root, inputs, output, options))
    }

    /// The root gets every rank's input; other ranks have no `outputs`.
    #[pyo3(signature = (root, input, outputs, options=None))]
    fn gather(
        &self,
        py: Python<'_>,
        root: usize,
        input: &Bound<'_, PyAny>,
        outputs: Vec<Bound<'_, PyAny>>,
        options: Option<OptionPair<'_>>,
    ) -> PyResult<PyRankWork> {
        let options = super::options(options, &self.endpoint)?;
        let (input, outputs) = (buffer(input)?, buffers(&outputs)?);
        self.call(py, |group| group.gather(root, input, outputs, options))
    }

    /// Ends on each rank when every rank has begun it.
    #[pyo3(signature = (options=None))]
    fn barrier(&self, py: Python<'_>, options: Option<OptionPair<'_>>) -> PyResult<PyRankWork> {
        let options = super::options(options, &self.endpoint)?;
        self.call(py, |group| group.barrier(options))
    }

    /// The call of a number.
    fn work(&self, id: u64) -> PyResult<PyRankWork> {
        Ok(PyRankWork { work: self.group.work(id).map_err(|e| exception(&e))? })
    }

    /// The ranks that are lost, as far as this rank can tell now.
    fn lost(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let group = &self.group;
        listening(py, |interrupt| group.lost(interrupt))?.map_err(|e| exception(&e))
    }

    /// The group of those ranks that are not lost. All of them call this.
    #[pyo3(signature = (*, timeout=None))]
    fn shrink(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Self> {
        let (group, endpoint) = (&self.group, self.endpoint.clone());
        let timeout = time(&endpoint, timeout)?;
        let shrunk = listening(py, |interrupt| group.shrink(timeout, interrupt))?;
        Ok(Self { group: shrunk.map_err(|e| exception(&e))?, endpoint })
    }

    /// Ends all calls and registrations, and leaves the ranks. The endpoint stays open.
    fn close(&self, py: Python<'_>) {
        let group = &self.group;
        py.detach(|| group.close());
    }
}

impl Drop for PyRankGroup {
    fn drop(&mut self) {
        // With an interpreter, other threads may run meanwhile.
        let group = &self.group;
        Python::try_attach(|py| py.detach(|| group.close())).unwrap_or_else(|| group.close());
    }
}
