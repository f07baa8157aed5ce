//! Peers that are not there yet, or not there any more, when an endpoint connects to them.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    net::{SocketAddr, TcpListener},
    thread,
    time::{Duration, Instant},
};

use uccl_p2p::{Config, ConnId, Endpoint, Error, Interrupt, NoInterrupt, Transport};

use self::loopback::on_loopback;

const LONG: Option<Duration> = Some(Duration::from_secs(60));

fn config() -> Config {
    Config { num_cpus: 1, ..on_loopback() }
}

/// An interrupt that counts its calls, and passes the count to a function.
struct CountingInterrupt<F: FnMut(u32) -> bool>(u32, F);

impl<F: FnMut(u32) -> bool> Interrupt for CountingInterrupt<F> {
    fn interrupted(&mut self) -> bool {
        self.0 += 1;
        (self.1)(self.0)
    }
}

/// An address without a listener.
fn free() -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("its address")
}

fn endpoint_at(addr: SocketAddr) -> Endpoint {
    let settings = Config { port: Some(addr.port()), ..config() };
    Endpoint::new(settings).expect("an endpoint at a port that was free")
}

#[test]
fn a_peer_that_starts_later_is_waited_for() {
    let (here, addr) = (Endpoint::new(config()).expect("an endpoint"), free());
    let mut there = None;
    // The peer starts after this end has been refused several times.
    let mut start = CountingInterrupt(0, |asked| {
        if asked == 5 {
            there = Some(endpoint_at(addr));
        }
        false
    });
    let conn = here.connect_when_up(addr, LONG, &mut start).expect("connected");
    here.check_connection(conn).expect("a connection");
    let there = there.expect("it was started");
    assert_eq!(there.accept(LONG, &mut NoInterrupt).expect("the same").ip, addr.ip());
}

#[test]
fn a_peer_that_hangs_up_before_a_word_is_taken_for_one_that_starts() {
    let here = Endpoint::new(config()).expect("an endpoint");
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let addr = listener.local_addr().expect("its address");
    let starting = thread::spawn(move || {
        for _ in 0..3 {
            drop(listener.accept().expect("somebody"));
        }
        drop(listener);
        endpoint_at(addr)
    });
    let conn = here.connect_when_up(addr, LONG, &mut NoInterrupt).expect("connected");
    here.check_connection(conn).expect("a connection");
    drop(starting.join().expect("no panic"));
}

#[test]
fn a_peer_that_never_comes_is_waited_for_until_the_timeout() {
    let (here, addr) = (Endpoint::new(config()).expect("an endpoint"), free());
    let mut asked = 0;
    let mut count = CountingInterrupt(0, |times| {
        asked = times;
        false
    });
    let timeout = Some(Duration::from_millis(200));
    let refused = here.connect_when_up(addr, timeout, &mut count).expect_err("nobody").to_string();
    for said in [addr.to_string().as_str(), "200ms", "refused"] {
        assert!(refused.contains(said), "{refused:?} lacks {said:?}");
    }
    assert!(asked > 1, "it was not tried again");
}

#[test]
fn waiting_for_a_peer_is_interrupted_and_ends_with_the_endpoint() {
    let (here, addr) = (Endpoint::new(config()).expect("an endpoint"), free());
    let mut stop = CountingInterrupt(0, |asked| asked == 3);
    let stopped = here.connect_when_up(addr, Some(Duration::ZERO), &mut stop);
    assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
    let mut close = CountingInterrupt(0, |asked| {
        if asked == 3 {
            here.close().expect("closed");
        }
        false
    });
    let closed = here.connect_when_up(addr, Some(Duration::ZERO), &mut close);
    assert!(matches!(closed, Err(Error::Closed)), "{closed:?}");
}

#[test]
fn a_refusal_ends_the_wait_and_a_plain_connect_does_not_wait() {
    let here = Endpoint::new(config()).expect("an endpoint");
    let gone = here.connect(free(), LONG, &mut NoInterrupt);
    assert!(matches!(gone, Err(Error::Connect { .. })), "{gone:?}");
    let guarded = Config { psk: Some(b"a secret of sixteen".to_vec()), ..config() };
    let guarded = Endpoint::new(guarded).expect("an endpoint");
    let refused = here.connect_when_up(guarded.addr(), LONG, &mut NoInterrupt);
    let refused = refused.expect_err("it requires a key").to_string();
    assert!(refused.contains("pre-shared key"), "{refused}");
}

/// An address without a listener, a listener that sends nothing, and an endpoint.
fn three() -> (SocketAddr, TcpListener, Endpoint) {
    let silent = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    (free(), silent, Endpoint::new(config()).expect("an endpoint"))
}

#[test]
fn all_addresses_are_tried_in_their_order() {
    let (nobody, silent, there) = three();
    let silent = silent.local_addr().expect("its address");
    let here = Endpoint::new(config()).expect("an endpoint");
    // The silent listener has a third of the time, and the next address half of the rest.
    let time = Some(Duration::from_secs(3));
    for addrs in [
        vec![there.addr()],
        vec![there.addr(), silent],
        vec![nobody, there.addr()],
        vec![silent, nobody, there.addr()],
    ] {
        let conn = here.connect_any(&addrs, time, &mut NoInterrupt).expect("connected");
        assert_eq!(here.connection(conn).expect("known").instance, there.instance());
        assert_eq!(here.connection(conn).expect("known").addr, there.addr());
        here.connect_any_when_up(&addrs, time, &mut NoInterrupt).expect("connected");
    }
    let refused = here.connect_any(&[], time, &mut NoInterrupt);
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
}

#[test]
fn a_peer_that_is_at_none_of_its_addresses_is_missed_at_each() {
    let (nobody, other) = (free(), free());
    let here = Endpoint::new(config()).expect("an endpoint");
    let time = Some(Duration::from_millis(300));
    for awaited in [false, true] {
        let addrs = [nobody, other];
        let missed = match awaited {
            false => here.connect_any(&addrs, LONG, &mut NoInterrupt),
            true => here.connect_any_when_up(&addrs, time, &mut NoInterrupt),
        };
        let Err(Error::Connect { addr, reason }) = missed else { panic!("{missed:?}") };
        assert!(addr == nobody && reason.contains(&other.to_string()), "{addr}: {reason}");
    }
}

#[test]
fn a_peer_that_starts_later_is_found_at_its_second_address() {
    let (here, nobody, addr) = (Endpoint::new(config()).expect("an endpoint"), free(), free());
    let mut there = None;
    let mut start = CountingInterrupt(0, |asked| {
        if asked == 5 {
            there = Some(endpoint_at(addr));
        }
        false
    });
    let conn = here.connect_any_when_up(&[nobody, addr], LONG, &mut start).expect("connected");
    here.check_connection(conn).expect("a connection");
    drop(there.expect("it was started"));
}

#[test]
fn a_peer_that_has_gone_is_not_taken_for_one_that_is_there() {
    for transport in [Transport::Local, Transport::Tcp] {
        let settings = || Config { transport, ..config() };
        let [here, there] = [(); 2].map(|()| Endpoint::new(settings()).expect("an endpoint"));
        let addr = there.addr();
        for _ in 0..20 {
            let conn = here.connect(addr, LONG, &mut NoInterrupt).expect("connected");
            let theirs = there.accept(LONG, &mut NoInterrupt).expect("accepted").conn;
            here.check_peer(conn, &mut NoInterrupt).expect("it is there");
            there.disconnect(theirs).expect("it was there");
            let gone = check_until_lost(&here, conn, transport);
            assert!(matches!(gone, Err(Error::ConnectionLost { .. })), "{transport:?}: {gone:?}");
        }
    }
}

/// Checks a peer that has left. A Unix socket shows the peer's end at once, so one look must do.
/// The kernel keeps the last segments of TCP back while a thread reads from the same socket: the
/// end may show later.
fn check_until_lost(here: &Endpoint, conn: ConnId, transport: Transport) -> Result<(), Error> {
    let begun = Instant::now();
    loop {
        let checked = here.check_peer(conn, &mut NoInterrupt);
        let late = transport == Transport::Local || Some(begun.elapsed()) > LONG;
        if checked.is_err() || late {
            return checked;
        }
        thread::sleep(Duration::from_millis(1));
    }
}
