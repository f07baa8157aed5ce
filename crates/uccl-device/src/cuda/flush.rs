//! Flushes writes of other devices to memory of GPUs (GPUDirect), before a GPU learns of them.

use super::{device::Context, driver::Driver, error::GpuError, gpus::Gpus};

/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`.
const CURRENT_CONTEXT: i32 = 0;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`.
const TO_OWNER: i32 = 100;

/// Makes other devices' writes to memory of our GPUs visible to these GPUs. Does nothing for GPUs
/// that see such writes in order anyway (Hopper and later on most machines), and for those that
/// this process does not use.
///
/// # Errors
/// The driver's error.
pub fn flush_writes() -> Result<(), GpuError> {
    let Some(gpus) = Gpus::in_use() else { return Ok(()) };
    let mut needing = gpus.devices().iter().filter(|device| device.needs_flush());
    needing.try_for_each(|device| device.taken().map_or(Ok(()), Context::flush_writes))
}

impl Context {
    fn flush_writes(&'static self) -> Result<(), GpuError> {
        let flush = Driver::need(self.driver().flush_writes, "cuFlushGPUDirectRDMAWrites")?;
        let _current = self.make_current()?;
        // SAFETY: two numbers, for the context that is current.
        let code = unsafe { flush(CURRENT_CONTEXT, TO_OWNER) };
        self.check(code, format_args!("flushing what other devices wrote"))
    }
}
