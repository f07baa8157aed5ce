//! The peer of a TCP lane that is killed.

use std::{
    io::Read,
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread::sleep,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, poll};
use uccl_fabric::pipe::{Backlog, Pipe, PipeRx};

use super::*;
use crate::tcp::{TcpRx, TcpTx};

const LEN: usize = 64 << 20;

/// A write that its peer does not receive to the end.
fn stuck_write(a: &Side, from: &mut [u8], remote: RemoteSpan) -> Arc<ResultSlot> {
    let (_, seen) = a.post(OpKind::Write, span(from), remote);
    while a.progress().expect("a lives") {}
    seen
}

/// Waits until the peer's reset has arrived.
fn await_reset(side: &Side) {
    let mut fds = [PollFd::from_borrowed_fd(side.lane.interest().fd, PollFlags::empty())];
    let patience = Duration::from_secs(10).try_into().expect("a short time");
    poll(&mut fds, Some(&patience)).expect("polled");
    assert!(fds[0].revents().contains(PollFlags::ERR), "no reset has come");
}

fn error_of(side: &Side) -> LaneError {
    loop {
        if let Err(e) = side.progress() {
            return e;
        }
    }
}

#[test]
fn bytes_of_a_failed_write_do_not_leave_the_send_queue() {
    let (a, mut b) = streams();
    let socket = a.try_clone().expect("a descriptor");
    let a = side(a, false);
    let mut from = pattern(LEN);
    let remote = RemoteSpan { addr: 4096, len: LEN as u64, key: 1, slot: 0 };
    let seen = stuck_write(&a, &mut from, remote);
    let unsent = loop {
        // The kernel there has received all sent bytes, and its window is closed.
        let queued = [libc::TIOCOUTQ, SIOCOUTQNSD].map(|what| ask(&socket, what));
        if queued[0] == queued[1] && queued[0] > 0 {
            break queued[0];
        }
        sleep(Duration::from_millis(1));
    };
    let arrived = ask(&b, libc::FIONREAD);
    a.lane.kill();
    assert_eq!(*seen.0.lock(), Some(Err(OpError::LaneDown)));
    let mut taken = Vec::new();
    let ended = b.read_to_end(&mut taken);
    assert!(unsent > 0 && taken.len() <= arrived, "{} of {arrived}, {unsent} unsent", taken.len());
    assert!(ended.is_err(), "a reset tells that the rest is not coming");
}

const SIOCOUTQNSD: libc::Ioctl = 0x894B;

fn ask(socket: &TcpStream, what: libc::Ioctl) -> usize {
    let mut bytes = 0i32;
    // SAFETY: a place for the number.
    assert_eq!(unsafe { libc::ioctl(socket.as_raw_fd(), what, &raw mut bytes) }, 0);
    bytes as usize
}

/// After a reset the kernel still hands out earlier bytes, for instance to a receiver that was
/// stopped.
#[test]
fn bytes_that_came_before_a_reset_do_not_land_after_it() {
    for begun in [false, true] {
        let (a, b) = pair(false);
        let (mut from, mut to) = (pattern(LEN), vec![0xEE; LEN]);
        let remote = b.register(&mut to, Rights::ALL);
        let (_, seen) = a.post(OpKind::Write, span(&mut from), remote);
        if begun {
            let first = to.as_ptr();
            // SAFETY: the buffer lives, and only the lane, on this thread, writes to it.
            while unsafe { first.read_volatile() } == 0xEE {
                a.progress().expect("a lives");
                b.progress().expect("b lives");
            }
            while a.progress().expect("a lives") {}
        }
        a.lane.kill();
        assert_eq!(*seen.0.lock(), Some(Err(OpError::LaneDown)));
        await_reset(&b);
        // The receiver checks once in a tick of its clock.
        sleep(Duration::from_millis(20));
        let held = to.clone();
        let error = error_of(&b);
        assert!(matches!(error, LaneError::Lost(_)), "{error}");
        assert!(to == held, "{begun}");
    }
}

#[test]
fn a_goodbye_is_heard_behind_a_reset() {
    let (a, b) = pair(false);
    a.lane.send(&[b"the last word"]).expect("a lives");
    a.lane.bye();
    a.lane.kill();
    await_reset(&b);
    assert!(matches!(error_of(&b), LaneError::Closed));
    assert_eq!(*b.inbox.0.lock(), [b"the last word".to_vec()]);
}

/// A lane that cannot send any more must still receive earlier frames of the peer.
#[test]
fn a_goodbye_is_heard_by_a_lane_that_is_sending() {
    let (a, b) = pair(false);
    a.lane.send(&[b"the last word"]).expect("a lives");
    a.lane.bye();
    a.lane.kill();
    await_reset(&b);
    b.lane.send(&[b"too late"]).expect("not known yet");
    let mut late = vec![0; 100_000];
    let remote = RemoteSpan { addr: 4096, len: 100_000, key: 1, slot: 0 };
    let (_, seen) = b.post(OpKind::Write, span(&mut late), remote);
    assert!(matches!(error_of(&b), LaneError::Closed));
    assert_eq!(*b.inbox.0.lock(), [b"the last word".to_vec()]);
    b.lane.kill();
    assert_eq!(*seen.0.lock(), Some(Err(OpError::LaneDown)));
}

/// A pipe that is cut by a flag, and still carries bytes: rings in shared memory do that while one
/// thread cuts them and another is receiving.
struct LeakingPipe(TcpPipe);

struct LeakingRx {
    rx: TcpRx,
    is_cut: Arc<AtomicBool>,
}

impl PipeRx for LeakingRx {
    unsafe fn recv(&mut self, spans: &[Span]) -> std::io::Result<Option<usize>> {
        // SAFETY: the caller's promise.
        unsafe { self.rx.recv(spans) }
    }

    fn is_cut(&mut self) -> bool {
        self.is_cut.load(SeqCst)
    }

    fn backlog(&mut self) -> Backlog {
        self.rx.backlog()
    }
}

impl Pipe for LeakingPipe {
    type Tx = TcpTx;
    type Rx = LeakingRx;

    const LINK: &'static str = "leaking";

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    fn room_is_writable(&self) -> bool {
        self.0.room_is_writable()
    }

    fn cut(&self) {
        self.0.cut();
    }
}

#[test]
fn a_write_that_was_thrown_away_is_not_said_to_have_landed() {
    let (a, b) = streams();
    let a = side(a, false);
    let (pipe, tx, rx) = TcpPipe::new(b, &TcpOptions::default()).expect("a pipe");
    let is_cut = Arc::new(AtomicBool::new(false));
    let rx = LeakingRx { rx, is_cut: Arc::clone(&is_cut) };
    let b = side_over(LeakingPipe(pipe), tx, rx, false);
    let (mut from, mut to) = (pattern(100), vec![0xEE; 100]);
    let remote = b.register(&mut to, Rights::ALL);
    let mut write = || {
        to.fill(0xEE);
        let (_, seen) = a.post(OpKind::Write, span(&mut from), remote);
        // These messages follow the write and its answer.
        //
        let before = [&a.inbox, &b.inbox].map(|inbox| inbox.0.lock().len());
        a.lane.send(&[b"there"]).expect("a lives");
        while b.inbox.0.lock().len() == before[1] {
            a.progress().expect("a lives");
            b.progress().expect("b lives");
        }
        b.lane.send(&[b"back"]).expect("b lives");
        while a.inbox.0.lock().len() == before[0] {
            b.progress().expect("b lives");
            a.progress().expect("a lives");
        }
        let result = seen.0.lock().clone();
        (result, to == from)
    };
    assert_eq!(write(), (Some(Ok(())), true));
    is_cut.store(true, SeqCst);
    assert_eq!(write(), (None, false));
    b.lane.kill();
    while a.progress().is_ok() {}
}
