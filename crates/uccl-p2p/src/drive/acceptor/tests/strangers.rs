//! Strangers: they connect, and never become peers.

use std::net::Ipv4Addr;

use uccl_wire::handshake::PROTOCOL_VERSION;

use super::*;

/// A socket to `to` that comes from 127.0.0.`last`.
fn open_from(last: u8, to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
    let socket = socket.expect("a socket");
    let from = SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0));
    socket.bind(&from.into()).expect("all of 127/8 is ours");
    socket.connect(&to.into()).expect("a listener");
    let tcp = TcpStream::from(socket);
    tcp.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    tcp
}

/// An acceptor that no worker looks after.
fn idle() -> (Acceptor, OwnedFd, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    listener.set_nonblocking(true).expect("a socket");
    let addr = listener.local_addr().expect("bound");
    let greeting = Arc::new(Greeting::new(1, String::new()).expect("a greeting"));
    let acceptor = Acceptor::new(listener, None, greeting);
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll");
    acceptor.attach(&epoll).expect("watched");
    (acceptor, epoll, addr)
}

fn turn(acceptor: &mut Acceptor, own: &Endpoint, epoll: &OwnedFd) {
    acceptor.ready(own.core(), epoll, TCP);
    acceptor.end_turn(own.core(), epoll);
}

#[test]
fn a_turn_accepts_some_and_comes_back_for_the_rest() {
    let own = endpoint();
    let (mut acceptor, epoll, addr) = idle();
    let _waiting: Vec<_> = (0..2 * ACCEPTS_A_TURN + 1).map(|_| open_from(1, addr)).collect();
    for turns in 1..=2 {
        turn(&mut acceptor, &own, &epoll);
        assert_eq!(acceptor.pending.len(), turns * ACCEPTS_A_TURN);
        assert!(shown(&epoll).contains(&TCP), "the rest is not seen");
    }
    turn(&mut acceptor, &own, &epoll);
    assert_eq!(acceptor.pending.len(), 2 * ACCEPTS_A_TURN + 1);
}

#[test]
fn newcomers_go_behind_accepted_streams() {
    let own = endpoint();
    let (mut acceptor, epoll, addr) = idle();
    let _stranger = open_from(1, addr);
    acceptor.ready(own.core(), &epoll, TCP);
    assert!(acceptor.pending.is_empty(), "accepted before the events behind it were handled");
    acceptor.end_turn(own.core(), &epoll);
    assert_eq!(acceptor.pending.len(), 1);
}

#[test]
fn one_source_of_strangers_keeps_no_other_out() {
    let own = endpoint();
    let (mut acceptor, epoll, addr) = idle();
    // The honest peer's stream is the oldest.
    let honest = open_from(2, addr);
    turn(&mut acceptor, &own, &epoll);
    let mut strangers = Vec::new();
    while strangers.len() < 2 * MAX_PENDING {
        strangers.extend((0..ACCEPTS_A_TURN).map(|_| open_from(3, addr)));
        turn(&mut acceptor, &own, &epoll);
    }
    assert_eq!(acceptor.pending.len(), MAX_PENDING);
    let from = honest.local_addr().expect("bound").ip();
    let mut kept = acceptor.pending.iter();
    assert!(kept.any(|(_, pending)| pending.source == Source::of(from)), "it gave way");
    // The oldest of the strangers' streams was dropped, so that new ones have time.
    let peers: Vec<_> = (acceptor.pending.iter())
        .filter_map(|(_, pending)| match &pending.stream {
            Stream::Shaking { addr, .. } => Some(*addr),
            _ => None,
        })
        .collect();
    let is_kept = |stranger: &TcpStream| peers.contains(&stranger.local_addr().expect("bound"));
    assert!(!is_kept(&strangers[0]) && strangers.last().is_some_and(is_kept));
}

#[test]
fn a_slow_speaker_does_not_stay_longer() {
    let own = endpoint();
    let timeout = Duration::from_millis(200);
    let other = Endpoint::new(Config { timeout, ..on_loopback() }).expect("an endpoint");
    let stranger = Stranger::new(&own, &other);
    let mut tcp = stranger.open();
    let begun = Instant::now();
    // A PRELUDE byte by byte, which is never whole.
    for byte in b"UCCL".iter().chain(&[1, PROTOCOL_VERSION, 36, 0]).chain(&[0; 35]) {
        if tcp.write_all(&[*byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!matches!(tcp.read(&mut [0]), Ok(1..)), "it is answered");
    assert!(begun.elapsed() < Duration::from_secs(20), "it stays");
}

/// The token of a connection travels in the handshake, and others on the way may see it.
#[test]
fn the_token_alone_joins_nothing_within_the_host() {
    let psk = Some(b"a secret of sixteen".to_vec());
    let config = || Config { psk: psk.clone(), transport: Transport::Local, ..on_loopback() };
    let [own, other] = [(); 2].map(|()| Endpoint::new(config()).expect("an endpoint"));
    let stranger = Stranger::new(&own, &other);
    for is_peer in [false, true] {
        let (socket, peer) = stranger.meet(HelloKind::NewConnection).expect("a handshake");
        let number = if is_peer { socket.secret(peer.token) } else { peer.token };
        let mut uds = FdSocket::connect(peer.uds_name.as_bytes()).expect("it listens");
        let table = &own.core().mrs.table;
        let _invitation = local::invite(&mut uds, number, table).expect("sent");
        let is_answered = loop {
            match uds.recv() {
                Ok(Some(_)) => break true,
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => break false,
            }
        };
        assert_eq!(is_answered, is_peer);
    }
}

/// An endpoint without calls of `accept`, with room for some streams.
fn passive(max_streams: usize) -> Endpoint {
    let config = Config { transport: Transport::Tcp, max_streams, ..on_loopback() };
    let ep = Endpoint::new(config).expect("an endpoint");
    ep.start_passive_accept().expect("a new one");
    ep
}

#[test]
fn passive_endpoints_bound_the_streams_of_their_peers() {
    let (own, other) = (endpoint(), passive(4));
    let stranger = Stranger::new(&own, &other);
    let connect = || {
        let (mut tcp, _) = stranger.shake(HelloKind::NewConnection)?;
        assert_eq!(establish(&mut tcp, 1), 1);
        Ok::<_, String>(tcp)
    };
    // One source gets half.
    let first = connect().expect("there is room");
    let _second = connect().expect("there is room");
    let refused = connect().expect_err("there is none");
    assert!(refused.contains("UCCL_P2P_MAX_STREAMS=4"), "{refused}");
    drop(first);
    let begun = Instant::now();
    while let Err(refused) = connect() {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "a stream that has ended takes room: {refused}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn each_lane_counts() {
    let (own, other) = (endpoint(), passive(6));
    let stranger = Stranger::new(&own, &other);
    let (mut first, peer) = stranger.shake(HelloKind::NewConnection).expect("there is room");
    let join = |lane_index| stranger.shake(HelloKind::JoinLane { token: peer.token, lane_index });
    let _lanes = [1, 2].map(|lane| join(lane).expect("there is room"));
    let refused = join(3).expect_err("there is none");
    assert!(refused.contains("UCCL_P2P_MAX_STREAMS"), "{refused}");
    assert_eq!(establish(&mut first, 3), 3);
}
