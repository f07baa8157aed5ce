//! Peers that were given up, and may not know it yet: they may be stopped in the middle of an access to our memory.
//!
//! What they may be touching is neither given back by a deregistration, nor does a transfer that the peer was asked to
//! copy for end, before they are through with it or have died.

use std::{sync::Arc, time::Instant};

use uccl_fabric::lane::Aftermath;

use super::{
    connection::{Connection, Core, Lent, Transfer},
    given_up::GivenUp,
    regions::Ending,
};
use crate::error::Error;

impl Core {
    /// Watches what the peer of a connection whose lanes are dead may still be at, also with keys that it was given
    /// for a while, and what this process is.
    pub(crate) fn watch_aftermath(&self, conn: &Arc<Connection>, lent: Vec<Lent>) {
        let aftermaths = conn.lanes.iter().filter_map(|lane| lane.aftermath());
        let aftermaths: Vec<Arc<dyn Aftermath>> = aftermaths.map(Arc::from).collect();
        if aftermaths.is_empty() {
            // No peer touches anything by itself.
            return;
        }
        let (peer, since) = (Arc::clone(&conn.peer.name), Instant::now());
        let mut given_up = GivenUp { peer, since, aftermaths, lent, copied: Vec::new() };
        if given_up.copies() {
            given_up.copied = conn.unfinished().iter().map(Transfer::hold).collect();
        }
        self.aftermaths.0.lock().push(given_up);
        self.workers.hurry();
    }

    /// Ends what waited for peers that are through, or have kept it waiting for too long, and forgets peers that
    /// have come to their end; says whether some have not.
    pub(crate) fn look_after_aftermaths(&self) -> bool {
        let mut free = Vec::new();
        let mut copied = Vec::new();
        let mut stuck = Vec::new();
        // Before they are forgotten, and with nothing locked: operations end.
        self.aftermaths.all().iter().for_each(|aftermath| aftermath.look());
        let left = {
            let mut given_up = self.aftermaths.0.lock();
            given_up.retain_mut(|left| {
                free.extend(left.take_back());
                if !left.copied.is_empty() && !left.copies() {
                    copied.append(&mut left.copied);
                }
                let held = left.stuck(&self.config);
                stuck.extend(held.into_iter().map(|hold| (hold, Arc::clone(&left.peer))));
                !left.is_over()
            });
            !given_up.is_empty()
        };
        // Transfers end, and whoever waits for them goes on: nothing is locked here.
        drop((free, copied));
        for (hold, peer) in stuck {
            let transfer = hold.transfer();
            transfer.publish(Err(still_touched(transfer, peer)));
        }
        left
    }

    /// A peer that was given up and may be touching a region.
    pub(crate) fn toucher_left(&self, ending: &Ending) -> Option<Arc<str>> {
        let given_up = self.aftermaths.0.lock();
        let toucher = given_up.iter().find(|left| left.touches(ending.mr.region.slot));
        toucher.map(|left| Arc::clone(&left.peer))
    }
}

fn still_touched(transfer: &Transfer, by: Arc<str>) -> Error {
    let body = transfer.body.lock();
    let regions = body.leases.iter().map(|lease| lease.mr().id).collect();
    Error::StillTouched { regions, by, reason: IN_THE_MIDDLE.into() }
}

/// What keeps a peer's hands on memory.
pub(crate) const IN_THE_MIDDLE: &str = "it is stuck in the middle of an access";
