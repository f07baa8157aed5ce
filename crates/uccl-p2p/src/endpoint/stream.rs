//! CUDA streams that transfers follow.

use uccl_device::cuda::{Event, Gpus, Stream};

use crate::{
    engine::deferred::Mark,
    error::{Error, Result},
};

/// A CUDA stream, as frameworks name theirs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CudaStream {
    device: u32,
    handle: u64,
}

impl CudaStream {
    /// The stream with this handle (`cudaStream_t` as a number; 0 is the default stream) on the GPU of this
    /// ordinal.
    ///
    /// # Safety
    /// There is such a stream until the calls that it is given to have returned.
    #[must_use]
    pub unsafe fn new(device: u32, handle: u64) -> Self {
        Self { device, handle }
    }

    pub(super) fn borrow(self) -> Result<Stream> {
        let context = Gpus::get().device(self.device).and_then(|device| device.context());
        let context = context.map_err(|e| Error::Invalid(format!("stream: {e}")))?;
        // SAFETY: the promise made to `new`.
        Ok(unsafe { Stream::borrow(context, self.handle) })
    }

    /// An event that happens when what is on the stream now has been done.
    pub(super) fn mark(self) -> Result<Box<dyn Mark>> {
        let stream = self.borrow()?;
        let event = Event::new(stream.context());
        let event = event.and_then(|event| event.record(&stream).map(|()| event));
        match event {
            Ok(event) => Ok(Box::new(event)),
            Err(e) => Err(Error::Invalid(format!("stream: {e}"))),
        }
    }
}
