use std::{ffi::c_char, sync::Arc, task::Poll, time::Duration};

use uccl_p2p::{
    ConnId, ConnectHandle, ConnectRequest, Endpoint, Error, NoInterrupt, parse_address,
    parse_ip_address,
};

use super::{call, call_for, config_or_environment, deadline, uccl_config_t, uccl_status_t};
use crate::{
    args::{self, Out, TextOut},
    failure::{Answer, Failure},
    handles::Handles,
};

/// One process's engine for one GPU (or none): it listens, connects, registers memory and moves
/// data.
pub struct uccl_endpoint_t;

/// A connect that was begun by `uccl_connect_begin`.
pub struct uccl_connect_t;

/// The endpoint's time: its setting timeout_ms to connect, transfer_timeout_ms for all else. For a
/// call that only waits for something to happen (`uccl_wait`, `uccl_take_notifs`) it is no limit.
pub const UCCL_TIMEOUT_DEFAULT: i64 = -1;
/// No limit.
pub const UCCL_TIMEOUT_NEVER: i64 = -2;

/// Bytes that have room for every address, with its NUL.
pub const UCCL_ADDRESS_SIZE: usize = 128;

/// A connection that was accepted.
#[repr(C)]
pub struct uccl_accepted_t {
    /// The connection.
    pub conn: u64,
    /// The peer's GPU.
    pub gpu_index: u32,
    /// The IP that the peer connected from.
    pub ip: [c_char; 48],
}

/// Counters of an endpoint since it was made.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct uccl_stats_t {
    /// Open connections.
    pub connections: u64,
    /// Registered regions.
    pub regions: u64,
    /// Transfers posted here.
    pub transfers_posted: u64,
    /// Transfers that ended well.
    pub transfers_done: u64,
    /// Transfers that failed.
    pub transfers_failed: u64,
    /// Bytes that this endpoint's transfers sent.
    pub bytes_sent: u64,
    /// Bytes that this endpoint's transfers received.
    pub bytes_received: u64,
    /// Notifications sent.
    pub notifs_sent: u64,
    /// Notifications received.
    pub notifs_received: u64,
    /// Accesses by peers that were refused.
    pub refused_accesses: u64,
}

static ENDPOINTS: Handles<Endpoint> = Handles::new();
static CONNECTS: Handles<ConnectHandle> = Handles::new();

/// The endpoint of a handle.
pub(crate) fn endpoint(handle: *const uccl_endpoint_t) -> Answer<Arc<Endpoint>> {
    ENDPOINTS.get(handle).ok_or_else(|| Failure::no_handle("endpoint"))
}

fn connect(handle: *const uccl_connect_t) -> Answer<Arc<ConnectHandle>> {
    CONNECTS.get(handle).ok_or_else(|| Failure::no_handle("connect"))
}

/// Makes an endpoint, which listens from now on. If `config` is NULL, it has the environment's
/// settings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_endpoint_create(
    config: *const uccl_config_t,
    endpoint: *mut *mut uccl_endpoint_t,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a place for a pointer.
        let out = unsafe { Out::new(endpoint, "endpoint") }?;
        out.put(ENDPOINTS.add(Endpoint::new(config_or_environment(config)?)?));
        Ok(())
    })
}

/// Ends an endpoint: its connections are closed, and unfinished work fails, in other threads' calls
/// too. When this returns UCCL_OK, no peer's access lands in its memory any more.
/// UCCL_STILL_TOUCHED means that a peer which is stuck in the middle of an access may still touch
/// the regions that `uccl_last_error` names: their memory has to stay allocated, and the same call
/// waits again.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_endpoint_destroy(endpoint: *mut uccl_endpoint_t) -> uccl_status_t {
    call(|| {
        self::endpoint(endpoint)?.close()?;
        ENDPOINTS.remove(endpoint).map(drop).ok_or_else(|| Failure::no_handle("endpoint"))
    })
}

/// Writes the address of this endpoint, such as "10.0.0.1:28100?0": IP, port and GPU. A peer passes
/// it to `uccl_connect`; the program brings it there. UCCL_ADDRESS_SIZE bytes have room for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_endpoint_address(
    endpoint: *const uccl_endpoint_t,
    text: *mut c_char,
    capacity: usize,
) -> uccl_status_t {
    call(|| {
        // SAFETY: room for as many bytes.
        let out = unsafe { TextOut::new(text, capacity, "text") }?;
        out.put(&self::endpoint(endpoint)?.metadata().to_string())
    })
}

/// Reads the endpoint's counters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_endpoint_stats(
    endpoint: *const uccl_endpoint_t,
    stats: *mut uccl_stats_t,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a place for the counters.
        let out = unsafe { Out::new(stats, "stats") }?;
        let now = self::endpoint(endpoint)?.stats()?;
        out.put(uccl_stats_t {
            connections: now.connections,
            regions: now.regions,
            transfers_posted: now.transfers_posted,
            transfers_done: now.transfers_done,
            transfers_failed: now.transfers_failed,
            bytes_sent: now.bytes_sent,
            bytes_received: now.bytes_received,
            notifs_sent: now.notifs_sent,
            notifs_received: now.notifs_received,
            refused_accesses: now.refused_accesses,
        });
        Ok(())
    })
}

/// Connects to the endpoint at `address`: the text that `uccl_endpoint_address` wrote there, or
/// "host:port". A name's addresses are all tried, in their order, within the timeout. The
/// connection works both ways.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_connect(
    endpoint: *const uccl_endpoint_t,
    address: *const c_char,
    timeout_ms: i64,
    conn: *mut u64,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a string, and a place for an id.
        let (address, out) = unsafe { (args::text(address, "address")?, Out::new(conn, "conn")?) };
        let (endpoint, timeout) = (self::endpoint(endpoint)?, deadline(timeout_ms)?);
        let addrs = parse_address(address)?;
        out.put(endpoint.connect_any(&addrs, timeout, &mut NoInterrupt)?.0);
        Ok(())
    })
}

/// Begins to connect, and returns at once: `uccl_connect_poll` does the rest, and
/// `uccl_connect_cancel` ends it. Neither this nor `uccl_connect_poll` blocks, and no thread is
/// started for it. Any number may be under way at a time.
///
/// The host in `address` is an IP; a name is refused, because looking it up may block. The timeout
/// counts from here, and `uccl_connect_poll` sees its end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_connect_begin(
    endpoint: *const uccl_endpoint_t,
    address: *const c_char,
    timeout_ms: i64,
    connect: *mut *mut uccl_connect_t,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a string, and a place for a pointer.
        let (address, out) =
            unsafe { (args::text(address, "address")?, Out::new(connect, "connect")?) };
        let (endpoint, timeout) = (self::endpoint(endpoint)?, deadline(timeout_ms)?);
        let addrs = [parse_ip_address(address)?];
        let request = ConnectRequest { timeout, ..ConnectRequest::new(&addrs) };
        out.put(CONNECTS.add(endpoint.begin_connect(&request)?));
        Ok(())
    })
}

/// Goes on with a connect as far as is possible now. UCCL_IN_PROGRESS: it is under way. UCCL_OK:
/// `conn` has the connection. Anything else says why there is none. A result stays: later calls
/// return it again, until `uccl_connect_cancel`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_connect_poll(
    connect: *const uccl_connect_t,
    conn: *mut u64,
) -> uccl_status_t {
    call_for(|| {
        // SAFETY: a place for an id.
        let out = unsafe { Out::new(conn, "conn") }?;
        match self::connect(connect)?.poll() {
            Poll::Pending => Ok(uccl_status_t::UCCL_IN_PROGRESS),
            Poll::Ready(result) => {
                out.put(result?.0);
                Ok(uccl_status_t::UCCL_OK)
            }
        }
    })
}

/// Ends a connect that is under way, and leaves nothing of it: no socket, no memory, no connection.
/// Ends the handle in any case, so call this once for each connect that was begun. A connection
/// that `uccl_connect_poll` has returned stays.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_connect_cancel(connect: *mut uccl_connect_t) -> uccl_status_t {
    call(|| {
        let ended = self::connect(connect)?;
        CONNECTS.remove(connect);
        match ended.cancel() {
            Err(forked @ Error::Forked { .. }) => Err(forked.into()),
            _ => Ok(()),
        }
    })
}

/// Waits for a peer that connects. A timeout of 0 takes a connection that has been made already, or
/// else ends with UCCL_DEADLINE: this is the form that is polled, and does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_accept(
    endpoint: *const uccl_endpoint_t,
    timeout_ms: i64,
    accepted: *mut uccl_accepted_t,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a place for a connection.
        let out = unsafe { Out::new(accepted, "accepted") }?;
        let endpoint = self::endpoint(endpoint)?;
        let peer = match timeout_ms {
            0 => endpoint.try_accept()?.ok_or(Error::Timeout(Duration::ZERO))?,
            ms => endpoint.accept(deadline(ms)?, &mut NoInterrupt)?,
        };
        let mut ip = [0; 48];
        for (to, from) in ip.iter_mut().zip(peer.ip.to_string().bytes()) {
            *to = from as c_char;
        }
        out.put(uccl_accepted_t { conn: peer.conn.0, gpu_index: peer.gpu_index, ip });
        Ok(())
    })
}

/// Closes a connection. Its unfinished transfers fail.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_disconnect(endpoint: *const uccl_endpoint_t, conn: u64) -> uccl_status_t {
    call(|| Ok(self::endpoint(endpoint)?.disconnect(ConnId(conn))?))
}

/// Whether transfers can be posted on a connection; if not, `uccl_last_error` has the reason.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_check_connection(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
) -> uccl_status_t {
    call(|| Ok(self::endpoint(endpoint)?.check_connection(ConnId(conn))?))
}
