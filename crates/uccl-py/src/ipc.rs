//! The calls for peers on the same host, which name memory by address alone.
//!
//! They use the calls with regions: local memory is registered for the duration of a transfer,
//! which keeps its object, and advertised memory as in [`advertised`](crate::advertised).

use pyo3::prelude::*;
use uccl_p2p::{Error, Iov, MrId, Op, Status, TransferId};
use uccl_wire::{
    advert::Advert,
    ipc_info::{IPC_INFO_LEN, IpcInfo, IpcInfoError},
};

use crate::{
    args::{Args, Keywords, Positional, Signature},
    buffer,
    call::{self, Call, LocalPiece, Pieces, Spans},
    column::Blobs,
    endpoint::PyEndpoint,
    error::{self, CallError},
    memory::{Memory, Owner, too_long},
    params::Param,
    regions::register,
    registration::deregister,
};

pub(crate) use crate::call::{scalar_one_sided, scalar_two_sided};

/// A piece of local memory without a region yet.
pub(crate) struct IpcPiece {
    pub(crate) iov: Iov,
    /// The object of the piece, and the object's length.
    pub(crate) object: Option<(Owner, usize)>,
}

impl IpcPiece {
    fn unknown() -> Self {
        Self { iov: call::UNSIZED, object: None }
    }

    fn in_memory(memory: Memory, len: usize) -> Result<Self, CallError> {
        memory.fits(len)?;
        let Memory { addr, len: held, owner } = memory;
        let object = owner.map(|owner| (owner, held.unwrap_or(len)));
        Ok(Self { iov: Iov { ptr: addr, len, ..call::UNSIZED }, object })
    }

    fn check(&self) -> Result<(), CallError> {
        match &self.object {
            Some((_, held)) if self.iov.len > *held => Err(too_long(self.iov.len, *held)),
            _ => Ok(()),
        }
    }
}

impl LocalPiece for IpcPiece {
    fn of<const N: usize>(_: &PyEndpoint, op: Op, args: &Args<'_, N>) -> Result<Self, CallError> {
        piece(op, args.need(Param::Ptr)?, args.size(Param::Size)?)
    }

    fn advert<const N: usize>(args: &Args<'_, N>) -> Result<Advert, CallError> {
        advert(args.need(Param::Info)?)
    }

    fn iov(&mut self) -> &mut Iov {
        &mut self.iov
    }

    fn lies_in(&mut self, memory: Memory) {
        let Memory { len, owner, .. } = memory;
        self.object = owner.zip(len);
    }
}

/// Regions that last for one call.
struct TemporaryRegions<'a> {
    ep: &'a PyEndpoint,
    mrs: Vec<MrId>,
}

impl TemporaryRegions<'_> {
    /// Registers memory; its object is kept as long as the region.
    fn add(&mut self, local: IpcPiece) -> Result<Iov, Error> {
        let IpcPiece { iov, object } = local;
        let mr = register(&self.ep.core, iov.ptr, iov.len)?;
        self.mrs.push(mr);
        self.ep.regions.keep(mr, object.map(|(owner, _)| owner));
        Ok(Iov { mr, ..iov })
    }

    fn end(self, py: Python<'_>) -> Result<(), Error> {
        deregister(self.ep, py, self.mrs)
    }
}

/// A transfer of memory that is not registered yet.
type IpcCall = Call<IpcPiece>;

/// `readv_ipc(conn_id, ptr_v, size_v, info_v)`, `writev_ipc(...)`.
pub(crate) fn vector_one_sided<const N: usize>(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<N>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<IpcCall, CallError> {
    let a = signature.bind(args, kwargs)?;
    let spans = Spans::of(&a)?;
    let count = count(&a, &spans)?;
    let infos: Blobs<'_, IPC_INFO_LEN> = a.with(Param::InfoV, Blobs::of)?;
    infos.expect(signature.function, count)?;
    let pieces = Pieces::Many(pieces(op, &spans, count)?);
    let adverts = a.named(Param::InfoV, infos.decode(count, |info| decode(info), advert))?;
    Call::of(ep, op, &a, (pieces, Pieces::Many(adverts)))
}

/// Runs a call to its end.
pub(crate) fn run(
    ep: &PyEndpoint,
    py: Python<'_>,
    call: Result<IpcCall, CallError>,
) -> PyResult<bool> {
    let mut temporary = TemporaryRegions { ep, mrs: Vec::new() };
    let call = call.and_then(|call| prepare(call, &mut temporary));
    let ran = call::run(ep, py, call);
    let ended = temporary.end(py);
    Ok(ran? && error::ok(ended))
}

pub(crate) fn post(
    ep: &PyEndpoint,
    py: Python<'_>,
    call: Result<IpcCall, CallError>,
) -> PyResult<(bool, u64)> {
    sweep(ep, py);
    let mut temporary = TemporaryRegions { ep, mrs: Vec::new() };
    let call = call.and_then(|call| prepare(call, &mut temporary));
    let posted = call::post(ep, py, call);
    let Ok((true, transfer)) = posted else {
        let ended = temporary.end(py);
        return posted.map(|_| error::or_refuse(ended.map(|()| (false, 0)), (false, 0)));
    };
    ep.implicit.add(TransferId(transfer), temporary.mrs);
    Ok((true, transfer))
}

/// Ends the regions of a transfer that has ended.
pub(crate) fn ended(ep: &PyEndpoint, py: Python<'_>, transfer: TransferId) -> Result<(), Error> {
    deregister(ep, py, ep.implicit.take(transfer))
}

/// Ends the regions of transfers that ended without a poll.
fn sweep(ep: &PyEndpoint, py: Python<'_>) {
    const FEW: usize = 256;
    if ep.implicit.count() < FEW {
        return;
    }
    let over = py.detach(|| {
        let is_over = |id: &TransferId| !matches!(ep.core.poll(*id), Ok(Status::Pending));
        ep.implicit.transfers().into_iter().filter(is_over).collect::<Vec<_>>()
    });
    for transfer in over {
        // The caller does not read the result: a region that a peer may still touch stays
        // registered.
        let _ = ended(ep, py, transfer);
    }
}

fn prepare(call: IpcCall, temporary: &mut TemporaryRegions<'_>) -> Result<Call, CallError> {
    let IpcCall { conn, op, pieces, adverts, extras } = call;
    let pieces = match pieces {
        Pieces::One(piece) => Pieces::One(temporary.add(piece)?),
        Pieces::Many(pieces) => {
            let added = pieces.into_iter().map(|piece| temporary.add(piece));
            Pieces::Many(added.collect::<Result<_, _>>()?)
        }
    };
    Ok(Call { conn, op, pieces, adverts, extras })
}

pub(crate) fn piece(
    op: Op,
    ptr: &Bound<'_, PyAny>,
    size: Option<usize>,
) -> Result<IpcPiece, CallError> {
    let memory: Memory = call::memory(op, ptr)?;
    let len = memory.sized(size)?;
    IpcPiece::in_memory(memory, len)
}

/// The number of pieces, which a parameter may give as well.
pub(crate) fn count<const N: usize>(
    a: &Args<'_, N>,
    spans: &Spans<'_, '_, N>,
) -> Result<usize, CallError> {
    let count = a.opt(Param::NumIovs)?.unwrap_or(spans.len());
    spans.expect(count)?;
    Ok(count)
}

pub(crate) fn pieces<const N: usize>(
    op: Op,
    spans: &Spans<'_, '_, N>,
    count: usize,
) -> Result<Vec<IpcPiece>, CallError> {
    let mut pieces: Vec<_> = (0..count).map(|_| IpcPiece::unknown()).collect();
    spans.fill(op, &mut pieces)?;
    pieces.iter().try_for_each(IpcPiece::check)?;
    Ok(pieces)
}

/// Decodes the advert in the info that `advertise_ipc` made.
fn advert(info: &Bound<'_, PyAny>) -> Result<Advert, CallError> {
    let bytes = buffer::bytes(info)?;
    if bytes.len() != IPC_INFO_LEN {
        return Err(CallError::runtime(format!(
            "info must be exactly {} bytes (what advertise_ipc returned), not {}",
            IPC_INFO_LEN,
            bytes.len()
        )));
    }
    decode(&bytes).map_err(CallError::refuse)
}

fn decode(info: &[u8]) -> Result<Advert, IpcInfoError> {
    IpcInfo::decode(info).and_then(|info| info.advert())
}
