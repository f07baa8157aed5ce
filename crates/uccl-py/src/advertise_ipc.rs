//! `advertise_ipc` and `advertisev_ipc`.

use std::time::{Duration, Instant};

use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    types::{PyCFunction, PyDict, PyMemoryView, PyTuple, PyWeakrefMethods, PyWeakrefReference},
};
use uccl_p2p::{ConnId, Error, MrId, Op};

use crate::{
    advertised::{Entry, Key, ObjectLife},
    args::{Keywords, Positional},
    call::Spans,
    endpoint::PyEndpoint,
    error::{CallError, settle},
    ipc::{IpcPiece, count, piece, pieces},
    memory::Owner,
    params::Param,
    registration::deregister,
    signatures,
};

/// The most views of views that are followed.
const MOST_VIEWS: usize = 32;

/// The longest time that the end of an object waits for peers in the middle of an access to it.
const MOST_PATIENCE: Duration = Duration::from_secs(600);
/// The pause between two waits. A wait takes as long as the endpoint's timeout, unless a device
/// holds the memory.
const NAP: Duration = Duration::from_millis(10);

/// `advertise_ipc(conn_id, ptr, size)`.
pub(crate) fn advertise(
    ep: &Bound<'_, PyEndpoint>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> PyResult<Option<Vec<u8>>> {
    let a = signatures::ADVERTISE_IPC.bind(args, kwargs)?;
    let conn = ConnId(a.id(Param::Conn)?);
    let piece = settle(piece(Op::Recv, a.need(Param::Ptr)?, a.size(Param::Size)?).map(Some), None)?;
    let Some(piece) = piece else { return Ok(None) };
    settle(make(ep, conn, piece).map(Some), None)
}

/// `advertisev_ipc(conn_id, ptr_v, size_v)`.
pub(crate) fn advertisev(
    ep: &Bound<'_, PyEndpoint>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> PyResult<Option<Vec<Vec<u8>>>> {
    let a = signatures::ADVERTISEV_IPC.bind(args, kwargs)?;
    let conn = ConnId(a.id(Param::Conn)?);
    let spans = Spans::of(&a)?;
    let pieces = count(&a, &spans).and_then(|count| pieces(Op::Recv, &spans, count));
    let pieces = settle(pieces.map(Some), None)?;
    let Some(pieces) = pieces else { return Ok(None) };
    let made = pieces.into_iter().map(|piece| make(ep, conn, piece)).collect();
    settle(Result::<Vec<_>, _>::map(made, Some), None)
}

fn make(ep: &Bound<'_, PyEndpoint>, conn: ConnId, piece: IpcPiece) -> Result<Vec<u8>, CallError> {
    let IpcPiece { iov, object } = piece;
    let mr = add(ep, (conn, iov.ptr, iov.len), object.map(|(owner, _)| owner))?;
    let ep = ep.get();
    let advert = ep.core.advertise(mr, iov.ptr, iov.len)?;
    Ok(ep.ipc_info(&advert).to_vec())
}

/// The region of a range, which is made unless it exists.
fn add(ep: &Bound<'_, PyEndpoint>, key: Key, owner: Option<Owner>) -> Result<MrId, CallError> {
    let (py, this) = (ep.py(), ep.get());
    this.core.connection(key.0)?;
    // The caller's list may change meanwhile, so the watched object is kept alive until its region
    // exists.
    let (mut life, _alive) = match owner {
        Some(owner) => ObjectLife::of(ep, key, owner)?,
        None => (ObjectLife::Address, None),
    };
    // Stale regions end before the new registration: regions of one allocation share the handle
    // that peers of this host get.
    let stale = py.detach(|| {
        let mut stale = this.advertised.take_stale(&this.core, key);
        stale.extend(this.advertised.take_lost(&this.core));
        stale
    });
    // A region that a peer may still touch is waited for when the endpoint closes.
    let _ = end(this, py, stale);
    // No Python code runs under the lock: it could free a watched object, and its callback takes
    // the lock.
    let (mr, keep) = py.detach(|| this.advertised.add(&this.core, key, &mut life))?;
    if let (ObjectLife::Kept(owner), true) = (life, keep) {
        this.regions.keep(mr, Some(owner));
    }
    Ok(mr)
}

/// Ends the regions that were advertised over a connection.
pub(crate) fn disconnected(ep: &PyEndpoint, py: Python<'_>, conn: ConnId) -> Result<(), Error> {
    end(ep, py, ep.advertised.take_of(conn))
}

/// Ends regions. The objects of a region that a peer may still touch are kept from now on, without
/// a limit of time.
fn end(ep: &PyEndpoint, py: Python<'_>, entries: Vec<Entry>) -> Result<(), Error> {
    let mut all_ended = Ok(());
    for entry in entries {
        // The objects stay alive while their region ends.
        let objects = entry.objects(py);
        let ended = deregister(ep, py, vec![entry.mr]);
        if ended.is_err() {
            let keep = |object| ep.regions.keep(entry.mr, Some(Owner::of(object)));
            objects.into_iter().for_each(keep);
        }
        all_ended = all_ended.and(ended);
    }
    all_ended
}

/// Called at the end of a watched object. Its memory exists until this returns, and nothing can
/// keep it longer, so this waits for a peer that is stopped in the middle of an access.
fn gone(ep: &PyEndpoint, key: Key, watch: &Bound<'_, PyAny>) -> PyResult<()> {
    let Some(mr) = ep.advertised.unwatch(key, watch) else { return Ok(()) };
    let begun = Instant::now();
    loop {
        let Err(e @ Error::StillTouched { .. }) = deregister(ep, watch.py(), vec![mr]) else {
            return Ok(());
        };
        if begun.elapsed() >= MOST_PATIENCE {
            return Err(PyRuntimeError::new_err(e.to_string()));
        }
        watch.py().detach(|| std::thread::sleep(NAP));
    }
}

impl ObjectLife {
    /// The life of an object's range, and the watched object.
    fn of<'py>(
        ep: &Bound<'py, PyEndpoint>,
        key: Key,
        owner: Owner,
    ) -> PyResult<(Self, Option<Bound<'py, PyAny>>)> {
        let Some(object) = owner.object(ep.py()) else { return Ok((Self::Kept(owner), None)) };
        let root = root(object)?;
        let this = PyWeakrefReference::new(ep)?.unbind();
        let on_end = move |args: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
            let ep = this.bind(args.py()).upgrade_as::<PyEndpoint>()?;
            ep.map_or(Ok(()), |ep| gone(ep.get(), key, &args.get_item(0)?))
        };
        let on_end = PyCFunction::new_closure(ep.py(), None, None, on_end)?;
        match PyWeakrefReference::new_with(&root, on_end) {
            Ok(watch) => {
                let life = Self::Watched(root.as_ptr() as usize, watch.unbind());
                Ok((life, Some(root)))
            }
            // Objects of this type have no weak references.
            Err(_) => Ok((Self::Kept(owner), None)),
        }
    }
}

/// The object that owns the memory of a view; views may be freed while it lives.
fn root(mut object: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    let py = object.py();
    for _ in 0..MOST_VIEWS {
        let base = if object.hasattr(pyo3::intern!(py, "data_ptr"))? {
            object.getattr_opt(pyo3::intern!(py, "_base"))?
        } else if object.hasattr(pyo3::intern!(py, "__array_interface__"))? {
            object.getattr_opt(pyo3::intern!(py, "base"))?
        } else if object.is_instance_of::<PyMemoryView>() {
            object.getattr_opt(pyo3::intern!(py, "obj"))?
        } else {
            None
        };
        match base.filter(|base| !base.is_none()) {
            Some(base) => object = base,
            None => break,
        }
    }
    Ok(object)
}
