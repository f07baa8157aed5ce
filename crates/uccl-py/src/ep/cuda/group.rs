//! One rank's end of a group.

use std::sync::Arc;

use pyo3::prelude::*;
use uccl_device::cuda::Stream;
use uccl_ep::{
    cuda::{Config, Group, MaskChange, Occupancy, PoolHold, Reach},
    settings::Settings,
};

use crate::ep::{PyNodes, detached_drop::DetachedDrop, exception, timeout_of, with_exchange};

/// One rank's end of a group of ranks with GPUs.
#[pyclass(name = "EpCudaGroup", module = "uccl._core", frozen)]
pub(crate) struct PyCudaGroup {
    pub(super) group: DetachedDrop<Arc<Group>>,
}

/// The memory of a pool.
#[pyclass(name = "EpCudaPoolHold", module = "uccl._core", frozen)]
pub(crate) struct PyPoolHold {
    _hold: DetachedDrop<PoolHold>,
}

impl PyCudaGroup {
    /// The caller's stream, from torch's number.
    pub(super) fn stream(&self, stream: u64) -> Stream {
        // SAFETY: `uccl.ep` passes a stream of the group's GPU, which torch keeps while it is used.
        unsafe { Stream::borrow(self.group.context(), stream) }
    }
}

#[pymethods]
impl PyCudaGroup {
    /// Joins a group. `exchange(bytes)` returns the bytes of all ranks, by rank. Ranks of one GPU
    /// share its multiprocessors, less those that the environment reserves. With `via_host` no rank
    /// accesses the memory of another's GPU. With `in_fabric` ranks on several hosts of an NVLink
    /// domain do so too.
    #[new]
    #[pyo3(signature = (
        *, rank, ranks, pool, timeout, masks_late, device, node, via_host, in_fabric, exchange
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        rank: usize,
        ranks: usize,
        pool: usize,
        timeout: f64,
        masks_late: bool,
        device: u32,
        node: Option<u64>,
        via_host: bool,
        in_fabric: bool,
        exchange: Py<PyAny>,
    ) -> PyResult<Self> {
        let timeout = timeout_of(timeout)?;
        let reach = match (via_host, in_fabric) {
            (true, _) => Reach::ViaHost,
            (false, true) => Reach::Fabric,
            (false, false) => Reach::Any,
        };
        let reserved = Settings::from_env().map_err(|e| exception(&e))?.reserved_sms;
        let group = with_exchange(py, &exchange, |exchange| {
            let Occupancy { blocks, is_alone } =
                Occupancy::agree(rank, device, reserved, exchange)?;
            let config = Config {
                rank,
                ranks,
                pool,
                timeout,
                masks_late,
                device,
                blocks,
                is_alone,
                reach,
                node,
                network: None,
            };
            Group::join(config, exchange)
        })?;
        Ok(Self { group: DetachedDrop::new(group) })
    }

    /// The address of the pool on the GPU.
    #[getter]
    fn pool(&self) -> u64 {
        self.group.pool_address()
    }

    /// Whether ranks reach each other through the host's memory.
    #[getter]
    fn is_via_host(&self) -> bool {
        self.group.is_via_host()
    }

    /// Whether one launch may do a whole call of normal mode.
    #[getter]
    fn can_fuse(&self) -> bool {
        self.group.can_fuse()
    }

    /// The group's nodes. It is one node, unless all have the same number of consecutive ranks.
    #[getter]
    fn nodes(&self) -> PyNodes {
        PyNodes::of(self.group.nodes())
    }

    /// The reason why ranks of one node, or of one NVLink domain, do not reach each other's GPU
    /// memory, or None.
    #[getter]
    fn unreached_reason(&self) -> Option<String> {
        self.group.unreached_reason().map(str::to_owned)
    }

    /// The reason why this rank's window has no fabric handle, though it was made with `in_fabric`;
    /// or None.
    #[getter]
    fn fabric_refusal(&self) -> Option<String> {
        self.group.fabric_refusal()
    }

    /// Bytes of the pool.
    #[getter]
    fn pool_len(&self) -> usize {
        self.group.pool_len()
    }

    /// The number of meetings of the ranks so far.
    #[getter]
    fn generation(&self) -> u32 {
        self.group.generation()
    }

    /// By rank, whether it is there, left out or not.
    fn present(&self) -> Vec<bool> {
        (0..self.group.ranks()).map(|rank| self.group.has(rank)).collect()
    }

    /// By rank, whether it is left out behind the work on a stream, for which this waits.
    #[pyo3(signature = (*, stream))]
    fn masks(&self, py: Python<'_>, stream: u64) -> PyResult<Vec<bool>> {
        let stream = self.stream(stream);
        let masked = py.detach(|| self.group.masked(&stream)).map_err(|e| exception(&e))?;
        Ok((0..self.group.ranks()).map(|rank| masked.has(rank)).collect())
    }

    /// Has the ranks that exchange bytes now meet anew. Waits for the calls on these streams; none
    /// may be on others. Ranks of one GPU share its multiprocessors anew.
    #[pyo3(signature = (*, streams, exchange))]
    fn regroup(&self, py: Python<'_>, streams: Vec<u64>, exchange: Py<PyAny>) -> PyResult<()> {
        let streams: Vec<_> = streams.into_iter().map(|stream| self.stream(stream)).collect();
        let reserved = Settings::from_env().map_err(|e| exception(&e))?.reserved_sms;
        with_exchange(py, &exchange, |exchange| {
            let Config { rank, device, .. } = *self.group.config();
            let occupancy = Occupancy::agree(rank, device, reserved, exchange)?;
            self.group.regroup(&streams, occupancy, exchange)
        })
    }

    /// An object that keeps the memory of the pool, also when ranks meet anew.
    fn pool_hold(&self) -> PyPoolHold {
        PyPoolHold { _hold: DetachedDrop::new(self.group.pool_hold()) }
    }

    /// Raises the error of a call that has failed. Waits for no call.
    fn check(&self) -> PyResult<()> {
        self.group.check().map_err(|e| exception(&e))
    }

    /// Enqueues a notice to peers that this rank has more tokens than a call has room for, and so
    /// makes no call.
    fn announce_too_many(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let stream = self.stream(stream);
        // SAFETY: `uccl.ep` passes a stream of the group's GPU.
        let done = py.detach(|| unsafe { self.group.announce_too_many(&stream) });
        done.map_err(|e| exception(&e))
    }

    /// Enqueues masks: ranks that are left out, and ranks that are let in. Unless `status` is 0,
    /// writes an i32 by rank there: whether it is left out then.
    #[pyo3(signature = (*, left_out, let_in, status, stream))]
    fn mask(
        &self,
        py: Python<'_>,
        left_out: Vec<usize>,
        let_in: Vec<usize>,
        status: u64,
        stream: u64,
    ) -> PyResult<()> {
        let stream = self.stream(stream);
        let [left_out, let_in] = [left_out, let_in].map(|ranks| ranks.into_iter().collect());
        let change = MaskChange { left_out, let_in };
        // SAFETY: `uccl.ep` passes a tensor with an integer for each rank, or 0.
        let done = py.detach(|| unsafe { self.group.mask(change, status, &stream) });
        done.map_err(|e| exception(&e))
    }
}
