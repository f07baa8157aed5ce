use std::ffi::{c_char, c_void};

use uccl_p2p::{AddressPiece, AddressRequest, ConnId, MrId, NoInterrupt, Op, parse_address};

use super::{call, deadline, endpoint, uccl_endpoint_t, uccl_status_t};
use crate::{
    args::{self, Out},
    failure::{Answer, Failure},
};

/// A piece of memory on both sides, named by its addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct uccl_address_piece_t {
    /// Where it starts in this process, in registered memory.
    pub local: *mut c_void,
    /// Where it starts in the peer's process, in memory that the peer has published.
    pub remote: u64,
    /// How long it is, in bytes.
    pub len: usize,
}

/// Publishes a region: peers that are connected read and write it by its address, without an
/// advert, until it is deregistered. The endpoint's setting "publish" has to be "1".
#[unsafe(no_mangle)]
pub extern "C" fn uccl_publish(endpoint: *const uccl_endpoint_t, mr: u64) -> uccl_status_t {
    call(|| Ok(self::endpoint(endpoint)?.publish(MrId(mr))?))
}

/// The connection to the endpoint at `address`, made when it is first needed, and again when its
/// peer has died. All threads that ask for the address get the same one. The address is as for
/// `uccl_connect`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_reach(
    endpoint: *const uccl_endpoint_t,
    address: *const c_char,
    timeout_ms: i64,
    conn: *mut u64,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a string, and a place for an id.
        let (address, out) = unsafe { (args::text(address, "address")?, Out::new(conn, "conn")?) };
        let (endpoint, timeout) = (self::endpoint(endpoint)?, deadline(timeout_ms)?);
        out.put(endpoint.reach_any(&parse_address(address)?, timeout, &mut NoInterrupt)?.0);
        Ok(())
    })
}

/// Writes `count` pieces into memory that the peer has published, and waits until they have
/// arrived. A piece may span several regions. The peer's regions are looked up once and kept;
/// regions that the peer has registered anew are looked up again. UCCL_REFUSED: memory of the
/// peer's is not published.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_write_by_address(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    pieces: *const uccl_address_piece_t,
    count: usize,
    timeout_ms: i64,
) -> uccl_status_t {
    // SAFETY: the list is as long as the caller says.
    call(|| unsafe { run(endpoint, Op::Write, conn, pieces, count, timeout_ms) })
}

/// Reads `count` pieces of memory that the peer has published, as `uccl_write_by_address` writes
/// them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_read_by_address(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    pieces: *const uccl_address_piece_t,
    count: usize,
    timeout_ms: i64,
) -> uccl_status_t {
    // SAFETY: the list is as long as the caller says.
    call(|| unsafe { run(endpoint, Op::Read, conn, pieces, count, timeout_ms) })
}

/// # Safety
/// There are as many pieces.
unsafe fn run(
    endpoint: *const uccl_endpoint_t,
    op: Op,
    conn: u64,
    pieces: *const uccl_address_piece_t,
    count: usize,
    timeout_ms: i64,
) -> Answer {
    // SAFETY: the caller's promise.
    let pieces = unsafe { args::many(pieces, count, "pieces") }?;
    let piece = |piece: &uccl_address_piece_t| {
        let (local, remote, len) = (args::address(piece.local), piece.remote, piece.len);
        AddressPiece { local, remote, len }
    };
    let pieces: Vec<_> = pieces.iter().map(piece).collect();
    let (endpoint, timeout) = (self::endpoint(endpoint)?, deadline(timeout_ms)?);
    let request = AddressRequest { conn: ConnId(conn), op, pieces: &pieces, timeout };
    endpoint.run_by_address(&request, &mut NoInterrupt).map(drop).map_err(Failure::from)
}
