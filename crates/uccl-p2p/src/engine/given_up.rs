//! Peers that were given up, as far as they may be touching memory of ours.

use std::{sync::Arc, time::Instant};

use parking_lot::Mutex;
use uccl_fabric::lane::Aftermath;

use super::{
    loans::Lent,
    timers,
    transfer::{Carrier, Hold},
};
use crate::config::Config;

/// A peer whose lanes are dead here.
pub(super) struct GivenUp<C: Carrier> {
    pub(super) peer: Arc<str>,
    pub(super) since: Instant,
    pub(super) aftermaths: Vec<Arc<dyn Aftermath>>,
    pub(super) lent: Vec<Lent<C>>,
    /// Transfers that do not end before the copies that this process itself still makes: of which of them these are, no
    /// lane tells.
    pub(super) copied: Vec<Hold<C>>,
}

impl<C: Carrier> GivenUp<C> {
    fn touches_slot(&self, slot: u32) -> bool {
        self.aftermaths.iter().any(|aftermath| aftermath.touches(slot))
    }

    /// Whether the peer may be touching the region of this slot, by its own key or by one made for a part.
    pub(super) fn touches(&self, slot: u32) -> bool {
        let mut lent = self.lent.iter().filter(|lent| lent.part_of == Some(slot));
        self.touches_slot(slot) || lent.any(|lent| self.touches_slot(lent.revoked.slot()))
    }

    pub(super) fn copies(&self) -> bool {
        self.aftermaths.iter().any(|aftermath| aftermath.copies())
    }

    pub(super) fn is_over(&self) -> bool {
        self.aftermaths.iter().all(|aftermath| aftermath.is_over())
    }

    /// What was lent and is not touched any more. Its key is revoked: nothing begins there.
    pub(super) fn take_back(&mut self) -> Vec<Lent<C>> {
        if self.is_over() {
            return std::mem::take(&mut self.lent);
        }
        let aftermaths = &self.aftermaths;
        let is_free = |lent: &mut Lent<C>| {
            let slot = lent.revoked.slot();
            !aftermaths.iter().any(|aftermath| aftermath.touches(slot))
        };
        self.lent.extract_if(.., is_free).collect()
    }

    /// Transfers that have been held for as long as may be.
    pub(super) fn stuck(&mut self, config: &Config) -> Vec<Hold<C>> {
        if !timers::is_over(self.since, timers::to_end(config)) {
            return Vec::new();
        }
        let lent = self.lent.iter_mut().filter_map(|lent| lent.hold.take());
        lent.chain(self.copied.drain(..)).collect()
    }
}

/// The peers of an endpoint that were given up.
pub(crate) struct Aftermaths<C: Carrier>(pub(super) Mutex<Vec<GivenUp<C>>>);

impl<C: Carrier> Default for Aftermaths<C> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<C: Carrier> Aftermaths<C> {
    /// Forgets them all: nothing of the endpoint is left to be touched.
    pub(crate) fn forget(&self) {
        let forgotten = std::mem::take(&mut *self.0.lock());
        drop(forgotten);
    }

    pub(super) fn all(&self) -> Vec<Arc<dyn Aftermath>> {
        self.0.lock().iter().flat_map(|left| left.aftermaths.iter().cloned()).collect()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}
