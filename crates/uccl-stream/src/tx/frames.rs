//! Chooses the frame that is sent next, and writes its start.

use parking_lot::Mutex;
use uccl_fabric::{
    lane::OpError,
    mem::{RemoteSpan, Span},
    pieces::Pieces as _,
    pipe::PipeTx,
};
use uccl_wire::checked::{Crc, seal};
use uccl_wire::frame::{Desc, Header, Kind, MAX_DESCS, MAX_PAYLOAD, Status};

use super::{GATHERED, Tx, TxContext};
use crate::{
    ops::Ops,
    queue::{Frame, OutgoingKind, Turn},
    remote_of,
};

impl<P: PipeTx> Tx<P> {
    /// Begins the next frame: our operations and the peer's take turns.
    pub(super) fn begin(&mut self, around: &TxContext<'_>) {
        self.fetch(around);
        if self.begin_fetched(around.ops) {
            return;
        }
        self.replies_turn = !self.replies_turn;
        if self.replies_turn && self.begin_reply() {
            return;
        }
        if !self.begin_own(around.ops) {
            self.begin_reply();
        }
    }

    fn begin_own(&mut self, ops: &Mutex<Ops>) -> bool {
        if self.is_fetching(true) {
            return false;
        }
        while let Some(own) = self.own.front() {
            if own.is_fetched() {
                return false;
            }
            let (name, kind, is_short) = (own.name, own.kind, own.is_short());
            if is_short && self.control_len() >= GATHERED {
                return false;
            }
            let mut ops = ops.lock();
            self.blocked = !ops.begin(name);
            if self.blocked {
                return false;
            }
            match kind {
                OutgoingKind::Write if is_short => {
                    if !self.gather() {
                        ops.doom(name, OpError::LocalFault);
                    }
                }
                OutgoingKind::Write => {
                    drop(ops);
                    self.begin_write();
                    return true;
                }
                OutgoingKind::Read => self.send_read(),
                OutgoingKind::Fence => {
                    self.push_bare(Kind::Fence, name.0);
                    self.own.pop_front();
                }
            }
            // Not earlier: an operation that has been sent may end at any time.
            ops.sent(name);
        }
        false
    }

    /// Moves the first of our operations to the short frames. False: its data cannot be read.
    fn gather(&mut self) -> bool {
        let Some(own) = self.own.pop_front() else { return true };
        // SAFETY: the spans of our own operations stay valid until these have ended.
        unsafe { self.push_short(own.name, &own.local, &own.remote, own.word) }
    }

    fn send_read(&mut self) {
        let Some(own) = self.own.pop_front() else { return };
        let header = Header {
            descs: own.remote.len() as u16,
            checked: self.checked,
            ..Header::bare(Kind::Read, own.name.0, own.left)
        };
        push_head(&mut self.control, &header, own.remote.iter().copied());
    }

    fn begin_write(&mut self) {
        if let Some(frame) = self.cut_write(MAX_PAYLOAD) {
            self.start(frame, None);
        }
    }

    /// Cuts a frame of at most `most` bytes from the first of our operations: writes its start, and
    /// lists the memory of its data.
    pub(super) fn cut_write(&mut self, most: u64) -> Option<Frame> {
        let own = self.own.front_mut()?;
        self.head.clear();
        self.pieces.clear();
        self.pieces.extend(own.theirs.take_parts(&own.remote[..], most as usize).take(MAX_DESCS));
        let len = self.pieces.as_slice().len_bytes();
        self.payload.clear();
        let ours = own.ours.take_parts(&own.local[..], len as usize);
        self.payload.extend(ours.filter(|span| span.len > 0));
        own.left -= len;
        let last = own.left == 0;
        // Only the last frame carries the signal: the owner has all bytes when that has come.
        let word = own.word.filter(|_| last);
        let header = Header {
            last,
            checked: self.checked,
            descs: self.pieces.len() as u16,
            len,
            signal: word.map(|word| word.change),
            ..Header::bare(Kind::Write, own.name.0, 0)
        };
        let turn = Turn::Own { name: own.name, last };
        let pieces = self.pieces.iter().copied().chain(word.map(|word| word.span));
        let crc = push_head(&mut self.head, &header, pieces);
        if last {
            self.own.pop_front();
        }
        Some(Frame { len: len as usize, crc, turn })
    }

    fn begin_reply(&mut self) -> bool {
        if self.is_fetching(false) || self.replies.front().is_some_and(|reply| reply.is_fetched) {
            return false;
        }
        let is_stopped = self.replies.front().is_some_and(|reply| reply.is_stopped);
        let Some(frame) = self.cut_reply(MAX_PAYLOAD) else { return false };
        self.start(frame, None);
        if is_stopped {
            self.poison(Status::Cut);
        }
        true
    }

    /// Cuts a frame of at most `most` bytes from the first of the peer's reads: writes its start,
    /// and lists the memory of its data.
    pub(super) fn cut_reply(&mut self, most: u64) -> Option<Frame> {
        let reply = self.replies.front_mut()?;
        let len = reply.left.min(most) as usize;
        self.pieces.clear();
        let pieces = reply.rest.take_parts(&reply.pieces[..], len);
        self.pieces.extend(pieces.filter(|piece| piece.len > 0).map(|piece| remote_of(&piece)));
        reply.left -= len as u64;
        let last = reply.left == 0;
        let header = Header {
            last,
            checked: self.checked,
            len: len as u64,
            ..Header::bare(Kind::Data, reply.op, 0)
        };
        self.head.clear();
        let crc = push_head(&mut self.head, &header, []);
        self.payload.clear();
        self.payload.extend(
            self.pieces.iter().map(|p| Span { addr: p.addr as usize, len: p.len as usize }),
        );
        if last {
            self.replies.pop_front();
        }
        Some(Frame { len, crc, turn: Turn::Reply })
    }
}

/// Appends a header and its descriptors: those of the data, and that of the signal's word. The
/// caller must add all bytes after them to the returned checksum.
pub(super) fn push_head(
    out: &mut Vec<u8>,
    header: &Header,
    pieces: impl IntoIterator<Item = RemoteSpan>,
) -> Option<Crc> {
    let start = out.len();
    out.extend_from_slice(&seal(header));
    pieces.into_iter().for_each(|piece| desc_of(&piece).encode_to(out));
    let mut crc = header.checked.then(Crc::new)?;
    crc.add(&out[start..]);
    if header.descs_len() > 0 {
        out.extend_from_slice(&Crc::trailer(Some(&crc), Status::Ok).encode());
    }
    Some(crc)
}

fn desc_of(piece: &RemoteSpan) -> Desc {
    Desc { addr: piece.addr, len: piece.len, key: piece.key, slot: piece.slot }
}
