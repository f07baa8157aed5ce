//! Transfers as callers write them, turned into the engine's requests.

use std::time::Duration;

use pyo3::{exceptions::PyTypeError, prelude::*};
use uccl_p2p::{ConnId, CudaStream, Iov, MrId, Op, Request};
use uccl_wire::advert::{ADVERT_LEN, Advert};

use crate::{
    args::{Args, Named, Names, Positional, Signature},
    buffer,
    column::{Blobs, Column},
    endpoint::PyEndpoint,
    error::Stop,
    memory::Memory,
    stream,
};

pub(crate) const CONN: Names = &["conn_id"];
pub(crate) const MR: Names = &["mr_id"];
pub(crate) const PTR: Names = &["ptr", "src", "dst", "addr", "data_ptr"];
pub(crate) const SIZE: Names = &["size", "len"];
pub(crate) const MR_V: Names = &["mr_id_v", "mr_id_list", "mr_ids"];
pub(crate) const PTR_V: Names =
    &["ptr_v", "data_ptr_v", "ptr_list", "src_list", "dst_list", "addr_list", "ptrs"];
pub(crate) const SIZE_V: Names = &["size_v", "size_list", "len_list", "sizes"];
pub(crate) const NUM_IOVS: Names = &["num_iovs"];
pub(crate) const NOTIF: Names = &["notif"];
pub(crate) const TIMEOUT: Names = &["timeout"];
pub(crate) const STREAM: Names = &["stream"];
const META: Names = &["meta", "slot_item", "meta_blob"];
const META_V: Names = &["meta_blob_v", "slot_item_list", "meta_v", "metas"];

/// `send` and `recv`.
pub(crate) const fn two_sided(function: &'static str) -> Signature<7> {
    Signature { function, params: [CONN, MR, PTR, SIZE, NOTIF, TIMEOUT, STREAM], positional: 4 }
}

/// `read` and `write`.
pub(crate) const fn one_sided(function: &'static str) -> Signature<8> {
    Signature {
        function,
        params: [CONN, MR, PTR, SIZE, META, NOTIF, TIMEOUT, STREAM],
        positional: 5,
    }
}

/// `sendv` and `recvv`.
pub(crate) const fn two_sided_v(function: &'static str) -> Signature<8> {
    Signature {
        function,
        params: [CONN, MR_V, PTR_V, SIZE_V, NUM_IOVS, NOTIF, TIMEOUT, STREAM],
        positional: 5,
    }
}

/// `readv` and `writev`.
pub(crate) const fn one_sided_v(function: &'static str) -> Signature<9> {
    Signature {
        function,
        params: [CONN, MR_V, PTR_V, SIZE_V, META_V, NUM_IOVS, NOTIF, TIMEOUT, STREAM],
        positional: 6,
    }
}

/// One without a heap allocation, or many.
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

/// A transfer that a caller asked for.
pub(crate) struct Call {
    pub(crate) conn: ConnId,
    pub(crate) op: Op,
    pub(crate) iovs: Pieces<Iov>,
    pub(crate) adverts: Pieces<Advert>,
    pub(crate) extras: Extras,
}

/// What every transfer may carry besides.
#[derive(Default)]
pub(crate) struct Extras {
    pub(crate) notif: Option<Vec<u8>>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) stream: Option<CudaStream>,
}

impl Call {
    pub(crate) fn request(&self) -> Request<'_> {
        Request {
            conn: self.conn,
            op: self.op,
            iovs: self.iovs.as_slice(),
            adverts: self.adverts.as_slice(),
            notif: self.extras.notif.as_deref(),
            timeout: self.extras.timeout,
            after: self.extras.stream,
        }
    }
}

impl Extras {
    /// From the parameters `i` (notif), `i + 1` (timeout) and `i + 2` (stream).
    pub(crate) fn of<const N: usize>(
        ep: &PyEndpoint,
        args: &Args<'_, N>,
        i: usize,
    ) -> PyResult<Self> {
        let notif = args.get(i).map(|n| buffer::bytes(n).map(|b| b.into_owned())).transpose()?;
        let stream = args.get(i + 2).map(|stream| stream::of(ep, stream)).transpose()?;
        Ok(Self { notif, timeout: args.seconds(i + 1)?, stream })
    }
}

/// `send(conn_id, mr_id, ptr, size)`, `recv(...)`.
pub(crate) fn scalar_two_sided(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<7>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<Call, Stop> {
    let a = signature.bind(args, kwargs)?;
    let iov = iov(ep, op, a.id(1)?, a.need(2)?, a.size(3)?)?;
    let extras = Extras::of(ep, &a, 4)?;
    let adverts = Pieces::Many(Vec::new());
    Ok(Call { conn: ConnId(a.id(0)?), op, iovs: Pieces::One(iov), adverts, extras })
}

/// `read(conn_id, mr_id, ptr, size, meta)`, `write(...)`.
pub(crate) fn scalar_one_sided(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<8>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<Call, Stop> {
    let a = signature.bind(args, kwargs)?;
    let iov = iov(ep, op, a.id(1)?, a.need(2)?, a.size(3)?)?;
    let advert = advert(a.need(4)?)?;
    let extras = Extras::of(ep, &a, 5)?;
    let (iovs, adverts) = (Pieces::One(iov), Pieces::One(advert));
    Ok(Call { conn: ConnId(a.id(0)?), op, iovs, adverts, extras })
}

/// `sendv(conn_id, mr_id_v, ptr_v, size_v, num_iovs)`, `recvv(...)`.
pub(crate) fn vector_two_sided(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<8>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<Call, Stop> {
    let a = signature.bind(args, kwargs)?;
    let iovs = Table::of(&a, a.size(4)?)?.iovs(ep, op)?;
    let extras = Extras::of(ep, &a, 5)?;
    let adverts = Pieces::Many(Vec::new());
    Ok(Call { conn: ConnId(a.id(0)?), op, iovs: Pieces::Many(iovs), adverts, extras })
}

/// `readv(conn_id, mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs)`, `writev(...)`.
pub(crate) fn vector_one_sided(
    ep: &PyEndpoint,
    op: Op,
    signature: &'static Signature<9>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<Call, Stop> {
    let a = signature.bind(args, kwargs)?;
    let table = Table::of(&a, a.size(5)?)?;
    let metas: Blobs<'_, ADVERT_LEN> = a.with(4, Blobs::of)?;
    // Lengths are checked before contents: a list of the wrong length raises whatever is in it.
    metas.expect(signature.function, table.count)?;
    let iovs = table.iovs(ep, op)?;
    let decode = |meta: &[u8; ADVERT_LEN]| Advert::decode(meta);
    let adverts = a.named(4, metas.decode(table.count, decode, advert))?;
    let extras = Extras::of(ep, &a, 6)?;
    let (iovs, adverts) = (Pieces::Many(iovs), Pieces::Many(adverts));
    Ok(Call { conn: ConnId(a.id(0)?), op, iovs, adverts, extras })
}

/// The 64 bytes that `advertise` made.
pub(crate) fn advert(meta: &Bound<'_, PyAny>) -> Result<Advert, Stop> {
    let bytes = buffer::bytes(meta)?;
    if bytes.len() != ADVERT_LEN {
        return Err(Stop::runtime(format!(
            "meta must be exactly {ADVERT_LEN} bytes (what advertise returned), not {}",
            bytes.len()
        )));
    }
    Advert::decode(&bytes).map_err(Stop::refuse)
}

/// The memory at an address, checked to be writable if the operation writes it.
pub(crate) fn memory(op: Op, ptr: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let memory = Memory::of(ptr)?;
    if writes(op) && memory.is_readonly() {
        return Err(PyTypeError::new_err("a read-only buffer cannot be the destination"));
    }
    Ok(memory)
}

/// Raises if two lists of one call differ in length.
pub(crate) fn same_length(function: &str, expected: usize, got: usize) -> Result<(), Stop> {
    if expected == got {
        return Ok(());
    }
    Err(Stop::runtime(format!(
        "{function}(): all lists must have num_iovs items ({expected} and {got} given)"
    )))
}

/// Whether the operation writes local memory.
fn writes(op: Op) -> bool {
    matches!(op, Op::Recv | Op::Read)
}

fn iov(
    ep: &PyEndpoint,
    op: Op,
    mr: u64,
    ptr: &Bound<'_, PyAny>,
    size: Option<usize>,
) -> Result<Iov, Stop> {
    let memory = memory(op, ptr)?;
    let iov = Iov { mr: MrId(mr), ptr: memory.addr, len: memory.sized(size)? };
    writable(ep, op, std::slice::from_ref(&iov))?;
    Ok(iov)
}

/// Refuses an operation that writes a region which may only be read.
fn writable(ep: &PyEndpoint, op: Op, iovs: &[Iov]) -> Result<(), Stop> {
    match ep.regions.readonly_of(iovs) {
        Some(mr) if writes(op) => {
            Err(Stop::refuse(format!("{mr} was registered from a read-only buffer")))
        }
        _ => Ok(()),
    }
}

/// The pieces of a vector call as its caller wrote them: regions, pointers and sizes.
pub(crate) struct Table<'a, 'py, const N: usize> {
    args: &'a Args<'py, N>,
    mrs: Column<'py>,
    spans: Spans<'a, 'py, N>,
    /// How many there are.
    pub(crate) count: usize,
}

impl<'a, 'py, const N: usize> Table<'a, 'py, N> {
    /// From the parameters 1 (regions), 2 (pointers) and 3 (sizes); all are `count` long, if that is given.
    pub(crate) fn of(args: &'a Args<'py, N>, count: Option<usize>) -> Result<Self, Stop> {
        let mrs = args.with(1, Column::of)?;
        let spans = Spans::of(args, 2)?;
        let count = count.unwrap_or(mrs.len());
        same_length(args.function(), count, mrs.len())?;
        spans.expect(count)?;
        Ok(Self { args, mrs, spans, count })
    }

    /// The pieces, which the operation may use.
    pub(crate) fn iovs(&self, ep: &PyEndpoint, op: Op) -> Result<Vec<Iov>, Stop> {
        let mut iovs = vec![UNSIZED; self.count];
        self.args.named(1, self.mrs.fill_integers(&mut iovs, |iov, mr| iov.mr = MrId(mr)))?;
        self.spans.fill(op, &mut iovs)?;
        writable(ep, op, &iovs)?;
        Ok(iovs)
    }
}

/// A piece without anything; no object is as long.
pub(crate) const UNSIZED: Iov = Iov { mr: MrId(0), ptr: 0, len: usize::MAX };

/// Pointers, and sizes if the caller gave any.
pub(crate) struct Spans<'a, 'py, const N: usize> {
    args: &'a Args<'py, N>,
    ptrs: Column<'py>,
    sizes: Option<Column<'py>>,
    at: usize,
}

impl<'a, 'py, const N: usize> Spans<'a, 'py, N> {
    /// From the parameters `at` (pointers) and `at + 1` (sizes).
    pub(crate) fn of(args: &'a Args<'py, N>, at: usize) -> PyResult<Self> {
        let ptrs = args.with(at, Column::of)?;
        let sizes = args.get(at + 1).map(|_| args.with(at + 1, Column::of)).transpose()?;
        Ok(Self { args, ptrs, sizes, at })
    }

    pub(crate) fn len(&self) -> usize {
        self.ptrs.len()
    }

    /// Raises unless there are `count` of each.
    pub(crate) fn expect(&self, count: usize) -> Result<(), Stop> {
        for column in std::iter::once(&self.ptrs).chain(&self.sizes) {
            same_length(self.args.function(), count, column.len())?;
        }
        Ok(())
    }

    /// Sets address and length of each piece.
    pub(crate) fn fill<T: Place>(&self, op: Op, places: &mut [T]) -> Result<(), Stop> {
        let set = |place: &mut T, ptr: u64| place.iov().ptr = ptr as usize;
        let filled = self.ptrs.fill(places, set, |place, ptr| {
            let memory = memory(op, &ptr)?;
            place.iov().ptr = memory.addr;
            place.iov().len = memory.len.unwrap_or(UNSIZED.len);
            place.lies_in(memory);
            Ok(())
        });
        self.args.named(self.at, filled)?;
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
        self.args.named(self.at + 1, sized)
    }
}

/// A piece of a vector, as it comes to be.
pub(crate) trait Place {
    fn iov(&mut self) -> &mut Iov;

    /// The piece is of an object.
    fn lies_in(&mut self, _: Memory) {}
}

impl Place for Iov {
    fn iov(&mut self) -> &mut Self {
        self
    }
}

fn has_size(iov: &Iov) -> Result<(), Stop> {
    if iov.len == UNSIZED.len {
        return Err(crate::memory::no_size().into());
    }
    Ok(())
}
