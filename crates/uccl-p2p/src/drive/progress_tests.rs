//! Every thread with something to do is served, even while others are at work or held up.

use std::{
    collections::BTreeSet,
    fs::File,
    net::SocketAddr,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::*},
        mpsc,
    },
    thread::sleep,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_device::MemoryKind;
use uccl_fabric::{
    alloc::Shareable,
    clock,
    lane::{
        Aftermath, Caps, HostLane, Interest, Lane, LaneError, MessageLane, MessageSink, OpKind,
        OpName, OpResult, Operation, PostOutcome,
    },
    mem::{RemoteSpan, Span},
    signal::Word,
};
use uccl_wire::{advert::Advert, signal::Change};

use super::{
    acceptor::begin,
    core::{
        connection::{Connection, Peer, attached_lane::AttachedLane},
        workers::Workers,
    },
    links::Links,
    pair::on_loopback,
    park::Parker,
};
use crate::{
    Acceptance, Config, ConnId, Endpoint, Error, Interrupt, Iov, MrId, NoInterrupt, Op, Request,
    Transport,
};

/// Longer than any awaited event takes.
const FAR: Duration = Duration::from_secs(20);

fn endpoint() -> Endpoint {
    let config =
        Config { transport: Transport::Tcp, num_cpus: 1, transfer_timeout: FAR, ..on_loopback() };
    Endpoint::new(config).expect("an endpoint")
}

/// A byte of one endpoint's memory that the other writes to.
struct Writer {
    from: Endpoint,
    to: Endpoint,
    to_conn: ConnId,
    from_conn: ConnId,
    iov: Iov,
    advert: Advert,
    _memory: [Box<[u8]>; 2],
}

fn register(ep: &Endpoint, memory: &mut [u8]) -> (MrId, Iov) {
    // SAFETY: it is kept for longer than its endpoint.
    let mr = unsafe { ep.register(memory.as_mut_ptr() as usize, memory.len()) };
    let mr = mr.expect("registered");
    (mr, Iov { mr, ptr: memory.as_ptr() as usize, len: memory.len() })
}

impl Writer {
    fn new() -> Self {
        let (from, to) = (endpoint(), endpoint());
        let from_conn = from.connect(to.addr(), None, &mut NoInterrupt).expect("connected");
        let to_conn = to.accept(None, &mut NoInterrupt).expect("accepted").conn;
        let mut memory = [0, 1].map(|byte| vec![byte; 8].into_boxed_slice());
        let (_, iov) = register(&from, &mut memory[0]);
        let (mr, theirs) = register(&to, &mut memory[1]);
        let advert = to.advertise(mr, theirs.ptr, theirs.len).expect("advertised");
        Self { from, to, to_conn, from_conn, iov, advert, _memory: memory }
    }

    fn write(&self) {
        let (iovs, adverts) = ([self.iov], [self.advert]);
        let request = Request::new(self.from_conn, Op::Write, &iovs, &adverts);
        self.from.run(&request, &mut NoInterrupt).expect("written");
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.from.close().expect("closed");
        self.to.close().expect("closed");
    }
}

#[test]
fn a_caller_that_looks_at_nothing_keeps_nobody_from_being_served() {
    let writer = Writer::new();
    let held = writer.to.core().conn(writer.to_conn).expect("a connection");
    let _claim = held.claim();
    (0..100).for_each(|_| writer.write());
}

/// An interrupt that blocks in its call, as on a lock that another thread holds.
struct HeldUp {
    entered: mpsc::Sender<()>,
    go_on: mpsc::Receiver<()>,
    was_let_go: bool,
}

impl Interrupt for HeldUp {
    fn interrupted(&mut self) -> bool {
        if !self.was_let_go {
            let _ = self.entered.send(());
            self.was_let_go = self.go_on.recv_timeout(FAR).is_ok();
        }
        // It has blocked for long enough: the wait may end.
        true
    }
}

#[test]
fn a_caller_that_is_held_up_keeps_nobody_from_being_served() {
    let writer = Writer::new();
    let (entered, is_held_up) = mpsc::channel();
    let (let_go, go_on) = mpsc::channel();
    let (to, conn) = (writer.to.clone(), writer.to_conn);
    let waiter = std::thread::spawn(move || {
        let mut memory = [0; 8];
        let (mr, iov) = register(&to, &mut memory);
        let mut held_up = HeldUp { entered, go_on, was_let_go: false };
        let ended = to.run(&Request::new(conn, Op::Recv, &[iov], &[]), &mut held_up);
        ended.expect_err("nobody sends");
        to.deregister(mr).expect("unused");
        held_up.was_let_go
    });
    is_held_up.recv_timeout(FAR).expect("it asks whether to go on");
    (0..100).for_each(|_| writer.write());
    let_go.send(()).expect("it waits");
    assert!(waiter.join().expect("no panic"), "the writes ended before it went on");
}

/// A lane with endless work that several threads may share.
struct Endless {
    bell: Parker,
    helped: AtomicU64,
    /// The names of the threads that helped.
    helpers: Mutex<BTreeSet<String>>,
    /// Its load in bytes.
    load: u64,
    is_over: AtomicBool,
    /// A descriptor in place of its bell.
    unwatchable: Option<File>,
}

impl Endless {
    fn new() -> Arc<Self> {
        let bell = Parker::new().expect("a descriptor");
        Arc::new(Self {
            bell,
            helped: 0.into(),
            helpers: Mutex::default(),
            load: 0,
            is_over: false.into(),
            unwatchable: None,
        })
    }

    /// A connection of this endpoint with only this lane.
    fn of(lane: &Arc<Self>, ep: &Endpoint, addr: SocketAddr) -> Arc<Connection> {
        let core = ep.core();
        let peer = Peer {
            name: "a peer".into(),
            addr,
            gpu_index: 0,
            instance: 1,
            same_host: true,
            takes_signals: true,
            publishes: false,
        };
        let links = Links::within_host(Arc::clone(lane));
        let make = |id| Arc::new(Connection::new(id, Arc::clone(core), peer, links));
        core.add_conn(make).expect("a connection")
    }
}

impl Lane for Endless {
    fn caps(&self) -> Caps {
        Caps {
            link: "endless",
            ordered: false,
            delivery_complete: true,
            remote_atomics: false,
            messages: true,
            checksum: false,
            by_device: false,
            max_pieces: 1,
            max_gpu_pieces: 1,
            max_message: 1 << 16,
        }
    }

    unsafe fn post(&self, _: Operation) -> Result<PostOutcome, LaneError> {
        Err(LaneError::Killed)
    }

    fn progress(&self, _: &dyn MessageSink) -> Result<bool, LaneError> {
        Ok(false)
    }

    fn cancel(&self, _: OpName) {}

    fn load(&self) -> u64 {
        self.load
    }

    fn has_work(&self) -> bool {
        false
    }

    fn touched_by_peer(&self, _: u32) -> bool {
        false
    }

    fn arm(&self) -> bool {
        true
    }

    fn interest(&self) -> Interest<'_> {
        let fd = self.unwatchable.as_ref().map_or(self.bell.fd(), AsFd::as_fd);
        Interest { fd, write: false, end: None }
    }

    fn kill(&self) {}
}

impl MessageLane for Endless {
    fn send(&self, _: &[&[u8]]) -> Result<(), LaneError> {
        Ok(())
    }

    fn carries_signal(&self, _: MemoryKind, _: &[RemoteSpan]) -> bool {
        false
    }

    unsafe fn post_signalled(&self, _: Operation, _: Word) -> Result<PostOutcome, LaneError> {
        Err(LaneError::Killed)
    }

    fn queued_bytes(&self) -> usize {
        0
    }

    fn last_heard_ms(&self) -> u64 {
        clock::coarse_ms()
    }

    fn ping(&self) -> Result<(), LaneError> {
        Ok(())
    }

    fn bye(&self) {}
}

impl HostLane for Endless {
    fn signals_by_gpu(&self, _: MemoryKind, _: &[RemoteSpan], _: &Word) -> bool {
        false
    }

    unsafe fn post_signalled_by_gpu(
        &self,
        _: Operation,
        _: Word,
    ) -> Result<PostOutcome, LaneError> {
        Err(LaneError::Killed)
    }

    fn path_to(&self, _: &RemoteSpan) -> &'static str {
        "endless"
    }

    fn owner_copies(&self, _: MemoryKind, _: &[RemoteSpan]) -> Vec<bool> {
        Vec::new()
    }

    fn copies_as_owner(&self, _: MemoryKind, _: &[RemoteSpan]) -> bool {
        false
    }

    unsafe fn try_now(&self, _: OpKind, _: Span, _: &RemoteSpan) -> Option<OpResult> {
        None
    }

    unsafe fn try_signalled(
        &self,
        _: Span,
        _: &RemoteSpan,
        _: &RemoteSpan,
        _: Change,
    ) -> Option<OpResult> {
        None
    }

    fn try_signal(&self, _: &RemoteSpan, _: Change) -> Option<OpResult> {
        None
    }

    fn is_copied_by_gpu(&self, _: MemoryKind, _: &RemoteSpan) -> bool {
        false
    }

    fn progress_copies(&self) {}

    fn is_ours(&self, _: OpName) -> bool {
        false
    }

    fn wants_help(&self) -> bool {
        !self.is_over.load(SeqCst)
    }

    fn help(&self) -> bool {
        self.helped.fetch_add(1, SeqCst);
        self.helpers.lock().extend(std::thread::current().name().map(str::to_owned));
        self.wants_help()
    }

    fn aftermath(&self) -> Option<Box<dyn Aftermath>> {
        None
    }

    fn offer(&self, _: &Shareable) {}

    fn retract(&self, _: u32) {}
}

#[test]
fn a_worker_that_helps_accepts_connections_meanwhile() {
    let (busy, other) = (endpoint(), endpoint());
    let core = busy.core();
    let lane = Endless::new();
    let conn = Endless::of(&lane, &busy, other.addr());
    Workers::attach(core, &conn).expect("attached");
    conn.call_help();
    let begun = Instant::now();
    // A worker that is not helping yet accepts connections anyway.
    while lane.helped.load(SeqCst) == 0 && begun.elapsed() < FAR {
        sleep(Duration::from_millis(1));
    }
    let connected = other.connect(busy.addr(), Some(FAR), &mut NoInterrupt);
    let helped = lane.helped.load(SeqCst);
    lane.is_over.store(true, SeqCst);
    connected.expect("connected while the worker helps");
    assert!(helped > 0, "it has not helped");
}

/// How many threads help with this many bytes at an endpoint of four workers, and whether the
/// lane's own is one of them.
fn helpers_with(load: u64) -> (usize, bool) {
    let config = Config { num_cpus: 4, ..on_loopback() };
    let busy = Endpoint::new(config).expect("an endpoint");
    let lane =
        Arc::new(Endless { load, ..Arc::into_inner(Endless::new()).expect("nobody else has it") });
    let conn = Endless::of(&lane, &busy, busy.addr());
    Workers::attach(busy.core(), &conn).expect("attached");
    let own = conn.care.find(|_| true).expect("it is attached").shard;
    conn.call_help();
    let wanted = (load >> 22).clamp(1, 4) as usize;
    let begun = Instant::now();
    while lane.helpers.lock().len() < wanted && begun.elapsed() < FAR {
        sleep(Duration::from_millis(1));
    }
    // All that were woken have had their turn, and others would have.
    let helped = lane.helped.load(SeqCst);
    while lane.helped.load(SeqCst) < helped + 1000 && begun.elapsed() < FAR {
        sleep(Duration::from_millis(1));
    }
    lane.is_over.store(true, SeqCst);
    let helpers = lane.helpers.lock();
    (helpers.len(), helpers.contains(&format!("uccl-worker-{own}")))
}

#[test]
fn more_threads_help_where_there_is_more_to_do() {
    assert_eq!(helpers_with(0), (1, false));
    assert_eq!(helpers_with(12 << 20), (3, false));
    assert_eq!(helpers_with(1 << 30), (4, true));
}

/// Otherwise it would sleep until the lane shows something, which a post does not.
#[test]
fn a_worker_that_has_armed_a_lane_does_not_look_soon_though_it_left_the_lane_to_callers() {
    let ep = endpoint();
    let conn = Endless::of(&Endless::new(), &ep, ep.addr());
    let attached = AttachedLane::new(&conn, (0, &conn.lanes.all[0]), 0, 1);
    for (is_left, is_armed) in [(false, false), (false, true), (true, true), (true, false)] {
        attached.is_left.store(is_left, SeqCst);
        attached.is_armed.store(is_armed, SeqCst);
        assert_eq!(attached.looks_soon(), is_left && !is_armed, "{is_left} {is_armed}");
    }
}

#[test]
fn an_accepted_connection_that_no_worker_can_watch_is_gone() {
    let ep = endpoint();
    let file = File::open("/proc/self/exe").expect("a file, which no epoll takes");
    let lane = Arc::new(Endless {
        unwatchable: Some(file),
        ..Arc::into_inner(Endless::new()).expect("nobody else has it")
    });
    let conn = Endless::of(&lane, &ep, ep.addr());
    let accepted = Acceptance { conn: conn.id, ip: [127, 0, 0, 1].into(), gpu_index: 0 };
    begin(ep.core(), &conn, accepted).expect_err("it cannot be watched");
    assert!(conn.is_failed() && ep.core().open_conns().is_empty(), "it stays, and nobody reads it");
    assert!(ep.core().accepts.lock().waiting.is_empty(), "it is offered");
    // No caller has its id, so none asks why it was lost.
    let known = ep.core().conn(conn.id);
    assert!(matches!(known, Err(Error::UnknownConnection(_))), "its loss is remembered");
    let left = Arc::downgrade(&conn);
    drop(conn);
    let begun = Instant::now();
    // The worker may still be dropping it.
    while left.strong_count() > 0 {
        assert!(begun.elapsed() < FAR, "something keeps it");
        sleep(Duration::from_millis(1));
    }
}
