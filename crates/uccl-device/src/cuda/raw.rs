//! The driver's types and constants, as in `cuda.h` (CUDA 13.0; none has changed since 11.2).

use std::ffi::c_void;

/// `CUresult`.
pub(crate) type Code = i32;
/// `CUdevice`.
pub(crate) type DeviceId = i32;
/// `CUdeviceptr`.
pub(crate) type DevicePtr = u64;
/// `CUmemGenericAllocationHandle`.
pub(crate) type AllocationHandle = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`.
pub(crate) type Handle = *mut c_void;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const NOT_INITIALISED: Code = 3;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
pub(crate) const NOT_SUPPORTED: Code = 801;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;

/// `CUdevice_attribute`.
pub(crate) mod device_attribute {
    pub(crate) const MULTIPROCESSORS: i32 = 16;
    pub(crate) const PCI_BUS: i32 = 33;
    pub(crate) const PCI_DEVICE: i32 = 34;
    pub(crate) const COPY_ENGINES: i32 = 40;
    pub(crate) const PCI_DOMAIN: i32 = 50;
    pub(crate) const CAPABILITY_MAJOR: i32 = 75;
    pub(crate) const CAPABILITY_MINOR: i32 = 76;
    pub(crate) const FLUSHES_IN_STREAMS: i32 = 98;
    pub(crate) const EXPORTS_FILE_DESCRIPTORS: i32 = 103;
    pub(crate) const FLUSH_OPTIONS: i32 = 117;
    pub(crate) const WRITES_ORDERING: i32 = 118;
    pub(crate) const EXPORTS_FABRIC_HANDLES: i32 = 128;
}

/// `CUdevice_P2PAttribute`.
pub(crate) mod peer_attribute {
    pub(crate) const NATIVE_ATOMICS: i32 = 3;
}

/// `CUpointer_attribute`.
pub(crate) mod pointer_attribute {
    pub(crate) const MEMORY_TYPE: i32 = 2;
    pub(crate) const BUFFER_ID: i32 = 7;
    pub(crate) const IS_MANAGED: i32 = 8;
    pub(crate) const DEVICE_ORDINAL: i32 = 9;
    pub(crate) const LEGACY_IPC_CAPABLE: i32 = 10;
    pub(crate) const RANGE_START: i32 = 11;
    pub(crate) const RANGE_SIZE: i32 = 12;
    pub(crate) const MAPPED: i32 = 13;
    pub(crate) const ALLOWED_HANDLE_TYPES: i32 = 14;
    pub(crate) const MEMPOOL_HANDLE: i32 = 17;
    pub(crate) const MAPPING_SIZE: i32 = 18;
    pub(crate) const MAPPING_BASE: i32 = 19;
    pub(crate) const MEMORY_BLOCK_ID: i32 = 20;
}

/// `CUmemorytype`.
pub(crate) mod memory_type {
    pub(crate) const HOST: u32 = 1;
    pub(crate) const DEVICE: u32 = 2;
    pub(crate) const UNIFIED: u32 = 4;
}

/// Lets a thread do anything while another thread records a graph.
pub(crate) const CAPTURE_MODE_RELAXED: i32 = 2;
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
pub(crate) const HOST_ALLOC_PORTABLE: u32 = 1;
pub(crate) const HOST_ALLOC_MAPPED: u32 = 2;
pub(crate) const HOST_REGISTER_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_MAPPED: u32 = 2;
pub(crate) const IPC_LAZY_PEER_ACCESS: u32 = 1;
pub(crate) const ATTACH_GLOBAL: u32 = 1;

pub(crate) const HANDLE_TYPE_NONE: i32 = 0;
pub(crate) const HANDLE_TYPE_FD: i32 = 1;
pub(crate) const HANDLE_TYPE_FABRIC: i32 = 8;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
pub(crate) const RANGE_HANDLE_DMA_BUF: i32 = 1;
pub(crate) const LOCATION_DEVICE: i32 = 1;
pub(crate) const ALLOCATION_PINNED: i32 = 1;
pub(crate) const ACCESS_READ_WRITE: i32 = 3;
pub(crate) const GRANULARITY_MINIMUM: i32 = 0;

pub(crate) const SOURCE_IN_STREAM_ORDER: i32 = 1;

pub(crate) const JIT_ERROR_LOG: i32 = 5;
pub(crate) const JIT_ERROR_LOG_BYTES: i32 = 6;

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Uuid(pub(crate) [u8; 16]);

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcMemHandle(pub(crate) [u8; 64]);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct MemLocation {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemAllocationProp {
    pub(crate) kind: i32,
    pub(crate) requested_handle_types: i32,
    pub(crate) location: MemLocation,
    pub(crate) win32_metadata: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) gpu_direct_rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

impl MemAllocationProp {
    /// Memory of a device, exportable as `handle_types` says.
    pub(crate) fn on_device(device: DeviceId, handle_types: i32) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            requested_handle_types: handle_types,
            location: MemLocation { kind: LOCATION_DEVICE, id: device },
            win32_metadata: std::ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemAccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: i32,
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) stream: Handle,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) count: u32,
}

/// `CUlaunchAttribute`: an identifier, and a value of 64 bytes, of which the first is an `int`
/// here.
#[repr(C)]
pub(crate) struct LaunchAttribute {
    pub(crate) kind: i32,
    pub(crate) zero: u32,
    pub(crate) value: i32,
    pub(crate) rest: [u32; 15],
}

impl LaunchAttribute {
    /// All blocks of the launch begin together, or none does.
    pub(crate) const COOPERATIVE: Self = Self { kind: 2, zero: 0, value: 1, rest: [0; 15] };
}

/// `CUdevResource`, with room for fields of later drivers.
#[repr(C)]
pub(crate) struct DevResource {
    pub(crate) kind: i32,
    pub(crate) padding: [u8; 92],
    pub(crate) multiprocessors: u32,
    pub(crate) rest: [u32; 103],
}

impl DevResource {
    pub(crate) const NONE: Self =
        Self { kind: 0, padding: [0; 92], multiprocessors: 0, rest: [0; 103] };
}

/// `CU_DEV_RESOURCE_TYPE_SM`.
pub(crate) const RESOURCE_MULTIPROCESSORS: i32 = 1;

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemcpyAttributes {
    pub(crate) source_order: i32,
    pub(crate) source_hint: MemLocation,
    pub(crate) destination_hint: MemLocation,
    pub(crate) flags: u32,
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    /// The numbers are `sizeof` and `offsetof` of the C compiler over `cuda.h` for x86-64 and
    /// arm64.
    #[test]
    fn structs_are_laid_out_as_in_c() {
        assert_eq!((size_of::<Uuid>(), align_of::<Uuid>()), (16, 1));
        assert_eq!((size_of::<IpcMemHandle>(), align_of::<IpcMemHandle>()), (64, 1));
        assert_eq!((size_of::<MemLocation>(), align_of::<MemLocation>()), (8, 4));
        assert_eq!((size_of::<MemAllocationProp>(), align_of::<MemAllocationProp>()), (32, 8));
        assert_eq!(offset_of!(MemAllocationProp, requested_handle_types), 4);
        assert_eq!(offset_of!(MemAllocationProp, location), 8);
        assert_eq!(offset_of!(MemAllocationProp, win32_metadata), 16);
        assert_eq!(offset_of!(MemAllocationProp, compression), 24);
        assert_eq!(offset_of!(MemAllocationProp, usage), 26);
        assert_eq!((size_of::<MemAccessDesc>(), offset_of!(MemAccessDesc, flags)), (12, 8));
        assert_eq!((size_of::<MemcpyAttributes>(), offset_of!(MemcpyAttributes, flags)), (24, 20));
    }
}
