//! The shared structures under every interleaving: `RUSTFLAGS="--cfg loom" cargo test --release
//! loom`.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Notify};
use loom::thread;
use uccl_fabric::{guarded::UnmappedMemory, mem::Span};

use super::accesses::{announce, claim, clear, ended, in_use};
use super::hazard;
use super::published::{publish, retire, version};
use super::ring::{Consumer, Producer, Storage};
use super::sync::explore;

/// A ring; loom watches the accesses to it.
struct Ring {
    words: [AtomicU64; 8],
    bytes: Vec<UnsafeCell<u8>>,
}

impl Ring {
    fn new(capacity: usize) -> Arc<Self> {
        let words = std::array::from_fn(|_| AtomicU64::new(0));
        Arc::new(Self { words, bytes: (0..capacity).map(|_| UnsafeCell::new(0)).collect() })
    }
}

impl Storage for Arc<Ring> {
    type Word = AtomicU64;

    fn word(&self, at: usize) -> &AtomicU64 {
        // Word 0 or 1 of cache line 0 to 3, of 16 words each.
        &self.words[at / 16 * 2 + at % 16]
    }

    fn capacity(&self) -> usize {
        self.bytes.len()
    }

    unsafe fn put(&self, at: usize, from: *const u8, len: usize) -> Result<(), UnmappedMemory> {
        for i in 0..len {
            // SAFETY: the caller's promise; loom checks that nobody else is at the cell.
            self.bytes[at + i].with_mut(|byte| unsafe { *byte = *from.add(i) });
        }
        Ok(())
    }

    unsafe fn take(&self, at: usize, to: *mut u8, len: usize) -> Result<(), UnmappedMemory> {
        for i in 0..len {
            // SAFETY: as above.
            self.bytes[at + i].with(|byte| unsafe { *to.add(i) = *byte });
        }
        Ok(())
    }
}

/// The two sides of a connection's ring, and the notification that wakes each.
struct Pair {
    ring: Arc<Ring>,
    data: Arc<Notify>,
    space: Arc<Notify>,
}

impl Pair {
    fn new(capacity: usize) -> Self {
        Self {
            ring: Ring::new(capacity),
            data: Arc::new(Notify::new()),
            space: Arc::new(Notify::new()),
        }
    }

    /// Sends all of `bytes`, sleeping whenever the ring is full, and closes.
    fn producer(&self, bytes: &'static [u8]) -> impl FnOnce() + 'static {
        let (ring, data, space) = (self.ring.clone(), self.data.clone(), self.space.clone());
        move || {
            let mut tx = Producer::new(ring);
            let mut sent = 0;
            while sent < bytes.len() {
                let rest = &bytes[sent..];
                // SAFETY: the slice is readable.
                let n =
                    unsafe { tx.send(&[Span { addr: rest.as_ptr() as usize, len: rest.len() }]) };
                sent += n.unwrap();
                if tx.reader_needs_wake() {
                    data.notify();
                }
                if sent < bytes.len() && tx.prepare_wait_space() {
                    space.wait();
                    tx.awake();
                }
            }
            tx.close();
            if tx.reader_needs_wake() {
                data.notify();
            }
        }
    }

    /// Receives until the end, sleeping whenever the ring is empty.
    fn consume(&self) -> Vec<u8> {
        let mut rx = Consumer::new(self.ring.clone());
        let mut got = Vec::new();
        loop {
            let mut buf = [0u8; 4];
            // SAFETY: the array is writable.
            match unsafe { rx.recv(&[Span { addr: buf.as_mut_ptr() as usize, len: buf.len() }]) }
                .unwrap()
            {
                Some(0) => return got,
                Some(n) => {
                    got.extend_from_slice(&buf[..n]);
                    if rx.writer_needs_wake() {
                        self.space.notify();
                    }
                }
                None => {
                    if rx.prepare_sleep() {
                        self.data.wait();
                        rx.awake();
                    }
                }
            }
        }
    }
}

/// A lost wake-up shows as a deadlock.
#[test]
fn loom_ring_reader_is_woken() {
    explore(|| {
        let pair = Pair::new(2);
        let producer = thread::spawn(pair.producer(b"a"));
        assert_eq!(pair.consume(), b"a");
        producer.join().unwrap();
    });
}

#[test]
fn loom_ring_writer_is_woken() {
    explore(|| {
        let pair = Pair::new(1);
        let producer = thread::spawn(pair.producer(b"ab"));
        assert_eq!(pair.consume(), b"ab");
        producer.join().unwrap();
    });
}

/// Once the owner has revoked and drained, the memory is its own again: loom fails if an access
/// overlaps.
#[test]
fn loom_no_access_after_drain() {
    const SLOT: u32 = 5;
    struct SharedState {
        entry: [AtomicU64; 8],
        claimed: [AtomicU64; 1],
        announced: [AtomicU64; 1],
        memory: UnsafeCell<u64>,
    }
    explore(|| {
        let shared = Arc::new(SharedState {
            entry: std::array::from_fn(|_| AtomicU64::new(0)),
            claimed: std::array::from_fn(|_| AtomicU64::new(0)),
            announced: std::array::from_fn(|_| AtomicU64::new(0)),
            memory: UnsafeCell::new(0),
        });
        publish(&shared.entry, &[0; 7]);
        let live = version(&shared.entry);
        let initiator = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (at, held) = claim(&shared.claimed, 0, SLOT).unwrap();
                announce(&shared.announced, at, held);
                if version(&shared.entry) == live {
                    // SAFETY: loom checks that nobody else is at the cell.
                    shared.memory.with_mut(|memory| unsafe { *memory += 1 });
                }
                clear(&shared.claimed, &shared.announced, at, held);
            })
        };
        retire(&shared.entry);
        while hazard::holds(&shared.announced, SLOT) {
            thread::yield_now();
        }
        // SAFETY: as above; this is the access that the test checks.
        shared.memory.with_mut(|memory| unsafe { *memory = 7 });
        initiator.join().unwrap();
        // SAFETY: the only thread.
        assert_eq!(shared.memory.with(|memory| unsafe { *memory }), 7);
    });
}

/// Two initiators never get the same word, and both are waited for.
#[test]
fn loom_hazard_words_are_claimed_once() {
    explore(|| {
        let words =
            || -> Arc<[AtomicU64; 2]> { Arc::new(std::array::from_fn(|_| AtomicU64::new(0))) };
        let (claimed, announced) = (words(), words());
        let other = {
            let (claimed, announced) = (claimed.clone(), announced.clone());
            thread::spawn(move || {
                let (at, held) = claim(&*claimed, 0, 1).unwrap();
                announce(&*announced, at, held);
                at
            })
        };
        let (mine, held) = claim(&*claimed, 0, 2).unwrap();
        announce(&*announced, mine, held);
        assert_ne!(mine, other.join().unwrap());
        assert!(hazard::holds(&*announced, 1) && hazard::holds(&*announced, 2));
    });
}

/// A word that is used again announces its latest use: clearing the use before does not undo that.
#[test]
fn loom_an_announcement_is_not_undone_by_the_last_one() {
    explore(|| {
        let word = || -> Arc<[AtomicU64; 1]> { Arc::new([AtomicU64::new(0)]) };
        let (claimed, announced) = (word(), word());
        let first = {
            let (claimed, announced) = (claimed.clone(), announced.clone());
            let (at, held) = claim(&*claimed, 0, 1).unwrap();
            announce(&*announced, at, held);
            thread::spawn(move || clear(&*claimed, &*announced, at, held))
        };
        if let Some((at, held)) = claim(&*claimed, 0, 2) {
            announce(&*announced, at, held);
            first.join().unwrap();
            assert!(hazard::holds(&*announced, 2));
        } else {
            first.join().unwrap();
        }
    });
}

/// A removed mapping is unmapped only when no access can be in it, even if the peer writes into the
/// hazard words: loom fails if an access overlaps with the next use of that memory.
#[test]
fn loom_a_mapping_outlives_the_accesses_in_it() {
    struct SharedState {
        epoch: AtomicU64,
        claimed: [AtomicU64; 1],
        announced: [AtomicU64; 1],
        mapping: UnsafeCell<u64>,
    }
    explore(|| {
        let shared = Arc::new(SharedState {
            epoch: AtomicU64::new(0),
            claimed: [AtomicU64::new(0)],
            announced: [AtomicU64::new(0)],
            mapping: UnsafeCell::new(0),
        });
        let copier = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (at, held) = claim(&shared.claimed, 0, 5).unwrap();
                announce(&shared.announced, at, held);
                if shared.epoch.load(Ordering::SeqCst) == 0 {
                    // SAFETY: loom checks that nobody else is at the cell.
                    shared.mapping.with_mut(|mapping| unsafe { *mapping += 1 });
                }
                clear(&shared.claimed, &shared.announced, at, held);
            })
        };
        // The peer scribbles and retracts.
        shared.announced[0].store(0, Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        let mut uses = in_use(&shared.claimed);
        while !ended(&shared.claimed, &mut uses) {
            thread::yield_now();
        }
        // SAFETY: as above; this is the access that the test checks.
        shared.mapping.with_mut(|mapping| unsafe { *mapping = 7 });
        copier.join().unwrap();
        // SAFETY: the only thread.
        assert_eq!(shared.mapping.with(|mapping| unsafe { *mapping }), 7);
    });
}
