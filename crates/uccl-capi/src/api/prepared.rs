use std::ffi::c_void;

use uccl_p2p::{ConnId, PreparedTransfer};
use uccl_wire::advert::Advert;

use super::{
    call, endpoint,
    transfer::{iov_of, op_of},
    uccl_advert_t, uccl_endpoint_t, uccl_iov_t, uccl_status_t,
};
use crate::{
    args::{self, Out},
    failure::Failure,
    handles::Handles,
};

/// A read or a write that was checked once, for any number of posts.
pub struct uccl_prepared_t;

static PREPARED: Handles<PreparedTransfer> = Handles::new();

/// Checks a read or a write of `count` pieces, at most 1,048,576, `iovs[i]` from or to the memory
/// of `adverts[i]`, for posts by `uccl_post_prepared`. `op` is UCCL_READ or UCCL_WRITE. No byte
/// moves, and no connection is needed; all adverts are of one endpoint. It keeps no region:
/// a post after one of them was deregistered is refused. The lists may be freed when this has
/// returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_prepare(
    endpoint: *const uccl_endpoint_t,
    op: i32,
    iovs: *const uccl_iov_t,
    adverts: *const uccl_advert_t,
    count: usize,
    prepared: *mut *mut uccl_prepared_t,
) -> uccl_status_t {
    call(|| {
        // SAFETY: lists as long as the caller says, and a place for a pointer.
        let (iovs, adverts, out) = unsafe {
            (
                args::many(iovs, count, "iovs")?,
                args::many(adverts, count, "adverts")?,
                Out::new(prepared, "prepared")?,
            )
        };
        let iovs: Vec<_> = iovs.iter().map(iov_of).collect();
        let decode = |advert: &uccl_advert_t| Advert::decode(&advert.bytes);
        let adverts = adverts.iter().map(decode).collect::<Result<Vec<_>, _>>()?;
        out.put(PREPARED.add(self::endpoint(endpoint)?.prepare(op_of(op)?, &iovs, &adverts)?));
        Ok(())
    })
}

/// Starts a prepared transfer over a connection to the endpoint of its adverts, as `uccl_post`
/// starts a request, at a cost that does not depend on its number of pieces. It may be under way
/// more than once. `notif` of `notif_len` bytes is for this post alone, or NULL. UCCL_UNKNOWN_ID:
/// one of its regions has been deregistered since it was prepared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_post_prepared(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    prepared: *const uccl_prepared_t,
    notif: *const c_void,
    notif_len: usize,
    transfer: *mut u64,
) -> uccl_status_t {
    call(|| {
        let known =
            PREPARED.get(prepared).ok_or_else(|| Failure::no_handle("prepared transfer"))?;
        // SAFETY: as many bytes as the caller says, and a place for an id.
        let (bytes, out) = unsafe {
            (args::many(notif.cast::<u8>(), notif_len, "notif")?, Out::new(transfer, "transfer")?)
        };
        // An empty notification is one too, if its pointer is not NULL.
        let notif = (!notif.is_null()).then_some(bytes);
        out.put(self::endpoint(endpoint)?.post_prepared(ConnId(conn), &known, notif)?.0);
        Ok(())
    })
}

/// Ends the handle of a prepared transfer. Posts of it that are under way go on.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_prepared_free(prepared: *mut uccl_prepared_t) -> uccl_status_t {
    call(|| {
        let known = PREPARED.remove(prepared);
        known.map(drop).ok_or_else(|| Failure::no_handle("prepared transfer"))
    })
}
