//! Data that devices write into a GPU's memory: it is made visible to that GPU before anybody here
//! learns of it.

use std::sync::Arc;

use uccl_device::{
    MemoryKind,
    cuda::{self, GpuError},
};

use super::core::connection::{
    Connection,
    transfer::{Kind, Transfer},
};
use crate::error::{Error, Result};

impl Connection {
    /// Makes writes by devices to our GPUs' memory visible to those GPUs, before anybody here
    /// learns of them. Only for GPUs that might see such writes later than news from the CPU.
    pub(super) fn show_gpus(&self) -> Result<()> {
        let shown = self.lanes.rails.as_ref().map_or(Ok(()), |_| cuda::flush_writes());
        shown.map_err(|e| self.not_shown(&e))
    }

    /// The same, for the GPU that owns memory of this kind, if one does.
    pub(crate) fn show_gpu(&self, kind: MemoryKind) -> Result<()> {
        let gpu = self.lanes.rails.as_ref().and_then(|_| kind.device_only());
        gpu.map_or(Ok(()), cuda::flush_writes_of).map_err(|e| self.not_shown(&e))
    }

    fn not_shown(&self, e: &GpuError) -> Error {
        Error::Gpu { peer: Arc::clone(&self.peer.name), reason: e.to_string() }
    }

    /// Makes received data visible to our GPUs, if the transfer has received anything.
    pub(super) fn show_received(&self, transfer: &Transfer) -> Result<()> {
        if self.lanes.rails.is_none() || !matches!(transfer.kind, Kind::Read | Kind::Recv) {
            return Ok(());
        }
        let gpus = transfer.gpus();
        gpus.into_iter().try_for_each(|device| self.show_gpu(MemoryKind::Cuda { device }))
    }
}
