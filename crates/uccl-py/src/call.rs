//! Converts transfers from the caller's form to the engine's requests.

use std::time::Duration;

use pyo3::{exceptions::PyTypeError, prelude::*};
use uccl_p2p::{ConnId, CudaStream, Iov, MrId, Op, Request, Signal};
use uccl_wire::advert::{ADVERT_LEN, Advert};

use crate::{
    args::{Args, Keywords, Positional, Signature},
    buffer,
    column::{Blobs, Column, same_length},
    endpoint::PyEndpoint,
    error::{CallError, settle},
    interrupt::waiting,
    memory::Memory,
    meta::advert,
    params::Param,
    reuse::region_of,
    signal, stream,
};

/// One piece without a heap allocation, or many.
pub(crate) enum Pieces<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> Pieces<T> {
    fn as_slice(&self) -> &[T] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}

/// A requested transfer of memory in this form.
pub(crate) struct Call<P = Iov> {
    pub(crate) conn: ConnId,
    pub(crate) op: Op,
    pub(crate) pieces: Pieces<P>,
    pub(crate) adverts: Pieces<Advert>,
    pub(crate) extras: Extras,
}

/// Optional parts of any transfer.
#[derive(Default)]
pub(crate) struct Extras {
    pub(crate) notif: Option<Vec<u8>>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) stream: Option<CudaStream>,
    pub(crate) signal: Option<Signal>,
    pub(crate) context: u32,
}

impl<P> Call<P> {
    /// Reads the parameters that all calls have.
    pub(crate) fn of<const N: usize>(
        ep: &PyEndpoint,
        op: Op,
        args: &Args<'_, N>,
        (pieces, adverts): (Pieces<P>, Pieces<Advert>),
    ) -> Result<Self, CallError> {
        let extras = Extras::of(ep, args)?;
        Ok(Self { conn: ConnId(args.id(Param::Conn)?), op, pieces, adverts, extras })
    }
}

impl Call {
    pub(crate) fn request(&self) -> Request<'_> {
        Request {
            conn: self.conn,
            op: self.op,
            iovs: self.pieces.as_slice(),
            adverts: self.adverts.as_slice(),
            notif: self.extras.notif.as_deref(),
            timeout: self.extras.timeout,
            after: self.extras.stream,
            signal: self.extras.signal,
            context: self.extras.context,
        }
    }
}

impl Extras {
    /// Reads the parameters that the call has.
    pub(crate) fn of<const N: usize>(
        ep: &PyEndpoint,
        args: &Args<'_, N>,
    ) -> Result<Self, CallError> {
        let bytes = |notif| buffer::bytes(notif).map(|bytes| bytes.into_owned());
        let notif = args.get(Param::Notif).map(bytes).transpose()?;
        let stream =
            args.get(Param::Stream).map(|stream| stream::of(&ep.core, stream)).transpose()?;
        let signal = signal::of(args)?;
        let context = args.opt(Param::Context)?.unwrap_or(0);
        Ok(Self { notif, timeout: args.seconds(Param::Timeout)?, stream, signal, context })
    }
}

/// Runs a transfer to its end.
pub(crate) fn run(
    ep: &PyEndpoint,
    py: Python<'_>,
    call: Result<Call, CallError>,
) -> PyResult<bool> {
    let ran = call.and_then(|call| {
        let request = call.request();
        waiting(py, &ep.core, |core, interrupt| core.run(&request, interrupt))??;
        Ok(true)
    });
    settle(ran, false)
}

/// Starts a transfer: `(ok, transfer_id)`.
pub(crate) fn post(
    ep: &PyEndpoint,
    py: Python<'_>,
    call: Result<Call, CallError>,
) -> PyResult<(bool, u64)> {
    let core = &ep.core;
    let posted = call.and_then(|call| {
        let request = call.request();
        Ok((true, py.detach(|| core.post(&request))?.0))
    });
    settle(posted, (false, 0))
}

/// `send(conn_id, mr_id, ptr, size)`, `recv(...)`; without `mr_id` for memory by address.
pub(crate) fn scalar_two_sided<P: LocalPiece, const N: usize>(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<N>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<Call<P>, CallError> {
    let a = signature.bind(args, kwargs)?;
    let piece = P::of(ep, op, &a)?;
    Call::of(ep, op, &a, (Pieces::One(piece), Pieces::Many(Vec::new())))
}

/// `read(conn_id, mr_id, ptr, size, meta)`, `write(...)`; without `mr_id` for memory by address.
pub(crate) fn scalar_one_sided<P: LocalPiece, const N: usize>(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<N>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<Call<P>, CallError> {
    let a = signature.bind(args, kwargs)?;
    let piece = P::of(ep, op, &a)?;
    let advert = P::advert(&a)?;
    Call::of(ep, op, &a, (Pieces::One(piece), Pieces::One(advert)))
}

/// `sendv(conn_id, mr_id_v, ptr_v, size_v, num_iovs)`, `recvv(...)`.
pub(crate) fn vector_two_sided<const N: usize>(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<N>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<Call, CallError> {
    let a = signature.bind(args, kwargs)?;
    let iovs = Table::of(&a, a.size(Param::NumIovs)?)?.iovs(ep, op)?;
    Call::of(ep, op, &a, (Pieces::Many(iovs), Pieces::Many(Vec::new())))
}

/// `readv(conn_id, mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs)`, `writev(...)`.
pub(crate) fn vector_one_sided<const N: usize>(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<N>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<Call, CallError> {
    let a = signature.bind(args, kwargs)?;
    let (iovs, adverts) = one_sided_pieces(ep, op, &a)?;
    Call::of(ep, op, &a, (Pieces::Many(iovs), Pieces::Many(adverts)))
}

/// The pieces of a vector call, and the adverts of the peer's memory.
pub(crate) fn one_sided_pieces<const N: usize>(
    ep: &PyEndpoint,
    op: Op,
    a: &Args<'_, N>,
) -> Result<(Vec<Iov>, Vec<Advert>), CallError> {
    let table = Table::of(a, a.size(Param::NumIovs)?)?;
    let metas: Blobs<'_, ADVERT_LEN> = a.with(Param::MetaV, Blobs::of)?;
    // Lengths are checked before contents: a list of the wrong length raises with any contents.
    metas.expect(a.function(), table.count)?;
    let iovs = table.iovs(ep, op)?;
    let decode = |meta: &[u8; ADVERT_LEN]| Advert::decode(meta);
    let adverts = a.named(Param::MetaV, metas.decode(table.count, decode, advert))?;
    Ok((iovs, adverts))
}

/// The memory of a pointer, checked to be writable if the operation writes it.
pub(crate) fn memory(op: Op, ptr: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let memory = Memory::of(ptr)?;
    if writes(op) && memory.is_readonly() {
        return Err(PyTypeError::new_err("a read-only buffer cannot be the destination"));
    }
    Ok(memory)
}

/// Whether the operation writes local memory.
fn writes(op: Op) -> bool {
    matches!(op, Op::Recv | Op::Read)
}

/// Refuses an operation that writes a read-only region.
fn writable(ep: &PyEndpoint, op: Op, iovs: &[Iov]) -> Result<(), CallError> {
    match ep.regions.readonly_of(iovs) {
        Some(mr) if writes(op) => {
            Err(CallError::refuse(format!("{mr} was registered from a read-only buffer")))
        }
        _ => Ok(()),
    }
}

/// The pieces of a vector call in the caller's form: regions, pointers and sizes.
pub(crate) struct Table<'a, 'py, const N: usize> {
    args: &'a Args<'py, N>,
    mrs: Column<'py>,
    spans: Spans<'a, 'py, N>,
    /// The number of pieces.
    pub(crate) count: usize,
}

impl<'a, 'py, const N: usize> Table<'a, 'py, N> {
    /// Reads the parameters; all are `count` long, if that is given.
    pub(crate) fn of(args: &'a Args<'py, N>, count: Option<usize>) -> Result<Self, CallError> {
        let mrs = args.with(Param::MrV, Column::of)?;
        let spans = Spans::of(args)?;
        let count = count.unwrap_or(mrs.len());
        same_length(args.function(), count, mrs.len())?;
        spans.expect(count)?;
        Ok(Self { args, mrs, spans, count })
    }

    /// The pieces, checked for the operation.
    pub(crate) fn iovs(&self, ep: &PyEndpoint, op: Op) -> Result<Vec<Iov>, CallError> {
        let mut iovs = vec![UNSIZED; self.count];
        self.args.named(
            Param::MrV,
            self.mrs.fill_integers(&mut iovs, |iov, mr| iov.mr = region_of(mr)),
        )?;
        self.spans.fill(op, &mut iovs)?;
        writable(ep, op, &iovs)?;
        Ok(iovs)
    }
}

/// A piece without a size: no object has this length.
pub(crate) const UNSIZED: Iov = Iov { mr: MrId(0), ptr: 0, len: usize::MAX };

/// Pointers, and sizes if the caller gave any.
pub(crate) struct Spans<'a, 'py, const N: usize> {
    args: &'a Args<'py, N>,
    ptrs: Column<'py>,
    sizes: Option<Column<'py>>,
}

impl<'a, 'py, const N: usize> Spans<'a, 'py, N> {
    /// Reads the parameters.
    pub(crate) fn of(args: &'a Args<'py, N>) -> PyResult<Self> {
        let ptrs = args.with(Param::PtrV, Column::of)?;
        let sizes = args.get(Param::SizeV).map(|_| args.with(Param::SizeV, Column::of));
        Ok(Self { args, ptrs, sizes: sizes.transpose()? })
    }

    pub(crate) fn len(&self) -> usize {
        self.ptrs.len()
    }

    /// Raises unless there are `count` of each.
    pub(crate) fn expect(&self, count: usize) -> Result<(), CallError> {
        for column in std::iter::once(&self.ptrs).chain(&self.sizes) {
            same_length(self.args.function(), count, column.len())?;
        }
        Ok(())
    }

    /// Sets address and length of each piece.
    pub(crate) fn fill<T: LocalPiece>(&self, op: Op, places: &mut [T]) -> Result<(), CallError> {
        let set = |place: &mut T, ptr: u64| place.iov().ptr = ptr as usize;
        let filled = self.ptrs.fill(places, set, |place, ptr| {
            let memory = memory(op, &ptr)?;
            place.iov().ptr = memory.addr;
            place.iov().len = memory.len.unwrap_or(UNSIZED.len);
            place.lies_in(memory);
            Ok(())
        });
        self.args.named(Param::PtrV, filled)?;
        let sized = match &self.sizes {
            Some(sizes) => sizes.fill(
                places,
                |place, len| place.iov().len = len as usize,
                |place, size| match size.extract::<Option<usize>>()? {
                    Some(size) => {
                        place.iov().len = size;
                        Ok(())
                    }
                    None => has_size(place.iov()),
                },
            ),
            None => places.iter_mut().try_for_each(|place| has_size(place.iov())),
        };
        self.args.named(Param::SizeV, sized)
    }
}

/// A piece of local memory as a call names it: in a region, or by its address alone.
pub(crate) trait LocalPiece: Sized {
    /// Reads the one piece of a call.
    fn of<const N: usize>(ep: &PyEndpoint, op: Op, args: &Args<'_, N>) -> Result<Self, CallError>;

    /// Reads the peer's memory of a call with one piece.
    fn advert<const N: usize>(args: &Args<'_, N>) -> Result<Advert, CallError>;

    fn iov(&mut self) -> &mut Iov;

    /// Called with the object's memory if the piece of a vector is of an object.
    fn lies_in(&mut self, _: Memory) {}
}

impl LocalPiece for Iov {
    fn of<const N: usize>(ep: &PyEndpoint, op: Op, args: &Args<'_, N>) -> Result<Self, CallError> {
        let mr = region_of(args.id(Param::Mr)?);
        let (ptr, size) = (args.need(Param::Ptr)?, args.size(Param::Size)?);
        let memory = memory(op, ptr)?;
        let iov = Self { mr, ptr: memory.addr, len: memory.sized(size)? };
        writable(ep, op, std::slice::from_ref(&iov))?;
        Ok(iov)
    }

    fn advert<const N: usize>(args: &Args<'_, N>) -> Result<Advert, CallError> {
        advert(args.need(Param::Meta)?)
    }

    fn iov(&mut self) -> &mut Self {
        self
    }
}

fn has_size(iov: &Iov) -> Result<(), CallError> {
    if iov.len == UNSIZED.len {
        return Err(crate::memory::no_size().into());
    }
    Ok(())
}
