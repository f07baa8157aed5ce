//! A byte pipe of in-memory queues.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::epoll;
use uccl_fabric::mem::Span;
use uccl_fabric::pipe::{Backlog, Pipe, PipeRx, PipeTx};

use super::Faults;
use super::bell::Bell;

/// One end of a [`pair`]: the pipe and its halves.
pub type ChaosEnd = (ChaosPipe, ChaosTx, ChaosRx);

/// The two ends of a pipe with the same faults in both directions.
///
/// # Errors
/// When descriptors run out.
pub fn pair(seed: u64, faults: Faults) -> io::Result<(ChaosEnd, ChaosEnd)> {
    pair_of(seed, faults.clone(), faults)
}

/// The two ends, A and B, of a pipe with faults of its own in each direction.
///
/// # Errors
/// When descriptors run out.
pub fn pair_of(seed: u64, a_to_b: Faults, b_to_a: Faults) -> io::Result<(ChaosEnd, ChaosEnd)> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let directions = [Direction::new(a_to_b, rng.fork()), Direction::new(b_to_a, rng.fork())];
    let bells = [Bells::new()?, Bells::new()?];
    let link = Arc::new(Link { directions: Mutex::new(directions), bells });
    Ok((end(&link, 0)?, end(&link, 1)?))
}

fn end(link: &Arc<Link>, end: usize) -> io::Result<ChaosEnd> {
    let watch = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let Bells { bytes, room } = &link.bells[end];
    for bell in [bytes, room] {
        epoll::add(&watch, bell.fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Ok((
        ChaosPipe { link: Arc::clone(link), end, watch },
        ChaosTx { link: Arc::clone(link), end },
        ChaosRx { link: Arc::clone(link), end },
    ))
}

/// One end of a [`pair`].
#[derive(Debug)]
pub struct ChaosPipe {
    link: Arc<Link>,
    end: usize,
    watch: OwnedFd,
}

/// The sending half of an end.
#[derive(Debug)]
pub struct ChaosTx {
    link: Arc<Link>,
    end: usize,
}

/// The receiving half of an end.
#[derive(Debug)]
pub struct ChaosRx {
    link: Arc<Link>,
    end: usize,
}

/// Both directions. Direction `i` carries the bytes that end `i` sends.
#[derive(Debug)]
struct Link {
    directions: Mutex<[Direction; 2]>,
    bells: [Bells; 2],
}

/// The bells that wake an end.
#[derive(Debug)]
struct Bells {
    bytes: Bell,
    room: Bell,
}

impl Bells {
    fn new() -> io::Result<Self> {
        Ok(Self { bytes: Bell::new()?, room: Bell::new()? })
    }
}

/// Bytes that were sent together.
#[derive(Debug)]
struct Chunk {
    bytes: Vec<u8>,
    taken: usize,
    /// Number of receives that find nothing first.
    polls: u32,
    /// Time of arrival; `None`: at once.
    due: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// The sent bytes arrive, and nothing after them.
    Eof,
    /// Nothing arrives any more.
    Reset,
}

/// The state that a receiver finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ready {
    Bytes,
    /// There are bytes, which show after more receives.
    Polls,
    At(Instant),
    Nothing,
    Ended(End),
}

#[derive(Debug)]
struct Direction {
    faults: Faults,
    rng: fastrand::Rng,
    chunks: VecDeque<Chunk>,
    queued: usize,
    sent: u64,
    last_due: Option<Instant>,
    stalled: bool,
    end: Option<End>,
    reader_waits: bool,
    writer_waits: bool,
}

impl Direction {
    fn new(faults: Faults, rng: fastrand::Rng) -> Self {
        Self {
            faults,
            rng,
            chunks: VecDeque::new(),
            queued: 0,
            sent: 0,
            last_due: None,
            stalled: false,
            end: None,
            reader_waits: false,
            writer_waits: false,
        }
    }

    /// Free bytes, but none until a quarter of the pipe is free: else a fast writer fills it with
    /// crumbs, each with a delay of its own.
    fn room(&self) -> usize {
        let capacity = self.faults.capacity_bytes.max(1);
        let room = capacity.saturating_sub(self.queued);
        if room >= capacity.div_ceil(4) { room } else { 0 }
    }

    /// Number of bytes that move now, of `possible` ones.
    fn part(&mut self, possible: usize) -> usize {
        match possible {
            0 => 0,
            _ if self.faults.split_bytes == usize::MAX => possible,
            _ => self.rng.usize(1..=self.faults.split_bytes.clamp(1, possible)),
        }
    }

    fn ready(&self) -> Ready {
        if self.end == Some(End::Reset) {
            return Ready::Ended(End::Reset);
        }
        if self.stalled {
            return Ready::Nothing;
        }
        match (self.chunks.front(), self.end) {
            (None, Some(end)) => Ready::Ended(end),
            (None, None) => Ready::Nothing,
            (Some(chunk), _) if chunk.polls > 0 => Ready::Polls,
            (Some(Chunk { due: Some(due), .. }), _) if *due > Instant::now() => Ready::At(*due),
            (Some(_), _) => Ready::Bytes,
        }
    }

    /// Arrival time of `len` bytes that are sent now.
    fn due(&mut self, len: usize) -> Option<Instant> {
        let Faults { delay, rate_bytes, .. } = self.faults;
        if delay.is_zero() && rate_bytes == 0 {
            return None;
        }
        let delay = delay.mul_f64(self.rng.f64());
        let taken = match rate_bytes {
            0 => Duration::ZERO,
            rate => Duration::from_secs_f64(len as f64 / rate as f64),
        };
        let now = Instant::now();
        let due = self.last_due.map_or(now, |last| last.max(now)) + taken;
        self.last_due = Some(due);
        Some(due + delay)
    }

    /// Takes bytes in. Returns their number, and whether they were the last before a cut.
    ///
    /// # Safety
    /// The spans must be readable.
    unsafe fn take_in(&mut self, spans: &[Span]) -> (usize, bool) {
        let total: usize = spans.iter().map(|span| span.len).sum();
        let until_cut = self.faults.cut_after.map_or(u64::MAX, |after| after - self.sent);
        let possible = total.min(self.room()).min(usize::try_from(until_cut).unwrap_or(usize::MAX));
        let len = self.part(possible);
        let mut bytes = Vec::with_capacity(len);
        for span in spans {
            let part = span.len.min(len - bytes.len());
            if part > 0 {
                // SAFETY: the caller promises that the spans are readable.
                let part = unsafe { std::slice::from_raw_parts(span.addr as *const u8, part) };
                bytes.extend_from_slice(part);
            }
        }
        if let Some(at) = self.faults.corrupt_at
            && (self.sent..self.sent + len as u64).contains(&at)
        {
            bytes[(at - self.sent) as usize] ^= self.rng.u8(1..);
        }
        self.sent += len as u64;
        if len > 0 {
            let polls = self.rng.u32(0..=self.faults.delay_polls);
            let due = self.due(len);
            self.queued += len;
            self.chunks.push_back(Chunk { bytes, taken: 0, polls, due });
        }
        (len, self.faults.cut_after == Some(self.sent))
    }

    /// Gives arrived bytes out, and returns their number.
    ///
    /// # Safety
    /// The spans must be writable.
    unsafe fn give_out(&mut self, spans: &[Span]) -> usize {
        let total = spans.iter().map(|span| span.len).sum();
        let mut limit = self.part(total);
        let mut given = 0;
        let mut spans = spans.iter();
        let mut to = Span { addr: 0, len: 0 };
        while limit > 0 && self.ready() == Ready::Bytes {
            let Some(chunk) = self.chunks.front_mut() else { break };
            while to.len == 0 {
                let Some(next) = spans.next() else { return given };
                to = *next;
            }
            let from = &chunk.bytes[chunk.taken..];
            let len = from.len().min(to.len).min(limit);
            // SAFETY: the caller promises that the spans are writable, and nothing else uses the
            // queue.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.addr as *mut u8, len) };
            to = Span { addr: to.addr + len, len: to.len - len };
            chunk.taken += len;
            limit -= len;
            given += len;
            self.queued -= len;
            if chunk.taken == chunk.bytes.len() {
                self.chunks.pop_front();
            }
        }
        given
    }

    fn finish(&mut self, end: End) {
        self.end.get_or_insert(end);
        if end == End::Reset {
            self.end = Some(end);
            self.chunks.clear();
            self.queued = 0;
        }
    }

    /// Wakes a sleeping reader if there is something for it.
    fn call_reader(&mut self, bell: &Bell) {
        if !self.reader_waits {
            return;
        }
        match self.ready() {
            Ready::Nothing => {}
            Ready::At(due) => bell.ring_at(due),
            Ready::Bytes | Ready::Polls | Ready::Ended(_) => {
                self.reader_waits = false;
                bell.ring();
            }
        }
    }

    /// Wakes a sleeping writer if there is room, or never will be any more.
    fn call_writer(&mut self, bell: &Bell) {
        if self.writer_waits && (self.room() > 0 || self.end.is_some()) {
            self.writer_waits = false;
            bell.ring();
        }
    }
}

impl Link {
    fn finish(&self, directions: &mut [Direction; 2], i: usize, end: End) {
        directions[i].finish(end);
        directions[i].call_reader(&self.bells[1 - i].bytes);
        directions[i].call_writer(&self.bells[i].room);
    }
}

impl ChaosPipe {
    /// Holds back all bytes of this end until [`resume`](Self::resume).
    pub fn stall(&self) {
        self.link.directions.lock()[self.end].stalled = true;
    }

    /// Ends a [`stall`](Self::stall).
    pub fn resume(&self) {
        let direction = &mut self.link.directions.lock()[self.end];
        direction.stalled = false;
        direction.call_reader(&self.link.bells[1 - self.end].bytes);
    }

    /// Bytes that this end has sent so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.link.directions.lock()[self.end].sent
    }
}

impl Pipe for ChaosPipe {
    type Tx = ChaosTx;
    type Rx = ChaosRx;

    const LINK: &'static str = "chaos";

    fn fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }

    fn room_is_writable(&self) -> bool {
        false
    }

    fn cut(&self) {
        let mut directions = self.link.directions.lock();
        // Bytes on their way to the peer may still arrive; bytes on their way to this end do not.
        self.link.finish(&mut directions, self.end, End::Eof);
        self.link.finish(&mut directions, 1 - self.end, End::Reset);
    }
}

impl PipeTx for ChaosTx {
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize> {
        let mut directions = self.link.directions.lock();
        if directions[self.end].end.is_some() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // SAFETY: the caller promises that the spans are readable.
        let (len, last) = unsafe { directions[self.end].take_in(spans) };
        directions[self.end].call_reader(&self.link.bells[1 - self.end].bytes);
        if last {
            for i in [0, 1] {
                let end = if directions[i].rng.bool() { End::Eof } else { End::Reset };
                self.link.finish(&mut directions, i, end);
            }
        }
        Ok(len)
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.link.bells[self.end].room.silence();
        let direction = &mut self.link.directions.lock()[self.end];
        direction.writer_waits = direction.room() == 0 && direction.end.is_none();
        Ok(direction.writer_waits)
    }
}

impl PipeRx for ChaosRx {
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>> {
        let mut directions = self.link.directions.lock();
        let direction = &mut directions[1 - self.end];
        match direction.ready() {
            Ready::Bytes => {}
            Ready::Ended(End::Eof) => return Ok(Some(0)),
            Ready::Ended(End::Reset) => return Err(io::ErrorKind::ConnectionReset.into()),
            Ready::Nothing | Ready::At(_) => return Ok(None),
            Ready::Polls => {
                if let Some(chunk) = direction.chunks.front_mut() {
                    chunk.polls -= 1;
                }
                return Ok(None);
            }
        }
        // SAFETY: the caller promises that the spans are writable.
        let given = unsafe { direction.give_out(spans) };
        direction.call_writer(&self.link.bells[1 - self.end].room);
        Ok(Some(given).filter(|given| *given > 0))
    }

    fn backlog(&mut self) -> Backlog {
        let direction = &self.link.directions.lock()[1 - self.end];
        Backlog { bytes: direction.queued, has_ended: direction.end.is_some() }
    }

    fn arm(&mut self) -> io::Result<bool> {
        let bell = &self.link.bells[self.end].bytes;
        bell.silence();
        let direction = &mut self.link.directions.lock()[1 - self.end];
        match direction.ready() {
            Ready::Nothing => {}
            Ready::At(due) => bell.ring_at(due),
            Ready::Bytes | Ready::Polls | Ready::Ended(_) => return Ok(false),
        }
        direction.reader_waits = true;
        Ok(true)
    }
}
