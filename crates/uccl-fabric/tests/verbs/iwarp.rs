//! What is iWARP's own: connections made by the connection manager, and writes that need proof.

use std::{
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use socket2::{Domain, Socket, Type};
use uccl_fabric::{
    lane::OpKind::Write,
    rma::rail::{Channel, Rail, RailError},
    verbs::VerbsSettings,
};
use uccl_wire::iwarp::IwarpAddress;

use crate::support::{Cable, Memory, Pair, Rails, request};

fn rails(settings: &VerbsSettings) -> Option<Rails> {
    let rails = Rails::open(Cable::Shared, settings)?;
    if !rails.are_iwarp() {
        eprintln!("skipped: lacks iWARP devices (a guest with --driver=siw)");
        return None;
    }
    Some(rails)
}

fn usual() -> Option<Rails> {
    rails(&VerbsSettings::default())
}

fn address(channel: &dyn Channel) -> IwarpAddress {
    IwarpAddress::decode(channel.address()).expect("an address")
}

/// Polls both until the first is lost.
fn until_lost(a: &mut dyn Channel, b: &mut dyn Channel) -> RailError {
    let began = Instant::now();
    loop {
        if let Err(error) = a.poll(&mut Vec::new()) {
            return error;
        }
        b.poll(&mut Vec::new()).expect("it waits for somebody else");
        assert!(began.elapsed() < Duration::from_secs(60), "it is not lost");
        std::thread::yield_now();
    }
}

#[test]
fn the_rail_says_what_it_is() {
    let Some(rails) = usual() else { return };
    let info = rails.a.info();
    assert_eq!(info.link, "verbs:iwarp");
    let other = rails.b.info();
    assert_eq!(info.network, other.network, "{info:?} and {other:?}");
}

#[test]
fn the_end_that_is_asked_second_listens() {
    let settings = |count| VerbsSettings { queue_pairs: Some(count), ..Default::default() };
    let Some(three) = rails(&settings(3)) else { return };
    let Some(two) = rails(&settings(2)) else { return };
    let (a, mut b) = (three.a.open().expect("a channel"), two.b.open().expect("a channel"));
    let (ours, theirs) = (address(a.as_ref()), address(b.as_ref()));
    assert_eq!((ours.port, ours.queue_pairs, theirs.port), (0, 3, 0));
    assert!(ours.token != theirs.token && ours.ip != theirs.ip);
    b.connect(a.address()).expect("it listens");
    let listening = address(b.as_ref());
    assert!(listening.port != 0 && listening.queue_pairs == 2, "{listening:?}");
    assert_eq!(listening.token, theirs.token);
}

/// Who does not know the token is refused, and who is expected gets in all the same.
#[test]
fn a_connection_without_the_token_is_refused() {
    let Some(rails) = usual() else { return };
    let [mut a, mut stranger] = [(); 2].map(|()| rails.a.open().expect("a channel"));
    let mut b = rails.b.open().expect("a channel");
    b.connect(a.address()).expect("it listens");
    let mut forged = address(b.as_ref());
    forged.token[3] ^= 1;
    stranger.connect(&forged.encode()).expect("it begins");
    let error = until_lost(stranger.as_mut(), b.as_mut());
    assert!(matches!(&error, RailError::Lost(why) if why.contains("refuses")), "{error}");
    a.connect(b.address()).expect("it begins");
    Pair { a, b }.probes().expect("the way works");
}

/// The place of each queue pair is taken once.
#[test]
fn a_second_connection_with_the_token_is_refused() {
    let Some(rails) = usual() else { return };
    let [mut a, mut second] = [(); 2].map(|()| rails.a.open().expect("a channel"));
    let mut b = rails.b.open().expect("a channel");
    b.connect(a.address()).expect("it listens");
    let known = b.address().to_vec();
    a.connect(&known).expect("it begins");
    let mut pair = Pair { a, b };
    pair.probes().expect("the way works");
    second.connect(&known).expect("it begins");
    let error = until_lost(second.as_mut(), pair.b.as_mut());
    assert!(matches!(&error, RailError::Lost(why) if why.contains("refuses")), "{error}");
    pair.probes().expect("the way still works");
}

#[test]
fn nobody_at_the_address_is_a_loss() {
    let Some(rails) = usual() else { return };
    let (mut a, mut b) = (rails.a.open().expect("a channel"), rails.b.open().expect("a channel"));
    b.connect(a.address()).expect("it listens");
    let known = b.address().to_vec();
    drop(b);
    a.connect(&known).expect("it begins");
    let mut idle = rails.b.open().expect("a channel");
    let error = until_lost(a.as_mut(), idle.as_mut());
    assert!(matches!(error, RailError::Lost(_)), "{error}");
}

/// Nobody waits for who is silent, as a host is that is gone: siw itself would wait until TCP gives up.
#[test]
fn silence_at_the_address_holds_nobody_up() {
    let Some(rails) = usual() else { return };
    let (mut a, mut b) = (rails.a.open().expect("a channel"), rails.b.open().expect("a channel"));
    b.connect(a.address()).expect("it listens");
    let (_busy, port) = busy(address(b.as_ref()).ip);
    let silent = IwarpAddress { port, knock_port: port, ..address(b.as_ref()) };
    a.connect(&silent.encode()).expect("it begins");
    for _ in 0..1000 {
        a.poll(&mut Vec::new()).expect("it may still answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A port where one connection was taken, and no other is answered.
fn busy(ip: IpAddr) -> ((Socket, TcpStream), u16) {
    let socket = Socket::new(Domain::for_address((ip, 0).into()), Type::STREAM, None);
    let socket = socket.expect("a socket");
    socket.bind(&SocketAddr::new(ip, 0).into()).expect("bound");
    socket.listen(0).expect("it listens");
    let address = socket.local_addr().ok().and_then(|address| address.as_socket());
    let address = address.expect("an address");
    let first = TcpStream::connect(address).expect("the first is taken");
    ((socket, first), address.port())
}

/// What is posted before the connection is there goes when it is.
#[test]
fn what_is_posted_early_waits() {
    let Some(rails) = usual() else { return };
    let ours = Memory::random(&rails.a, 8 * 4096, 1);
    let theirs = Memory::zeros(&rails.b, 8 * 4096);
    let mut pair = rails.connected();
    let writes: Vec<_> = (0..8)
        .map(|n| {
            let range = n * 4096..(n + 1) * 4096;
            request(Write, pair.a.as_mut(), (&ours, &theirs), range, n as u64)
        })
        .collect();
    pair.run_well(&writes);
    assert!(ours.bytes == theirs.bytes);
}

/// iWARP itself says that a write has ended when TCP has taken its bytes: then the peer may still refuse them.
#[test]
fn a_write_that_the_peer_refuses_never_ends_well() {
    let Some(rails) = usual() else { return };
    let (ours, theirs) = (Memory::zeros(&rails.a, 4096), Memory::zeros(&rails.b, 4096));
    for round in 0..20 {
        let mut pair = rails.joined();
        let mut write = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..4096, round);
        write.remote_key ^= 0x5500;
        let (ended, result) = pair.run(&[write]);
        assert!(ended.iter().all(|ended| ended.result.is_err()), "{ended:?}");
        assert!(!ended.is_empty() || matches!(result, Err(RailError::Lost(_))), "{result:?}");
    }
}
