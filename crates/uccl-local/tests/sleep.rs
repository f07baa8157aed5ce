//! Two lanes over shared memory. Their threads sleep when there is nothing to do, and no wake-up is
//! missed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use uccl_device::MemoryKind;
use uccl_fabric::lane::{
    Completion, Handling, Lane, MessageLane, MessageSink, OpKind, OpResult, Operation,
};
use uccl_fabric::mem::Span;
use uccl_fabric::region::{RegionTable, Rights};
use uccl_local as local;
use uccl_local::fdpass::{FdListener, FdSocket, Message};
use uccl_local::{LocalLane, Setup};

/// More than the ring between the lanes holds, so that both sides wait for each other.
const LEN: usize = 3 << 20;
const ROUNDS: usize = 150;
/// After this time without a wake-up, the wake-up is lost.
const PATIENCE_S: i64 = 10;

struct NoMessages;

impl MessageSink for NoMessages {
    fn message(&self, bytes: &[u8]) -> Result<Handling, String> {
        Err(format!("a message of {} bytes that nobody sent", bytes.len()))
    }

    fn go_on(&self) -> Handling {
        Handling::Ended
    }

    fn signalled(&self) {}
}

#[derive(Default)]
struct EndCount(AtomicUsize);

impl Completion for EndCount {
    fn complete(self: Arc<Self>, result: OpResult) {
        result.expect("a write that succeeds");
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn next(socket: &mut FdSocket) -> Message {
    loop {
        match socket.recv().expect("the other end") {
            Some(message) => return message,
            None => thread::yield_now(),
        }
    }
}

/// Two ends of a lane without direct access: everything goes through the rings.
fn lanes(theirs: &Arc<RegionTable>) -> (LocalLane, LocalLane) {
    let name = format!("uccl-sleep-{}", std::process::id());
    let listener = FdListener::bind(name.as_bytes()).expect("a name of its own");
    let mut ours = FdSocket::connect(name.as_bytes()).expect("its listener");
    let mut other = listener.accept().expect("a socket").expect("who connected");
    let regions = Arc::new(RegionTable::new().expect("a table"));
    let setup = |regions| Setup { regions, process: None, checksum: false };
    let invitation = local::invite(&mut ours, 7, &regions).expect("an invitation");
    let asked = next(&mut other);
    let b = local::accept(other, asked, setup(Arc::clone(theirs))).expect("a lane");
    let answer = next(&mut ours);
    let a = invitation.accepted(ours, answer, setup(regions)).expect("a lane");
    (a, b)
}

/// Makes progress, and sleeps when there is none to make, until `done`.
fn run(lane: &LocalLane, done: impl Fn() -> bool) {
    while !done() {
        if lane.progress(&NoMessages).expect("a living lane") || done() || !lane.arm() {
            continue;
        }
        let interest = lane.interest();
        let patience = Timespec { tv_sec: PATIENCE_S, tv_nsec: 0 };
        let woken =
            poll(&mut [PollFd::from_borrowed_fd(interest.fd, PollFlags::IN)], Some(&patience));
        assert!(woken.expect("a poll") > 0 || done(), "a wake-up was missed");
    }
}

#[test]
fn a_writer_that_waits_for_room_and_for_answers_is_woken() {
    let theirs = Arc::new(RegionTable::new().expect("a table"));
    let mut target = vec![0u8; LEN];
    let span = Span { addr: target.as_mut_ptr() as usize, len: LEN };
    let region = theirs.insert(span, Rights::WRITE, None).expect("a region");
    let (a, b) = lanes(&theirs);
    let source: Vec<u8> = (0..LEN).map(|i| (i >> 3) as u8 ^ i as u8).collect();
    let over = AtomicBool::new(false);
    let ended = Arc::new(EndCount::default());
    thread::scope(|scope| {
        scope.spawn(|| run(&b, || over.load(Ordering::SeqCst)));
        for round in 1..=ROUNDS {
            let op = Operation {
                kind: OpKind::Write,
                local: [Span { addr: source.as_ptr() as usize, len: LEN }].into(),
                memory: MemoryKind::Host,
                remote: [region.remote()].into(),
                done: ended.clone(),
            };
            // SAFETY: `source` outlives the lanes' threads.
            unsafe { a.post(op) }.expect("a living lane");
            run(&a, || ended.0.load(Ordering::SeqCst) == round);
        }
        over.store(true, Ordering::SeqCst);
        a.ping().expect("a living lane");
    });
    assert_eq!(target, source);
}
