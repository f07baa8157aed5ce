//! Ends of flows in one process, and a relay between them that can do harm.

#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod hosts;

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use uccl_flow::{Buffer, Connect, FlowError, Flows, Handle, Listener, RecvFlow, SendFlow, Slot};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "nothing happened");
        std::thread::yield_now();
    }
}

/// The next receive fails: the peer has closed, and all its messages have come.
pub(crate) fn assert_peer_has_closed(recv: &RecvFlow) {
    let mut room = vec![0; 1];
    let receive = post_recv(recv, &mut room).expect("a slot");
    let error = until(|| recv.test(receive).err());
    assert!(matches!(error, FlowError::PeerClosed { .. }), "{error}");
}

pub(crate) fn pair(sender: &Flows, receiver: &Flows) -> (SendFlow, RecvFlow) {
    pair_by(sender, receiver, |handle| handle)
}

/// A flow; the sender's side gets a handle that `change` has changed.
pub(crate) fn pair_by(
    sender: &Flows,
    receiver: &Flows,
    change: impl FnOnce(Handle) -> Handle,
) -> (SendFlow, RecvFlow) {
    let listener = Listener::listen(receiver, 0).expect("a listener");
    let bytes = listener.handle().encode().expect("a handle");
    let handle = change(Handle::decode(&bytes).expect("a handle"));
    let mut connecting = Connect::begin(sender, &handle, 0).expect("an attempt");
    let send = until(|| connecting.poll().expect("a connection"));
    let recv = until(|| listener.try_accept().expect("a flow"));
    (send, recv)
}

/// Connects to a listener that refuses, until it has said so: within the limit of one attempt its
/// process may not have had a turn.
pub(crate) fn until_refused(flows: &Flows, handle: &Handle, reason: &str) {
    until(|| {
        let mut connecting = Connect::begin(flows, handle, 0).expect("an attempt");
        let error = until(|| match connecting.poll() {
            Ok(None) => None,
            Ok(Some(_)) => panic!("it is taken"),
            Err(error) => Some(error.to_string()),
        });
        match error.contains(reason) {
            true => Some(()),
            false => {
                eprintln!("{error}");
                None
            }
        }
    });
}

pub(crate) fn post_send(flow: &SendFlow, data: &[u8]) -> Option<Slot> {
    // SAFETY: the tests keep the data until the message has ended or the flow is closed.
    unsafe { flow.post(data.as_ptr(), data.len(), 0) }.expect("a flow without error")
}

pub(crate) fn post_recv(flow: &RecvFlow, data: &mut [u8]) -> Option<Slot> {
    let buffer = Buffer { ptr: data.as_mut_ptr(), len: data.len(), tag: 0 };
    // SAFETY: the tests keep the data until the receive has ended or the flow is closed.
    unsafe { flow.post(&[buffer]) }.expect("a flow without error")
}

pub(crate) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at * 31) ^ (at >> 8) ^ seed) as u8).collect()
}

/// Sends `count` messages of `len` bytes, up to eight at a time, and compares them. `on_turn` runs
/// after each that has come.
pub(crate) fn exchange(
    (send, recv): &(SendFlow, RecvFlow),
    (count, len): (usize, usize),
    mut on_turn: impl FnMut(usize),
) {
    const WIDTH: usize = 8;
    let data: Vec<_> = (0..WIDTH).map(|at| pattern(len, at)).collect();
    let mut rooms = vec![vec![0; len]; WIDTH];
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    let (mut sent, mut received) = (0, 0);
    while received < count || sent < count {
        until(|| {
            let before = (sent, received, sends.len(), receives.len());
            if sends.len() < count && sends.len() < sent + WIDTH {
                sends.extend(post_send(send, &data[sends.len() % WIDTH]));
            }
            if receives.len() < count && receives.len() < received + WIDTH {
                receives.extend(post_recv(recv, &mut rooms[receives.len() % WIDTH]));
            }
            if sent < sends.len() && send.test(sends[sent]).expect("no error").is_some() {
                sent += 1;
            }
            if received < receives.len()
                && let Some(got) = recv.test(receives[received]).expect("no error")
            {
                let room = &mut rooms[received % WIDTH];
                assert!(got == len && *room == data[received % WIDTH], "message {received}");
                room.fill(0);
                received += 1;
                on_turn(received);
            }
            (before != (sent, received, sends.len(), receives.len())).then_some(())
        });
    }
}

/// A connection through a relay.
#[derive(Default)]
pub(crate) struct Line {
    pub(crate) is_stalled: AtomicBool,
    pub(crate) is_dead: AtomicBool,
}

/// Passes connections on. The first one is the flow's own, those behind it are for chunks.
pub(crate) struct Relay {
    port: u16,
    shared: Arc<RelayState>,
    thread: Option<JoinHandle<()>>,
}

struct RelayState {
    target: SocketAddr,
    lines: Mutex<Vec<Arc<Line>>>,
    is_stopped: AtomicBool,
    is_cut: AtomicBool,
}

impl Relay {
    pub(crate) fn new(target: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(RelayState {
            target: (Ipv4Addr::LOCALHOST, target).into(),
            lines: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
        });
        let own = Arc::clone(&shared);
        let thread = std::thread::spawn(move || own.run(&listener));
        Self { port, shared, thread: Some(thread) }
    }

    pub(crate) fn change(&self, handle: Handle) -> Handle {
        Handle { port: self.port, ..handle }
    }

    /// Stops all connections, later ones too, or has them go on.
    pub(crate) fn cut(&self, is_cut: bool) {
        self.shared.is_cut.store(is_cut, Ordering::Relaxed);
        self.lines().iter().for_each(|line| line.is_stalled.store(is_cut, Ordering::Relaxed));
    }

    pub(crate) fn lines(&self) -> Vec<Arc<Line>> {
        self.shared.lines.lock().expect("no panic").clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
    }
}

impl RelayState {
    fn run(&self, listener: &TcpListener) {
        std::thread::scope(|scope| {
            while !self.is_stopped.load(Ordering::Relaxed) {
                let Ok((near, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let far = TcpStream::connect(self.target).expect("the receiver listens");
                let line = Arc::<Line>::default();
                line.is_stalled.store(self.is_cut.load(Ordering::Relaxed), Ordering::Relaxed);
                self.lines.lock().expect("no panic").push(Arc::clone(&line));
                for (from, to) in [(&near, &far), (&far, &near)] {
                    from.set_nonblocking(false).expect("a socket");
                    from.set_read_timeout(Some(Duration::from_millis(5))).expect("a socket");
                    let from = from.try_clone().expect("a socket");
                    let to = to.try_clone().expect("a socket");
                    let line = Arc::clone(&line);
                    scope.spawn(move || self.pass(&line, from, to));
                }
            }
        });
    }

    fn pass(&self, line: &Line, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = [0; 16 << 10];
        to.set_write_timeout(Some(Duration::from_millis(50))).expect("a socket");
        'reads: while !self.is_stopped.load(Ordering::Relaxed)
            && !line.is_dead.load(Ordering::Relaxed)
        {
            if line.is_stalled.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let count = match from.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(_) => break,
            };
            let mut rest = &bytes[..count];
            while !rest.is_empty() {
                match to.write(rest) {
                    Ok(count) => rest = &rest[count..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        if self.is_stopped.load(Ordering::Relaxed)
                            || line.is_dead.load(Ordering::Relaxed)
                        {
                            break 'reads;
                        }
                    }
                    Err(_) => break 'reads,
                }
            }
        }
        for socket in [from, to] {
            // The other thread of this line may have done so.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
