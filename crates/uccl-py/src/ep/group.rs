//! Groups, and the routing of their tokens.

use std::{slice, sync::Arc};

use pyo3::prelude::*;
use uccl_ep::{
    Config, Group,
    routing::{Choices, Routing},
};

use super::{
    PyNodes, calls::engine, detached_drop::DetachedDrop, exception, timeout_of, with_exchange,
};

/// One rank's end of a group.
#[pyclass(name = "EpGroup", module = "uccl._core", frozen)]
pub(crate) struct PyGroup {
    pub(super) group: DetachedDrop<Arc<Group>>,
}

#[pymethods]
impl PyGroup {
    /// Joins a group. `exchange(bytes)` returns the bytes of all ranks, by rank; None for a missing
    /// rank.
    #[new]
    #[pyo3(signature = (*, rank, ranks, pool, timeout, masks_late, node, exchange))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        rank: usize,
        ranks: usize,
        pool: usize,
        timeout: f64,
        masks_late: bool,
        node: Option<u64>,
        exchange: Py<PyAny>,
    ) -> PyResult<Self> {
        let timeout = timeout_of(timeout)?;
        let config = Config { rank, ranks, pool, timeout, masks_late, node, network: None };
        let group = with_exchange(py, &exchange, |exchange| Group::join(config, exchange))?;
        Ok(Self { group: DetachedDrop::new(group) })
    }

    /// The group with the ranks that are present now: those that take part in `exchange`.
    fn regroup(&self, py: Python<'_>, exchange: Py<PyAny>) -> PyResult<Self> {
        let group = with_exchange(py, &exchange, |exchange| self.group.regroup(exchange))?;
        Ok(Self { group: DetachedDrop::new(group) })
    }

    /// Waits until every rank that takes part has called this too.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        engine(py, |interrupted| self.group.barrier(interrupted))
    }

    /// The number of times that the ranks have met.
    #[getter]
    fn generation(&self) -> u32 {
        self.group.generation()
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

    /// The group's nodes. It is one node, unless all have the same number of consecutive ranks.
    #[getter]
    fn nodes(&self) -> PyNodes {
        PyNodes::of(self.group.nodes())
    }

    /// The address of the pool.
    #[getter]
    fn pool(&self) -> usize {
        self.group.pool().addr()
    }

    /// Bytes of the pool.
    #[getter]
    fn pool_len(&self) -> usize {
        self.group.pool_len()
    }

    /// Whether memory lies in a block of this rank.
    fn has_block(&self, address: usize, len: usize) -> bool {
        self.group.has_block(&(address..address.saturating_add(len)))
    }

    /// By rank, whether it is present, masked or not.
    fn present(&self) -> Vec<bool> {
        (0..self.group.ranks()).map(|rank| self.group.has(rank)).collect()
    }

    /// Masks a rank in later calls, or unmasks it.
    fn mask(&self, rank: usize, is_masked: bool) -> PyResult<()> {
        self.group.mask(rank, is_masked).map_err(|e| exception(&e))
    }

    /// By rank, whether it is masked.
    fn masks(&self) -> Vec<bool> {
        (0..self.group.ranks()).map(|rank| self.group.is_masked(rank)).collect()
    }
}

/// The receivers of a rank's tokens.
#[pyclass(name = "EpRouting", module = "uccl._core", frozen)]
pub(crate) struct PyRouting {
    pub(super) routing: Arc<Routing>,
}

#[pymethods]
impl PyRouting {
    /// Routes tokens by the experts that they chose: `tokens * top_k` integers at `experts`.
    #[staticmethod]
    #[pyo3(signature = (*, experts, is_64, tokens, top_k, num_experts, ranks))]
    fn by_choices(
        py: Python<'_>,
        experts: usize,
        is_64: bool,
        tokens: usize,
        top_k: usize,
        num_experts: usize,
        ranks: usize,
    ) -> PyResult<Self> {
        let count = tokens * top_k;
        let narrow = |wide: &i64| i32::try_from(*wide).unwrap_or(i32::MAX);
        let experts: Vec<i32> = match (count, is_64) {
            (0, _) => Vec::new(),
            // SAFETY: the caller passes a tensor of as many contiguous integers of this size.
            (_, true) => unsafe { slice::from_raw_parts(experts as *const i64, count) }
                .iter()
                .map(narrow)
                .collect(),
            // SAFETY: as above.
            (_, false) => unsafe { slice::from_raw_parts(experts as *const i32, count) }.to_vec(),
        };
        let choices = Choices { experts: &experts, top_k, num_experts, ranks };
        let routing = py.detach(|| Routing::new(choices)).map_err(|e| exception(&e))?;
        Ok(Self { routing: Arc::new(routing) })
    }

    /// Routes tokens by ranks: `tokens * ranks` bytes at `token_in_rank`, each 0 or 1. `per_expert`
    /// counts the tokens of each expert.
    #[staticmethod]
    #[pyo3(signature = (*, token_in_rank, tokens, per_expert, ranks))]
    fn by_rank(
        token_in_rank: usize,
        tokens: usize,
        per_expert: Vec<u32>,
        ranks: usize,
    ) -> PyResult<Self> {
        let token_in_rank: Vec<bool> = match tokens * ranks {
            0 => Vec::new(),
            // SAFETY: the caller passes a tensor of as many contiguous bytes.
            count => unsafe { slice::from_raw_parts(token_in_rank as *const u8, count) }
                .iter()
                .map(|go| *go != 0)
                .collect(),
        };
        let routing =
            Routing::by_rank(&token_in_rank, &per_expert, ranks).map_err(|e| exception(&e))?;
        Ok(Self { routing: Arc::new(routing) })
    }

    /// The number of tokens.
    #[getter]
    fn tokens(&self) -> usize {
        self.routing.tokens()
    }

    /// The number of choices of a token.
    #[getter]
    fn top_k(&self) -> usize {
        self.routing.top_k()
    }

    /// The number of experts of each rank.
    #[getter]
    fn local_experts(&self) -> usize {
        self.routing.local_experts()
    }

    /// By rank, the number of tokens that are sent to it.
    fn per_rank(&self) -> Vec<usize> {
        (0..self.routing.ranks()).map(|rank| self.routing.tokens_to(rank).len()).collect()
    }

    /// By expert, the number of tokens that chose it.
    fn per_expert(&self) -> Vec<u32> {
        (0..self.routing.ranks())
            .flat_map(|rank| self.routing.per_expert_of(rank))
            .copied()
            .collect()
    }

    /// Fills `tokens * ranks` bytes: by token and rank, 1 if the token is sent to the rank, else 0.
    fn fill_token_in_rank(&self, py: Python<'_>, out: usize) {
        let (routing, ranks) = (&self.routing, self.routing.ranks());
        py.detach(|| {
            let out = out as *mut u8;
            // SAFETY: `uccl.ep` passes a tensor with as many bytes, and numbers of tokens are less
            // than there are.
            unsafe {
                if routing.tokens() > 0 {
                    out.write_bytes(0, routing.tokens() * ranks);
                }
                for rank in 0..ranks {
                    for token in routing.tokens_to(rank) {
                        out.add(*token as usize * ranks + rank).write(1);
                    }
                }
            }
        });
    }
}
