//! Our regions with keys that the peer has been given.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use uccl_fabric::region::Rights;
use uccl_wire::rails::{Note, RegionId};

use super::{path::ASIDE_LOOK, pinned::PinnedRegion};

/// The regions that are lent to the peer, and the answers that it waits for.
#[derive(Default)]
pub(super) struct Grants {
    /// The lent regions by slot: the key, and whether the peer has been sent `Revoke`.
    pub(super) by_slot: HashMap<u32, (u64, bool)>,
    /// Regions of the peer's that it has revoked while requests of ours for them were under way.
    pub(super) releasing: Vec<RegionId>,
    /// Questions of the peer that are answered when devices are ready.
    pub(super) due: Vec<PendingAnswer>,
}

/// A question with an answer that waits for devices.
pub(super) struct PendingAnswer {
    pub(super) region: RegionId,
    pub(super) awaits: AnswerEvent,
}

/// The event that an answer waits for.
pub(super) enum AnswerEvent {
    /// The devices have not been shown the region of this slot yet.
    Region(u32),
    /// They are being shown it again, for a peer with these rights.
    Narrow(Arc<PinnedRegion>, Rights),
    /// They make keys of it for their channels.
    Keys(Arc<PinnedRegion>),
    /// The landing area is being made.
    Landing,
}

/// The steps taken for an answer. Each step is taken once, in this order: where a device has failed
/// in one, the answer does without.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Begun,
    Narrowed,
    Exported,
    Landed,
}

impl AnswerEvent {
    /// The step that is taken when this wait is over.
    pub(super) fn step(&self) -> Step {
        match self {
            Self::Region(_) => Step::Begun,
            Self::Narrow(..) => Step::Narrowed,
            Self::Keys(_) => Step::Exported,
            Self::Landing => Step::Landed,
        }
    }
}

impl Grants {
    /// Takes a region's key back, if the peer has it. True until the peer has sent `Released`.
    pub(super) fn revoke(&mut self, slot: u32, notes: &mut VecDeque<Note>) -> bool {
        let Some((key, told)) = self.by_slot.get_mut(&slot) else { return false };
        if !std::mem::replace(told, true) {
            notes.push_back(Note::Revoke(RegionId { slot, key: *key }));
        }
        true
    }

    /// How soon to check whether an answer need not wait any more.
    pub(super) fn wake_in(&self) -> Option<Duration> {
        (!self.due.is_empty()).then_some(ASIDE_LOOK)
    }
}
