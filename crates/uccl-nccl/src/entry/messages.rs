//! Registrations, sends, receives and their requests.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
    slice,
};

use uccl_flow::Buffer;
use uccl_nccl_abi::{NcclResult, memory};

use super::{give, guarded, known, quiet};
use crate::{
    comm::{Comm, Request, registration},
    fault::Fault,
};

pub(crate) unsafe extern "C" fn reg_mr(
    _comm: *mut c_void,
    _data: *mut c_void,
    _bytes: usize,
    kind: c_int,
    mr: *mut *mut c_void,
) -> NcclResult {
    guarded(|| {
        if kind != memory::HOST {
            return Err(Fault::Misuse("regMr", "only the host's memory is supported"));
        }
        // SAFETY: NCCL's place for the registration.
        unsafe { give("regMr", mr, registration()) }
    })
}

pub(crate) unsafe extern "C" fn dereg_mr(_comm: *mut c_void, _mr: *mut c_void) -> NcclResult {
    NcclResult::SUCCESS
}

pub(crate) unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    tag: c_int,
    _mr: *mut c_void,
    _profile: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    quiet(|| {
        // SAFETY: a communicator of `connect`; NCCL keeps the memory until the request has ended.
        let made = unsafe { known::<Comm>("isend", comm)?.isend(data.cast(), bytes, tag) }?;
        // SAFETY: NCCL's place for the request.
        unsafe { give("isend", request, made.cast_mut().cast()) }
    })
}

pub(crate) unsafe extern "C" fn isend_v9(
    comm: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    tag: c_int,
    mr: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the same function without a profiler.
    unsafe { isend(comm, data, bytes, tag, mr, null_mut(), request) }
}

pub(crate) unsafe extern "C" fn isend_v8(
    comm: *mut c_void,
    data: *mut c_void,
    bytes: c_int,
    tag: c_int,
    mr: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    match usize::try_from(bytes) {
        // SAFETY: the same function with a longer length.
        Ok(bytes) => unsafe { isend(comm, data, bytes, tag, mr, null_mut(), request) },
        Err(_) => guarded(|| Err(Fault::Misuse("isend", "a length below 0"))),
    }
}

/// Posts a receive. NCCL presets the request where it needs no completion: it gets one all the
/// same, and the memory is used until that has ended.
///
/// # Safety
///
/// The arrays have `count` places, the memory is NCCL's until the request has ended.
unsafe fn receive<L: Copy + TryInto<usize>>(
    comm: *mut c_void,
    count: c_int,
    (data, lengths, tags): (*const *mut c_void, *const L, *const c_int),
    request: *mut *mut c_void,
) -> NcclResult {
    quiet(|| {
        // SAFETY: a communicator of `accept`, and NCCL's place for the request.
        let comm = unsafe {
            give("irecv", request, null_mut())?;
            known::<Comm>("irecv", comm)
        }?;
        if count != 1 {
            return Err(Fault::Misuse("irecv", "maxRecvs is 1: groups are not supported"));
        }
        if data.is_null() || lengths.is_null() || tags.is_null() {
            return Err(Fault::Misuse("irecv", "an array is missing"));
        }
        // SAFETY: one place in each array.
        let (ptr, len, tag) = unsafe { (data.read(), lengths.read(), tags.read()) };
        let len = len.try_into().map_err(|_| Fault::Misuse("irecv", "a length below 0"))?;
        let buffer = Buffer { ptr: ptr.cast(), len, tag: tag as u32 };
        // SAFETY: NCCL keeps the memory until the request has ended, or the communicator.
        let made = unsafe { comm.irecv(slice::from_ref(&buffer)) }?;
        // SAFETY: as above.
        unsafe { give("irecv", request, made.cast_mut().cast()) }
    })
}

pub(crate) unsafe extern "C" fn irecv(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    lengths: *mut usize,
    tags: *mut c_int,
    _mrs: *mut *mut c_void,
    _profiles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's arrays.
    unsafe { receive(comm, count, (data, lengths, tags), request) }
}

pub(crate) unsafe extern "C" fn irecv_v9(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    lengths: *mut usize,
    tags: *mut c_int,
    _mrs: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's arrays.
    unsafe { receive(comm, count, (data, lengths, tags), request) }
}

pub(crate) unsafe extern "C" fn irecv_v8(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    lengths: *mut c_int,
    tags: *mut c_int,
    _mrs: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's arrays.
    unsafe { receive(comm, count, (data, lengths, tags), request) }
}

/// Bytes are in the host's memory when their receive has ended: there is nothing to wait for.
pub(crate) unsafe extern "C" fn iflush(
    _comm: *mut c_void,
    _count: c_int,
    _data: *mut *mut c_void,
    _lengths: *mut c_int,
    _mrs: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's place for the request.
    guarded(|| unsafe { give("iflush", request, null_mut()) })
}

pub(crate) unsafe extern "C" fn test(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> NcclResult {
    quiet(|| {
        // SAFETY: NCCL's place for the answer, and a request of a communicator that is open.
        let bytes = unsafe {
            give("test", done, 0)?;
            known::<Request>("test", request)?.test()
        }?;
        let Some(bytes) = bytes else { return Ok(()) };
        // SAFETY: as above; `sizes` may be null, and has one place otherwise.
        unsafe {
            if !sizes.is_null() {
                sizes.write(c_int::try_from(bytes).unwrap_or(c_int::MAX));
            }
            give("test", done, 1)
        }
    })
}
