//! Begin and end of contexts; devices.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
};

use uccl_nccl_abi::{CommConfig, Logger, NcclResult, Profiler};

use super::{give, guarded};
use crate::{
    devices::FromDevice,
    fault::Fault,
    log,
    process::{self, Context},
};

pub(crate) unsafe extern "C" fn init(
    context: *mut *mut c_void,
    _id: u64,
    _config: *const CommConfig,
    logger: Logger,
    _profiler: Profiler,
) -> NcclResult {
    log::begin(logger);
    guarded(|| {
        // SAFETY: NCCL's place for the context. It is null after a failure, since some versions
        // call `finalize` all the same.
        unsafe { give("init", context, null_mut()) }?;
        let begun = Box::into_raw(Box::new(process::begin()?));
        // SAFETY: as above.
        unsafe { give("init", context, begun.cast()) }
    })
}

pub(crate) unsafe extern "C" fn init_v8(logger: Logger) -> NcclResult {
    log::begin(logger);
    guarded(process::begin_endless)
}

pub(crate) unsafe extern "C" fn init_v10(logger: Logger, _profiler: Profiler) -> NcclResult {
    // SAFETY: the same function without an argument that is not used.
    unsafe { init_v8(logger) }
}

pub(crate) unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guarded(|| {
        if !context.is_null() {
            // SAFETY: a context of `init`, which NCCL gives back once.
            process::end(*unsafe { Box::from_raw(context.cast::<Context>()) });
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    guarded(|| {
        let found = process::core("devices")?.devices.len();
        // SAFETY: NCCL's place for the number.
        unsafe { give("devices", count, found as c_int) }
    })
}

pub(crate) unsafe extern "C" fn get_properties<P: FromDevice>(
    device: c_int,
    to: *mut P,
) -> NcclResult {
    guarded(|| {
        let core = process::core("getProperties")?;
        let found = usize::try_from(device).ok().and_then(|at| core.devices.get(at));
        let found = found.ok_or(Fault::Misuse("getProperties", "there is no such device"))?;
        // SAFETY: NCCL's place for the properties of this version.
        unsafe {
            give("getProperties", to, P::from_device(found, device, core.offered_mbps(found)))
        }
    })
}
