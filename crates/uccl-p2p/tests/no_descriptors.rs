//! A process that gets no more descriptors: its calls still wait for their transfers, and no byte
//! lands in the memory of a transfer that has ended.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    io::{Read, Write},
    time::Duration,
};

use parking_lot::Mutex;
use uccl_p2p::{
    Config, ConnId, Endpoint, Error, Iov, NoInterrupt, Op, Outcome, Request, Status, Transport,
};

use self::loopback::on_loopback;

struct Pair {
    a: Endpoint,
    b: Endpoint,
    to_b: ConnId,
    to_a: ConnId,
}

/// Callers sleep at once, without a spin.
fn pair(transport: Transport) -> Pair {
    let config = || Config {
        transport,
        timeout: Duration::from_secs(20),
        spin: Duration::ZERO,
        ..on_loopback()
    };
    let [a, b] = [(); 2].map(|()| Endpoint::new(config()).expect("an endpoint"));
    let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    let to_a = b.accept(None, &mut NoInterrupt).expect("accepted").conn;
    Pair { a, b, to_b, to_a }
}

/// One test at a time: the limit is the process's, and every test makes descriptors first.
static ONE_TEST: Mutex<()> = Mutex::new(());

/// While this lives, no descriptor can be made, and `poll` refuses several of them.
struct NoDescriptors {
    before: libc::rlimit,
}

fn limit() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for a limit.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit
}

fn set(limit: &libc::rlimit) {
    // SAFETY: a limit, which lives until the call returns.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) }, 0);
}

impl NoDescriptors {
    fn from_now_on() -> Self {
        let before = limit();
        set(&libc::rlimit { rlim_cur: 0, ..before });
        std::fs::File::open("/dev/null").expect_err("there is no descriptor for it");
        Self { before }
    }
}

impl Drop for NoDescriptors {
    fn drop(&mut self) {
        set(&self.before);
    }
}

/// Memory that an endpoint has registered.
struct Memory {
    bytes: Box<[u8; 64]>,
}

impl Memory {
    fn register(ep: &Endpoint) -> (Self, Iov) {
        let mut bytes = Box::new([0xEE; 64]);
        let (ptr, len) = (bytes.as_mut_ptr() as usize, bytes.len());
        // SAFETY: the tests keep it until their endpoints are closed.
        let mr = unsafe { ep.register(ptr, len) }.expect("registered");
        (Self { bytes }, Iov { mr, ptr, len })
    }
}

fn recv(
    ep: &Endpoint,
    conn: ConnId,
    into: Iov,
    timeout: Option<Duration>,
) -> Result<Outcome, Error> {
    let iovs = [into];
    let request = Request { timeout, ..Request::new(conn, Op::Recv, &iovs, &[]) };
    ep.run(&request, &mut NoInterrupt)
}

const LINKS: [Transport; 2] = [Transport::Local, Transport::Tcp];

#[test]
fn a_call_that_cannot_sleep_waits_for_its_transfer() {
    let _alone = ONE_TEST.lock();
    for transport in LINKS {
        let p = pair(transport);
        let ((to, into), (_from, from)) = (Memory::register(&p.a), Memory::register(&p.b));
        let iovs = [from];
        let send = || p.b.run(&Request::new(p.to_a, Op::Send, &iovs, &[]), &mut NoInterrupt);
        for has_slept in [false, true] {
            // A thread that has slept keeps its eventfd, and a new thread gets none.
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    let soon = Some(Duration::from_millis(100));
                    let late = |soon| recv(&p.a, p.to_b, into, soon);
                    if has_slept {
                        let late = late(soon);
                        assert!(matches!(late, Err(Error::DeadlineExceeded { .. })), "{late:?}");
                    }
                    let _none = NoDescriptors::from_now_on();
                    let late = late(soon);
                    assert!(matches!(late, Err(Error::DeadlineExceeded { .. })), "{late:?}");
                });
                waiting.join().expect("no panic");
                assert!(to.bytes.iter().all(|byte| *byte == 0xEE));
                let _none = NoDescriptors::from_now_on();
                let waiting = scope.spawn(|| recv(&p.a, p.to_b, into, None));
                std::thread::sleep(Duration::from_millis(50));
                send().expect("sent");
                let received = waiting.join().expect("no panic");
                assert_eq!(received.expect("received").bytes, 64, "{transport:?}");
            });
        }
    }
}

/// The peer has to confirm the end of each transfer.
#[test]
fn a_transfer_is_cancelled_by_a_thread_that_cannot_sleep() {
    let _alone = ONE_TEST.lock();
    for transport in LINKS {
        let p = pair(transport);
        let (_from, from) = Memory::register(&p.a);
        let iovs = [from];
        let send = Request::new(p.to_b, Op::Send, &iovs, &[]);
        let none = NoDescriptors::from_now_on();
        for _ in 0..20 {
            let transfer = p.a.post(&send).expect("posted");
            std::thread::scope(|scope| {
                let ended = scope.spawn(|| p.a.cancel(transfer)).join().expect("no panic");
                let ended = ended.expect("it is known");
                assert!(matches!(ended, Status::Failed(Error::Cancelled { .. })), "{ended:?}");
            });
        }
        drop(none);
        p.a.deregister(from.mr).expect("nothing uses it any more");
    }
}

#[test]
fn a_peer_that_comes_meanwhile_is_accepted_afterwards() {
    let _alone = ONE_TEST.lock();
    let p = pair(Transport::Tcp);
    let (domain, kind) = (socket2::Domain::IPV4, socket2::Type::STREAM);
    let socket = socket2::Socket::new(domain, kind, None).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let none = NoDescriptors::from_now_on();
    socket.connect(&p.b.addr().into()).expect("it listens");
    // The first try to accept fails.
    std::thread::sleep(Duration::from_millis(20));
    p.b.check_connection(p.to_a).expect("it lives");
    drop(none);
    let mut stream = std::net::TcpStream::from(socket);
    // Bytes that are no handshake are answered, if only by a hang-up.
    stream.write_all(&[0xEE; 64]).expect("it is there");
    let answered = stream.read(&mut [0; 64]);
    let in_vain = |e: &std::io::Error| e.kind() == std::io::ErrorKind::WouldBlock;
    assert!(!answered.as_ref().is_err_and(in_vain), "{answered:?}");
    p.a.connect(p.b.addr(), None, &mut NoInterrupt).expect("others are accepted");
}
