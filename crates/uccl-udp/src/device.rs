//! The device: sockets, connections and memory under one lock, and the thread that serves them.

use std::{
    io,
    net::IpAddr,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

use parking_lot::Mutex;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll},
    time::Timespec,
};
use slab::Slab;
use uccl_wire::datagram::DatagramHead;

use crate::{
    connection::{Connection, arrivals::Arrival},
    counters::UdpCounters,
    inlet::Inlet,
    memory::MemoryTable,
    outlet::{Outlet, Trains},
    socket::UdpSocket,
};

/// While a caller polls at least this often, the thread leaves the sockets to it.
const CALLER_NS: u64 = 200_000;
/// Bits of a connection's name that are its place; the others are random.
const PLACE_BITS: u32 = 20;
/// Buffers of one turn: the lock is free between turns.
const MOST_FULL: usize = 8;

/// A channel's end: its name and, once it is joined, its connection.
pub(crate) struct Slot {
    pub(crate) id: u64,
    pub(crate) connection: Option<Box<Connection>>,
}

/// All that the lock protects.
pub(crate) struct DeviceState {
    sockets: Vec<UdpSocket>,
    /// All sockets.
    epoll: OwnedFd,
    inlet: Inlet,
    trains: Trains,
    slots: Slab<Slot>,
    pub(crate) memory: MemoryTable,
    pub(crate) counters: UdpCounters,
    /// Connections for which something has come.
    heard: Vec<usize>,
    /// No connection has to be called before this, in nanoseconds.
    due_ns: u64,
    /// When the thread wakes by itself, in nanoseconds.
    asleep_until_ns: u64,
}

/// A device that its thread, its rail and its channels share.
pub(crate) struct Device {
    pub(crate) state: Mutex<DeviceState>,
    /// Wakes the thread.
    alarm: OwnedFd,
    is_over: AtomicBool,
    /// When a caller last polled, in nanoseconds.
    polled_ns: AtomicU64,
    start: Instant,
}

/// A device and its thread, which ends with the last owner.
pub(crate) struct Service {
    pub(crate) device: Arc<Device>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Opens so many sockets at an address, and starts the thread.
    pub(crate) fn start(ip: IpAddr, paths: u16, offload: bool) -> io::Result<Self> {
        let sockets: io::Result<Vec<_>> =
            (0..paths).map(|_| UdpSocket::bind(ip, offload)).collect();
        let sockets = sockets?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (at, socket) in sockets.iter().enumerate() {
            let data = epoll::EventData::new_u64(at as u64);
            epoll::add(&epoll, socket, data, epoll::EventFlags::IN)?;
        }
        let has_gso = offload && sockets.iter().all(UdpSocket::can_cut);
        let state = DeviceState {
            trains: Trains::new(sockets.len(), has_gso),
            sockets,
            epoll,
            inlet: Inlet::new(),
            slots: Slab::new(),
            memory: MemoryTable::default(),
            counters: UdpCounters::default(),
            heard: Vec::new(),
            due_ns: u64::MAX,
            asleep_until_ns: 0,
        };
        let device = Arc::new(Device {
            state: Mutex::new(state),
            alarm: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_over: AtomicBool::new(false),
            polled_ns: AtomicU64::new(0),
            start: Instant::now(),
        });
        let served = Arc::clone(&device);
        let thread =
            thread::Builder::new().name("uccl-udp".into()).spawn(move || served.serve())?;
        Ok(Self { device, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.device.is_over.store(true, Relaxed);
        self.device.wake();
        if let Some(thread) = self.thread.take() {
            // It has no result, and a panic was printed.
            let _ = thread.join();
        }
    }
}

impl Device {
    /// Nanoseconds since the device was opened.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// A caller polls: it serves the device as the thread does. `None` if another thread does so
    /// now.
    pub(crate) fn poll(&self) -> Option<parking_lot::MutexGuard<'_, DeviceState>> {
        self.polled_ns.store(self.now_ns(), Relaxed);
        let mut state = self.state.try_lock()?;
        // Read under the lock, so that no time goes back.
        state.turn(self.now_ns());
        Some(state)
    }

    /// Lets the thread know of an earlier time at which it is needed.
    pub(crate) fn wake_if_late(&self, state: &DeviceState) {
        if state.due_ns < state.asleep_until_ns {
            self.wake();
        }
    }

    fn wake(&self) {
        // It fails only if the counter is full, and then the descriptor is readable already.
        let _ = rustix::io::write(&self.alarm, &1u64.to_ne_bytes());
    }

    fn serve(&self) {
        let epoll = self.state.lock().epoll.try_clone();
        // Without a descriptor to sleep on, the thread looks ever again.
        let epoll = epoll.ok();
        while !self.is_over.load(Relaxed) {
            let polled_ns = self.polled_ns.load(Relaxed);
            let has_caller = polled_ns > 0 && self.now_ns() < polled_ns + CALLER_NS;
            let wait_ns = {
                let mut state = self.state.lock();
                let now_ns = self.now_ns();
                let is_more = !has_caller && state.turn(now_ns);
                state.on_time(now_ns);
                let until_ns = match (is_more, has_caller || epoll.is_none()) {
                    (true, _) => now_ns,
                    (false, true) => state.due_ns.min(now_ns + CALLER_NS),
                    (false, false) => state.due_ns,
                };
                state.asleep_until_ns = until_ns;
                until_ns.saturating_sub(now_ns)
            };
            let watched = epoll.as_ref().filter(|_| !has_caller);
            self.sleep(wait_ns, watched);
        }
    }

    fn sleep(&self, wait_ns: u64, epoll: Option<&OwnedFd>) {
        let wait = (wait_ns < u64::MAX / 2).then_some(Timespec {
            tv_sec: (wait_ns / 1_000_000_000) as i64,
            tv_nsec: (wait_ns % 1_000_000_000) as _,
        });
        let alarm = PollFd::new(&self.alarm, PollFlags::IN);
        // An interrupted sleep is a short one.
        let _ = match epoll {
            Some(epoll) => {
                let sockets = PollFd::new(epoll, PollFlags::IN);
                poll(&mut [alarm, sockets], wait.as_ref())
            }
            None => poll(&mut [alarm], wait.as_ref()),
        };
        // It fails only if nothing is there to be read.
        let _ = rustix::io::read(&self.alarm, &mut [0; 8]);
    }
}

impl DeviceState {
    /// Makes a channel's end, and returns its place and its name.
    pub(crate) fn open(&mut self) -> Option<(usize, u64)> {
        let entry = self.slots.vacant_entry();
        let place = entry.key();
        if place >> PLACE_BITS != 0 {
            return None;
        }
        let id = getrandom::u64().ok()? << PLACE_BITS | place as u64;
        entry.insert(Slot { id, connection: None });
        Some((place, id))
    }

    pub(crate) fn join(&mut self, place: usize, connection: Connection) {
        if let Some(slot) = self.slots.get_mut(place) {
            slot.connection = Some(Box::new(connection));
        }
    }

    pub(crate) fn close(&mut self, place: usize) {
        self.slots.try_remove(place);
    }

    pub(crate) fn connection(&mut self, place: usize) -> Option<&mut Connection> {
        self.slots.get_mut(place)?.connection.as_deref_mut()
    }

    /// The sockets' ports, and bytes for which each has room.
    pub(crate) fn ports(&self) -> (Vec<u16>, u32) {
        let room = self.sockets.iter().map(UdpSocket::room).min().unwrap_or(0);
        (self.sockets.iter().map(UdpSocket::port).collect(), room)
    }

    /// Receives, answers and sends. True if more has come than one turn takes.
    pub(crate) fn turn(&mut self, now_ns: u64) -> bool {
        let is_more = self.receive(now_ns);
        while let Some(place) = self.heard.pop() {
            self.flush(place, now_ns);
        }
        self.on_time(now_ns);
        is_more
    }

    fn receive(&mut self, now_ns: u64) -> bool {
        let event =
            epoll::Event { flags: epoll::EventFlags::IN, data: epoll::EventData::new_u64(0) };
        let mut events = [event; 64];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok(ready) = epoll::wait(&self.epoll, &mut events[..], Some(&zero)) else {
            return false;
        };
        let mut is_more = false;
        for event in &events[..ready] {
            is_more |= self.receive_from(event.data.u64() as usize, now_ns);
        }
        is_more
    }

    fn receive_from(&mut self, path: usize, now_ns: u64) -> bool {
        for _ in 0..MOST_FULL {
            let Some(socket) = self.sockets.get(path) else { return false };
            let Ok((filled, is_full)) = self.inlet.receive(socket) else { return false };
            for (datagram, is_marked) in self.inlet.datagrams(filled) {
                self.counters.received += 1;
                let Ok((head, content)) = DatagramHead::decode(datagram) else {
                    self.counters.unknown += 1;
                    continue;
                };
                let place = (head.connection & ((1 << PLACE_BITS) - 1)) as usize;
                let slot = self.slots.get_mut(place).filter(|slot| slot.id == head.connection);
                let Some(connection) = slot.and_then(|slot| slot.connection.as_deref_mut()) else {
                    self.counters.unknown += 1;
                    continue;
                };
                let arrival = Arrival { datagram, head, content, is_marked };
                connection.on_datagram(now_ns, &arrival, &self.memory, &mut self.counters);
                if self.heard.last() != Some(&place) {
                    self.heard.push(place);
                }
            }
            if !is_full {
                return false;
            }
        }
        true
    }

    /// Calls the connections for which a time has come.
    fn on_time(&mut self, now_ns: u64) {
        if now_ns < self.due_ns {
            return;
        }
        self.due_ns = u64::MAX;
        let mut place = 0;
        let mut left = self.slots.len();
        while left > 0 {
            if let Some(slot) = self.slots.get_mut(place) {
                left -= 1;
                if let Some(connection) = slot.connection.as_deref_mut() {
                    if connection.due_ns() <= now_ns {
                        connection.on_time(now_ns);
                        self.flush(place, now_ns);
                    } else {
                        self.due_ns = self.due_ns.min(connection.due_ns());
                    }
                }
            }
            place += 1;
        }
    }

    /// Sends everything that a connection has to send now.
    pub(crate) fn flush(&mut self, place: usize, now_ns: u64) {
        let Some(slot) = self.slots.get_mut(place) else { return };
        let Some(connection) = slot.connection.as_deref_mut() else { return };
        let mut outlet = Outlet {
            trains: &mut self.trains,
            sockets: &self.sockets,
            counters: &mut self.counters,
        };
        connection.flush(now_ns, &mut outlet, &self.memory);
        self.due_ns = self.due_ns.min(connection.due_ns());
    }
}
