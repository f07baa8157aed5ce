//! The sending half of a stream lane: queues, and the frame being sent.

mod device;

use std::{collections::VecDeque, io, sync::atomic::AtomicBool};

use parking_lot::Mutex;
use uccl_wire::checked::{Crc, seal};
use uccl_wire::frame::{
    DESC_LEN, Desc, HEADER_LEN, Header, Kind, MAX_DESCS, MAX_PAYLOAD, Status, TRAILER_LEN,
};

use super::{
    MAX_READS, MAX_WRITES, crc::add_span, cursor::Cursor, fetch::Fetcher, ops::Ops, remote_of,
};
use crate::{
    gpu::{Chunk, CopyBy},
    lane::{OpName, RemoteSpans, Spans},
    mem::{Access, Located, RemoteSpan, Span},
    pipe::PipeTx,
    region::RegionTable,
    status_of,
};

/// Operations of at most this many bytes are copied into their frame when they are posted: many of
/// them then share one system call.
pub(super) const SHORT: usize = 2 << 10;
/// With a checksum: bytes sent at a time, so that they are still in the cache when they are summed up.
const CHECKED_STEP: usize = 256 << 10;
/// Frames of at most this much payload know their checksum before they are sent.
const CHECKED_AHEAD: usize = 64 << 10;
/// Short frames queue no further than this; later ones wait where cancels find them.
const CONTROL_LIMIT: usize = 256 << 10;
/// Pieces of payload given to the pipe at a time: what one vectored system call takes.
const PIECES: usize = 1024;
/// Short frames gathered for one send.
const GATHERED: usize = 64 << 10;
/// Answers with data that may wait before the peer is made to wait.
const MAX_REPLIES: usize = 4 * MAX_READS;
/// Short answers that may wait, in bytes, before the peer is made to wait.
const MAX_ANSWER_BYTES: usize = 2 * HEADER_LEN * (MAX_READS + MAX_WRITES);
/// What one flush sends at most, so that nobody's post turns into somebody else's pump.
const FLUSH_BUDGET: usize = 8 << 20;

static FILLER: [u8; 64 << 10] = [0; 64 << 10];

/// One of our operations, not wholly sent.
pub(super) struct Own {
    pub(super) name: OpName,
    pub(super) kind: OwnKind,
    pub(super) local: Spans,
    pub(super) remote: RemoteSpans,
    /// The GPU that alone reaches our memory.
    device: Option<u32>,
    local_at: Cursor,
    remote_at: Cursor,
    left: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OwnKind {
    /// Ends the cut write of this name.
    Fence,
    Read,
    Write,
}

impl Own {
    pub(super) fn new(name: OpName, kind: OwnKind, local: Spans, remote: RemoteSpans) -> Self {
        let left = local.iter().map(|span| span.len as u64).sum();
        let (local_at, remote_at) = (Cursor::default(), Cursor::default());
        Self { name, kind, local, remote, device: None, local_at, remote_at, left }
    }

    /// The same, from or to the memory of a GPU.
    pub(super) fn on(self, device: Option<u32>) -> Self {
        Self { device, ..self }
    }

    /// Whether it is sent as one short frame.
    fn is_short(&self) -> bool {
        self.kind == OwnKind::Write && self.left <= SHORT as u64 && !self.begun()
    }

    /// Whether its data is a GPU's.
    fn is_fetched(&self) -> bool {
        self.kind == OwnKind::Write && self.device.is_some() && self.left > 0
    }

    fn begun(&self) -> bool {
        self.local_at.index + self.local_at.offset + self.remote_at.index + self.remote_at.offset
            > 0
    }
}

/// Data that the peer asked for.
pub(super) struct Reply {
    pub(super) op: u64,
    pub(super) pieces: Vec<Desc>,
    /// Some of it is a GPU's.
    is_fetched: bool,
    at: Cursor,
    left: u64,
}

impl Reply {
    pub(super) fn new(op: u64, pieces: Vec<Desc>, is_fetched: bool) -> Self {
        let left = pieces.iter().map(|piece| piece.len).sum();
        Self { op, pieces, is_fetched, at: Cursor::default(), left }
    }
}

/// A data frame whose start has been written.
pub(super) struct Frame {
    len: usize,
    /// Of the start.
    crc: Option<Crc>,
    pub(super) turn: Turn,
}

/// A data frame on its way. Its header and descriptors are in [`Tx::head`], its payload in
/// [`Tx::payload`].
struct Current {
    payload_len: usize,
    sent: usize,
    /// The next byte of payload to be sent.
    at: Cursor,
    crc: Option<Crc>,
    /// Payload bytes that the checksum covers so far.
    summed: usize,
    turn: Turn,
    /// It is sent from regions: what to check before each send.
    guarded: bool,
    status: Status,
    /// What it is sent from, if that is a GPU's.
    _chunk: Option<Chunk>,
}

/// The sending half.
pub(super) struct Tx<P> {
    pub(super) pipe: P,
    control: Vec<u8>,
    control_sent: usize,
    /// Bytes of short frames that have been sent so far.
    control_gone: u64,
    /// Answers to the peer among the short frames: where they end, and how long they are.
    answers: VecDeque<(u64, usize)>,
    answer_bytes: usize,
    own: VecDeque<Own>,
    replies: VecDeque<Reply>,
    fetcher: Fetcher,
    current: Option<Current>,
    head: Vec<u8>,
    payload: Vec<Span>,
    pieces: Vec<RemoteSpan>,
    located: Vec<Located>,
    iov: Vec<Span>,
    checked: bool,
    replies_turn: bool,
    fetch_replies: bool,
    /// The next of our operations waits for others to end.
    blocked: bool,
}

/// Whose frame it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// The peer's: data it asked for.
    Reply,
    /// Ours: of which operation, and whether that has been sent with it.
    Own { name: OpName, last: bool },
}

impl Turn {
    pub(super) fn is_own(self) -> bool {
        matches!(self, Self::Own { .. })
    }
}

/// What the sending half works with.
pub(super) struct TxSurroundings<'a> {
    pub(super) regions: &'a RegionTable,
    pub(super) ops: &'a Mutex<Ops>,
    /// To be set when a copy from a region starts, before the table is let go.
    pub(super) copying: &'a AtomicBool,
}

impl<P: PipeTx> Tx<P> {
    pub(super) fn new(pipe: P, checked: bool, copy_by: &CopyBy) -> Self {
        Self {
            pipe,
            control: Vec::new(),
            control_sent: 0,
            control_gone: 0,
            answers: VecDeque::new(),
            answer_bytes: 0,
            own: VecDeque::new(),
            replies: VecDeque::new(),
            fetcher: Fetcher::new(copy_by),
            current: None,
            head: Vec::new(),
            payload: Vec::new(),
            pieces: Vec::new(),
            located: Vec::new(),
            iov: Vec::new(),
            checked,
            replies_turn: false,
            fetch_replies: false,
            blocked: false,
        }
    }

    /// Whether anything waits to be sent, for want of room.
    pub(super) fn pending(&self) -> bool {
        self.control_sent < self.control.len()
            || self.current.is_some()
            || !(self.own.is_empty() || self.blocked)
            || !self.replies.is_empty()
            || !self.fetcher.is_idle()
    }

    /// Whether so many answers wait that the peer may ask for no more. A peer of this kind never gets
    /// there, for it limits what it has under way; otherwise two could wait for each other.
    pub(super) fn swamped(&self) -> bool {
        self.replies.len() > MAX_REPLIES || self.answer_bytes > MAX_ANSWER_BYTES
    }

    /// Bytes of short frames that wait.
    pub(super) fn control_len(&self) -> usize {
        self.control.len() - self.control_sent
    }

    pub(super) fn push_own(&mut self, own: Own) {
        self.own.push_back(own);
    }

    pub(super) fn push_reply(&mut self, reply: Reply) {
        self.replies.push_back(reply);
    }

    /// Queues a frame of nothing but a header.
    pub(super) fn push_bare(&mut self, kind: Kind, op: u64) {
        let header = Header { checked: self.checked, ..Header::bare(kind, op, 0) };
        self.control.extend_from_slice(&seal(&header));
    }

    /// Queues answers to the peer, frames of nothing but a header.
    pub(super) fn push_answers(&mut self, headers: &[Header]) {
        let start = self.control_len();
        for header in headers {
            let header = Header { checked: self.checked, ..*header };
            self.control.extend_from_slice(&seal(&header));
        }
        let len = self.control_len() - start;
        self.answers.push_back((self.control_gone + self.control_len() as u64, len));
        self.answer_bytes += len;
    }

    /// Whether a short write may skip the queue of operations.
    pub(super) fn takes_short(&self) -> bool {
        // Short frames go before a frame that has not begun: not before one of an earlier write.
        let overtakes = self.current.as_ref().is_some_and(|now| now.turn.is_own() && now.sent == 0);
        self.own.is_empty()
            && !overtakes
            && !self.fetcher.holds(true)
            && self.control_len() < CONTROL_LIMIT
    }

    /// Queues a whole write frame, its data copied.
    ///
    /// # Safety
    /// The local spans must be readable.
    pub(super) unsafe fn push_short(
        &mut self,
        name: OpName,
        local: &[Span],
        remote: &[RemoteSpan],
    ) {
        let header = Header {
            kind: Kind::Write,
            last: true,
            checked: self.checked,
            descs: remote.len() as u16,
            op: name.0,
            len: local.iter().map(|span| span.len as u64).sum(),
            aux: 0,
        };
        let mut crc = push_head(&mut self.control, &header, remote);
        let start = self.control.len();
        for span in local.iter().filter(|span| span.len > 0) {
            // SAFETY: readable, as the caller promises.
            let bytes = unsafe { std::slice::from_raw_parts(span.addr as *const u8, span.len) };
            self.control.extend_from_slice(bytes);
        }
        if let Some(crc) = &mut crc {
            crc.add(&self.control[start..]);
        }
        let trailer = Crc::trailer(crc.as_ref(), Status::Ok);
        self.control.extend_from_slice(&trailer.encode());
    }

    /// Queues a message frame, sending it straight from the caller's parts as far as the pipe takes it.
    pub(super) fn push_message(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let len = parts.iter().map(|part| part.len() as u64).sum();
        let header = Header {
            kind: Kind::Message,
            last: true,
            checked: self.checked,
            descs: 0,
            op: 0,
            len,
            aux: 0,
        };
        let header = seal(&header);
        let mut crc = self.checked.then(Crc::new);
        if let Some(crc) = &mut crc {
            crc.add(&header);
            parts.iter().for_each(|part| crc.add(part));
        }
        let trailer = Crc::trailer(crc.as_ref(), Status::Ok).encode();
        let mut skip = 0;
        if self.control_len() == 0 && self.current.is_none() {
            self.iov.clear();
            self.iov.push(span_of(&header));
            self.iov.extend(parts.iter().map(|part| span_of(part)));
            self.iov.push(span_of(&trailer));
            // SAFETY: the spans are of slices that are borrowed for this whole function.
            skip = unsafe { self.pipe.send(&self.iov)? };
        }
        for part in [&header[..]].iter().chain(parts).chain([&trailer[..]].iter()) {
            let cut = skip.min(part.len());
            self.control.extend_from_slice(&part[cut..]);
            skip -= cut;
        }
        Ok(())
    }

    /// Takes an operation out of the queue. `Some(false)`: nothing of it has been sent. `Some(true)`: it
    /// was cut after the frame that is being sent, and a fence follows. `None`: all of it has been sent.
    pub(super) fn cut(&mut self, name: OpName) -> Option<bool> {
        let index = self.own.iter().position(|own| own.name == name)?;
        let own = &mut self.own[index];
        if own.kind == OwnKind::Fence {
            return None;
        }
        if !own.begun() {
            self.own.remove(index);
            return Some(false);
        }
        *own = Own::new(name, OwnKind::Fence, Spans::new(), RemoteSpans::new());
        Some(true)
    }

    /// Drops everything, for a lane that dies.
    pub(super) fn clear(&mut self) {
        self.own.clear();
        self.replies.clear();
        self.fetcher.clear();
        self.current = None;
        self.control.clear();
        self.control_sent = 0;
        self.answers.clear();
        self.answer_bytes = 0;
    }

    /// Sends what the pipe takes; says whether anything was sent.
    pub(super) fn flush(&mut self, around: &TxSurroundings<'_>) -> io::Result<bool> {
        let mut sent = 0;
        self.blocked = false;
        while sent < FLUSH_BUDGET {
            if self.current.is_none() {
                self.begin(around);
            }
            let n = self.send_once(around)?;
            if n == 0 {
                break;
            }
            sent += n;
        }
        Ok(sent > 0)
    }

    /// Begins the next frame: our operations and the peer's take turns.
    fn begin(&mut self, around: &TxSurroundings<'_>) {
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
        if self.fetcher.holds(true) {
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
                OwnKind::Write if is_short => self.gather(),
                OwnKind::Write => {
                    drop(ops);
                    self.begin_write();
                    return true;
                }
                OwnKind::Read => self.send_read(),
                OwnKind::Fence => {
                    self.push_bare(Kind::Fence, name.0);
                    self.own.pop_front();
                }
            }
            // Not before: what has been sent may end at any time.
            ops.sent(name);
        }
        false
    }

    /// Moves the first of our operations among the short frames.
    fn gather(&mut self) {
        let Some(own) = self.own.pop_front() else { return };
        // SAFETY: the spans of our own operations stay valid until these have ended.
        unsafe { self.push_short(own.name, &own.local, &own.remote) };
    }

    fn send_read(&mut self) {
        let Some(own) = self.own.pop_front() else { return };
        let header = Header {
            descs: own.remote.len() as u16,
            checked: self.checked,
            ..Header::bare(Kind::Read, own.name.0, own.left)
        };
        push_head(&mut self.control, &header, &own.remote);
    }

    fn begin_write(&mut self) {
        if let Some(frame) = self.cut_write(MAX_PAYLOAD) {
            self.start(frame, None);
        }
    }

    /// Cuts a frame of at most so many bytes from the first of our operations: its start, and where its data
    /// comes from.
    fn cut_write(&mut self, most: u64) -> Option<Frame> {
        let own = self.own.front_mut()?;
        self.head.clear();
        self.pieces.clear();
        let mut left = most;
        let mut offset = own.remote_at.offset as u64;
        for piece in own.remote.iter().skip(own.remote_at.index).take(MAX_DESCS) {
            let len = (piece.len - offset).min(left);
            self.pieces.push(RemoteSpan { addr: piece.addr + offset, len, ..*piece });
            left -= len;
            offset = 0;
            if left == 0 {
                break;
            }
        }
        let len = (most - left) as usize;
        self.payload.clear();
        own.local_at.ahead(&own.local, len, usize::MAX, &mut self.payload);
        own.local_at.advance(|i| own.local.get(i).map(|span| span.len), len);
        own.remote_at.advance(|i| own.remote.get(i).map(|piece| piece.len as usize), len);
        own.left -= len as u64;
        let last = own.left == 0;
        let header = Header {
            kind: Kind::Write,
            last,
            checked: self.checked,
            descs: self.pieces.len() as u16,
            op: own.name.0,
            len: len as u64,
            aux: 0,
        };
        let turn = Turn::Own { name: own.name, last };
        let crc = push_head(&mut self.head, &header, &self.pieces);
        if last {
            self.own.pop_front();
        }
        Some(Frame { len, crc, turn })
    }

    fn begin_reply(&mut self) -> bool {
        if self.fetcher.holds(false) || self.replies.front().is_some_and(|reply| reply.is_fetched) {
            return false;
        }
        let Some(frame) = self.cut_reply(MAX_PAYLOAD) else { return false };
        self.start(frame, None);
        true
    }

    /// Cuts a frame of at most so many bytes from the first of the peer's reads: its start, and where its data
    /// comes from.
    fn cut_reply(&mut self, most: u64) -> Option<Frame> {
        let reply = self.replies.front_mut()?;
        let len = reply.left.min(most) as usize;
        self.pieces.clear();
        let mut left = len as u64;
        let mut offset = reply.at.offset as u64;
        for piece in reply.pieces.iter().skip(reply.at.index) {
            if left == 0 {
                break;
            }
            let len = (piece.len - offset).min(left);
            if len > 0 {
                let piece = remote_of(piece);
                self.pieces.push(RemoteSpan { addr: piece.addr + offset, len, ..piece });
            }
            left -= len;
            offset = 0;
        }
        reply.at.advance(|i| reply.pieces.get(i).map(|piece| piece.len as usize), len);
        reply.left -= len as u64;
        let last = reply.left == 0;
        let header = Header {
            kind: Kind::Data,
            last,
            checked: self.checked,
            descs: 0,
            op: reply.op,
            len: len as u64,
            aux: 0,
        };
        self.head.clear();
        let crc = push_head(&mut self.head, &header, &[]);
        self.payload.clear();
        self.payload.extend(
            self.pieces.iter().map(|p| Span { addr: p.addr as usize, len: p.len as usize }),
        );
        if last {
            self.replies.pop_front();
        }
        Some(Frame { len, crc, turn: Turn::Reply })
    }

    /// The frame whose start is in [`Self::head`] is the next to be sent.
    fn start(&mut self, frame: Frame, chunk: Option<Chunk>) {
        let Frame { len: payload_len, mut crc, turn } = frame;
        let guarded = !turn.is_own() && chunk.is_none();
        let mut summed = 0;
        if let Some(crc) = &mut crc
            && payload_len <= CHECKED_AHEAD
            && !guarded
        {
            // SAFETY: the spans of our own operations stay valid until these have ended, and a chunk is
            // kept with its frame.
            self.payload.iter().for_each(|span| unsafe { add_span(crc, *span) });
            summed = payload_len;
        }
        let (status, at) = (Status::Ok, Cursor::default());
        self.current = Some(Current {
            payload_len,
            sent: 0,
            at,
            crc,
            summed,
            turn,
            guarded,
            status,
            _chunk: chunk,
        });
    }

    /// The source of the current frame is gone: the rest of it is filler, and its trailer says so.
    fn poison(&mut self, status: Status) {
        if let Some(current) = &mut self.current {
            current.status = status;
            let mut left = current.payload_len;
            let sent = current.sent.saturating_sub(self.head.len());
            self.payload.clear();
            while left > 0 {
                let len = left.min(FILLER.len());
                self.payload.push(Span { addr: FILLER.as_ptr() as usize, len });
                left -= len;
            }
            current.at = Cursor::default();
            current.at.advance(|i| self.payload.get(i).map(|span| span.len), sent);
        }
    }

    fn send_once(&mut self, around: &TxSurroundings<'_>) -> io::Result<usize> {
        let Some(current) = &self.current else {
            return self.send_control();
        };
        if current.guarded && current.status == Status::Ok {
            let guard = around.regions.lock();
            let status = check_all(&guard, &self.pieces[current.at.index..]);
            if status != Status::Ok {
                self.poison(status);
            }
            // The lock is held while the memory is read: a deregistration waits for it.
            return self.send_current(around.ops);
        }
        self.send_current(around.ops)
    }

    fn send_control(&mut self) -> io::Result<usize> {
        if self.control_len() == 0 {
            return Ok(0);
        }
        let span = span_of(&self.control[self.control_sent..]);
        // SAFETY: the span is of a buffer that is borrowed until the end of this function.
        let n = unsafe { self.pipe.send(&[span])? };
        self.sent_control(n);
        Ok(n)
    }

    /// Sends from the current frame; queued control frames go before it if it has not begun.
    fn send_current(&mut self, ops: &Mutex<Ops>) -> io::Result<usize> {
        let Some(current) = &mut self.current else { return Ok(0) };
        self.iov.clear();
        let control = if current.sent == 0 { self.control.len() - self.control_sent } else { 0 };
        if control > 0 {
            self.iov.push(span_of(&self.control[self.control_sent..]));
        }
        let head = self.head.len();
        if current.sent < head {
            self.iov.push(span_of(&self.head[current.sent..]));
        }
        let done = current.sent.saturating_sub(head).min(current.payload_len);
        let step = if current.crc.is_some() && current.summed < current.payload_len {
            CHECKED_STEP
        } else {
            usize::MAX
        };
        let limit = (current.payload_len - done).min(step);
        let before = self.iov.len();
        let ahead = current.at.ahead(&self.payload, limit, PIECES, &mut self.iov);
        let until = self.iov.len();
        let trailer;
        if done + ahead == current.payload_len
            && current.crc.as_ref().is_none_or(|_| current.summed == current.payload_len)
        {
            trailer = Crc::trailer(current.crc.as_ref(), current.status).encode();
            let from = current.sent.saturating_sub(head + current.payload_len);
            self.iov.push(span_of(&trailer[from..]));
        }
        // SAFETY: buffers of this struct and of this function; spans of our own operations, which stay
        // valid until these have ended; a chunk that the frame keeps; spans of regions, which the caller has checked under the lock
        // that it holds; or filler.
        let n = unsafe { self.pipe.send(&self.iov)? };
        let from_control = n.min(control);
        let of_frame = n - from_control;
        let payload_sent = (current.sent + of_frame).saturating_sub(head).min(current.payload_len);
        let mut sum_left = payload_sent.saturating_sub(current.summed);
        if let Some(crc) = &mut current.crc {
            for span in &self.iov[before..until] {
                let len = span.len.min(sum_left);
                // SAFETY: as above.
                unsafe { add_span(crc, Span { addr: span.addr, len }) };
                sum_left -= len;
            }
        }
        current.summed = current.summed.max(payload_sent);
        current.at.advance(|i| self.payload.get(i).map(|span| span.len), payload_sent - done);
        current.sent += of_frame;
        if current.sent == head + current.payload_len + TRAILER_LEN {
            if let Turn::Own { name, last: true } = current.turn {
                ops.lock().sent(name);
            }
            self.current = None;
        }
        self.sent_control(from_control);
        Ok(n)
    }

    fn sent_control(&mut self, n: usize) {
        self.control_sent += n;
        self.control_gone += n as u64;
        while let Some((_, len)) = self.answers.pop_front_if(|(end, _)| *end <= self.control_gone) {
            self.answer_bytes -= len;
        }
        if self.control_sent == self.control.len() {
            self.control.clear();
            self.control.shrink_to(4 * CONTROL_LIMIT);
            self.control_sent = 0;
        } else if self.control_sent > CONTROL_LIMIT && self.control_sent > self.control_len() {
            // What is moved is less than what was sent since the last time.
            self.control.drain(..self.control_sent);
            self.control_sent = 0;
        }
    }
}

fn check_all(regions: &crate::region::Locked<'_>, pieces: &[RemoteSpan]) -> Status {
    pieces
        .iter()
        .find_map(|piece| regions.check(piece, Access::Read).err())
        .map_or(Status::Ok, status_of)
}

/// Appends a header and its descriptors; what follows is to be added to the checksum.
fn push_head(out: &mut Vec<u8>, header: &Header, pieces: &[RemoteSpan]) -> Option<Crc> {
    let start = out.len();
    out.extend_from_slice(&seal(header));
    pieces.iter().for_each(|piece| desc_of(piece).encode_to(out));
    let mut crc = header.checked.then(Crc::new)?;
    crc.add(&out[start..]);
    if !pieces.is_empty() {
        out.extend_from_slice(&Crc::trailer(Some(&crc), Status::Ok).encode());
    }
    Some(crc)
}

fn desc_of(piece: &RemoteSpan) -> Desc {
    Desc { addr: piece.addr, len: piece.len, key: piece.key, slot: piece.slot }
}

fn span_of(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr() as usize, len: bytes.len() }
}

const _: () = assert!(DESC_LEN * MAX_DESCS < CONTROL_LIMIT);
