//! Keys of the peer's regions, as they were asked for.

use std::collections::HashMap;

use smallvec::SmallVec;
use uccl_wire::{
    frame::Status,
    rails::{Grant, PathId, RegionId},
};

use crate::{
    lane::{Moves, OpKind},
    mem::RemoteSpan,
    region::offset_within,
    status_of,
};

/// What is known of the peer's regions.
#[derive(Default)]
pub(super) struct Keys {
    /// Mostly one a slot: of the regions that were there one after the other, the last.
    by_slot: HashMap<u32, SmallVec<[Known; 1]>>,
}

struct Known {
    key: u64,
    answer: Answer,
    /// Which channels there were when it was asked last.
    asked_at: u64,
    /// An answer is due.
    awaited: bool,
}

enum Answer {
    None,
    Denied(Status),
    Granted(Granted),
}

/// A region that can be reached.
pub(super) struct Granted {
    addr: u64,
    len: u64,
    read: bool,
    write: bool,
    /// Its owner copies between it and the landing area.
    pub(super) staged: bool,
    paths: Vec<Reach>,
}

/// How it is reached over one channel.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    pub(super) id: PathId,
    base: u64,
    /// What requests name it with.
    pub(super) key: u64,
}

/// The region that a piece of the peer's memory lies in.
pub(super) fn region_of(piece: &RemoteSpan) -> RegionId {
    RegionId { slot: piece.slot, key: piece.key }
}

/// Why it is not known how to reach a piece of the peer's memory.
#[derive(Clone, Copy)]
pub(super) enum Missing {
    /// It has to be asked.
    Ask(RegionId),
    /// It has been asked.
    Wait,
    /// It may not be reached so.
    Denied(Status),
}

impl Granted {
    /// How the region is reached over a channel, if it is, and where a piece of it is there.
    pub(super) fn over(&self, id: PathId, piece: &RemoteSpan) -> Option<(Reach, u64)> {
        let reach = self.paths.iter().find(|reach| reach.id == id)?;
        Some((*reach, reach.base.wrapping_add(piece.addr.wrapping_sub(self.addr))))
    }

    /// Where it is in its owner's process.
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
    /// How a piece is reached, as far as that is known.
    pub(super) fn look(&self, kind: OpKind, piece: &RemoteSpan) -> Result<&Granted, Missing> {
        let granted = self.of(region_of(piece))?;
        granted.admit(kind, piece).map_err(Missing::Denied)?;
        Ok(granted)
    }

    /// What is known of a region.
    pub(super) fn of(&self, region: RegionId) -> Result<&Granted, Missing> {
        match self.get(region).map(|known| &known.answer) {
            None => Err(Missing::Ask(region)),
            Some(Answer::Denied(status)) => Err(Missing::Denied(*status)),
            Some(Answer::None) => Err(Missing::Wait),
            Some(Answer::Granted(granted)) => Ok(granted),
        }
    }

    /// Of the ways in which the peer lets its regions be reached, the slowest.
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

    fn get(&self, region: RegionId) -> Option<&Known> {
        self.by_slot.get(&region.slot)?.iter().find(|known| known.key == region.key)
    }

    /// Notes that a region is asked for; false where an answer is due, or the last one is as new as the
    /// youngest channel.
    pub(super) fn ask(&mut self, region: RegionId, epoch: u64) -> bool {
        let slot = self.by_slot.entry(region.slot).or_default();
        match slot.iter_mut().find(|known| known.key == region.key) {
            Some(known) if known.awaited || known.asked_at == epoch => return false,
            Some(known) => (known.awaited, known.asked_at) = (true, epoch),
            None => {
                let (key, answer) = (region.key, Answer::None);
                slot.push(Known { key, answer, asked_at: epoch, awaited: true });
            }
        }
        true
    }

    /// Whether an answer is due.
    pub(super) fn is_awaited(&self, piece: &RemoteSpan) -> bool {
        let known = self.get(region_of(piece));
        known.is_some_and(|known| known.awaited)
    }

    /// The peer grants what was asked; `import` makes of a key what requests name memory with.
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
        known.answer = Answer::Granted(Granted { addr, len, read, write, staged, paths });
        // The slot is this region's now: what was granted there before has ended.
        if let Some(slot) = self.by_slot.get_mut(&region.slot) {
            slot.retain(|known| known.key == region.key || known.awaited);
        }
    }

    /// The peer denies it. Known until [`Self::forget`], for whoever waits.
    pub(super) fn denied(&mut self, region: RegionId, status: Status) {
        if let Some(known) = self.awaited(region) {
            known.answer = Answer::Denied(status);
        }
    }

    fn awaited(&mut self, region: RegionId) -> Option<&mut Known> {
        let slot = self.by_slot.get_mut(&region.slot)?;
        let known = slot.iter_mut().find(|known| known.key == region.key && known.awaited)?;
        known.awaited = false;
        Some(known)
    }

    /// The region has ended, or its key turned out to be stale.
    pub(super) fn forget(&mut self, region: RegionId) {
        if let Some(slot) = self.by_slot.get_mut(&region.slot) {
            slot.retain(|known| known.key != region.key);
            if slot.is_empty() {
                self.by_slot.remove(&region.slot);
            }
        }
    }
}
