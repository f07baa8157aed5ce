//! Connections that are not a flow's, and addresses that do not answer.

mod common;

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    time::Duration,
};

use common::{exchange, pair, pair_by};
use uccl_flow::{Flows, Handle, Settings};
use uccl_wire::flow::{FlowHello, FlowWelcome, Purpose, Status, WELCOME_LEN};

fn flows() -> Flows {
    Flows::new(Settings { threads: 2, ..Settings::default() }).expect("flows over loopback")
}

fn stranger(flows: &Flows) -> TcpStream {
    TcpStream::connect((Ipv4Addr::LOCALHOST, flows.port())).expect("a connection")
}

/// The answer to a greeting.
fn greeted(flows: &Flows, hello: &FlowHello) -> FlowWelcome {
    let mut stream = stranger(flows);
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    stream.write_all(&hello.encode()).expect("a socket with room");
    let mut answer = [0; WELCOME_LEN];
    stream.read_exact(&mut answer).expect("an answer");
    FlowWelcome::decode(&answer).expect("an answer")
}

#[test]
fn strangers_hold_up_nobody() {
    let (one, two) = (flows(), flows());
    // Some say nothing, some another protocol's words, some end at once.
    let silent: Vec<_> = (0..600).map(|_| stranger(&two)).collect();
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
        let answer = greeted(&two, &hello);
        assert_eq!((answer.status, answer.key), (Status::UnknownKey, [0; 16]), "{purpose:?}");
    }
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
