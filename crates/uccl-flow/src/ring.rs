//! The ring in shared memory by which small messages go between two processes of one host.
//!
//! The sender makes it, and names it in a note on the flow's own stream: its process, its
//! descriptor and a token. The receiver opens it through `/proc`, which the kernel allows to the
//! same user, and sets a word in it. Until then, and for ever where the receiver cannot, messages
//! go over the stream. A ring outlives the stream: bytes in it come once, whatever happens there.
//!
//! | at | word | written by |
//! | --- | --- | --- |
//! | 0 | head: bytes ever put in | sender |
//! | 8 | token | sender |
//! | 128 | tail: bytes ever taken out | receiver |
//! | 136 | the receiver has opened it | receiver |
//! | 4096 | the bytes | sender |

use std::{
    fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _},
    },
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Release},
    },
};

use uccl_fabric::shm::{MapMode, Mapping, Segment, segment::Words};
use uccl_wire::flow::{FlowHead, HeadKind};

use crate::socket::Span;

/// Bytes of a ring; a power of two.
const CAPACITY: usize = 1 << 20;
const BYTES_AT: usize = 4096;
const WORDS: usize = 32;
const HEAD: usize = 0;
const TOKEN: usize = 1;
const TAIL: usize = 16;
const IS_OPEN: usize = 17;
/// The beginning of the segment's name in `/proc`.
const NAME: &str = "uccl-flow";

/// A ring's shared memory.
struct Memory {
    words: Words,
    /// The bytes, which `words` keeps mapped.
    bytes: *mut u8,
}

// SAFETY: the pointer is to shared memory that belongs to the value, not to a thread.
unsafe impl Send for Memory {}

impl Memory {
    fn new(mapping: &Arc<Mapping>) -> io::Result<Self> {
        let bytes = mapping.as_ptr().wrapping_add(BYTES_AT);
        Ok(Self { words: Words::new(mapping, 0, WORDS)?, bytes })
    }

    fn load(&self, word: usize) -> u64 {
        self.words.as_slice()[word].load(Acquire)
    }

    fn store(&self, word: usize, value: u64) {
        self.words.as_slice()[word].store(value, Release);
    }

    /// The places of so many bytes from an index on: up to the end, and from the begin.
    fn places(&self, index: u64, len: usize) -> [Span; 2] {
        let at = (index % CAPACITY as u64) as usize;
        let first = len.min(CAPACITY - at);
        let second = Span { addr: self.bytes, len: len - first };
        [Span { addr: self.bytes.wrapping_add(at), len: first }, second]
    }
}

/// The sender's end.
pub(crate) struct RingSender {
    shared: Memory,
    /// The segment's descriptor, until the receiver has opened it.
    segment: Option<Segment>,
    head: u64,
    tail: u64,
    is_open: bool,
}

/// The receiver's end.
pub(crate) struct RingReceiver {
    shared: Memory,
    tail: u64,
}

impl RingSender {
    /// Makes a ring.
    pub(crate) fn new(token: u64) -> io::Result<Self> {
        let segment = Segment::create(NAME, BYTES_AT + CAPACITY)?;
        let shared = Memory::new(&segment)?;
        shared.store(TOKEN, token);
        Ok(Self { shared, segment: Some(segment), head: 0, tail: 0, is_open: false })
    }

    /// The note that tells the receiver of it.
    pub(crate) fn note(&self) -> FlowHead {
        let fd = self.segment.as_ref().map_or(0, |segment| segment.fd().as_raw_fd());
        let name = u64::from(std::process::id()) << 32 | u64::from(fd.unsigned_abs());
        FlowHead::note(HeadKind::Ring, self.shared.load(TOKEN), name)
    }

    /// Whether messages may go by it.
    pub(crate) fn is_open(&mut self) -> bool {
        if !self.is_open && self.shared.load(IS_OPEN) != 0 {
            self.is_open = true;
            self.segment = None;
        }
        self.is_open
    }

    /// Puts bytes in; `None` if it is full.
    ///
    /// # Safety
    /// The memory is readable.
    pub(crate) unsafe fn send(&mut self, spans: &[Span]) -> io::Result<Option<usize>> {
        let wanted: usize = spans.iter().map(|span| span.len).sum();
        if self.head - self.tail + wanted as u64 > CAPACITY as u64 {
            self.look()?;
        }
        let mut room = CAPACITY - (self.head - self.tail) as usize;
        let before = self.head;
        for span in spans {
            let len = span.len.min(room);
            let mut from = span.addr;
            for place in self.shared.places(self.head, len) {
                // SAFETY: the place is within the ring, and free: the receiver has taken its bytes.
                // The caller promises the memory.
                unsafe { std::ptr::copy_nonoverlapping(from, place.addr, place.len) };
                from = from.wrapping_add(place.len);
            }
            self.head += len as u64;
            room -= len;
        }
        self.shared.store(HEAD, self.head);
        let sent = (self.head - before) as usize;
        Ok((sent > 0 || wanted == 0).then_some(sent))
    }

    /// Bytes that the receiver has taken out, as it says.
    pub(crate) fn taken(&self) -> u64 {
        self.shared.load(TAIL).min(self.head)
    }

    /// Whether the receiver has taken all bytes out.
    pub(crate) fn is_empty(&self) -> bool {
        self.taken() == self.head
    }

    fn look(&mut self) -> io::Result<()> {
        let tail = self.shared.load(TAIL);
        // A valid one is between its last value and the head.
        if tail < self.tail || tail > self.head {
            return Err(ErrorKind::InvalidData.into());
        }
        self.tail = tail;
        Ok(())
    }
}

impl RingReceiver {
    /// Opens the ring of a note.
    pub(crate) fn open(note: &FlowHead) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", note.message >> 32, note.message & 0xFFFF_FFFF);
        // Another file is not opened: that could have an effect.
        let target = fs::read_link(&path)?;
        if !target.as_os_str().as_bytes().starts_with(format!("/memfd:{NAME}").as_bytes()) {
            return Err(ErrorKind::NotFound.into());
        }
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
        let file: OwnedFd = options.open(path)?.into();
        let mapping = Arc::new(Mapping::of(file, MapMode::ReadWrite, BYTES_AT + CAPACITY)?);
        if mapping.len() != BYTES_AT + CAPACITY {
            return Err(ErrorKind::InvalidData.into());
        }
        let shared = Memory::new(&mapping)?;
        // In another namespace the same numbers may be another process's.
        if shared.load(TOKEN) != note.flow || shared.load(IS_OPEN) != 0 {
            return Err(ErrorKind::NotFound.into());
        }
        shared.store(IS_OPEN, 1);
        Ok(Self { shared, tail: 0 })
    }

    /// Whether there are bytes.
    pub(crate) fn has_bytes(&self) -> bool {
        self.shared.load(HEAD) != self.tail
    }

    /// Takes bytes out; `None` if there are none.
    ///
    /// # Safety
    /// The memory is writable.
    pub(crate) unsafe fn recv(&mut self, span: Span) -> io::Result<Option<usize>> {
        let there = self.shared.load(HEAD).wrapping_sub(self.tail);
        if there > CAPACITY as u64 {
            return Err(ErrorKind::InvalidData.into());
        }
        let len = span.len.min(there as usize);
        let mut to = span.addr;
        for place in self.shared.places(self.tail, len) {
            // SAFETY: the place is within the ring, and its bytes have been put in before the head
            // went past them. The caller promises the memory.
            unsafe { std::ptr::copy_nonoverlapping(place.addr, to, place.len) };
            to = to.wrapping_add(place.len);
        }
        self.tail += len as u64;
        self.shared.store(TAIL, self.tail);
        Ok((len > 0).then_some(len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> (RingSender, RingReceiver) {
        let mut sender = RingSender::new(77).expect("a ring");
        assert!(!sender.is_open());
        let receiver = RingReceiver::open(&sender.note()).expect("this process's own");
        assert!(sender.is_open());
        (sender, receiver)
    }

    #[test]
    fn bytes_go_round() {
        let (mut sender, mut receiver) = ring();
        let data: Vec<u8> = (0..300_000).map(|at| (at % 251) as u8).collect();
        let mut room = vec![0; data.len()];
        for _ in 0..20 {
            // SAFETY: the memory lives through the calls.
            unsafe {
                let parts = [Span::of(&data[..48]), Span::of(&data[48..])];
                assert_eq!(sender.send(&parts).expect("sound"), Some(data.len()));
                assert_eq!(receiver.recv(Span::of_mut(&mut room[..7])).expect("sound"), Some(7));
                let rest = Span::of_mut(&mut room[7..]);
                assert_eq!(receiver.recv(rest).expect("sound"), Some(data.len() - 7));
                assert_eq!(receiver.recv(Span::of_mut(&mut [0])).expect("sound"), None);
            }
            assert!(room == data);
            room.fill(0);
        }
    }

    #[test]
    fn a_full_ring_takes_no_more() {
        let (mut sender, mut receiver) = ring();
        let data = vec![3u8; CAPACITY - 1];
        // SAFETY: the memory lives through the calls.
        unsafe {
            assert_eq!(sender.send(&[Span::of(&data)]).expect("sound"), Some(CAPACITY - 1));
            assert_eq!(sender.send(&[Span::of(&data[..9])]).expect("sound"), Some(1));
            assert_eq!(sender.send(&[Span::of(&data[..9])]).expect("sound"), None);
            assert_eq!((sender.taken(), sender.is_empty()), (0, false));
            assert_eq!(receiver.recv(Span::of_mut(&mut [0; 5])).expect("sound"), Some(5));
            assert_eq!((sender.taken(), receiver.has_bytes()), (5, true));
            assert_eq!(sender.send(&[Span::of(&data[..9])]).expect("sound"), Some(5));
            let mut rest = vec![0; CAPACITY];
            assert_eq!(receiver.recv(Span::of_mut(&mut rest)).expect("sound"), Some(CAPACITY));
        }
        assert!(sender.is_empty() && !receiver.has_bytes());
    }

    #[test]
    fn words_that_cannot_be_are_errors() {
        let (mut sender, mut receiver) = ring();
        sender.shared.store(HEAD, CAPACITY as u64 + 1);
        // SAFETY: the memory lives through the call.
        assert!(unsafe { receiver.recv(Span::of_mut(&mut [0])) }.is_err());
        sender.shared.store(TAIL, 9);
        let data = vec![3u8; CAPACITY + 1];
        // SAFETY: as above.
        assert!(unsafe { sender.send(&[Span::of(&data)]) }.is_err());
    }

    #[test]
    fn another_ring_is_not_opened() {
        let sender = RingSender::new(77).expect("a ring");
        let note = sender.note();
        assert!(RingReceiver::open(&FlowHead { flow: 78, ..note }).is_err(), "another token");
        let file = FlowHead { message: u64::from(std::process::id()) << 32, ..note };
        assert!(RingReceiver::open(&file).is_err(), "standard input");
        assert!(RingReceiver::open(&note).is_ok());
        assert!(RingReceiver::open(&note).is_err(), "a second receiver");
    }
}
