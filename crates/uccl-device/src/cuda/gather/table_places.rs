//! The places of tables in the GPU's memory.

use std::sync::{Arc, Mutex, PoisonError};

use crate::cuda::{device::Context, error::GpuError, memory::DeviceBuffer};

/// Tables of one launcher that can stay on the GPU at a time.
const MOST_TABLES: usize = 16;

/// Memory for tables. It is taken with the launcher, as an allocation may wait for kernels, and
/// these for the transfer that would allocate.
#[derive(Debug)]
pub(super) struct TablePlaces {
    free: Mutex<Vec<u64>>,
    _memory: DeviceBuffer,
}

impl TablePlaces {
    /// Takes memory for tables of `len` bytes at most.
    pub(super) fn new(context: &'static Context, len: usize) -> Result<Arc<Self>, GpuError> {
        let memory = DeviceBuffer::new(context, MOST_TABLES * len)?;
        let place = |at: usize| memory.address() + (at * len) as u64;
        let free = Mutex::new((0..MOST_TABLES).map(place).collect());
        Ok(Arc::new(Self { free, _memory: memory }))
    }

    pub(super) fn take(&self) -> Option<u64> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    pub(super) fn give_back(&self, place: u64) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(place);
    }
}
