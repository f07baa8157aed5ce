//! Regions of memory that `advertise_ipc` named. No other call uses them.
//!
//! A region lasts as long as the advertised object, or the object that owns the memory of an
//! advertised view: when that object ends, the region ends before the memory is freed. Python does
//! not report the end of every object. The others are kept, as `reg` keeps them, until the
//! connection is removed, or until the first advertisement after the connection was lost. The
//! region of an address lasts for the same time; when the address is advertised once more, the
//! region is checked to be of the same allocation, if the driver can tell allocations apart.

use std::collections::HashMap;

use parking_lot::Mutex;
use pyo3::{
    prelude::*,
    types::{PyWeakrefMethods, PyWeakrefReference},
};
use uccl_p2p::{ConnId, Endpoint, Error, MrId};

use crate::{memory::Owner, regions::register};

/// Connection, address and length.
pub(crate) type Key = (ConnId, usize, usize);

#[derive(Default)]
pub(crate) struct AdvertisedObjects(Mutex<HashMap<Key, Entry>>);

/// A region, and the objects that it depends on.
pub(crate) struct Entry {
    pub(crate) mr: MrId,
    /// Whether the region lasts until the connection is removed: an address was advertised, or a
    /// kept object.
    lasts: bool,
    /// Whether a kept object was advertised.
    keeps: bool,
    /// The watched objects: their addresses, and weak references that call back at their end.
    watched: Vec<(usize, Py<PyWeakrefReference>)>,
}

/// The time for which a range is advertised.
pub(crate) enum ObjectLife {
    Address,
    Kept(Owner),
    Watched(usize, Py<PyWeakrefReference>),
}

impl AdvertisedObjects {
    /// The region of a range, which is made unless it exists; and whether the caller has to keep
    /// the owner in `life`.
    pub(crate) fn add(
        &self,
        core: &Endpoint,
        key: Key,
        life: &mut ObjectLife,
    ) -> Result<(MrId, bool), Error> {
        if let Some(entry) = self.0.lock().get_mut(&key) {
            return Ok((entry.mr, entry.is_to_keep(life)));
        }
        // No lock is held meanwhile: the callback of an object's end holds the GIL and takes this
        // lock.
        let mr = register(core, key.1, key.2)?;
        let mut all = self.0.lock();
        if let Some(entry) = all.get_mut(&key) {
            let joined = (entry.mr, entry.is_to_keep(life));
            drop(all);
            // Another thread has made one meanwhile. No peer has the key of this one.
            core.deregister(mr)?;
            return Ok(joined);
        }
        let mut entry = Entry { mr, lasts: false, keeps: false, watched: Vec::new() };
        let keep = entry.is_to_keep(life);
        all.insert(key, entry);
        Ok((mr, keep))
    }

    /// Takes the entries of connections that are lost.
    pub(crate) fn take_lost(&self, core: &Endpoint) -> Vec<Entry> {
        let mut all = self.0.lock();
        let is_lost = |key: &Key, _: &mut Entry| core.check_connection(key.0).is_err();
        all.extract_if(is_lost).map(|(_, entry)| entry).collect()
    }

    /// Takes the entries of a connection that overlap a range and are of freed memory, if the
    /// driver can tell.
    pub(crate) fn take_stale(&self, core: &Endpoint, (conn, ptr, len): Key) -> Vec<Entry> {
        let mut all = self.0.lock();
        let is_stale = |&(of, at, held): &Key, entry: &mut Entry| {
            let meets = of == conn && at < ptr.saturating_add(len) && ptr < at.saturating_add(held);
            meets && matches!(core.is_same_memory(entry.mr), Ok(false))
        };
        all.extract_if(is_stale).map(|(_, entry)| entry).collect()
    }

    /// Takes the entries of a connection.
    pub(crate) fn take_of(&self, conn: ConnId) -> Vec<Entry> {
        let mut all = self.0.lock();
        all.extract_if(|key, _| key.0 == conn).map(|(_, entry)| entry).collect()
    }

    /// Removes the watch of an object that ends. Returns the region if it depends on nothing else.
    pub(crate) fn unwatch(&self, key: Key, watch: &Bound<'_, PyAny>) -> Option<MrId> {
        let mut all = self.0.lock();
        let entry = all.get_mut(&key)?;
        let at = entry.watched.iter().position(|(_, other)| other.is(watch))?;
        let dead = entry.watched.swap_remove(at);
        let is_over = entry.watched.is_empty() && !entry.lasts;
        let ended = if is_over { all.remove(&key) } else { None };
        drop(all);
        // The drop may run Python code, so no lock is held.
        drop(dead);
        ended.map(|entry| entry.mr)
    }
}

impl Entry {
    /// The watched objects that are alive.
    pub(crate) fn objects<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        self.watched.iter().filter_map(|(_, watch)| watch.bind(py).upgrade()).collect()
    }

    /// Adds a life to the entry; returns whether the caller has to keep its owner.
    fn is_to_keep(&mut self, life: &mut ObjectLife) -> bool {
        let is_watch = matches!(life, ObjectLife::Watched(..));
        match std::mem::replace(life, ObjectLife::Address) {
            // An object that is watched already is alive, so no other object has its address.
            ObjectLife::Watched(object, _)
                if self.watched.iter().any(|(other, _)| *other == object) => {}
            ObjectLife::Watched(object, watch) => self.watched.push((object, watch)),
            kept => *life = kept,
        }
        self.lasts |= !is_watch;
        let keep = matches!(life, ObjectLife::Kept(_)) && !self.keeps;
        self.keeps |= keep;
        keep
    }
}
