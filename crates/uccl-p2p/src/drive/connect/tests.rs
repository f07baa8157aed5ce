//! Tests of connecting, with a peer that holds each of its steps back.

use std::{
    net::TcpListener,
    os::fd::{AsFd, OwnedFd},
};

use uccl_fabric::shm::{MapMode, Mapping};
use uccl_local::{
    fdpass::FdListener,
    shm::{Accesses, Hazards, hazard::HAZARD_BYTES},
};
use uccl_wire::frame::{HEADER_LEN, Header, Kind};

use super::*;
use crate::{Config, Endpoint, MrId, Uninterrupted, drive::joined::on_loopback};

/// Longer than any awaited event takes.
const FAR: Duration = Duration::from_secs(20);

fn endpoint(timeout: Duration) -> Endpoint {
    Endpoint::new(Config { transport: Transport::Local, timeout, ..on_loopback() })
        .expect("an endpoint")
}

fn patiently<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(begun.elapsed() < FAR, "it never happens");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A peer of this host that has received the `Establish` message and has not answered it.
struct Peer {
    tcp: TcpStream,
    _lane: LocalLane,
    /// Its accesses to our memory.
    accesses: Accesses,
    _own: Endpoint,
}

impl Peer {
    /// Listens. The function that it returns plays the peer of the next connection.
    fn listen() -> (SocketAddr, impl FnOnce() -> Self) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let addr = listener.local_addr().expect("bound");
        let name = format!("uccl-connect-test-{addr}-{}", std::process::id());
        let uds = FdListener::bind(name.as_bytes()).expect("a name of its own");
        let greeting = Greeting::new(addr.port(), name).expect("a greeting");
        (addr, move || Self::meet(&listener, &uds, &greeting))
    }

    fn meet(listener: &TcpListener, uds: &FdListener, greeting: &Greeting) -> Self {
        let own = endpoint(FAR);
        let (mut tcp, _) = listener.accept().expect("it comes");
        tcp.set_read_timeout(Some(FAR)).expect("a timeout");
        let mut handshake = Handshake::acceptor(None, [7; NONCE_LEN]);
        let mut bytes = [0; 4096];
        loop {
            let n = tcp.read(&mut bytes).expect("it speaks");
            let progress = handshake.feed(&bytes[..n]).expect("it makes sense");
            if let Progress::PeerHello { peer, .. } = progress {
                handshake.reply(&greeting.hello(own.core(), peer.kind, 1)).expect("its turn");
                tcp.write_all(&handshake.pending_output()).expect("it listens");
                break;
            }
            tcp.write_all(&handshake.pending_output()).expect("it listens");
        }
        let mut socket = patiently(|| uds.accept().expect("a socket"));
        let invitation = patiently(|| socket.recv().expect("an invitation"));
        let segment: OwnedFd = invitation.fds[0].as_fd().try_clone_to_owned().expect("a copy");
        let segment = Mapping::of(segment, MapMode::ReadWrite, usize::MAX).expect("mapped");
        // The second half holds the hazards of the side that was connected to.
        let hazards = Hazards::new(&Arc::new(segment), HAZARD_BYTES).expect("they fit");
        let regions = Arc::clone(&own.core().mrs.table);
        let setup = Setup { regions, process: None, checksum: false };
        let lane = local::accept(socket, invitation, setup).expect("a lane");
        let mut word = [0; HEADER_LEN];
        tcp.read_exact(&mut word).expect("the word");
        let word = Header::decode(&word).expect("a frame");
        assert_eq!(word.kind, Kind::Establish);
        Self { tcp, _lane: lane, accesses: Accesses::new(hazards), _own: own }
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
        let connecting = scope.spawn(|| ep.connect(addr, Some(FAR), &mut Uninterrupted));
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
