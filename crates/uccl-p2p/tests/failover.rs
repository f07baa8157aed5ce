//! Real TCP between two endpoints, through a relay that shuts one of the streams, or holds its
//! bytes back.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use uccl_p2p::{Config, ConnId, Endpoint, Error, Iov, NoInterrupt, Op, Request, Transport};

use self::loopback::on_loopback;

const STREAMS: usize = 4;
const LEN: usize = 64 << 20;

/// The two ends of a forwarded stream.
struct ForwardedStream {
    ends: [TcpStream; 2],
    held: Arc<AtomicBool>,
}

/// Forwards streams to an endpoint, in the order in which they were opened.
struct Middle {
    addr: SocketAddr,
    streams: Arc<Mutex<Vec<ForwardedStream>>>,
}

impl Middle {
    fn before(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("an address");
        let streams = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&streams);
        std::thread::spawn(move || {
            for _ in 0..STREAMS {
                let (near, _) = listener.accept().expect("a stream");
                let far = TcpStream::connect(target).expect("passed on");
                let held = Arc::new(AtomicBool::new(false));
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let held = Arc::clone(&held);
                    std::thread::spawn(move || pass(from, to, &held));
                }
                list.lock().unwrap().push(ForwardedStream { ends: [near, far], held });
            }
        });
        Self { addr, streams }
    }

    fn shut(&self, stream: usize) {
        for end in &self.streams.lock().unwrap()[stream].ends {
            // `pass` may have shut it already.
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    fn hold(&self, stream: usize) {
        self.streams.lock().unwrap()[stream].held.store(true, SeqCst);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, held: &AtomicBool) {
    let mut bytes = vec![0; 256 << 10];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        while held.load(SeqCst) {
            sleep(Duration::from_millis(5));
        }
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

fn endpoint(timeout: Duration) -> Endpoint {
    Endpoint::new(Config {
        transport: Transport::Tcp,
        tcp_streams: STREAMS,
        num_cpus: 2,
        timeout,
        transfer_timeout: Duration::from_secs(60),
        ..on_loopback()
    })
    .expect("an endpoint")
}

struct Pair {
    a: Endpoint,
    b: Endpoint,
    conn: ConnId,
    middle: Middle,
    near: Vec<u8>,
    far: Vec<u8>,
}

impl Pair {
    fn new(timeout: Duration) -> Self {
        let (a, b) = (endpoint(timeout), endpoint(timeout));
        let middle = Middle::before(b.addr());
        let conn = a.connect(middle.addr, None, &mut NoInterrupt).expect("connected");
        b.accept(None, &mut NoInterrupt).expect("accepted");
        assert_eq!(a.connection(conn).expect("open").lanes, STREAMS);
        while middle.streams.lock().unwrap().len() < STREAMS {
            sleep(Duration::from_millis(1));
        }
        let pattern = |seed: usize| (0..LEN).map(|i| (((i * 31) >> 5) ^ seed) as u8).collect();
        Self { a, b, conn, middle, near: pattern(1), far: pattern(2) }
    }

    /// Moves all memory four times, while `trouble` disturbs the streams.
    fn run(&mut self, op: Op, trouble: impl FnOnce(&Middle) + Send) -> Result<(), Error> {
        let (near, far) = (self.near.as_mut_ptr() as usize, self.far.as_mut_ptr() as usize);
        // SAFETY: the memory lives as long as the endpoints do.
        let (mr, there) = unsafe {
            (
                self.a.register(near, LEN).expect("registered"),
                self.b.register(far, LEN).expect("registered"),
            )
        };
        let adverts = [self.b.advertise(there, far, LEN).expect("advertised")];
        let iovs = [Iov { mr, ptr: near, len: LEN }];
        let request = Request::new(self.conn, op, &iovs, &adverts);
        let middle = &self.middle;
        let a = &self.a;
        let ended = std::thread::scope(|scope| {
            scope.spawn(move || {
                sleep(Duration::from_millis(5));
                trouble(middle);
            });
            (0..4).try_for_each(|_| a.run(&request, &mut NoInterrupt).map(drop))
        });
        assert!(ended.is_err() || self.near == self.far, "other bytes arrived");
        ended
    }

    fn assert_lanes(&self, lanes: usize) {
        let begun = Instant::now();
        while self.a.stats().expect("ours").lanes_lost < (STREAMS - lanes) as u64 {
            assert!(begun.elapsed() < Duration::from_secs(30), "the lane is never given up");
            sleep(Duration::from_millis(1));
        }
        assert_eq!(self.a.connection(self.conn).expect("open").lanes, lanes);
    }
}

#[test]
fn a_shut_stream_hands_its_work_to_the_others() {
    for (op, stream) in [(Op::Write, 1), (Op::Read, STREAMS - 1)] {
        let mut pair = Pair::new(Duration::from_secs(10));
        pair.run(op, |middle| middle.shut(stream)).expect("the others take over");
        pair.assert_lanes(STREAMS - 1);
        pair.run(op, |_| {}).expect("three are enough");
    }
}

#[test]
fn a_stream_that_nothing_passes_is_given_up() {
    for op in [Op::Write, Op::Read] {
        let mut pair = Pair::new(Duration::from_secs(1));
        pair.middle.hold(2);
        pair.run(op, |_| {}).expect("the others take over");
        pair.assert_lanes(STREAMS - 1);
    }
}

#[test]
fn with_the_first_stream_the_connection_ends() {
    let mut pair = Pair::new(Duration::from_secs(10));
    pair.middle.shut(0);
    let ended = pair.run(Op::Write, |_| {});
    assert!(matches!(&ended, Err(Error::ConnectionLost { .. })), "{ended:?}");
    assert!(pair.a.check_connection(pair.conn).is_err());
}
