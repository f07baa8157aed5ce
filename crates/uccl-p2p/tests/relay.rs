//! A relay between two ends that share a secret: it forwards bytes over real sockets, leads
//! connections elsewhere, and changes a byte.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, JoinHandle, sleep},
    time::Duration,
};

use uccl_p2p::{Config, Endpoint, Error, Iov, NoInterrupt, Op, Request, Transport};

use self::loopback::on_loopback;

const SECRET: &[u8] = b"a secret of sixteen";

fn endpoint(psk: Option<&[u8]>, transport: Transport) -> Endpoint {
    let config = Config {
        transport,
        psk: psk.map(<[u8]>::to_vec),
        tcp_streams: 1,
        timeout: Duration::from_secs(5),
        ..on_loopback()
    };
    Endpoint::new(config).expect("an endpoint")
}

/// A direction of bytes: to the target, or back.
#[derive(Clone, Copy, Debug)]
enum Way {
    There = 0,
    Back = 1,
}

#[derive(Default)]
struct State {
    is_over: AtomicBool,
    /// The number of bytes that have passed in each direction.
    passed: [AtomicUsize; 2],
    /// The position of the byte to change in each direction, plus one; 0 changes none.
    changes: [AtomicUsize; 2],
}

/// Forwards connections to one target, one connection after the other.
struct Relay {
    addr: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        listener.set_nonblocking(true).expect("a socket");
        let addr = listener.local_addr().expect("bound");
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let thread = thread::spawn(move || {
            while !shared.is_over.load(SeqCst) {
                match listener.accept() {
                    Ok((socket, _)) => {
                        let onward = TcpStream::connect(target).expect("the target listens");
                        pass(&socket, &onward, &shared);
                    }
                    Err(_) => sleep(Duration::from_millis(1)),
                }
            }
        });
        Self { addr, state, thread: Some(thread) }
    }

    /// Changes one bit of the byte after the next `ahead` ones.
    fn change(&self, way: Way, ahead: usize) {
        let at = self.state.passed[way as usize].load(SeqCst) + ahead;
        self.state.changes[way as usize].store(at + 1, SeqCst);
    }

    fn passed(&self, way: Way) -> usize {
        self.state.passed[way as usize].load(SeqCst)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.is_over.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it ended");
        }
    }
}

fn pass(socket: &TcpStream, onward: &TcpStream, state: &State) {
    thread::scope(|scope| {
        scope.spawn(|| pass_one(socket, onward, state, Way::There));
        pass_one(onward, socket, state, Way::Back);
    });
}

fn pass_one(mut from: &TcpStream, mut to: &TcpStream, state: &State, way: Way) {
    from.set_nonblocking(false).expect("a socket");
    from.set_read_timeout(Some(Duration::from_millis(5))).expect("a socket");
    let (passed, change) = (&state.passed[way as usize], &state.changes[way as usize]);
    let mut bytes = [0; 4096];
    while !state.is_over.load(SeqCst) {
        let n = match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(_) => break,
        };
        let at = passed.load(SeqCst);
        let changed = change.load(SeqCst).wrapping_sub(1);
        if (at..at + n).contains(&changed) {
            bytes[changed - at] ^= 0x10;
        }
        passed.store(at + n, SeqCst);
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _gone = from.shutdown(Shutdown::Both);
    let _gone = to.shutdown(Shutdown::Both);
}

/// The address is out of date, or a lie: a stranger listens there, and leads to another endpoint
/// that has the secret as well.
#[test]
fn a_connector_that_is_led_to_another_endpoint_is_refused_there() {
    for psk in [Some(SECRET), None] {
        let [own, meant, other] = [(); 3].map(|()| endpoint(psk, Transport::Tcp));
        let relay = Relay::to(other.addr());
        let led = own.connect_to(relay.addr, meant.instance(), None, &mut NoInterrupt);
        let refused = led.expect_err("it is another").to_string();
        assert!(refused.contains("another endpoint listens here"), "{refused}");
        assert_eq!(other.stats().expect("open").refused_handshakes, 1);
        let accepted = other.accept(Some(Duration::from_millis(50)), &mut NoInterrupt);
        assert!(matches!(accepted, Err(Error::Timeout(_))), "{accepted:?}");
        // A relay to the right endpoint is part of the network.
        let relay = Relay::to(meant.addr());
        own.connect_to(relay.addr, meant.instance(), None, &mut NoInterrupt).expect("connected");
        meant.accept(None, &mut NoInterrupt).expect("accepted");
    }
}

#[test]
fn no_byte_of_a_handshake_can_be_changed() {
    let [own, target] = [(); 2].map(|()| endpoint(Some(SECRET), Transport::Tcp));
    let relay = Relay::to(target.addr());
    let connect = || own.connect(relay.addr, None, &mut NoInterrupt);
    let conn = connect().expect("nothing is changed");
    target.accept(None, &mut NoInterrupt).expect("accepted");
    let whole = [Way::There, Way::Back].map(|way| relay.passed(way));
    own.disconnect(conn).expect("it was there");
    // Places in PRELUDE, PROOF, HELLO and its code, and in the message that establishes the
    // connection. None is in a length: an end would wait for the missing bytes.
    for way in [Way::There, Way::Back] {
        let whole = whole[way as usize];
        for at in [12, 60, 100, 150, whole - 60, whole - 30, whole - 1] {
            let relay = Relay::to(target.addr());
            relay.change(way, at);
            let connected = own.connect(relay.addr, None, &mut NoInterrupt);
            assert!(connected.is_err(), "{way:?}, byte {at} of {whole}");
        }
    }
}

#[test]
fn nothing_changed_behind_the_proof_lands() {
    const LEN: usize = 100 << 10;
    // In the record's length, the frame's header, its descriptors, the payload, and the next
    // record.
    for at in [1, 10, 45, 5000, 80_000] {
        let [own, target] = [(); 2].map(|()| endpoint(Some(SECRET), Transport::Tcp));
        let relay = Relay::to(target.addr());
        let conn = own.connect(relay.addr, None, &mut NoInterrupt).expect("connected");
        let accepted = target.accept(None, &mut NoInterrupt).expect("accepted").conn;
        let (from, mut to) = (vec![7_u8; LEN], vec![0_u8; LEN]);
        // SAFETY: the memory outlives the endpoints.
        let ours = unsafe { own.register(from.as_ptr() as usize, LEN) }.expect("registered");
        // SAFETY: as above.
        let theirs = unsafe { target.register(to.as_mut_ptr() as usize, LEN) }.expect("registered");
        let adverts = [target.advertise(theirs, to.as_ptr() as usize, LEN).expect("advertised")];
        let iovs = [Iov { mr: ours, ptr: from.as_ptr() as usize, len: LEN }];
        relay.change(Way::There, at);
        let written = own.run(&Request::new(conn, Op::Write, &iovs, &adverts), &mut NoInterrupt);
        written.expect_err("a byte was changed");
        let lost = loop {
            match target.check_connection(accepted) {
                Ok(()) => sleep(Duration::from_millis(1)),
                Err(e) => break e.to_string(),
            }
        };
        let is_noticed =
            lost.contains("somebody changes the bytes") || lost.contains("a record of");
        assert!(is_noticed, "byte {at}: {lost}");
        // The records before the changed one have landed. No byte of it has, and none of a later
        // record.
        let landed = to.iter().filter(|byte| **byte != 0).count();
        assert!(landed <= at, "byte {at}: {landed} bytes have landed");
        assert!(to[landed..].iter().all(|byte| *byte == 0), "byte {at}");
    }
}

/// Transfers of all sizes work in records, also over several streams.
#[test]
fn unchanged_records_arrive() {
    const LEN: usize = 3 << 20;
    let config = |streams| Config {
        tcp_streams: streams,
        ..endpoint(Some(SECRET), Transport::Tcp).config().clone()
    };
    let [own, target] = [1, 3].map(|streams| Endpoint::new(config(streams)).expect("an endpoint"));
    let conn = own.connect(target.addr(), None, &mut NoInterrupt).expect("connected");
    target.accept(None, &mut NoInterrupt).expect("accepted");
    let from: Vec<u8> = (0..LEN).map(|i| ((i * 31) >> 3) as u8).collect();
    let mut to = vec![0_u8; LEN];
    // SAFETY: the memory outlives the endpoints.
    let ours = unsafe { own.register(from.as_ptr() as usize, LEN) }.expect("registered");
    // SAFETY: as above.
    let theirs = unsafe { target.register(to.as_mut_ptr() as usize, LEN) }.expect("registered");
    for len in [0, 1, 8, 4096, 65_535, 65_536, 65_537, LEN] {
        to.fill(0);
        let adverts = [target.advertise(theirs, to.as_ptr() as usize, len).expect("advertised")];
        let iovs = [Iov { mr: ours, ptr: from.as_ptr() as usize, len }];
        own.run(&Request::new(conn, Op::Write, &iovs, &adverts), &mut NoInterrupt)
            .expect("written");
        assert!(to[..len] == from[..len], "{len} bytes");
    }
}
