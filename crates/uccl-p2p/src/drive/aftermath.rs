//! Peers that were given up and may not know it yet: they may have stopped in the middle of an
//! access to our memory.
//!
//! Until such a peer is done or has died, memory that it may be touching is not given back by a
//! deregistration, and transfers for which it was asked to copy do not end.

use std::{sync::Arc, time::Instant};

use uccl_fabric::lane::Aftermath;

use super::{
    core::{
        Core,
        abandoned_peer::AbandonedPeer,
        connection::{Connection, loans::Loan, transfer::Transfer},
    },
    regions::EndingRegion,
};
use crate::error::Error;

impl Core {
    /// Called when the lanes of a connection are dead. Watches the memory that the peer may still
    /// be touching, including memory that was lent with keys made for one message, and the copies
    /// that this process itself is still making.
    pub(crate) fn watch_aftermath(&self, conn: &Arc<Connection>, lent: Vec<Loan>) {
        let aftermaths = conn.lanes.host.iter().filter_map(|lane| lane.aftermath());
        let of_rails = conn.lanes.rails.iter().filter_map(|lane| lane.aftermath());
        let aftermaths: Vec<Arc<dyn Aftermath>> =
            aftermaths.chain(of_rails).map(Arc::from).collect();
        if aftermaths.is_empty() {
            // The peer does not access memory by itself, and no device of ours does any more.
            return;
        }
        let (peer, since) = (Arc::clone(&conn.peer.name), Instant::now());
        let mut given_up = AbandonedPeer { peer, since, aftermaths, lent, copied: Vec::new() };
        if given_up.copies() {
            given_up.copied = conn.unfinished().iter().map(Transfer::hold).collect();
        }
        self.aftermaths.0.lock().push(given_up);
        self.workers.hurry();
    }

    /// Ends the transfers that waited for peers that are done or took too long, and forgets peers
    /// that touch nothing any more. Returns whether some may still touch memory.
    pub(crate) fn look_after_aftermaths(&self) -> bool {
        let mut free = Vec::new();
        let mut copied = Vec::new();
        let mut stuck = Vec::new();
        // Before peers are forgotten, and without a lock: this ends operations.
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
        // Without a lock: transfers end here, and threads that wait for them run on.
        drop((free, copied));
        for (hold, peer) in stuck {
            let transfer = hold.transfer();
            transfer.publish(Err(still_touched(transfer, peer)));
        }
        left
    }

    /// Forgets all given-up peers: the endpoint has nothing left that they could touch.
    pub(crate) fn forget_aftermaths(&self) {
        let forgotten = std::mem::take(&mut *self.aftermaths.0.lock());
        drop(forgotten);
    }

    /// A given-up peer that may be touching this region.
    pub(crate) fn toucher_left(&self, ending: &EndingRegion) -> Option<Arc<str>> {
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

/// Why memory cannot be given back, as text for errors.
pub(crate) const IN_THE_MIDDLE: &str = "it is stuck in the middle of an access";

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

    use super::*;
    use crate::drive::pair::JoinedPair;

    /// A lane on which the peer touches a slot. It is over once somebody has looked at it after the
    /// peer was done.
    #[derive(Default)]
    struct TouchedLane {
        slot: AtomicU32,
        is_done: AtomicBool,
        is_over: AtomicBool,
    }

    impl Aftermath for TouchedLane {
        fn copies(&self) -> bool {
            false
        }

        fn touches(&self, slot: u32) -> bool {
            self.slot.load(SeqCst) == slot
        }

        fn look(&self) {
            self.is_over.store(self.is_done.load(SeqCst), SeqCst);
        }

        fn is_over(&self) -> bool {
            self.is_over.load(SeqCst)
        }
    }

    #[test]
    fn memory_is_given_back_when_a_given_up_peer_touches_it_no_more() {
        let pair = JoinedPair::by_tcp();
        let mut memory = vec![0_u8; 64];
        // SAFETY: the memory lives longer than the endpoint.
        let mr = unsafe { pair.a.register(memory.as_mut_ptr() as usize, memory.len()) };
        let mr = mr.expect("registered");
        let core = pair.a.core();
        let ending = core.mrs.revoke(mr).expect("nothing of ours uses it");
        let slot = ending.mr.region.slot;
        let lane = Arc::new(TouchedLane { slot: slot.into(), ..TouchedLane::default() });
        let peer: Arc<str> = "given up".into();
        core.aftermaths.0.lock().push(AbandonedPeer {
            peer: Arc::clone(&peer),
            since: Instant::now(),
            aftermaths: vec![Arc::clone(&lane) as Arc<dyn Aftermath>],
            lent: Vec::new(),
            copied: Vec::new(),
        });
        assert!(core.look_after_aftermaths(), "the peer is not done");
        assert_eq!(core.toucher_left(&ending), Some(peer));
        lane.slot.store(slot + 1, SeqCst);
        assert_eq!(core.toucher_left(&ending), None, "it is elsewhere");
        assert!(core.look_after_aftermaths(), "the peer is not done");
        lane.is_done.store(true, SeqCst);
        assert!(!core.look_after_aftermaths() && core.aftermaths.is_empty());
        pair.a.deregister(mr).expect("nothing touches it");
        pair.close();
    }
}
