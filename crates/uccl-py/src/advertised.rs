//! Memory that `advertise_ipc` named: its regions, which nobody else has.
//!
//! A region lasts as long as the object that was advertised, or the one whose memory that shows: when it goes, the region
//! ends before the memory is given back. Python does not tell of every object when it goes: others are kept, as `reg` keeps
//! them, until the connection is removed, or until something is advertised after it was lost. So long lasts the region of an address; when it is advertised again, it is checked
//! to be of the same allocation, where the driver tells allocations apart.

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
pub(crate) struct Advertised(Mutex<HashMap<Key, Entry>>);

/// A region, and what keeps it.
pub(crate) struct Entry {
    pub(crate) mr: MrId,
    /// Until the connection is removed: an address was advertised, or an object that is kept.
    lasts: bool,
    /// Whether such an object is.
    keeps: bool,
    /// The objects that are watched: their addresses, and what tells when they go.
    watched: Vec<(usize, Py<PyWeakrefReference>)>,
}

/// For how long a range is advertised.
pub(crate) enum Life {
    Address,
    Kept(Owner),
    Watched(usize, Py<PyWeakrefReference>),
}

impl Advertised {
    /// The region of a range, made unless it is there; and whether the object of its life is to be kept.
    pub(crate) fn add(
        &self,
        core: &Endpoint,
        key: Key,
        life: &mut Life,
    ) -> Result<(MrId, bool), Error> {
        if let Some(entry) = self.0.lock().get_mut(&key) {
            return Ok((entry.mr, entry.is_to_keep(life)));
        }
        // Nothing is locked meanwhile: whoever is told that an object goes has the interpreter's lock, and needs this one.
        let mr = register(core, key.1, key.2)?;
        let mut all = self.0.lock();
        if let Some(entry) = all.get_mut(&key) {
            let joined = (entry.mr, entry.is_to_keep(life));
            drop(all);
            // Another thread made one meanwhile. Nobody has the key of this one.
            core.deregister(mr)?;
            return Ok(joined);
        }
        let mut entry = Entry { mr, lasts: false, keeps: false, watched: Vec::new() };
        let keep = entry.is_to_keep(life);
        all.insert(key, entry);
        Ok((mr, keep))
    }

    /// Takes out what was advertised over connections that are lost.
    pub(crate) fn take_lost(&self, core: &Endpoint) -> Vec<Entry> {
        let mut all = self.0.lock();
        let is_lost = |key: &Key, _: &mut Entry| core.check_connection(key.0).is_err();
        all.extract_if(is_lost).map(|(_, entry)| entry).collect()
    }

    /// Takes out what an allocation had that is not there any more, where the driver tells.
    pub(crate) fn take_stale(&self, core: &Endpoint, (conn, ptr, len): Key) -> Vec<Entry> {
        let mut all = self.0.lock();
        let is_stale = |&(of, at, held): &Key, entry: &mut Entry| {
            let meets = of == conn && at < ptr.saturating_add(len) && ptr < at.saturating_add(held);
            meets && matches!(core.is_same_memory(entry.mr), Ok(false))
        };
        all.extract_if(is_stale).map(|(_, entry)| entry).collect()
    }

    /// Takes out what was advertised over a connection.
    pub(crate) fn take_of(&self, conn: ConnId) -> Vec<Entry> {
        let mut all = self.0.lock();
        all.extract_if(|key, _| key.0 == conn).map(|(_, entry)| entry).collect()
    }

    /// Forgets the watch of an object that goes; takes out what nothing else keeps.
    pub(crate) fn unwatch(&self, key: Key, watch: &Bound<'_, PyAny>) -> Option<MrId> {
        let mut all = self.0.lock();
        let entry = all.get_mut(&key)?;
        let at = entry.watched.iter().position(|(_, other)| other.is(watch))?;
        let dead = entry.watched.swap_remove(at);
        let is_over = entry.watched.is_empty() && !entry.lasts;
        let ended = if is_over { all.remove(&key) } else { None };
        drop(all);
        // It may run Python code, which finds nothing locked.
        drop(dead);
        ended.map(|entry| entry.mr)
    }
}

impl Entry {
    /// The objects that are watched and live.
    pub(crate) fn objects<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        self.watched.iter().filter_map(|(_, watch)| watch.bind(py).upgrade()).collect()
    }

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
