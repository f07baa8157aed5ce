//! What a TCP lane that is killed leaves behind at the peer.

use std::{io::Read, os::fd::AsRawFd, thread::sleep, time::Duration};

use rustix::event::{PollFd, PollFlags, poll};

use super::*;

const LEN: usize = 64 << 20;

/// A write that its peer has not taken in to its end.
fn stuck_write(a: &Side, from: &mut [u8], remote: RemoteSpan) -> Arc<Seen> {
    let (_, seen) = a.post(OpKind::Write, span(from), remote);
    while a.progress().expect("a lives") {}
    seen
}

/// Waits until the peer's reset is here.
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
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
    let a = TcpStream::connect(listener.local_addr().expect("its address")).expect("a stream");
    let (mut b, _) = listener.accept().expect("its other end");
    let socket = a.try_clone().expect("a descriptor");
    let a = side(a, false);
    let mut from = pattern(LEN);
    let remote = RemoteSpan { addr: 4096, len: LEN as u64, key: 1, slot: 0 };
    let seen = stuck_write(&a, &mut from, remote);
    let unsent = loop {
        // What has been sent has been taken in by the kernel there, and its window is closed.
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

/// The kernel still hands out what came before the reset, to a receiver that was stopped for instance.
#[test]
fn what_came_before_a_reset_does_not_land_after_it() {
    for begun in [false, true] {
        let (a, b) = pair(false);
        let (mut from, mut to) = (pattern(LEN), vec![0xEE; LEN]);
        let remote = b.register(&mut to, Rights::ALL);
        let (_, seen) = a.post(OpKind::Write, span(&mut from), remote);
        if begun {
            let first = to.as_ptr();
            // SAFETY: the buffer lives, and the lane of this thread is what writes to it.
            while unsafe { first.read_volatile() } == 0xEE {
                a.progress().expect("a lives");
                b.progress().expect("b lives");
            }
            while a.progress().expect("a lives") {}
        }
        a.lane.kill();
        assert_eq!(*seen.0.lock(), Some(Err(OpError::LaneDown)));
        await_reset(&b);
        // The receiver looks once in a tick of its clock.
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

/// That nothing can be sent any more is no reason not to hear what was said before.
#[test]
fn a_goodbye_is_heard_by_who_is_sending() {
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
