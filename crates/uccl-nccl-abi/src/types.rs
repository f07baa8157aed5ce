//! Types that all tables share.

use std::{
    ffi::{c_char, c_int, c_ulong, c_void},
    fmt,
};

/// `ncclResult_t`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct NcclResult(pub c_int);

impl NcclResult {
    /// The call did its work.
    pub const SUCCESS: Self = Self(0);
    /// The operating system or a device failed.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// NCCL or the plugin broke a rule of the interface.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// An argument is out of its range.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// The user made a mistake, as a message that is longer than its receive.
    pub const INVALID_USAGE: Self = Self(5);
    /// The peer or the network failed.
    pub const REMOTE_ERROR: Self = Self(6);

    /// The constant's name in NCCL.
    pub fn name(self) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            _ => "a result that NCCL does not know",
        }
    }
}

impl fmt::Display for NcclResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

/// NCCL's function for log lines: level, subsystems, file, line, format and its arguments.
pub type Logger = Option<
    unsafe extern "C" fn(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    ),
>;

/// NCCL's function for profiler events: handle, type, parent, plugin's id, data.
pub type Profiler = Option<
    unsafe extern "C" fn(*mut *mut c_void, c_int, *mut c_void, i64, *mut c_void) -> NcclResult,
>;

/// Levels of log lines.
pub mod level {
    use std::ffi::c_int;

    /// Failures.
    pub const WARN: c_int = 2;
    /// Choices.
    pub const INFO: c_int = 3;
    /// Single operations.
    pub const TRACE: c_int = 5;
}

/// Subsystems of log lines (`NCCL_DEBUG_SUBSYS`).
pub mod flags {
    use std::ffi::c_ulong;

    /// Start and end of communicators.
    pub const INIT: c_ulong = 0x1;
    /// The network.
    pub const NET: c_ulong = 0x10;
    /// The choice of algorithm and protocol.
    pub const TUNING: c_ulong = 0x40;
    /// All subsystems: failures are shown under each.
    pub const ALL: c_ulong = !0;
}

/// Kinds of memory: bits of `ptrSupport`, and the `type` of a registration.
pub mod memory {
    use std::ffi::c_int;

    /// Memory of the host.
    pub const HOST: c_int = 1;
    /// Memory of a GPU.
    pub const CUDA: c_int = 2;
    /// Memory that a dma-buf names.
    pub const DMABUF: c_int = 4;
}

/// The length of a listen handle in bytes.
pub const HANDLE_BYTES: usize = 128;
/// The most requests of one communicator in flight (`NCCL_NET_MAX_REQUESTS`).
pub const MAX_REQUESTS: usize = 32;
/// The value that `*request` has before `irecv` where NCCL does not need the completion
/// (`NCCL_NET_OPTIONAL_RECV_COMPLETION`).
pub const OPTIONAL_RECV_COMPLETION: usize = 1;

/// `ncclNetCommConfig_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommConfig {
    /// -1 if the user has not set one.
    pub traffic_class: c_int,
}

/// Hints on one direction of a communicator's traffic.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetCommAttributes {
    /// The most peers at a time; -1 if unknown, as all fields.
    pub max_concurrent_peers: i32,
    /// The fewest peers at a time.
    pub min_concurrent_peers: i32,
    /// The most flows of a peer.
    pub max_flows_per_peer: i32,
    /// The fewest flows of a peer.
    pub min_flows_per_peer: i32,
}

/// `ncclNetAttr_t`: hints on the traffic to come.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetAttributes {
    /// Of sends.
    pub send: NetCommAttributes,
    /// Of receives.
    pub recv: NetCommAttributes,
    /// A bit mask of operations.
    pub op: u32,
    /// A bit mask of algorithms.
    pub algo: u32,
    /// A bit mask of protocols.
    pub proto: u32,
}

/// `ncclNetDeviceHandle_t`: networks that a GPU drives itself.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceHandle {
    /// 0 for networks of the host.
    pub kind: c_int,
    /// The version of the kind's interface.
    pub version: c_int,
    /// The kind's own data.
    pub handle: *mut c_void,
    /// The length of that data in bytes.
    pub size: usize,
    /// Whether a proxy has to be called all the same.
    pub needs_proxy_progress: c_int,
}

const _: () = {
    assert!(size_of::<NetAttributes>() == 44);
    assert!(size_of::<DeviceHandle>() == 32);
    assert!(size_of::<CommConfig>() == 4);
};
