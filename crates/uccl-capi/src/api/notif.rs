use std::ffi::c_void;

use uccl_p2p::{ConnId, NoInterrupt};

use super::{call, deadline, endpoint, patience, uccl_endpoint_t, uccl_status_t};
use crate::{
    args::{self, Out, put_if_wanted},
    failure::Failure,
};

/// Takes a notification: the connection that it came over, and its bytes, which are valid until
/// this returns. It must not throw or jump out.
pub type uccl_notif_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, conn: u64, data: *const c_void, len: usize)>;

/// Sends a message of at most 64 MiB to the peer, and waits until it has arrived.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_send_notif(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    data: *const c_void,
    len: usize,
    timeout_ms: i64,
) -> uccl_status_t {
    call(|| {
        // SAFETY: as many bytes.
        let message = unsafe { args::many(data.cast::<u8>(), len, "data") }?;
        let (endpoint, timeout) = (self::endpoint(endpoint)?, deadline(timeout_ms)?);
        Ok(endpoint.run_notif(ConnId(conn), message, timeout, &mut NoInterrupt)?)
    })
}

/// As `uccl_send_notif`, but without waiting: `transfer` is for `uccl_poll`, `uccl_wait` and
/// `uccl_cancel`. The caller may reuse the bytes when this has returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_post_notif(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    data: *const c_void,
    len: usize,
    timeout_ms: i64,
    transfer: *mut u64,
) -> uccl_status_t {
    call(|| {
        // SAFETY: as many bytes, and a place for an id.
        let (message, out) = unsafe {
            (args::many(data.cast::<u8>(), len, "data")?, Out::new(transfer, "transfer")?)
        };
        let (endpoint, timeout) = (self::endpoint(endpoint)?, deadline(timeout_ms)?);
        out.put(endpoint.send_notif(ConnId(conn), message, timeout)?.0);
        Ok(())
    })
}

/// Waits until notifications have arrived, at most `timeout_ms` (0 only looks), and hands each to
/// `take`, in the order in which they came over their connection. `taken`, if not NULL, gets their
/// number; 0 is no failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_take_notifs(
    endpoint: *const uccl_endpoint_t,
    timeout_ms: i64,
    take: uccl_notif_fn,
    context: *mut c_void,
    taken: *mut usize,
) -> uccl_status_t {
    // SAFETY: the caller's promise.
    unsafe { hand_over(endpoint, None, timeout_ms, (take, context), taken) }
}

/// As `uccl_take_notifs`, for a caller that waits for the peer of a connection. Once the connection
/// has ended and all notifications have been taken, returns the reason of the end, such as
/// UCCL_CONNECTION_LOST. `take` gets the notifications of all connections.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_take_notifs_from(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    timeout_ms: i64,
    take: uccl_notif_fn,
    context: *mut c_void,
    taken: *mut usize,
) -> uccl_status_t {
    // SAFETY: the caller's promise.
    unsafe { hand_over(endpoint, Some(ConnId(conn)), timeout_ms, (take, context), taken) }
}

/// # Safety
/// The function may be called with its context, and `taken` is NULL or may be written.
unsafe fn hand_over(
    endpoint: *const uccl_endpoint_t,
    conn: Option<ConnId>,
    timeout_ms: i64,
    (take, context): (uccl_notif_fn, *mut c_void),
    taken: *mut usize,
) -> uccl_status_t {
    call(|| {
        let take = take.ok_or_else(|| Failure::invalid("take is NULL"))?;
        let (endpoint, patience) = (self::endpoint(endpoint)?, patience(timeout_ms)?);
        let notifs = match conn {
            None => endpoint.wait_notifs(patience, &mut NoInterrupt)?,
            Some(conn) => endpoint.wait_notifs_from(conn, patience, &mut NoInterrupt)?,
        };
        for notif in &notifs {
            let payload = &notif.payload;
            // SAFETY: the caller's function, with its own context.
            unsafe { take(context, notif.conn.0, payload.as_ptr().cast(), payload.len()) };
        }
        // SAFETY: NULL, or a place for a number.
        unsafe { put_if_wanted(taken, notifs.len()) };
        Ok(())
    })
}
