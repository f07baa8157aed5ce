//! Copies that were enqueued together, until a GPU has made them.

use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::{
    MemoryKind,
    cuda::{Context, Direction, Event, GpuError, gather::Piece},
};
use uccl_fabric::{
    gpu::{Engine, Mark, Route},
    lane::{OpError, OpKind, OpResult, RemoteSpans, access_of},
    mem::{Access, RemoteSpan, Span},
    signal::Word,
};

use super::{
    offered::Place,
    table::{KeptTable, TablePost},
};
use crate::shm::{Direct, OwnedHazard};

/// The most distinct regions in one flight, beside that of a signal's word: each takes a hazard
/// word, and there are 64.
pub(super) const MAX_SLOTS: usize = 32;

/// Hazard words, one for each region of a flight.
pub(super) type Hazards = SmallVec<[OwnedHazard; 1]>;

/// Copies that were enqueued together. If it is dropped before they have ended, its contents are
/// leaked, because a GPU still uses them.
pub(super) struct Flight(Option<EnqueuedCopies>);

struct EnqueuedCopies {
    mark: Mark,
    engine: Arc<Mutex<Engine>>,
    /// The error that kept a part from being enqueued. The mark shows the end of the enqueued part.
    failed: Option<OpError>,
    _hold: MemoryHold,
}

/// Keeps the peer's memory in place during the copy: the hazards are for its owner, the places for
/// our driver.
struct MemoryHold {
    _places: SmallVec<[Place; 1]>,
    _word: SmallVec<[Place; 1]>,
    _hazards: Hazards,
    _table: Option<Arc<KeptTable>>,
}

/// How to copy, and by which GPU.
#[derive(Clone, Copy)]
pub(super) struct Way<'a> {
    pub(super) direct: &'a Direct,
    pub(super) kind: OpKind,
    /// The kind of our memory.
    pub(super) memory: MemoryKind,
    pub(super) context: &'static Context,
    /// Whether the GPU has slices of long operations. This copy is to pass them.
    pub(super) passes_slices: bool,
    /// The signal that follows the copies.
    pub(super) word: Option<Word>,
    /// The most blocks of the kernel that copy, for any size; 0: no limit was asked for.
    pub(super) blocks: u32,
    /// The event that the copies wait for.
    pub(super) behind: Option<&'a Event>,
    /// The post that uploads the table of its pieces behind the copies.
    pub(super) uploads: Option<TablePost<'a>>,
}

impl Way<'_> {
    /// Enqueues copies between pieces that pair up, and their signal, under hazards that were
    /// claimed for all their regions.
    ///
    /// # Errors
    /// Nothing moves then, and the word does not change. [`OpError::HostOnly`]: the GPU does not
    /// reach the peer's memory, or the word.
    ///
    /// # Safety
    /// Our pieces must stay valid until the flight has ended.
    pub(super) unsafe fn enqueue(
        self,
        pairs: impl Iterator<Item = (Span, RemoteSpan)> + Clone,
        engine: &Arc<Mutex<Engine>>,
        hazards: Hazards,
    ) -> Result<Flight, OpError> {
        let access = access_of(self.kind);
        let mut copying = engine.lock();
        let mut pieces = std::mem::take(&mut copying.pieces);
        pieces.clear();
        let mut here = pairs.clone().map(|(here, _)| here);
        let there = pairs.map(|(_, there)| there);
        let found = self.direct.gpu_places(access, there, self.context, |there, _| {
            pieces.extend(here.next().map(|here| piece(access, here, there)));
        });
        let enqueued = found.and_then(|there| {
            let word = self.word.map(|word| self.direct.gpu_word(&word, self.context));
            let (word, word_places) = word.transpose()?.unzip();
            let route = Route {
                engines_are_busy: self.passes_slices,
                word,
                blocks: self.blocks,
                ..route(self.kind, self.memory, there.device)
            };
            // Copies that a second stream shares would not wait for the event.
            let route = Route { is_push: route.is_push && self.behind.is_none(), ..route };
            if let Some(event) = self.behind {
                copying.wait_behind(event)?;
            }
            // SAFETY: the caller's promise for our side; the hazards and the places hold the
            // peer's.
            let copied = unsafe { copying.copy(&pieces, route) };
            let (mark, failed) = end_of(&mut copying, copied)?;
            let word_places = word_places.map_or_else(SmallVec::new, |found| found.places);
            Ok(((there.places, word_places), mark, failed))
        });
        if let (Some(post), Ok((.., None))) = (self.uploads, &enqueued) {
            self.upload(&post, &mut copying, &pieces);
        }
        copying.pieces = pieces;
        drop(copying);
        let ((places, word), mark, failed) = enqueued?;
        let hold = MemoryHold { _places: places, _word: word, _hazards: hazards, _table: None };
        let engine = Arc::clone(engine);
        Ok(Flight(Some(EnqueuedCopies { mark, engine, failed, _hold: hold })))
    }

    /// Uploads the table of pieces that were enqueued, for later posts.
    fn upload(self, post: &TablePost<'_>, copying: &mut Engine, pieces: &[Piece]) {
        let mut regions = SmallVec::new();
        let firsts = post.remote.regions().copied();
        let found = self.direct.gpu_places(access_of(self.kind), firsts, self.context, |at, of| {
            regions.push((at, *of));
        });
        let by_kernel = found.is_ok() && self.memory != MemoryKind::Host;
        let table = if by_kernel { copying.upload(pieces).ok().flatten() } else { None };
        post.keep(table, regions);
    }

    /// Enqueues the copies of a table, and their signal, under hazards that were claimed for all
    /// their regions. Returns the hazards if a region is not that of the table any more.
    ///
    /// # Errors
    /// As for [`enqueue`](Self::enqueue).
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue).
    pub(super) unsafe fn enqueue_table(
        self,
        (kept, remote): (&Arc<KeptTable>, &RemoteSpans),
        engine: &Arc<Mutex<Engine>>,
        hazards: Hazards,
    ) -> Result<Result<Flight, Hazards>, OpError> {
        let (mut expected, mut is_same) = (kept.regions.iter(), true);
        let firsts = remote.regions().copied();
        let found =
            self.direct.gpu_places(access_of(self.kind), firsts, self.context, |at, of| {
                is_same &= expected.next() == Some(&(at, *of));
            })?;
        if !is_same || expected.next().is_some() {
            return Ok(Err(hazards));
        }
        let word = self.word.map(|word| self.direct.gpu_word(&word, self.context));
        let (word, word_places) = word.transpose()?.unzip();
        let mut copying = engine.lock();
        // SAFETY: the caller's promise for our side; the hazards and the places hold the peer's,
        // and the flight the table.
        let copied = unsafe { copying.copy_table(&kept.table, word) };
        let (mark, failed) = end_of(&mut copying, copied)?;
        drop(copying);
        let hold = MemoryHold {
            _places: found.places,
            _word: word_places.map_or_else(SmallVec::new, |found| found.places),
            _hazards: hazards,
            _table: Some(Arc::clone(kept)),
        };
        let engine = Arc::clone(engine);
        Ok(Ok(Flight(Some(EnqueuedCopies { mark, engine, failed, _hold: hold }))))
    }
}

/// The mark of enqueued copies, and the error that kept a part from being enqueued.
fn end_of(
    copying: &mut Engine,
    copied: Result<Mark, GpuError>,
) -> Result<(Mark, Option<OpError>), OpError> {
    Ok(match copied {
        Ok(mark) => (mark, None),
        Err(e) => (after_failure(copying, &e)?, Some(OpError::from(e))),
    })
}

/// A mark of the end of the copies that were enqueued before the GPU refused more. If that fails
/// too, no copy runs any more when this returns.
fn after_failure(copying: &mut Engine, e: &GpuError) -> Result<Mark, OpError> {
    copying.fence().map_err(|_| {
        copying.settle();
        OpError::from(e.clone())
    })
}

impl Flight {
    /// The error that kept a part from being enqueued, if there is one.
    pub(super) fn failed(&self) -> Option<&OpError> {
        self.0.as_ref()?.failed.as_ref()
    }

    /// The engine that has enqueued the copies.
    pub(super) fn engine(&self) -> Option<&Arc<Mutex<Engine>>> {
        self.0.as_ref().map(|enqueued| &enqueued.engine)
    }

    /// The result; `None` while the copies run.
    pub(super) fn ended(&self) -> Option<OpResult> {
        let Some(enqueued) = &self.0 else { return Some(Ok(())) };
        let result = match enqueued.mark.is_done() {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(e) => Err(OpError::from(e)),
        };
        Some(enqueued.failed.clone().map_or(result, Err))
    }

    /// Releases the hazards, the places and the mark of an ended flight.
    pub(super) fn land(mut self) {
        let Some(EnqueuedCopies { mark, engine, .. }) = self.0.take() else { return };
        // No wait: a thread that is enqueuing may be in the driver for long, and a mark costs
        // little.
        if let Some(mut engine) = engine.try_lock() {
            engine.reuse(mark);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.ended().is_none() {
            std::mem::forget(self.0.take());
        }
    }
}

/// Claims hazard words, which show the owner the accessed regions. `None` while flights of ours use
/// too many words.
pub(super) fn claim(direct: &Direct, remote: impl Iterator<Item = RemoteSpan>) -> Option<Hazards> {
    let mut slots: SmallVec<[u32; MAX_SLOTS]> = SmallVec::new();
    for span in remote {
        // Neighbours mostly lie in one region.
        if slots.last() != Some(&span.slot) {
            slots.push(span.slot);
        }
    }
    slots.sort_unstable();
    slots.dedup();
    slots.iter().map(|slot| direct.claim_owned(*slot)).collect()
}

/// The route of copies between our memory and the peer's. The peer's memory is a GPU's, or locked.
fn route(kind: OpKind, ours: MemoryKind, device_there: bool) -> Route {
    let here = ours.device().is_some();
    let (from, to) = match kind {
        OpKind::Read => (device_there, here),
        OpKind::Write => (here, device_there),
    };
    let direction = match (from, to) {
        (true, true) => Direction::DeviceToDevice,
        (true, false) => Direction::DeviceToHost,
        (false, _) => Direction::HostToDevice,
    };
    let is_push = from && to && kind == OpKind::Write;
    Route {
        direction,
        by_kernel: ours != MemoryKind::Host,
        is_push,
        engines_are_busy: false,
        word: None,
        blocks: 0,
    }
}

fn piece(access: Access, here: Span, there: u64) -> Piece {
    let (local, len_bytes) = (here.addr as u64, here.len as u64);
    match access {
        Access::Read => Piece { destination: local, source: there, len_bytes },
        Access::Write => Piece { destination: there, source: local, len_bytes },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_knows_its_direction_and_whether_a_kernel_copies() {
        use MemoryKind::{Cuda, Host, Pinned};
        let gpu = Cuda { device: 0 };
        let of = |kind, ours, device| {
            let route = route(kind, ours, device);
            (route.direction, route.by_kernel)
        };
        assert_eq!(of(OpKind::Write, gpu, true), (Direction::DeviceToDevice, true));
        assert_eq!(of(OpKind::Write, gpu, false), (Direction::DeviceToHost, true));
        assert_eq!(of(OpKind::Read, gpu, false), (Direction::HostToDevice, true));
        assert_eq!(of(OpKind::Write, Pinned, true), (Direction::HostToDevice, true));
        assert_eq!(of(OpKind::Read, Host, true), (Direction::DeviceToHost, false));
    }
}
