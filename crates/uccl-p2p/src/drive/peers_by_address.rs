//! Connections to peers that callers know by their address only.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::*},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    error::{Error, Result},
    ids::ConnId,
    types::Interrupt,
};

/// How often a call that waits for another's connect asks whether it was interrupted.
const SLICE: Duration = Duration::from_millis(20);

/// The connection to an address.
#[derive(Default)]
struct Place {
    conn: Option<ConnId>,
    /// The error of the last connect, if that failed.
    failed: Option<Error>,
}

#[derive(Default)]
struct Slot {
    /// How many connects have ended.
    ended: AtomicU64,
    /// Locked while a thread connects.
    place: Mutex<Place>,
}

/// The connections of an endpoint to addresses.
#[derive(Default)]
pub(crate) struct PeersByAddress(Mutex<HashMap<SocketAddr, Arc<Slot>>>);

impl PeersByAddress {
    /// The connection to an address: the known one if `is_there`, else the one that `connect`
    /// makes. No other thread does the same meanwhile. A thread that has waited for another one's
    /// connect returns with that one's error: a hundred callers of a dead peer take one time-out,
    /// and not one after the other.
    pub(crate) fn reach(
        &self,
        addr: SocketAddr,
        interrupt: &mut dyn Interrupt,
        is_there: impl FnOnce(ConnId, &mut dyn Interrupt) -> Result<bool>,
        connect: impl FnOnce(&mut dyn Interrupt) -> Result<ConnId>,
    ) -> Result<ConnId> {
        let slot = Arc::clone(self.0.lock().entry(addr).or_default());
        let seen = slot.ended.load(Acquire);
        let mut place = loop {
            match slot.place.try_lock_for(SLICE) {
                Some(place) => break place,
                None if interrupt.interrupted() => return Err(Error::Interrupted),
                None => {}
            }
        };
        if let Some(known) = place.conn {
            if is_there(known, interrupt)? {
                return Ok(known);
            }
            place.conn = None;
        }
        if let Some(failed) = place.failed.take()
            && slot.ended.load(Relaxed) > seen
        {
            place.failed = Some(failed.clone());
            return Err(failed);
        }
        let connected = connect(interrupt);
        match &connected {
            Ok(conn) => place.conn = Some(*conn),
            Err(Error::Interrupted) => return connected,
            Err(e) => place.failed = Some(e.clone()),
        }
        slot.ended.fetch_add(1, Release);
        connected
    }

    /// Forgets the addresses without a connection for which `keep` is true, except those that a
    /// thread is using.
    pub(crate) fn retain(&self, keep: impl Fn(ConnId) -> bool) {
        // No other thread reaches a slot that this map alone holds.
        self.0.lock().retain(|_, slot| {
            Arc::strong_count(slot) > 1 || slot.place.lock().conn.is_some_and(&keep)
        });
    }
}
