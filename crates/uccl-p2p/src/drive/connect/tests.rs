//! Tests of connecting, with a peer that holds each of its steps back.

use std::{
    net::TcpListener,
    os::fd::{AsFd, OwnedFd},
    task::Poll,
};

use uccl_chaos::patiently;
use uccl_fabric::shm::{MapMode, Mapping};
use uccl_local::{
    fdpass::FdListener,
    shm::{Accesses, Hazards, hazard::HAZARD_BYTES},
};
use uccl_wire::frame::{HEADER_LEN, Header, Kind};

use super::*;
use crate::{Config, ConnectRequest, Endpoint, MrId, NoInterrupt, drive::pair::on_loopback};

/// Longer than any awaited event takes.
const FAR: Duration = Duration::from_secs(20);

fn endpoint(timeout: Duration) -> Endpoint {
    Endpoint::new(Config { transport: Transport::Local, timeout, ..on_loopback() })
        .expect("an endpoint")
}

/// A peer of this host that has received the `Establish` message and has not answered it.
struct Peer {
    tcp: TcpStream,
    _lane: LocalLane,
    /// Its accesses to our memory.
    accesses: Accesses,
    _own: Endpoint,
}

/// The steps of a connect, by the last thing that the peer does.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Step {
    /// It has accepted the socket.
    Silent,
    /// It has answered the first bytes of the handshake.
    Begun,
    /// It has sent its hello.
    Greeted,
    /// It has received the invitation to a lane.
    Invited,
    /// It has made the lane, and received the `Establish` message.
    Lane,
}

/// A peer of this host that waits for this side's connect.
struct ListeningPeer {
    listener: TcpListener,
    uds: FdListener,
    greeting: Greeting,
}

/// The peer's objects of a connect.
struct PeerObjects {
    tcp: TcpStream,
    socket: Option<FdSocket>,
    lane: Option<(LocalLane, Accesses)>,
}

impl ListeningPeer {
    fn new() -> (SocketAddr, Self) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let addr = listener.local_addr().expect("bound");
        let name = format!("uccl-connect-test-{addr}-{}", std::process::id());
        let uds = FdListener::bind(name.as_bytes()).expect("a name of its own");
        let greeting = Greeting::new(addr.port(), name).expect("a greeting");
        (addr, Self { listener, uds, greeting })
    }

    /// Takes part in the next connect until a step.
    fn meet(&self, own: &Endpoint, last: Step) -> PeerObjects {
        let (mut tcp, _) = self.listener.accept().expect("it comes");
        tcp.set_read_timeout(Some(FAR)).expect("a timeout");
        let mut handshake = Handshake::acceptor(None, [7; NONCE_LEN]);
        let mut bytes = [0; 4096];
        let mut is_greeted = last == Step::Silent;
        while !is_greeted {
            let n = tcp.read(&mut bytes).expect("it speaks");
            let progress = handshake.feed(&bytes[..n]).expect("it makes sense");
            if let Progress::PeerHello { peer, .. } = progress {
                handshake.reply(&self.greeting.hello(own.core(), peer.kind, 1)).expect("its turn");
                is_greeted = true;
            }
            tcp.write_all(&handshake.pending_output()).expect("it listens");
            is_greeted |= last == Step::Begun;
        }
        let mut met = PeerObjects { tcp, socket: None, lane: None };
        if !matches!(last, Step::Invited | Step::Lane) {
            return met;
        }
        let mut socket = patiently(|| self.uds.accept().expect("a socket"));
        let invitation = patiently(|| socket.recv().expect("an invitation"));
        if last == Step::Invited {
            met.socket = Some(socket);
            return met;
        }
        let segment: OwnedFd = invitation.fds[0].as_fd().try_clone_to_owned().expect("a copy");
        let segment = Mapping::of(segment, MapMode::ReadWrite, usize::MAX).expect("mapped");
        // The second half holds the hazards of the side that was connected to.
        let hazards = Hazards::new(&Arc::new(segment), HAZARD_BYTES).expect("they fit");
        let regions = Arc::clone(&own.core().mrs.table);
        let setup = Setup { regions, process: None, checksum: false };
        let lane = local::accept(socket, invitation, setup).expect("a lane");
        let mut word = [0; HEADER_LEN];
        met.tcp.read_exact(&mut word).expect("the word");
        let word = Header::decode(&word).expect("a frame");
        assert_eq!(word.kind, Kind::Establish);
        met.lane = Some((lane, Accesses::new(hazards)));
        met
    }
}

impl PeerObjects {
    /// Waits for the end of everything that this side had opened.
    fn sees_the_end(mut self, step: Step) {
        let mut bytes = [0; 4096];
        while self.tcp.read(&mut bytes).is_ok_and(|n| n > 0) {}
        if let Some(mut socket) = self.socket {
            let ended = patiently(|| socket.recv().err());
            assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof, "{step:?}");
        }
    }
}

impl Peer {
    /// Listens. The function that it returns plays the peer of the next connection.
    fn listen() -> (SocketAddr, impl FnOnce() -> Self) {
        let (addr, listening) = ListeningPeer::new();
        (addr, move || {
            let own = endpoint(FAR);
            let met = listening.meet(&own, Step::Lane);
            let (lane, accesses) = met.lane.expect("made");
            Self { tcp: met.tcp, _lane: lane, accesses, _own: own }
        })
    }

    fn answer(&self) {
        let word = Header::bare(Kind::Establish, 0, 0).encode();
        (&self.tcp).write_all(&word).expect("it listens");
    }

    fn leave(&self) {
        self.tcp.shutdown(std::net::Shutdown::Both).expect("it is there");
    }
}

/// The last step of the peer.
enum Then {
    Nothing,
    Answer,
    Leave,
}

/// Tests a peer that copies as soon as it may: before this side has heard that there is a
/// connection.
fn is_waited_for(then: Then, give_back: fn(&Endpoint, MrId) -> Result<()>) {
    let ep = endpoint(Duration::from_millis(200));
    let mut memory = [0_u8; 64];
    // SAFETY: the memory outlives the endpoint.
    let mr = unsafe { ep.register(memory.as_mut_ptr() as usize, memory.len()) };
    let mr = mr.expect("registered");
    let slot = ep.core().mrs.get(mr).expect("it is there").region.slot;
    let (addr, meet) = Peer::listen();
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| ep.connect(addr, Some(FAR), &mut NoInterrupt));
        let peer = meet();
        let copies = peer.accesses.claim(slot).expect("a word");
        let connecting = match then {
            Then::Nothing => Some(connecting),
            Then::Answer => {
                peer.answer();
                connecting.join().expect("no panic").expect("connected");
                None
            }
            Then::Leave => {
                peer.leave();
                connecting.join().expect("no panic").expect_err("the peer has left");
                None
            }
        };
        let touched = give_back(&ep, mr);
        assert!(matches!(touched, Err(Error::StillTouched { .. })), "{touched:?}");
        drop(copies);
        give_back(&ep, mr).expect("the peer has let go");
        if let Some(connecting) = connecting {
            // Too late: the connection was given up.
            peer.answer();
            connecting.join().expect("no panic").expect_err("it has ended");
        }
    });
    assert!(ep.core().open_conns().is_empty());
}

#[test]
fn a_peer_that_copies_before_its_connection_is_there_is_waited_for() {
    for give_back in [Endpoint::deregister, (|ep, _| ep.close()) as fn(&Endpoint, MrId) -> _] {
        is_waited_for(Then::Nothing, give_back);
        is_waited_for(Then::Answer, give_back);
        is_waited_for(Then::Leave, give_back);
    }
}

/// The end of a connect that is under way.
#[derive(Clone, Copy, Debug)]
enum End {
    Cancel,
    Drop,
    /// Its endpoint is closed.
    Close,
}

#[test]
fn a_connect_that_is_ended_in_any_step_leaves_nothing() {
    let own = endpoint(FAR);
    for step in [Step::Silent, Step::Begun, Step::Greeted, Step::Invited, Step::Lane] {
        for end in [End::Cancel, End::Drop, End::Close] {
            // A listener of its own: sockets that no step has accepted stay with theirs.
            let (addr, listening) = ListeningPeer::new();
            let ep = endpoint(FAR);
            let timeout = Some(Duration::ZERO);
            let addrs = [addr];
            let request = ConnectRequest { timeout, ..ConnectRequest::new(&addrs) };
            let begun = ep.begin_connect(&request).expect("begun");
            let met = std::thread::scope(|scope| {
                let peer = scope.spawn(|| listening.meet(&own, step));
                while !peer.is_finished() {
                    assert!(begun.poll().is_pending(), "{step:?}");
                    std::thread::yield_now();
                }
                peer.join().expect("no panic")
            });
            // The peer does nothing more, and there is no time limit: a poll that waited would
            // never return.
            for _ in 0..20 {
                assert!(begun.poll().is_pending(), "{step:?}");
            }
            let listed: Vec<_> = ep.core().open_conns().iter().map(|conn| conn.id).collect();
            assert_eq!(listed.len(), usize::from(step == Step::Lane), "{step:?}");
            match end {
                End::Cancel => {
                    let ended = begun.cancel();
                    assert!(matches!(ended, Err(Error::Cancelled { .. })), "{step:?}: {ended:?}");
                    let ended = begun.poll();
                    let is_cancelled = matches!(ended, Poll::Ready(Err(Error::Cancelled { .. })));
                    assert!(is_cancelled, "{step:?}: {ended:?}");
                }
                End::Drop => drop(begun),
                End::Close => {
                    ep.close().expect("closed");
                    let ended = begun.poll();
                    let is_closed = matches!(ended, Poll::Ready(Err(Error::Closed)));
                    assert!(is_closed, "{step:?}: {ended:?}");
                }
            }
            assert!(ep.core().open_conns().is_empty(), "{step:?}, {end:?}");
            // Nor is it kept as one that was lost.
            for id in listed {
                let known = ep.core().conn_info(id);
                assert!(matches!(known, Err(Error::UnknownConnection(_))), "{end:?}: {known:?}");
            }
            met.sees_the_end(step);
            ep.close().expect("closed");
        }
    }
}

#[test]
fn a_unix_socket_at_which_too_many_wait_is_waited_for() {
    let (addr, listening) = ListeningPeer::new();
    let (own, ep) = (endpoint(FAR), endpoint(FAR));
    let name = listening.greeting.hello(own.core(), HelloKind::NewConnection, 0).uds_name;
    let mut others = Vec::new();
    let full = loop {
        match FdSocket::connect(name.as_bytes()) {
            Ok(other) => others.push(other),
            Err(e) => break e,
        }
    };
    assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    let addrs = [addr];
    let timeout = Some(Duration::ZERO);
    let request = ConnectRequest { timeout, ..ConnectRequest::new(&addrs) };
    let begun = ep.begin_connect(&request).expect("begun");
    let _met = std::thread::scope(|scope| {
        let peer = scope.spawn(|| listening.meet(&own, Step::Greeted));
        while !peer.is_finished() {
            assert!(begun.poll().is_pending());
        }
        peer.join().expect("no panic")
    });
    for _ in 0..50 {
        assert!(begun.poll().is_pending());
        std::thread::sleep(Duration::from_micros(100));
    }
    for _ in &others {
        patiently(|| listening.uds.accept().expect("a socket"));
    }
    let mut socket = patiently(|| {
        assert!(begun.poll().is_pending());
        listening.uds.accept().expect("a socket")
    });
    patiently(|| {
        assert!(begun.poll().is_pending());
        socket.recv().expect("an invitation")
    });
}
