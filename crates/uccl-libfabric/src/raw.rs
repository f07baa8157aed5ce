//! libfabric's structs and constants, as its public headers have them (1.15 to 2.x).
//!
//! Newer versions add fields at the ends of structs. Structs that the library allocates are read
//! only as far as they are declared here. Structs that we allocate are as long as in the newest
//! version, with zeros in the new fields, which means that those are not used.

use std::ffi::{c_char, c_int, c_void};

/// The newest interface version that we ask for; an older library is asked for its own. Everything
/// that we use is in 1.15, but providers hold features back from programs that ask for an old
/// version: `efa`, for example, its RDMA and GPU memory.
pub(super) const API_VERSION: u32 = 1 << 16 | 22;

pub(super) const FI_MSG: u64 = 1 << 1;
pub(super) const FI_RMA: u64 = 1 << 2;
pub(super) const FI_TAGGED: u64 = 1 << 3;
pub(super) const FI_ATOMIC: u64 = 1 << 4;
pub(super) const FI_READ: u64 = 1 << 8;
pub(super) const FI_WRITE: u64 = 1 << 9;
pub(super) const FI_RECV: u64 = 1 << 10;
pub(super) const FI_TRANSMIT: u64 = 1 << 11;
pub(super) const FI_REMOTE_READ: u64 = 1 << 12;
pub(super) const FI_REMOTE_WRITE: u64 = 1 << 13;
pub(super) const FI_MORE: u64 = 1 << 18;
pub(super) const FI_COMPLETION: u64 = 1 << 24;
pub(super) const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
pub(super) const FI_HMEM: u64 = 1 << 47;
pub(super) const FI_LOCAL_COMM: u64 = 1 << 51;
pub(super) const FI_REMOTE_COMM: u64 = 1 << 52;
pub(super) const FI_RMA_EVENT: u64 = 1 << 56;

/// Mode bits: demands of a provider that we agree to meet.
pub(super) const FI_CONTEXT: u64 = 1 << 59;
pub(super) const FI_RX_CQ_DATA: u64 = 1 << 56;
pub(super) const FI_CONTEXT2: u64 = 1 << 52;

pub(super) const FI_MR_LOCAL: c_int = 1 << 2;
pub(super) const FI_MR_RAW: c_int = 1 << 3;
pub(super) const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub(super) const FI_MR_ALLOCATED: c_int = 1 << 5;
pub(super) const FI_MR_PROV_KEY: c_int = 1 << 6;
pub(super) const FI_MR_RMA_EVENT: c_int = 1 << 8;
pub(super) const FI_MR_ENDPOINT: c_int = 1 << 9;
pub(super) const FI_MR_HMEM: c_int = 1 << 10;

pub(super) const FI_EP_MSG: c_int = 1;
pub(super) const FI_EP_DGRAM: c_int = 2;
pub(super) const FI_EP_RDM: c_int = 3;

pub(super) const FI_THREAD_SAFE: c_int = 1;
pub(super) const FI_THREAD_DOMAIN: c_int = 3;

pub(super) const FI_PROGRESS_AUTO: c_int = 1;
pub(super) const FI_PROGRESS_MANUAL: c_int = 2;

pub(super) const FI_RM_ENABLED: c_int = 2;

/// Formats of endpoint names.
pub(super) const FI_SOCKADDR: u32 = 1;
pub(super) const FI_SOCKADDR_IN: u32 = 2;
pub(super) const FI_SOCKADDR_IN6: u32 = 3;
pub(super) const FI_ADDR_STR: u32 = 9;

pub(super) const FI_BUS_PCI: c_int = 1;
pub(super) const FI_LINK_DOWN: c_int = 1;

/// Commands of `fi_control`.
pub(super) const FI_GETWAIT: c_int = 5;
pub(super) const FI_ENABLE: c_int = 6;
pub(super) const FI_GET_RAW_MR: c_int = 8;
pub(super) const FI_MAP_RAW_MR: c_int = 9;
pub(super) const FI_UNMAP_KEY: c_int = 10;

pub(super) const FI_WAIT_NONE: c_int = 0;
pub(super) const FI_WAIT_FD: c_int = 3;
pub(super) const FI_CQ_FORMAT_CONTEXT: c_int = 1;

pub(super) const FI_HMEM_SYSTEM: c_int = 0;
pub(super) const FI_HMEM_CUDA: c_int = 1;

pub(super) const FI_ADDR_NOTAVAIL: u64 = u64::MAX;

/// libfabric's own error numbers, which follow the system's.
pub(super) const FI_EOTHER: i32 = 256;
pub(super) const FI_ETOOSMALL: i32 = 257;
pub(super) const FI_EAVAIL: i32 = 259;
pub(super) const FI_ENOKEY: i32 = 266;

#[repr(C)]
pub(super) struct Info {
    pub(super) next: *mut Self,
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) addr_format: u32,
    pub(super) src_addrlen: usize,
    pub(super) dest_addrlen: usize,
    pub(super) src_addr: *mut c_void,
    pub(super) dest_addr: *mut c_void,
    pub(super) handle: *mut Fid,
    pub(super) tx_attr: *mut TxAttr,
    pub(super) rx_attr: *mut RxAttr,
    pub(super) ep_attr: *mut EpAttr,
    pub(super) domain_attr: *mut DomainAttr,
    pub(super) fabric_attr: *mut FabricAttr,
    pub(super) nic: *mut Nic,
}

#[repr(C)]
pub(super) struct TxAttr {
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) op_flags: u64,
    pub(super) msg_order: u64,
    pub(super) comp_order: u64,
    pub(super) inject_size: usize,
    pub(super) size: usize,
    pub(super) iov_limit: usize,
    pub(super) rma_iov_limit: usize,
    pub(super) tclass: u32,
}

#[repr(C)]
pub(super) struct RxAttr {
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) op_flags: u64,
    pub(super) msg_order: u64,
    pub(super) comp_order: u64,
    pub(super) total_buffered_recv: usize,
    pub(super) size: usize,
    pub(super) iov_limit: usize,
}

#[repr(C)]
pub(super) struct EpAttr {
    pub(super) kind: c_int,
    pub(super) protocol: u32,
    pub(super) protocol_version: u32,
    pub(super) max_msg_size: usize,
}

#[repr(C)]
pub(super) struct DomainAttr {
    pub(super) domain: *mut Domain,
    pub(super) name: *mut c_char,
    pub(super) threading: c_int,
    pub(super) control_progress: c_int,
    pub(super) data_progress: c_int,
    pub(super) resource_mgmt: c_int,
    pub(super) av_type: c_int,
    pub(super) mr_mode: c_int,
    pub(super) mr_key_size: usize,
    pub(super) cq_data_size: usize,
    pub(super) cq_cnt: usize,
}

#[repr(C)]
pub(super) struct FabricAttr {
    pub(super) fabric: *mut Fabric,
    pub(super) name: *mut c_char,
    pub(super) prov_name: *mut c_char,
    pub(super) prov_version: u32,
    pub(super) api_version: u32,
}

#[repr(C)]
pub(super) struct Nic {
    pub(super) fid: Fid,
    pub(super) device_attr: *mut c_void,
    pub(super) bus_attr: *mut BusAttr,
    pub(super) link_attr: *mut LinkAttr,
    pub(super) prov_attr: *mut c_void,
}

#[repr(C)]
pub(super) struct BusAttr {
    pub(super) kind: c_int,
    /// A union in C; PCI is the only kind of bus.
    pub(super) pci: PciAttr,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PciAttr {
    pub(super) domain_id: u16,
    pub(super) bus_id: u8,
    pub(super) device_id: u8,
    pub(super) function_id: u8,
}

#[repr(C)]
pub(super) struct LinkAttr {
    pub(super) address: *mut c_char,
    pub(super) mtu: usize,
    /// In bit/s.
    pub(super) speed: usize,
    pub(super) state: c_int,
    pub(super) network_type: *mut c_char,
}

/// The head of every object of the library.
#[repr(C)]
pub(super) struct Fid {
    pub(super) class: usize,
    pub(super) context: *mut c_void,
    pub(super) ops: *const Ops,
}

#[repr(C)]
pub(super) struct Ops {
    pub(super) size: usize,
    pub(super) close: Option<unsafe extern "C" fn(*mut Fid) -> c_int>,
    pub(super) bind: Option<unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int>,
    pub(super) control: Option<unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int>,
}

#[repr(C)]
pub(super) struct Fabric {
    pub(super) fid: Fid,
    pub(super) ops: *const FabricOps,
    pub(super) api_version: u32,
}

#[repr(C)]
pub(super) struct FabricOps {
    pub(super) size: usize,
    pub(super) domain: Option<
        unsafe extern "C" fn(*mut Fabric, *mut Info, *mut *mut Domain, *mut c_void) -> c_int,
    >,
    pub(super) passive_ep: *const c_void,
    pub(super) eq_open: *const c_void,
    pub(super) wait_open: *const c_void,
    pub(super) trywait: Option<unsafe extern "C" fn(*mut Fabric, *mut *mut Fid, c_int) -> c_int>,
}

#[repr(C)]
pub(super) struct Domain {
    pub(super) fid: Fid,
    pub(super) ops: *const DomainOps,
    pub(super) mr: *const MrOps,
}

#[repr(C)]
pub(super) struct DomainOps {
    pub(super) size: usize,
    pub(super) av_open:
        Option<unsafe extern "C" fn(*mut Domain, *mut AvAttr, *mut *mut Av, *mut c_void) -> c_int>,
    pub(super) cq_open:
        Option<unsafe extern "C" fn(*mut Domain, *mut CqAttr, *mut *mut Cq, *mut c_void) -> c_int>,
    pub(super) endpoint:
        Option<unsafe extern "C" fn(*mut Domain, *mut Info, *mut *mut Ep, *mut c_void) -> c_int>,
}

#[repr(C)]
pub(super) struct MrOps {
    pub(super) size: usize,
    pub(super) reg: *const c_void,
    pub(super) regv: *const c_void,
    pub(super) regattr:
        Option<unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut Mr) -> c_int>,
}

#[repr(C)]
pub(super) struct Mr {
    pub(super) fid: Fid,
    pub(super) mem_desc: *mut c_void,
    pub(super) key: u64,
}

#[repr(C)]
pub(super) struct MrAttr {
    pub(super) mr_iov: *const libc::iovec,
    pub(super) iov_count: usize,
    pub(super) access: u64,
    pub(super) offset: u64,
    pub(super) requested_key: u64,
    pub(super) context: *mut c_void,
    pub(super) auth_key_size: usize,
    pub(super) auth_key: *mut u8,
    pub(super) iface: c_int,
    /// A union; a CUDA device's ordinal is its first four bytes.
    pub(super) device: u64,
    /// Room for the fields that 2.x adds, and for later ones.
    pub(super) later: [u64; 8],
}

#[repr(C)]
pub(super) struct MrRawAttr {
    pub(super) flags: u64,
    pub(super) base_addr: *mut u64,
    pub(super) raw_key: *mut u8,
    pub(super) key_size: *mut usize,
}

#[repr(C)]
pub(super) struct MrMapRaw {
    pub(super) flags: u64,
    pub(super) base_addr: u64,
    pub(super) raw_key: *mut u8,
    pub(super) key_size: usize,
    pub(super) key: *mut u64,
}

#[repr(C)]
pub(super) struct AvAttr {
    pub(super) kind: c_int,
    pub(super) rx_ctx_bits: c_int,
    pub(super) count: usize,
    pub(super) ep_per_node: usize,
    pub(super) name: *const c_char,
    pub(super) map_addr: *mut c_void,
    pub(super) flags: u64,
}

#[repr(C)]
pub(super) struct Av {
    pub(super) fid: Fid,
    pub(super) ops: *const AvOps,
}

#[repr(C)]
pub(super) struct AvOps {
    pub(super) size: usize,
    pub(super) insert: Option<
        unsafe extern "C" fn(*mut Av, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int,
    >,
}

#[repr(C)]
pub(super) struct CqAttr {
    pub(super) size: usize,
    pub(super) flags: u64,
    pub(super) format: c_int,
    pub(super) wait_obj: c_int,
    pub(super) signaling_vector: c_int,
    pub(super) wait_cond: c_int,
    pub(super) wait_set: *mut c_void,
}

#[repr(C)]
pub(super) struct Cq {
    pub(super) fid: Fid,
    pub(super) ops: *const CqOps,
}

#[repr(C)]
pub(super) struct CqOps {
    pub(super) size: usize,
    pub(super) read: Option<unsafe extern "C" fn(*mut Cq, *mut c_void, usize) -> isize>,
    pub(super) readfrom: *const c_void,
    pub(super) readerr: Option<unsafe extern "C" fn(*mut Cq, *mut CqErrEntry, u64) -> isize>,
    pub(super) sread: *const c_void,
    pub(super) sreadfrom: *const c_void,
    pub(super) signal: *const c_void,
    pub(super) strerror: Option<
        unsafe extern "C" fn(*mut Cq, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
    >,
}

/// A completion in the shortest format.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CqEntry {
    pub(super) op_context: *mut c_void,
}

#[repr(C)]
pub(super) struct CqErrEntry {
    pub(super) op_context: *mut c_void,
    pub(super) flags: u64,
    pub(super) len: usize,
    pub(super) buf: *mut c_void,
    pub(super) data: u64,
    pub(super) tag: u64,
    pub(super) olen: usize,
    pub(super) err: c_int,
    pub(super) prov_errno: c_int,
    /// Valid until the queue is read again.
    pub(super) err_data: *mut c_void,
    /// Zero: `err_data` then points to the provider's own buffer.
    pub(super) err_data_size: usize,
    /// Room for the fields that 2.x adds, and for later ones.
    pub(super) later: [u64; 8],
}

#[repr(C)]
pub(super) struct Ep {
    pub(super) fid: Fid,
    pub(super) ops: *const EpOps,
    pub(super) cm: *const CmOps,
    pub(super) msg: *const c_void,
    pub(super) rma: *const RmaOps,
}

#[repr(C)]
pub(super) struct EpOps {
    pub(super) size: usize,
    pub(super) cancel: *const c_void,
    pub(super) getopt: *const c_void,
    pub(super) setopt:
        Option<unsafe extern "C" fn(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int>,
}

/// The level of options for endpoints.
pub(super) const FI_OPT_ENDPOINT: c_int = 0;
/// A bool, since 1.18.
pub(super) const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
/// A bool, since 1.19.
pub(super) const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;

#[repr(C)]
pub(super) struct CmOps {
    pub(super) size: usize,
    pub(super) setname: Option<unsafe extern "C" fn(*mut Fid, *mut c_void, usize) -> c_int>,
    pub(super) getname: Option<unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int>,
}

#[repr(C)]
pub(super) struct RmaOps {
    pub(super) size: usize,
    pub(super) read: *const c_void,
    pub(super) readv: *const c_void,
    pub(super) readmsg: Option<unsafe extern "C" fn(*mut Ep, *const MsgRma, u64) -> isize>,
    pub(super) write: *const c_void,
    pub(super) writev: *const c_void,
    pub(super) writemsg: Option<unsafe extern "C" fn(*mut Ep, *const MsgRma, u64) -> isize>,
}

#[repr(C)]
pub(super) struct MsgRma {
    pub(super) msg_iov: *const libc::iovec,
    pub(super) desc: *mut *mut c_void,
    pub(super) iov_count: usize,
    pub(super) addr: u64,
    pub(super) rma_iov: *const RmaIov,
    pub(super) rma_iov_count: usize,
    pub(super) context: *mut c_void,
    pub(super) data: u64,
}

#[repr(C)]
pub(super) struct RmaIov {
    pub(super) addr: u64,
    pub(super) len: usize,
    pub(super) key: u64,
}

/// Space for a provider's notes on an operation: `fi_context2`, the longer of the two context
/// types.
pub(super) type Context = [*mut c_void; 8];
