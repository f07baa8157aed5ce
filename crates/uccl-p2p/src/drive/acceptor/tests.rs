//! Tests with peers that do not behave like an endpoint.

mod strangers;
mod unread;

use std::{io::Write, os::fd::AsRawFd};

use uccl_wire::frame::{HEADER_LEN, Header, Kind};

use super::*;
use crate::{
    Config, Endpoint, Transport,
    drive::{core::MAX_ACCEPTS, pair::on_loopback},
    types::Acceptance,
};

fn endpoint() -> Endpoint {
    Endpoint::new(on_loopback()).expect("an endpoint")
}

/// A peer that does every step of the protocol itself.
struct Stranger {
    core: Arc<Core>,
    greeting: Greeting,
    to: SocketAddr,
}

impl Stranger {
    fn new(own: &Endpoint, to: &Endpoint) -> Self {
        let greeting = Greeting::new(1, String::new()).expect("a greeting");
        Self { core: Arc::clone(own.core()), greeting, to: to.addr() }
    }

    fn open(&self) -> TcpStream {
        let tcp = TcpStream::connect(self.to).expect("a listener");
        tcp.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        tcp
    }

    /// Does the handshake; the error says why it failed.
    fn shake(&self, kind: HelloKind) -> Result<(TcpStream, Hello), String> {
        self.meet(kind).map(|(socket, peer)| (socket.tcp, peer))
    }

    /// The same; keeps the keys, if its endpoint has a secret.
    fn meet(&self, kind: HelloKind) -> Result<(Socket, Hello), String> {
        let mut tcp = self.open();
        let hello = self.greeting.hello(&self.core, kind, 0);
        let psk = greeting::psk(&self.core.config).expect("a secret");
        let mut handshake = Handshake::connector(psk, &hello, [7; NONCE_LEN]).expect("a handshake");
        let mut bytes = [0; 4096];
        loop {
            tcp.write_all(&handshake.pending_output()).map_err(|e| e.to_string())?;
            let n = tcp.read(&mut bytes).map_err(|e| e.to_string())?;
            if n == 0 {
                return Err("the end".into());
            }
            match handshake.feed(&bytes[..n]) {
                Ok(Progress::Done { peer, .. }) => {
                    return Ok((Socket::of(tcp, &mut handshake), *peer));
                }
                Ok(_) => {}
                Err(e) => return Err(e.to_string()),
            }
        }
    }
}

/// Sends the `Establish` message; returns the number of lanes in the answer.
fn establish(tcp: &mut TcpStream, lanes: u64) -> u64 {
    let word = Header::bare(Kind::Establish, 0, lanes).encode();
    tcp.write_all(&word).expect("it is there");
    let mut answer = [0; HEADER_LEN];
    tcp.read_exact(&mut answer).expect("an answer");
    Header::decode(&answer).expect("a frame").aux
}

#[test]
fn a_stream_with_a_handshake_does_not_give_way_to_silent_streams() {
    let (own, other) = (endpoint(), endpoint());
    let stranger = Stranger::new(&own, &other);
    let (mut first, _) = stranger.shake(HelloKind::NewConnection).expect("a handshake");
    let mut silent: Vec<_> = (0..MAX_PENDING + 40).map(|_| stranger.open()).collect();
    // More streams have connected than there is room for.
    let oldest = silent[0].read(&mut [0]);
    assert!(
        matches!(oldest, Ok(0)) || oldest.is_err_and(|e| e.kind() != io::ErrorKind::WouldBlock)
    );
    assert_eq!(establish(&mut first, 1), 1);
}

#[test]
fn a_lane_joins_once_and_under_a_number_that_there_is() {
    let (own, other) = (endpoint(), endpoint());
    let stranger = Stranger::new(&own, &other);
    let (mut first, peer) = stranger.shake(HelloKind::NewConnection).expect("a handshake");
    let join = |lane_index| stranger.shake(HelloKind::JoinLane { token: peer.token, lane_index });
    for lane in [0, MAX_LANES, u16::MAX] {
        let refused = join(lane).expect_err("no such lane");
        assert!(refused.contains("no connection waits for this lane"), "{refused}");
    }
    let _second = join(1).expect("it is waited for");
    join(1).expect_err("it has come");
    let _third = join(2).expect("it is waited for");
    assert_eq!(establish(&mut first, 3), 3);
}

/// The listeners that are readable.
fn shown(epoll: &OwnedFd) -> Vec<u64> {
    let mut events: Vec<epoll::Event> = Vec::with_capacity(8);
    let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let room = rustix::buffer::spare_capacity(&mut events);
    epoll::wait(epoll, room, Some(&none)).expect("it can be asked");
    events.iter().map(|event| event.data.u64() & !ACCEPTOR).collect()
}

/// Makes every accept of the listener fail, as without descriptors, and makes the listener
/// readable.
fn break_listener(listener: &impl AsRawFd) {
    let broken = TcpListener::bind("127.0.0.1:0").expect("a listener");
    rustix::net::shutdown(&broken, rustix::net::Shutdown::Both).expect("a socket");
    // SAFETY: both are open, and the listener's own description is nobody else's.
    let fd = unsafe { libc::dup2(broken.as_raw_fd(), listener.as_raw_fd()) };
    assert_eq!(fd, listener.as_raw_fd());
}

#[test]
fn a_listener_that_cannot_accept_is_left_alone_for_a_while() {
    let own = endpoint();
    for broken in [TCP, UDS] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        listener.set_nonblocking(true).expect("a socket");
        let name = format!("uccl-acceptor-test-{broken}-{}", std::process::id());
        let uds = FdListener::bind(name.as_bytes()).expect("a name of its own");
        if broken == TCP {
            break_listener(&listener)
        } else {
            break_listener(&uds)
        };
        let greeting = Arc::new(Greeting::new(1, String::new()).expect("a greeting"));
        let mut acceptor = Acceptor::new(listener, Some(uds), greeting);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll");
        acceptor.attach(&epoll).expect("watched");
        assert_eq!((shown(&epoll), acceptor.is_busy()), (vec![broken], false));
        acceptor.ready(own.core(), &epoll, broken);
        acceptor.end_turn(own.core(), &epoll);
        assert_eq!(
            (shown(&epoll), acceptor.is_busy()),
            (vec![], true),
            "who looks turns in circles"
        );
        // The pause does not end early.
        acceptor.listeners.paused_until = Some(Instant::now() + Duration::from_secs(3600));
        acceptor.listeners.end_pause(&epoll);
        assert_eq!((shown(&epoll), acceptor.is_busy()), (vec![], true));
        acceptor.listeners.paused_until = Some(Instant::now());
        acceptor.listeners.end_pause(&epoll);
        assert_eq!(
            (shown(&epoll), acceptor.is_busy()),
            (vec![broken], false),
            "it is not asked again"
        );
    }
}

/// An endpoint that waits for rails, and a peer that has connected and never sends a message about
/// them.
fn with_untried_rails(timeout: Duration) -> (Endpoint, Stranger, TcpStream) {
    let transport = Transport::Verbs;
    let own = Endpoint::new(Config { transport, ..on_loopback() }).expect("an endpoint");
    let other = Endpoint::new(Config { transport, timeout, ..on_loopback() }).expect("an endpoint");
    let stranger = Stranger::new(&own, &other);
    let (mut first, _) = stranger.shake(HelloKind::NewConnection).expect("a handshake");
    assert_eq!(establish(&mut first, 1), 1);
    (other, stranger, first)
}

#[test]
fn a_connection_with_untried_rails_counts_among_those_that_wait() {
    let (other, stranger, _first) = with_untried_rails(Duration::ZERO);
    let waits = Acceptance { conn: crate::ConnId(0), ip: [127, 0, 0, 1].into(), gpu_index: 0 };
    other.core().accepts.lock().waiting = vec![waits; MAX_ACCEPTS - 1].into();
    let refused = stranger.shake(HelloKind::NewConnection).expect_err("there is no place");
    assert!(refused.contains("accept"), "{refused}");
}

#[test]
fn a_connection_that_needs_rails_and_has_none_in_time_ends() {
    let (other, _stranger, _first) = with_untried_rails(Duration::from_millis(100));
    let begun = Instant::now();
    while !other.core().open_conns().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it waits for ever");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(other.core().accepts.lock().waiting.is_empty());
}
