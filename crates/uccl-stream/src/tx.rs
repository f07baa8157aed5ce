//! The sending half of a stream lane: queues, and the frame being sent.

mod cut;
mod device;
mod frames;

use std::{collections::VecDeque, io, sync::atomic::AtomicBool};

use parking_lot::Mutex;
use uccl_device::cuda::{Direction, GpuError};
use uccl_fabric::{
    gpu::{Chunk, CopyBy, PATIENCE, Staging},
    guarded::{UnmappedMemory, append, is_readable},
    lane::{OpError, OpName, RemoteSpans, Spans},
    mem::{Access, LocatedSpan, RemoteSpan, Span},
    pieces::{Pieces as _, Stretch},
    pipe::PipeTx,
    region::RegionTable,
    signal::Word,
    status_of,
};
use uccl_wire::checked::{Crc, seal};
use uccl_wire::frame::{DESC_LEN, HEADER_LEN, Header, Kind, MAX_DESCS, Status, TRAILER_LEN};

use self::{cut::push_head, device::FrameCopy};
use super::{
    MAX_READS, MAX_WRITES,
    crc::add_span,
    ops::Ops,
    queue::{Frame, OutgoingKind, OutgoingOp, Reply, Turn},
};

/// With a checksum: bytes sent at a time, few enough to be in the cache still when they are summed
/// up.
const CHECKED_STEP: usize = 256 << 10;
/// Frames of at most this much payload have their checksum computed before they are sent.
const CHECKED_AHEAD: usize = 64 << 10;
/// Short frames queue up to this many bytes; later operations wait where a cancel finds them.
const CONTROL_LIMIT: usize = 256 << 10;
/// Pieces of payload given to the pipe at a time: the most that one vectored system call takes.
const PIECES: usize = 1024;
/// Bytes of short frames gathered for one send.
const GATHERED: usize = 64 << 10;
/// The most answers with data that may wait before the peer must wait.
const MAX_REPLIES: usize = 4 * MAX_READS;
/// The most bytes of short answers that may wait before the peer must wait.
const MAX_ANSWER_BYTES: usize = 2 * HEADER_LEN * (MAX_READS + MAX_WRITES);
/// The most bytes that one flush sends, so that a thread that posts does not end up sending for all
/// others.
const FLUSH_BUDGET: usize = 1 << 20;

static FILLER: [u8; 64 << 10] = [0; 64 << 10];

/// A data frame on its way. Its header and descriptors are in [`Tx::head`], its payload in
/// [`Tx::payload`].
struct Current {
    payload_len: usize,
    sent: usize,
    /// The payload that has not been sent.
    rest: Stretch,
    crc: Option<Crc>,
    /// Payload bytes that the checksum covers so far.
    summed: usize,
    turn: Turn,
    /// It is sent from regions, which are checked before each send.
    guarded: bool,
    status: Status,
    /// The chunk that it is sent from, if its data is a GPU's.
    _chunk: Option<Chunk>,
}

/// The sending half.
pub(super) struct Tx<P> {
    pub(super) pipe: P,
    control: Vec<u8>,
    control_sent: usize,
    /// Bytes of short frames that have been sent so far.
    control_gone: u64,
    /// Answers to the peer among the short frames: the position of each one's end, and its length.
    answers: VecDeque<(u64, usize)>,
    answer_bytes: usize,
    own: VecDeque<OutgoingOp>,
    replies: VecDeque<Reply>,
    /// The frames with data that GPUs are copying, in the order in which they will be sent.
    fetching: Staging<FrameCopy>,
    /// Buffers of fetched frames that were sent.
    heads: Vec<Vec<u8>>,
    current: Option<Current>,
    head: Vec<u8>,
    payload: Vec<Span>,
    pieces: Vec<RemoteSpan>,
    located: Vec<LocatedSpan>,
    iov: Vec<Span>,
    checked: bool,
    replies_turn: bool,
    fetch_replies: bool,
    /// The next of our operations waits for others to end.
    blocked: bool,
}

/// The parts of the lane that the sending half uses.
pub(super) struct TxContext<'a> {
    pub(super) regions: &'a RegionTable,
    pub(super) ops: &'a Mutex<Ops>,
    /// Must be set when a copy from a region starts, before the table's lock is released.
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
            fetching: Staging::new(copy_by, Direction::DeviceToHost),
            heads: Vec::new(),
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

    /// Whether anything waits to be sent because the pipe has no room.
    pub(super) fn pending(&self) -> bool {
        self.control_sent < self.control.len()
            || self.current.is_some()
            || !(self.own.is_empty() || self.blocked)
            || !self.replies.is_empty()
            || !self.fetching.is_idle()
            || self.pipe.is_holding()
    }

    /// Whether the waiting answers are too many to receive more from the peer. A peer that follows
    /// the protocol never gets there, because it limits its operations under way; otherwise two
    /// peers could wait for each other.
    pub(super) fn swamped(&self) -> bool {
        self.replies.len() > MAX_REPLIES || self.answer_bytes > MAX_ANSWER_BYTES
    }

    /// Bytes of short frames that wait to be sent.
    pub(super) fn control_len(&self) -> usize {
        self.control.len() - self.control_sent
    }

    pub(super) fn push_own(&mut self, own: OutgoingOp) {
        self.own.push_back(own);
    }

    pub(super) fn push_reply(&mut self, reply: Reply) {
        self.replies.push_back(reply);
    }

    /// Queues a frame that is only a header.
    pub(super) fn push_bare(&mut self, kind: Kind, op: u64) {
        let header = Header { checked: self.checked, ..Header::bare(kind, op, 0) };
        self.control.extend_from_slice(&seal(&header));
    }

    /// Queues answers to the peer, which are only headers.
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
        // Short frames go before a frame that has not begun, but must not go before one of an
        // earlier write.
        let overtakes = self.current.as_ref().is_some_and(|now| now.turn.is_own() && now.sent == 0);
        self.own.is_empty()
            && !overtakes
            && !self.is_fetching(true)
            && self.control_len() < CONTROL_LIMIT
    }

    /// Queues a whole write frame, its data copied. False: the data cannot be read. The peer then
    /// learns that from the frame, and answers.
    ///
    /// # Safety
    /// The local spans must be readable, as far as they are mapped.
    pub(super) unsafe fn push_short(
        &mut self,
        name: OpName,
        local: &[Span],
        remote: &[RemoteSpan],
        word: Option<Word>,
    ) -> bool {
        let header = Header {
            checked: self.checked,
            descs: remote.len() as u16,
            len: local.len_bytes(),
            signal: word.map(|word| word.change),
            ..Header::bare(Kind::Write, name.0, 0)
        };
        let pieces = remote.iter().copied().chain(word.map(|word| word.span));
        let mut crc = push_head(&mut self.control, &header, pieces);
        let start = self.control.len();
        // SAFETY: the caller's promise.
        let mut copied = local.iter().map(|span| unsafe { append(&mut self.control, *span) });
        let status =
            copied.find_map(Result::err).map_or(Status::Ok, |UnmappedMemory| Status::Fault);
        self.control.resize(start + header.len as usize, 0);
        if let Some(crc) = &mut crc {
            crc.add(&self.control[start..]);
        }
        let trailer = Crc::trailer(crc.as_ref(), status);
        self.control.extend_from_slice(&trailer.encode());
        status == Status::Ok
    }

    /// Queues a message frame. Sends it straight from the caller's parts as far as the pipe takes
    /// it.
    pub(super) fn push_message(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let len = parts.iter().map(|part| part.len() as u64).sum();
        let header = Header { checked: self.checked, len, ..Header::bare(Kind::Message, 0, 0) };
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

    /// Takes an operation out of the queue. `Some(false)`: nothing of it has been sent.
    /// `Some(true)`: it ends after the frame that is being sent, and a fence follows. `None`: all
    /// of it has been sent.
    pub(super) fn cut(&mut self, name: OpName) -> Option<bool> {
        let index = self.own.iter().position(|own| own.name == name)?;
        let own = &mut self.own[index];
        if own.kind == OutgoingKind::Fence {
            return None;
        }
        if !own.begun() {
            self.own.remove(index);
            return Some(false);
        }
        *own = OutgoingOp::new(name, OutgoingKind::Fence, Spans::new(), RemoteSpans::new());
        Some(true)
    }

    /// The peer wants no more of these reads: one empty frame ends each. Frames that were already
    /// cut from them go first. Walks the replies once, however many reads the peer stops, and
    /// forgets the list.
    pub(super) fn stop_replies(&mut self, ops: &mut Vec<u64>) {
        if ops.is_empty() {
            return;
        }
        ops.sort_unstable();
        let is_stopped = |reply: &&mut Reply| ops.binary_search(&reply.op).is_ok();
        self.replies.iter_mut().filter(is_stopped).for_each(Reply::stop);
        ops.clear();
    }

    /// Drops everything that waits, for a lane that dies.
    ///
    /// # Errors
    /// When copies by GPUs do not end.
    pub(super) fn clear(&mut self) -> Result<(), GpuError> {
        self.own.clear();
        self.replies.clear();
        self.current = None;
        self.control.clear();
        self.control_sent = 0;
        self.answers.clear();
        self.answer_bytes = 0;
        self.fetching.clear(PATIENCE)
    }

    /// Sends as much as the pipe takes. True if anything was sent.
    pub(super) fn flush(&mut self, around: &TxContext<'_>) -> io::Result<bool> {
        let mut sent = 0;
        self.blocked = false;
        let held = self.pipe.is_holding();
        if held {
            // SAFETY: there are no spans.
            unsafe { self.pipe.send(&[])? };
        }
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
        Ok(sent > 0 || held && !self.pipe.is_holding())
    }

    /// Makes the frame that starts in [`Self::head`] the next one to be sent.
    fn start(&mut self, frame: Frame, chunk: Option<Chunk>) {
        let Frame { len: payload_len, mut crc, turn } = frame;
        let guarded = !turn.is_own() && chunk.is_none();
        let mut summed = 0;
        if let Some(crc) = &mut crc
            && payload_len <= CHECKED_AHEAD
            && !guarded
            // SAFETY: the spans of our own operations stay valid until these have ended, unless the
            // caller has unmapped them, and the frame keeps its chunk.
            && self.payload.iter().all(|span| unsafe { is_readable(*span) })
        {
            // SAFETY: as above.
            self.payload.iter().for_each(|span| unsafe { add_span(crc, *span) });
            summed = payload_len;
        }
        let (status, rest) = (Status::Ok, Stretch::all(&self.payload[..]));
        self.current = Some(Current {
            payload_len,
            sent: 0,
            rest,
            crc,
            summed,
            turn,
            guarded,
            status,
            _chunk: chunk,
        });
    }

    /// The source of the current frame is gone: the rest of the frame is filler, and its trailer
    /// carries the status.
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
            current.rest = Stretch::all(&self.payload[..]);
            current.rest.cut(&self.payload[..], sent);
        }
    }

    fn send_once(&mut self, around: &TxContext<'_>) -> io::Result<usize> {
        let Some(current) = &self.current else {
            return self.send_control();
        };
        if current.guarded && current.status == Status::Ok {
            let guard = around.regions.lock();
            let status = check_all(&guard, current.rest.parts(&self.pieces[..]));
            if status != Status::Ok {
                self.poison(status);
            }
            // The lock is held while the memory is read: a deregistration waits for it.
            return self.send_or_poison(around.ops);
        }
        self.send_or_poison(around.ops)
    }

    /// Sends from the current frame. If its memory is not mapped any more, the rest of it becomes
    /// filler, and its operation fails.
    fn send_or_poison(&mut self, ops: &Mutex<Ops>) -> io::Result<usize> {
        let is_poisoned = self.current.as_ref().is_some_and(|now| now.status != Status::Ok);
        match self.send_current(ops) {
            Err(e) if e.raw_os_error() == Some(libc::EFAULT) && !is_poisoned => {
                if let Some(Current { turn: Turn::Own { name, .. }, .. }) = self.current {
                    ops.lock().doom(name, OpError::LocalFault);
                }
                self.poison(Status::Fault);
                self.send_current(ops)
            }
            sent => sent,
        }
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
        let (payload, mut rest) = (&self.payload[..], current.rest);
        self.iov.extend(rest.take_parts(payload, limit).take(PIECES));
        let until = self.iov.len();
        let ahead = self.iov[before..].len_bytes() as usize;
        let trailer;
        if done + ahead == current.payload_len
            && current.crc.as_ref().is_none_or(|_| current.summed == current.payload_len)
        {
            trailer = Crc::trailer(current.crc.as_ref(), current.status).encode();
            let from = current.sent.saturating_sub(head + current.payload_len);
            self.iov.push(span_of(&trailer[from..]));
        }
        // SAFETY: the spans are of buffers of this struct and of this function; of our own
        // operations, which stay valid until these have ended; of a chunk that the frame keeps; of
        // regions, which the caller has checked under the lock that it holds; or of filler.
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
        current.rest.cut(payload, payload_sent - done);
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
            // Fewer bytes are moved than were sent since the last time.
            self.control.drain(..self.control_sent);
            self.control_sent = 0;
        }
    }
}

fn check_all(
    regions: &uccl_fabric::region::TableGuard<'_>,
    mut pieces: impl Iterator<Item = RemoteSpan>,
) -> Status {
    pieces.find_map(|piece| regions.check(&piece, Access::Read).err()).map_or(Status::Ok, status_of)
}

fn span_of(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr() as usize, len: bytes.len() }
}

const _: () = assert!(DESC_LEN * MAX_DESCS < CONTROL_LIMIT);
