//! A stream that waits for a transfer never delays the transfer. The driver is a fake one; its
//! calls block while a stream waits, like those of the real one.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
#[path = "support/loopback.rs"]
mod loopback;

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use uccl_p2p::{
    Config, ConnId, CudaStream, Endpoint, Error, Iov, MrId, NoInterrupt, Op, Request, Signal,
    Status, StreamWait, TransferId, Transport,
    device::cuda::{
        Context, DeviceBuffer, Direction, Gpus, PinnedBuffer, Priority, Stream,
        wait_until_given_back,
    },
    wire::{advert::Advert, signal::Change},
};

use self::{fake_driver::Fake, loopback::on_loopback};

const PIECES: usize = 100;
const PIECE: usize = 3000;
/// The distance of two pieces, which are not adjacent.
const STEP: usize = 4096;
const LEN: usize = PIECES * STEP;

fn context(gpu: u32) -> &'static Context {
    Gpus::get().device(gpu).expect("a GPU").context().expect("its context")
}

fn endpoint(transport: Transport) -> Endpoint {
    // Longer than any test waits: no deadline releases a stream that is held for ever.
    endpoint_with(transport, Duration::from_secs(600))
}

fn endpoint_with(transport: Transport, transfer_timeout: Duration) -> Endpoint {
    let config = Config {
        transport,
        num_cpus: 2,
        timeout: Duration::from_secs(5),
        transfer_timeout,
        ..on_loopback()
    };
    Endpoint::new(config).expect("an endpoint")
}

fn finish(ep: &Endpoint, transfer: TransferId) -> Result<u64, Error> {
    match ep.wait(transfer, None, &mut NoInterrupt)? {
        Status::Done(outcome) => Ok(outcome.bytes),
        Status::Failed(e) => Err(e),
        Status::Pending => panic!("{transfer} hangs"),
    }
}

/// Fails unless `run` ends in time.
fn ends<T: Send + 'static>(what: String, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(run()));
    told.recv_timeout(Duration::from_secs(30)).unwrap_or_else(|_| panic!("{what} does not end"))
}

/// The GPUs of this driver have the host's memory.
fn bytes(memory: &DeviceBuffer) -> &[u8] {
    // SAFETY: memory of this length; no copy is in flight when the tests look.
    unsafe { std::slice::from_raw_parts(memory.address() as *const u8, memory.len_bytes()) }
}

fn fill(memory: &mut DeviceBuffer, source: &[u8]) {
    assert!(source.len() <= memory.len_bytes());
    // SAFETY: memory of this length at least; no copy is in flight when the tests fill it.
    unsafe {
        std::ptr::copy_nonoverlapping(source.as_ptr(), memory.address() as *mut u8, source.len());
    }
}

fn cuda_stream(stream: &Stream) -> CudaStream {
    // SAFETY: the tests keep their streams.
    unsafe { CudaStream::new(stream.context().device().ordinal(), stream.handle()) }
}

/// Two endpoints with GPU memory, which transfers access in scattered pieces.
struct Scene {
    fake: Fake,
    a: Endpoint,
    b: Endpoint,
    to_b: ConnId,
    here: DeviceBuffer,
    there: DeviceBuffer,
    iovs: Vec<Iov>,
    adverts: Vec<Advert>,
}

/// The process has one driver.
static ALONE: Mutex<()> = Mutex::new(());

fn scene(transport: Transport) -> Scene {
    scene_of([endpoint(transport), endpoint(transport)])
}

fn scene_of([a, b]: [Endpoint; 2]) -> Scene {
    let fake = fake_driver::load();
    let memory = |gpu| DeviceBuffer::new(context(gpu), LEN).expect("memory");
    let (here, there) = (memory(0), memory(1));
    let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    b.accept(None, &mut NoInterrupt).expect("accepted");
    let register = |ep: &Endpoint, memory: &DeviceBuffer| {
        // SAFETY: the memory is kept longer than the endpoints.
        unsafe { ep.register(memory.address() as usize, LEN) }.expect("registered")
    };
    let (mr, remote) = (register(&a, &here), register(&b, &there));
    let starts = || (0..PIECES).map(|i| i * STEP);
    let iov = |at| Iov { mr, ptr: here.address() as usize + at, len: PIECE };
    let advert =
        |at| b.advertise(remote, there.address() as usize + at, PIECE).expect("advertised");
    let (iovs, adverts) = (starts().map(iov).collect(), starts().map(advert).collect());
    Scene { fake, a, b, to_b, here, there, iovs, adverts }
}

fn wanted(source: &[u8]) -> Vec<u8> {
    let mut wanted = vec![0; LEN];
    for at in (0..PIECES).map(|i| i * STEP) {
        wanted[at..at + PIECE].copy_from_slice(&source[at..at + PIECE]);
    }
    wanted
}

/// Reserves the driver for one test, with `queues` hardware queues per GPU; 0 is one for each
/// stream.
struct Alone {
    fake: Fake,
    _guard: MutexGuard<'static, ()>,
}

fn alone(queues: i32) -> Alone {
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fake = fake_driver::load();
    fake.connections(queues);
    Alone { fake, _guard: guard }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.fake.connections(0);
        self.fake.pause(false);
        self.fake.stall(false);
    }
}

/// A stream already waits when the transfer begins, which is the first one that the lane copies
/// with a kernel.
fn scattered(transport: Transport, op: Op, queues: i32) {
    let _alone = alone(queues);
    let mut s = scene(transport);
    let source: Vec<u8> = (0..LEN).map(|i| ((i * 167) >> 4) as u8 ^ i as u8).collect();
    fill(if op == Op::Read { &mut s.there } else { &mut s.here }, &source);
    let [before, after] = [(), ()].map(|()| Stream::new(context(0), Priority::Normal));
    let (before, after) = (before.expect("a stream"), after.expect("a stream"));
    s.fake.pause(true);
    let scratch = DeviceBuffer::new(context(0), 4096).expect("memory");
    let (a, b) = (scratch.address(), scratch.address() + 2048);
    // SAFETY: two halves of memory that no other code uses.
    unsafe { before.copy(a, b, 2048, Direction::DeviceToDevice) }.expect("enqueued");
    let mut request = Request::new(s.to_b, op, &s.iovs, &s.adverts);
    request.after = Some(cuda_stream(&before));
    let transfer = s.a.post(&request).expect("posted");
    s.a.hold_stream(transfer, cuda_stream(&after)).expect("held");
    // The memory is freed while the transfer runs.
    drop(scratch);
    s.fake.pause(false);
    let s = ends(format!("{op:?} over {transport:?}"), move || {
        assert_eq!(finish(&s.a, transfer).expect("moved"), (PIECES * PIECE) as u64);
        after.synchronize().expect("it goes on");
        s
    });
    let to = if op == Op::Read { &s.here } else { &s.there };
    assert!(bytes(to) == wanted(&source), "wrong bytes over {transport:?}");
    ends(format!("closing over {transport:?}"), move || drop(s));
}

#[test]
fn a_scattered_read_on_one_host() {
    scattered(Transport::Local, Op::Read, 0);
}

#[test]
fn a_scattered_write_on_one_host() {
    scattered(Transport::Local, Op::Write, 0);
}

/// The transfer's copies are enqueued before the wait, in the one hardware queue that all streams
/// share.
#[test]
fn transfers_on_one_host_pass_a_wait_in_the_only_queue() {
    for queues in [1, 2] {
        scattered(Transport::Local, Op::Read, queues);
        scattered(Transport::Local, Op::Write, queues);
    }
}

/// A long transfer is enqueued in slices, and some of them after the wait.
#[test]
fn a_long_transfer_on_one_host_passes_a_wait_in_the_only_queue() {
    const LONG: usize = 200 << 20;
    let alone = alone(1);
    let memory = |gpu| DeviceBuffer::new(context(gpu), LONG).expect("memory");
    let (here, there) = (memory(0), memory(1));
    let (a, b) = (endpoint(Transport::Local), endpoint(Transport::Local));
    let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    b.accept(None, &mut NoInterrupt).expect("accepted");
    let register = |ep: &Endpoint, memory: &DeviceBuffer| {
        // SAFETY: the memory is kept longer than the endpoints.
        unsafe { ep.register(memory.address() as usize, LONG) }.expect("registered")
    };
    let (mr, remote) = (register(&a, &here), register(&b, &there));
    let advert = b.advertise(remote, there.address() as usize, LONG).expect("advertised");
    let iovs = [Iov { mr, ptr: here.address() as usize, len: LONG }];
    let after = Stream::new(context(0), Priority::Normal).expect("a stream");
    alone.fake.pause(true);
    let transfer = a.post(&Request::new(to_b, Op::Write, &iovs, &[advert])).expect("posted");
    a.hold_stream(transfer, cuda_stream(&after)).expect("held");
    assert!(!after.is_idle().expect("it works"), "the stream does not wait");
    alone.fake.pause(false);
    ends("a long write".to_owned(), move || {
        after.synchronize().expect("it goes on");
        assert_eq!(finish(&a, transfer).expect("moved"), LONG as u64);
        drop((a, b, here, there));
    });
}

#[test]
fn a_scattered_read_over_streams() {
    scattered(Transport::Tcp, Op::Read, 0);
}

#[test]
fn a_scattered_write_over_streams() {
    scattered(Transport::Tcp, Op::Write, 0);
}

/// The copies of a staged transfer are enqueued later. If they could queue behind the stream's
/// wait, the call itself waits. The driver's setting holds for a process, so the test runs once
/// more in a process with it.
#[test]
fn staged_transfers_pass_a_wait_in_the_only_queue() {
    const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(VARIABLE).is_none() {
        let own = std::env::current_exe().expect("a path");
        let test = "staged_transfers_pass_a_wait_in_the_only_queue";
        let mut again = std::process::Command::new(own);
        let status = again.args(["--exact", test]).env(VARIABLE, "1").status().expect("it runs");
        assert!(status.success(), "{status}");
        return;
    }
    for op in [Op::Read, Op::Write] {
        let _alone = alone(1);
        let mut s = scene(Transport::Tcp);
        let source: Vec<u8> = (0..LEN).map(|i| ((i * 167) >> 4) as u8 ^ i as u8).collect();
        fill(if op == Op::Read { &mut s.there } else { &mut s.here }, &source);
        let after = Stream::new(context(0), Priority::Normal).expect("a stream");
        let transfer = s.a.post(&Request::new(s.to_b, op, &s.iovs, &s.adverts)).expect("posted");
        let s = ends(format!("a staged {op:?}"), move || {
            s.a.hold_stream(transfer, cuda_stream(&after)).expect("held");
            after.synchronize().expect("it goes on");
            assert_eq!(finish(&s.a, transfer).expect("moved"), (PIECES * PIECE) as u64);
            s
        });
        let to = if op == Op::Read { &s.here } else { &s.there };
        assert!(bytes(to) == wanted(&source), "wrong bytes");
        ends("closing".to_owned(), move || drop(s));
    }
}

/// Memory is returned to the driver only after the stream has continued. Before that the driver
/// would wait for the stream, and block the change of the word.
#[test]
fn memory_is_given_back_only_after_a_stream_that_waits_for_a_word_of_a_gpu() {
    let _alone = alone(0);
    let words = DeviceBuffer::new(context(0), 4096).expect("memory");
    let ep = endpoint(Transport::Tcp);
    let ptr = words.address() as usize;
    // SAFETY: the memory is kept longer than the endpoint.
    let mr = unsafe { ep.register(ptr, 4096) }.expect("registered");
    let stream = Stream::new(context(0), Priority::Normal).expect("a stream");
    // SAFETY: this driver's GPUs have the host's memory; a word that is accessed as an atomic
    // alone.
    let word = unsafe { AtomicU64::from_ptr((ptr + 8) as *mut u64) };
    word.store(0, Ordering::Release);
    ep.hold_stream_for_word(cuda_stream(&stream), mr, ptr + 8, 3).expect("held");
    drop(DeviceBuffer::new(context(0), 4096).expect("memory"));
    assert!(!wait_until_given_back(Duration::from_millis(100)), "it goes back meanwhile");
    assert!(!stream.is_idle().expect("it works"), "the stream does not wait");
    ends("a copy meanwhile".to_owned(), || {
        let through = Stream::new(context(0), Priority::High).expect("a stream");
        let memory = DeviceBuffer::new(context(0), 4096).expect("memory");
        let (from, to) = (memory.address(), memory.address() + 2048);
        // SAFETY: two halves of memory that no other code uses; the copy is waited for.
        unsafe { through.copy(to, from, 2048, Direction::DeviceToDevice) }.expect("enqueued");
        through.synchronize().expect("copied");
    });
    word.store(3, Ordering::Release);
    ends("the stream".to_owned(), move || stream.synchronize().expect("it goes on"));
    assert!(wait_until_given_back(Duration::from_secs(20)), "nothing goes back");
    ep.deregister(mr).expect("the wait is over");
    drop((ep, words));
}

/// The word changes, its region ends, the time is over, or the endpoint closes.
#[test]
fn a_stream_that_waits_for_a_word_of_the_host_goes_on_in_the_end() {
    for end in 0..4 {
        let _alone = alone(0);
        let words = PinnedBuffer::new(context(0), 4096).expect("memory");
        let short = Duration::from_millis(200);
        let patience = if end == 2 { short } else { Duration::from_secs(600) };
        let ep = endpoint_with(Transport::Tcp, patience);
        let ptr = words.address() as usize;
        // SAFETY: the memory is kept longer than the endpoint.
        let mr = unsafe { ep.register(ptr, 4096) }.expect("registered");
        let stream = Stream::new(context(0), Priority::Normal).expect("a stream");
        ep.hold_stream_for_word(cuda_stream(&stream), mr, ptr + 8, 3).expect("held");
        assert!(end == 2 || !stream.is_idle().expect("it works"), "the stream does not wait");
        // SAFETY: a word that is accessed as an atomic alone.
        let word = unsafe { AtomicU64::from_ptr((ptr + 8) as *mut u64) };
        match end {
            0 => word.store(4, Ordering::Release),
            1 => ep.deregister(mr).expect("let go"),
            2 => {}
            _ => ep.close().expect("closed"),
        }
        ends(format!("the stream after {end}"), move || stream.synchronize().expect("it goes on"));
        drop((ep, words));
    }
}

/// A stream's wait for a word that depends on a connection.
struct Dependent {
    a: Endpoint,
    b: Endpoint,
    to_a: ConnId,
    to_b: ConnId,
    word: Place,
    mr: MrId,
}

/// Where the word is: on a GPU, or in locked memory.
enum Place {
    Gpu(DeviceBuffer),
    Host(PinnedBuffer),
}

impl Place {
    fn ptr(&self) -> usize {
        match self {
            Self::Gpu(memory) => memory.address() as usize + 8,
            Self::Host(memory) => memory.address() as usize + 8,
        }
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: this driver's GPUs have the host's memory; a word that is accessed as an atomic
        // alone.
        unsafe { AtomicU64::from_ptr(self.ptr() as *mut u64) }
    }
}

impl Dependent {
    fn new(on_gpu: bool, patience: Duration) -> Self {
        let memory = || DeviceBuffer::new(context(0), 4096).expect("memory");
        let locked = || PinnedBuffer::new(context(0), 4096).expect("memory");
        let word = if on_gpu { Place::Gpu(memory()) } else { Place::Host(locked()) };
        let [a, b] = [(), ()].map(|()| endpoint_with(Transport::Tcp, patience));
        let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
        let to_a = b.accept(None, &mut NoInterrupt).expect("accepted").conn;
        word.word().store(0, Ordering::Release);
        // SAFETY: the memory is kept longer than the endpoint.
        let mr = unsafe { a.register(word.ptr() - 8, 4096) }.expect("registered");
        Self { a, b, to_a, to_b, word, mr }
    }

    fn hold(&self, stream: &Stream) -> StreamWait {
        let word = (self.mr, self.word.ptr());
        self.a.hold_stream_for_word_from(self.to_b, cuda_stream(stream), word, 3).expect("held")
    }
}

/// How a stream's wait for a word ends that a peer is to change, in each of these ways.
fn ends_by(what: &str, on_gpu: bool, queues: i32) {
    let _alone = alone(queues);
    let is_short = what == "its time";
    let patience = Duration::from_millis(if is_short { 300 } else { 600_000 });
    let d = Dependent::new(on_gpu, patience);
    let stream = Stream::new(context(0), Priority::Normal).expect("a stream");
    let wait = d.hold(&stream);
    assert!(is_short || !stream.is_idle().expect("it works"), "the stream does not wait");
    assert!(is_short || wait.outcome().is_none());
    match what {
        "the word" => d.word.word().store(4, Ordering::Release),
        "its time" => {}
        "the peer" => d.b.disconnect(d.to_a).expect("it was there"),
        "its region" => d.a.deregister(d.mr).expect("let go"),
        _ => d.a.close().expect("closed"),
    }
    let told = ends(format!("a wait that is ended by {what}"), move || {
        stream.synchronize().expect("it goes on");
        wait.outcome().expect("it is over")
    });
    let is_right = match &told {
        Ok(()) => what == "the word",
        Err(Error::Timeout(_)) => what == "its time",
        Err(Error::ConnectionLost { .. }) => what == "the peer",
        Err(Error::UnknownRegion(_)) => what == "its region",
        Err(Error::Closed) => what == "the end",
        Err(_) => false,
    };
    assert!(is_right, "{what}: {told:?}");
    assert!(wait_until_given_back(Duration::from_secs(20)), "the stream counts as held");
    let Dependent { a, b, word, .. } = d;
    ends(format!("closing after {what}"), move || drop((a, b)));
    drop(word);
}

#[test]
fn a_stream_that_waits_for_a_peers_word_goes_on_in_the_end() {
    for on_gpu in [false, true] {
        for what in ["the word", "its time", "the peer", "its region", "the end"] {
            ends_by(what, on_gpu, 0);
        }
    }
}

/// Each look at the word stands behind the stream's wait.
#[test]
fn a_stream_in_the_only_queue_does_not_wait_for_a_peer_that_is_lost() {
    for what in ["its time", "the peer", "its region", "the end"] {
        ends_by(what, true, 1);
    }
}

/// While a stream is held, and the program frees memory, no call returns that enqueues a copy.
#[test]
fn a_look_that_does_not_return_holds_up_no_end() {
    for what in ["the peer", "its time"] {
        let alone = alone(0);
        let patience = Duration::from_millis(if what == "its time" { 300 } else { 600_000 });
        let d = Dependent::new(true, patience);
        let stream = Stream::new(context(0), Priority::Normal).expect("a stream");
        alone.fake.stall(true);
        let wait = d.hold(&stream);
        while alone.fake.stalled() == 0 && wait.outcome().is_none() {
            thread::yield_now();
        }
        if what == "the peer" {
            d.b.disconnect(d.to_a).expect("it was there");
        }
        ends(format!("a wait that is ended by {what}"), move || {
            stream.synchronize().expect("it goes on");
        });
        assert!(matches!(wait.outcome(), Some(Err(_))), "{:?}", wait.outcome());
        alone.fake.stall(false);
        d.a.deregister(d.mr).expect("the look is over");
        ends(format!("closing after {what}"), move || drop((d.a, d.b, d.word)));
    }
}

/// A change that the peer made before its end counts.
#[test]
fn a_word_that_was_changed_before_the_peers_end_is_seen() {
    for on_gpu in [false, true] {
        let _alone = alone(0);
        let d = Dependent::new(on_gpu, Duration::from_secs(600));
        let stream = Stream::new(context(0), Priority::Normal).expect("a stream");
        let advert = d.a.advertise(d.mr, d.word.ptr(), 8).expect("advertised");
        let wait = d.hold(&stream);
        let signal = Some(Signal { advert, change: Change::Set(3), strong: false });
        let write = Request { signal, ..Request::new(d.to_a, Op::Write, &[], &[]) };
        d.b.run(&write, &mut NoInterrupt).expect("signalled");
        drop(d.b);
        ends("a stream".to_owned(), move || stream.synchronize().expect("it goes on"));
        assert!(matches!(wait.outcome(), Some(Ok(()))), "{:?}", wait.outcome());
        ends("closing".to_owned(), move || drop((d.a, d.word)));
    }
}

#[test]
fn no_stream_waits_for_a_peer_that_is_lost_already() {
    let _alone = alone(0);
    let d = Dependent::new(true, Duration::from_secs(600));
    let stream = Stream::new(context(0), Priority::Normal).expect("a stream");
    d.a.disconnect(d.to_b).expect("it was there");
    let word = (d.mr, d.word.ptr());
    let held = d.a.hold_stream_for_word_from(d.to_b, cuda_stream(&stream), word, 3);
    assert!(matches!(held, Err(Error::UnknownConnection(_) | Error::ConnectionLost { .. })));
    assert!(stream.is_idle().expect("it works"), "it waits");
}

/// The copies of a staged transfer stand behind the stream's wait, in a queue that both have by
/// chance. The transfer ends when the stream has gone on, and the connection need not end for it.
#[test]
fn a_stream_that_holds_its_transfer_up_goes_on_after_the_deadline() {
    let _alone = alone(1);
    let short = Duration::from_secs(1);
    let s = scene_of([(); 2].map(|()| endpoint_with(Transport::Tcp, short)));
    let after = Stream::new(context(0), Priority::Normal).expect("a stream");
    s.fake.pause(true);
    let post = |s: &Scene, timeout| {
        let request = Request::new(s.to_b, Op::Read, &s.iovs, &s.adverts);
        s.a.post(&Request { timeout, ..request }).expect("posted")
    };
    let transfer = post(&s, None);
    s.a.hold_stream(transfer, cuda_stream(&after)).expect("held");
    s.fake.pause(false);
    ends("a stream".to_owned(), move || {
        after.synchronize().expect("it goes on");
        // Its copies may all have been made by now.
        let late = finish(&s.a, transfer);
        assert!(matches!(late, Ok(_) | Err(Error::DeadlineExceeded { .. })), "{late:?}");
        s.a.check_connection(s.to_b).expect("it lives");
        let again = post(&s, Some(Duration::from_secs(600)));
        assert_eq!(finish(&s.a, again).expect("moved"), (PIECES * PIECE) as u64);
        drop(s);
    });
}

/// The memory of a lost connection is freed, and the stream that waits for one of its transfers
/// continues.
fn lost(transport: Transport) {
    let _alone = alone(0);
    let s = scene(transport);
    let after = Stream::new(context(0), Priority::Normal).expect("a stream");
    let first = s.a.post(&Request::new(s.to_b, Op::Read, &s.iovs, &s.adverts)).expect("posted");
    finish(&s.a, first).expect("moved");
    let waits = s.a.post(&Request::new(s.to_b, Op::Recv, &s.iovs[..1], &[])).expect("posted");
    s.a.hold_stream(waits, cuda_stream(&after)).expect("held");
    let Scene { a, b, here, there, .. } = s;
    ends(format!("a lost peer over {transport:?}"), move || {
        drop(b);
        let lost = finish(&a, waits).expect_err("nobody sends");
        assert!(!matches!(lost, Error::Invalid(_)), "{lost}");
        after.synchronize().expect("it goes on");
        drop((a, here, there));
    });
}

#[test]
fn a_lost_peer_on_one_host() {
    lost(Transport::Local);
}

#[test]
fn a_lost_peer_over_streams() {
    lost(Transport::Tcp);
}
