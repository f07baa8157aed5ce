//! The receiving half of a stream lane: reads frames, and puts their data where it belongs, straight
//! from the pipe wherever that is worth it.

mod device;

use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use uccl_wire::checked::{Crc, unseal};
use uccl_wire::frame::{
    DESC_LEN, Desc, HEADER_LEN, Header, Kind, Status, TRAILER_LEN, Trailer, decode_descs,
};

use super::{
    crc::add_span,
    cursor::Cursor,
    ops::{InFlight, Ops, ReadTarget, Sent},
    remote_of,
    tx::Reply,
    upload::{End, Purpose, Uploader},
};
use crate::{
    gpu::CopyBy,
    lane::{LaneError, MessageSink, OpError, OpKind, OpName, OpResult},
    mem::{Access, Located, Span},
    pipe::PipeRx,
    region::{AccessError, RegionTable},
    status_of,
};

/// Bytes read ahead of the frame they belong to. A whole message fits.
const STAGING: usize = 128 << 10;
/// How much is read when a header is expected.
const READ_AHEAD: usize = 32 << 10;
/// How much is read behind a payload, in the hope of the next header.
const SPILL: usize = 4 << 10;
/// Payload left from which on it is read straight into place.
const DIRECT: u64 = 4 << 10;
/// Pieces filled by one receive.
const PIECES: usize = 256;
/// What one pump takes at most, so that a fast peer leaves time for others.
const PUMP_BUDGET: usize = 4 << 20;

/// What the receiving half has for the sending half.
#[derive(Default)]
pub(super) struct Answers {
    /// Frames of nothing but a header.
    pub(super) frames: Vec<Header>,
    /// Data the peer asked for.
    pub(super) replies: Vec<Reply>,
}

impl Answers {
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.replies.is_empty()
    }

    fn ack(&mut self, op: u64, status: Status) {
        self.frames.push(Header::bare(Kind::Ack, op, status as u64));
    }
}

/// What the receiving half works with.
pub(super) struct Surroundings<'a> {
    pub(super) regions: &'a RegionTable,
    pub(super) ops: &'a Mutex<Ops>,
    pub(super) sink: &'a dyn MessageSink,
    /// Waits until whoever is sending has noted what he has sent. Not to be called with the operations
    /// locked.
    pub(super) settle: &'a dyn Fn(),
    /// To be set when a copy to a region starts, before the table is let go.
    pub(super) copying: &'a AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Header and descriptors are known; the latter are sound, or not.
    Begin {
        sound: bool,
    },
    Descs,
    Header,
    Payload,
    Trailer,
}

/// A write of the peer that came in part.
struct Incoming {
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
    at: Cursor,
    write: Option<Incoming>,
    read: Option<(OpName, ReadTarget)>,
    uploader: Uploader,
    /// The GPU that payload goes to, all of it or some.
    device: Option<u32>,
    /// Nothing more can be done before copies of GPUs have ended.
    stalled: bool,
    located: Vec<Located>,
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
            at: Cursor::default(),
            write: None,
            read: None,
            uploader: Uploader::new(copy_by),
            device: None,
            stalled: false,
            located: Vec::new(),
            message: Vec::new(),
            iov: Vec::new(),
        }
    }

    /// The read being filled right now, if it is this one, is to be thrown away.
    pub(super) fn discard(&mut self, name: OpName) {
        if let Some((current, target)) = &mut self.read
            && *current == name
        {
            target.failed.get_or_insert(OpError::Cancelled);
            target.spans.clear();
        }
        if !self.uploader.is_idle() {
            self.uploader.settle();
        }
    }

    /// Forgets everything, for a lane that dies.
    pub(super) fn reset(&mut self) {
        self.uploader.clear();
        self.read = None;
        self.write = None;
        (self.start, self.end) = (0, 0);
    }

    /// Takes what the pipe has; says whether there was anything.
    pub(super) fn pump(&mut self, around: &Surroundings<'_>) -> Result<bool, LaneError> {
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
                // The pipe is drained, most likely: asking again costs a system call.
                break;
            }
        }
        Ok(taken > 0 || landed)
    }

    /// One receive. Says how much came and how much could have.
    fn receive(&mut self, around: &Surroundings<'_>) -> Result<Option<(usize, usize)>, LaneError> {
        let direct = self.state == State::Payload
            && self.start == self.end
            && self.left >= DIRECT
            && self.header.kind != Kind::Message;
        self.iov.clear();
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
                self.at.ahead(&target.spans, self.left as usize, PIECES, &mut self.iov);
            }
            return self.receive_into(true);
        }
        self.receive_into(false)
    }

    /// Lists where the rest of this write's payload goes, as far as the regions allow.
    fn aim_at_regions(&mut self, regions: &crate::region::Locked<'_>) {
        if !self.write_ok() {
            return;
        }
        let mut offset = self.at.offset as u64;
        for desc in self.descs.iter().skip(self.at.index).take(PIECES) {
            match regions.check(&remote_of(desc), Access::Write) {
                Ok(span) => self.iov.push(Span {
                    addr: span.addr + offset as usize,
                    len: span.len - offset as usize,
                }),
                Err(e) => {
                    if self.iov.is_empty() {
                        self.fail_write(status_of(e));
                    }
                    break;
                }
            }
            offset = 0;
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
        // caller holds; or of a read whose memory stays valid until it has ended, which takes the lock
        // that the caller holds.
        let got = match unsafe { self.pipe.recv(&self.iov) } {
            Ok(None) => return Ok(None),
            Ok(Some(0)) => return Err(LaneError::Ended),
            Ok(Some(got)) => got,
            Err(e) if e.raw_os_error() == Some(libc::EFAULT) && direct_len > 0 => {
                self.fault();
                return Ok(Some((1, 1)));
            }
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

    /// For a message, enough to have it in one piece.
    fn wanted(&self) -> usize {
        match (self.state, self.header.kind) {
            (State::Payload, Kind::Message) => self.left as usize + TRAILER_LEN,
            _ => 0,
        }
    }

    /// The memory that payload goes to cannot be written.
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
        self.write.as_ref().is_some_and(|write| write.status == Status::Ok)
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

    /// Notes that `n` bytes of payload are where they belong.
    fn placed(&mut self, n: usize) {
        match (&mut self.read, self.header.kind) {
            (Some((_, target)), Kind::Data) => {
                let spans = &target.spans;
                self.at.advance(|i| spans.get(i).map(|span| span.len), n);
                target.received += n as u64;
            }
            _ => self.at.advance(|i| self.descs.get(i).map(|desc| desc.len as usize), n),
        }
        self.left -= n as u64;
    }

    /// Works on what is in the staging buffer; false when more is needed.
    fn step(&mut self, around: &Surroundings<'_>) -> Result<bool, LaneError> {
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
        let len = usize::from(self.header.descs) * DESC_LEN;
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
        if sound && matches!(self.header.kind, Kind::Read | Kind::Write) {
            decode_descs(&self.header, bytes, &mut self.descs).map_err(protocol)?;
        }
        self.state = State::Begin { sound };
        Ok(true)
    }

    /// Reads a trailer; a damaged one is a wrong checksum.
    fn trailer(&self, bytes: &[u8; TRAILER_LEN]) -> Result<(Trailer, bool), LaneError> {
        let trailer = Trailer::decode(bytes).map_err(protocol)?;
        let sound = Crc::admits(self.crc.as_ref(), &trailer);
        Ok((trailer, sound && (self.crc.is_none() || trailer.encode() == *bytes)))
    }

    /// Header and descriptors are known; the latter only if they are sound. False: not before what came
    /// earlier has landed.
    fn begin(&mut self, sound: bool, around: &Surroundings<'_>) -> Result<bool, LaneError> {
        let targets = match self.header.kind {
            Kind::Write => self.targets(around),
            _ => Ok(Targets::default()),
        };
        if self.must_wait(&targets) {
            self.stalled = true;
            return Ok(false);
        }
        self.left = self.header.len;
        self.at = Cursor::default();
        self.device = None;
        self.state = if self.header.kind.has_trailer() { State::Payload } else { State::Header };
        let op = self.header.op;
        match self.header.kind {
            Kind::Write => self.begin_write(sound, targets, around),
            Kind::Read if !sound => self.answers.ack(op, Status::Checksum),
            Kind::Read => self.asked(around)?,
            Kind::Data => self.begin_data(around)?,
            Kind::Ack => self.acked(around)?,
            Kind::Fence => {
                self.write = None;
                self.answers.ack(op, Status::Cut);
            }
            Kind::Ping => {
                self.answers.frames.push(Header::bare(Kind::Pong, op, 0));
            }
            Kind::Message => self.message.clear(),
            Kind::Pong => {}
            Kind::Bye => return Err(LaneError::Closed),
            Kind::Establish => return Err(unexpected("a second establish")),
        }
        Ok(true)
    }

    fn begin_write(
        &mut self,
        sound: bool,
        targets: Result<Targets, AccessError>,
        around: &Surroundings<'_>,
    ) {
        let op = self.header.op;
        if self.write.as_ref().is_none_or(|write| write.op != op) {
            self.write = Some(Incoming { op, status: Status::Ok });
        }
        match targets {
            Ok(targets) => self.device = targets.device,
            Err(e) => {
                around.regions.note_refusal();
                self.fail_write(status_of(e));
            }
        }
        if !sound {
            self.fail_write(Status::Checksum);
        }
    }

    /// The peer asks for data.
    fn asked(&mut self, around: &Surroundings<'_>) -> Result<(), LaneError> {
        match self.locate_all(Access::Read, around) {
            Err(e) => {
                around.regions.note_refusal();
                self.answers.ack(self.header.op, status_of(e));
            }
            Ok(targets) => {
                let pieces = std::mem::take(&mut self.descs);
                let is_fetched = targets.device.is_some();
                self.answers.replies.push(Reply::new(self.header.op, pieces, is_fetched));
            }
        }
        Ok(())
    }

    /// Data for a read of ours begins.
    fn begin_data(&mut self, around: &Surroundings<'_>) -> Result<(), LaneError> {
        let name = OpName(self.header.op);
        let mut ops = around.ops.lock();
        let asked = ops.get_mut(name).filter(|op| op.sent == Sent::All);
        let Some((len, target)) = asked.and_then(|op| Some((op.len, op.target.take()?))) else {
            return Err(unexpected("data for a read that was not asked"));
        };
        if target.received + self.header.len > len {
            return Err(unexpected("more data than was asked for"));
        }
        self.at = target.at;
        self.device = target.device;
        self.read = Some((name, target));
        Ok(())
    }

    /// The peer has ended one of our operations.
    fn acked(&mut self, around: &Surroundings<'_>) -> Result<(), LaneError> {
        let name = OpName(self.header.op);
        let status = self.header.status();
        let mut ops = around.ops.lock();
        if ops.get_mut(name).is_some_and(|op| op.sent != Sent::All) {
            // Its last byte may have left just now.
            drop(ops);
            (around.settle)();
            ops = around.ops.lock();
        }
        match ops.get_mut(name) {
            None => return Err(unexpected("an ack for nothing")),
            // Its memory is still being sent from: it cannot end.
            Some(op) if op.sent != Sent::All => {
                return Err(unexpected("an ack for what has not been sent"));
            }
            Some(op) if op.kind == OpKind::Read && status == Status::Ok => {
                return Err(unexpected("a read that ends without data"));
            }
            Some(_) => {}
        }
        let Some(op) = ops.remove(name) else { return Ok(()) };
        drop(ops);
        let result = match status {
            Status::Ok => Ok(()),
            Status::Cut => Err(OpError::Cancelled),
            status => Err(OpError::Remote(status)),
        };
        op.done.complete(op.doomed.map_or(result, Err));
        Ok(())
    }

    fn step_payload(&mut self, around: &Surroundings<'_>) -> Result<bool, LaneError> {
        let have = self.end - self.start;
        if self.left == 0 {
            self.state = State::Trailer;
            self.upload(around);
            return Ok(true);
        }
        if have == 0 {
            return Ok(false);
        }
        let n = (have as u64).min(self.left) as usize;
        if self.header.kind == Kind::Message {
            return self.step_message(n, around);
        }
        let from = self.start;
        let device = self.device_wanting_data();
        let n = match device {
            Some(device) => n.min(self.room_for(device).map_or(0, |room| room.len)),
            None => n,
        };
        if n == 0 {
            return Ok(!self.stalled);
        }
        if let Some(crc) = &mut self.crc {
            crc.add(&self.staging[from..from + n]);
        }
        match self.header.kind {
            _ if device.is_some() => self.place_for_device(from, n),
            Kind::Write => self.place_write(from, n, around),
            _ => self.place_data(from, n),
        }
        self.placed(n);
        self.start += n;
        if self.uploader.is_full() {
            self.upload(around);
        }
        Ok(true)
    }

    /// A message is handed over from the staging buffer if it is there in one piece.
    fn step_message(&mut self, n: usize, around: &Surroundings<'_>) -> Result<bool, LaneError> {
        let whole = self.message.is_empty() && n as u64 == self.header.len;
        let len = n + TRAILER_LEN;
        if whole && self.end - self.start >= len {
            let bytes = &self.staging[self.start..self.start + len];
            let (payload, trailer) = bytes.split_at(n);
            if let Some(crc) = &mut self.crc {
                crc.add(payload);
            }
            self.start += len;
            self.left = 0;
            self.state = State::Header;
            let Some(trailer) = trailer.first_chunk() else { return Ok(false) };
            let (_, crc_ok) = self.trailer(trailer)?;
            return deliver(crc_ok, payload, around).map(|()| true);
        }
        if whole {
            return Ok(false);
        }
        let bytes = &self.staging[self.start..self.start + n];
        if let Some(crc) = &mut self.crc {
            crc.add(bytes);
        }
        self.message.extend_from_slice(bytes);
        self.start += n;
        self.left -= n as u64;
        Ok(true)
    }

    /// Copies payload from the staging buffer into the regions it is for.
    fn place_write(&mut self, from: usize, n: usize, around: &Surroundings<'_>) {
        let guard = around.regions.lock();
        let mut at = self.at;
        let mut done = 0;
        while done < n && self.write_ok() {
            let Some(desc) = self.descs.get(at.index) else { return };
            match guard.check(&remote_of(desc), Access::Write) {
                Ok(span) => {
                    let len = (span.len - at.offset).min(n - done);
                    let to = Span { addr: span.addr + at.offset, len };
                    // SAFETY: inside a region, checked under the lock that is held.
                    unsafe { fill(to, &self.staging[from + done..from + done + len]) };
                    done += len;
                    at.advance(|i| self.descs.get(i).map(|desc| desc.len as usize), len);
                }
                Err(e) => self.fail_write(status_of(e)),
            }
        }
    }

    /// Copies payload from the staging buffer into the memory of our read.
    fn place_data(&self, from: usize, n: usize) {
        let Some((_, target)) = &self.read else { return };
        if target.failed.is_some() {
            return;
        }
        let mut at = self.at;
        let mut done = 0;
        while done < n {
            let Some(span) = target.spans.get(at.index) else { return };
            let len = (span.len - at.offset).min(n - done);
            let to = Span { addr: span.addr + at.offset, len };
            // SAFETY: the memory of a read stays valid until it has ended.
            unsafe { fill(to, &self.staging[from + done..from + done + len]) };
            done += len;
            at.advance(|i| target.spans.get(i).map(|span| span.len), len);
        }
    }

    /// The trailer of a frame is here.
    fn finish(
        &mut self,
        (trailer, crc_ok): (Trailer, bool),
        around: &Surroundings<'_>,
    ) -> Result<(), LaneError> {
        match self.header.kind {
            Kind::Write => {
                if trailer.status != Status::Ok {
                    self.fail_write(trailer.status);
                } else if !crc_ok {
                    self.fail_write(Status::Checksum);
                }
                if self.header.last
                    && let Some(write) = self.write.take()
                {
                    if self.uploader.is_idle() {
                        self.answers.ack(write.op, write.status);
                    } else {
                        self.uploader.end(Purpose::Write(write.op), End::Ack(write.status));
                    }
                }
            }
            Kind::Data => self.finish_data(trailer.status, crc_ok, around)?,
            Kind::Message => {
                let message = std::mem::take(&mut self.message);
                deliver(crc_ok, &message, around)?;
                self.message = message;
            }
            _ => {}
        }
        Ok(())
    }

    fn finish_data(
        &mut self,
        status: Status,
        crc_ok: bool,
        around: &Surroundings<'_>,
    ) -> Result<(), LaneError> {
        let Some((name, mut target)) = self.read.take() else { return Ok(()) };
        if status != Status::Ok {
            target.failed.get_or_insert(OpError::Remote(status));
        } else if !crc_ok {
            target.failed.get_or_insert(OpError::Checksum);
        }
        let mut ops = around.ops.lock();
        if !self.header.last {
            if let Some(op) = ops.get_mut(name) {
                target.at = self.at;
                op.target = Some(target);
            }
            return Ok(());
        }
        if target.device.is_some() && !self.uploader.is_idle() {
            self.uploader.end(Purpose::Read(name), End::Data(target));
            return Ok(());
        }
        let Some(op) = ops.remove(name) else { return Ok(()) };
        drop(ops);
        let result = read_result(&op, &target);
        op.done.complete(result);
        Ok(())
    }
}

/// What the descriptors of a frame name.
#[derive(Clone, Copy, Default)]
struct Targets {
    /// The GPU that some of it is on.
    device: Option<u32>,
    /// Some of it is the host's.
    host: bool,
}

fn read_result(op: &InFlight, target: &ReadTarget) -> OpResult {
    match op.doomed.as_ref().or(target.failed.as_ref()) {
        Some(e) => Err(e.clone()),
        None if target.received != op.len => Err(OpError::Remote(Status::Protocol)),
        None => Ok(()),
    }
}

fn deliver(crc_ok: bool, message: &[u8], around: &Surroundings<'_>) -> Result<(), LaneError> {
    if !crc_ok {
        return Err(unexpected("a message with a wrong checksum"));
    }
    around.sink.message(message).map_err(LaneError::Protocol)
}

fn protocol(e: impl std::fmt::Display) -> LaneError {
    LaneError::Protocol(e.to_string())
}

fn unexpected(what: &str) -> LaneError {
    LaneError::Protocol(what.to_owned())
}

/// Copies `bytes` to memory that belongs to a caller.
///
/// # Safety
/// The span must be writable, and as long as `bytes`.
unsafe fn fill(to: Span, bytes: &[u8]) {
    debug_assert_eq!(to.len, bytes.len());
    // SAFETY: as the caller promises; our staging buffer is nobody else's.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.addr as *mut u8, bytes.len()) }
}
