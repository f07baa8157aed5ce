//! Two real processes: direct copies, revocation while a writer hammers, peers that die, a ring
//! that sleeps.

use std::env;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use uccl_chaos::patiently;
use uccl_device::Process;
use uccl_fabric::alloc::{SharedBuf, lookup};
use uccl_fabric::mem::{Access, RemoteSpan, Span};
use uccl_fabric::pipe::{PipeRx, PipeTx};
use uccl_fabric::region::{AccessError, RegionTable, Rights};
use uccl_fabric::shm::{MapMode, Mapping, PeerTable, Segment};
use uccl_local::cma::{self, CmaError};
use uccl_local::fdpass::{FdListener, FdSocket, Message};
use uccl_local::shm::{Accesses, ByteRing, Direct, DirectError, Hazards, Reach, RingRx, RingTx};

const ROLE: &str = "UCCL_TEST_ROLE";
const SOCKET: &str = "UCCL_TEST_SOCKET";
/// The owner's memory.
const LEN: usize = 60_000;
/// The byte with which the owner fills its memory after it has revoked the region.
const FILL: u8 = 0xee;
/// How long a process waits for the other before the test has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Not a test by itself: the tests here start it as their second process.
#[test]
#[ignore = "the second process of the other tests"]
fn second_process() {
    let (Ok(role), Ok(name)) = (env::var(ROLE), env::var(SOCKET)) else { return };
    let socket = FdSocket::connect(name.as_bytes()).unwrap();
    match role.as_str() {
        "owner of shared memory" => Owner::new(true).serve(socket),
        "owner of private memory" => Owner::new(false).serve(socket),
        "stuck initiator" => stick(socket),
        "echo" => echo(socket),
        role => panic!("unknown role {role}"),
    }
}

/// A second process; killed when dropped.
struct Second {
    child: Child,
    socket: FdSocket,
}

impl Second {
    fn start(role: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("uccl-processes-{}-{number}", std::process::id());
        let listener = FdListener::bind(name.as_bytes()).unwrap();
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "second_process", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .env(SOCKET, name)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let socket = patiently(|| listener.accept().unwrap());
        assert_eq!(socket.peer().unwrap().pid, Some(child.id() as i32));
        Self { child, socket }
    }

    fn ask(&mut self, what: &[u8]) -> Message {
        self.socket.send(what, &[]).unwrap();
        next(&mut self.socket)
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn next(socket: &mut FdSocket) -> Message {
    patiently(|| socket.recv().unwrap())
}

fn copy_of(fd: impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().unwrap()
}

/// The owner of memory that the first process reaches.
struct Owner {
    table: RegionTable,
    connection: Segment,
    hazards: Hazards,
    memory: Span,
    shared: Option<Arc<SharedBuf>>,
    nonce: [u8; 16],
}

impl Owner {
    fn new(shared: bool) -> Self {
        let connection = Segment::create("connection", 4096).unwrap();
        let shared = shared.then(|| SharedBuf::new(LEN).unwrap());
        let memory = shared.as_ref().map_or_else(
            || Span {
                addr: Box::leak(vec![0u8; LEN].into_boxed_slice()).as_mut_ptr() as usize,
                len: LEN,
            },
            |buf| buf.span(),
        );
        let hazards = Hazards::new(&connection, 0).unwrap();
        Self {
            table: RegionTable::new().unwrap(),
            connection,
            hazards,
            memory,
            shared,
            nonce: *b"nonce of a test!",
        }
    }

    fn serve(self, mut socket: FdSocket) {
        let backing = lookup(self.memory).map(|(backing, _)| backing);
        assert_eq!(backing.is_some(), self.shared.is_some());
        let insert = || self.table.insert(self.memory, Rights::ALL, backing).unwrap();
        let mut region = insert();
        let id = backing.map_or(0, |backing| backing.id);
        let offer = [
            region.key,
            region.slot.into(),
            self.memory.addr as u64,
            id.into(),
            self.nonce.as_ptr() as u64,
        ];
        let mut fds = vec![self.table.published_fd(), self.connection.fd()];
        fds.extend(self.shared.as_ref().map(|buf| buf.fd()));
        socket.send(&offer.map(u64::to_le_bytes).concat(), &fds).unwrap();
        loop {
            match next(&mut socket).bytes.as_slice() {
                b"dump" => socket.send(&self.contents(), &[]).unwrap(),
                b"revoke" => {
                    let revoked = self.table.revoke(region.slot, region.key).unwrap();
                    while self.hazards.holds(revoked.slot()) {
                        std::thread::yield_now();
                    }
                    let landed = self.watch();
                    region = insert();
                    let answer = [landed, region.key, region.slot.into()];
                    socket.send(&answer.map(u64::to_le_bytes).concat(), &[]).unwrap();
                }
                _ => return,
            }
        }
    }

    fn contents(&self) -> Vec<u8> {
        let bytes = (0..self.memory.len).map(|at| {
            // SAFETY: within the memory, which lives as long as the process.
            unsafe { ((self.memory.addr + at) as *const u8).read_volatile() }
        });
        bytes.collect()
    }

    /// Takes the memory back, and counts the bytes that still change.
    fn watch(&self) -> u64 {
        // SAFETY: as above; no peer accesses it any more, which is the property that the test
        // checks.
        unsafe { std::ptr::write_bytes(self.memory.addr as *mut u8, FILL, self.memory.len) };
        let start = Instant::now();
        let mut landed = 0;
        while landed == 0 && start.elapsed() < Duration::from_millis(5) {
            landed = self.contents().into_iter().filter(|byte| *byte != FILL).count() as u64;
        }
        landed
    }
}

fn words<const N: usize>(message: &Message) -> [u64; N] {
    let (words, []) = message.bytes.as_chunks() else { panic!("{message:?}") };
    let words: Vec<_> = words.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    words.try_into().unwrap()
}

/// The owner's offer, as the initiator holds it.
struct OwnerOffer {
    owner: Second,
    direct: Direct,
    all: RemoteSpan,
}

/// `None`, with a message, when the system forbids the access that is to be tested.
fn reach(shared: bool) -> Option<OwnerOffer> {
    let mut owner =
        Second::start(if shared { "owner of shared memory" } else { "owner of private memory" });
    let offer = next(&mut owner.socket);
    let words: Vec<u64> =
        offer.bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let [key, slot, addr, id, nonce] = words[..] else { panic!("offer of {} words", words.len()) };
    let pid = owner.child.id() as i32;
    if !shared {
        match cma::probe(pid, nonce, b"nonce of a test!") {
            Err(CmaError::Forbidden) => {
                eprintln!("skipped: this system forbids cross-memory attach");
                return None;
            }
            found => assert!(found.unwrap()),
        }
        assert!(!cma::probe(pid, nonce, b"another test's..").unwrap());
        assert!(matches!(cma::probe(pid, 8, b"another test's.."), Err(CmaError::Fault)));
    }
    let mut fds = offer.fds.into_iter();
    let table = PeerTable::map(fds.next().unwrap()).unwrap();
    let connection = Mapping::of(fds.next().unwrap(), MapMode::ReadWrite, 4096).unwrap();
    let hazards = Hazards::new(&Arc::new(connection), 0).unwrap();
    let process = (!shared).then(|| Process::open(pid).unwrap());
    let direct = Direct::new(table, hazards, process);
    if let Some(fd) = fds.next() {
        direct.insert_mapping(id as u32, fd, LEN).unwrap();
    }
    let all = RemoteSpan { addr, len: LEN as u64, key, slot: slot as u32 };
    assert_eq!(direct.reach(&all), if shared { Reach::Mapped } else { Reach::Cma });
    Some(OwnerOffer { owner, direct, all })
}

impl OwnerOffer {
    fn part(&self, at: usize, len: usize) -> RemoteSpan {
        RemoteSpan { addr: self.all.addr + at as u64, len: len as u64, ..self.all }
    }

    fn copy(
        &self,
        access: Access,
        local: &[Span],
        remote: &[RemoteSpan],
    ) -> Result<u64, DirectError> {
        // SAFETY: every test gives memory of its own.
        unsafe { self.direct.copy(access, local, remote) }
    }
}

fn span(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr() as usize, len: bytes.len() }
}

fn span_mut(bytes: &mut [u8]) -> Span {
    Span { addr: bytes.as_mut_ptr() as usize, len: bytes.len() }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

#[test]
fn memory_is_written_and_read() {
    for shared in [true, false] {
        let Some(mut reached) = reach(shared) else { continue };
        let data = pattern(LEN);
        assert_eq!(
            reached.copy(Access::Write, &[span(&data)], &[reached.all]).unwrap(),
            LEN as u64
        );
        assert!(reached.owner.ask(b"dump").bytes == data, "shared: {shared}");
        let mut back = vec![0; 1000];
        reached.copy(Access::Read, &[span_mut(&mut back)], &[reached.part(500, 1000)]).unwrap();
        assert_eq!(back, data[500..1500]);
    }
}

/// The bytes of both lists are paired in order, however each is cut, empty pieces included.
#[test]
fn lists_are_paired_byte_by_byte() {
    for shared in [true, false] {
        let Some(mut reached) = reach(shared) else { continue };
        let data = pattern(9_000);
        let local: Vec<_> =
            [&data[..1], &[], &data[1..5_000], &data[5_000..]].into_iter().map(span).collect();
        // Every other piece of three bytes: more pieces than the kernel takes at once.
        let remote: Vec<_> =
            (0..3_000).map(|i| reached.part(i * 6, 3)).chain([reached.part(0, 0)]).collect();
        assert_eq!(reached.copy(Access::Write, &local, &remote).unwrap(), 9_000);
        let mut expected = vec![0; LEN];
        for (i, piece) in data.chunks(3).enumerate() {
            expected[i * 6..][..3].copy_from_slice(piece);
        }
        assert!(reached.owner.ask(b"dump").bytes == expected, "shared: {shared}");
        let mut back = vec![0; 9_000];
        let (head, tail) = back.split_at_mut(777);
        let local = [span_mut(head), span_mut(tail)];
        assert_eq!(reached.copy(Access::Read, &local, &remote).unwrap(), 9_000);
        assert_eq!(back, data);
    }
}

#[test]
fn nothing_moves_when_anything_is_refused() {
    for shared in [true, false] {
        let Some(mut reached) = reach(shared) else { continue };
        let data = vec![1; 20];
        let forged = RemoteSpan { key: reached.all.key ^ 1, ..reached.part(10, 10) };
        let outside = reached.part(LEN - 9, 10);
        let wraps = RemoteSpan { addr: u64::MAX - 4, ..reached.part(0, 10) };
        for (bad, why) in [
            (forged, AccessError::UnknownKey),
            (RemoteSpan { slot: 7, ..forged }, AccessError::UnknownKey),
            (outside, AccessError::OutOfBounds),
            (wraps, AccessError::OutOfBounds),
        ] {
            let alone = reached.copy(Access::Write, &[span(&data[..10])], &[bad]);
            assert!(matches!(alone, Err(DirectError::Refused(error)) if error == why), "{alone:?}");
            let second = reached.copy(Access::Write, &[span(&data)], &[reached.part(0, 10), bad]);
            assert!(
                matches!(second, Err(DirectError::Refused(error)) if error == why),
                "{second:?}"
            );
            assert_eq!(reached.direct.reach(&bad), Reach::None);
        }
        let lengths = reached.copy(Access::Write, &[span(&data)], &[reached.part(0, 19)]);
        assert!(matches!(lengths, Err(DirectError::Length { local: 20, remote: 19 })));
        let unpublished = RemoteSpan { slot: u32::MAX, ..reached.part(0, 20) };
        let unpublished = reached.copy(Access::Write, &[span(&data)], &[unpublished]);
        assert!(matches!(unpublished, Err(DirectError::Unreachable)));
        assert!(reached.owner.ask(b"dump").bytes.iter().all(|byte| *byte == 0));
    }
}

/// Once the owner has revoked and drained, not one byte of writers that never pause lands any more.
#[test]
fn nothing_lands_after_revocation() {
    for shared in [true, false] {
        let Some(mut reached) = reach(shared) else { continue };
        for round in 0..50 {
            let landed = hammer_until_revoked(&mut reached);
            assert_eq!(landed, 0, "bytes landed late in round {round}, shared: {shared}");
        }
        assert!(reached.owner.ask(b"dump").bytes.iter().all(|byte| *byte == FILL));
    }
}

/// Two threads write all of the memory without pause while its owner revokes it and takes it back.
/// How many bytes the owner found changed; the region is a new one after.
fn hammer_until_revoked(reached: &mut OwnerOffer) -> u64 {
    let OwnerOffer { owner, direct, all } = reached;
    let (direct, region, written) = (&*direct, *all, &AtomicU64::new(0));
    let hammer = |value: u8| {
        let data = vec![value; LEN];
        move || loop {
            // SAFETY: `data` lives during the call.
            match unsafe { direct.copy(Access::Write, &[span(&data)], &[region]) } {
                Ok(_) => written.fetch_add(1, Ordering::Relaxed),
                Err(error) => return error,
            };
        }
    };
    std::thread::scope(|scope| {
        let writers = [1, 2].map(|value| scope.spawn(hammer(value)));
        patiently(|| (written.load(Ordering::Relaxed) > 20).then_some(()));
        let [landed, key, slot] = words(&owner.ask(b"revoke"));
        for writer in writers {
            let error = writer.join().unwrap();
            assert!(matches!(error, DirectError::Refused(AccessError::UnknownKey)), "{error:?}");
        }
        (all.key, all.slot) = (key, slot as u32);
        landed
    })
}

#[test]
fn a_killed_owner_is_noticed() {
    let Some(mut reached) = reach(false) else { return };
    let data = vec![1; 10];
    reached.copy(Access::Write, &[span(&data)], &[reached.part(0, 10)]).unwrap();
    let process = Process::open(reached.owner.child.id() as i32).unwrap();
    assert!(!process.has_ended());
    reached.owner.child.kill().unwrap();
    let ended = patiently(|| reached.owner.socket.recv().err());
    assert!(matches!(ended.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset));
    reached.owner.child.wait().unwrap();
    assert!(process.has_ended());
    let gone = reached.copy(Access::Write, &[span(&data)], &[reached.part(0, 10)]);
    assert!(matches!(gone, Err(DirectError::Cma(CmaError::PeerGone))), "{gone:?}");
    assert!(Process::open(reached.owner.child.id() as i32).is_err());
}

/// Shared memory outlives its owner: the copy reaches no process, and harms nothing.
#[test]
fn a_killed_owner_leaves_its_mappings() {
    let Some(mut reached) = reach(true) else { return };
    reached.owner.child.kill().unwrap();
    reached.owner.child.wait().unwrap();
    let data = pattern(LEN);
    reached.copy(Access::Write, &[span(&data)], &[reached.all]).unwrap();
    let mut back = vec![0; LEN];
    reached.copy(Access::Read, &[span_mut(&mut back)], &[reached.all]).unwrap();
    assert!(back == data);
}

/// Claims a hazard, and never ends the access.
fn stick(mut socket: FdSocket) {
    let Message { bytes, fds } = next(&mut socket);
    let connection =
        Mapping::of(fds.into_iter().next().unwrap(), MapMode::ReadWrite, 4096).unwrap();
    let hazards = Hazards::new(&Arc::new(connection), 0).unwrap();
    let accesses = Accesses::new(hazards);
    let _guard = accesses.try_claim(bytes[0].into()).unwrap();
    socket.send(b"claimed", &[]).unwrap();
    next(&mut socket);
}

/// The hazard of a peer that died stays; the owner is free once the peer's socket has ended.
#[test]
fn a_killed_initiator_leaves_its_hazard() {
    let mut initiator = Second::start("stuck initiator");
    let table = RegionTable::new().unwrap();
    let region = table.insert(Span { addr: 4096, len: 8 }, Rights::ALL, None).unwrap();
    let connection = Segment::create("connection", 4096).unwrap();
    let hazards = Hazards::new(&connection, 0).unwrap();
    initiator.socket.send(&[region.slot as u8], &[connection.fd()]).unwrap();
    assert_eq!(next(&mut initiator.socket).bytes, b"claimed");
    let revoked = table.revoke(region.slot, region.key).unwrap();
    assert!(hazards.holds(revoked.slot()));
    initiator.child.kill().unwrap();
    patiently(|| initiator.socket.recv().err());
    assert!(hazards.holds(revoked.slot()));
}

const RING: usize = 4096;

/// One side of a two-way connection over rings, which sleeps when it has nothing to do.
struct Side {
    tx: RingTx,
    rx: RingRx,
    wake_peer: OwnedFd,
    wake_me: OwnedFd,
}

impl Side {
    fn new(connection: &Arc<Mapping>, first: bool, [one, two]: [OwnedFd; 2]) -> Self {
        let ring =
            |at: usize| ByteRing::new(connection, at * ByteRing::layout_len(RING), RING).unwrap();
        let (out, back) = if first { (0, 1) } else { (1, 0) };
        let (wake_peer, wake_me) = if first { (one, two) } else { (two, one) };
        Self { tx: ring(out).into_tx(), rx: ring(back).into_rx(), wake_peer, wake_me }
    }

    fn wake(&self) {
        rustix::io::write(&self.wake_peer, &1u64.to_ne_bytes()).unwrap();
    }

    /// Sleeps until the other side wakes us. A wake-up that was lost is a failure.
    fn sleep(&self) {
        let mut fds = [PollFd::new(&self.wake_me, PollFlags::IN)];
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&patience)).unwrap(), 1, "a wake-up was lost");
        rustix::io::read(&self.wake_me, &mut [0; 8]).unwrap();
    }

    fn send_all(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            // SAFETY: the slice is readable.
            let sent = unsafe { self.tx.send(&[span(bytes)]) }.unwrap();
            bytes = &bytes[sent..];
            if self.tx.reader_needs_wake() {
                self.wake();
            }
            if sent == 0 && self.tx.prepare_wait_space() {
                self.sleep();
                self.tx.awake();
            }
        }
    }

    /// The next bytes; none at the end.
    fn recv<'a>(&mut self, buf: &'a mut [u8]) -> &'a [u8] {
        loop {
            // SAFETY: the buffer is writable.
            if let Some(n) = unsafe { self.rx.recv(&[span_mut(buf)]) }.unwrap() {
                if self.rx.writer_needs_wake() {
                    self.wake();
                }
                return &buf[..n];
            }
            if self.rx.prepare_sleep() {
                self.sleep();
                self.rx.awake();
            }
        }
    }
}

fn echo(mut socket: FdSocket) {
    let mut fds = next(&mut socket).fds.into_iter();
    let mut fd = || fds.next().unwrap();
    let connection = Arc::new(Mapping::of(fd(), MapMode::ReadWrite, 1 << 20).unwrap());
    let mut side = Side::new(&connection, false, [fd(), fd()]);
    let mut buf = [0; 1500];
    loop {
        let bytes = side.recv(&mut buf);
        if bytes.is_empty() {
            break;
        }
        side.send_all(bytes);
    }
    side.tx.close();
    if side.tx.reader_needs_wake() {
        side.wake();
    }
    next(&mut socket);
}

#[test]
fn a_ring_carries_bytes_and_wakes_its_sleepers() {
    let mut second = Second::start("echo");
    let connection = Segment::create("connection", 2 * ByteRing::layout_len(RING)).unwrap();
    let wakes = [0, 0].map(|count| eventfd(count, EventfdFlags::CLOEXEC).unwrap());
    second.socket.send(b"", &[connection.fd(), wakes[0].as_fd(), wakes[1].as_fd()]).unwrap();
    let mut side = Side::new(&connection, true, [copy_of(&wakes[0]), copy_of(&wakes[1])]);
    let data = pattern(RING);
    let mut buf = [0; RING];
    for round in 0..5_000 {
        // From a byte to as much as a ring holds.
        let sent = &data[..1 + round * 7919 % RING];
        side.send_all(sent);
        let mut got = 0;
        while got < sent.len() {
            let bytes = side.recv(&mut buf);
            assert!(!bytes.is_empty());
            assert_eq!(bytes, &sent[got..got + bytes.len()], "round {round}");
            got += bytes.len();
        }
    }
    side.tx.close();
    if side.tx.reader_needs_wake() {
        side.wake();
    }
    assert!(side.recv(&mut buf).is_empty());
}
