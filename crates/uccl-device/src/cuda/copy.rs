//! Copies by the copy engines, in the order of a stream.

use std::ffi::c_void;

use super::{
    device::Context,
    driver::Driver,
    error::GpuError,
    raw::{MemLocation, MemcpyAttributes, SOURCE_IN_STREAM_ORDER},
    stream::Stream,
};

/// The kinds of memory of a copy's source and destination. Managed memory counts as the device's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From a device to the same or another one. The stream's device must be able to reach both.
    DeviceToDevice,
    /// From a device to the host.
    DeviceToHost,
    /// From the host to a device.
    HostToDevice,
}

/// One piece of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchCopy {
    /// The destination address.
    pub destination: u64,
    /// The source address.
    pub source: u64,
    /// Its length in bytes.
    pub len_bytes: usize,
}

impl Stream {
    /// Enqueues one copy. It is asynchronous for device memory and for pinned host memory. With
    /// pageable memory the driver stages the copy and may wait.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses, for example because it does not know an address.
    ///
    /// # Safety
    /// Both ranges must be memory of the kinds that the direction names, and stay so until the copy
    /// has ended, as an event or the stream shows. Until then nothing else may write to them or
    /// read the destination.
    pub unsafe fn copy(
        &self,
        destination: u64,
        source: u64,
        len_bytes: usize,
        direction: Direction,
    ) -> Result<(), GpuError> {
        let context = self.context();
        let (driver, stream) = (context.driver(), self.raw());
        let _current = context.make_current()?;
        let (to, from) = (destination as usize as *mut c_void, source as usize as *const c_void);
        // SAFETY: the caller's promise.
        let code = unsafe {
            match direction {
                Direction::DeviceToDevice => {
                    (driver.copy_device_to_device)(destination, source, len_bytes, stream)
                }
                Direction::DeviceToHost => {
                    (driver.copy_device_to_host)(to, source, len_bytes, stream)
                }
                Direction::HostToDevice => {
                    (driver.copy_host_to_device)(destination, from, len_bytes, stream)
                }
            }
        };
        context.check(
            code,
            format_args!("copying {len_bytes} bytes from {source:#x} to {destination:#x}"),
        )
    }

    /// Enqueues a copy between two GPUs. If they cannot reach each other, the driver moves the
    /// bytes through the host.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses, [`GpuError::Missing`] if it has no such copy.
    ///
    /// # Safety
    /// As for [`Self::copy`]; and each address must be in memory of its context's GPU.
    pub unsafe fn copy_between(
        &self,
        (to, destination): (&Context, u64),
        (from, source): (&Context, u64),
        len_bytes: usize,
    ) -> Result<(), GpuError> {
        let context = self.context();
        let copy = Driver::need(context.driver().copy_between_contexts, "cuMemcpyPeerAsync")?;
        let _current = context.make_current()?;
        // SAFETY: the caller's promise; contexts are never released.
        let code =
            unsafe { copy(destination, to.raw(), source, from.raw(), len_bytes, self.raw()) };
        let (from, to) = (from.device().ordinal(), to.device().ordinal());
        context.check(code, format_args!("copying {len_bytes} bytes from GPU {from} to GPU {to}"))
    }

    /// Fills device memory with a byte.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    pub unsafe fn fill(&self, address: u64, value: u8, len_bytes: usize) -> Result<(), GpuError> {
        let context = self.context();
        let _current = context.make_current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (context.driver().memory_set)(address, value, len_bytes, self.raw()) };
        context.check(code, format_args!("filling {len_bytes} bytes at {address:#x}"))
    }

    /// Whether the driver takes many copies in one call (CUDA 12.8 and later).
    pub fn has_batches(&self) -> bool {
        let driver = self.context().driver();
        driver.copy_batch_v2.is_some() || driver.copy_batch_v1.is_some()
    }

    /// Enqueues many copies in one call. They run in any order, after everything that is on the
    /// stream already. It does not work on a default stream.
    ///
    /// # Errors
    /// [`GpuError::Missing`] if the driver is too old, [`GpuError::Driver`] if it refuses: then any
    /// of the copies may have been enqueued.
    ///
    /// # Safety
    /// As for [`Self::copy`], for each of the copies; and no two destinations may overlap.
    pub unsafe fn copy_batch(&self, copies: &BatchArrays) -> Result<(), GpuError> {
        if copies.sizes.is_empty() {
            return Ok(());
        }
        let context = self.context();
        let driver = context.driver();
        let _current = context.make_current()?;
        let attributes = MemcpyAttributes {
            source_order: SOURCE_IN_STREAM_ORDER,
            source_hint: MemLocation::default(),
            destination_hint: MemLocation::default(),
            flags: 0,
        };
        let first = 0_usize;
        let (to, from, sizes) =
            (copies.destinations.as_ptr(), copies.sources.as_ptr(), copies.sizes.as_ptr());
        let count = copies.sizes.len();
        let code = if let Some(batch) = driver.copy_batch_v2 {
            // SAFETY: the caller's promise; arrays of `count`, and one attribute for all of them.
            unsafe {
                batch(
                    to,
                    from,
                    sizes,
                    count,
                    &raw const attributes,
                    &raw const first,
                    1,
                    self.raw(),
                )
            }
        } else {
            let batch = Driver::need(driver.copy_batch_v1, "cuMemcpyBatchAsync")?;
            let mut failed = 0_usize;
            let (attributes, first) = (&raw const attributes, &raw const first);
            // SAFETY: as above; the index of a copy that failed goes to a live integer.
            unsafe {
                batch(to, from, sizes, count, attributes, first, 1, &raw mut failed, self.raw())
            }
        };
        context.check(code, format_args!("copying {count} pieces"))
    }
}

/// A list of copies in the form that the driver takes. If it is kept and refilled, it allocates
/// nothing.
#[derive(Clone, Debug, Default)]
pub struct BatchArrays {
    destinations: Vec<u64>,
    sources: Vec<u64>,
    sizes: Vec<usize>,
}

impl BatchArrays {
    /// Removes all copies, and keeps the allocated memory.
    pub fn clear(&mut self) {
        self.destinations.clear();
        self.sources.clear();
        self.sizes.clear();
    }

    /// Adds a copy. An empty one is left out: the driver refuses it.
    pub fn push(&mut self, copy: BatchCopy) {
        if copy.len_bytes > 0 {
            self.destinations.push(copy.destination);
            self.sources.push(copy.source);
            self.sizes.push(copy.len_bytes);
        }
    }
}

impl FromIterator<BatchCopy> for BatchArrays {
    fn from_iter<I: IntoIterator<Item = BatchCopy>>(copies: I) -> Self {
        let mut arrays = Self::default();
        copies.into_iter().for_each(|copy| arrays.push(copy));
        arrays
    }
}
