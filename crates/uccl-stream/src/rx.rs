//! The receiving half of a stream lane: reads frames, and puts their data in its place, straight
//! from the pipe where that is worth it.

mod begin;
mod device;
mod ends;
mod payload;
mod stall;

use std::{io, sync::atomic::AtomicBool};

use parking_lot::Mutex;
use uccl_device::cuda::{Direction, GpuError};
use uccl_fabric::{
    clock::coarse_ms,
    gpu::{CopyBy, PATIENCE, Staging, WordChange},
    lane::{LaneError, MessageSink, OpError, OpName, Spans},
    mem::{Access, LocatedSpan, Span},
    pieces::Stretch,
    pipe::PipeRx,
    region::RegionTable,
    signal::Word,
    status_of,
};
use uccl_wire::checked::{Crc, unseal};
use uccl_wire::frame::{
    Desc, HEADER_LEN, Header, Kind, Status, TRAILER_LEN, Trailer, decode_descs,
};

use self::stall::{PeerSign, StallWatch};
use super::{
    crc::add_span,
    ops::{Ops, ReadTarget},
    queue::Reply,
    remote_of,
    upload::{End, InboundChunk, Purpose, Upload},
};

/// Bytes read ahead of the frame they belong to. A whole message fits.
const STAGING: usize = 128 << 10;
/// How much is read when a header is expected.
const READ_AHEAD: usize = 32 << 10;
/// How much is read behind a payload, to get the next header as well.
const SPILL: usize = 4 << 10;
/// From this much remaining payload on, it is read straight into place.
const DIRECT: u64 = 4 << 10;
/// The most pieces filled by one receive.
const PIECES: usize = 256;
/// The most bytes that one pump receives, so that a fast peer leaves time for others.
const PUMP_BUDGET: usize = 1 << 20;

/// The frames and data that the receiving half has the sending half send.
#[derive(Default)]
pub(super) struct Answers {
    /// Frames that are only a header.
    pub(super) frames: Vec<Header>,
    /// Data that the peer asked for.
    pub(super) replies: Vec<Reply>,
    /// Reads of the peer's that it has stopped.
    pub(super) stopped: Vec<u64>,
}

impl Answers {
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.replies.is_empty() && self.stopped.is_empty()
    }

    fn ack(&mut self, op: u64, status: Status) {
        self.frames.push(Header::bare(Kind::Ack, op, status as u64));
    }
}

/// The parts of the lane that the receiving half uses.
pub(super) struct RxContext<'a> {
    pub(super) regions: &'a RegionTable,
    pub(super) ops: &'a Mutex<Ops>,
    pub(super) sink: &'a dyn MessageSink,
    /// Waits until a thread that is sending has recorded the sent bytes. Must not be called with
    /// the operations locked.
    pub(super) settle: &'a dyn Fn(),
    /// Must be set when a copy to a region starts, before the table's lock is released.
    pub(super) copying: &'a AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Header and descriptors are known. `sound`: the descriptors have passed their checksum, if
    /// they have one.
    Begin {
        sound: bool,
    },
    Descs,
    Header,
    Payload,
    Trailer,
}

/// A change of a word that a GPU is making. Nothing that came behind it is handled before its end.
enum PendingChange {
    /// The signal of a peer's write, which is answered then.
    Write { op: u64, change: WordChange },
    /// The signal is a message, with which the sink goes on.
    Message,
}

/// A write of the peer's that has come in part.
struct IncomingWrite {
    op: u64,
    status: Status,
}

/// The receiving half.
pub(super) struct Rx<P> {
    pub(super) pipe: P,
    pub(super) answers: Answers,
    staging: Box<[u8]>,
    start: usize,
    end: usize,
    state: State,
    header: Header,
    left: u64,
    crc: Option<Crc>,
    descs: Vec<Desc>,
    /// The signal of the current frame.
    word: Option<Word>,
    /// The destination of the payload that has not been placed: memory of the descriptors, or of
    /// the read.
    rest: Stretch,
    write: Option<IncomingWrite>,
    read: Option<(OpName, ReadTarget)>,
    /// The chunk that is being received for a GPU.
    filling: Option<InboundChunk>,
    /// Data on its way to GPUs, in the order in which it came.
    uploader: Staging<Upload>,
    changing: Option<PendingChange>,
    /// The GPU that is the destination of some or all of the payload.
    device: Option<u32>,
    /// Nothing more can be done before work of GPUs has ended.
    stalled: bool,
    /// Watches the peer while that is so.
    watch: Option<StallWatch>,
    /// The pipe is known to be cut: the peer counts on its writes landing no more.
    is_cut: bool,
    located: Vec<LocatedSpan>,
    message: Vec<u8>,
    iov: Vec<Span>,
}

impl<P: PipeRx> Rx<P> {
    pub(super) fn new(pipe: P, copy_by: &CopyBy) -> Self {
        Self {
            pipe,
            answers: Answers::default(),
            staging: vec![0; STAGING].into_boxed_slice(),
            start: 0,
            end: 0,
            state: State::Header,
            header: Header::bare(Kind::Ping, 0, 0),
            left: 0,
            crc: None,
            descs: Vec::new(),
            word: None,
            rest: Stretch::default(),
            write: None,
            read: None,
            filling: None,
            uploader: Staging::new(copy_by, Direction::HostToDevice),
            changing: None,
            device: None,
            stalled: false,
            watch: None,
            is_cut: false,
            located: Vec::new(),
            message: Vec::new(),
            iov: Vec::new(),
        }
    }

    /// Discards the data of this read, which was cancelled. False: some of it is being copied, and
    /// the read ends when that has landed.
    pub(super) fn discard(&mut self, name: OpName) -> bool {
        if let Some((current, target)) = &mut self.read
            && *current == name
        {
            target.failed.get_or_insert(OpError::Cancelled);
            target.spans = Spans::new();
        }
        let purpose = Purpose::Read(name);
        let is_uploading = self.is_uploading(purpose);
        if is_uploading {
            self.end_after_copies(purpose, End::Cancelled);
        }
        !is_uploading
    }

    /// Forgets everything, for a lane that dies.
    ///
    /// # Errors
    /// When copies by GPUs do not end.
    pub(super) fn reset(&mut self) -> Result<(), GpuError> {
        (self.read, self.write, self.filling, self.changing) = (None, None, None, None);
        (self.start, self.end) = (0, 0);
        self.uploader.clear(PATIENCE)
    }

    /// Receives the bytes that the pipe has. True if there were any, or work of GPUs has ended, or
    /// bytes have come that cannot be received before that.
    pub(super) fn pump(&mut self, around: &RxContext<'_>) -> Result<bool, LaneError> {
        let mut taken = 0;
        let landed = self.land(around);
        if std::mem::take(&mut self.stalled) {
            while self.step(around)? {}
        }
        while taken < PUMP_BUDGET && !self.stalled {
            let (got, wanted) = match self.receive(around)? {
                None => break,
                Some(counts) => counts,
            };
            taken += got;
            while self.step(around)? {}
            if got < wanted {
                // The pipe is most likely empty, and another look costs a system call.
                break;
            }
        }
        if taken > 0 || landed || !self.stalled {
            self.watch = None;
            return Ok(taken > 0 || landed);
        }
        let (watch, now_ms) = (self.watch.get_or_insert_default(), coarse_ms());
        if watch.owes_sign(now_ms) {
            self.answers.frames.push(Header::bare(Kind::Pong, 0, 0));
        }
        match watch.look(now_ms, || self.pipe.backlog()) {
            PeerSign::None => Ok(false),
            PeerSign::Heard => Ok(true),
            PeerSign::Ended => Err(LaneError::Ended),
        }
    }

    /// Receives once. Returns how much came and how much could have come.
    fn receive(&mut self, around: &RxContext<'_>) -> Result<Option<(usize, usize)>, LaneError> {
        let direct = self.state == State::Payload
            && self.start == self.end
            && self.left >= DIRECT
            && self.header.kind != Kind::Message;
        self.iov.clear();
        self.is_cut |= self.pipe.is_cut();
        if direct && let Some(device) = self.device_wanting_data() {
            return self.receive_for(device, around);
        }
        if direct && self.header.kind == Kind::Write {
            let guard = around.regions.lock();
            self.aim_at_regions(&guard);
            return self.receive_into(true);
        }
        if direct && let Some((_, target)) = &self.read {
            if target.failed.is_none() {
                let (spans, mut rest) = (&target.spans[..], self.rest);
                self.iov.extend(rest.take_parts(spans, self.left as usize).take(PIECES));
            }
            return self.receive_into(true);
        }
        self.receive_into(false)
    }

    /// Lists the destination memory of the rest of this write's payload, as far as the regions
    /// allow.
    fn aim_at_regions(&mut self, regions: &uccl_fabric::region::TableGuard<'_>) {
        if !self.write_ok() {
            return;
        }
        let mut rest = self.rest;
        for _ in 0..PIECES {
            let Some(desc) = rest.take_first(&self.descs[..], usize::MAX) else { break };
            match regions.check(&remote_of(&desc), Access::Write) {
                Ok(span) => self.iov.push(span),
                Err(e) => {
                    if self.iov.is_empty() {
                        self.fail_write(status_of(e));
                    }
                    break;
                }
            }
        }
    }

    fn receive_into(&mut self, direct: bool) -> Result<Option<(usize, usize)>, LaneError> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end + READ_AHEAD > STAGING {
            self.staging.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let direct_len: usize = self.iov.iter().map(|span| span.len).sum();
        let room = STAGING - self.end;
        let ahead = if !direct || direct_len == 0 {
            room.min(READ_AHEAD.max(self.wanted()))
        } else if direct_len as u64 == self.left {
            SPILL
        } else {
            0
        };
        if ahead > 0 {
            let spot = &mut self.staging[self.end..self.end + ahead];
            self.iov.push(Span { addr: spot.as_mut_ptr() as usize, len: ahead });
        }
        // SAFETY: the pieces are of our staging buffer; of regions checked under the lock that the
        // caller holds; or of a read, the memory of which stays valid until it has ended, and
        // ending it takes the lock that the caller holds.
        let got = match unsafe { self.pipe.recv(&self.iov) } {
            Ok(None) => return Ok(None),
            Ok(Some(0)) => return Err(LaneError::Ended),
            Ok(Some(got)) => got,
            Err(e) if e.raw_os_error() == Some(libc::EFAULT) && direct_len > 0 => {
                self.fault();
                return Ok(Some((1, 1)));
            }
            // No accident of one lane: an attacker interferes with the connection.
            Err(e) if e.kind() == io::ErrorKind::InvalidData => return Err(protocol(e)),
            Err(e) => return Err(e.into()),
        };
        let placed = got.min(direct_len);
        if placed > 0 {
            self.sum_placed(placed);
            self.placed(placed);
        }
        self.end += got - placed;
        Ok(Some((got, direct_len + ahead)))
    }

    /// How many bytes a message needs to be in one piece.
    fn wanted(&self) -> usize {
        match (self.state, self.header.kind) {
            (State::Payload, Kind::Message) => self.left as usize + TRAILER_LEN,
            _ => 0,
        }
    }

    /// Records that the memory of the payload cannot be written.
    fn fault(&mut self) {
        match self.header.kind {
            Kind::Write => self.fail_write(Status::Fault),
            _ => {
                if let Some((_, target)) = &mut self.read {
                    target.failed.get_or_insert(OpError::LocalFault);
                }
            }
        }
    }

    fn write_ok(&self) -> bool {
        !self.is_cut && self.write.as_ref().is_some_and(|write| write.status == Status::Ok)
    }

    fn fail_write(&mut self, status: Status) {
        if let Some(write) = &mut self.write
            && write.status == Status::Ok
        {
            write.status = status;
        }
    }

    fn sum_placed(&mut self, mut n: usize) {
        let Some(crc) = &mut self.crc else { return };
        for span in &self.iov {
            let len = span.len.min(n);
            // SAFETY: these bytes have just been received there.
            unsafe { add_span(crc, Span { addr: span.addr, len }) };
            n -= len;
            if n == 0 {
                break;
            }
        }
    }

    /// Records that `n` bytes of payload are in their place.
    fn placed(&mut self, n: usize) {
        match (&mut self.read, self.header.kind) {
            (Some((_, target)), Kind::Data) => {
                self.rest.cut(&target.spans[..], n);
                target.received += n as u64;
            }
            _ => {
                self.rest.cut(&self.descs[..], n);
            }
        }
        self.left -= n as u64;
    }

    /// Works on the bytes in the staging buffer; false when more are needed.
    fn step(&mut self, around: &RxContext<'_>) -> Result<bool, LaneError> {
        if self.changing.is_some() {
            self.stalled = true;
            return Ok(false);
        }
        match self.state {
            State::Header => {
                let Some(bytes) = self.staging[self.start..self.end].first_chunk::<HEADER_LEN>()
                else {
                    return Ok(false);
                };
                self.header = unseal(bytes).map_err(protocol)?;
                self.crc = self.header.checked.then(|| {
                    let mut crc = Crc::new();
                    crc.add(bytes);
                    crc
                });
                self.start += HEADER_LEN;
                self.state = State::Descs;
                Ok(true)
            }
            State::Descs => self.step_descs(),
            State::Begin { sound } => self.begin(sound, around),
            State::Payload => self.step_payload(around),
            State::Trailer => {
                let Some(bytes) = self.staging[self.start..self.end].first_chunk::<TRAILER_LEN>()
                else {
                    return Ok(false);
                };
                let trailer = self.trailer(bytes)?;
                self.start += TRAILER_LEN;
                self.state = State::Header;
                self.finish(trailer, around)?;
                Ok(true)
            }
        }
    }

    fn step_descs(&mut self) -> Result<bool, LaneError> {
        let have = &self.staging[self.start..self.end];
        let len = self.header.descs_len();
        let Some((bytes, rest)) = have.split_at_checked(len) else { return Ok(false) };
        let mut sound = true;
        if let Some(crc) = &mut self.crc
            && len > 0
        {
            let Some(trailer) = rest.first_chunk::<TRAILER_LEN>() else { return Ok(false) };
            crc.add(bytes);
            sound = *trailer == Crc::trailer(Some(crc), Status::Ok).encode();
            self.start += TRAILER_LEN;
        }
        self.start += len;
        self.descs.clear();
        self.word = None;
        if sound && matches!(self.header.kind, Kind::Read | Kind::Write) {
            let word = decode_descs(&self.header, bytes, &mut self.descs).map_err(protocol)?;
            let word = word.zip(self.header.signal);
            self.word = word.map(|(desc, change)| Word { span: remote_of(&desc), change });
        }
        self.state = State::Begin { sound };
        Ok(true)
    }

    /// Reads a trailer. A damaged one counts as a wrong checksum.
    fn trailer(&self, bytes: &[u8; TRAILER_LEN]) -> Result<(Trailer, bool), LaneError> {
        let trailer = Trailer::decode(bytes).map_err(protocol)?;
        let sound = Crc::admits(self.crc.as_ref(), &trailer);
        Ok((trailer, sound && (self.crc.is_none() || trailer.encode() == *bytes)))
    }
}

fn protocol(e: impl std::fmt::Display) -> LaneError {
    LaneError::Protocol(e.to_string())
}

fn unexpected(what: &str) -> LaneError {
    LaneError::Protocol(what.to_owned())
}
