//! The path of a small message: one system call a side, and none by a ring.

use std::time::{Duration, Instant};

use crate::{Buffer, Connect, Flows, Listener, RecvFlow, SendFlow, Settings, Slot, socket::CALLS};

fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "nothing happened");
        std::thread::yield_now();
    }
}

fn pair(flows: &Flows) -> (SendFlow, RecvFlow) {
    let listener = Listener::listen(flows, 0).expect("a listener");
    let mut connecting = Connect::begin(flows, listener.handle(), 0).expect("an attempt");
    let send = until(|| connecting.poll().expect("a connection"));
    (send, until(|| listener.try_accept().expect("a flow")))
}

fn calls(work: impl FnOnce()) -> usize {
    let before = CALLS.get();
    work();
    CALLS.get() - before
}

#[test]
fn a_small_message_takes_one_system_call_on_each_side() {
    let flows = Flows::new(Settings::default()).expect("flows");
    let (send, recv) = pair(&flows);
    let longest = flows.settings().small_max;
    for len in [0, 1, 8, 4096, longest] {
        let (data, mut room) = (vec![7u8; len], vec![0u8; 1 << 20]);
        let buffer = Buffer { ptr: room.as_mut_ptr(), len: room.len(), tag: 0 };
        let mut receive = None;
        // SAFETY: the memory lives until the receive has ended, below.
        let posting = calls(|| receive = unsafe { recv.post(&[buffer]) }.expect("no error"));
        let receive: Slot = receive.expect("a slot");
        let sending = calls(|| {
            // SAFETY: the data lives until the message has ended, within this call.
            let message = unsafe { send.post(data.as_ptr(), len, 0) }.expect("no error");
            let sent = send.test(message.expect("a slot")).expect("no error");
            assert_eq!(sent, Some(len), "the socket has room");
        });
        recv.wait_for_bytes(len + uccl_wire::flow::HEAD_LEN);
        let mut got = None;
        let testing = calls(|| got = recv.test(receive).expect("no error"));
        assert_eq!((got, posting, sending, testing), (Some(len), 0, 1, 1), "{len} bytes");
        assert!(room[..len] == data[..]);
    }
}

#[test]
fn threads_are_roused_for_large_messages_alone() {
    let flows = Flows::new(Settings::default()).expect("flows");
    let (send, recv) = pair(&flows);
    let longest = flows.settings().small_max;
    let exchange = |len: usize| {
        let (data, mut room) = (vec![7u8; len], vec![0u8; 1 << 20]);
        let buffer = Buffer { ptr: room.as_mut_ptr(), len: room.len(), tag: 0 };
        // SAFETY: the memory lives until both have ended, below.
        let (receive, message) =
            unsafe { (recv.post(&[buffer]), send.post(data.as_ptr(), len, 0)) };
        let receive = receive.expect("no error").expect("a slot");
        let message = message.expect("no error").expect("a slot");
        until(|| send.test(message).expect("no error"));
        until(|| recv.test(receive).expect("no error"));
    };
    for (len, expects) in [(longest, false), (longest + 1, true), (3 << 17, true), (8, false)] {
        exchange(len);
        assert_eq!(recv.expects_large(), expects, "{len} bytes");
    }
    let (sent, received) = {
        send.close();
        recv.close();
        let totals = flows.totals();
        (totals.sent, totals.received)
    };
    let large = longest as u64 + 1 + (3 << 17);
    assert_eq!((sent.small_messages, sent.small_bytes), (2, longest as u64 + 8));
    assert_eq!((sent.large_messages, sent.large_bytes), (2, large));
    assert_eq!(sent, received);
}

#[test]
fn a_message_by_a_ring_takes_no_system_call() {
    const MESSAGES: usize = 12;
    let flows = Flows::new(Settings { local: true, ..Settings::default() }).expect("flows");
    let (send, recv) = pair(&flows);
    let (data, mut room) = (vec![7u8; 4096], vec![0u8; 4096]);
    let mut exchange = || {
        let buffer = Buffer { ptr: room.as_mut_ptr(), len: room.len(), tag: 0 };
        // SAFETY: the memory lives until the receive has ended, below.
        let receive = unsafe { recv.post(&[buffer]) }.expect("no error").expect("a slot");
        let sending = calls(|| {
            // SAFETY: the data lives until the message has ended, within this call.
            let message = unsafe { send.post(data.as_ptr(), data.len(), 0) }.expect("no error");
            until(|| send.test(message.expect("a slot")).expect("no error"));
        });
        let testing = calls(|| {
            until(|| recv.test(receive).expect("no error"));
        });
        (sending, testing)
    };
    // The receiver opens the ring with the first ones.
    let counts: Vec<_> = (0..MESSAGES + 3).map(|_| exchange()).skip(3).collect();
    assert!(counts.iter().all(|(sending, _)| *sending == 0), "{counts:?}");
    // The stream is looked at now and then.
    let looks: usize = counts.iter().map(|(_, testing)| testing).sum();
    assert!(looks <= 1, "{counts:?}");
}
