//! How transfers follow CUDA streams.

use uccl_device::cuda::{Event, Gpus, Stream};

use crate::{
    drive::core::connection::deferred_transfers::Mark,
    error::{Error, Result},
    types::CudaStream,
};

impl CudaStream {
    pub(super) fn borrow(self) -> Result<Stream> {
        let context = Gpus::get().device(self.device).and_then(|device| device.context());
        let context = context.map_err(|e| Error::Invalid(format!("stream: {e}")))?;
        // SAFETY: the promise made to `new`.
        Ok(unsafe { Stream::borrow(context, self.handle) })
    }

    /// An event that happens when all work that is on the stream now has been done.
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
