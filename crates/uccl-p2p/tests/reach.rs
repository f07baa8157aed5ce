//! Connections to peers that are known by address only.

use std::{net::TcpListener, thread, time::Duration};

use uccl_p2p::{Config, Endpoint, Error, NoInterrupt, Transport};

/// Longer than anything takes that has to happen.
const FAR: Option<Duration> = Some(Duration::from_secs(20));

fn endpoint(port: u16) -> Endpoint {
    let bind = Some([127, 0, 0, 1].into());
    let config = Config { bind, port: Some(port), transport: Transport::Tcp, ..Config::default() };
    let endpoint = Endpoint::new(config).expect("an endpoint");
    endpoint.start_passive_accept().expect("it accepts");
    endpoint
}

#[test]
fn callers_of_one_address_share_a_connection() {
    let (a, b) = (endpoint(0), endpoint(0));
    let reach = || a.reach(b.addr(), FAR, &mut NoInterrupt).expect("reached");
    let conns: Vec<_> = thread::scope(|scope| {
        let callers: Vec<_> = (0..16).map(|_| scope.spawn(reach)).collect();
        callers.into_iter().map(|caller| caller.join().expect("no panic")).collect()
    });
    assert!(conns.iter().all(|conn| *conn == conns[0]), "{conns:?}");
    assert_eq!(reach(), conns[0]);
    assert_eq!(a.stats().expect("open").connections, 1);
    a.disconnect(conns[0]).expect("it was there");
    assert_ne!(reach(), conns[0], "another one");
}

#[test]
fn a_peer_that_was_started_anew_is_reached() {
    let (a, b) = (endpoint(0), endpoint(0));
    let addr = b.addr();
    let first = a.reach(addr, FAR, &mut NoInterrupt).expect("reached");
    let instance = b.instance();
    b.close().expect("closed");
    drop(b);
    let refused = a.reach(addr, FAR, &mut NoInterrupt);
    assert!(matches!(refused, Err(Error::Connect { .. })), "{refused:?}");
    assert!(matches!(a.connection(first), Err(Error::UnknownConnection(_))), "it is forgotten");
    let b = endpoint(addr.port());
    assert_ne!(b.instance(), instance);
    let second = a.reach(addr, FAR, &mut NoInterrupt).expect("reached");
    assert_eq!(a.connection(second).expect("it is there").instance, b.instance());
}

/// A peer that accepts and says nothing costs a caller a time-out. Callers that wait for the same
/// connect get its error, and do not try one after the other.
#[test]
fn callers_that_wait_for_a_failing_connect_get_its_error() {
    const CALLERS: usize = 40;
    let silent = TcpListener::bind(("127.0.0.1", 0)).expect("a listener");
    let addr = silent.local_addr().expect("an address");
    let a = endpoint(0);
    let reach = || a.reach(addr, Some(Duration::from_secs(1)), &mut NoInterrupt);
    let errors: Vec<_> = thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS).map(|_| scope.spawn(reach)).collect();
        callers.into_iter().map(|caller| caller.join().expect("no panic")).collect()
    });
    assert!(errors.iter().all(Result::is_err), "{errors:?}");
    silent.set_nonblocking(true).expect("it is a socket");
    let connects = std::iter::from_fn(|| silent.accept().ok()).count();
    assert!((1..CALLERS / 2).contains(&connects), "{connects} connects");
}
