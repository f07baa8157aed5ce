//! Transfers as callers write them, turned into the engine's requests.

use std::time::Duration;

use pyo3::{exceptions::PyTypeError, prelude::*};
use uccl_p2p::{ConnId, CudaStream, Endpoint, Iov, MrId, Op, Request};
use uccl_wire::advert::{ADVERT_LEN, Advert};

use crate::{
    args::{Args, Named, Names, Positional, Signature},
    buffer,
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
    let iov = iov(ep, op, a.req(1)?, a.need(2)?, a.opt(3)?)?;
    let extras = Extras::of(ep, &a, 4)?;
    let adverts = Pieces::Many(Vec::new());
    Ok(Call { conn: ConnId(a.req(0)?), op, iovs: Pieces::One(iov), adverts, extras })
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
    let iov = iov(ep, op, a.req(1)?, a.need(2)?, a.opt(3)?)?;
    let advert = advert(a.need(4)?)?;
    let extras = Extras::of(ep, &a, 5)?;
    let (iovs, adverts) = (Pieces::One(iov), Pieces::One(advert));
    Ok(Call { conn: ConnId(a.req(0)?), op, iovs, adverts, extras })
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
    let iovs = iovs(ep, op, &a, 4)?;
    let extras = Extras::of(ep, &a, 5)?;
    let adverts = Pieces::Many(Vec::new());
    Ok(Call { conn: ConnId(a.req(0)?), op, iovs: Pieces::Many(iovs), adverts, extras })
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
    let iovs = iovs(ep, op, &a, 5)?;
    // Lengths are checked before contents: a list of the wrong length raises whatever is in it.
    let metas = a.list(4, |meta| Ok(meta.clone()))?;
    same_length(signature.function, iovs.len(), metas.len())?;
    let adverts = metas.iter().map(advert).collect::<Result<Vec<_>, _>>()?;
    let extras = Extras::of(ep, &a, 6)?;
    let (iovs, adverts) = (Pieces::Many(iovs), Pieces::Many(adverts));
    Ok(Call { conn: ConnId(a.req(0)?), op, iovs, adverts, extras })
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

/// Sizes that may be left out, one an item.
pub(crate) fn sizes<const N: usize>(
    a: &Args<'_, N>,
    i: usize,
    count: usize,
) -> PyResult<Vec<Option<usize>>> {
    match a.get(i) {
        Some(_) => a.list(i, |size| size.extract()),
        None => Ok(vec![None; count]),
    }
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
    if writes(op) && ep.regions.is_readonly(mr) {
        return Err(Stop::refuse(format!("{} was registered from a read-only buffer", iov.mr)));
    }
    Ok(if op == Op::Recv { capacity(&ep.core, iov) } else { iov })
}

/// The pieces of a vector call: its parameters 1 (regions), 2 (pointers) and 3 (sizes).
fn iovs<const N: usize>(
    ep: &PyEndpoint,
    op: Op,
    a: &Args<'_, N>,
    count: usize,
) -> Result<Vec<Iov>, Stop> {
    let mrs: Vec<u64> = a.list(1, |mr| mr.extract())?;
    let ptrs = a.list(2, |ptr| Ok(ptr.clone()))?;
    let sizes = sizes(a, 3, ptrs.len())?;
    let count = a.opt(count)?.unwrap_or(mrs.len());
    for given in [mrs.len(), ptrs.len(), sizes.len()] {
        same_length(a.function(), count, given)?;
    }
    mrs.into_iter()
        .zip(&ptrs)
        .zip(sizes)
        .map(|((mr, ptr), size)| iov(ep, op, mr, ptr, size))
        .collect()
}

/// A receive's size may run past its region: what the region holds from `ptr` on is then the most it
/// takes. Programs of the first release pass twice the length they registered.
pub(crate) fn capacity(core: &Endpoint, iov: Iov) -> Iov {
    let Ok((start, len)) = core.region(iov.mr) else { return iov };
    match iov.ptr.checked_sub(start).and_then(|offset| len.checked_sub(offset)) {
        Some(held) => Iov { len: iov.len.min(held), ..iov },
        None => iov,
    }
}
