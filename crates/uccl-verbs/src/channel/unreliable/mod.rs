//! Writes over unreliable queue pairs (UC), made reliable by `uccl-tran`.
//!
//! Each path is a UC queue pair with packet numbers of its own. A write is cut into messages. Each
//! message is an RDMA WRITE with its packet number as the immediate. The peer acknowledges by short
//! SENDs on the same queue pair. Messages and acknowledgements use up receives, which are replaced
//! at once. A lost message is sent again, over any path and perhaps as several shorter ones.
//!
//! A peer's device drops a message that it refuses without a report, as if the message was lost. So
//! a piece that was lost many times goes over a reliable queue pair, which delivers it or reports
//! the reason.

mod cut;
mod path;
mod receives;
mod trust;

use std::{collections::VecDeque, sync::Arc, time::Instant};

use slab::Slab;
use uccl_fabric::{
    mem::Span,
    rail::{RailError, Request, RequestEnd, RequestError},
};
use uccl_tran::{Event, OutOfOrder};
use uccl_wire::verbs::{QueuePair, VerbsAddress};

pub(crate) use self::trust::UcSupport;
use self::{cut::MessageSize, path::UcPath};
pub(super) use self::{
    path::SENDS,
    receives::{RECEIVE, RECEIVES},
};
use crate::{cq::Cq, ffi::abi::Wc, pd::Pd, qp::Path};

/// The longest message, in bytes. Longer ones save little, and one lost packet loses the whole
/// message.
const MOST_BYTES: usize = 64 << 10;

/// A piece that was lost this often goes over a reliable queue pair.
const STUBBORN: u32 = 8;

/// A write that has not ended.
struct WriteState {
    request: Request,
    /// How many bytes from its start are cut into pieces.
    cut: usize,
    /// How many of its pieces have not ended.
    open: u32,
}

/// A part of a write.
#[derive(Clone, Copy)]
struct Piece {
    writing: usize,
    offset: usize,
    len: usize,
    losses: u32,
}

/// Which queue a piece comes from: lost pieces, or writes not fully cut yet.
#[derive(Clone, Copy)]
enum Source {
    Again,
    Fresh,
}

/// The unreliable paths of a channel, and the writes for them.
pub(super) struct Unreliable {
    paths: Vec<UcPath>,
    /// The index of its first queue pair among the channel's.
    first: usize,
    writing: Slab<WriteState>,
    pieces: Slab<Piece>,
    /// Writes that are not fully cut into pieces, in order.
    fresh: VecDeque<usize>,
    /// Lost pieces.
    again: VecDeque<Piece>,
    /// Pieces that are to go over reliable queue pairs.
    stubborn: VecDeque<u64>,
    cut: MessageSize,
    /// Most writes at a time.
    most: usize,
}

/// The parameters of a channel's unreliable paths.
pub(super) struct Plan {
    /// The index of the first queue pair among the channel's.
    pub(super) first: usize,
    pub(super) paths: usize,
    pub(super) path: Path,
    /// The longest message wanted, in bytes.
    pub(super) chunk_bytes: u64,
    /// Most writes at a time.
    pub(super) most: usize,
}

impl Unreliable {
    pub(super) fn new(pd: &Arc<Pd>, cq: &Arc<Cq>, plan: &Plan) -> Result<Self, RailError> {
        let numbers = plan.first..plan.first + plan.paths;
        let paths = numbers.map(|index| UcPath::new(pd, cq, index, &plan.path));
        let packet = 128usize << plan.path.mtu;
        let longest = usize::try_from(plan.chunk_bytes).unwrap_or(MOST_BYTES).min(MOST_BYTES);
        Ok(Self {
            paths: paths.collect::<Result<_, _>>()?,
            first: plan.first,
            writing: Slab::with_capacity(plan.most),
            pieces: Slab::with_capacity(plan.most),
            fresh: VecDeque::with_capacity(plan.most),
            again: VecDeque::new(),
            stubborn: VecDeque::new(),
            cut: MessageSize::new(packet, longest),
            most: plan.most,
        })
    }

    pub(super) fn names(&self) -> Vec<QueuePair> {
        self.paths.iter().map(UcPath::name).collect()
    }

    /// Joins each path with one of the peer's. The end with fewer decides how many there are.
    pub(super) fn join(&mut self, path: &Path, peer: &VerbsAddress) -> Result<(), RailError> {
        let now = Instant::now();
        self.paths.truncate(peer.unreliable.len());
        for (ours, qp) in self.paths.iter_mut().zip(&peer.unreliable) {
            ours.join(path, peer, *qp, now)?;
        }
        Ok(())
    }

    /// Takes a write. False if there is no room.
    pub(super) fn take(&mut self, request: &Request) -> bool {
        let has_room = self.writing.len() < self.most;
        if has_room {
            let key = self.writing.insert(WriteState { request: *request, cut: 0, open: 0 });
            self.fresh.push_back(key);
        }
        has_room
    }

    /// Handles a receive of one of its queue pairs that has ended.
    ///
    /// # Errors
    /// When the network does not keep messages in order.
    pub(super) fn received(
        &mut self,
        now: Instant,
        index: usize,
        wc: &Wc,
    ) -> Result<(), OutOfOrder> {
        self.path(index).map_or(Ok(()), |path| path.received(now, wc))
    }

    /// Handles a send of one of its queue pairs that has ended. False if there was no such send.
    pub(super) fn sent(&mut self, index: usize, wr_id: u64) -> bool {
        self.path(index).is_some_and(|path| path.retire(wr_id))
    }

    fn path(&mut self, index: usize) -> Option<&mut UcPath> {
        self.paths.get_mut(index.checked_sub(self.first)?)
    }

    /// Handles the protocol's events, sends as much as it allows, and acknowledges.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        is_idle: bool,
        ended: &mut Vec<RequestEnd>,
    ) -> Result<(), RailError> {
        for index in 0..self.paths.len() {
            self.hear(now, index, ended)?;
        }
        self.send(now);
        self.paths.iter_mut().try_for_each(|path| path.post(now, is_idle))
    }

    fn hear(
        &mut self,
        now: Instant,
        index: usize,
        ended: &mut Vec<RequestEnd>,
    ) -> Result<(), RailError> {
        if let Some(sender) = self.paths[index].sender() {
            sender.on_timeout(now);
        }
        while let Some(event) = self.paths[index].sender().and_then(|sender| sender.poll(now)) {
            match event {
                Event::Delivered(item) => {
                    self.cut.record(false);
                    self.piece_ended(item, Ok(()), ended);
                }
                Event::Lost(item) => {
                    self.cut.record(true);
                    self.piece_lost(item);
                }
                Event::Probe(number) => self.paths[index].probe(number.0),
                Event::PathDead => {
                    return Err(RailError::Lost(
                        "the peer acknowledges nothing any more".to_owned(),
                    ));
                }
            }
        }
        Ok(())
    }

    fn piece_lost(&mut self, item: u64) {
        let Some(piece) = self.pieces.get_mut(item as usize) else { return };
        piece.losses += 1;
        if piece.losses >= STUBBORN {
            self.stubborn.push_back(item);
        } else {
            let piece = self.pieces.remove(item as usize);
            self.again.push_back(piece);
        }
    }

    /// A piece has been delivered or has failed. Reports the write if it has ended by that.
    pub(super) fn piece_ended(
        &mut self,
        item: u64,
        result: Result<(), RequestError>,
        ended: &mut Vec<RequestEnd>,
    ) {
        let Some(piece) = self.pieces.try_remove(item as usize) else { return };
        let Some(writing) = self.writing.get_mut(piece.writing) else { return };
        writing.open -= 1;
        let is_whole = writing.open == 0 && writing.cut == writing.request.local.len;
        // After a failure the channel is dead, so the write's other pieces need no further
        // handling.
        if is_whole || result.is_err() {
            ended.push(RequestEnd { tag: writing.request.tag, result });
            self.writing.remove(piece.writing);
        }
    }

    /// Makes messages of the pieces that are to be sent, as far as paths take them.
    fn send(&mut self, now: Instant) {
        while let Some((source, piece)) = self.next_piece() {
            let takers = self.paths.iter().enumerate().filter(|(_, path)| path.can_send(piece.len));
            let Some((index, _)) = takers.min_by_key(|(_, path)| path.bytes()) else { return };
            let Some(write) = self.write_of(&piece) else { return };
            let item = self.pieces.insert(piece);
            if !self.paths[index].send(now, item as u64, &write) {
                self.pieces.remove(item);
                return;
            }
            self.sent_piece(source, &piece);
        }
    }

    /// The next piece, without taking it: lost pieces first, then new ones. It is no longer than a
    /// message.
    fn next_piece(&self) -> Option<(Source, Piece)> {
        let most = self.cut.len();
        if let Some(piece) = self.again.front() {
            return Some((Source::Again, Piece { len: piece.len.min(most), ..*piece }));
        }
        let writing = *self.fresh.front()?;
        let WriteState { request, cut, .. } = self.writing.get(writing)?;
        let len = (request.local.len - cut).min(most);
        Some((Source::Fresh, Piece { writing, offset: *cut, len, losses: 0 }))
    }

    /// Takes the piece that [`Self::next_piece`] returned.
    fn sent_piece(&mut self, source: Source, piece: &Piece) {
        let Some(writing) = self.writing.get_mut(piece.writing) else { return };
        match source {
            Source::Fresh => {
                writing.open += 1;
                writing.cut += piece.len;
                if writing.cut == writing.request.local.len {
                    self.fresh.pop_front();
                }
            }
            Source::Again => {
                let Some(lost) = self.again.front_mut() else { return };
                (lost.offset, lost.len) = (lost.offset + piece.len, lost.len - piece.len);
                if lost.len == 0 {
                    self.again.pop_front();
                } else {
                    // The lost piece has become two.
                    writing.open += 1;
                }
            }
        }
    }

    fn write_of(&self, piece: &Piece) -> Option<Request> {
        let request = self.writing.get(piece.writing)?.request;
        let local = Span { addr: request.local.addr + piece.offset, len: piece.len };
        let remote_addr = request.remote_addr.wrapping_add(piece.offset as u64);
        Some(Request { local, remote_addr, ..request })
    }

    /// The next piece for a reliable queue pair: its key in `pieces`, and the write to make.
    pub(super) fn next_stubborn(&self) -> Option<(u64, Request)> {
        let item = *self.stubborn.front()?;
        let piece = self.pieces.get(item as usize)?;
        Some((item, self.write_of(piece)?))
    }

    /// Takes the piece that [`Self::next_stubborn`] returned.
    pub(super) fn took_stubborn(&mut self) {
        self.stubborn.pop_front();
    }

    /// When a timeout is due, if no completion comes before.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.paths.iter().filter_map(UcPath::next_timeout).min()
    }
}
