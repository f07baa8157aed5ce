//! A byte ring in shared memory: one process puts bytes in, the other takes them out.
//!
//! Layout, in bytes from the start (all words are 64-bit; each side's on cache lines of its own):
//!
//! | at | word | written by |
//! | --- | --- | --- |
//! | 0 | head: bytes ever put in | producer |
//! | 8 | closed: the producer will put no more | producer |
//! | 128 | tail: bytes ever taken out | consumer |
//! | 136 | gone: the consumer will take no more | consumer |
//! | 256 | asleep: the consumer wants to be woken when there is data | both |
//! | 384 | waiting: the producer wants to be woken when there is space | both |
//! | 512 | the bytes | producer |
//!
//! To sleep, a side sets its sleep word and then reads the other side's index once more. The other
//! side moves its index and then reads the sleep word. Both put a sequentially consistent fence
//! between the two steps, so at least one side sees the other's first step, and no wake-up is lost.
//! Sleep words are changed only by swaps, so that each change follows the one before.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uccl_fabric::guarded::{self, UnmappedMemory};
use uccl_fabric::mem::Span;
use uccl_fabric::pipe::{Backlog, PipeRx, PipeTx};

use super::segment::{MapMode, Mapping, Words};
use super::sync::Word;

const HEAD: usize = 0;
const CLOSED: usize = 1;
const TAIL: usize = 16;
const GONE: usize = 17;
const ASLEEP: usize = 32;
const WAITING: usize = 48;
const HEADER_WORDS: usize = 64;
const HEADER_BYTES: usize = HEADER_WORDS * 8;

/// Where a ring lies.
pub(crate) trait Storage {
    type Word: Word;
    /// The words of the header.
    fn word(&self, at: usize) -> &Self::Word;
    /// How many bytes it holds; a power of two.
    fn capacity(&self) -> usize;
    /// Copies `len` bytes in at `at`. Fails where they are not mapped.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes, as far as it is mapped, and `at + len` at most the
    /// capacity.
    unsafe fn put(&self, at: usize, from: *const u8, len: usize) -> Result<(), UnmappedMemory>;
    /// Copies `len` bytes out from `at`. Fails where there is nothing mapped for them.
    ///
    /// # Safety
    /// `to` must be writable for `len` bytes, as far as it is mapped, and `at + len` at most the
    /// capacity.
    unsafe fn take(&self, at: usize, to: *mut u8, len: usize) -> Result<(), UnmappedMemory>;
}

/// The error for an invalid index that the peer wrote.
#[cold]
fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer broke the shared ring")
}

fn total(spans: &[Span]) -> usize {
    spans.iter().fold(0, |sum, span| sum.saturating_add(span.len))
}

/// Calls `step(position, address, length)` for the pieces of `spans` that make up `bytes` bytes
/// from ring position `index` on. Each piece is contiguous on both sides.
#[inline(always)]
fn pieces(
    spans: &[Span],
    index: u64,
    bytes: usize,
    capacity: usize,
    mut step: impl FnMut(usize, usize, usize) -> Result<(), UnmappedMemory>,
) -> io::Result<()> {
    let mut done = 0;
    for span in spans {
        let len = span.len.min(bytes - done);
        let at = (index.wrapping_add(done as u64) as usize) & (capacity - 1);
        let before_wrap = len.min(capacity - at);
        step(at, span.addr, before_wrap)?;
        if before_wrap < len {
            step(0, span.addr + before_wrap, len - before_wrap)?;
        }
        done += len;
        if done == bytes {
            break;
        }
    }
    Ok(())
}

/// The producer.
#[derive(Debug)]
pub(crate) struct Producer<S> {
    storage: S,
    head: u64,
    /// The consumer's index as last seen.
    tail: u64,
}

impl<S: Storage> Producer<S> {
    pub(crate) fn new(storage: S) -> Self {
        Self { storage, head: 0, tail: 0 }
    }

    #[inline(always)]
    fn space(&self) -> usize {
        self.storage.capacity() - self.head.wrapping_sub(self.tail) as usize
    }

    fn look(&mut self) -> io::Result<()> {
        let tail = self.storage.word(TAIL).load(Ordering::Acquire);
        // A valid tail is between its last value and the head.
        if tail.wrapping_sub(self.tail) > self.head.wrapping_sub(self.tail) {
            return Err(nonsense());
        }
        self.tail = tail;
        if self.storage.word(GONE).load(Ordering::Relaxed) != 0 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    }

    /// Where a span is not mapped, nothing is sent.
    ///
    /// # Safety
    /// Every span must be readable, as far as it is mapped.
    #[inline]
    pub(crate) unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize> {
        let want = total(spans);
        if self.space() < want {
            self.look()?;
        }
        let bytes = want.min(self.space());
        if bytes == 0 {
            return Ok(0);
        }
        let storage = &self.storage;
        pieces(spans, self.head, bytes, storage.capacity(), |at, from, len| {
            // SAFETY: the caller's promise; `pieces` keeps within the ring.
            unsafe { storage.put(at, from as *const u8, len) }
        })?;
        self.head = self.head.wrapping_add(bytes as u64);
        self.storage.word(HEAD).store(self.head, Ordering::Release);
        Ok(bytes)
    }

    pub(crate) fn close(&self) {
        self.storage.word(CLOSED).store(1, Ordering::Release);
    }

    #[inline]
    pub(crate) fn reader_needs_wake(&self) -> bool {
        S::Word::fence(Ordering::SeqCst);
        let asleep = self.storage.word(ASLEEP);
        asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::AcqRel) != 0
    }

    pub(crate) fn prepare_wait_space(&self) -> bool {
        let waiting = self.storage.word(WAITING);
        waiting.swap(1, Ordering::AcqRel);
        S::Word::fence(Ordering::SeqCst);
        let tail = self.storage.word(TAIL).load(Ordering::Acquire);
        let full = self.head.wrapping_sub(tail) == self.storage.capacity() as u64;
        if full && self.storage.word(GONE).load(Ordering::Acquire) == 0 {
            return true;
        }
        waiting.swap(0, Ordering::AcqRel);
        false
    }

    pub(crate) fn awake(&self) {
        self.storage.word(WAITING).swap(0, Ordering::AcqRel);
    }
}

/// The consumer.
#[derive(Debug)]
pub(crate) struct Consumer<S> {
    storage: S,
    tail: u64,
    /// The producer's index as last seen.
    head: u64,
}

impl<S: Storage> Consumer<S> {
    pub(crate) fn new(storage: S) -> Self {
        Self { storage, tail: 0, head: 0 }
    }

    #[inline(always)]
    fn look(&mut self) -> io::Result<()> {
        let head = self.storage.word(HEAD).load(Ordering::Acquire);
        let ahead = head.wrapping_sub(self.tail);
        // A valid head is between its last value and that of a full ring.
        if ahead > self.storage.capacity() as u64 || ahead < self.head.wrapping_sub(self.tail) {
            return Err(nonsense());
        }
        self.head = head;
        Ok(())
    }

    /// Where a span is not mapped, nothing is taken out.
    ///
    /// # Safety
    /// Every span must be writable, as far as it is mapped.
    #[inline]
    pub(crate) unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>> {
        if self.head == self.tail {
            self.look()?;
            if self.head == self.tail {
                return self.drained();
            }
        }
        let there = self.head.wrapping_sub(self.tail) as usize;
        let bytes = total(spans).min(there);
        if bytes == 0 {
            return Ok(None);
        }
        let storage = &self.storage;
        pieces(spans, self.tail, bytes, storage.capacity(), |at, to, len| {
            // SAFETY: the caller's promise; `pieces` keeps within the ring.
            unsafe { storage.take(at, to as *mut u8, len) }
        })?;
        self.tail = self.tail.wrapping_add(bytes as u64);
        self.storage.word(TAIL).store(self.tail, Ordering::Release);
        Ok(Some(bytes))
    }

    /// Whether there is something to receive.
    #[inline]
    pub(crate) fn has_bytes(&self) -> bool {
        self.head != self.tail || self.storage.word(HEAD).load(Ordering::Acquire) != self.tail
    }

    /// Looks at what has come. A head that lies too far ahead is reported by the next receive.
    fn backlog(&self) -> Backlog {
        let has_ended = self.storage.word(CLOSED).load(Ordering::Acquire) != 0;
        let head = self.storage.word(HEAD).load(Ordering::Acquire);
        Backlog { bytes: head.wrapping_sub(self.tail) as usize, has_ended }
    }

    /// The result for an empty ring: no bytes yet, or the end.
    fn drained(&mut self) -> io::Result<Option<usize>> {
        if self.storage.word(CLOSED).load(Ordering::Acquire) == 0 {
            return Ok(None);
        }
        // The producer put the last bytes in before it closed the ring.
        self.look()?;
        Ok((self.head == self.tail).then_some(0))
    }

    pub(crate) fn close(&self) {
        self.storage.word(GONE).store(1, Ordering::Release);
    }

    pub(crate) fn prepare_sleep(&self) -> bool {
        let asleep = self.storage.word(ASLEEP);
        asleep.swap(1, Ordering::AcqRel);
        S::Word::fence(Ordering::SeqCst);
        let empty = self.storage.word(HEAD).load(Ordering::Acquire) == self.tail;
        if empty && self.storage.word(CLOSED).load(Ordering::Acquire) == 0 {
            return true;
        }
        asleep.swap(0, Ordering::AcqRel);
        false
    }

    pub(crate) fn awake(&self) {
        self.storage.word(ASLEEP).swap(0, Ordering::AcqRel);
    }

    #[inline]
    pub(crate) fn writer_needs_wake(&self) -> bool {
        S::Word::fence(Ordering::SeqCst);
        let waiting = self.storage.word(WAITING);
        waiting.load(Ordering::Relaxed) != 0 && waiting.swap(0, Ordering::AcqRel) != 0
    }
}

/// A ring in a shared segment.
#[derive(Clone, Debug)]
struct SharedRing {
    words: Words,
    bytes: *mut u8,
    capacity: usize,
}

// SAFETY: `bytes` points into the segment that `words` keeps mapped, for any thread.
unsafe impl Send for SharedRing {}

impl Storage for SharedRing {
    type Word = AtomicU64;

    #[inline(always)]
    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words.as_slice()[at]
    }

    #[inline(always)]
    fn capacity(&self) -> usize {
        self.capacity
    }

    #[inline(always)]
    unsafe fn put(&self, at: usize, from: *const u8, len: usize) -> Result<(), UnmappedMemory> {
        // SAFETY: the caller's promise; the segment has `capacity` bytes at `bytes`.
        unsafe { guarded::copy(from, self.bytes.add(at), len) }
    }

    #[inline(always)]
    unsafe fn take(&self, at: usize, to: *mut u8, len: usize) -> Result<(), UnmappedMemory> {
        // SAFETY: as above.
        unsafe { guarded::copy(self.bytes.add(at), to, len) }
    }
}

/// A ring in a shared segment. This process becomes one side of it.
#[derive(Debug)]
pub struct ByteRing {
    shared: SharedRing,
}

impl ByteRing {
    /// How many bytes of shared memory a ring of `capacity` bytes takes.
    #[must_use]
    pub const fn layout_len(capacity: usize) -> usize {
        HEADER_BYTES + capacity
    }

    /// The ring of `capacity` bytes (a power of two) at byte `offset` of a segment. Its bytes there
    /// must be zero when the first of the two sides is made.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when it does not fit, `offset` is no multiple of 8 (128 is
    /// better), `capacity` is no power of two, or the mapping is read-only.
    pub fn new(segment: &Arc<Mapping>, offset: usize, capacity: usize) -> io::Result<Self> {
        let end = capacity.checked_add(HEADER_BYTES).and_then(|len| len.checked_add(offset));
        let fits = end.is_some_and(|end| end <= segment.len());
        if !fits || !capacity.is_power_of_two() || segment.mode() != MapMode::ReadWrite {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let words = Words::new(segment, offset, HEADER_WORDS)?;
        let bytes = segment.as_ptr().wrapping_add(offset + HEADER_BYTES);
        Ok(Self { shared: SharedRing { words, bytes, capacity } })
    }

    /// Becomes its producer. There must be only one, here and at the peer together, and the ring
    /// must be new: a second producer garbles the bytes.
    #[must_use]
    pub fn into_tx(self) -> RingTx {
        RingTx { core: Producer::new(self.shared) }
    }

    /// Becomes its consumer. There must be only one, here and at the peer together, and the ring
    /// must be new.
    #[must_use]
    pub fn into_rx(self) -> RingRx {
        RingRx { core: Consumer::new(self.shared) }
    }
}

/// The producer of a [`ByteRing`].
///
/// This side stays within the ring even if the peer writes invalid words there. An invalid index is
/// [`io::ErrorKind::InvalidData`].
#[derive(Debug)]
pub struct RingTx {
    core: Producer<SharedRing>,
}

impl RingTx {
    /// Tells the consumer that no more bytes will come. The consumer takes out the bytes that are
    /// there and then sees the end. Ask [`reader_needs_wake`](Self::reader_needs_wake) afterwards.
    pub fn close(&mut self) {
        self.core.close();
    }

    /// Whether the consumer sleeps, and must be woken for bytes (or an end) sent before this call.
    /// True once for each sleep.
    #[inline]
    #[must_use]
    pub fn reader_needs_wake(&mut self) -> bool {
        self.core.reader_needs_wake()
    }

    /// Asks to be woken when there is space in a full ring. `false` when there is some already (or
    /// the consumer is gone): then send instead of sleeping.
    #[must_use]
    pub fn prepare_wait_space(&mut self) -> bool {
        self.core.prepare_wait_space()
    }

    /// Takes back [`prepare_wait_space`](Self::prepare_wait_space).
    pub fn awake(&mut self) {
        self.core.awake();
    }
}

impl PipeTx for RingTx {
    /// [`io::ErrorKind::BrokenPipe`] once the consumer has closed, which is noticed when the ring
    /// looks full. `EFAULT` for memory that is not mapped: nothing was sent then.
    #[inline]
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        unsafe { self.core.send(spans) }
    }
}

/// The consumer of a [`ByteRing`].
///
/// This side stays within the ring even if the peer writes invalid words there. An invalid index is
/// [`io::ErrorKind::InvalidData`].
#[derive(Debug)]
pub struct RingRx {
    core: Consumer<SharedRing>,
}

impl RingRx {
    /// Tells the producer that no more bytes will be taken out. Ask
    /// [`writer_needs_wake`](Self::writer_needs_wake) afterwards.
    pub fn close(&mut self) {
        self.core.close();
    }

    /// Asks to be woken when there is data in an empty ring. `false` when there is some already (or
    /// the producer has closed): then receive instead of sleeping.
    #[must_use]
    pub fn prepare_sleep(&mut self) -> bool {
        self.core.prepare_sleep()
    }

    /// Takes back [`prepare_sleep`](Self::prepare_sleep).
    pub fn awake(&mut self) {
        self.core.awake();
    }

    /// Whether there is something to receive.
    #[inline]
    #[must_use]
    pub fn has_bytes(&self) -> bool {
        self.core.has_bytes()
    }

    /// Whether the producer waits for space, and must be woken for the space that was freed before
    /// this call. True once for each wait.
    #[inline]
    #[must_use]
    pub fn writer_needs_wake(&mut self) -> bool {
        self.core.writer_needs_wake()
    }
}

impl PipeRx for RingRx {
    /// `EFAULT` for memory that is not mapped: nothing was taken out then.
    #[inline]
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>> {
        // SAFETY: the caller's promise.
        unsafe { self.core.recv(spans) }
    }

    fn backlog(&mut self) -> Backlog {
        self.core.backlog()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use uccl_fabric::shm::Segment;

    /// A ring and the two sides of it, in two mappings as two processes have them.
    fn ring(capacity: usize) -> (RingTx, RingRx, Segment) {
        let here = Segment::create("test", ByteRing::layout_len(capacity)).unwrap();
        let fd = here.fd().try_clone_to_owned().unwrap();
        let there = Arc::new(Mapping::of(fd, MapMode::ReadWrite, usize::MAX).unwrap());
        let tx = ByteRing::new(&here, 0, capacity).unwrap().into_tx();
        let rx = ByteRing::new(&there, 0, capacity).unwrap().into_rx();
        (tx, rx, here)
    }

    fn spans(pieces: &[Vec<u8>]) -> Vec<Span> {
        pieces
            .iter()
            .map(|piece| Span { addr: piece.as_ptr() as usize, len: piece.len() })
            .collect()
    }

    fn send(tx: &mut RingTx, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the slice is readable.
        unsafe { tx.send(&[Span { addr: bytes.as_ptr() as usize, len: bytes.len() }]) }
    }

    fn recv(rx: &mut RingRx, most: usize) -> io::Result<Option<Vec<u8>>> {
        let mut buf = vec![0; most];
        // SAFETY: the buffer is writable.
        let n = unsafe { rx.recv(&[Span { addr: buf.as_mut_ptr() as usize, len: most }]) }?;
        Ok(n.map(|n| buf[..n].to_vec()))
    }

    #[derive(Clone, Debug)]
    enum Step {
        Send(Vec<Vec<u8>>),
        Recv(Vec<usize>),
    }

    fn step() -> impl Strategy<Value = Step> {
        let bytes = proptest::collection::vec(any::<u8>(), 0..150);
        prop_oneof![
            proptest::collection::vec(bytes, 0..4).prop_map(Step::Send),
            proptest::collection::vec(0..150usize, 0..4).prop_map(Step::Recv),
        ]
    }

    proptest! {
        #[test]
        fn it_is_a_bounded_queue(
            log in 0..9u32,
            steps in proptest::collection::vec(step(), 0..60),
        ) {
            let capacity = 1usize << log;
            let (mut tx, mut rx, _) = ring(capacity);
            let mut model = VecDeque::new();
            for step in steps {
                match step {
                    Step::Send(pieces) => {
                        // SAFETY: the vectors are readable.
                        let n = unsafe { tx.send(&spans(&pieces)) }.unwrap();
                        let all = pieces.concat();
                        prop_assert_eq!(n, all.len().min(capacity - model.len()));
                        model.extend(&all[..n]);
                    }
                    Step::Recv(lens) => {
                        let bufs: Vec<_> = lens.iter().map(|len| vec![0u8; *len]).collect();
                        let had = model.len();
                        // SAFETY: the vectors are ours, and read only afterwards.
                        let n = unsafe { rx.recv(&spans(&bufs)) }.unwrap();
                        let want: usize = lens.iter().sum();
                        prop_assert_eq!(n.is_some(), had > 0 && want > 0);
                        let n = n.unwrap_or(0);
                        prop_assert!(n <= want.min(had) && (n > 0 || had == 0 || want == 0));
                        let expected: Vec<u8> = model.drain(..n).collect();
                        prop_assert_eq!(&bufs.concat()[..n], &expected);
                    }
                }
            }
        }

        #[test]
        fn nonsense_from_the_peer_is_an_error(word in any::<u64>(), sent in 0..16usize) {
            let (mut tx, mut rx, segment) = ring(16);
            let words = Words::new(&segment, 0, HEADER_WORDS).unwrap();
            send(&mut tx, &[1; 16][..sent]).unwrap();
            words.as_slice()[HEAD].store(word, Ordering::Relaxed);
            let got = recv(&mut rx, 100);
            match got {
                Ok(None) => prop_assert_eq!(word, 0),
                Ok(Some(got)) => prop_assert_eq!(got.len() as u64, word),
                Err(error) => {
                    prop_assert!(word > 16);
                    prop_assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                }
            }
            words.as_slice()[TAIL].store(word, Ordering::Relaxed);
            match send(&mut tx, &[2; 17]) {
                Ok(n) => prop_assert!(word <= sent as u64 && n as u64 == 16 - sent as u64 + word),
                Err(error) => {
                    prop_assert!(word > sent as u64);
                    prop_assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                }
            }
        }
    }

    #[test]
    fn indices_may_wrap() {
        let (mut tx, mut rx, segment) = ring(16);
        let start = u64::MAX - 20;
        let words = Words::new(&segment, 0, HEADER_WORDS).unwrap();
        words.as_slice()[HEAD].store(start, Ordering::Relaxed);
        words.as_slice()[TAIL].store(start, Ordering::Relaxed);
        (tx.core.head, tx.core.tail, rx.core.head, rx.core.tail) = (start, start, start, start);
        for round in 0..10u8 {
            assert_eq!(send(&mut tx, &[round; 20]).unwrap(), 16);
            assert_eq!(recv(&mut rx, 20).unwrap(), Some(vec![round; 16]));
        }
    }

    #[test]
    fn the_end_comes_after_the_last_byte() {
        let (mut tx, mut rx, _) = ring(16);
        send(&mut tx, b"last").unwrap();
        tx.close();
        assert!(!rx.prepare_sleep());
        assert_eq!(recv(&mut rx, 3).unwrap(), Some(b"las".to_vec()));
        assert_eq!(recv(&mut rx, 3).unwrap(), Some(b"t".to_vec()));
        assert_eq!(recv(&mut rx, 3).unwrap(), Some(vec![]));
        assert!(!rx.prepare_sleep());
        assert_eq!(recv(&mut rx, 3).unwrap(), Some(vec![]));
    }

    #[test]
    fn a_producer_learns_that_nobody_reads() {
        let (mut tx, mut rx, _) = ring(16);
        assert_eq!(send(&mut tx, &[0; 16]).unwrap(), 16);
        assert!(tx.prepare_wait_space());
        rx.close();
        assert!(rx.writer_needs_wake());
        assert!(!tx.prepare_wait_space());
        assert_eq!(send(&mut tx, &[0; 1]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_sleeper_is_woken_once() {
        let (mut tx, mut rx, _) = ring(16);
        assert!(!tx.reader_needs_wake());
        assert!(rx.prepare_sleep());
        send(&mut tx, b"x").unwrap();
        assert!(tx.reader_needs_wake());
        assert!(!tx.reader_needs_wake());
        assert!(!rx.prepare_sleep(), "there is data");
        assert!(!tx.reader_needs_wake(), "it did not sleep");
        recv(&mut rx, 1).unwrap();
        assert!(rx.prepare_sleep());
        rx.awake();
        assert!(!tx.reader_needs_wake());
        assert!(!tx.prepare_wait_space(), "there is space");
        assert!(!rx.writer_needs_wake());
    }

    #[test]
    fn it_must_fit_its_segment() {
        let segment = Segment::create("test", ByteRing::layout_len(4096)).unwrap();
        assert!(ByteRing::new(&segment, 0, 4096).is_ok());
        for (offset, capacity) in
            [(0, 8192), (8, 4096), (0, 3000), (4, 64), (0, 0), (usize::MAX, 64)]
        {
            assert!(ByteRing::new(&segment, offset, capacity).is_err(), "{offset} {capacity}");
        }
        let published = Segment::create_published("test", 4096).unwrap();
        let fd = published.fd().try_clone_to_owned().unwrap();
        let read_only = Arc::new(Mapping::of(fd, MapMode::ReadOnly, 4096).unwrap());
        assert!(ByteRing::new(&read_only, 0, 64).is_err());
    }
}
