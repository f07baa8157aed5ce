//! Flushes writes of other devices to memory of GPUs (GPUDirect), before a GPU learns of them.

use super::{
    device::{Context, Device},
    driver::Driver,
    error::GpuError,
    gpus::Gpus,
};

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
    needing.try_for_each(flush_for)
}

/// The same as [`flush_writes`], for the memory of one of our GPUs.
///
/// # Errors
/// The driver's error.
pub fn flush_writes_of(ordinal: u32) -> Result<(), GpuError> {
    let device = Gpus::in_use().and_then(|gpus| gpus.device(ordinal).ok());
    device.filter(|device| device.needs_flush()).map_or(Ok(()), flush_for)
}

/// Flushes writes to the memory of a GPU, if this process uses it.
fn flush_for(device: &'static Device) -> Result<(), GpuError> {
    device.taken().map_or(Ok(()), Context::flush_writes)
}

/// Other devices are going to write to memory of this GPU: from now on such writes are flushed, if
/// it needs that, even if this process does nothing else with the GPU.
///
/// # Errors
/// The driver's error. Then such writes are not flushed.
pub fn expect_writes_to(ordinal: u32) -> Result<(), GpuError> {
    let device = Gpus::in_use().and_then(|gpus| gpus.device(ordinal).ok());
    let needing = device.filter(|device| device.needs_flush());
    needing.map_or(Ok(()), |device| device.context().map(drop))
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
