//! CUDA streams in the forms of several frameworks.

use pyo3::{exceptions::PyTypeError, intern, prelude::*};
use uccl_p2p::{CudaStream, Endpoint};

use crate::args;

/// A `torch.cuda.Stream`, a CuPy stream, or the handle of a stream on the endpoint's GPU.
pub(crate) fn of(core: &Endpoint, stream: &Bound<'_, PyAny>) -> PyResult<CudaStream> {
    let (device, handle) = match args::integer(stream) {
        Some(handle) => (core.config().gpu_index, handle? as u64),
        None => of_object(stream)?,
    };
    // SAFETY: the caller's object is borrowed for the call that it was passed to; for a number the
    // caller guarantees a live stream, as for every address that this package takes.
    Ok(unsafe { CudaStream::new(device, handle) })
}

fn of_object(stream: &Bound<'_, PyAny>) -> PyResult<(u32, u64)> {
    let py = stream.py();
    if let Ok(handle) = stream.getattr(intern!(py, "cuda_stream")) {
        let device = stream.getattr(intern!(py, "device"))?.getattr(intern!(py, "index"))?;
        return Ok((device.extract()?, handle.extract()?));
    }
    if let Ok(handle) = stream.getattr(intern!(py, "ptr")) {
        return Ok((stream.getattr(intern!(py, "device_id"))?.extract()?, handle.extract()?));
    }
    Err(PyTypeError::new_err(format!(
        "a stream is a torch.cuda.Stream, a cupy.cuda.Stream, or a handle; not {}",
        stream.get_type().name()?
    )))
}
