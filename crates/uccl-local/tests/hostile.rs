//! A peer of this host that speaks the protocol up to a point, and then writes into all memory that
//! it can reach. It may cost its victim their connection, but none of the victim's memory, other
//! connections or time.

mod support;

use std::{
    env,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use fastrand::Rng;
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{FallocateFlags, MemfdFlags, SealFlags},
};
use sha2::{Digest, Sha256};
use uccl_chaos::patiently;
use uccl_device::Process;
use uccl_fabric::{
    lane::{HostLane, Lane, MessageLane, OpKind},
    mem::{RemoteSpan, Span},
    region::{RegionTable, Rights},
    shm::{Mapping, Segment},
};
use uccl_local as local;
use uccl_local::{
    fdpass::{FdListener, FdSocket},
    shm::ByteRing,
};

use support::{Anything, PATIENCE, carry, next, post, setup, span_of};

const VICTIM: &str = "UCCL_TEST_VICTIM_OF";
/// How long each connection of the hostile peer is endured.
const ROUND: Duration = Duration::from_millis(120);
const ROUNDS: u64 = 24;
/// No call of the victim's takes longer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Bytes of the hostile peer's memory, and of each other buffer.
const LEN: usize = 1 << 20;
/// Its regions.
const SLOTS: u32 = 8;
const RING: usize = 512 << 10;
const RING_STRIDE: usize = ByteRing::layout_len(RING).next_multiple_of(4096);
const LANE_BYTES: usize = 4096 + 2 * RING_STRIDE;
const TABLE_BYTES: usize = (1 << 16) * 64;

fn key_of(slot: u32) -> u64 {
    u64::from(slot + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Two processes: this one is the peers of the other, an honest one and one that is not.
#[test]
fn a_hostile_peer_of_the_host_costs_its_victim_one_connection() {
    let name = format!("uccl-hostile-{}", std::process::id());
    let listener = FdListener::bind(name.as_bytes()).expect("a name of its own");
    let mut victim = Victim(
        Command::new(env::current_exe().expect("this test"))
            .args(["--exact", "the_victim", "--ignored", "--nocapture"])
            .env(VICTIM, &name)
            .stdout(Stdio::null())
            .spawn()
            .expect("a process"),
    );
    let over = AtomicBool::new(false);
    let accept = || patiently(|| listener.accept().expect("a socket"));
    let honest = accept();
    thread::scope(|scope| {
        scope.spawn(|| be_honest(honest, &over));
        for seed in 0..ROUNDS {
            be_hostile(accept(), seed);
        }
        let ended = patiently(|| victim.0.try_wait().expect("a child"));
        over.store(true, SeqCst);
        assert!(ended.success(), "the victim: {ended}");
    });
}

struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        // It has ended, unless the test fails.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The victim. Not a test by itself: the other test starts it.
#[test]
#[ignore = "the second process of the other test"]
fn the_victim() {
    let Ok(name) = env::var(VICTIM) else { return };
    let connect = || FdSocket::connect(name.as_bytes()).expect("its listener");
    let canary = vec![0xa5_u8; LEN];
    let regions = Arc::new(RegionTable::new().expect("a table"));
    let _private = regions.insert(span_of(&canary), Rights::ALL, None).expect("a region");
    let (over, carried) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        // The other process takes the first connection for the honest peer's.
        let honest = connect();
        scope.spawn(|| move_honestly(honest, &regions, &over, &carried));
        for seed in 0..ROUNDS {
            let before = carried.load(SeqCst);
            endure(connect(), &regions, seed);
            // The honest peer is served meanwhile, and afterwards.
            patiently(|| (carried.load(SeqCst) > before).then_some(()));
        }
        over.store(true, SeqCst);
    });
    assert!(canary.iter().all(|byte| *byte == 0xa5), "memory that nobody was given");
}

/// Writes to the honest peer and reads it back, until it is over.
fn move_honestly(
    mut socket: FdSocket,
    regions: &Arc<RegionTable>,
    over: &AtomicBool,
    carried: &AtomicUsize,
) {
    let offer = next(&mut socket).bytes;
    let words: Vec<u64> =
        offer.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let [addr, key, slot] = words[..] else { panic!("{words:?}") };
    let there = RemoteSpan { addr, len: LEN as u64, key, slot: slot as u32 };
    let lane = support::accept(socket, setup(regions, None));
    for round in 0.. {
        let (data, back) = (vec![round as u8; LEN], vec![0; LEN]);
        assert_eq!(carry(&[&lane], OpKind::Write, span_of(&data), there), Ok(()));
        assert_eq!(carry(&[&lane], OpKind::Read, span_of(&back), there), Ok(()));
        assert!(std::hint::black_box(&back) == &data, "what the honest peer was given");
        carried.fetch_add(1, SeqCst);
        if over.load(SeqCst) {
            return;
        }
    }
}

/// Notes how long a call takes.
fn timed<T>(what: &str, call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = call();
    assert!(begun.elapsed() < DEADLINE, "{what} took {:?}", begun.elapsed());
    result
}

/// Makes all kinds of calls on a lane to the hostile peer, until it breaks or the round is over.
fn endure(mut socket: FdSocket, regions: &Arc<RegionTable>, seed: u64) {
    let mut rng = Rng::with_seed(seed);
    let pid = socket.peer().expect("who it is").pid.expect("its number");
    let process = rng.bool().then(|| Process::open(pid).expect("the peer"));
    let invitation = next(&mut socket);
    let there = local::token_of(&invitation).expect("a token") as u64;
    let lane = local::accept(socket, invitation, setup(regions, process)).expect("a lane");
    let here = vec![7_u8; LEN];
    let (mut ends, mut names) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    while begun.elapsed() < ROUND && ends.len() < 20_000 {
        let len = if rng.u8(0..16) == 0 { rng.usize(0..=LEN) } else { rng.usize(0..5000) };
        let slot = rng.u32(0..SLOTS);
        let addr = there + rng.usize(0..=LEN - len) as u64;
        let remote = RemoteSpan { addr, len: len as u64, key: key_of(slot), slot };
        let local = Span { len, ..span_of(&here) };
        let kind = if rng.bool() { OpKind::Read } else { OpKind::Write };
        match rng.u8(0..10) {
            0..5 => {
                // SAFETY: `here` lives during the call.
                timed("try_now", || drop(unsafe { lane.try_now(kind, local, &remote) }));
            }
            5..8 => {
                // SAFETY: `here` lives until the lane has been killed.
                let (end, name) = timed("post", || unsafe { post(&lane, kind, local, remote) });
                ends.push(end);
                names.extend(name);
            }
            8 => {
                if !names.is_empty() {
                    let name = names.swap_remove(rng.usize(0..names.len()));
                    timed("cancel", || lane.cancel(name));
                }
            }
            _ => timed("the rest", || {
                lane.help();
                lane.path_to(&remote);
                lane.touched_by_peer(slot);
                lane.progress_copies();
                lane.arm();
                let _ = (lane.send(&[b"a message"]), lane.ping());
            }),
        }
        if timed("progress", || lane.progress(&Anything)).is_err() {
            break;
        }
    }
    timed("kill", || lane.kill());
    let here_at = span_of(&here);
    // SAFETY: after the kill the memory is ours again; the test checks exactly this.
    unsafe { std::ptr::write_bytes(here_at.addr as *mut u8, 3, here_at.len) };
    assert!(ends.iter().all(|end| end.result().is_some()), "every operation ends");
    let aftermath = lane.aftermath().expect("the peer copies by itself");
    timed("looking after the peer", || (aftermath.touches(0), aftermath.is_over()));
    assert!(std::hint::black_box(&here).iter().all(|byte| *byte == 3), "a byte after the kill");
}

/// An honest peer, which only makes progress.
fn be_honest(mut socket: FdSocket, over: &AtomicBool) {
    let memory = vec![0_u8; LEN];
    let regions = Arc::new(RegionTable::new().expect("a table"));
    let region = regions.insert(span_of(&memory), Rights::ALL, None).expect("a region");
    let offer = [memory.as_ptr() as u64, region.key, region.slot.into()];
    socket.send(&offer.map(u64::to_le_bytes).concat(), &[]).expect("the victim");
    let lane = support::invite(socket, setup(&regions, None));
    while !over.load(SeqCst) {
        // The victim leaves before it is over.
        if lane.progress(&Anything).is_err() {
            return;
        }
        thread::yield_now();
    }
}

/// The memory and the socket that a hostile peer can write to.
struct Hostile {
    rng: Rng,
    socket: FdSocket,
    lane: Segment,
    table: Segment,
    /// Memory that it has offered.
    offered: Vec<Segment>,
    memory: Vec<u8>,
    /// The victim's table, which it can only read.
    _victims: Mapping,
}

fn words(segment: &Segment) -> &[AtomicU64] {
    // SAFETY: a writable mapping of whole words, which lives as long as the segment.
    unsafe { std::slice::from_raw_parts(segment.as_ptr().cast(), segment.len() / 8) }
}

/// Makes a lane as a connector does, and then writes arbitrary values and messages.
fn be_hostile(mut socket: FdSocket, seed: u64) {
    let lane = Segment::create("lane", LANE_BYTES).expect("a segment");
    let table = Segment::create_published("table", TABLE_BYTES).expect("a segment");
    let memory = vec![0_u8; LEN];
    let token = u128::from(memory.as_ptr() as u64).to_le_bytes();
    socket.send(&token, &[lane.fd(), table.fd()]).expect("the victim");
    let [theirs]: [OwnedFd; 1] = next(&mut socket).fds.try_into().expect("a table");
    let victims = Mapping::of(theirs, uccl_fabric::shm::MapMode::ReadOnly, TABLE_BYTES);
    let mut hostile = Hostile {
        rng: Rng::with_seed(!seed),
        socket,
        lane,
        table,
        offered: Vec::new(),
        memory,
        _victims: victims.expect("a table"),
    };
    (0..SLOTS).for_each(|slot| hostile.publish(slot));
    hostile.offer_memory();
    // Some rounds leave the rings and the socket whole, so that the victim stays for longer.
    let (breaks_rings, breaks_socket) = (seed % 3 == 1, seed % 3 == 2);
    let begun = Instant::now();
    while begun.elapsed() < 2 * ROUND && begun.elapsed() < PATIENCE {
        for _ in 0..100 {
            hostile.write_something(breaks_rings);
        }
        if !hostile.say_something(breaks_socket) {
            // The victim has left.
            break;
        }
    }
}

impl Hostile {
    fn anything(&mut self) -> u64 {
        match self.rng.u8(0..6) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << self.rng.u32(0..64),
            3 => self.rng.u64(0..2000),
            4 => self.rng.u64(0..2 * LEN as u64),
            _ => self.rng.u64(..),
        }
    }

    /// Lists a region of which the victim has the key, somewhere.
    fn publish(&mut self, slot: u32) {
        let ids = self.offered.len() as u64 + 2;
        let (base, len) = (self.memory.as_ptr() as u64, LEN as u64);
        let some =
            |rng: &mut Rng, sound: u64, other: u64| if rng.u8(0..4) > 0 { sound } else { other };
        let others = [(); 4].map(|()| self.anything());
        let rng = &mut self.rng;
        let bits = some(rng, 7, others[0]);
        let offset = some(rng, 0, others[1]);
        let (addr, size) = (some(rng, base, others[2]), some(rng, len, others[3]));
        let hash = Sha256::new()
            .chain_update(key_of(slot).to_le_bytes())
            .chain_update(slot.to_le_bytes())
            .finalize();
        let half = |at: usize| u64::from_le_bytes(hash[at..at + 8].try_into().expect("8 bytes"));
        let fields = [addr, size, bits, half(0), half(8), rng.u64(0..ids), offset];
        let version = rng.u64(0..1000) | u64::from(rng.u8(0..8) > 0);
        let entry = &words(&self.table)[slot as usize * 8..][..8];
        entry[1..].iter().zip(fields).for_each(|(word, field)| word.store(field, SeqCst));
        entry[0].store(version, SeqCst);
    }

    fn write_something(&mut self, breaks_rings: bool) {
        let value = self.anything();
        match self.rng.u8(0..if breaks_rings { 8 } else { 6 }) {
            // All hazard words, its own and the victim's, or one.
            0 => words(&self.lane)[..128].iter().for_each(|word| word.store(value, SeqCst)),
            1 | 2 => words(&self.lane)[self.rng.usize(0..128)].store(value, SeqCst),
            3 => {
                let slot = self.rng.u32(0..SLOTS);
                self.publish(slot);
            }
            4 => words(&self.table)[self.rng.usize(0..8 * SLOTS as usize)].store(value, SeqCst),
            // The sleep words of a ring.
            5 => {
                let ring = (4096 + self.rng.usize(0..2) * RING_STRIDE) / 8;
                let at = if self.rng.bool() { 32 } else { 48 };
                words(&self.lane)[ring + at].store(value, SeqCst);
            }
            // The words in the header of a ring, its indices among them.
            6 => {
                let ring = (4096 + self.rng.usize(0..2) * RING_STRIDE) / 8;
                words(&self.lane)[ring + self.rng.usize(0..64)].store(value, SeqCst);
            }
            _ => words(&self.lane)[self.rng.usize(512..LANE_BYTES / 8)].store(value, SeqCst),
        }
    }

    fn offer_memory(&mut self) {
        let segment = Segment::create("offered", LEN).expect("a segment");
        let id = self.offered.len() as u32;
        let _ = self.socket.send(&named(1, id), &[segment.fd()]);
        self.offered.push(segment);
    }

    /// Sends a message over the socket; false when the victim has left.
    fn say_something(&mut self, breaks_socket: bool) -> bool {
        let id = self.rng.u32(0..self.offered.len() as u32 + 1);
        let said = match self.rng.u8(0..12) {
            0 if self.offered.len() < 200 => {
                self.offer_memory();
                Ok(())
            }
            1 | 2 => self.socket.send(&named(2, id), &[]),
            // An id that is taken, or was.
            3 => match self.offered.get(id as usize) {
                Some(segment) => self.socket.send(&named(1, id), &[segment.fd()]),
                None => Ok(()),
            },
            4 => self.offer_unusable_descriptors(id),
            5 => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                if let Some(segment) = self.offered.get(id as usize) {
                    assert!(rustix::fs::ftruncate(segment.fd(), 4096).is_err(), "it is sealed");
                    rustix::fs::fallocate(segment.fd(), flags, 0, LEN as u64).expect("a hole");
                }
                Ok(())
            }
            6 => {
                // An invalid offer of GPU memory.
                let mut bytes = vec![3; self.rng.usize(1..200)];
                self.rng.fill(&mut bytes[1..]);
                self.socket.send(&bytes, &[])
            }
            7 => (0..500).try_for_each(|_| self.socket.send(&[0], &[])),
            8 if breaks_socket => self.break_socket(),
            _ => self.socket.send(&[self.rng.u8(..)], &[]),
        };
        // The victim need not read as fast as this.
        !said.is_err_and(|e| !uccl_local::fdpass::is_want(&e))
    }

    fn offer_unusable_descriptors(&mut self, id: u32) -> std::io::Result<()> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("offered", flags).expect("a memfd");
        rustix::fs::ftruncate(&memfd, LEN as u64).expect("a length");
        let other = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let fds: &[BorrowedFd<'_>] = match self.rng.u8(0..4) {
            // It could be truncated.
            0 => &[memfd.as_fd()],
            // A sparse memfd of an absurd length.
            1 => {
                rustix::fs::ftruncate(&memfd, 1 << 45).expect("a length");
                rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK).expect("a seal");
                &[memfd.as_fd()]
            }
            2 => &[other.as_fd(), memfd.as_fd()],
            _ => &[other.as_fd()],
        };
        let said = self.socket.send(&named(1, id + 1000), fds);
        // The truncation of the sealed one fails.
        let _ = rustix::fs::ftruncate(&memfd, 1);
        said
    }

    /// Bytes that are no message, and descriptors without one.
    fn break_socket(&mut self) -> std::io::Result<()> {
        let fds: Vec<_> = self.offered.iter().map(Segment::fd).take(64).collect();
        (0..10).try_for_each(|_| self.socket.send(&[9], &fds))?;
        let mut bytes = vec![0; 64];
        self.rng.fill(&mut bytes);
        rustix::net::send(&self.socket, &bytes, rustix::net::SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

fn named(what: u8, id: u32) -> Vec<u8> {
    [&[what][..], &id.to_le_bytes()].concat()
}
