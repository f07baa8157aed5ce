//! The calls for peers on the same host, which name memory by address alone.
//!
//! They are the calls with regions underneath: local memory is registered for the length of a transfer,
//! and advertised memory until its connection is removed.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use pyo3::prelude::*;
use uccl_p2p::{ConnId, Endpoint, Error, Iov, MrId, Op, Status, TransferId};
use uccl_wire::{
    advert::Advert,
    ipc_info::{IPC_INFO_LEN, IpcInfo, IpcInfoError},
};

use crate::{
    args::{Args, Named, Names, Positional, Signature},
    buffer,
    call::{
        self, CONN, Call, Extras, NOTIF, NUM_IOVS, PTR, PTR_V, Pieces, SIZE, SIZE_V, STREAM, Spans,
        TIMEOUT,
    },
    column::Blobs,
    endpoint::PyEndpoint,
    error::{self, Stop, settle},
    memory::Memory,
    regions::register,
};

const INFO: Names = &["info", "info_blob"];
const INFO_V: Names = &["info_v", "info_list"];

/// `send_ipc` and `recv_ipc`.
pub(crate) const fn two_sided(function: &'static str) -> Signature<6> {
    Signature { function, params: [CONN, PTR, SIZE, NOTIF, TIMEOUT, STREAM], positional: 3 }
}

/// `read_ipc` and `write_ipc`.
pub(crate) const fn one_sided(function: &'static str) -> Signature<7> {
    Signature { function, params: [CONN, PTR, SIZE, INFO, NOTIF, TIMEOUT, STREAM], positional: 4 }
}

/// `readv_ipc` and `writev_ipc`.
pub(crate) const fn one_sided_v(function: &'static str) -> Signature<8> {
    Signature {
        function,
        params: [CONN, PTR_V, SIZE_V, INFO_V, NUM_IOVS, NOTIF, TIMEOUT, STREAM],
        positional: 5,
    }
}

static ADVERTISE: Signature<3> =
    Signature { function: "advertise_ipc", params: [CONN, PTR, SIZE], positional: 3 };
static ADVERTISEV: Signature<4> = Signature {
    function: "advertisev_ipc",
    params: [CONN, PTR_V, SIZE_V, NUM_IOVS],
    positional: 4,
};

/// Regions that no caller named.
#[derive(Default)]
pub(crate) struct Implicit {
    /// Of transfers not yet known to have ended.
    transfers: Mutex<HashMap<u64, Vec<MrId>>>,
    /// How many transfers that is, for a look without the lock.
    count: AtomicUsize,
    /// Of advertised memory, by connection, address and length.
    advertised: Mutex<HashMap<(u64, usize, usize), MrId>>,
}

/// Regions of one call, which ends them.
struct Temporary<'a> {
    core: &'a Endpoint,
    mrs: Vec<MrId>,
}

impl Temporary<'_> {
    fn add(&mut self, ptr: usize, len: usize) -> Result<Iov, Error> {
        let mr = register(self.core, ptr, len)?;
        self.mrs.push(mr);
        Ok(Iov { mr, ptr, len })
    }
}

impl Temporary<'_> {
    fn end(self) -> Result<(), Error> {
        deregister(self.core, self.mrs)
    }
}

/// Ends regions; the error is the first of those that a peer may still touch.
fn deregister(core: &Endpoint, mrs: impl IntoIterator<Item = MrId>) -> Result<(), Error> {
    let mut ended = Ok(());
    for mr in mrs {
        match core.deregister(mr) {
            // An endpoint that was closed has ended it.
            Ok(()) | Err(Error::UnknownRegion(_)) => {}
            Err(e) => ended = ended.and(Err(e)),
        }
    }
    ended
}

/// A transfer whose memory is not registered yet.
pub(crate) struct IpcCall {
    conn: ConnId,
    op: Op,
    /// Without their regions.
    pieces: Pieces<Iov>,
    adverts: Pieces<Advert>,
    extras: Extras,
}

/// `send_ipc(conn_id, ptr, size)`, `recv_ipc(...)`.
pub(crate) fn scalar_two_sided(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<6>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<IpcCall, Stop> {
    let a = signature.bind(args, kwargs)?;
    let pieces = Pieces::One(piece(op, a.need(1)?, a.size(2)?)?);
    let extras = Extras::of(ep, &a, 3)?;
    Ok(IpcCall { conn: ConnId(a.id(0)?), op, pieces, adverts: Pieces::Many(Vec::new()), extras })
}

/// `read_ipc(conn_id, ptr, size, info)`, `write_ipc(...)`.
pub(crate) fn scalar_one_sided(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<7>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<IpcCall, Stop> {
    let a = signature.bind(args, kwargs)?;
    let pieces = Pieces::One(piece(op, a.need(1)?, a.size(2)?)?);
    let adverts = Pieces::One(advert(a.need(3)?)?);
    let extras = Extras::of(ep, &a, 4)?;
    Ok(IpcCall { conn: ConnId(a.id(0)?), op, pieces, adverts, extras })
}

/// `readv_ipc(conn_id, ptr_v, size_v, info_v)`, `writev_ipc(...)`.
pub(crate) fn vector_one_sided(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<8>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<IpcCall, Stop> {
    let a = signature.bind(args, kwargs)?;
    let spans = Spans::of(&a, 1)?;
    let count = count(&a, &spans, 4)?;
    let infos: Blobs<'_, IPC_INFO_LEN> = a.with(3, Blobs::of)?;
    infos.expect(signature.function, count)?;
    let pieces = Pieces::Many(pieces(op, &spans, count)?);
    let adverts = a.named(3, infos.decode(count, |info| decode(info), advert))?;
    let adverts = Pieces::Many(adverts);
    let extras = Extras::of(ep, &a, 5)?;
    Ok(IpcCall { conn: ConnId(a.id(0)?), op, pieces, adverts, extras })
}

/// Runs a call to its end.
pub(crate) fn run(ep: &PyEndpoint, py: Python<'_>, call: Result<IpcCall, Stop>) -> PyResult<bool> {
    let mut temporary = Temporary { core: &ep.core, mrs: Vec::new() };
    let call = call.and_then(|call| prepare(call, &mut temporary));
    let ran = ep.run(py, call);
    let ended = py.detach(|| temporary.end());
    Ok(ran? && error::ok(ended))
}

/// Starts a call.
pub(crate) fn post(
    ep: &PyEndpoint,
    py: Python<'_>,
    call: Result<IpcCall, Stop>,
) -> PyResult<(bool, u64)> {
    sweep(ep, py);
    let mut temporary = Temporary { core: &ep.core, mrs: Vec::new() };
    let call = call.and_then(|call| prepare(call, &mut temporary));
    let posted = ep.post(py, call);
    let Ok((true, transfer)) = posted else {
        let ended = py.detach(|| temporary.end());
        return posted.map(|_| error::or_refuse(ended.map(|()| (false, 0)), (false, 0)));
    };
    let mut transfers = ep.implicit.transfers.lock();
    transfers.insert(transfer, temporary.mrs);
    ep.implicit.count.store(transfers.len(), Ordering::Release);
    Ok((true, transfer))
}

/// Ends the regions of a transfer that has ended.
pub(crate) fn ended(ep: &PyEndpoint, transfer: TransferId) -> Result<(), Error> {
    if ep.implicit.count.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let mrs = {
        let mut transfers = ep.implicit.transfers.lock();
        let mrs = transfers.remove(&transfer.0);
        ep.implicit.count.store(transfers.len(), Ordering::Release);
        mrs
    };
    deregister(&ep.core, mrs.unwrap_or_default())
}

/// Ends the regions of transfers that ended without anybody asking.
fn sweep(ep: &PyEndpoint, py: Python<'_>) {
    const FEW: usize = 256;
    if ep.implicit.count.load(Ordering::Acquire) < FEW {
        return;
    }
    py.detach(|| {
        let transfers: Vec<u64> = ep.implicit.transfers.lock().keys().copied().collect();
        for transfer in transfers.into_iter().map(TransferId) {
            if !matches!(ep.core.poll(transfer), Ok(Status::Pending)) {
                // Nobody asks for this transfer any more: what a peer may still touch stays registered.
                let _ = ended(ep, transfer);
            }
        }
    });
}

/// `advertise_ipc(conn_id, ptr, size)`.
pub(crate) fn advertise(
    ep: &PyEndpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> PyResult<Option<Vec<u8>>> {
    let a = ADVERTISE.bind(args, kwargs)?;
    let conn = ConnId(a.id(0)?);
    let piece = settle(piece(Op::Recv, a.need(1)?, a.size(2)?).map(Some), None)?;
    let Some(piece) = piece else { return Ok(None) };
    settle(py.detach(|| make(ep, conn, &piece)).map(Some), None)
}

/// `advertisev_ipc(conn_id, ptr_v, size_v)`.
pub(crate) fn advertisev(
    ep: &PyEndpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> PyResult<Option<Vec<Vec<u8>>>> {
    let a = ADVERTISEV.bind(args, kwargs)?;
    let conn = ConnId(a.id(0)?);
    let spans = Spans::of(&a, 1)?;
    let pieces = count(&a, &spans, 3).and_then(|count| pieces(Op::Recv, &spans, count));
    let pieces = settle(pieces.map(Some), None)?;
    let Some(pieces) = pieces else { return Ok(None) };
    let made = py.detach(|| pieces.iter().map(|piece| make(ep, conn, piece)).collect());
    settle(Result::<Vec<_>, _>::map(made, Some), None)
}

/// Ends the regions that were advertised over a connection.
pub(crate) fn disconnected(ep: &PyEndpoint, conn: ConnId) -> Result<(), Error> {
    let mut mrs = Vec::new();
    ep.implicit.advertised.lock().retain(|&(of, _, _), mr| {
        if of == conn.0 {
            mrs.push(*mr);
        }
        of != conn.0
    });
    deregister(&ep.core, mrs)
}

fn make(ep: &PyEndpoint, conn: ConnId, piece: &Iov) -> Result<Vec<u8>, Stop> {
    ep.core.connection(conn)?;
    let mut advertised = ep.implicit.advertised.lock();
    let key = (conn.0, piece.ptr, piece.len);
    let mr = match advertised.get(&key) {
        Some(&mr) => mr,
        None => *advertised.entry(key).or_insert(register(&ep.core, piece.ptr, piece.len)?),
    };
    let advert = ep.core.advertise(mr, piece.ptr, piece.len)?;
    Ok(ep.ipc_info(&advert).to_vec())
}

fn prepare(call: IpcCall, temporary: &mut Temporary<'_>) -> Result<Call, Stop> {
    let IpcCall { conn, op, mut pieces, adverts, extras } = call;
    for piece in pieces.as_mut_slice() {
        *piece = temporary.add(piece.ptr, piece.len)?;
    }
    Ok(Call { conn, op, iovs: pieces, adverts, extras })
}

fn piece(op: Op, ptr: &Bound<'_, PyAny>, size: Option<usize>) -> Result<Iov, Stop> {
    let memory: Memory = call::memory(op, ptr)?;
    Ok(Iov { ptr: memory.addr, len: memory.sized(size)?, ..call::UNSIZED })
}

/// How many pieces there are; the parameter `at` may say so too.
fn count<const N: usize>(
    a: &Args<'_, N>,
    spans: &Spans<'_, '_, N>,
    at: usize,
) -> Result<usize, Stop> {
    let count = a.opt(at)?.unwrap_or(spans.len());
    spans.expect(count)?;
    Ok(count)
}

fn pieces<const N: usize>(
    op: Op,
    spans: &Spans<'_, '_, N>,
    count: usize,
) -> Result<Vec<Iov>, Stop> {
    let mut pieces = vec![call::UNSIZED; count];
    spans.fill(op, &mut pieces)?;
    Ok(pieces)
}

/// The advert in what `advertise_ipc` made.
fn advert(info: &Bound<'_, PyAny>) -> Result<Advert, Stop> {
    let bytes = buffer::bytes(info)?;
    if bytes.len() != IPC_INFO_LEN {
        return Err(Stop::runtime(format!(
            "info must be exactly {} bytes (what advertise_ipc returned), not {}",
            IPC_INFO_LEN,
            bytes.len()
        )));
    }
    decode(&bytes).map_err(Stop::refuse)
}

fn decode(info: &[u8]) -> Result<Advert, IpcInfoError> {
    IpcInfo::decode(info).and_then(|info| info.advert())
}
