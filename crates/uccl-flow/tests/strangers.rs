//! Connections that are not a flow's, and addresses that do not answer.

mod common;

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpStream},
    time::Duration,
};

use common::{exchange, pair, pair_by, post_recv, until, until_refused};
use uccl_flow::{Flows, Handle, Listener, Psk, Settings};
use uccl_wire::flow::{FlowHead, FlowHello, FlowWelcome, HeadKind, Purpose, Status, WELCOME_LEN};

fn flows() -> Flows {
    Flows::new(Settings { threads: 2, ..Settings::default() }).expect("flows over loopback")
}

fn stranger(flows: &Flows) -> TcpStream {
    TcpStream::connect((Ipv4Addr::LOCALHOST, flows.port())).expect("a connection")
}

/// The answer to a greeting, and its stream; `None` if the stream is closed without one.
fn greeted(flows: &Flows, hello: &FlowHello) -> Option<(FlowWelcome, TcpStream)> {
    let mut stream = stranger(flows);
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    stream.write_all(&hello.encode()).expect("a socket with room");
    let mut answer = [0; WELCOME_LEN];
    match stream.read_exact(&mut answer) {
        Ok(()) => Some((FlowWelcome::decode(&answer).expect("an answer"), stream)),
        Err(error) => {
            assert_ne!(error.kind(), ErrorKind::WouldBlock, "it is closed");
            None
        }
    }
}

#[test]
fn strangers_hold_up_nobody() {
    // Less than the time that a stranger has to greet.
    let [one, two] = [(); 2].map(|()| with_key("a secret", Duration::from_secs(4)));
    // Some say nothing, some another protocol's words, some end at once.
    let silent: Vec<_> = (0..1000).map(|_| stranger(&two)).collect();
    for _ in 0..200 {
        let mut stream = stranger(&two);
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: flows\r\nUser-Agent: scanner\r\n\r\n")
            .expect("room");
        drop(stranger(&two));
    }
    let flow = pair(&one, &two);
    exchange(&flow, (4, 1 << 20), |_| {});
    drop(silent);
}

#[test]
fn keys_of_others_are_refused() {
    let two = flows();
    for purpose in [Purpose::Flow, Purpose::Resume, Purpose::Bulk] {
        let hello = FlowHello { purpose, key: [5; 16], instance: 1, flow: 2, chunk_len: 128 << 10 };
        let (answer, _) = greeted(&two, &hello).expect("an answer");
        assert_eq!((answer.status, answer.key), (Status::UnknownKey, [0; 16]), "{purpose:?}");
    }
}

/// Longer than anything takes that has to happen.
const FAR: Duration = Duration::from_secs(40);

fn with_key(secret: &str, limit: Duration) -> Flows {
    let psk = Psk::new(secret.as_bytes()).ok();
    Flows::new(Settings { threads: 2, psk, limit, ..Settings::default() }).expect("flows")
}

#[test]
fn processes_with_the_same_key_meet_and_others_do_not() {
    let [one, two] = [(); 2].map(|()| with_key("the job's secret", FAR));
    let soon = Duration::from_secs(1);
    let flow = pair(&one, &two);
    exchange(&flow, (4, 1 << 20), |_| {});
    exchange(&flow, (20, 1000), |_| {});
    let listener = Listener::listen(&two, 0).expect("a listener");
    for (secret, reason) in
        [("another", "its pre-shared key is another"), ("", "wants a pre-shared key")]
    {
        until_refused(&with_key(secret, soon), listener.handle(), reason);
    }
    assert!(listener.try_accept().expect("no error").is_none(), "nobody was taken");
    let (open, keyed) = (with_key("", FAR), with_key("the job's secret", soon));
    let listener = Listener::listen(&open, 0).expect("a listener");
    until_refused(&keyed, listener.handle(), "shows no pre-shared key");
}

#[test]
fn a_handle_alone_is_not_enough_where_there_is_a_key() {
    let two = with_key("the job's secret", FAR);
    let listener = Listener::listen(&two, 0).expect("a listener");
    let key = listener.handle().nonce;
    let hello =
        FlowHello { purpose: Purpose::Flow, key, instance: 1, flow: 2, chunk_len: 128 << 10 };
    let (answer, _) = greeted(&two, &hello).expect("an answer");
    assert_eq!((answer.status, answer.key), (Status::NeedsSecret, [0; 16]));
    assert!(listener.try_accept().expect("no error").is_none());
}

#[test]
fn a_late_greeting_does_not_take_the_place_of_a_later_stream() {
    let two = flows();
    let listener = Listener::listen(&two, 0).expect("a listener");
    let key = listener.handle().nonce;
    let hello =
        FlowHello { purpose: Purpose::Flow, key, instance: 1, flow: 2, chunk_len: 128 << 10 };
    let (welcome, first) = greeted(&two, &hello).expect("an answer");
    let recv = until(|| listener.try_accept().expect("no error"));
    let mut room = [0; 3];
    let receive = post_recv(&recv, &mut room).expect("a slot");
    let head = FlowHead { total: 3, len: 3, ..FlowHead::note(HeadKind::Message, 2, 0) };
    let sent = [&head.encode()[..], b"a"].concat();
    (&first).write_all(&sent).expect("room");
    let resume = |round| {
        let purpose = Purpose::Resume;
        greeted(&two, &FlowHello { purpose, key: welcome.key, chunk_len: round, ..hello })
    };
    // Bytes that were on their way are gone with each stream, and go again.
    let (mut round, mut last) = (5, first);
    until(|| {
        std::thread::sleep(Duration::from_millis(5));
        assert!(matches!(recv.test(receive), Ok(None)));
        round += 1;
        let (answer, stream) = resume(round).expect("an answer");
        last = stream;
        let rest = &sent[answer.received as usize..];
        last.write_all(rest).expect("room");
        rest.is_empty().then_some(())
    });
    assert!(resume(round).is_none(), "it is as old as the last one");
    assert!(resume(5).is_none(), "it is older");
    last.write_all(b"bc").expect("room");
    until(|| recv.test(receive).expect("no error"));
    assert_eq!(room, *b"abc");
    drop(recv);
    let (answer, _) = resume(round + 1).expect("an answer");
    assert_eq!(answer.status, Status::UnknownFlow);
}

#[test]
fn an_address_that_does_not_answer_is_passed_over() {
    let (one, two) = (flows(), flows());
    // A network for documents, which has no hosts.
    let nowhere = [192, 0, 2, 1].into();
    let flow = pair_by(&one, &two, |handle| Handle {
        addrs: [nowhere].into_iter().chain(handle.addrs).collect(),
        ..handle
    });
    exchange(&flow, (4, 1 << 20), |_| {});
}
