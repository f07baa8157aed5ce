//! The calls for peers on the same host, which name memory by address alone.
//!
//! They are the calls with regions underneath: local memory is registered for the length of a transfer, which keeps
//! its object, and advertised memory as [`advertised`](crate::advertised) has it.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use pyo3::prelude::*;
use uccl_p2p::{ConnId, Error, Iov, MrId, Op, Status, TransferId};
use uccl_wire::{
    advert::Advert,
    ipc_info::{IPC_INFO_LEN, IpcInfo, IpcInfoError},
};

use crate::{
    advertised::{self, Advertised},
    args::{Args, Named, Names, Positional, Signature},
    buffer,
    call::{
        self, CONN, Call, Extras, NOTIF, NUM_IOVS, PTR, PTR_V, Pieces, Place, SIZE, SIZE_V, STREAM,
        Spans, TIMEOUT,
    },
    column::Blobs,
    endpoint::PyEndpoint,
    error::{self, Stop, settle},
    memory::{Memory, Owner, too_long},
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
    pub(crate) advertised: Advertised,
}

/// A piece of local memory whose region is not made yet.
pub(crate) struct Local {
    iov: Iov,
    /// The object that it is of, and how long that is.
    object: Option<(Owner, usize)>,
}

impl Local {
    fn unknown() -> Self {
        Self { iov: call::UNSIZED, object: None }
    }

    fn of(memory: Memory, len: usize) -> Result<Self, Stop> {
        memory.fits(len)?;
        let Memory { addr, len: held, owner } = memory;
        let object = owner.map(|owner| (owner, held.unwrap_or(len)));
        Ok(Self { iov: Iov { ptr: addr, len, ..call::UNSIZED }, object })
    }

    fn check(&self) -> Result<(), Stop> {
        match &self.object {
            Some((_, held)) if self.iov.len > *held => Err(too_long(self.iov.len, *held)),
            _ => Ok(()),
        }
    }
}

impl Place for Local {
    fn iov(&mut self) -> &mut Iov {
        &mut self.iov
    }

    fn lies_in(&mut self, memory: Memory) {
        let Memory { len, owner, .. } = memory;
        self.object = owner.zip(len);
    }
}

/// Regions of one call, which ends them.
struct Temporary<'a> {
    ep: &'a PyEndpoint,
    mrs: Vec<MrId>,
}

impl Temporary<'_> {
    /// Registers memory; its object is kept for as long as the region.
    fn add(&mut self, local: Local) -> Result<Iov, Error> {
        let Local { iov, object } = local;
        let mr = register(&self.ep.core, iov.ptr, iov.len)?;
        self.mrs.push(mr);
        self.ep.regions.keep(mr, object.map(|(owner, _)| owner));
        Ok(Iov { mr, ..iov })
    }

    fn end(self, py: Python<'_>) -> Result<(), Error> {
        deregister(self.ep, py, self.mrs)
    }
}

/// Ends regions, and lets go of their objects; the error is the first of those that a peer may still touch, which
/// are kept.
pub(crate) fn deregister(ep: &PyEndpoint, py: Python<'_>, mrs: Vec<MrId>) -> Result<(), Error> {
    if mrs.is_empty() {
        return Ok(());
    }
    let mut ended = Ok(());
    let gone = py.detach(|| {
        let end = |mr: &MrId| match ep.core.deregister(*mr) {
            // An endpoint that was closed has ended it.
            Ok(()) | Err(Error::UnknownRegion(_)) => true,
            Err(e) => {
                ended = std::mem::replace(&mut ended, Ok(())).and(Err(e));
                false
            }
        };
        mrs.into_iter().filter(end).collect::<Vec<_>>()
    });
    gone.into_iter().for_each(|mr| drop(ep.regions.forget(mr)));
    ended
}

/// A transfer whose memory is not registered yet.
pub(crate) struct IpcCall {
    conn: ConnId,
    op: Op,
    pieces: Pieces<Local>,
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
    let mut temporary = Temporary { ep, mrs: Vec::new() };
    let call = call.and_then(|call| prepare(call, &mut temporary));
    let ran = ep.run(py, call);
    let ended = temporary.end(py);
    Ok(ran? && error::ok(ended))
}

/// Starts a call.
pub(crate) fn post(
    ep: &PyEndpoint,
    py: Python<'_>,
    call: Result<IpcCall, Stop>,
) -> PyResult<(bool, u64)> {
    sweep(ep, py);
    let mut temporary = Temporary { ep, mrs: Vec::new() };
    let call = call.and_then(|call| prepare(call, &mut temporary));
    let posted = ep.post(py, call);
    let Ok((true, transfer)) = posted else {
        let ended = temporary.end(py);
        return posted.map(|_| error::or_refuse(ended.map(|()| (false, 0)), (false, 0)));
    };
    let mut transfers = ep.implicit.transfers.lock();
    transfers.insert(transfer, temporary.mrs);
    ep.implicit.count.store(transfers.len(), Ordering::Release);
    Ok((true, transfer))
}

/// Ends the regions of a transfer that has ended.
pub(crate) fn ended(ep: &PyEndpoint, py: Python<'_>, transfer: TransferId) -> Result<(), Error> {
    if ep.implicit.count.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let mrs = {
        let mut transfers = ep.implicit.transfers.lock();
        let mrs = transfers.remove(&transfer.0);
        ep.implicit.count.store(transfers.len(), Ordering::Release);
        mrs
    };
    deregister(ep, py, mrs.unwrap_or_default())
}

/// Ends the regions of transfers that ended without anybody asking.
fn sweep(ep: &PyEndpoint, py: Python<'_>) {
    const FEW: usize = 256;
    if ep.implicit.count.load(Ordering::Acquire) < FEW {
        return;
    }
    let over = py.detach(|| {
        let transfers: Vec<u64> = ep.implicit.transfers.lock().keys().copied().collect();
        let is_over = |id: &TransferId| !matches!(ep.core.poll(*id), Ok(Status::Pending));
        transfers.into_iter().map(TransferId).filter(is_over).collect::<Vec<_>>()
    });
    for transfer in over {
        // Nobody asks for this transfer any more: what a peer may still touch stays registered.
        let _ = ended(ep, py, transfer);
    }
}

/// `advertise_ipc(conn_id, ptr, size)`.
pub(crate) fn advertise(
    ep: &Bound<'_, PyEndpoint>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> PyResult<Option<Vec<u8>>> {
    let a = ADVERTISE.bind(args, kwargs)?;
    let conn = ConnId(a.id(0)?);
    let piece = settle(piece(Op::Recv, a.need(1)?, a.size(2)?).map(Some), None)?;
    let Some(piece) = piece else { return Ok(None) };
    settle(make(ep, conn, piece).map(Some), None)
}

/// `advertisev_ipc(conn_id, ptr_v, size_v)`.
pub(crate) fn advertisev(
    ep: &Bound<'_, PyEndpoint>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> PyResult<Option<Vec<Vec<u8>>>> {
    let a = ADVERTISEV.bind(args, kwargs)?;
    let conn = ConnId(a.id(0)?);
    let spans = Spans::of(&a, 1)?;
    let pieces = count(&a, &spans, 3).and_then(|count| pieces(Op::Recv, &spans, count));
    let pieces = settle(pieces.map(Some), None)?;
    let Some(pieces) = pieces else { return Ok(None) };
    let made = pieces.into_iter().map(|piece| make(ep, conn, piece)).collect();
    settle(Result::<Vec<_>, _>::map(made, Some), None)
}

fn make(ep: &Bound<'_, PyEndpoint>, conn: ConnId, piece: Local) -> Result<Vec<u8>, Stop> {
    let Local { iov, object } = piece;
    let mr = advertised::add(ep, (conn, iov.ptr, iov.len), object.map(|(owner, _)| owner))?;
    let ep = ep.get();
    let advert = ep.core.advertise(mr, iov.ptr, iov.len)?;
    Ok(ep.ipc_info(&advert).to_vec())
}

fn prepare(call: IpcCall, temporary: &mut Temporary<'_>) -> Result<Call, Stop> {
    let IpcCall { conn, op, pieces, adverts, extras } = call;
    let iovs = match pieces {
        Pieces::One(piece) => Pieces::One(temporary.add(piece)?),
        Pieces::Many(pieces) => {
            let added = pieces.into_iter().map(|piece| temporary.add(piece));
            Pieces::Many(added.collect::<Result<_, _>>()?)
        }
    };
    Ok(Call { conn, op, iovs, adverts, extras })
}

fn piece(op: Op, ptr: &Bound<'_, PyAny>, size: Option<usize>) -> Result<Local, Stop> {
    let memory: Memory = call::memory(op, ptr)?;
    let len = memory.sized(size)?;
    Local::of(memory, len)
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
) -> Result<Vec<Local>, Stop> {
    let mut pieces: Vec<_> = (0..count).map(|_| Local::unknown()).collect();
    spans.fill(op, &mut pieces)?;
    pieces.iter().try_for_each(Local::check)?;
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
