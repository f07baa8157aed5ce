use std::{
    collections::BTreeMap,
    ffi::{c_char, c_void},
};

use parking_lot::Mutex;
use uccl_p2p::{ConnId, MrId, SharedBuf};
use uccl_wire::advert::Advert;

use super::{call, endpoint, uccl_endpoint_t, uccl_status_t};
use crate::{
    args::{self, Out, TextOut},
    failure::Failure,
};

/// The key with which a peer reads and writes a range of a region: 64 bytes, to be sent to the peer
/// unchanged, by any means.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct uccl_advert_t {
    /// The bytes.
    pub bytes: [u8; 64],
}

/// Memory from `uccl_alloc`, by its address.
static ALLOCATED: Mutex<BTreeMap<usize, SharedBuf>> = Mutex::new(BTreeMap::new());

/// Allocates memory that peers of this host can map, page aligned and zeroed: a transfer to or from
/// it is one copy in user space, without a system call. It is registered and advertised as any
/// other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_alloc(
    endpoint: *const uccl_endpoint_t,
    len: usize,
    ptr: *mut *mut c_void,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a place for a pointer.
        let out = unsafe { Out::new(ptr, "ptr") }?;
        let memory = self::endpoint(endpoint)?.alloc(len)?;
        let start = memory.as_ptr().cast::<c_void>();
        ALLOCATED.lock().insert(start.addr(), memory);
        out.put(start);
        Ok(())
    })
}

/// Gives back memory of `uccl_alloc`, also after its endpoint's end. It is freed when no region
/// lies in it any more.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_free(ptr: *mut c_void) -> uccl_status_t {
    call(|| {
        // It is unmapped without the lock.
        let freed = ALLOCATED.lock().remove(&ptr.addr());
        freed.map(drop).ok_or_else(|| {
            let text = format!("{ptr:p} is not from uccl_alloc, or was given back before");
            Failure::new(uccl_status_t::UCCL_UNKNOWN_ID, text)
        })
    })
}

/// Registers memory of the host or of a GPU. It must stay allocated until `uccl_deregister` or
/// `uccl_endpoint_destroy` has returned UCCL_OK: peers that have an advert read and write it at any
/// time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_register(
    endpoint: *const uccl_endpoint_t,
    ptr: *mut c_void,
    len: usize,
    mr: *mut u64,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a place for an id.
        let out = unsafe { Out::new(mr, "mr") }?;
        // SAFETY: the memory stays, as the header asks.
        let id = unsafe { self::endpoint(endpoint)?.register(args::address(ptr), len) }?;
        out.put(id.0);
        Ok(())
    })
}

/// Ends a region, and all adverts of it: when this has returned UCCL_OK, no peer's access lands in
/// it any more. A region that unfinished transfers of this endpoint use is refused.
/// UCCL_STILL_TOUCHED means that a peer which is stuck in the middle of an access may still touch
/// the memory, which has to stay allocated; the same call waits again.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_deregister(endpoint: *const uccl_endpoint_t, mr: u64) -> uccl_status_t {
    call(|| Ok(self::endpoint(endpoint)?.deregister(MrId(mr))?))
}

/// Makes the advert of `len` bytes at `ptr`, which are inside the region. The advert holds the
/// region's key: any peer that has it can reach the whole region. Memory that a peer must not reach
/// belongs into another region; regions may overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_advertise(
    endpoint: *const uccl_endpoint_t,
    mr: u64,
    ptr: *const c_void,
    len: usize,
    advert: *mut uccl_advert_t,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a place for an advert.
        let out = unsafe { Out::new(advert, "advert") }?;
        let made = self::endpoint(endpoint)?.advertise(MrId(mr), args::address(ptr), len)?;
        out.put(uccl_advert_t { bytes: made.encode() });
        Ok(())
    })
}

/// Makes the advert of a part of an advert: `len` bytes that begin `offset` bytes into it. Either
/// side may do so; `advert` and `part` may be the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_advert_part(
    advert: *const uccl_advert_t,
    offset: u64,
    len: u64,
    part: *mut uccl_advert_t,
) -> uccl_status_t {
    call(|| {
        // SAFETY: an advert, and a place for one.
        let (whole, out) = unsafe { (*args::one(advert, "advert")?, Out::new(part, "part")?) };
        let whole = Advert::decode(&whole.bytes)?;
        let part = whole.part(offset, len).ok_or_else(|| {
            let text = format!(
                "{len} bytes at offset {offset} do not fit the {} bytes advertised",
                whole.len
            );
            Failure::new(uccl_status_t::UCCL_OUT_OF_RANGE, text)
        })?;
        out.put(uccl_advert_t { bytes: part.encode() });
        Ok(())
    })
}

/// Writes how data moves over a connection: "direct", "staged" (through an intermediate buffer) or
/// "tcp". Over RDMA and libfabric the answer is the slowest way among the regions that are
/// registered here and those of the peer's that have been reached. 8 bytes have room for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_moves(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    text: *mut c_char,
    capacity: usize,
) -> uccl_status_t {
    call(|| {
        // SAFETY: room for as many bytes.
        let out = unsafe { TextOut::new(text, capacity, "text")? };
        out.put(self::endpoint(endpoint)?.connection(ConnId(conn))?.moves.name())
    })
}

/// Writes the name of the path that data takes to and from memory which the peer advertised: "cma",
/// "shm", "mapped", "cuda_ipc" or "tcp", as docs/status.md explains. 16 bytes have room for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_path(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    advert: *const uccl_advert_t,
    text: *mut c_char,
    capacity: usize,
) -> uccl_status_t {
    call(|| {
        // SAFETY: an advert, and room for as many bytes.
        let (advert, out) =
            unsafe { (args::one(advert, "advert")?, TextOut::new(text, capacity, "text")?) };
        let advert = Advert::decode(&advert.bytes)?;
        out.put(self::endpoint(endpoint)?.path(ConnId(conn), &advert)?)
    })
}
