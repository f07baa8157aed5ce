//! Short messages into GPU memory.

use std::sync::LazyLock;

use parking_lot::Mutex;
use uccl_device::cuda::{Direction, GpuError, Gpus, Priority, Stream, classify};

/// One a GPU that was written to.
static STREAMS: LazyLock<Mutex<Vec<(u32, Stream)>>> = LazyLock::new(Mutex::default);

/// Copies bytes to an address of whatever kind, and waits for it.
///
/// # Errors
/// What the driver says.
///
/// # Safety
/// The memory must be there, as long as the bytes are, and nobody else may touch it during the call.
pub unsafe fn put(address: usize, bytes: &[u8]) -> Result<(), GpuError> {
    if bytes.is_empty() {
        return Ok(());
    }
    let Some(device) = classify(address as u64)?.kind.device() else {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        return Ok(());
    };
    let mut streams = STREAMS.lock();
    let at = match streams.iter().position(|(other, _)| *other == device) {
        Some(at) => at,
        None => {
            let context = Gpus::get().device(device)?.context()?;
            streams.push((device, Stream::new(context, Priority::High)?));
            streams.len() - 1
        }
    };
    let (from, stream) = (bytes.as_ptr() as u64, &streams[at].1);
    // SAFETY: the caller's promise; the bytes are borrowed until the copy has been waited for.
    unsafe { stream.copy(address as u64, from, bytes.len(), Direction::HostToDevice)? };
    stream.synchronize()
}
