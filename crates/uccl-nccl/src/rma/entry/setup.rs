//! Contexts of the plugin, groups, their contexts and their regions.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
    slice,
    sync::Arc,
};

use uccl_nccl_abi::{
    DeviceHandle, HANDLE_BYTES, Logger, NcclResult, flags, memory,
    properties::PropertiesV11,
    rma::{GinConfig, PROXY_DEVICE, RmaConfig, RmaProperties},
};
use uccl_p2p::Error;

use super::quiet;
use crate::{
    devices::FromDevice as _,
    entry::{give, guarded, known},
    fault::Fault,
    log,
    rma::{
        context::{Coll, Contexts},
        engine::{self, RmaHandle},
        group::{Group, Region},
        joining,
    },
    rma_error::RmaError,
};

/// Requests of a peer and a context are 32 times as many.
const MAX_RECVS: c_int = 8;
/// The most contexts of one call.
const MAX_CONTEXTS: u32 = 1 << 16;

pub(crate) unsafe extern "C" fn init(
    context: *mut *mut c_void,
    _id: u64,
    logger: Logger,
) -> NcclResult {
    log::begin(logger);
    quiet(|| {
        // SAFETY: NCCL's place for the context.
        unsafe { give("init", context, null_mut()) }?;
        let begun = engine::begin().inspect_err(|fault| match fault {
            Fault::Rma(RmaError::Off) => log::info(flags::INIT | flags::NET, &fault.to_string()),
            Fault::Rma(_) => log::warn(&fault.to_string()),
            _ => {}
        })?;
        let begun = Box::into_raw(Box::new(begun));
        // SAFETY: as above.
        unsafe { give("init", context, begun.cast()) }
    })
}

pub(crate) unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guarded(|| {
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: a context of `init`, which NCCL gives back once.
        engine::end(*unsafe { Box::from_raw(context.cast::<RmaHandle>()) })
    })
}

pub(crate) unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    guarded(|| {
        let found = engine::engine("devices")?.devices.len();
        // SAFETY: NCCL's place for the number.
        unsafe { give("devices", count, found as c_int) }
    })
}

pub(crate) unsafe extern "C" fn get_properties(
    device: c_int,
    to: *mut PropertiesV11<8>,
) -> NcclResult {
    guarded(|| {
        let engine = engine::engine("getProperties")?;
        let found = usize::try_from(device).ok().and_then(|at| engine.devices.get(at));
        let found = found.ok_or(Fault::Misuse("getProperties", "there is no such device"))?;
        // The one-sided engine measures nothing.
        let speed_mbps = found.speed.offered_mbps(None);
        let mut properties = PropertiesV11::from_device(found, device, speed_mbps);
        properties.head.device_type = PROXY_DEVICE;
        properties.head.max_recvs = MAX_RECVS;
        properties.head.memory = memory::HOST | memory::CUDA;
        // SAFETY: NCCL's place for the properties.
        unsafe { give("getProperties", to, properties) }
    })
}

pub(crate) unsafe extern "C" fn get_rma_properties(
    _coll: *mut c_void,
    to: *mut RmaProperties,
) -> NcclResult {
    // Signals of one rank say nothing of another one's puts.
    let none = RmaProperties { flushes_all_puts_on_any_signal: false };
    // SAFETY: NCCL's place for the properties.
    guarded(|| unsafe { give("getRmaProperties", to, none) })
}

/// Listens. The context is not looked at: some releases of NCCL give another plugin's.
pub(crate) unsafe extern "C" fn listen(
    _context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guarded(|| {
        let engine = engine::engine("listen")?;
        let device = usize::try_from(device);
        let device = device.map_err(|_| Fault::Misuse("listen", "a device below 0"))?;
        let (group, bytes) = joining::listen(&engine, device)?;
        // SAFETY: NCCL gives room for 128 bytes, and a place for the communicator.
        unsafe {
            give("listen", handle.cast::<[u8; HANDLE_BYTES]>(), bytes)?;
            give("listen", comm, Box::into_raw(Box::new(group)).cast())
        }
    })
}

pub(crate) unsafe extern "C" fn connect(
    _context: *mut c_void,
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    listen: *mut c_void,
    coll: *mut *mut c_void,
) -> NcclResult {
    guarded(|| {
        // SAFETY: NCCL's place for the group, and a listen communicator of `listen`.
        let group = unsafe {
            give("connect", coll, null_mut())?;
            known::<Arc<Group>>("connect", listen)
        }?;
        let (Ok(ranks), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
            return Err(Fault::Misuse("connect", "a rank below 0"));
        };
        if handles.is_null() || rank >= ranks {
            return Err(Fault::Misuse("connect", "a rank without a handle"));
        }
        // SAFETY: a handle of each rank.
        let handles = unsafe { slice::from_raw_parts(handles, ranks) };
        let read = |at: &*mut c_void| {
            // SAFETY: each has 128 bytes.
            unsafe { known::<[u8; HANDLE_BYTES]>("connect", *at) }.copied()
        };
        let handles: Vec<_> = handles.iter().map(read).collect::<Result<_, _>>()?;
        joining::join(group, &handles, rank).inspect_err(|_| group.abandon())?;
        let made = Box::into_raw(Box::new(Coll::new(Arc::clone(group))));
        // SAFETY: as above.
        unsafe { give("connect", coll, made.cast()) }
    })
}

pub(crate) unsafe extern "C" fn close_listen(comm: *mut c_void) -> NcclResult {
    guarded(|| {
        if !comm.is_null() {
            // SAFETY: of `listen`, and closed once.
            drop(unsafe { Box::from_raw(comm.cast::<Arc<Group>>()) });
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn close_coll(coll: *mut c_void) -> NcclResult {
    guarded(|| {
        if !coll.is_null() {
            // SAFETY: of `connect`, and closed once.
            unsafe { Box::from_raw(coll.cast::<Arc<Coll>>()) }.close();
        }
        Ok(())
    })
}

/// Makes contexts. All ranks have joined already, so this waits for nobody.
///
/// # Safety
///
/// A group of `connect`, and a place for the contexts.
unsafe fn contexts(coll: *mut c_void, count: c_int, to: *mut *mut c_void) -> Result<(), Fault> {
    // SAFETY: the caller's.
    let coll = unsafe { known::<Arc<Coll>>("createContext", coll) }?;
    let count = u32::try_from(count).ok().filter(|count| (1..=MAX_CONTEXTS).contains(count));
    let count = count.ok_or(Fault::Misuse("createContext", "a number of contexts that is none"))?;
    // SAFETY: the caller's.
    unsafe { give("createContext", to, Box::into_raw(Box::new(coll.contexts(count))).cast()) }
}

pub(crate) unsafe extern "C" fn create_context_v13(
    coll: *mut c_void,
    config: *mut GinConfig,
    to: *mut *mut c_void,
    device: *mut *mut DeviceHandle,
) -> NcclResult {
    guarded(|| {
        // SAFETY: NCCL's settings, a group, and places for the results; no GPU drives a proxy.
        unsafe {
            if !device.is_null() {
                device.write(null_mut());
            }
            let count = known::<GinConfig>("createContext", config.cast::<c_void>())?.contexts;
            contexts(coll, count, to)
        }
    })
}

pub(crate) unsafe extern "C" fn create_context_v14(
    coll: *mut c_void,
    config: *mut RmaConfig,
    to: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's settings, a group, and a place for the result.
    guarded(|| unsafe {
        let count = known::<RmaConfig>("createContext", config.cast::<c_void>())?.contexts;
        contexts(coll, count, to)
    })
}

pub(crate) unsafe extern "C" fn destroy_context(contexts: *mut c_void) -> NcclResult {
    guarded(|| {
        if !contexts.is_null() {
            // SAFETY: of `createContext`, and destroyed once.
            unsafe { Box::from_raw(contexts.cast::<Contexts>()) }.end();
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn reg_mr_sym_v14(
    coll: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    _kind: c_int,
    _flags: u64,
    mr: *mut *mut c_void,
) -> NcclResult {
    // The kind is not looked at: NCCL says CUDA of locked host memory too, and the driver knows.
    guarded(|| {
        // SAFETY: NCCL's place for the registration, and a group of `connect`.
        let coll = unsafe {
            give("regMrSym", mr, null_mut())?;
            known::<Arc<Coll>>("regMrSym", coll)
        }?;
        // SAFETY: NCCL keeps the memory until it has deregistered it, or closed the group.
        let region = unsafe { coll.group.register(data as usize, bytes) }?;
        // SAFETY: as above.
        unsafe { give("regMrSym", mr, Box::into_raw(Box::new(region)).cast()) }
    })
}

pub(crate) unsafe extern "C" fn reg_mr_sym_v13(
    coll: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    kind: c_int,
    flags: u64,
    mr: *mut *mut c_void,
    device: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as from v14 on, with a place for a GPU's view of it, of which there is none.
    unsafe {
        if !device.is_null() {
            device.write(null_mut());
        }
        reg_mr_sym_v14(coll, data, bytes, kind, flags, mr)
    }
}

/// Registers memory by its address: the descriptor is not needed.
pub(crate) unsafe extern "C" fn reg_mr_sym_dma_buf_v14(
    coll: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    mr: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the same function without two arguments that are not used.
    unsafe { reg_mr_sym_v14(coll, data, bytes, kind, flags, mr) }
}

pub(crate) unsafe extern "C" fn reg_mr_sym_dma_buf_v13(
    coll: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    mr: *mut *mut c_void,
    device: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the same function without two arguments that are not used.
    unsafe { reg_mr_sym_v13(coll, data, bytes, kind, flags, mr, device) }
}

pub(crate) unsafe extern "C" fn dereg_mr_sym(coll: *mut c_void, mr: *mut c_void) -> NcclResult {
    guarded(|| {
        if mr.is_null() {
            return Ok(());
        }
        // SAFETY: a group of `connect`, and a registration of it that is given back once.
        let (coll, region) = unsafe {
            (known::<Arc<Coll>>("deregMrSym", coll)?, Box::from_raw(mr.cast::<Region>()))
        };
        let endpoint = &coll.group.engine.endpoint;
        let ended = endpoint.deregister(region.mr).or_else(|error| match error {
            // Operations that are under way use it.
            Error::Invalid(_) => {
                endpoint.cancel_all_using(region.mr)?;
                endpoint.deregister(region.mr)
            }
            // The endpoint has ended, and all its regions with it.
            Error::Closed | Error::UnknownRegion(_) => Ok(()),
            other => Err(other),
        });
        Ok(ended.map_err(RmaError::of_engine("deregistration"))?)
    })
}
