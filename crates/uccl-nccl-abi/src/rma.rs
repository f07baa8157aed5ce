//! Tables of one-sided plugins: RMA v13 to v16. The table of v13 is GIN's of that version.
//!
//! The layouts are those of NCCL's public headers `src/include/plugin/gin/gin_v13.h` and
//! `src/include/plugin/rma/rma_v14.h` to `rma_v16.h`, releases 2.30.3 to 2.32.6. NCCL looks for
//! `ncclRmaPlugin_v13` to `v16`, up to 2.30.4 for `ncclGinPlugin_v13`.

use std::ffi::{c_char, c_int, c_void};

use crate::{
    DeviceHandle, Logger, NcclResult,
    net::{Close, DeregMr, Devices, Finalize, GetProperties, ListenV11},
    properties::PropertiesV11,
};

/// The type of a device whose operations the host starts (`NCCL_NET_DEVICE_GIN_PROXY`).
pub const PROXY_DEVICE: c_int = 2;

/// Flags of a registration.
pub mod registration {
    /// The memory may hold signals, before which all else must be visible.
    pub const FORCE_ORDER: u64 = 1;
    /// Signals alone change the memory, once it is registered.
    pub const SIGNAL_NEVER_RESET: u64 = 2;
}

/// Changes that a signal makes to its word.
pub mod signal {
    /// Adds one, whatever the value.
    pub const INCREMENT: u32 = 1;
    /// Adds the value.
    pub const ADD: u32 = 2;
}

/// Options of an operation, from v15 on.
pub mod option {
    /// More operations for that peer follow in the same pass.
    pub const AGGREGATE: u32 = 1;
}

/// `ncclGinConfig_v13_t`: the settings of contexts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GinConfig {
    /// Signals of each context.
    pub signals: c_int,
    /// Counters of each context.
    pub counters: c_int,
    /// The number of contexts.
    pub contexts: c_int,
    /// Operations that a queue holds.
    pub queue_depth: c_int,
    /// -1 if the user has not set one.
    pub traffic_class: c_int,
}

/// `ncclRmaConfig_v14_t`: the settings of contexts. Later sources of NCCL have a third field, a
/// stride of ranks, under the same version, so nothing behind these two can be read.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaConfig {
    /// The number of contexts.
    pub contexts: c_int,
    /// -1 if the user has not set one.
    pub traffic_class: c_int,
}

/// `ncclRmaProperties_v16_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaProperties {
    /// Whether any signal, of any peer, makes all puts visible that have come before.
    pub flushes_all_puts_on_any_signal: bool,
}

/// `init`: context, communicator's id, logger.
pub type Init = unsafe extern "C" fn(*mut *mut c_void, u64, Logger) -> NcclResult;
/// `getRmaProperties` of v16: group, properties.
pub type GetRmaProperties = unsafe extern "C" fn(*mut c_void, *mut RmaProperties) -> NcclResult;
/// `connect`: context, handles of all ranks, their number, the own rank, listen communicator,
/// group. It may block, as all ranks call it.
pub type Connect = unsafe extern "C" fn(
    *mut c_void,
    *mut *mut c_void,
    c_int,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `createContext` of v13: group, settings, contexts, the GPU's view of them.
pub type CreateContextV13 = unsafe extern "C" fn(
    *mut c_void,
    *mut GinConfig,
    *mut *mut c_void,
    *mut *mut DeviceHandle,
) -> NcclResult;
/// `createContext` from v14 on: group, settings, contexts.
pub type CreateContextV14 =
    unsafe extern "C" fn(*mut c_void, *mut RmaConfig, *mut *mut c_void) -> NcclResult;
/// `regMrSym` of v13: group, address, bytes, kind of memory, flags, registration, the GPU's view of
/// it.
pub type RegMrSymV13 = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `regMrSym` from v14 on: group, address, bytes, kind of memory, flags, registration.
pub type RegMrSymV14 = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    *mut *mut c_void,
) -> NcclResult;
/// `regMrSymDmaBuf` of v13: as [`RegMrSymV13`], with offset and descriptor before the flags.
pub type RegMrSymDmaBufV13 = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `regMrSymDmaBuf` from v14 on: as [`RegMrSymV14`], with offset and descriptor before the flags.
pub type RegMrSymDmaBufV14 = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    u64,
    *mut *mut c_void,
) -> NcclResult;
/// `iput` to v14: contexts, context, source (offset, registration), bytes, target (offset,
/// registration), rank, request. `iget` to v14: the same, with the peer's memory first.
pub type PutV13 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    u64,
    *mut c_void,
    usize,
    u64,
    *mut c_void,
    u32,
    *mut *mut c_void,
) -> NcclResult;
/// `iput` and `iget` from v15 on: as [`PutV13`], with options before the request.
pub type PutV15 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    u64,
    *mut c_void,
    usize,
    u64,
    *mut c_void,
    u32,
    u32,
    *mut *mut c_void,
) -> NcclResult;
/// `iputSignal` of v13: as [`PutV13`], with the signal (offset, registration, value, change) before
/// the request.
pub type PutSignalV13 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    u64,
    *mut c_void,
    usize,
    u64,
    *mut c_void,
    u32,
    u64,
    *mut c_void,
    u64,
    u32,
    *mut *mut c_void,
) -> NcclResult;
/// `iputSignal` of v14: as v13, with the signal's strength before the request.
pub type PutSignalV14 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    u64,
    *mut c_void,
    usize,
    u64,
    *mut c_void,
    u32,
    u64,
    *mut c_void,
    u64,
    u32,
    bool,
    *mut *mut c_void,
) -> NcclResult;
/// `iputSignal` from v15 on: as v14, with options before the request.
pub type PutSignalV15 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    u64,
    *mut c_void,
    usize,
    u64,
    *mut c_void,
    u32,
    u64,
    *mut c_void,
    u64,
    u32,
    bool,
    u32,
    *mut *mut c_void,
) -> NcclResult;
/// `iflush`: contexts, context, registration, rank, request.
pub type Flush =
    unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, u32, *mut *mut c_void) -> NcclResult;
/// `test`: group, request, done.
pub type Test = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int) -> NcclResult;
/// `ginProgress`, `rmaProgress`: contexts.
pub type Progress = unsafe extern "C" fn(*mut c_void) -> NcclResult;
/// `queryLastError`: contexts, whether there is one.
pub type QueryLastError = unsafe extern "C" fn(*mut c_void, *mut bool) -> NcclResult;

/// The functions behind a table's properties, in NCCL's order: of v13, v14 and v15 by the types of
/// those that differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaFunctions<CreateContext, RegMrSym, RegMrSymDmaBuf, Put, PutSignal> {
    /// `getProperties`.
    pub get_properties: Option<GetProperties<PropertiesV11<8>>>,
    /// `listen`.
    pub listen: Option<ListenV11>,
    /// `connect`.
    pub connect: Option<Connect>,
    /// `createContext`.
    pub create_context: Option<CreateContext>,
    /// `regMrSym`.
    pub reg_mr_sym: Option<RegMrSym>,
    /// `regMrSymDmaBuf`.
    pub reg_mr_sym_dma_buf: Option<RegMrSymDmaBuf>,
    /// `deregMrSym`.
    pub dereg_mr_sym: Option<DeregMr>,
    /// `destroyContext`.
    pub destroy_context: Option<Close>,
    /// `closeColl`.
    pub close_coll: Option<Close>,
    /// `closeListen`.
    pub close_listen: Option<Close>,
    /// `iput`.
    pub put: Option<Put>,
    /// `iputSignal`.
    pub put_signal: Option<PutSignal>,
    /// `iget`.
    pub get: Option<Put>,
    /// `iflush`.
    pub flush: Option<Flush>,
    /// `test`.
    pub test: Option<Test>,
    /// `ginProgress`, `rmaProgress`.
    pub progress: Option<Progress>,
    /// `queryLastError`.
    pub query_last_error: Option<QueryLastError>,
    /// `finalize`.
    pub finalize: Option<Finalize>,
}

/// A table of v13 to v15, by its functions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaTable<F> {
    /// The plugin's name, for NCCL's log.
    pub name: *const c_char,
    /// `init`.
    pub init: Option<Init>,
    /// `devices`.
    pub devices: Option<Devices>,
    /// The functions behind these.
    pub functions: F,
}

// SAFETY: a table is constant: its name is a static text, all else are functions.
unsafe impl<F> Sync for RmaTable<F> {}

/// The functions of v13.
pub type RmaFunctionsV13 =
    RmaFunctions<CreateContextV13, RegMrSymV13, RegMrSymDmaBufV13, PutV13, PutSignalV13>;
/// The functions of v14.
pub type RmaFunctionsV14 =
    RmaFunctions<CreateContextV14, RegMrSymV14, RegMrSymDmaBufV14, PutV13, PutSignalV14>;
/// The functions of v15 and v16.
pub type RmaFunctionsV15 =
    RmaFunctions<CreateContextV14, RegMrSymV14, RegMrSymDmaBufV14, PutV15, PutSignalV15>;

/// `ncclGinPlugin_v13`, `ncclRmaPlugin_v13`.
pub type RmaV13 = RmaTable<RmaFunctionsV13>;
/// `ncclRmaPlugin_v14`.
pub type RmaV14 = RmaTable<RmaFunctionsV14>;
/// `ncclRmaPlugin_v15`.
pub type RmaV15 = RmaTable<RmaFunctionsV15>;

/// `ncclRmaPlugin_v16`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaV16 {
    /// The plugin's name, for NCCL's log.
    pub name: *const c_char,
    /// `init`.
    pub init: Option<Init>,
    /// `devices`.
    pub devices: Option<Devices>,
    /// `getRmaProperties`.
    pub get_rma_properties: Option<GetRmaProperties>,
    /// The functions behind these.
    pub functions: RmaFunctionsV15,
}

// SAFETY: as for `RmaTable`.
unsafe impl Sync for RmaV16 {}

const _: () = {
    use std::mem::offset_of;
    const WORD: usize = size_of::<usize>();
    assert!(size_of::<RmaV13>() == 21 * WORD);
    assert!(size_of::<RmaV14>() == 21 * WORD);
    assert!(size_of::<RmaV15>() == 21 * WORD);
    assert!(size_of::<RmaV16>() == 22 * WORD);
    assert!(offset_of!(RmaV14, functions) == 3 * WORD);
    assert!(offset_of!(RmaV16, get_rma_properties) == 3 * WORD);
    assert!(offset_of!(RmaV16, functions) == 4 * WORD);
    assert!(offset_of!(RmaFunctionsV14, connect) == 2 * WORD);
    assert!(offset_of!(RmaFunctionsV14, put) == 10 * WORD);
    assert!(offset_of!(RmaFunctionsV14, get) == 12 * WORD);
    assert!(offset_of!(RmaFunctionsV14, test) == 14 * WORD);
    assert!(offset_of!(RmaFunctionsV14, finalize) == 17 * WORD);
    assert!(size_of::<GinConfig>() == 20);
    assert!(offset_of!(GinConfig, contexts) == 8);
    assert!(size_of::<RmaConfig>() == 8);
    assert!(size_of::<RmaProperties>() == 1);
};
