//! Long transfers between GPUs that are ended early: they end within moments, the error does not
//! blame the peer, and the connection survives. The driver is a fake one, which pauses copies until
//! a test continues them.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
#[path = "support/loopback.rs"]
mod loopback;

use std::{
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use uccl_p2p::{
    Change, Config, ConnId, Endpoint, Error, Iov, MrId, NoInterrupt, Op, Request, Signal, Status,
    TransferId, Transport,
    device::cuda::{Context, DeviceBuffer, Gpus},
    wire::advert::Advert,
};

use self::{fake_driver::Fake, loopback::on_loopback};

const GIB: usize = 1 << 30;
/// The most bytes of a long transfer that a GPU has at once.
const TURN: u64 = 64 << 20;
/// The time after which an endpoint gives up a silent peer.
const TIMEOUT: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(30);

fn context(gpu: u32) -> &'static Context {
    Gpus::get().device(gpu).expect("a GPU").context().expect("its context")
}

fn endpoint() -> Endpoint {
    endpoint_over(Transport::Local)
}

fn endpoint_over(transport: Transport) -> Endpoint {
    endpoint_giving_up_after(TIMEOUT, transport)
}

/// An endpoint that gives up a silent peer after this time, or never if it is zero.
fn endpoint_giving_up_after(timeout: Duration, transport: Transport) -> Endpoint {
    let config = Config { transport, num_cpus: 1, timeout, ..on_loopback() };
    Endpoint::new(config).expect("an endpoint")
}

/// Two endpoints with a GiB each on a GPU. Copies are paused, and one test at a time uses the
/// driver.
struct Scene {
    fake: Fake,
    before: u64,
    a: Endpoint,
    _b: Endpoint,
    to_b: ConnId,
    to_a: ConnId,
    iov: Iov,
    advert: Advert,
    /// The peer's memory.
    word_mr: MrId,
    _memory: [DeviceBuffer; 2],
    _alone: MutexGuard<'static, ()>,
}

fn scene() -> Scene {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock();
    let fake = fake_driver::load();
    let memory = [0, 1].map(|gpu| DeviceBuffer::new(context(gpu), GIB).expect("memory"));
    let (a, b) = (endpoint(), endpoint());
    let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    let to_a = b.accept(None, &mut NoInterrupt).expect("accepted").conn;
    let [here, there] = [(&a, &memory[0]), (&b, &memory[1])].map(|(ep, memory)| {
        let ptr = memory.address() as usize;
        // SAFETY: the memory is kept longer than the endpoints.
        let mr = unsafe { ep.register(ptr, GIB) }.expect("registered");
        Iov { mr, ptr, len: GIB }
    });
    let advert = b.advertise(there.mr, there.ptr, GIB).expect("advertised");
    fake.pause(true);
    let before = fake.launched();
    Scene {
        fake,
        before,
        a,
        _b: b,
        to_b,
        to_a,
        iov: here,
        advert,
        word_mr: there.mr,
        _memory: memory,
        _alone: alone,
    }
}

impl Scene {
    /// Posts a write of the whole memory.
    fn post(&self, timeout: Option<Duration>) -> TransferId {
        let (iovs, adverts) = ([self.iov], [self.advert]);
        let request = Request { timeout, ..Request::new(self.to_b, Op::Write, &iovs, &adverts) };
        self.a.post(&request).expect("posted")
    }

    fn launched(&self) -> u64 {
        self.fake.launched() - self.before
    }

    fn error(&self, transfer: TransferId) -> Error {
        match self.a.wait(transfer, Some(PATIENCE), &mut NoInterrupt) {
            Ok(Status::Failed(e)) => e,
            other => panic!("{other:?}"),
        }
    }

    /// Checks that the connection still works.
    fn still_writes(&self) {
        self.a.check_connection(self.to_b).expect("it lives");
        let iovs = [Iov { len: 64, ..self.iov }];
        let adverts = [Advert { len: 64, ..self.advert }];
        let request = Request::new(self.to_b, Op::Write, &iovs, &adverts);
        assert_eq!(self.a.run(&request, &mut NoInterrupt).expect("written").bytes, 64);
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.fake.pause(false);
    }
}

#[test]
fn a_deadline_ends_a_long_write_and_blames_nobody() {
    let scene = scene();
    let transfer = scene.post(Some(Duration::from_millis(300)));
    // Past the deadline, and past the time that a peer has to confirm the end.
    let begun = Instant::now();
    while begun.elapsed() < 3 * TIMEOUT {
        assert!(matches!(scene.a.poll(transfer), Ok(Status::Pending)), "the GPU still copies");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(scene.launched(), TURN);
    scene.fake.pause(false);
    let e = scene.error(transfer);
    assert!(matches!(&e, Error::DeadlineExceeded { peer: None, .. }), "{e:?}");
    assert_eq!(scene.launched(), TURN, "what waited was enqueued");
    scene.still_writes();
}

#[test]
fn a_cancel_of_a_long_write_waits_for_the_part_that_the_gpu_has() {
    let scene = scene();
    let transfer = scene.post(None);
    thread::scope(|scope| {
        let cancelled = scope.spawn(|| scene.a.cancel(transfer));
        // Longer than a peer has to confirm the end, and shorter than a copy of this process has.
        thread::sleep(TIMEOUT + TIMEOUT / 10);
        assert!(!cancelled.is_finished());
        scene.fake.pause(false);
        let status = cancelled.join().expect("no panic");
        assert!(matches!(&status, Ok(Status::Failed(Error::Cancelled { .. }))), "{status:?}");
    });
    assert_eq!(scene.launched(), TURN);
    scene.still_writes();
}

/// The owner would change the word by copies of its own, which the driver counts.
#[test]
fn a_word_on_a_gpu_is_set_without_its_owner() {
    let scene = scene();
    scene.fake.pause(false);
    let word = Advert { addr: scene.advert.addr + 64, len: 8, ..scene.advert };
    // SAFETY: this driver's GPUs have the host's memory; the word is accessed as an atomic.
    let seen = unsafe { AtomicU64::from_ptr((scene._memory[1].address() + 64) as *mut u64) };
    let (iovs, adverts) = ([Iov { len: 8, ..scene.iov }], [Advert { len: 8, ..scene.advert }]);
    scene.still_writes();
    for (value, waits) in [(5, true), (6, false)] {
        let before = scene.launched();
        let signal = Some(Signal { advert: word, change: Change::Set(value), strong: false });
        let request = Request { signal, ..Request::new(scene.to_b, Op::Write, &iovs, &adverts) };
        if waits {
            assert_eq!(scene.a.run(&request, &mut NoInterrupt).expect("written").bytes, 8);
        } else {
            let transfer = scene.a.post(&request).expect("posted");
            let ended = scene.a.wait(transfer, Some(PATIENCE), &mut NoInterrupt);
            assert!(matches!(ended, Ok(Status::Done(_))), "{ended:?}");
        }
        assert_eq!((seen.load(SeqCst), scene.launched() - before), (value, 8));
    }
}

/// The word is in memory that others may open, and the data is not: no GPU of the writer reaches
/// it.
#[test]
fn a_write_to_memory_that_cannot_be_opened_signals_as_it_writes() {
    const LEN: usize = 4096;
    let scene = scene();
    scene.fake.pause(false);
    let closed = DeviceBuffer::new(context(1), LEN).expect("memory");
    let ptr = closed.address() as usize;
    scene.fake.shut(true);
    // SAFETY: the memory is kept until the endpoints have been dropped.
    let mr = unsafe { scene._b.register(ptr, LEN) };
    scene.fake.shut(false);
    let advert = scene._b.advertise(mr.expect("registered"), ptr, LEN).expect("advertised");
    let word = Advert { addr: scene.advert.addr + 64, len: 8, ..scene.advert };
    // SAFETY: this driver's GPUs have the host's memory; the word is accessed as an atomic.
    let seen = unsafe { AtomicU64::from_ptr((scene._memory[1].address() + 64) as *mut u64) };
    let (iovs, adverts) = ([Iov { len: LEN, ..scene.iov }], [advert]);
    scene.still_writes();
    for (value, waits) in [(7, false), (8, true)] {
        // SAFETY: as above; no copy is in flight.
        unsafe { std::ptr::write_bytes(scene.iov.ptr as *mut u8, value as u8, LEN) };
        let signal = Some(Signal { advert: word, change: Change::Set(value), strong: true });
        let request = Request { signal, ..Request::new(scene.to_b, Op::Write, &iovs, &adverts) };
        if waits {
            let ran = scene.a.run(&request, &mut NoInterrupt);
            assert_eq!(ran.expect("written").bytes, LEN as u64);
        } else {
            let transfer = scene.a.post(&request).expect("posted");
            let ended = scene.a.wait(transfer, Some(PATIENCE), &mut NoInterrupt);
            assert!(matches!(ended, Ok(Status::Done(_))), "{ended:?}");
        }
        // SAFETY: as above.
        let there = unsafe { std::slice::from_raw_parts(ptr as *const u8, LEN) };
        assert!(there.iter().all(|byte| u64::from(*byte) == value), "the data came late");
        assert_eq!(seen.load(SeqCst), value);
    }
    drop(scene);
    drop(closed);
}

/// The owner changes the word by a copy that does not end; everything else continues.
#[test]
fn a_word_that_a_gpu_does_not_change_holds_up_no_registration() {
    let scene = scene();
    let word = Advert { addr: scene.advert.addr + 128, len: 8, ..scene.advert };
    let signal = Some(Signal { advert: word, change: Change::Add(3), strong: false });
    let request = Request { signal, ..Request::new(scene.to_b, Op::Write, &[], &[]) };
    let transfer = scene.a.post(&request).expect("posted");
    // Waits until the owner has begun the copy.
    thread::sleep(TIMEOUT / 10);
    thread::scope(|scope| {
        let registered = scope.spawn(|| {
            let memory = vec![0_u8; 4096];
            // SAFETY: the memory is kept until the region has ended.
            let mr = unsafe { scene._b.register(memory.as_ptr() as usize, 4096) };
            scene._b.deregister(mr.expect("registered")).expect("let go");
        });
        let begun = Instant::now();
        while !registered.is_finished() && begun.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
        let in_time = registered.is_finished();
        assert!(matches!(scene.a.poll(transfer), Ok(Status::Pending)), "the word has changed");
        let held = scene._b.deregister(scene.word_mr);
        assert!(matches!(held, Err(Error::StillTouched { .. })), "{held:?}");
        scene.fake.pause(false);
        registered.join().expect("no panic");
        assert!(in_time, "a registration waits for a GPU");
    });
    // The writer may have given up its peer, which was silent for long.
    let _ = scene.a.wait(transfer, Some(PATIENCE), &mut NoInterrupt);
    scene._b.deregister(scene.word_mr).expect("nothing touches it any more");
    // SAFETY: this driver's GPUs have the host's memory, and no copy is in flight.
    let word = unsafe { AtomicU64::from_ptr((scene._memory[1].address() + 128) as *mut u64) };
    assert_eq!(word.load(SeqCst), 3);
}

/// The copy that changes the word is under way when the connection ends.
#[test]
fn a_word_of_an_ended_connection_is_let_go_after_its_change() {
    let scene = scene();
    let word = Advert { addr: scene.advert.addr + 192, len: 8, ..scene.advert };
    let signal = Some(Signal { advert: word, change: Change::Set(9), strong: false });
    // From host memory, so that the owner changes the word.
    let request = Request { signal, ..Request::new(scene.to_b, Op::Write, &[], &[]) };
    scene.a.post(&request).expect("posted");
    let begun = Instant::now();
    while scene.launched() == 0 {
        assert!(begun.elapsed() < PATIENCE, "the owner does not begin");
        thread::sleep(Duration::from_millis(1));
    }
    scene._b.disconnect(scene.to_a).expect("a connection");
    let held = scene._b.deregister(scene.word_mr);
    assert!(matches!(held, Err(Error::StillTouched { .. })), "{held:?}");
    scene.fake.pause(false);
    scene._b.deregister(scene.word_mr).expect("nothing touches it any more");
    // SAFETY: this driver's GPUs have the host's memory, and no copy is in flight.
    let word = unsafe { AtomicU64::from_ptr((scene._memory[1].address() + 192) as *mut u64) };
    assert_eq!(word.load(SeqCst), 9);
}

/// The owner has one worker, and a GPU does not change the word of one peer's signal. The signal
/// comes with a write, or as a message.
#[test]
fn a_word_that_a_gpu_does_not_change_holds_up_no_other_peer() {
    let scene = scene();
    let memory = [1, 2].map(|value| vec![value; 4096]);
    let owner = endpoint_over(Transport::Tcp);
    let of = |ep: &Endpoint, ptr: usize, len: usize| {
        // SAFETY: the memory is kept longer than the endpoints.
        let mr = unsafe { ep.register(ptr, len) }.expect("registered");
        Iov { mr, ptr, len }
    };
    let there = of(&owner, memory[1].as_ptr() as usize, 4096);
    let there = owner.advertise(there.mr, there.ptr, there.len).expect("advertised");
    let words = scene._memory[1].address() as usize;
    let words = of(&owner, words, 4096);
    let writers = [endpoint_over(Transport::Tcp), endpoint_over(Transport::Tcp)];
    let [(signaller, to_owner, from), (other, other_to_owner, other_from)] =
        writers.map(|writer| {
            let conn = writer.connect(owner.addr(), None, &mut NoInterrupt).expect("connected");
            owner.accept(None, &mut NoInterrupt).expect("accepted");
            let from = of(&writer, memory[0].as_ptr() as usize, 4096);
            (writer, conn, from)
        });
    for (at, len) in [(0, 0), (8, 8)] {
        scene.fake.pause(true);
        let word = owner.advertise(words.mr, words.ptr + at, 8).expect("advertised");
        let signal = Some(Signal { advert: word, change: Change::Add(3), strong: false });
        let (iovs, adverts) = ([Iov { len, ..from }], [Advert { len: len as u64, ..there }]);
        let pieces = usize::from(len > 0);
        let request = Request::new(to_owner, Op::Write, &iovs[..pieces], &adverts[..pieces]);
        let transfers =
            [(); 2].map(|()| signaller.post(&Request { signal, ..request }).expect("posted"));
        // Waits until the owner has begun the copy.
        thread::sleep(TIMEOUT / 10);
        let (iovs, adverts) = ([other_from], [there]);
        let request = Request::new(other_to_owner, Op::Write, &iovs, &adverts);
        let request = Request { timeout: Some(TIMEOUT / 2), ..request };
        let written = other.run(&request, &mut NoInterrupt);
        let are_pending = transfers.map(|at| matches!(signaller.poll(at), Ok(Status::Pending)));
        scene.fake.pause(false);
        assert_eq!(are_pending, [true; 2], "a word has changed");
        assert_eq!(written.expect("a GPU's copy holds up another peer").bytes, 4096);
        for transfer in transfers {
            let ended = signaller.wait(transfer, Some(PATIENCE), &mut NoInterrupt);
            assert!(matches!(ended, Ok(Status::Done(_))), "{ended:?}");
        }
        // SAFETY: this driver's GPUs have the host's memory; the word is accessed as an atomic.
        let word = unsafe { AtomicU64::from_ptr((words.ptr + at) as *mut u64) };
        assert_eq!(word.load(SeqCst), 6, "each adds once");
    }
}

/// An owner, a writer, and a signal of the writer's that the owner's GPU does not apply.
struct StalledOwner {
    owner: Endpoint,
    writer: Endpoint,
    to_owner: ConnId,
    to_writer: ConnId,
    /// The writer's transfer.
    transfer: TransferId,
    word_mr: MrId,
    /// Memory of both.
    iovs: [Iov; 2],
    _memory: Vec<u8>,
}

impl StalledOwner {
    /// The signal comes with a write of so many bytes, or as a message.
    fn new(scene: &Scene, ends: [Endpoint; 2], len: usize) -> Self {
        Self::with_deadline(scene, ends, len, None)
    }

    /// The same, with a deadline of the writer's transfer.
    fn with_deadline(
        scene: &Scene,
        [owner, writer]: [Endpoint; 2],
        len: usize,
        timeout: Option<Duration>,
    ) -> Self {
        let before = scene.launched();
        let memory = vec![7_u8; 16];
        let of = |ep: &Endpoint, ptr: usize| {
            // SAFETY: the memory is kept longer than the endpoints.
            let mr = unsafe { ep.register(ptr, 8) }.expect("registered");
            Iov { mr, ptr, len: 8 }
        };
        let to_owner = writer.connect(owner.addr(), None, &mut NoInterrupt).expect("connected");
        let to_writer = owner.accept(None, &mut NoInterrupt).expect("accepted").conn;
        let word = of(&owner, scene._memory[1].address() as usize + 256);
        let there = of(&owner, memory.as_ptr() as usize);
        let from = of(&writer, memory.as_ptr() as usize + 8);
        let [word_advert, at] =
            [word, there].map(|to| owner.advertise(to.mr, to.ptr, 8).expect("advertised"));
        let signal = Some(Signal { advert: word_advert, change: Change::Add(1), strong: false });
        let (iovs, adverts) = ([Iov { len, ..from }], [Advert { len: len as u64, ..at }]);
        let pieces = usize::from(len > 0);
        let request = Request::new(to_owner, Op::Write, &iovs[..pieces], &adverts[..pieces]);
        let request = Request { signal, timeout, ..request };
        let transfer = writer.post(&request).expect("posted");
        let begun = Instant::now();
        while scene.launched() == before {
            assert!(begun.elapsed() < PATIENCE, "the owner does not begin");
            thread::sleep(Duration::from_millis(1));
        }
        let (word_mr, iovs) = (word.mr, [there, from]);
        Self { owner, writer, to_owner, to_writer, transfer, word_mr, iovs, _memory: memory }
    }
}

/// The owner changes a word for the peer when the peer ends. No silence ends the connection.
#[test]
fn a_peers_end_is_seen_while_a_gpu_does_not_change_its_word() {
    let scene = scene();
    for (transport, len) in [(Transport::Tcp, 0), (Transport::Tcp, 8), (Transport::Local, 0)] {
        let ends = [(); 2].map(|()| endpoint_giving_up_after(Duration::ZERO, transport));
        let ends = StalledOwner::new(&scene, ends, len);
        ends.owner.check_connection(ends.to_writer).expect("the peer lives");
        ends.writer.disconnect(ends.to_owner).expect("a connection");
        let told = ends.owner.wait_notifs_from(ends.to_writer, Some(PATIENCE), &mut NoInterrupt);
        scene.fake.pause(false);
        assert!(matches!(told, Err(Error::ConnectionLost { .. })), "{transport:?}: {told:?}");
        ends.owner.deregister(ends.word_mr).expect("nothing touches it any more");
        scene.fake.pause(true);
    }
}

/// The owner's own write waits for an answer of the peer, which the owner does not receive yet.
#[test]
fn a_peer_that_answers_is_not_silent_while_a_gpu_does_not_change_its_word() {
    let scene = scene();
    let timeouts = [TIMEOUT, Duration::ZERO];
    let ends = timeouts.map(|timeout| endpoint_giving_up_after(timeout, Transport::Tcp));
    let ends = StalledOwner::new(&scene, ends, 8);
    let [ours, theirs] = ends.iovs;
    let there = ends.writer.advertise(theirs.mr, theirs.ptr, 8).expect("advertised");
    let (iovs, adverts) = ([ours], [there]);
    let request = Request::new(ends.to_writer, Op::Write, &iovs, &adverts);
    let transfer = ends.owner.post(&request).expect("posted");
    let ended = ends.owner.wait(transfer, Some(2 * TIMEOUT), &mut NoInterrupt);
    scene.fake.pause(false);
    assert!(matches!(ended, Ok(Status::Pending)), "{ended:?}");
    let ended = ends.owner.wait(transfer, Some(PATIENCE), &mut NoInterrupt);
    assert!(matches!(ended, Ok(Status::Done(_))), "{ended:?}");
}

#[test]
fn an_owner_is_not_silent_while_its_gpu_does_not_change_a_word() {
    let scene = scene();
    for (transport, len) in [(Transport::Tcp, 0), (Transport::Tcp, 8), (Transport::Local, 0)] {
        let timeouts = [Duration::ZERO, TIMEOUT];
        let ends = timeouts.map(|timeout| endpoint_giving_up_after(timeout, transport));
        let ends = StalledOwner::new(&scene, ends, len);
        let wait = |patience| ends.writer.wait(ends.transfer, Some(patience), &mut NoInterrupt);
        let ended = wait(2 * TIMEOUT);
        scene.fake.pause(false);
        assert!(matches!(ended, Ok(Status::Pending)), "{transport:?}: {ended:?}");
        let ended = wait(PATIENCE);
        assert!(matches!(ended, Ok(Status::Done(_))), "{transport:?}: {ended:?}");
        scene.fake.pause(true);
    }
}

/// The owner shows signs of life, and does not answer the fence.
#[test]
fn a_deadline_ends_a_transfer_to_an_owner_with_a_gpu_that_hangs() {
    let scene = scene();
    for len in [0, 8] {
        let ends = [Duration::ZERO, Duration::from_secs(1)];
        let ends = ends.map(|timeout| endpoint_giving_up_after(timeout, Transport::Tcp));
        let ends = StalledOwner::with_deadline(&scene, ends, len, Some(Duration::from_secs(1)));
        let ended = ends.writer.wait(ends.transfer, Some(PATIENCE), &mut NoInterrupt);
        scene.fake.pause(false);
        assert!(matches!(ended, Ok(Status::Failed(_))), "{ended:?}");
        // The owner has no timeout: its end waits for the GPU.
        drop(ends);
        scene.fake.pause(true);
    }
}
