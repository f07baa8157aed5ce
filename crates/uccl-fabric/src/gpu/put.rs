//! Short writes into GPU memory.

use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use uccl_device::cuda::{Direction, GpuError, Gpus, Priority, Stream, classify};

/// One stream for each GPU that was written to, with a lock of its own.
static STREAMS: LazyLock<Mutex<Streams>> = LazyLock::new(Mutex::default);

/// Streams by the ordinal of their GPU.
type Streams = Vec<(u32, Arc<Mutex<Stream>>)>;

/// Copies bytes to host or GPU memory, and waits for the copy.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// The memory must be valid for as many bytes, and nobody else may touch it during the call.
pub unsafe fn put(address: usize, bytes: &[u8]) -> Result<(), GpuError> {
    if bytes.is_empty() {
        return Ok(());
    }
    let Some(device) = classify(address as u64)?.kind.device() else {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        return Ok(());
    };
    with_stream(device, |stream| {
        let from = bytes.as_ptr() as u64;
        // SAFETY: the caller's promise; the bytes are borrowed until the copy has been waited for.
        unsafe { stream.copy(address as u64, from, bytes.len(), Direction::HostToDevice)? };
        stream.synchronize()
    })
}

/// Calls `act` with a GPU's stream. Calls for one GPU take turns.
fn with_stream<T>(
    device: u32,
    act: impl FnOnce(&Stream) -> Result<T, GpuError>,
) -> Result<T, GpuError> {
    let mut streams = STREAMS.lock();
    let at = match streams.iter().position(|(other, _)| *other == device) {
        Some(at) => at,
        None => {
            let context = Gpus::get().device(device)?.context()?;
            let stream = Stream::new(context, Priority::High)?;
            streams.push((device, Arc::new(Mutex::new(stream))));
            streams.len() - 1
        }
    };
    let stream = Arc::clone(&streams[at].1);
    drop(streams);
    let stream = stream.lock();
    act(&stream)
}
