//! A GPU's memory as a dma-buf, a file that other devices' drivers can use.

use std::{
    ffi::c_void,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

use super::{
    driver::Driver, error::GpuError, gpus::Gpus, pointer::classify, raw::RANGE_HANDLE_DMA_BUF,
};

/// A file that stands for a range of a GPU's memory, in whole pages.
///
/// It keeps the physical memory from being reused, but does not prevent the owner from freeing it.
/// So a caller that registers the file with a device must end that registration before the memory
/// is freed.
#[derive(Debug)]
pub struct DmaBuf {
    /// The file.
    pub fd: OwnedFd,
    /// The offset in the file, in bytes, at which the requested memory begins.
    pub offset: u64,
}

impl DmaBuf {
    /// Makes a file for `len_bytes` of a GPU's memory.
    ///
    /// # Errors
    /// [`GpuError::Missing`] if the driver is older than 11.7, [`GpuError::Driver`] if it refuses:
    /// it needs a kernel with dma-buf and the open kernel modules, and memory of one allocation.
    pub fn export(address: u64, len_bytes: usize) -> Result<Self, GpuError> {
        let pointer = classify(address)?;
        let Some(device) = pointer.kind.device_only() else {
            let why = format!("it is {} memory", pointer.kind);
            return Err(GpuError::NotExportable { address, why });
        };
        let context = Gpus::get().device(device)?.context()?;
        let name = "cuMemGetHandleForAddressRange";
        let export = Driver::need(context.driver().range_handle, name)?;
        let page = rustix::param::page_size() as u64;
        let base = address - address % page;
        let offset = address - base;
        let len = (offset + len_bytes as u64).next_multiple_of(page) as usize;
        let mut fd: RawFd = -1;
        let _current = context.make_current()?;
        let place = (&raw mut fd).cast::<c_void>();
        // SAFETY: for this type of handle the driver writes a descriptor, an int; the range is
        // looked up and not followed.
        let code = unsafe { export(place, base, len, RANGE_HANDLE_DMA_BUF, 0) };
        context
            .check(code, format_args!("making a dma-buf of {len_bytes} bytes at {address:#x}"))?;
        // SAFETY: a new descriptor without another owner.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, offset })
    }
}
