//! Connects that are polled: they never block, and leave nothing when they end early.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Mutex, MutexGuard, PoisonError},
    task::Poll,
    thread,
    time::Duration,
};

use uccl_chaos::patiently;
use uccl_p2p::{
    Config, ConnId, ConnectHandle, ConnectRequest, Endpoint, Error, Interrupt, NoInterrupt,
    Transport,
};

use self::loopback::on_loopback;

/// Longer than any awaited event takes.
const FAR: Duration = Duration::from_secs(60);

/// The tests count this process's descriptors and threads, so they run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config(transport: Transport) -> Config {
    Config { num_cpus: 1, transport, ..on_loopback() }
}

fn endpoint(transport: Transport) -> Endpoint {
    Endpoint::new(config(transport)).expect("an endpoint")
}

fn begin(here: &Endpoint, addr: SocketAddr, timeout: Duration) -> ConnectHandle {
    let (addrs, timeout) = ([addr], Some(timeout));
    here.begin_connect(&ConnectRequest { timeout, ..ConnectRequest::new(&addrs) }).expect("begun")
}

/// The result, if there is one after a poll.
fn ready(connect: &ConnectHandle) -> Option<Result<ConnId, Error>> {
    match connect.poll() {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

/// Polls until there is a result.
fn poll_to_end(connect: &ConnectHandle) -> Result<ConnId, Error> {
    patiently(|| ready(connect))
}

fn accept(there: &Endpoint) -> ConnId {
    patiently(|| there.try_accept().expect("it is open")).conn
}

/// What this process holds.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Holdings {
    descriptors: usize,
    /// Threads of the engine. Those of the tests come and go.
    threads: usize,
}

fn held() -> Holdings {
    let list = |folder| fs::read_dir(folder).expect("it is there").filter_map(Result::ok);
    let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).ok();
    let is_ours = |name: &String| name.starts_with("uccl");
    Holdings {
        descriptors: list("/proc/self/fd").count(),
        threads: list("/proc/self/task").filter_map(name).filter(is_ours).count(),
    }
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let addr = listener.local_addr().expect("its address");
    (listener, addr)
}

#[test]
fn a_silent_listener_is_waited_for_until_the_deadline() {
    let _alone = alone();
    let (_silent, addr) = listener();
    let here = endpoint(Transport::Auto);
    // Without a limit, a poll that waited would never return.
    let unlimited = begin(&here, addr, Duration::ZERO);
    for _ in 0..1000 {
        assert!(unlimited.poll().is_pending());
    }
    let limited = begin(&here, addr, Duration::from_millis(100));
    let Err(Error::Connect { addr: of, reason }) = poll_to_end(&limited) else { panic!("silence") };
    assert!(of == addr && reason.contains("100ms"), "{reason}");
    assert!(unlimited.poll().is_pending());
}

#[test]
fn an_address_without_a_listener_refuses_unless_it_is_waited_for() {
    let _alone = alone();
    let (gone, addr) = listener();
    drop(gone);
    let here = endpoint(Transport::Auto);
    let refused = poll_to_end(&begin(&here, addr, FAR));
    assert!(matches!(refused, Err(Error::Connect { .. })), "{refused:?}");
    let addrs = [addr];
    let new = ConnectRequest::new(&addrs);
    let request = ConnectRequest { timeout: Some(FAR), waits_for_listener: true, ..new };
    let begun = here.begin_connect(&request).expect("begun");
    for _ in 0..100 {
        assert!(begun.poll().is_pending());
    }
    let there = Endpoint::new(Config { port: Some(addr.port()), ..config(Transport::Auto) });
    let there = there.expect("an endpoint at a port that was free");
    let conn = poll_to_end(&begun).expect("connected");
    accept(&there);
    here.check_connection(conn).expect("a connection");
}

#[test]
fn several_addresses_are_tried_in_their_order() {
    let _alone = alone();
    let ((_silent, silent), (gone, nobody)) = (listener(), listener());
    drop(gone);
    let (here, there) = (endpoint(Transport::Auto), endpoint(Transport::Auto));
    let addrs = [silent, nobody, there.addr()];
    let timeout = Some(Duration::from_secs(3));
    let new = ConnectRequest::new(&addrs);
    let begun = here.begin_connect(&ConnectRequest { timeout, ..new }).expect("begun");
    let conn = poll_to_end(&begun).expect("connected");
    assert_eq!(here.connection(conn).expect("known").addr, there.addr());
    let other = Some(there.instance() ^ 1);
    let addrs = [there.addr()];
    let new = ConnectRequest::new(&addrs);
    let begun = here.begin_connect(&ConnectRequest { instance: other, ..new }).expect("begun");
    let refused = poll_to_end(&begun).expect_err("another is meant").to_string();
    assert!(refused.contains("another endpoint"), "{refused}");
    let none = here.begin_connect(&ConnectRequest::new(&[]));
    assert!(matches!(none, Err(Error::Invalid(_))), "{none:?}");
}

/// Passes bytes on, one at a time.
fn trickle(mut from: TcpStream, mut to: TcpStream) {
    let mut byte = [0];
    while from.read(&mut byte).is_ok_and(|n| n > 0) && to.write_all(&byte).is_ok() {
        thread::sleep(Duration::from_micros(20));
    }
}

#[test]
fn a_peer_that_sends_one_byte_at_a_time_is_connected_to() {
    let _alone = alone();
    let (here, there) = (endpoint(Transport::Auto), endpoint(Transport::Auto));
    let (relay, addr) = listener();
    let target = there.addr();
    let relaying = thread::spawn(move || {
        let (near, _) = relay.accept().expect("it comes");
        let far = TcpStream::connect(target).expect("it listens");
        near.set_nodelay(true).and(far.set_nodelay(true)).expect("a socket");
        let (near_too, far_too) =
            (near.try_clone().expect("a copy"), far.try_clone().expect("a copy"));
        let back = thread::spawn(move || trickle(far_too, near_too));
        trickle(near, far);
        back.join().expect("no panic");
    });
    let conn = poll_to_end(&begin(&here, addr, FAR)).expect("connected");
    accept(&there);
    here.check_connection(conn).expect("a connection");
    here.close().expect("closed");
    there.close().expect("closed");
    relaying.join().expect("no panic");
}

#[test]
fn a_wrong_secret_is_refused_and_the_right_one_connects() {
    let _alone = alone();
    let with = |psk: &[u8]| {
        Endpoint::new(Config { psk: Some(psk.to_vec()), ..config(Transport::Auto) })
            .expect("an endpoint")
    };
    let there = with(b"a secret of sixteen");
    for (here, is_right) in [
        (endpoint(Transport::Auto), false),
        (with(b"another of sixteen."), false),
        (with(b"a secret of sixteen"), true),
    ] {
        match poll_to_end(&begin(&here, there.addr(), FAR)) {
            Ok(conn) if is_right => here.check_connection(conn).expect("a connection"),
            Err(Error::Connect { reason, .. }) if !is_right => {
                assert!(reason.contains("pre-shared key"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn two_hundred_connect_at_once_in_one_thread() {
    const MANY: usize = 200;
    let _alone = alone();
    for transport in [Transport::Local, Transport::Tcp] {
        let (here, there) = (endpoint(transport), endpoint(transport));
        // One worker each. A thread gives itself its name, a moment after it was started.
        patiently(|| (held().threads == 2).then_some(()));
        let begun: Vec<_> = (0..MANY).map(|_| begin(&here, there.addr(), FAR)).collect();
        assert_eq!(held().threads, 2, "{transport}: a connect needs a thread");
        let mut conns = vec![None; MANY];
        let mut accepted = Vec::new();
        patiently(|| {
            for (conn, connect) in conns.iter_mut().zip(&begun) {
                if let (None, Poll::Ready(result)) = (*conn, connect.poll()) {
                    *conn = Some(result.expect("connected"));
                }
            }
            accepted.extend(there.try_accept().expect("it is open"));
            (accepted.len() == MANY && conns.iter().all(Option::is_some)).then_some(())
        });
        conns.sort();
        conns.dedup();
        assert_eq!(conns.len(), MANY, "{transport}: each has a connection of its own");
        for conn in conns.into_iter().flatten() {
            let by_tcp = here.connection(conn).expect("known").path == "tcp";
            assert_eq!(by_tcp, transport == Transport::Tcp, "{transport}");
        }
        drop(begun);
        assert_eq!(here.stats().expect("open").connections, MANY as u64, "they stay");
    }
}

/// Waits until neither endpoint has a connection, and the process holds no more than `before`. A
/// thread of another test may end meanwhile, with descriptors of its own.
fn nothing_is_left(ends: [&Endpoint; 2], before: Holdings) {
    patiently(|| {
        let is_over = |ep: &&Endpoint| {
            while ep.try_accept().expect("it is open").is_some() {}
            ep.stats().expect("it is open").connections == 0
        };
        let Holdings { descriptors, threads } = held();
        let is_less = descriptors <= before.descriptors && threads <= before.threads;
        (ends.iter().all(is_over) && is_less).then_some(())
    });
}

/// Ends connects after every number of polls that they may take.
fn ends_early(settings: &Config, end: fn(ConnectHandle)) {
    let ends = [(); 2].map(|()| Endpoint::new(settings.clone()).expect("an endpoint"));
    let [here, there] = &ends;
    let first = poll_to_end(&begin(here, there.addr(), FAR)).expect("connected");
    accept(there);
    here.disconnect(first).expect("it is there");
    // The thread that looks after the end may hold something for a moment.
    patiently(|| (there.stats().expect("it is open").connections == 0).then_some(()));
    let before = patiently(|| {
        let now = held();
        thread::sleep(Duration::from_millis(20));
        (now == held()).then_some(now)
    });
    // The other end's thread decides how far so many polls come: each number is tried, and each
    // step is met by some.
    for polls in (0..60).chain((60..6000).step_by(150)) {
        let begun = begin(here, there.addr(), FAR);
        match (0..polls).find_map(|_| ready(&begun)) {
            None => end(begun),
            Some(result) => {
                here.disconnect(result.expect("connected")).expect("it is there");
            }
        }
    }
    nothing_is_left([here, there], before);
}

#[test]
fn a_connect_that_ends_after_any_number_of_polls_leaves_nothing() {
    let _alone = alone();
    let secret = Some(b"a secret of sixteen".to_vec());
    for settings in [
        config(Transport::Local),
        Config { tcp_streams: 3, ..config(Transport::Tcp) },
        Config { tcp_streams: 2, psk: secret, ..config(Transport::Tcp) },
        config(Transport::Fifo),
    ] {
        ends_early(&settings, drop);
        ends_early(&settings, |begun| {
            let cancelled = begun.cancel();
            assert!(matches!(cancelled, Err(Error::Cancelled { .. })), "{cancelled:?}");
        });
    }
}

#[test]
fn a_peer_that_ends_during_a_connect_ends_it() {
    let _alone = alone();
    for transport in [Transport::Local, Transport::Tcp] {
        let here = endpoint(transport);
        for polls in 0..30 {
            let there = endpoint(transport);
            let begun = begin(&here, there.addr(), FAR);
            for _ in 0..polls {
                let _ = begun.poll();
                thread::yield_now();
            }
            there.close().expect("closed");
            match poll_to_end(&begun) {
                Ok(conn) => here.disconnect(conn).expect("it is there"),
                Err(Error::Connect { .. } | Error::ConnectionLost { .. } | Error::Os { .. }) => {}
                Err(e) => panic!("{transport}: {e}"),
            }
        }
        assert_eq!(here.stats().expect("it is open").connections, 0, "{transport}");
    }
}

/// Interrupts each wait.
struct Impatient;

impl Interrupt for Impatient {
    fn interrupted(&mut self) -> bool {
        true
    }
}

#[test]
fn a_connect_that_is_waited_for_can_be_interrupted_and_go_on() {
    let _alone = alone();
    let (here, there) = (endpoint(Transport::Auto), endpoint(Transport::Auto));
    let (gate, addr) = listener();
    let begun = begin(&here, addr, FAR);
    let stopped = begun.wait(&mut Impatient);
    assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
    assert!(begun.poll().is_pending(), "it goes on");
    drop(gate);
    assert!(begun.wait(&mut NoInterrupt).is_err(), "the peer has left");
    let begun = begin(&here, there.addr(), FAR);
    let conn = begun.wait(&mut NoInterrupt).expect("connected");
    assert_eq!(begun.cancel().expect("it was connected before"), conn);
    assert!(matches!(begun.poll(), Poll::Ready(Ok(same)) if same == conn));
    drop(begun);
    here.check_connection(conn).expect("it stays");
}

#[test]
fn accepting_is_polled() {
    let _alone = alone();
    let (here, there) = (endpoint(Transport::Auto), endpoint(Transport::Auto));
    assert!(there.try_accept().expect("it is open").is_none());
    let conn = poll_to_end(&begin(&here, there.addr(), FAR)).expect("connected");
    let accepted = accept(&there);
    there.check_connection(accepted).and(here.check_connection(conn)).expect("both ends");
    assert!(there.try_accept().expect("it is open").is_none(), "it is given out once");
    there.close().expect("closed");
    assert!(matches!(there.try_accept(), Err(Error::Closed)));
    assert!(matches!(here.begin_connect(&ConnectRequest::new(&[])), Err(Error::Invalid(_))));
}
