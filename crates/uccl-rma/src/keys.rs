//! Our knowledge of the peer's regions: the keys that it granted or denied when we asked.

use std::collections::HashMap;

use smallvec::SmallVec;
use uccl_fabric::{
    lane::{Moves, OpKind},
    mem::RemoteSpan,
    region::offset_within,
    status_of,
};
use uccl_wire::{
    frame::Status,
    rails::{Grant, PathId, RegionId},
};

/// The answers about the peer's regions.
#[derive(Default)]
pub(super) struct Keys {
    /// The regions known for each slot. Mostly one: the latest that used the slot.
    by_slot: HashMap<u32, SmallVec<[KnownRegion; 1]>>,
}

struct KnownRegion {
    key: u64,
    answer: Answer,
    /// The epoch, which counts channels that came up, at which we last asked.
    asked_at: u64,
    /// We have asked and the answer has not come yet.
    awaited: bool,
}

enum Answer {
    None,
    Denied(Status),
    Granted(GrantedRegion),
}

/// A region that can be reached.
pub(super) struct GrantedRegion {
    addr: u64,
    len: u64,
    read: bool,
    write: bool,
    /// Its owner copies between the region and the landing area.
    pub(super) staged: bool,
    paths: Vec<Reach>,
}

/// How a region is reached over one channel.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    pub(super) id: PathId,
    base: u64,
    /// The key that requests name the region by.
    pub(super) key: u64,
}

/// The region that a piece of the peer's memory lies in.
pub(super) fn region_of(piece: &RemoteSpan) -> RegionId {
    RegionId { slot: piece.slot, key: piece.key }
}

/// Why there is no key for a piece of the peer's memory.
#[derive(Clone, Copy)]
pub(super) enum MissingKey {
    /// The peer has to be asked about this region.
    Ask(RegionId),
    /// The peer has been asked and has not answered.
    Wait,
    /// The operation is not allowed, for this reason.
    Denied(Status),
}

impl GrantedRegion {
    /// How the region is reached over a channel, and the piece's address there. None if it is not
    /// reached over this channel.
    pub(super) fn over(&self, id: PathId, piece: &RemoteSpan) -> Option<(Reach, u64)> {
        let reach = self.paths.iter().find(|reach| reach.id == id)?;
        Some((*reach, reach.base.wrapping_add(piece.addr.wrapping_sub(self.addr))))
    }

    /// The region's address and length in its owner's process.
    pub(super) fn place(&self) -> (u64, u64) {
        (self.addr, self.len)
    }

    fn admit(&self, kind: OpKind, piece: &RemoteSpan) -> Result<(), Status> {
        let allowed = match kind {
            OpKind::Read => self.read,
            OpKind::Write => self.write,
        };
        if !allowed {
            return Err(Status::Denied);
        }
        offset_within(self.addr, self.len, piece.addr, piece.len).map(drop).map_err(status_of)
    }
}

impl Keys {
    /// The peer's grant for the region of this piece, if it allows the operation.
    pub(super) fn look(
        &self,
        kind: OpKind,
        piece: &RemoteSpan,
    ) -> Result<&GrantedRegion, MissingKey> {
        let granted = self.of(region_of(piece))?;
        granted.admit(kind, piece).map_err(MissingKey::Denied)?;
        Ok(granted)
    }

    /// The peer's grant for a region.
    pub(super) fn of(&self, region: RegionId) -> Result<&GrantedRegion, MissingKey> {
        match self.get(region).map(|known| &known.answer) {
            None => Err(MissingKey::Ask(region)),
            Some(Answer::Denied(status)) => Err(MissingKey::Denied(*status)),
            Some(Answer::None) => Err(MissingKey::Wait),
            Some(Answer::Granted(granted)) => Ok(granted),
        }
    }

    /// The slowest way in which one of the peer's granted regions is reached.
    pub(super) fn slowest(&self) -> Moves {
        let granted = self.by_slot.values().flatten().filter_map(|known| match &known.answer {
            Answer::Granted(granted) => Some(granted),
            Answer::None | Answer::Denied(_) => None,
        });
        let moves = granted.map(|granted| match (granted.paths.is_empty(), granted.staged) {
            (false, _) => Moves::Direct,
            (true, true) => Moves::Staged,
            (true, false) => Moves::Tcp,
        });
        moves.max().unwrap_or(Moves::Direct)
    }

    fn get(&self, region: RegionId) -> Option<&KnownRegion> {
        self.by_slot.get(&region.slot)?.iter().find(|known| known.key == region.key)
    }

    /// Records that a region is asked about. False if there is no point in asking: an answer is
    /// still due, or no channel has come up since the last question.
    pub(super) fn ask(&mut self, region: RegionId, epoch: u64) -> bool {
        let slot = self.by_slot.entry(region.slot).or_default();
        match slot.iter_mut().find(|known| known.key == region.key) {
            Some(known) if known.awaited || known.asked_at == epoch => return false,
            Some(known) => (known.awaited, known.asked_at) = (true, epoch),
            None => {
                let (key, answer) = (region.key, Answer::None);
                slot.push(KnownRegion { key, answer, asked_at: epoch, awaited: true });
            }
        }
        true
    }

    /// Whether the peer has been asked about the region of this piece and has not answered.
    pub(super) fn is_awaited(&self, piece: &RemoteSpan) -> bool {
        let known = self.get(region_of(piece));
        known.is_some_and(|known| known.awaited)
    }

    /// Stores the peer's grant. `import` turns a key into the value that requests name memory by.
    pub(super) fn granted(
        &mut self,
        region: RegionId,
        grant: Grant,
        mut import: impl FnMut(PathId, &[u8]) -> Option<u64>,
    ) {
        let Some(known) = self.awaited(region) else { return };
        let reach = |path: uccl_wire::rails::PathKey| {
            Some(Reach { id: path.id, base: path.base, key: import(path.id, &path.key)? })
        };
        let Grant { addr, len, read, write, staged, paths } = grant;
        let paths = paths.into_iter().filter_map(reach).collect();
        known.answer = Answer::Granted(GrantedRegion { addr, len, read, write, staged, paths });
        // The slot belongs to this region now: the regions that used it before have ended.
        if let Some(slot) = self.by_slot.get_mut(&region.slot) {
            slot.retain(|known| known.key == region.key || known.awaited);
        }
    }

    /// Stores the peer's denial, for the operations that wait. It is kept until [`Self::forget`].
    pub(super) fn denied(&mut self, region: RegionId, status: Status) {
        if let Some(known) = self.awaited(region) {
            known.answer = Answer::Denied(status);
        }
    }

    fn awaited(&mut self, region: RegionId) -> Option<&mut KnownRegion> {
        let slot = self.by_slot.get_mut(&region.slot)?;
        let known = slot.iter_mut().find(|known| known.key == region.key && known.awaited)?;
        known.awaited = false;
        Some(known)
    }

    /// Forgets a region that has ended or has a stale key.
    pub(super) fn forget(&mut self, region: RegionId) {
        if let Some(slot) = self.by_slot.get_mut(&region.slot) {
            slot.retain(|known| known.key != region.key);
            if slot.is_empty() {
                self.by_slot.remove(&region.slot);
            }
        }
    }
}
