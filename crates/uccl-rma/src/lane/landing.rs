//! The landing area is locked host memory of ours. The peer writes to it and reads from it in place
//! of memory that no rail takes. At the peer's request we copy between the landing area and that
//! memory.

use std::sync::Arc;

use smallvec::SmallVec;
use uccl_device::{MemoryKind, cuda::Direction};
use uccl_fabric::{
    mem::{Access, LocatedSpan, RemoteSpan},
    region::Rights,
};
use uccl_wire::{
    frame::Status,
    rails::{Grant, LANDING_CHUNK, Note, StagedPiece},
};

use super::RmaLane;
use crate::{
    bounce::{CHUNKS, Copy, CopySide},
    state::State,
};

impl RmaLane {
    /// Whether the peer can reach memory of this kind through the landing area.
    pub(super) fn has_landing_for(&self, state: &State, kind: MemoryKind) -> bool {
        self.rails.copier_of(kind).is_some() && state.landing.area().is_some()
    }

    /// Starts to make the landing area, if memory of this kind can be reached through one. True
    /// while it is being made.
    pub(super) fn make_landing(&self, state: &mut State, kind: MemoryKind) -> bool {
        let Some(device) = self.rails.copier_of(kind) else { return false };
        if state.landing.area().is_none() && !state.landing.is_making() {
            state.landing.make(&self.rails, device);
        }
        state.landing.is_making()
    }

    /// The grant for the landing area.
    ///
    /// # Errors
    /// When the area does not exist, as no region that needs it was granted yet.
    pub(super) fn grant_landing(&self, state: &mut State) -> Result<Grant, Status> {
        let area = state.landing.area().ok_or(Status::UnknownKey)?;
        let (span, pinned) = (area.span(), Arc::clone(area.pinned()));
        let paths = state.keys_of(&pinned, span.addr, Rights::ALL);
        let (addr, len) = (span.addr as u64, span.len as u64);
        Ok(Grant { addr, len, read: true, write: true, staged: false, paths })
    }

    /// Starts a copy, for the peer, between a chunk and regions of ours.
    ///
    /// # Errors
    /// When the chunk does not exist or is being copied already, or when the pieces are longer than
    /// a chunk.
    pub(super) fn on_stage(
        &self,
        state: &mut State,
        chunk: u16,
        write: bool,
        pieces: &[StagedPiece],
    ) -> Result<(), String> {
        let is_there = state.landing.area().is_some() && usize::from(chunk) < CHUNKS;
        if !is_there || state.copies.is_copying_for_peer(chunk) {
            return Err(format!("a copy through chunk {chunk}, which it does not have"));
        }
        let total: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        if total > LANDING_CHUNK as u64 {
            return Err(format!("a copy of {total} bytes through a chunk of {LANDING_CHUNK}"));
        }
        if let Err(status) = self.begin_copy(state, chunk, write, pieces) {
            state.notes.push_back(Note::Staged { chunk, status });
        }
        Ok(())
    }

    /// The caller holds the state's lock, so a later revoke of a region finds the copy.
    fn begin_copy(
        &self,
        state: &mut State,
        chunk: u16,
        write: bool,
        pieces: &[StagedPiece],
    ) -> Result<(), Status> {
        let (access, direction) = match write {
            true => (Access::Write, Direction::HostToDevice),
            false => (Access::Read, Direction::DeviceToHost),
        };
        let mut memory: SmallVec<[LocatedSpan; 4]> = SmallVec::new();
        let mut slots: SmallVec<[u32; 4]> = SmallVec::new();
        for StagedPiece { region, addr, len } in pieces {
            let (slot, key, len) = (region.slot, region.key, u64::from(*len));
            let theirs = RemoteSpan { addr: *addr, len, key, slot };
            let admitted = self.regions.admit_any(&theirs, access)?;
            // A kind of memory that is not granted by way of the landing area is not copied either.
            let device = self.rails.copier_of(admitted.kind).ok_or(Status::Protocol)?;
            memory.push(LocatedSpan { span: admitted.span, device: Some(device) });
            slots.push(admitted.region);
        }
        let State { landing, copies, .. } = state;
        let area = landing.area().ok_or(Status::Device)?;
        let copy = Copy { area, chunk, memory: &memory, slots, direction };
        // SAFETY: the pieces fit the chunk, which is the peer's and in no other copy. They lie in
        // regions that live, and the thread that takes a region back waits until the copy can no
        // longer touch it.
        unsafe { copies.start(copy, CopySide::Peer(chunk)) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use uccl_wire::rails::{LANDING, RegionId};

    use super::*;
    use crate::{Rails, Role};
    use uccl_chaos::{GpuFaults, RailFaults, RailNetwork};
    use uccl_fabric::{
        gpu::CopyBy,
        lane::{Handling, Lane, MessageSink, RailLane},
        mem::Span,
        rail::Rail,
        region::{Region, RegionTable},
    };

    struct Nobody;

    impl MessageSink for Nobody {
        fn message(&self, _: &[u8]) -> Result<Handling, String> {
            Ok(Handling::Ended)
        }

        fn go_on(&self) -> Handling {
            Handling::Ended
        }

        fn signalled(&self) {}
    }

    /// One end, with a region that its rail does not take. Its copies advance only when `progress`
    /// is called.
    struct Owner {
        lane: RmaLane,
        regions: Arc<RegionTable>,
        region: Region,
        bytes: Box<[u8; 100]>,
    }

    impl Owner {
        fn new(rights: Rights) -> Self {
            let regions = Arc::new(RegionTable::new().expect("a table"));
            let faults = RailFaults { refuse_memory_percent: 100, ..RailFaults::default() };
            let slow = GpuFaults { delay_polls: 1000, fail_at: None, seed: 1 };
            let rail = RailNetwork::default().rail("rail", 1, faults) as Arc<dyn Rail>;
            let rails = Rails::new(vec![rail]).copying_by(CopyBy::from(slow));
            let bytes = Box::new([7; 100]);
            let span = Span { addr: bytes.as_ptr() as usize, len: bytes.len() };
            let region = regions.insert(span, rights, None).expect("a region");
            rails.add(region.slot, span, MemoryKind::Host, rights);
            let lane = RmaLane::new(
                Role::Acceptor,
                Arc::new(rails),
                Arc::clone(&regions),
                crate::Silence::default(),
            );
            Self { lane: lane.expect("a lane"), regions, region, bytes }
        }

        fn id(&self) -> RegionId {
            RegionId { slot: self.region.slot, key: self.region.key }
        }

        fn hear(&self, note: &Note) -> Result<(), String> {
            let mut bytes = Vec::new();
            note.encode_to(&mut bytes);
            self.lane.hear(&bytes)
        }

        /// The peer's grant, or the reason why it is denied.
        fn granted(&self, region: RegionId) -> Result<Grant, Status> {
            self.hear(&Note::Ask(region)).expect("a sound note");
            match self.said() {
                Some(Note::Grant(_, grant)) => Ok(grant),
                Some(Note::Deny(_, status)) => Err(status),
                note => panic!("{note:?}"),
            }
        }

        fn stage(&self, chunk: u16, write: bool, len: u32) -> Result<(), String> {
            let piece = StagedPiece { region: self.id(), addr: self.region.span.addr as u64, len };
            self.hear(&Note::Stage { chunk, write, pieces: vec![piece] })
        }

        /// The next note that is sent.
        fn said(&self) -> Option<Note> {
            while !self.lane.has_notes() {
                self.lane.progress(&Nobody).expect("it lives");
            }
            self.lane.take_note()
        }
    }

    fn is_staged(note: Option<Note>, chunk: u16, status: Status) -> bool {
        note == Some(Note::Staged { chunk, status })
    }

    #[test]
    fn the_landing_area_is_there_when_a_region_needs_it() {
        let owner = Owner::new(Rights::ALL);
        assert_eq!(owner.granted(LANDING), Err(Status::UnknownKey));
        assert!(owner.stage(0, true, 1).is_err(), "there is no area yet");
        let grant = owner.granted(owner.id()).expect("it lives");
        assert!(grant.staged && grant.paths.is_empty());
        let landing = owner.granted(LANDING).expect("an area");
        assert_eq!(landing.len, (CHUNKS * LANDING_CHUNK) as u64);
    }

    #[test]
    fn chunks_are_copied_to_and_from_regions() {
        let owner = Owner::new(Rights::ALL);
        owner.granted(owner.id()).expect("it lives");
        owner.stage(3, false, 100).expect("a sound note");
        assert!(is_staged(owner.said(), 3, Status::Ok));
        let chunk = {
            let state = owner.lane.state.lock();
            let area = state.landing.area().expect("an area");
            area.chunk(3, 100)
        };
        // SAFETY: nothing else uses the chunk, which lives as long as the lane.
        let chunk = unsafe { std::slice::from_raw_parts_mut(chunk.addr as *mut u8, chunk.len) };
        assert_eq!(chunk, [7; 100]);
        chunk.fill(9);
        owner.stage(3, true, 50).expect("a sound note");
        assert!(is_staged(owner.said(), 3, Status::Ok));
        let bytes = owner.bytes.as_ptr();
        // SAFETY: it is our own memory, and no copy to it is under way any more.
        let now: Vec<u8> = (0..100).map(|at| unsafe { bytes.add(at).read_volatile() }).collect();
        assert_eq!(now, [[9; 50], [7; 50]].concat());
    }

    #[test]
    fn a_region_is_touched_until_its_copies_have_ended() {
        let owner = Owner::new(Rights::ALL);
        let (id, slot) = (owner.id(), owner.region.slot);
        owner.granted(id).expect("it lives");
        assert!(owner.lane.touched_by_peer(slot), "it is lent");
        assert_eq!(owner.lane.take_note(), Some(Note::Revoke(id)));
        owner.stage(0, true, 100).expect("a sound note");
        owner.hear(&Note::Released(id)).expect("a sound note");
        assert!(owner.lane.touched_by_peer(slot), "whatever the peer says");
        assert!(is_staged(owner.said(), 0, Status::Ok));
        assert!(!owner.lane.touched_by_peer(slot));
    }

    #[test]
    fn a_note_that_makes_no_sense_is_refused() {
        let owner = Owner::new(Rights::READ);
        owner.granted(owner.id()).expect("it lives");
        assert!(owner.stage(CHUNKS as u16, false, 1).is_err(), "no such chunk");
        assert!(owner.stage(0, false, LANDING_CHUNK as u32 + 1).is_err(), "longer than a chunk");
        assert!(owner.hear(&Note::Staged { chunk: 0, status: Status::Ok }).is_err(), "not asked");
        for (write, len, status) in [(true, 1, Status::Denied), (false, 101, Status::OutOfBounds)] {
            owner.stage(0, write, len).expect("a sound note");
            assert!(is_staged(owner.lane.take_note(), 0, status));
        }
        owner.stage(0, false, 100).expect("a sound note");
        assert!(owner.stage(0, false, 100).is_err(), "it is being copied");
        assert!(is_staged(owner.said(), 0, Status::Ok));
        let _ended = owner.regions.revoke(owner.region.slot, owner.region.key).expect("it lived");
        owner.stage(0, false, 100).expect("a sound note");
        assert!(is_staged(owner.lane.take_note(), 0, Status::UnknownKey));
    }
}
