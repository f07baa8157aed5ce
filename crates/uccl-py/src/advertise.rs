//! `advertise` and `advertisev`, in all their forms.

use pyo3::{IntoPyObjectExt, exceptions::PyTypeError, prelude::*, types::PyBytes};
use uccl_p2p::{ConnId, MrId, Op};
use uccl_wire::advert::{ADVERT_LEN, Advert};

use crate::{
    args::{self, Args, Keywords, Positional},
    buffer::{self, BufferView},
    call::Table,
    column::{packed_length, same_length},
    endpoint::PyEndpoint,
    error::{CallError, settle},
    memory::Memory,
    params::Param,
    reuse::region_of,
    signatures,
};

/// `advertise([conn_id,] mr_id, ptr, size [, out_buf])`.
pub(crate) fn advertise<'py>(
    ep: &PyEndpoint,
    py: Python<'py>,
    args: Positional<'_, 'py>,
    kwargs: Keywords<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let a =
        signatures::ADVERTISE.bind_from(usize::from(!names_conn(args, kwargs)), args, kwargs)?;
    let out = a.get(Param::OutBuf).map(AdvertBuffer::of).transpose()?;
    let memory = Memory::of(a.need(Param::Ptr)?)?;
    let ask = AdvertRequest {
        conn: a.opt(Param::Conn)?,
        mr: a.req(Param::Mr)?,
        ptr: memory.addr,
        len: memory.sized(a.opt(Param::Size)?)?,
    };
    let made = make(ep, &ask);
    match out {
        Some(mut out) => {
            answer(py, settle(made.and_then(|advert| out.put(&advert)).map(|()| true), false)?)
        }
        None => {
            let bytes = settle(made.map(|advert| Some(advert.encode())), None)?;
            let ok = bytes.is_some();
            answer(py, (ok, PyBytes::new(py, bytes.as_ref().map_or(&[], |b| &b[..]))))
        }
    }
}

/// `advertisev([conn_id,] mr_id_v, ptr_v, size_v [, out_buf_list], num_iovs)`.
pub(crate) fn advertisev<'py>(
    ep: &PyEndpoint,
    py: Python<'py>,
    args: Positional<'_, 'py>,
    kwargs: Keywords<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let first = args.iter().next();
    let has_conn = match &first {
        Some(first) => args::integer(first).is_some(),
        None => true,
    };
    let a = signatures::ADVERTISEV.bind_from(usize::from(!has_conn), args, kwargs)?;
    // The fifth positional is the number of iovs in both releases; in the README it is the buffers.
    let (outs, count) = match a.get(Param::OutBufV) {
        Some(n) if args::integer(n).is_some() => (None, Some(n)),
        outs => (outs, a.get(Param::NumIovs)),
    };
    let count = count.map(|n| n.extract::<usize>()).transpose()?;
    match outs.map(AdvertBuffers::of).transpose()? {
        Some(mut outs) => {
            let put = make_all(ep, &a, count, Some(&outs)).and_then(|made| outs.put(&made));
            answer(py, settle(put.map(|()| true), false)?)
        }
        None => {
            let adverts = settle(make_all(ep, &a, count, None).map(Some), None)?;
            let ok = adverts.is_some();
            let bytes: Vec<_> =
                adverts.iter().flatten().map(|advert| PyBytes::new(py, &advert.encode())).collect();
            answer(py, (ok, bytes))
        }
    }
}

/// Makes all adverts, or none.
fn make_all(
    ep: &PyEndpoint,
    a: &Args<'_, 6>,
    count: Option<usize>,
    outs: Option<&AdvertBuffers>,
) -> Result<Vec<Advert>, CallError> {
    let table = Table::of(a, count)?;
    if let Some(outs) = outs {
        outs.expect(a.function(), table.count)?;
    }
    let iovs = table.iovs(ep, Op::Send)?;
    if let Some(conn) = a.opt(Param::Conn)? {
        ep.core.connection(ConnId(conn))?;
    }
    if let Some(mr) = ep.regions.readonly_of(&iovs) {
        return Err(readonly(mr));
    }
    Ok(ep.core.advertise_all(&iovs)?)
}

/// The memory that the caller advertises.
struct AdvertRequest {
    conn: Option<u64>,
    mr: u64,
    ptr: usize,
    len: usize,
}

fn make(ep: &PyEndpoint, ask: &AdvertRequest) -> Result<Advert, CallError> {
    if let Some(conn) = ask.conn {
        ep.core.connection(ConnId(conn))?;
    }
    let mr = region_of(ask.mr);
    if ep.regions.is_readonly(mr.0) {
        return Err(readonly(mr));
    }
    Ok(ep.core.advertise(mr, ask.ptr, ask.len)?)
}

pub(crate) fn readonly(mr: MrId) -> CallError {
    CallError::refuse(format!(
        "{mr} was registered from a read-only buffer, and peers may write what is advertised"
    ))
}

/// Whether the first positional argument is a connection. Three arguments are either region,
/// address and size, or connection, region and an object with a size.
fn names_conn(args: Positional<'_, '_>, kwargs: Keywords<'_, '_>) -> bool {
    if Param::Conn.is_named(kwargs) {
        // Then it cannot also be positional: the positionals start at the region.
        return false;
    }
    let named = [Param::Mr, Param::Ptr, Param::Size]
        .into_iter()
        .filter(|param| param.is_named(kwargs))
        .count();
    match args.len() + named {
        0..=2 => false,
        3 => {
            args.get_item(2).is_ok_and(|third| !third.is_none() && args::integer(&third).is_none())
        }
        4 if args.len() == 4 => {
            // Region, address, size and a buffer; or the form with a connection.
            args.get_item(3).is_ok_and(|last| last.is_none() || args::integer(&last).is_some())
        }
        _ => true,
    }
}

/// A buffer that the caller gave for an advert.
struct AdvertBuffer(BufferView);

impl AdvertBuffer {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match BufferView::of(object)? {
            Some(view) if !view.is_readonly() => Ok(Self(view)),
            _ => Err(PyTypeError::new_err(format!(
                "out_buf must be a writable buffer of at least {ADVERT_LEN} bytes, not {}",
                object.get_type().name()?
            ))),
        }
    }

    fn put(&mut self, advert: &Advert) -> Result<(), CallError> {
        if self.0.copy_from(&advert.encode()) {
            return Ok(());
        }
        Err(CallError::refuse(format!(
            "out_buf has {} bytes; an advert has {ADVERT_LEN}",
            self.0.len()
        )))
    }
}

/// Buffers of the caller for adverts.
enum AdvertBuffers {
    /// One buffer for all adverts, one after another.
    Packed(BufferView),
    Each(Vec<AdvertBuffer>),
}

impl AdvertBuffers {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match buffer::packed(object) {
            Some(view) if view.is_readonly() => {
                Err(PyTypeError::new_err("out_buf_list is one buffer, and may only be read"))
            }
            Some(view) => Ok(Self::Packed(view)),
            None => Ok(Self::Each(args::list(object, AdvertBuffer::of)?)),
        }
    }

    /// Raises unless there is room for exactly `count` adverts.
    fn expect(&self, function: &str, count: usize) -> Result<(), CallError> {
        match self {
            Self::Packed(view) => packed_length::<ADVERT_LEN>(function, count, view),
            Self::Each(outs) => same_length(function, count, outs.len()),
        }
    }

    fn put(&mut self, adverts: &[Advert]) -> Result<(), CallError> {
        match self {
            Self::Packed(view) => {
                let mut all = Vec::with_capacity(adverts.len() * ADVERT_LEN);
                adverts.iter().for_each(|advert| all.extend_from_slice(&advert.encode()));
                match view.copy_from(&all) {
                    true => Ok(()),
                    false => Err(CallError::refuse("out_buf_list does not take the adverts")),
                }
            }
            Self::Each(outs) => {
                outs.iter_mut().zip(adverts).try_for_each(|(out, advert)| out.put(advert))
            }
        }
    }
}

fn answer<'py, T>(py: Python<'py>, value: T) -> PyResult<Bound<'py, PyAny>>
where
    T: IntoPyObjectExt<'py>,
{
    value.into_bound_py_any(py)
}
