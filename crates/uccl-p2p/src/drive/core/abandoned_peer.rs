//! Peers that were given up and may still be touching our memory.

use std::{sync::Arc, time::Instant};

use parking_lot::Mutex;
use uccl_fabric::lane::Aftermath;

use super::connection::{loans::Loan, transfer::Hold};
use crate::{config::Config, drive::timers};

/// A peer that was given up: its lanes are dead on this side.
pub(in crate::drive) struct AbandonedPeer {
    pub(in crate::drive) peer: Arc<str>,
    pub(in crate::drive) since: Instant,
    pub(in crate::drive) aftermaths: Vec<Arc<dyn Aftermath>>,
    pub(in crate::drive) lent: Vec<Loan>,
    /// Transfers that must not end before the copies that this process itself still makes. No lane
    /// tells which transfers these copies belong to, so all unfinished ones are held.
    pub(in crate::drive) copied: Vec<Hold>,
}

impl AbandonedPeer {
    fn touches_slot(&self, slot: u32) -> bool {
        self.aftermaths.iter().any(|aftermath| aftermath.touches(slot))
    }

    /// Whether the peer may be touching the region in this slot, with its key or with one made for
    /// a part of it.
    pub(in crate::drive) fn touches(&self, slot: u32) -> bool {
        let mut lent = self.lent.iter().filter(|lent| lent.part_of == Some(slot));
        self.touches_slot(slot) || lent.any(|lent| self.touches_slot(lent.revoked.slot()))
    }

    pub(in crate::drive) fn copies(&self) -> bool {
        self.aftermaths.iter().any(|aftermath| aftermath.copies())
    }

    pub(in crate::drive) fn is_over(&self) -> bool {
        self.aftermaths.iter().all(|aftermath| aftermath.is_over())
    }

    /// Takes out the lent memory that is not touched any more. Its key is revoked, so no new access
    /// begins.
    pub(in crate::drive) fn take_back(&mut self) -> Vec<Loan> {
        if self.is_over() {
            return std::mem::take(&mut self.lent);
        }
        let aftermaths = &self.aftermaths;
        let is_free = |lent: &mut Loan| {
            let slot = lent.revoked.slot();
            !aftermaths.iter().any(|aftermath| aftermath.touches(slot))
        };
        self.lent.extract_if(.., is_free).collect()
    }

    /// Takes out the transfers that were held for as long as is allowed.
    pub(in crate::drive) fn stuck(&mut self, config: &Config) -> Vec<Hold> {
        if !timers::is_over(self.since, timers::to_end(config)) {
            return Vec::new();
        }
        let lent = self.lent.iter_mut().filter_map(|lent| lent.hold.take());
        lent.chain(self.copied.drain(..)).collect()
    }
}

/// The peers of an endpoint that were given up.
#[derive(Default)]
pub(crate) struct Aftermaths(pub(in crate::drive) Mutex<Vec<AbandonedPeer>>);

impl Aftermaths {
    pub(in crate::drive) fn all(&self) -> Vec<Arc<dyn Aftermath>> {
        self.0.lock().iter().flat_map(|left| left.aftermaths.iter().cloned()).collect()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use uccl_fabric::{
        mem::Span,
        region::{RegionTable, Rights},
    };

    use super::*;

    /// A lane on which the peer touches some slots until it is done.
    #[derive(Default)]
    struct TouchedLane(Mutex<Vec<u32>>);

    impl Aftermath for TouchedLane {
        fn copies(&self) -> bool {
            false
        }

        fn touches(&self, slot: u32) -> bool {
            self.0.lock().contains(&slot)
        }

        fn is_over(&self) -> bool {
            self.0.lock().is_empty()
        }
    }

    #[test]
    fn a_loan_stays_while_any_lane_of_the_peer_touches_it() {
        const REGISTERED: u32 = 1000;
        let table = RegionTable::new().expect("a table");
        let lent = [None, Some(REGISTERED)].map(|part_of| {
            let span = Span { addr: 0x1000, len: 64 };
            let region = table.insert(span, Rights::READ, None).expect("there is room");
            let revoked = table.revoke(region.slot, region.key).expect("it was there");
            Loan { part_of, revoked, hold: None, _payload: None }
        });
        let slots =
            |lent: &[Loan]| -> Vec<_> { lent.iter().map(|lent| lent.revoked.slot()).collect() };
        let [own, part] = slots(&lent)[..] else { panic!("two") };
        let lanes = [own, part].map(|slot| Arc::new(TouchedLane(Mutex::new(vec![slot]))));
        let aftermaths = lanes.iter().map(|lane| Arc::clone(lane) as Arc<dyn Aftermath>).collect();
        let (peer, since, copied) = ("peer".into(), Instant::now(), Vec::new());
        let mut left = AbandonedPeer { peer, since, aftermaths, lent: lent.into(), copied };
        assert!(left.touches(own) && left.touches(part));
        assert!(left.touches(REGISTERED), "by the key of a part");
        assert!(!left.touches(REGISTERED + 1));
        assert!(left.take_back().is_empty() && !left.is_over());
        lanes[0].0.lock().clear();
        assert_eq!(slots(&left.take_back()), [own]);
        assert!(!left.is_over() && left.touches(REGISTERED), "the other lane goes on");
        lanes[1].0.lock().clear();
        assert!(left.is_over() && !left.touches(REGISTERED));
        assert_eq!(slots(&left.take_back()), [part]);
    }
}
