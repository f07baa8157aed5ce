//! The remains of a killed lane: its devices did not end its channels in time.

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;
use uccl_fabric::lane::Aftermath;

use super::{aside::ChannelTeardown, bounce::Area, flight::EndedOp, rails::Rails};

/// Channels that are still ending. Until they have, their devices may touch the memory of their
/// requests and grants.
pub(super) struct EndingChannels {
    pub(super) channels: Vec<ChannelTeardown>,
    /// The numbers of the registrations by which our requests name our memory.
    pub(super) registrations: HashSet<u64>,
    /// The slots of the regions that were lent to the peer.
    pub(super) lent: HashSet<u32>,
    /// Operations with parts on these channels.
    pub(super) operations: Mutex<Vec<EndedOp>>,
    /// Threads that wait for memory of the lane itself while it is still being locked.
    pub(super) makings: Vec<ChannelTeardown>,
    /// The memory of the lane itself.
    pub(super) areas: Vec<Area>,
    pub(super) rails: Arc<Rails>,
}

impl EndingChannels {
    pub(super) fn is_over(&self) -> bool {
        self.have_channels_ended() && self.makings.iter().all(ChannelTeardown::is_over)
    }

    fn have_channels_ended(&self) -> bool {
        self.channels.iter().all(ChannelTeardown::is_over)
    }

    /// Whether one of the channels may touch our region of this slot.
    pub(super) fn touches(&self, slot: u32) -> bool {
        let is_named =
            |pinned: Arc<super::pinned::PinnedRegion>| self.registrations.contains(&pinned.number);
        let is_known =
            || self.lent.contains(&slot) || self.rails.of_slot(slot).is_some_and(is_named);
        !self.have_channels_ended() && is_known()
    }
}

impl Drop for EndingChannels {
    fn drop(&mut self) {
        if self.is_over() {
            return;
        }
        tracing::error!(
            "a device does not end channels, or does not lock memory: they, and locked memory, are kept until the \
             process ends"
        );
        self.channels.drain(..).chain(self.makings.drain(..)).for_each(ChannelTeardown::leave);
        std::mem::forget(std::mem::take(&mut self.areas));
    }
}

/// The remains, for the engine.
pub(super) struct ChannelAftermath(pub(super) Arc<EndingChannels>);

impl Aftermath for ChannelAftermath {
    fn copies(&self) -> bool {
        !self.0.is_over()
    }

    fn touches(&self, slot: u32) -> bool {
        self.0.touches(slot)
    }

    fn look(&self) {
        if self.0.is_over() {
            let ended = std::mem::take(&mut *self.0.operations.lock());
            ended.into_iter().for_each(|(_, done, result)| done.complete(result));
        }
    }

    fn is_over(&self) -> bool {
        self.0.is_over() && self.0.operations.lock().is_empty()
    }
}
