//! Memory that `advertise_ipc` named: its regions, which nobody else has.
//!
//! A region lasts as long as the object that was advertised, or the one whose memory that shows: when it goes, the region
//! ends before the memory is given back. Python does not tell of every object when it goes: others are kept, as `reg` keeps
//! them, until the connection is removed. So long lasts the region of an address; when it is advertised again, it is checked
//! to be of the same allocation, where the driver tells allocations apart.

use std::collections::HashMap;

use parking_lot::Mutex;
use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    types::{PyCFunction, PyDict, PyMemoryView, PyTuple, PyWeakrefMethods, PyWeakrefReference},
};
use uccl_p2p::{ConnId, Error, MrId};

use crate::{endpoint::PyEndpoint, error::Stop, ipc::deregister, memory::Owner, regions::register};

/// Views of views are followed so far.
const MOST_VIEWS: usize = 32;

/// Connection, address and length.
pub(crate) type Key = (ConnId, usize, usize);

/// The regions.
#[derive(Default)]
pub(crate) struct Advertised(Mutex<HashMap<Key, Entry>>);

struct Entry {
    mr: MrId,
    /// Until the connection is removed: an address was advertised, or an object that is kept.
    lasts: bool,
    /// Whether such an object is.
    keeps: bool,
    /// The objects that are watched: their addresses, and what tells when they go.
    watched: Vec<(usize, Py<PyWeakrefReference>)>,
}

/// For how long a range is advertised.
enum Life {
    Address,
    Kept(Owner),
    Watched(usize, Py<PyWeakrefReference>),
}

/// The region of a range, made unless it is there.
pub(crate) fn add(
    ep: &Bound<'_, PyEndpoint>,
    key: Key,
    owner: Option<Owner>,
) -> Result<MrId, Stop> {
    let (py, this) = (ep.py(), ep.get());
    this.core.connection(key.0)?;
    // A list of objects may be changed meanwhile: what is watched stays until its end is waited for.
    let (mut life, _alive) = match owner {
        Some(owner) => Life::of(ep, key, owner)?,
        None => (Life::Address, None),
    };
    // Before it is registered anew: what is made for peers of this host is shared by the regions of an allocation.
    let stale = py.detach(|| take_stale(this, key));
    let stale = stale.into_iter().map(|entry| entry.mr).collect();
    // Its memory has gone already, and who may still be touching that is waited for when the endpoint is closed.
    let _ = deregister(this, py, stale);
    // No Python code runs while it is locked: what that frees may be watched.
    let added = py.detach(|| {
        let mut all = this.implicit.advertised.0.lock();
        if let Some(entry) = all.get_mut(&key) {
            return Ok((entry.mr, entry.is_to_keep(&mut life)));
        }
        let mr = register(&this.core, key.1, key.2)?;
        let mut entry = Entry { mr, lasts: false, keeps: false, watched: Vec::new() };
        let keep = entry.is_to_keep(&mut life);
        all.insert(key, entry);
        Ok::<_, Error>((mr, keep))
    });
    let (mr, keep) = added?;
    if let (Life::Kept(owner), true) = (life, keep) {
        this.regions.keep(mr, Some(owner));
    }
    Ok(mr)
}

/// Takes out what an allocation had that is not there any more, where the driver tells.
fn take_stale(ep: &PyEndpoint, (conn, ptr, len): Key) -> Vec<Entry> {
    let mut all = ep.implicit.advertised.0.lock();
    let is_stale = |&(of, at, held): &Key, entry: &mut Entry| {
        let meets = of == conn && at < ptr.saturating_add(len) && ptr < at.saturating_add(held);
        meets && matches!(ep.core.is_same_memory(entry.mr), Ok(false))
    };
    all.extract_if(is_stale).map(|(_, entry)| entry).collect()
}

/// Ends the regions that were advertised over a connection.
pub(crate) fn disconnected(ep: &PyEndpoint, py: Python<'_>, conn: ConnId) -> Result<(), Error> {
    let ended: Vec<Entry> = {
        let mut all = ep.implicit.advertised.0.lock();
        all.extract_if(|key, _| key.0 == conn).map(|(_, entry)| entry).collect()
    };
    deregister(ep, py, ended.iter().map(|entry| entry.mr).collect())
}

/// An object that is watched goes: its memory is there until this returns.
fn gone(ep: &PyEndpoint, key: Key, watch: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut ended = Vec::new();
    let dead = {
        let mut all = ep.implicit.advertised.0.lock();
        let Some(entry) = all.get_mut(&key) else { return Ok(()) };
        let at = entry.watched.iter().position(|(_, other)| other.is(watch));
        let dead = at.map(|at| entry.watched.swap_remove(at));
        if dead.is_some() && entry.watched.is_empty() && !entry.lasts {
            ended.extend(all.remove(&key).map(|entry| entry.mr));
        }
        dead
    };
    drop(dead);
    match deregister(ep, watch.py(), ended) {
        Err(e @ Error::StillTouched { .. }) => Err(PyRuntimeError::new_err(e.to_string())),
        _ => Ok(()),
    }
}

impl Entry {
    /// Has it last for this one's life, too; says whether its object is to be kept.
    fn is_to_keep(&mut self, life: &mut Life) -> bool {
        let is_watch = matches!(life, Life::Watched(..));
        match std::mem::replace(life, Life::Address) {
            // Whoever is watched already is alive.
            Life::Watched(object, _) if self.watched.iter().any(|(other, _)| *other == object) => {}
            Life::Watched(object, watch) => self.watched.push((object, watch)),
            kept => *life = kept,
        }
        self.lasts |= !is_watch;
        let keep = matches!(life, Life::Kept(_)) && !self.keeps;
        self.keeps |= keep;
        keep
    }
}

impl Life {
    /// That of an object, and the object that is watched.
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
            // Python does not tell when it goes.
            Err(_) => Ok((Self::Kept(owner), None)),
        }
    }
}

/// The object whose memory a view shows; views come and go.
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
