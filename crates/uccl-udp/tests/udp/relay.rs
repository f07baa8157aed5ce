//! A relay between rails, which loses, repeats, holds back and keeps datagrams.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, poll},
    time::Timespec,
};
use uccl_device::MemoryKind;
use uccl_fabric::{
    mem::Span,
    rail::{Channel, Limits, Rail, RailError, RailInfo, Registration, Request, RequestEnd},
    region::Rights,
};
use uccl_udp::UdpRail;
use uccl_wire::datagram::UdpAddress;

/// Faults of a relay, in thousandths of all datagrams.
#[derive(Clone, Copy, Default)]
pub(crate) struct Faults {
    pub(crate) loss: u32,
    pub(crate) repeat: u32,
    /// Held back until others have overtaken it.
    pub(crate) hold: u32,
    /// Most bytes of a datagram; 0 for no limit.
    pub(crate) most_len: usize,
}

/// Forwards the datagrams that come to its ports. Its thread ends with the last owner.
pub(crate) struct Relay {
    shared: Arc<RelayState>,
    thread: Option<JoinHandle<()>>,
}

struct RelayState {
    faults: Faults,
    forwards: Mutex<Vec<Forward>>,
    is_over: AtomicBool,
    /// Datagrams that were too long.
    too_long: AtomicUsize,
    /// A datagram of each destination, as it came; kept where that was asked for.
    kept: Mutex<Option<Vec<Datagram>>>,
}

/// A datagram and its destination.
pub(crate) type Datagram = (SocketAddr, Vec<u8>);

struct Forward {
    socket: UdpSocket,
    to: SocketAddr,
    held: Vec<Vec<u8>>,
}

impl Relay {
    pub(crate) fn new(faults: Faults, seed: u64) -> Arc<Self> {
        let shared = Arc::new(RelayState {
            faults,
            forwards: Mutex::default(),
            is_over: AtomicBool::new(false),
            too_long: AtomicUsize::new(0),
            kept: Mutex::default(),
        });
        let own = Arc::clone(&shared);
        let thread = thread::spawn(move || own.run(fastrand::Rng::with_seed(seed)));
        Arc::new(Self { shared, thread: Some(thread) })
    }

    /// From now on keeps a copy of all datagrams.
    pub(crate) fn keep(&self) {
        *self.shared.kept.lock() = Some(Vec::new());
    }

    /// The datagrams that were kept.
    pub(crate) fn kept(&self) -> Vec<Datagram> {
        self.shared.kept.lock().take().unwrap_or_default()
    }

    pub(crate) fn too_long(&self) -> usize {
        self.shared.too_long.load(Relaxed)
    }

    /// The port of this relay that leads there.
    fn port_to(&self, to: SocketAddr) -> u16 {
        let mut forwards = self.shared.forwards.lock();
        let port = |forward: &Forward| forward.socket.local_addr().expect("bound").port();
        if let Some(forward) = forwards.iter().find(|forward| forward.to == to) {
            return port(forward);
        }
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        socket.set_nonblocking(true).expect("set");
        forwards.push(Forward { socket, to, held: Vec::new() });
        port(forwards.last().expect("just made"))
    }

    /// The address of a channel's end, by way of this relay.
    pub(crate) fn address_of(&self, address: &[u8]) -> Vec<u8> {
        let mut address = UdpAddress::decode(address).expect("an address");
        for port in &mut address.ports {
            *port = self.port_to(SocketAddr::new(address.ip, *port));
        }
        address.ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        address.encode()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the relay has not failed");
        }
    }
}

impl RelayState {
    fn run(&self, mut rng: fastrand::Rng) {
        let mut buffer = vec![0; 1 << 16];
        while !self.is_over.load(Relaxed) {
            let mut moved = false;
            let mut forwards = self.forwards.lock();
            for forward in forwards.iter_mut() {
                // The others get their turn.
                for _ in 0..64 {
                    let Ok((len, _)) = forward.socket.recv_from(&mut buffer) else { break };
                    moved = true;
                    self.pass(forward, &buffer[..len], &mut rng);
                }
            }
            if !moved {
                forwards.iter_mut().for_each(Forward::release);
                wait(&forwards);
            }
        }
    }

    fn pass(&self, forward: &mut Forward, datagram: &[u8], rng: &mut fastrand::Rng) {
        let Faults { loss, repeat, hold, most_len } = self.faults;
        if let Some(kept) = &mut *self.kept.lock() {
            kept.push((forward.to, datagram.to_vec()));
        }
        if most_len > 0 && datagram.len() > most_len {
            self.too_long.fetch_add(1, Relaxed);
            return;
        }
        let mut happens = |permille| rng.u32(0..1000) < permille;
        if happens(loss) {
            return;
        }
        if happens(hold) {
            forward.held.push(datagram.to_vec());
            return;
        }
        let times = if happens(repeat) { 2 } else { 1 };
        (0..times).for_each(|_| forward.send(datagram));
        if happens(hold) {
            forward.release();
        }
    }
}

impl Forward {
    /// Datagrams that the kernel does not take are lost.
    fn send(&self, datagram: &[u8]) {
        let _ = self.socket.send_to(datagram, self.to);
    }

    fn release(&mut self) {
        for datagram in std::mem::take(&mut self.held) {
            self.send(&datagram);
        }
    }
}

/// Waits a moment for any of the sockets.
fn wait(forwards: &[Forward]) {
    let mut fds: Vec<_> =
        forwards.iter().map(|forward| PollFd::new(&forward.socket, PollFlags::IN)).collect();
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
}

/// A rail that reaches its peers by a relay.
pub(crate) struct RelayRail {
    pub(crate) rail: UdpRail,
    pub(crate) relay: Arc<Relay>,
}

struct RelayChannel {
    channel: Box<dyn Channel>,
    relay: Arc<Relay>,
}

impl RelayRail {
    fn over(&self, channel: Box<dyn Channel>) -> Box<dyn Channel> {
        Box::new(RelayChannel { channel, relay: Arc::clone(&self.relay) })
    }
}

impl Rail for RelayRail {
    fn info(&self) -> &RailInfo {
        self.rail.info()
    }

    fn is_up(&self) -> bool {
        self.rail.is_up()
    }

    fn register(
        &self,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
    ) -> Result<Box<dyn Registration>, RailError> {
        self.rail.register(span, kind, rights)
    }

    fn open(&self) -> Result<Box<dyn Channel>, RailError> {
        self.rail.open().map(|channel| self.over(channel))
    }

    fn open_first(&self, failed: u32) -> Result<Box<dyn Channel>, RailError> {
        self.rail.open_first(failed).map(|channel| self.over(channel))
    }
}

impl Channel for RelayChannel {
    fn address(&self) -> &[u8] {
        self.channel.address()
    }

    fn connect(&mut self, peer: &[u8]) -> Result<(), RailError> {
        self.channel.connect(&self.relay.address_of(peer))
    }

    fn limits(&self) -> Limits {
        self.channel.limits()
    }

    fn probe(&mut self, tag: u64) -> Result<(), RailError> {
        self.channel.probe(tag)
    }

    unsafe fn post(&mut self, requests: &[Request]) -> Result<usize, RailError> {
        // SAFETY: the caller's promise.
        unsafe { self.channel.post(requests) }
    }

    fn poll(&mut self, ended: &mut Vec<RequestEnd>) -> Result<(), RailError> {
        self.channel.poll(ended)
    }

    fn import(&mut self, key: &[u8]) -> Result<u64, RailError> {
        self.channel.import(key)
    }

    fn arm(&mut self) -> Result<bool, RailError> {
        self.channel.arm()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.fd()
    }

    fn wake_in(&self, now: Instant) -> Option<Duration> {
        self.channel.wake_in(now)
    }
}
