//! Listening, connecting, closing.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
    sync::Arc,
};

use uccl_flow::Listener;
use uccl_nccl_abi::{CommConfig, DeviceHandle, HANDLE_BYTES, NcclResult};

use super::{give, guarded, known};
use crate::{
    comm::{Comm, ListenComm},
    fault::Fault,
    pending,
    process::{self, Context, Core},
};

/// The core of a context; of the process for null, as before v11.
///
/// # Safety
///
/// The context is null or of `init`.
unsafe fn core_of(call: &'static str, context: *mut c_void) -> Result<Arc<Core>, Fault> {
    if context.is_null() {
        return process::core(call);
    }
    // SAFETY: the caller's.
    Ok(Arc::clone(&unsafe { known::<Context>(call, context) }?.core))
}

fn number(call: &'static str, device: c_int) -> Result<usize, Fault> {
    usize::try_from(device).map_err(|_| Fault::Misuse(call, "a device below 0"))
}

pub(crate) unsafe extern "C" fn listen(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guarded(|| {
        // SAFETY: a context of `init`, or null.
        let core = unsafe { core_of("listen", context) }?;
        let listener = Listener::listen(&core.flows, number("listen", device)?)?;
        let bytes = pending::encode(listener.handle())?;
        // SAFETY: NCCL gives room for 128 bytes, and a place for the communicator.
        unsafe {
            give("listen", handle.cast::<[u8; HANDLE_BYTES]>(), bytes)?;
            let made = Box::into_raw(Box::new(ListenComm { listener, core }));
            give("listen", comm, made.cast())
        }
    })
}

pub(crate) unsafe extern "C" fn listen_v8(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the same function with a context of the process.
    unsafe { listen(null_mut(), device, handle, comm) }
}

pub(crate) unsafe extern "C" fn connect(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _offload: *mut *mut DeviceHandle,
) -> NcclResult {
    guarded(|| {
        // SAFETY: NCCL's place for the communicator, and a context of `init` or null.
        let core = unsafe {
            give("connect", comm, null_mut())?;
            core_of("connect", context)
        }?;
        // SAFETY: 128 bytes that are NCCL's copy of the handle; only this call uses them.
        let bytes = unsafe { handle.cast::<[u8; HANDLE_BYTES]>().as_mut() };
        let bytes = bytes.ok_or(Fault::Misuse("connect", "no handle"))?;
        let flow = core.pending.connect(&core.flows, number("connect", device)?, bytes)?;
        let Some(flow) = flow else { return Ok(()) };
        let made = Box::into_raw(Comm::of_send(flow, core));
        // SAFETY: as above.
        unsafe { give("connect", comm, made.cast()) }
    })
}

pub(crate) unsafe extern "C" fn connect_v8(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    offload: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: the same function with a context of the process.
    unsafe { connect(null_mut(), device, handle, comm, offload) }
}

pub(crate) unsafe extern "C" fn connect_v10(
    device: c_int,
    _config: *const CommConfig,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    offload: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: the same function with a context of the process.
    unsafe { connect(null_mut(), device, handle, comm, offload) }
}

pub(crate) unsafe extern "C" fn accept(
    listen: *mut c_void,
    comm: *mut *mut c_void,
    _offload: *mut *mut DeviceHandle,
) -> NcclResult {
    guarded(|| {
        // SAFETY: NCCL's place for the communicator, and a listen communicator of `listen`.
        let listen = unsafe {
            give("accept", comm, null_mut())?;
            known::<ListenComm>("accept", listen)
        }?;
        let Some(flow) = listen.listener.try_accept()? else { return Ok(()) };
        let made = Box::into_raw(Comm::of_recv(flow, Arc::clone(&listen.core)));
        // SAFETY: as above.
        unsafe { give("accept", comm, made.cast()) }
    })
}

/// Closes a communicator of data, with all requests that are in flight.
pub(crate) unsafe extern "C" fn close(comm: *mut c_void) -> NcclResult {
    guarded(|| {
        if !comm.is_null() {
            // SAFETY: of `connect` or `accept`, and closed once.
            drop(unsafe { Box::from_raw(comm.cast::<Comm>()) });
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn close_listen(comm: *mut c_void) -> NcclResult {
    guarded(|| {
        if !comm.is_null() {
            // SAFETY: of `listen`, and closed once.
            drop(unsafe { Box::from_raw(comm.cast::<ListenComm>()) });
        }
        Ok(())
    })
}
