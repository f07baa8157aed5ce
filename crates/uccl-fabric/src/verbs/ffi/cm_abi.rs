//! The structs of librdmacm's interface, as its public header lays them out. A test compares them with it.

use std::ffi::{c_int, c_uint, c_void};

use super::abi::{Context, Qp};

/// `struct rdma_event_channel`.
#[repr(C)]
pub(crate) struct EventChannel {
    pub(crate) fd: c_int,
}

/// `struct rdma_cm_id`, as far as it is used.
#[repr(C)]
pub(crate) struct CmId {
    /// The device that it is bound to, opened by the library for itself.
    pub(crate) verbs: *mut Context,
    pub(crate) channel: *mut EventChannel,
    pub(crate) context: *mut c_void,
    /// Only what the library makes itself.
    pub(crate) qp: *mut Qp,
}

/// `RDMA_PS_TCP`: reliable connections.
pub(crate) const PS_TCP: c_int = 0x0106;

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConnParam {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

/// `struct rdma_cm_event`, of whose union only what connections use is named.
#[repr(C)]
pub(crate) struct CmEvent {
    pub(crate) id: *mut CmId,
    pub(crate) listen_id: *mut CmId,
    pub(crate) event: c_uint,
    pub(crate) status: c_int,
    pub(crate) param: ConnParam,
}

/// `enum rdma_cm_event_type`, as far as it matters.
pub(crate) mod cm_event {
    pub(crate) const ADDR_RESOLVED: u32 = 0;
    pub(crate) const ADDR_ERROR: u32 = 1;
    pub(crate) const ROUTE_RESOLVED: u32 = 2;
    pub(crate) const ROUTE_ERROR: u32 = 3;
    pub(crate) const CONNECT_REQUEST: u32 = 4;
    pub(crate) const CONNECT_ERROR: u32 = 6;
    pub(crate) const UNREACHABLE: u32 = 7;
    pub(crate) const REJECTED: u32 = 8;
    pub(crate) const ESTABLISHED: u32 = 9;
    pub(crate) const DISCONNECTED: u32 = 10;
    pub(crate) const DEVICE_REMOVAL: u32 = 11;
    pub(crate) const ADDR_CHANGE: u32 = 14;
    pub(crate) const TIMEWAIT_EXIT: u32 = 15;
}
