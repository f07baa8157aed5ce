//! The driver's entry points, found at run time.
//!
//! One table serves both vendors: each entry has CUDA's name and HIP's, with the same arguments.
//! Entries that only CUDA or only newer drivers have are optional. Where one is missing, the code
//! takes another path or fails with
//! [`GpuError::Missing`].

use std::{
    error::Error as _,
    ffi::{CStr, c_char, c_void},
    fmt, ptr,
};

use libloading::Library;

use super::{
    error::{DriverError, Failure, GpuError},
    raw::{self, *},
};

/// The vendor of a driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Vendor {
    /// NVIDIA: `libcuda.so.1`.
    Cuda,
    /// AMD: `libamdhip64.so`. Its entry points are listed and looked up, but nothing has been run
    /// on it. Its numbers for device attributes differ from CUDA's, so [`super::Gpus`] does not use
    /// it yet.
    Hip,
}

impl Vendor {
    /// The names under which the library is looked for.
    pub(crate) fn libraries(self) -> &'static [&'static str] {
        match self {
            Self::Cuda => &["libcuda.so.1", "libcuda.so"],
            Self::Hip => &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"],
        }
    }
}

/// An entry's name in HIP: `_` where HIP has none of the same shape.
macro_rules! name_in_hip {
    (_) => {
        None
    };
    ($name:literal) => {
        Some($name)
    };
}

macro_rules! entry_points {
    (
        required { $( $name:ident ( $($type:ty),* ) = $cuda:literal, $hip:tt; )* }
        optional { $( $maybe:ident ( $($maybe_type:ty),* ) = $maybe_cuda:literal, $maybe_hip:tt; )* }
    ) => {
        /// The functions found in a driver's library, which stays loaded.
        pub(crate) struct Driver {
            $( pub(crate) $name: unsafe extern "C" fn($($type),*) -> Code, )*
            $( pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_type),*) -> Code>, )*
            _library: Library,
        }

        impl Driver {
            fn find_all(library: Library, vendor: Vendor) -> Result<Self, String> {
                Ok(Self {
                    $( $name: {
                        let name = choose(vendor, $cuda, name_in_hip!($hip));
                        // SAFETY: the type is that of the function in the vendor's public header.
                        unsafe { find(&library, name) }
                            .ok_or_else(|| format!("it has no {}", name.unwrap_or($cuda)))?
                    }, )*
                    $( $maybe: {
                        let name = choose(vendor, $maybe_cuda, name_in_hip!($maybe_hip));
                        // SAFETY: as above.
                        unsafe { find(&library, name) }
                    }, )*
                    _library: library,
                })
            }

            #[cfg(test)]
            fn names(vendor: Vendor) -> Vec<(Option<&'static str>, bool)> {
                vec![
                    $( (choose(vendor, $cuda, name_in_hip!($hip)), true), )*
                    $( (choose(vendor, $maybe_cuda, name_in_hip!($maybe_hip)), false), )*
                ]
            }
        }
    };
}

fn choose(vendor: Vendor, cuda: &'static str, hip: Option<&'static str>) -> Option<&'static str> {
    match vendor {
        Vendor::Cuda => Some(cuda),
        Vendor::Hip => hip,
    }
}

/// # Safety
/// `F` must be the function pointer type of the function with this name.
unsafe fn find<F: Copy>(library: &Library, name: Option<&str>) -> Option<F> {
    // SAFETY: the caller's promise; the pointer is used as long as the library stays loaded.
    unsafe { library.get::<F>(name?) }.ok().map(|symbol| *symbol)
}

entry_points! {
    required {
        init(u32) = "cuInit", "hipInit";
        driver_version(*mut i32) = "cuDriverGetVersion", "hipDriverGetVersion";
        error_name(Code, *mut *const c_char) = "cuGetErrorName", "hipDrvGetErrorName";
        error_text(Code, *mut *const c_char) = "cuGetErrorString", "hipDrvGetErrorString";
        device_count(*mut i32) = "cuDeviceGetCount", "hipGetDeviceCount";
        device_get(*mut DeviceId, i32) = "cuDeviceGet", "hipDeviceGet";
        device_name(*mut c_char, i32, DeviceId) = "cuDeviceGetName", "hipDeviceGetName";
        device_total_memory(*mut usize, DeviceId) = "cuDeviceTotalMem_v2", "hipDeviceTotalMem";
        device_attribute(*mut i32, i32, DeviceId) =
            "cuDeviceGetAttribute", "hipDeviceGetAttribute";
        device_can_access_peer(*mut i32, DeviceId, DeviceId) =
            "cuDeviceCanAccessPeer", "hipDeviceCanAccessPeer";
        primary_context_retain(*mut Handle, DeviceId) =
            "cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain";
        primary_context_state(DeviceId, *mut u32, *mut i32) =
            "cuDevicePrimaryCtxGetState", "hipDevicePrimaryCtxGetState";
        context_get_current(*mut Handle) = "cuCtxGetCurrent", "hipCtxGetCurrent";
        context_push(Handle) = "cuCtxPushCurrent_v2", "hipCtxPushCurrent";
        context_pop(*mut Handle) = "cuCtxPopCurrent_v2", "hipCtxPopCurrent";
        exchange_capture_mode(*mut i32) =
            "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode";
        context_synchronize() = "cuCtxSynchronize", "hipCtxSynchronize";
        context_enable_peer_access(Handle, u32) =
            "cuCtxEnablePeerAccess", "hipCtxEnablePeerAccess";
        context_priorities(*mut i32, *mut i32) =
            "cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange";
        pointer_attributes(u32, *const i32, *const *mut c_void, DevicePtr) =
            "cuPointerGetAttributes", "hipDrvPointerGetAttributes";
        address_range(*mut DevicePtr, *mut usize, DevicePtr) =
            "cuMemGetAddressRange_v2", "hipMemGetAddressRange";
        memory_allocate(*mut DevicePtr, usize) = "cuMemAlloc_v2", "hipMalloc";
        memory_free(DevicePtr) = "cuMemFree_v2", "hipFree";
        memory_allocate_managed(*mut DevicePtr, usize, u32) =
            "cuMemAllocManaged", "hipMallocManaged";
        memory_info(*mut usize, *mut usize) = "cuMemGetInfo_v2", "hipMemGetInfo";
        memory_set(DevicePtr, u8, usize, Handle) = "cuMemsetD8Async", "hipMemsetD8Async";
        host_allocate(*mut *mut c_void, usize, u32) = "cuMemHostAlloc", "hipHostMalloc";
        host_free(*mut c_void) = "cuMemFreeHost", "hipHostFree";
        host_register(*mut c_void, usize, u32) = "cuMemHostRegister_v2", "hipHostRegister";
        host_unregister(*mut c_void) = "cuMemHostUnregister", "hipHostUnregister";
        copy_device_to_device(DevicePtr, DevicePtr, usize, Handle) =
            "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync";
        copy_host_to_device(DevicePtr, *const c_void, usize, Handle) =
            "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync";
        copy_device_to_host(*mut c_void, DevicePtr, usize, Handle) =
            "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync";
        ipc_export(*mut IpcMemHandle, DevicePtr) = "cuIpcGetMemHandle", "hipIpcGetMemHandle";
        ipc_open(*mut DevicePtr, IpcMemHandle, u32) =
            "cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle";
        ipc_close(DevicePtr) = "cuIpcCloseMemHandle", "hipIpcCloseMemHandle";
        stream_create(*mut Handle, u32, i32) =
            "cuStreamCreateWithPriority", "hipStreamCreateWithPriority";
        stream_destroy(Handle) = "cuStreamDestroy_v2", "hipStreamDestroy";
        stream_query(Handle) = "cuStreamQuery", "hipStreamQuery";
        stream_synchronize(Handle) = "cuStreamSynchronize", "hipStreamSynchronize";
        stream_wait_event(Handle, Handle, u32) = "cuStreamWaitEvent", "hipStreamWaitEvent";
        event_create(*mut Handle, u32) = "cuEventCreate", "hipEventCreateWithFlags";
        event_destroy(Handle) = "cuEventDestroy_v2", "hipEventDestroy";
        event_record(Handle, Handle) = "cuEventRecord", "hipEventRecord";
        event_query(Handle) = "cuEventQuery", "hipEventQuery";
        event_synchronize(Handle) = "cuEventSynchronize", "hipEventSynchronize";
        module_load(*mut Handle, *const c_void, u32, *mut i32, *mut *mut c_void) =
            "cuModuleLoadDataEx", "hipModuleLoadDataEx";
        module_unload(Handle) = "cuModuleUnload", "hipModuleUnload";
        module_function(*mut Handle, Handle, *const c_char) =
            "cuModuleGetFunction", "hipModuleGetFunction";
        launch(
            Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void
        ) = "cuLaunchKernel", "hipModuleLaunchKernel";
    }
    optional {
        device_uuid_v2(*mut Uuid, DeviceId) = "cuDeviceGetUuid_v2", "hipDeviceGetUuid";
        device_uuid(*mut Uuid, DeviceId) = "cuDeviceGetUuid", "hipDeviceGetUuid";
        device_peer_attribute(*mut i32, i32, DeviceId, DeviceId) =
            "cuDeviceGetP2PAttribute", "hipDeviceGetP2PAttribute";
        copy_between_contexts(DevicePtr, Handle, DevicePtr, Handle, usize, Handle) =
            "cuMemcpyPeerAsync", _;
        copy_batch_v2(
            *const DevicePtr, *const DevicePtr, *const usize, usize,
            *const MemcpyAttributes, *const usize, usize, Handle
        ) = "cuMemcpyBatchAsync_v2", _;
        copy_batch_v1(
            *const DevicePtr, *const DevicePtr, *const usize, usize,
            *const MemcpyAttributes, *const usize, usize, *mut usize, Handle
        ) = "cuMemcpyBatchAsync", _;
        vmm_create(*mut AllocationHandle, usize, *const MemAllocationProp, u64) =
            "cuMemCreate", "hipMemCreate";
        vmm_release(AllocationHandle) = "cuMemRelease", "hipMemRelease";
        vmm_retain(*mut AllocationHandle, *mut c_void) =
            "cuMemRetainAllocationHandle", "hipMemRetainAllocationHandle";
        vmm_properties(*mut MemAllocationProp, AllocationHandle) =
            "cuMemGetAllocationPropertiesFromHandle", "hipMemGetAllocationPropertiesFromHandle";
        vmm_granularity(*mut usize, *const MemAllocationProp, i32) =
            "cuMemGetAllocationGranularity", "hipMemGetAllocationGranularity";
        vmm_export(*mut c_void, AllocationHandle, i32, u64) =
            "cuMemExportToShareableHandle", "hipMemExportToShareableHandle";
        vmm_import(*mut AllocationHandle, *mut c_void, i32) =
            "cuMemImportFromShareableHandle", "hipMemImportFromShareableHandle";
        vmm_reserve(*mut DevicePtr, usize, usize, DevicePtr, u64) =
            "cuMemAddressReserve", "hipMemAddressReserve";
        vmm_unreserve(DevicePtr, usize) = "cuMemAddressFree", "hipMemAddressFree";
        vmm_map(DevicePtr, usize, usize, AllocationHandle, u64) = "cuMemMap", "hipMemMap";
        vmm_unmap(DevicePtr, usize) = "cuMemUnmap", "hipMemUnmap";
        vmm_set_access(DevicePtr, usize, *const MemAccessDesc, usize) =
            "cuMemSetAccess", "hipMemSetAccess";
        range_handle(*mut c_void, DevicePtr, usize, i32, u64) =
            "cuMemGetHandleForAddressRange", "hipMemGetHandleForAddressRange";
        stream_wait_value(Handle, DevicePtr, u32, u32) = "cuStreamWaitValue32_v2", _;
        stream_wait_value_64(Handle, DevicePtr, u64, u32) = "cuStreamWaitValue64_v2", _;
        launch_with(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void) =
            "cuLaunchKernelEx", _;
        function_load(Handle) = "cuFuncLoad", _;
        stream_green_context(Handle, *mut Handle) = "cuStreamGetGreenCtx", _;
        context_resource(Handle, *mut DevResource, i32) = "cuCtxGetDevResource", _;
        green_context_resource(Handle, *mut DevResource, i32) = "cuGreenCtxGetDevResource", _;
        flush_writes(i32, i32) = "cuFlushGPUDirectRDMAWrites", _;
        pool_allocate(*mut DevicePtr, usize, Handle) = "cuMemAllocAsync", "hipMallocAsync";
        pool_free(DevicePtr, Handle) = "cuMemFreeAsync", "hipFreeAsync";
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("version", &self.version()).finish_non_exhaustive()
    }
}

impl Driver {
    /// Loads the first of `libraries` that can be loaded, and initialises the driver.
    ///
    /// # Errors
    /// The reason why no driver can be used.
    pub(crate) fn load(vendor: Vendor, libraries: &[&str]) -> Result<Self, DriverError> {
        let mut reasons = Vec::new();
        for name in libraries {
            // SAFETY: the vendor's driver; its initialisers may run in any process.
            match unsafe { Library::new(*name) } {
                Ok(library) => {
                    let library_name = || (*name).to_owned();
                    let driver = Self::find_all(library, vendor).map_err(|reason| {
                        DriverError::Incomplete { library: library_name(), reason }
                    })?;
                    driver.initialise().map_err(|failure| {
                        let version = driver.version();
                        DriverError::Refused { library: library_name(), failure, version }
                    })?;
                    return Ok(driver);
                }
                Err(error) => {
                    let said = error.source().map_or_else(|| error.to_string(), |e| e.to_string());
                    reasons.push(if said.contains(name) {
                        said
                    } else {
                        format!("{name}: {said}")
                    });
                }
            }
        }
        let first = reasons.into_iter().next();
        Err(DriverError::NoLibrary(first.unwrap_or_else(|| "no library was named".to_owned())))
    }

    fn initialise(&self) -> Result<(), Failure> {
        // SAFETY: it takes flags; 0 sets none.
        let code = unsafe { (self.init)(0) };
        if code == SUCCESS { Ok(()) } else { Err(self.failure(code)) }
    }

    /// The CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub(crate) fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        unsafe { (self.driver_version)(&raw mut version) };
        version
    }

    /// The driver's name and text for a code.
    pub(crate) fn failure(&self, code: Code) -> Failure {
        Failure {
            code,
            name: words(self.error_name, code).unwrap_or("an unknown error"),
            text: words(self.error_text, code).unwrap_or("the driver does not say more"),
        }
    }

    /// Turns a code other than success into an error.
    pub(crate) fn check(&self, code: Code, doing: fmt::Arguments<'_>) -> Result<(), GpuError> {
        if code == raw::SUCCESS {
            return Ok(());
        }
        Err(GpuError::of(self.failure(code), doing))
    }

    /// An optional entry, or the error that reports it as missing.
    pub(crate) fn need<F: Copy>(entry: Option<F>, name: &'static str) -> Result<F, GpuError> {
        entry.ok_or(GpuError::Missing { entry: name })
    }
}

/// The text that one of the driver's two functions returns for a code.
fn words(
    say: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
    code: Code,
) -> Option<&'static str> {
    let mut text = ptr::null();
    // SAFETY: the pointer is to a live pointer, which is set to a constant of the driver or to
    // null.
    let found = unsafe { say(code, &raw mut text) } == SUCCESS && !text.is_null();
    if !found {
        return None;
    }
    // SAFETY: not null; a string constant that ends with 0, in a library that is never unloaded.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_library_that_is_missing_is_a_reason() {
        for vendor in [Vendor::Cuda, Vendor::Hip] {
            let reason = Driver::load(vendor, &["libno-such-driver.so.1"])
                .expect_err("not there")
                .to_string();
            assert!(reason.contains("libno-such-driver.so.1"), "{reason}");
            assert!(!vendor.libraries().is_empty());
        }
        assert!(Driver::load(Vendor::Cuda, &[]).is_err());
    }

    #[test]
    fn a_library_that_is_no_driver_is_a_reason() {
        let reason = Driver::load(Vendor::Cuda, &["libc.so.6"]).expect_err("no driver").to_string();
        assert_eq!(reason, "libc.so.6 cannot be used: it has no cuInit");
        let reason = Driver::load(Vendor::Hip, &["libc.so.6"]).expect_err("no driver").to_string();
        assert_eq!(reason, "libc.so.6 cannot be used: it has no hipInit");
    }

    #[test]
    fn every_entry_has_a_name_of_its_vendors() {
        for (vendor, prefix) in [(Vendor::Cuda, "cu"), (Vendor::Hip, "hip")] {
            let names = Driver::names(vendor);
            assert!(names.iter().all(|(name, required)| name.is_some() || !required));
            let names: Vec<_> = names.into_iter().filter_map(|(name, _)| name).collect();
            assert!(names.iter().all(|name| name.starts_with(prefix)), "{names:?}");
            let distinct: HashSet<_> = names.iter().collect();
            // HIP has one function for a UUID where CUDA has two.
            assert!(names.len() - distinct.len() <= usize::from(vendor == Vendor::Hip));
        }
    }
}
