//! Memory that the driver allocates or locks.

use std::{ffi::c_void, fmt, ptr::NonNull};

use crate::numa::NodeMemory;

use super::{
    device::Context,
    driver::Driver,
    error::GpuError,
    fabric::{FabricExport, FabricMemory},
    raw::{
        ATTACH_GLOBAL, HOST_ALLOC_MAPPED, HOST_ALLOC_PORTABLE, HOST_REGISTER_MAPPED,
        HOST_REGISTER_PORTABLE,
    },
    reaper,
    stream::Stream,
};

/// A GPU's memory. It is freed some time after this is dropped, when the GPU's work has ended.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: &'static Context,
    address: u64,
    len_bytes: usize,
    /// The owner of the memory, if it has a fabric handle.
    fabric: Option<FabricMemory>,
}

impl DeviceBuffer {
    /// Allocates memory, at least 256-byte aligned and with any contents.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if there is not enough, or for 0 bytes.
    pub fn new(context: &'static Context, len_bytes: usize) -> Result<Self, GpuError> {
        let _current = context.make_current()?;
        let mut address = 0;
        // SAFETY: the pointer is to a live address.
        let code = unsafe { (context.driver().memory_allocate)(&raw mut address, len_bytes) };
        let ordinal = context.device().ordinal();
        context.check(code, format_args!("taking {len_bytes} bytes of GPU {ordinal}"))?;
        Ok(Self { context, address, len_bytes, fabric: None })
    }

    /// Allocates memory with a fabric handle, by which GPUs of other hosts reach it where NVLink
    /// joins them.
    ///
    /// # Errors
    /// [`GpuError::System`] if this GPU or its driver has no such handles; [`GpuError::Driver`] if
    /// there is not enough memory, or the process has no channel of NVIDIA's IMEX service.
    pub fn in_fabric(context: &'static Context, len_bytes: usize) -> Result<Self, GpuError> {
        let fabric = FabricMemory::new(context, len_bytes)?;
        Ok(Self { context, address: fabric.address(), len_bytes, fabric: Some(fabric) })
    }

    /// The handle by which other processes of the NVLink domain open it; `None` unless it was made
    /// by [`Self::in_fabric`].
    pub fn fabric_export(&self) -> Option<FabricExport> {
        self.fabric.as_ref().map(FabricMemory::export)
    }

    /// Lets another GPU of this process reach it.
    ///
    /// # Errors
    /// [`GpuError::NoPeerAccess`] or [`GpuError::Driver`] if that GPU cannot.
    pub fn allow_peer(&self, peer: &'static Context) -> Result<(), GpuError> {
        match &self.fabric {
            Some(fabric) => fabric.allow_peer(peer),
            None => peer.enable_peer(self.context),
        }
    }

    /// Its address, for the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The context of the GPU that the memory is on.
    pub fn context(&self) -> &'static Context {
        self.context
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Some(fabric) = self.fabric.take() {
            reaper::later_than_work(self.context, fabric);
            return;
        }
        let address = self.address;
        // SAFETY: taken by this; the driver waits for work that uses it.
        reaper::later(self.context, move |driver| unsafe { (driver.memory_free)(address) }, None);
    }
}

/// Managed memory, which moves between host and GPU when one of them touches it.
#[derive(Debug)]
pub struct ManagedBuffer(DeviceBuffer);

impl ManagedBuffer {
    /// Allocates memory.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses.
    pub fn new(context: &'static Context, len_bytes: usize) -> Result<Self, GpuError> {
        let _current = context.make_current()?;
        let (mut address, allocate) = (0, context.driver().memory_allocate_managed);
        // SAFETY: the pointer is to a live address.
        let code = unsafe { allocate(&raw mut address, len_bytes, ATTACH_GLOBAL) };
        context.check(code, format_args!("taking {len_bytes} bytes of managed memory"))?;
        Ok(Self(DeviceBuffer { context, address, len_bytes, fabric: None }))
    }

    /// Its address, for the CPU and for GPUs.
    pub fn address(&self) -> u64 {
        self.0.address
    }
}

/// Memory from a GPU's default pool, as `cudaMallocAsync` allocates it.
#[derive(Debug)]
pub struct PoolBuffer<'a> {
    stream: &'a Stream,
    address: u64,
}

impl<'a> PoolBuffer<'a> {
    /// Allocates memory, in the order of the stream.
    ///
    /// # Errors
    /// [`GpuError::Missing`] if the driver is too old, [`GpuError::Driver`] if it refuses.
    pub fn new(stream: &'a Stream, len_bytes: usize) -> Result<Self, GpuError> {
        let context = stream.context();
        let allocate = Driver::need(context.driver().pool_allocate, "cuMemAllocAsync")?;
        Driver::need(context.driver().pool_free, "cuMemFreeAsync")?;
        let _current = context.make_current()?;
        let mut address = 0;
        // SAFETY: the pointer is to a live address, and the stream lives.
        let code = unsafe { allocate(&raw mut address, len_bytes, stream.raw()) };
        context.check(code, format_args!("taking {len_bytes} bytes of the pool"))?;
        Ok(Self { stream, address })
    }

    /// Its address, for the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for PoolBuffer<'_> {
    fn drop(&mut self) {
        self.stream.context().quietly(|driver| match driver.pool_free {
            // SAFETY: allocated by this, and freed after everything that is on the stream.
            Some(free) => unsafe { free(self.address, self.stream.raw()) },
            None => 0,
        });
    }
}

/// Locked host memory, which every GPU of this process can reach at the same address.
#[derive(Debug)]
pub struct PinnedBuffer {
    pages: Pages,
    start: NonNull<u8>,
    len_bytes: usize,
}

/// The owner of the pages.
#[derive(Debug)]
enum Pages {
    /// The driver, which frees them.
    Driver(&'static Context),
    /// This process. The registration that locks the pages keeps them.
    Own { _locked: HostRegistration },
}

// SAFETY: it owns plain memory, which is reached through raw pointers or through a borrow of this.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates memory, page-aligned and zeroed, on the NUMA node from which the calling thread's
    /// memory comes.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses, for example because no more memory may be
    /// locked.
    pub fn new(context: &'static Context, len_bytes: usize) -> Result<Self, GpuError> {
        let _current = context.make_current()?;
        let mut start = std::ptr::null_mut();
        let flags = HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED;
        // SAFETY: the pointer is to a live pointer.
        let code = unsafe { (context.driver().host_allocate)(&raw mut start, len_bytes, flags) };
        let doing = format_args!("locking {len_bytes} bytes of host memory");
        context.check(code, doing)?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(GpuError::System {
                doing: doing.to_string(),
                reason: "the driver gave none".to_owned(),
            });
        };
        // SAFETY: that many bytes were just given to this.
        unsafe { start.write_bytes(0, len_bytes) };
        Ok(Self { pages: Pages::Driver(context), start, len_bytes })
    }

    /// Like [`Self::new`], but on the NUMA node of the context's GPU, if the kernel names that node
    /// and lets this process choose it. Data staged for the GPU then does not cross between
    /// sockets.
    ///
    /// # Errors
    /// [`GpuError::System`] if there is no memory, [`GpuError::Driver`] if the driver does not lock
    /// it.
    pub fn near(context: &'static Context, len_bytes: usize) -> Result<Self, GpuError> {
        let Some(node) = context.device().numa_node() else {
            return Self::new(context, len_bytes);
        };
        let memory = NodeMemory::new(len_bytes, Some(node)).map_err(|error| GpuError::System {
            doing: format!("taking {len_bytes} bytes of host memory on node {node}"),
            reason: error.to_string(),
        })?;
        let start = memory.start();
        let address = start.addr().get() as u64;
        let mapped_bytes = memory.mapped_bytes();
        // SAFETY: mapped for as long as the memory lives, which the registration keeps.
        let locked = unsafe { HostRegistration::new(context, address, mapped_bytes, memory)? };
        Ok(Self { pages: Pages::Own { _locked: locked }, start, len_bytes })
    }

    /// Its address, for the CPU and for GPUs.
    pub fn address(&self) -> u64 {
        self.start.addr().get() as u64
    }

    /// A pointer to its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Its bytes.
    ///
    /// # Safety
    /// Neither a GPU nor other code may write to it while the slice lives.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: memory of this length, initialised by `new`; the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// Neither a GPU nor other code may read or write it while the slice lives.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: memory of this length, initialised by `new`; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // Our own pages are freed with their registration.
        let Pages::Driver(context) = &self.pages else { return };
        let start = self.address();
        let free = move |driver: &Driver| {
            // SAFETY: taken by this; the driver waits for work that uses it.
            unsafe { (driver.host_free)(start as usize as *mut c_void) }
        };
        reaper::later(context, free, None);
    }
}

/// Host memory that is locked while this lives. Every GPU of this process can reach it at the same
/// address.
#[derive(Debug)]
pub struct HostRegistration {
    context: &'static Context,
    address: u64,
    memory: Option<MemoryOwner>,
}

/// The owner of locked memory, which keeps it mapped.
struct MemoryOwner(Box<dyn Send + Sync>);

impl fmt::Debug for MemoryOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryOwner(..)")
    }
}

impl HostRegistration {
    /// Locks memory that `memory` keeps mapped. `memory` is dropped some time after this is, when
    /// the driver has unlocked it.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses: the memory is locked already or cannot be
    /// locked.
    ///
    /// # Safety
    /// The range must be mapped, and stay mapped until `memory` is dropped.
    pub unsafe fn new(
        context: &'static Context,
        address: u64,
        len_bytes: usize,
        memory: impl Send + Sync + 'static,
    ) -> Result<Self, GpuError> {
        let _current = context.make_current()?;
        let flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED;
        let start = address as usize as *mut c_void;
        // SAFETY: the caller's promise.
        let code = unsafe { (context.driver().host_register)(start, len_bytes, flags) };
        context.check(code, format_args!("locking {len_bytes} bytes at {address:#x}"))?;
        Ok(Self { context, address, memory: Some(MemoryOwner(Box::new(memory))) })
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        let address = self.address;
        let unlock = move |driver: &Driver| {
            // SAFETY: locked by this, and still mapped, as promised to `new`. The driver waits for
            // work that uses it.
            unsafe { (driver.host_unregister)(address as usize as *mut c_void) }
        };
        let memory = self.memory.take().map(|kept| kept.0 as Box<dyn Send>);
        reaper::later(self.context, unlock, memory);
    }
}
