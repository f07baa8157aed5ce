//! Staging: our operations pass through our chunks where no rail takes our memory, and through the
//! peer's chunks where no rail takes the peer's.
//!
//! ```text
//!   write   our memory --copy--> our chunk --rail--> its chunk --the peer copies--> its memory
//!   read    our memory <--copy-- our chunk <--rail-- its chunk <--the peer copies-- its memory
//! ```
//!
//! A batch is the data that passes through a chunk together: a part of one long piece, or many
//! short pieces. Several batches are under way at a time, each at a different step.

use std::sync::Arc;

use slab::Slab;
use smallvec::SmallVec;
use uccl_device::cuda::{Direction, GpuError};
use uccl_fabric::{
    lane::{OpError, OpKind, RemoteSpans, Spans},
    mem::{LocatedSpan, RemoteSpan},
    pieces::{Piece as _, Stretch},
};
use uccl_wire::{
    frame::Status,
    rails::{LANDING, LANDING_CHUNK, MAX_STAGED, Note, RegionId, StagedPiece},
};

use super::{Hold, State};
use crate::{
    aside::ChannelTeardown,
    bounce::{Area, CHUNKS, Copy, CopySide, Site},
    flight::Part,
    keys::{MissingKey, region_of},
    rails::Rails,
};

/// Our batches, and the chunks that they pass through.
#[derive(Default)]
pub(crate) struct Staging {
    pub(super) area: Site,
    /// Our free chunks.
    here: Vec<u16>,
    there: Peers,
    batches: Slab<Batch>,
}

/// The chunks of the peer's landing area.
#[derive(Default)]
struct Peers {
    /// Its address, once the peer has granted it.
    addr: Option<u64>,
    free: Vec<u16>,
}

/// Pieces of one operation that pass through a chunk together.
struct Batch {
    flight: usize,
    kind: OpKind,
    local: Spans,
    remote: RemoteSpans,
    len: usize,
    chunks: Chunks,
    /// How many of its parts are requested or wait to be.
    parts: u32,
    /// The peer is copying.
    at_peer: bool,
}

/// The chunks that a batch passes through: ours, the peer's, or both.
#[derive(Clone, Copy)]
struct Chunks {
    here: Option<u16>,
    there: Option<u16>,
}

/// Whether bytes must pass through a chunk of ours, of the peer's, or both.
#[derive(Clone, Copy, PartialEq, Eq)]
struct StagingRoute {
    here: bool,
    there: bool,
}

impl Staging {
    /// Whether the peer is copying for us. It sends `Staged` when it has finished.
    pub(crate) fn awaits_peer(&self) -> bool {
        self.batches.iter().any(|(_, batch)| batch.at_peer)
    }

    /// Whether a batch reads or writes this region of the peer's.
    pub(super) fn uses(&self, region: RegionId) -> bool {
        let is_there = |batch: &Batch| batch.remote.iter().any(|piece| region_of(piece) == region);
        self.batches.iter().any(|(_, batch)| is_there(batch))
    }

    /// Forgets all batches. Returns their chunks, or the wait for the chunks if they are still
    /// being made.
    pub(super) fn end(&mut self) -> (Option<Area>, Option<ChannelTeardown>) {
        std::mem::take(self).area.end()
    }

    /// Our chunks may have been made.
    pub(super) fn have_chunks(&mut self) {
        if self.area.area().is_some() {
            self.here = (0..CHUNKS as u16).rev().collect();
        }
    }

    fn take_chunks(&mut self, way: StagingRoute) -> Result<Chunks, Hold> {
        let Self { here, there: Peers { free: there, .. }, .. } = self;
        if way.here && here.is_empty() || way.there && there.is_empty() {
            return Err(Hold::Full);
        }
        let take = |wanted: bool, free: &mut Vec<u16>| wanted.then(|| free.pop()).flatten();
        Ok(Chunks { here: take(way.here, here), there: take(way.there, there) })
    }

    fn give_back(&mut self, chunks: Chunks) {
        self.here.extend(chunks.here);
        self.there.free.extend(chunks.there);
    }
}

impl State {
    /// Starts a batch for the next bytes of an operation, as no path reaches the memory of both
    /// sides.
    pub(crate) fn stage(
        &mut self,
        rails: &Arc<Rails>,
        key: usize,
        first: Part,
    ) -> Result<(), Hold> {
        let way = self.way(rails, &first)?;
        self.prepare(rails, way, &first)?;
        let chunks = self.staging.take_chunks(way)?;
        let (local, remote, len) = self.gather(rails, key, way);
        let (flight, kind) = (key, first.kind);
        let batch = Batch { flight, kind, local, remote, len, chunks, parts: 0, at_peer: false };
        let at = self.staging.batches.insert(batch);
        self.flights[key].parts += 1;
        match (kind, chunks) {
            (OpKind::Write, Chunks { here: Some(chunk), .. }) => self.copy(rails, at, chunk),
            (OpKind::Read, Chunks { there: Some(chunk), .. }) => self.ask_for_copy(at, chunk),
            _ => self.request(at),
        }
        Ok(())
    }

    /// Which chunks a part must pass through.
    fn way(&mut self, rails: &Rails, part: &Part) -> Result<StagingRoute, Hold> {
        let pinned = self.pinned(rails, part.local);
        let granted = match self.keys.look(part.kind, &part.remote) {
            Ok(granted) => granted,
            Err(why) => return Err(self.missing(why)),
        };
        let (mut ours, mut theirs, mut both) = (false, false, false);
        for path in self.paths.iter().filter(|path| path.is_up()) {
            let is_ours = pinned.as_ref().is_some_and(|pinned| pinned.with(path.ours).is_some());
            let is_theirs = granted.over(path.id, &part.remote).is_some();
            ours |= is_ours;
            theirs |= is_theirs;
            both |= is_ours && is_theirs;
        }
        if both {
            // One path reaches both sides, so no chunk is needed: the part waits for room on that
            // path.
            return Err(Hold::Full);
        }
        // If each side has paths but they have none in common, a chunk on our side is enough.
        let way = StagingRoute { here: !ours || theirs, there: !theirs };
        let can_copy = rails.copier_of(self.flights[part.flight].memory).is_some();
        if way.here && !can_copy || way.there && !granted.staged {
            return Err(Hold::Never(OpError::Unreachable));
        }
        Ok(way)
    }

    /// When chunks are first needed: makes ours, and asks the peer for the address of its landing
    /// area.
    fn prepare(&mut self, rails: &Arc<Rails>, way: StagingRoute, part: &Part) -> Result<(), Hold> {
        if way.there && self.staging.there.addr.is_none() {
            let (addr, len) = match self.keys.of(LANDING) {
                Ok(granted) => granted.place(),
                Err(MissingKey::Denied(_)) => return Err(Hold::Never(OpError::Unreachable)),
                Err(why) => return Err(self.missing(why)),
            };
            let count = (len / LANDING_CHUNK as u64).min(CHUNKS as u64) as u16;
            self.staging.there = Peers { addr: Some(addr), free: (0..count).rev().collect() };
        }
        if way.here && self.staging.area.area().is_none() {
            return Err(self.prepare_here(rails, part));
        }
        Ok(())
    }

    /// Why we have no chunks: they are being made, or could not be.
    fn prepare_here(&mut self, rails: &Arc<Rails>, part: &Part) -> Hold {
        let area = &mut self.staging.area;
        let mut refusal = area.refusal();
        if refusal.is_none() && !area.is_making() {
            let device = rails.copier_of(self.flights[part.flight].memory).unwrap_or(0);
            area.make(rails, device);
            refusal = area.refusal();
        }
        refusal.map_or(Hold::Key, |why| Hold::Never(OpError::from(why)))
    }

    /// Takes as many of the next bytes of an operation as pass through the same sides' chunks and
    /// fit a chunk.
    fn gather(
        &mut self,
        rails: &Rails,
        key: usize,
        way: StagingRoute,
    ) -> (Spans, RemoteSpans, usize) {
        let (mut local, mut remote, mut len) = (Spans::new(), RemoteSpans::new(), 0);
        while len < LANDING_CHUNK && local.len() < MAX_STAGED {
            let Some(part) = self.flights.get_mut(key).and_then(|flight| flight.next(key)) else {
                break;
            };
            if len > 0 && !self.way(rails, &part).is_ok_and(|other| other == way) {
                break;
            }
            let (part, _) = part.split(LANDING_CHUNK - len);
            self.flights[key].take(part.local.len);
            len += part.local.len;
            local.push(part.local);
            remote.push(part.remote);
        }
        (local, remote, len)
    }

    /// Starts our copy between a batch's memory and our chunk.
    fn copy(&mut self, rails: &Rails, at: usize, chunk: u16) {
        let Self { staging: Staging { area, batches, .. }, flights, copies, .. } = self;
        let (Some(area), batch) = (area.area(), &batches[at]) else {
            return self.end_batch(at, Some(OpError::Unreachable));
        };
        let device = rails.copier_of(flights[batch.flight].memory);
        let memory: SmallVec<[LocatedSpan; 4]> =
            batch.local.iter().map(|span| LocatedSpan { span: *span, device }).collect();
        let direction = match batch.kind {
            OpKind::Write => Direction::DeviceToHost,
            OpKind::Read => Direction::HostToDevice,
        };
        let copy = Copy { area, chunk, memory: &memory, slots: SmallVec::new(), direction };
        // SAFETY: the chunk belongs to the batch until the batch ends. The operation's memory stays
        // valid until the operation has ended, which is after the batch, or until the lane is
        // killed, which waits for the copies.
        unsafe { copies.start(copy, CopySide::Batch(at)) };
    }

    /// Asks the peer to copy between its memory and its chunk.
    fn ask_for_copy(&mut self, at: usize, chunk: u16) {
        let batch = &mut self.staging.batches[at];
        batch.at_peer = true;
        let piece = |span: &RemoteSpan| StagedPiece {
            region: region_of(span),
            addr: span.addr,
            len: span.len as u32,
        };
        let pieces = batch.remote.iter().map(piece).collect();
        self.notes.push_back(Note::Stage { chunk, write: batch.kind == OpKind::Write, pieces });
    }

    /// Makes the parts that move a batch's bytes over paths.
    fn request(&mut self, at: usize) {
        let Staging { area, batches, there, .. } = &self.staging;
        let Batch { flight, kind, len, chunks, ref local, ref remote, .. } = batches[at];
        let local = match (chunks.here, area.area()) {
            (Some(chunk), Some(area)) => [area.chunk(chunk, len)].into(),
            _ => local.clone(),
        };
        let remote = match (chunks.there, there.addr) {
            (Some(chunk), Some(addr)) => [landing_chunk(addr, chunk, len)].into(),
            _ => remote.clone(),
        };
        let (mut ours, mut theirs) = (Stretch::all(&local[..]), Stretch::all(&remote[..]));
        while let (Some(here), Some(there)) = (ours.first(&local[..]), theirs.first(&remote[..])) {
            // A chunk is one piece, even if several pieces pass through it.
            let len = here.len_bytes().min(there.len_bytes());
            ours.cut(&local[..], len);
            theirs.cut(&remote[..], len);
            let (local, remote) = (here.part(0, len), there.part(0, len));
            self.again.push_back(Part {
                flight,
                kind,
                local,
                remote,
                batch: Some(at),
                refusals: 0,
                registration: 0,
            });
            self.count_part(flight, Some(at));
        }
    }

    /// Counts one more part of an operation, and of its batch if it has one.
    pub(crate) fn count_part(&mut self, flight: usize, batch: Option<usize>) {
        self.flights[flight].parts += 1;
        if let Some(batch) = batch.and_then(|at| self.staging.batches.get_mut(at)) {
            batch.parts += 1;
        }
    }

    /// Counts a part of a batch as ended. After the last, the batch goes on to its next step.
    pub(super) fn batch_part_ended(&mut self, rails: &Rails, at: usize) {
        let Some(batch) = self.staging.batches.get_mut(at) else { return };
        batch.parts = batch.parts.saturating_sub(1);
        if batch.parts > 0 {
            return;
        }
        let (kind, chunks) = (batch.kind, batch.chunks);
        match (kind, chunks) {
            _ if self.is_given_up(at) => self.end_batch(at, None),
            (OpKind::Write, Chunks { there: Some(chunk), .. }) => self.ask_for_copy(at, chunk),
            (OpKind::Read, Chunks { here: Some(chunk), .. }) => self.copy(rails, at, chunk),
            _ => self.end_batch(at, None),
        }
    }

    /// Our copy for a batch has ended: goes on to the batch's next step.
    pub(super) fn batch_copied(&mut self, at: usize, result: Result<(), GpuError>) {
        let Some(batch) = self.staging.batches.get(at) else { return };
        match result {
            Ok(()) if batch.kind == OpKind::Write && !self.is_given_up(at) => self.request(at),
            result => self.end_batch(at, result.err().map(OpError::from)),
        }
    }

    /// The peer's copy through this chunk has ended: goes on to the batch's next step.
    ///
    /// # Errors
    /// When the peer was not asked for a copy through this chunk.
    pub(crate) fn on_staged(&mut self, chunk: u16, status: Status) -> Result<(), String> {
        let is_its = |batch: &Batch| batch.at_peer && batch.chunks.there == Some(chunk);
        let found = self.staging.batches.iter_mut().find(|(_, batch)| is_its(batch));
        let Some((at, batch)) = found else {
            return Err(format!("a copy through chunk {chunk}, which was not asked for"));
        };
        batch.at_peer = false;
        let is_read = batch.kind == OpKind::Read;
        match status {
            Status::Ok if is_read && !self.is_given_up(at) => self.request(at),
            Status::Ok => self.end_batch(at, None),
            status => self.end_batch(at, Some(OpError::Remote(status))),
        }
        Ok(())
    }

    /// Whether the batch's operation has failed or was cancelled.
    fn is_given_up(&self, at: usize) -> bool {
        let flight = self.staging.batches.get(at).and_then(|b| self.flights.get(b.flight));
        flight.is_none_or(|flight| flight.verdict.is_some())
    }

    /// Ends a batch: frees its chunks, and fails its operation if there is a reason.
    fn end_batch(&mut self, at: usize, why: Option<OpError>) {
        let Some(batch) = self.staging.batches.try_remove(at) else { return };
        self.staging.give_back(batch.chunks);
        if let Some(flight) = self.flights.get_mut(batch.flight) {
            flight.parts = flight.parts.saturating_sub(1);
            if let Some(why) = why {
                flight.fail(why);
            }
        }
        self.end_if_over(batch.flight);
        for piece in &batch.remote {
            self.release_if_unused(region_of(piece));
        }
    }
}

/// The first bytes of a chunk of the peer's landing area.
fn landing_chunk(area: u64, chunk: u16, len: usize) -> RemoteSpan {
    let addr = area.wrapping_add(u64::from(chunk) * LANDING_CHUNK as u64);
    RemoteSpan { addr, len: len as u64, key: LANDING.key, slot: LANDING.slot }
}
