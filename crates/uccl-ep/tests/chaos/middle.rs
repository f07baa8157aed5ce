//! A forwarder in the middle of the TCP streams of one connection: it splits and delays their
//! bytes, and shuts a stream.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use fastrand::Rng;

/// Streams of a connection. The first carries its messages, and the connection ends with it.
pub(super) const STREAMS: usize = 3;

/// Passes the streams of one connection on.
pub(super) struct Middle {
    pub(super) addr: SocketAddr,
    is_closed: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Middle {
    /// Listens, and connects to `target` for each stream that comes.
    pub(super) fn before(target: SocketAddr, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let addr = listener.local_addr().unwrap();
        let is_closed = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&is_closed);
        let accepting = thread::spawn(move || pass_all(&listener, target, seed, &closed));
        Self { addr, is_closed, accepting: Some(accepting) }
    }
}

impl Drop for Middle {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
        self.accepting.take().into_iter().for_each(|accepting| accepting.join().unwrap());
    }
}

/// Accepts streams, and forwards their bytes until it is closed or both ends have ended.
fn pass_all(listener: &TcpListener, target: SocketAddr, seed: u64, is_closed: &AtomicBool) {
    let mut random = Rng::with_seed(seed);
    let (cut, after) = (random.usize(1..STREAMS), random.usize(..40_000));
    let (mut ends, mut passing) = (Vec::new(), Vec::new());
    while !is_closed.load(Ordering::Relaxed) {
        let near = match listener.accept() {
            Ok((near, _)) => near,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_millis(2));
                continue;
            }
            Err(e) => panic!("accepting: {e}"),
        };
        near.set_nonblocking(false).unwrap();
        let far = TcpStream::connect(target).unwrap();
        let is_cut = passing.len() == 2 * cut;
        for (from, to) in [(&near, &far), (&far, &near)] {
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let (random, left) = (random.fork(), if is_cut { after } else { usize::MAX });
            passing.push(thread::spawn(move || pass(from, to, random, left)));
        }
        ends.extend([near, far]);
    }
    ends.iter().for_each(shut);
    passing.into_iter().for_each(|passing| passing.join().unwrap());
}

/// Forwards `left` bytes, a few at a time.
fn pass(mut from: TcpStream, mut to: TcpStream, mut random: Rng, mut left: usize) {
    let mut bytes = vec![0; 64 << 10];
    let most = [700, 8000, bytes.len()][random.usize(..3)];
    let slowest = [1, 50, 400][random.usize(..3)];
    loop {
        let len = random.usize(1..=most);
        let Ok(len @ 1..) = from.read(&mut bytes[..len]) else { break };
        if random.u8(..4) == 0 {
            thread::sleep(Duration::from_micros(random.u64(..slowest)));
        }
        if len > left || to.write_all(&bytes[..len]).is_err() {
            break;
        }
        left -= len;
    }
    shut(&from);
    shut(&to);
}

fn shut(end: &TcpStream) {
    // The other direction may have shut it already.
    let _ = end.shutdown(Shutdown::Both);
}
