//! Short writes into GPU memory, and changes of signal words there.

use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use uccl_device::cuda::{Direction, GpuError, Gpus, Priority, Stream, classify};
use uccl_wire::signal::Change;

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

/// Changes a word in a GPU's memory, and waits for it. Concurrent calls take turns, so no change is
/// lost.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// The eight bytes must be this GPU's memory, and changed by nobody else during the call.
pub(crate) unsafe fn change_word(
    device: u32,
    address: usize,
    change: Change,
) -> Result<(), GpuError> {
    let address = address as u64;
    with_stream(device, |stream| {
        let mut word = 0_u64;
        let here = &raw mut word as u64;
        if let Change::Add(_) = change {
            // SAFETY: the caller's promise; `word` is not touched before the copy has been waited
            // for.
            unsafe { stream.copy(here, address, size_of_val(&word), Direction::DeviceToHost)? };
            stream.synchronize()?;
        }
        word = change.of(word);
        // SAFETY: as above.
        unsafe { stream.copy(address, here, size_of_val(&word), Direction::HostToDevice)? };
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
