//! Flows between two ends in one process, over real sockets.

mod common;

use std::time::Duration;

use common::{exchange, pair, pattern, post_recv, post_send, until, until_refused};
use uccl_flow::{Connect, FlowError, Flows, Listener, MAX_OUTSTANDING, Settings, Slot};

fn flows() -> Flows {
    Flows::new(Settings { threads: 2, spin: Duration::from_micros(20), ..Settings::default() })
        .expect("flows over loopback")
}

#[test]
fn messages_of_every_size_arrive() {
    let (one, two) = (flows(), flows());
    let (send, recv) = pair(&one, &two);
    let sizes = [
        0,
        1,
        8,
        127,
        128,
        129,
        4095,
        4096,
        4097,
        32767,
        32768,
        32769,
        65535,
        65536,
        65537,
        131072,
        524288,
        1048576,
        8 << 20,
    ];
    for (seed, len) in sizes.into_iter().enumerate() {
        for spare in [0, 100] {
            let data = pattern(len, seed);
            let mut room = vec![0; len + spare];
            let receive = post_recv(&recv, &mut room).expect("a slot");
            let message = post_send(&send, &data).expect("a slot");
            let mut sent = None;
            let received = until(|| {
                sent = sent.or_else(|| send.test(message).expect("no error"));
                recv.test(receive).expect("no error")
            });
            let sent = sent.unwrap_or_else(|| until(|| send.test(message).expect("no error")));
            assert_eq!((sent, received), (len, len));
            assert!(room[..len] == data[..], "{len} bytes arrive as they were");
        }
    }
}

#[test]
fn requests_are_bounded_and_none_is_lost() {
    let (one, two) = (flows(), flows());
    let (send, recv) = pair(&one, &two);
    let data: Vec<_> = (0..100).map(|at| pattern(at * 700, at)).collect();
    let mut rooms: Vec<_> = (0..100).map(|_| vec![0; 70_000]).collect();
    let mut sends: Vec<Slot> = Vec::new();
    while let Some(slot) = post_send(&send, &data[sends.len()]) {
        sends.push(slot);
    }
    assert_eq!(sends.len(), MAX_OUTSTANDING);
    let (mut posted, mut sent, mut received) = (sends.len(), 0, 0);
    let mut receives: Vec<Slot> = Vec::new();
    until(|| {
        while sent < sends.len() && send.test(sends[sent]).expect("no error").is_some() {
            sent += 1;
        }
        if posted < data.len()
            && let Some(slot) = post_send(&send, &data[posted])
        {
            sends.push(slot);
            posted += 1;
        }
        if receives.len() < rooms.len()
            && let Some(slot) = post_recv(&recv, &mut rooms[receives.len()])
        {
            receives.push(slot);
        }
        if received < receives.len()
            && let Some(len) = recv.test(receives[received]).expect("no error")
        {
            assert_eq!(len, data[received].len());
            received += 1;
        }
        (received == data.len() && sent == data.len()).then_some(())
    });
    for (room, data) in rooms.iter().zip(&data) {
        assert!(room[..data.len()] == data[..]);
    }
}

#[test]
fn a_message_longer_than_its_receive_is_an_error() {
    let (one, two) = (flows(), flows());
    let (send, recv) = pair(&one, &two);
    let (data, mut room) = (pattern(100, 1), vec![0; 99]);
    let receive = post_recv(&recv, &mut room).expect("a slot");
    post_send(&send, &data).expect("a slot");
    let error = until(|| recv.test(receive).err());
    assert!(matches!(error, FlowError::TooLong { sent: 100, room: 99, .. }), "{error}");
    assert_eq!(room, vec![0; 99], "nothing lands");
}

#[test]
fn a_peer_that_closes_is_an_error_while_something_is_outstanding() {
    let (one, two) = (flows(), flows());
    let (send, recv) = pair(&one, &two);
    let mut room = vec![0; 10];
    let data = pattern(10, 3);
    let message = post_send(&send, &data).expect("a slot");
    until(|| send.test(message).expect("no error"));
    send.close();
    let receive = post_recv(&recv, &mut room).expect("a slot");
    let len = until(|| recv.test(receive).expect("bytes that were sent before"));
    assert_eq!((len, &room), (10, &data));
    let receive = post_recv(&recv, &mut room).expect("a slot");
    let error = until(|| recv.test(receive).err());
    assert!(matches!(error, FlowError::PeerClosed { .. }), "{error}");
    assert!(matches!(recv.test(receive), Err(FlowError::PeerClosed { .. })), "it stays");
}

#[test]
fn a_connection_needs_no_accept_and_a_closed_listener_refuses() {
    let (one, two) = (flows(), flows());
    let listener = Listener::listen(&two, 0).expect("a listener");
    let handle = listener.handle().clone();
    assert!(listener.try_accept().expect("no error").is_none());
    let mut connecting = Connect::begin(&one, &handle, 0).expect("an attempt");
    until(|| connecting.poll().expect("a connection"));
    drop(listener);
    let short = Settings { limit: Duration::from_millis(300), ..Settings::default() };
    let short = Flows::new(short).expect("flows");
    until_refused(&short, &handle, "listener is closed");
}

#[test]
fn many_flows_share_the_streams() {
    let (one, two) = (flows(), flows());
    let pairs: Vec<_> = (0..16).map(|_| pair(&one, &two)).collect();
    std::thread::scope(|scope| {
        for (at, pair) in pairs.iter().enumerate() {
            scope.spawn(move || exchange(pair, (12, (at + 1) * 30_000), |_| {}));
        }
    });
    assert_eq!(one.counters().len(), 1, "one bundle");
    drop(pairs);
    assert!(one.counters().is_empty(), "the last flow closes it");
}

#[test]
fn a_large_message_may_come_before_its_receive() {
    let (one, two) = (flows(), flows());
    let (send, recv) = pair(&one, &two);
    for round in 0..5 {
        let data = pattern(3 << 20, round);
        let mut room = vec![0; 3 << 20];
        let message = post_send(&send, &data).expect("a slot");
        // The first chunks are on their way or there.
        until(|| (one.counters()[0].bytes > 0).then_some(()));
        std::thread::sleep(Duration::from_millis(20));
        let receive = post_recv(&recv, &mut room).expect("a slot");
        until(|| recv.test(receive).expect("no error"));
        until(|| send.test(message).expect("no error"));
        assert!(room == data, "round {round}");
    }
}
