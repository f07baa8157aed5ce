//! Tables of network plugins.
//!
//! Functions are `Option`s, since a foreign table may have null entries; of ours, those that NCCL
//! allows to be null are.

use std::ffi::{c_char, c_int, c_void};

use crate::{
    CommConfig, DeviceHandle, Logger, NcclResult, NetAttributes, Profiler,
    properties::{PropertiesV8, PropertiesV9, PropertiesV11, VirtualDevice},
};

/// `init` of v8 and v9: logger.
pub type InitV8 = unsafe extern "C" fn(Logger) -> NcclResult;
/// `init` of v10: logger, profiler.
pub type InitV10 = unsafe extern "C" fn(Logger, Profiler) -> NcclResult;
/// `init` of v11: context, communicator's id, settings, logger, profiler.
pub type InitV11 =
    unsafe extern "C" fn(*mut *mut c_void, u64, *const CommConfig, Logger, Profiler) -> NcclResult;
/// `devices`: the number of devices.
pub type Devices = unsafe extern "C" fn(*mut c_int) -> NcclResult;
/// `getProperties`: device, properties.
pub type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> NcclResult;
/// `listen` to v10: device, handle of 128 bytes, listen communicator.
pub type ListenV8 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
/// `listen` of v11: context, device, handle of 128 bytes, listen communicator.
pub type ListenV11 =
    unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
/// `connect` of v8 and v9: device, handle, send communicator, device handle.
pub type ConnectV8 = unsafe extern "C" fn(
    c_int,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut DeviceHandle,
) -> NcclResult;
/// `connect` of v10: device, settings, handle, send communicator, device handle.
pub type ConnectV10 = unsafe extern "C" fn(
    c_int,
    *const CommConfig,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut DeviceHandle,
) -> NcclResult;
/// `connect` of v11: context, device, handle, send communicator, device handle.
pub type ConnectV11 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut DeviceHandle,
) -> NcclResult;
/// `accept`: listen communicator, receive communicator, device handle.
pub type Accept =
    unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut DeviceHandle) -> NcclResult;
/// `regMr`: communicator, address, bytes, kind of memory, registration.
pub type RegMr =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut *mut c_void) -> NcclResult;
/// `regMrDmaBuf`: as [`RegMr`] with the offset and the descriptor before the registration.
pub type RegMrDmaBuf = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    *mut *mut c_void,
) -> NcclResult;
/// `deregMr`: communicator, registration.
pub type DeregMr = unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult;
/// `isend` of v8: communicator, address, bytes, tag, registration, request.
pub type IsendV8 = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    c_int,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `isend` of v9: communicator, address, bytes, tag, registration, request.
pub type IsendV9 = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `isend` from v10: as v9 with the profiler's handle before the request.
pub type IsendV10 = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `irecv` of v8: communicator, count, addresses, bytes, tags, registrations, request.
pub type IrecvV8 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `irecv` of v9: communicator, count, addresses, bytes, tags, registrations, request.
pub type IrecvV9 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `irecv` from v10: as v9 with the profiler's handles before the request.
pub type IrecvV10 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `iflush`: communicator, count, addresses, bytes, registrations, request.
pub type Iflush = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `test`: request, done, bytes received.
pub type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult;
/// `closeSend`, `closeRecv`, `closeListen`: communicator.
pub type Close = unsafe extern "C" fn(*mut c_void) -> NcclResult;
/// `getDeviceMr`: communicator, registration, the GPU's view of it.
pub type GetDeviceMr =
    unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> NcclResult;
/// `irecvConsumed`: communicator, count, request.
pub type IrecvConsumption = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> NcclResult;
/// `makeVDevice`: the new device's number, its physical devices.
pub type MakeVirtualDevice<V> = unsafe extern "C" fn(*mut c_int, *mut V) -> NcclResult;
/// `finalize`: context.
pub type Finalize = unsafe extern "C" fn(*mut c_void) -> NcclResult;
/// `setNetAttr`: context, hints.
pub type SetNetAttributes = unsafe extern "C" fn(*mut c_void, *mut NetAttributes) -> NcclResult;

/// A table and its functions, in their order. A function is public, and as NCCL names it.
macro_rules! table {
    ($(#[$about:meta])* $name:ident $(<$($arg:ident),*>)? { $($field:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name $(<$($arg),*>)? {
            /// The network's name, which `NCCL_NET` chooses it by.
            pub name: *const c_char,
            $(#[doc = concat!("`", stringify!($field), "`.")] pub $field: Option<$kind>,)*
        }

        // SAFETY: a table is constant: its name is a static text, all else are functions.
        unsafe impl $(<$($arg),*>)? Sync for $name $(<$($arg),*>)? {}
    };
}

table! {
    /// `ncclNetPlugin_v8`.
    NetV8 {
        init: InitV8,
        devices: Devices,
        get_properties: GetProperties<PropertiesV8>,
        listen: ListenV8,
        connect: ConnectV8,
        accept: Accept,
        reg_mr: RegMr,
        reg_mr_dma_buf: RegMrDmaBuf,
        dereg_mr: DeregMr,
        isend: IsendV8,
        irecv: IrecvV8,
        iflush: Iflush,
        test: Test,
        close_send: Close,
        close_recv: Close,
        close_listen: Close,
        get_device_mr: GetDeviceMr,
        irecv_consumed: IrecvConsumption,
    }
}

table! {
    /// `ncclNetPlugin_v9`.
    NetV9 {
        init: InitV8,
        devices: Devices,
        get_properties: GetProperties<PropertiesV9>,
        listen: ListenV8,
        connect: ConnectV8,
        accept: Accept,
        reg_mr: RegMr,
        reg_mr_dma_buf: RegMrDmaBuf,
        dereg_mr: DeregMr,
        isend: IsendV9,
        irecv: IrecvV9,
        iflush: Iflush,
        test: Test,
        close_send: Close,
        close_recv: Close,
        close_listen: Close,
        get_device_mr: GetDeviceMr,
        irecv_consumed: IrecvConsumption,
        make_virtual_device: MakeVirtualDevice<VirtualDevice<4>>,
    }
}

table! {
    /// `ncclNetPlugin_v10`.
    NetV10 {
        init: InitV10,
        devices: Devices,
        get_properties: GetProperties<PropertiesV9>,
        listen: ListenV8,
        connect: ConnectV10,
        accept: Accept,
        reg_mr: RegMr,
        reg_mr_dma_buf: RegMrDmaBuf,
        dereg_mr: DeregMr,
        isend: IsendV10,
        irecv: IrecvV10,
        iflush: Iflush,
        test: Test,
        close_send: Close,
        close_recv: Close,
        close_listen: Close,
        get_device_mr: GetDeviceMr,
        irecv_consumed: IrecvConsumption,
        make_virtual_device: MakeVirtualDevice<VirtualDevice<4>>,
    }
}

table! {
    /// A table from v11 on, by its properties and its virtual devices.
    NetFrom11<P, V> {
        init: InitV11,
        devices: Devices,
        get_properties: GetProperties<P>,
        listen: ListenV11,
        connect: ConnectV11,
        accept: Accept,
        reg_mr: RegMr,
        reg_mr_dma_buf: RegMrDmaBuf,
        dereg_mr: DeregMr,
        isend: IsendV10,
        irecv: IrecvV10,
        iflush: Iflush,
        test: Test,
        close_send: Close,
        close_recv: Close,
        close_listen: Close,
        get_device_mr: GetDeviceMr,
        irecv_consumed: IrecvConsumption,
        make_virtual_device: MakeVirtualDevice<V>,
        finalize: Finalize,
        set_net_attributes: SetNetAttributes,
    }
}

/// `ncclNetPlugin_v11`.
pub type NetV11 = NetFrom11<PropertiesV11<4>, VirtualDevice<4>>;
/// `ncclNetPlugin_v12`.
pub type NetV12 = NetFrom11<PropertiesV11<8>, VirtualDevice<8>>;

const _: () = {
    const WORD: usize = size_of::<usize>();
    assert!(size_of::<NetV8>() == 19 * WORD);
    assert!(size_of::<NetV9>() == 20 * WORD);
    assert!(size_of::<NetV10>() == 20 * WORD);
    assert!(size_of::<NetV11>() == 22 * WORD);
    assert!(size_of::<NetV12>() == 22 * WORD);
};
