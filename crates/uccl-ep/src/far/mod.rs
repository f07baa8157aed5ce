//! Peers on other nodes: their windows are not mapped but written to, by an endpoint of this rank.
//!
//! Data for a peer is put together in its [`outbox`]. Each piece is a command to the proxy in the
//! [`fifo`]; the [`proxy`] sends all pieces up to a signal as one write with that signal.

pub(crate) mod command;
mod counters;
pub(crate) mod fifo;
mod outbox;
mod proxy;

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::MutexGuard;
use uccl_fabric::shm::{Mapping, Segment};
use uccl_p2p::{ConnId, Endpoint, NoInterrupt};
use uccl_wire::ep_card::EpEndpoint;

pub use self::counters::ProxyStats;
use self::{
    command::{Command, UNIT},
    fifo::{Fifo, Popper, RingMemory},
    outbox::Outbox,
    proxy::{NAP, Peer, Proxy, ProxyState},
};
use crate::shared::{
    error::{Error, Result},
    join::EndpointMaker,
};

/// Commands that a rank's producers may be ahead of its proxy.
const SLOTS: u64 = 2048;
/// The most bytes that are under way to one peer from a ring.
const OUTBOX_LEN: usize = 4 << 20;
/// Bytes of mirrors that are gathered without a signal before they are sent.
const MIRROR_BATCH: usize = 1 << 20;
/// The sleep of a proxy that producers wake.
const SLEEP: Duration = Duration::from_millis(20);
/// The time that a group's drop waits for its peers to have all data sent to them.
const LINGER: Duration = Duration::from_secs(5);
/// The reason for which no peer gets anything any more.
const NO_PROXY: &str = "cannot be written to: this rank's proxy has ended";

/// The memory in which data for far peers is put together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Staging {
    /// In a ring for each peer, which calls of the CPU fill, piece by piece.
    Rings,
    /// In a mirror of each peer's window, which a device fills as it would fill the window. It
    /// pushes commands by itself, and wakes no thread.
    Mirrors,
}

/// A rank's endpoint, before it is connected.
pub(crate) struct Listener {
    endpoint: Endpoint,
    window: Arc<Mapping>,
    card: EpEndpoint,
    timeout: Duration,
    staging: Staging,
}

impl Listener {
    /// Registers the window, so that peers can write to it.
    pub(crate) fn new(
        network: Option<uccl_p2p::Config>,
        make: &mut EndpointMaker<'_>,
        window: &Arc<Mapping>,
        (timeout, staging): (Duration, Staging),
    ) -> Result<Self> {
        let network = network.map_or_else(uccl_p2p::Config::from_env, Ok);
        let network = network.map_err(network_error("reading the network's settings"))?;
        // A caller that waits in a call gives up first, and can tell its peers so.
        let patience = 2 * timeout;
        let network = uccl_p2p::Config { timeout: patience, transfer_timeout: patience, ..network };
        let endpoint = make(network).map_err(network_error("making an endpoint"))?;
        let (at, len) = (window.as_ptr().addr(), window.len());
        // SAFETY: the mapping is kept until the endpoint has closed, or for ever.
        let mr = unsafe { endpoint.register(at, len) };
        let advert = mr.and_then(|mr| endpoint.advertise(mr, at, len));
        let window_advert = advert.map_err(network_error("registering the window"))?;
        let card = EpEndpoint {
            addr: endpoint.addr(),
            instance: endpoint.instance(),
            window: window_advert,
        };
        Ok(Self { endpoint, window: Arc::clone(window), card, timeout, staging })
    }

    /// The addresses that peers need to write to the window.
    pub(crate) fn card(&self) -> EpEndpoint {
        self.card
    }

    /// Connects to the far peers: this rank to those behind it, and those before it to this rank.
    /// An error has the missing rank and the reason.
    pub(crate) fn connect(
        self,
        me: usize,
        cards: &[Option<EpEndpoint>],
    ) -> Result<FarPeers, (usize, String)> {
        let deadline = Instant::now() + self.timeout;
        let mut conns = vec![None; cards.len()];
        for (rank, card) in cards.iter().enumerate().skip(me + 1) {
            let Some(card) = card else { continue };
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Some(left.max(Duration::from_millis(1)));
            let conn = self.endpoint.connect_to(card.addr, card.instance, left, &mut NoInterrupt);
            conns[rank] = Some(conn.map_err(|e| (rank, e.to_string()))?);
        }
        loop {
            let missing = |rank: &usize| cards[*rank].is_some() && conns[*rank].is_none();
            let Some(missing) = (0..me).find(missing) else { break };
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Some(left.max(Duration::from_millis(1)));
            let why = |e| (missing, format!("has not connected: {e}"));
            let conn = self.endpoint.accept(left, &mut NoInterrupt).map_err(why)?.conn;
            let instance = self.endpoint.connection(conn).map_err(why)?.instance;
            let is_its = |card: &Option<EpEndpoint>| card.is_some_and(|c| c.instance == instance);
            match cards[..me].iter().position(is_its) {
                Some(rank) => conns[rank] = Some(conn),
                // The connection of an endpoint that is no peer.
                None => drop(self.endpoint.disconnect(conn)),
            }
        }
        let failed = |e: Error| (me, e.to_string());
        FarPeers::start(self, cards, conns).map_err(failed)
    }
}

/// This rank's connections to its peers on other nodes, and the proxy that writes to them.
pub(crate) struct FarPeers {
    endpoint: Endpoint,
    conns: Vec<Option<ConnId>>,
    shared: Arc<ProxyState>,
    fifo: Fifo<RingMemory>,
    outbox: Arc<Mapping>,
    window: Arc<Mapping>,
    proxy: Option<JoinHandle<()>>,
    timeout: Duration,
}

impl FarPeers {
    fn start(
        listener: Listener,
        cards: &[Option<EpEndpoint>],
        conns: Vec<Option<ConnId>>,
    ) -> Result<Self> {
        let Listener { endpoint, window, timeout, staging, .. } = listener;
        // Windows are pages, and so multiples of a command's unit.
        let (len, most, sleep) = match staging {
            Staging::Rings => {
                (OUTBOX_LEN.min(window.len()), OUTBOX_LEN.min(window.len()) / 4, SLEEP)
            }
            Staging::Mirrors => (window.len(), MIRROR_BATCH, NAP),
        };
        let far = cards.iter().flatten().count();
        let os = |what| move |source| Error::Os { what, source };
        let memory = Segment::create("uccl-ep-outbox", len * far)
            .map_err(os(format!("making an outbox of {} bytes", len * far)))?;
        let outbox = Arc::clone(&memory);
        // SAFETY: the mapping is kept until the endpoint has closed, or for ever.
        let mr = unsafe { endpoint.register(outbox.as_ptr().addr(), outbox.len()) };
        let mr = mr.map_err(network_error("registering the outbox"))?;
        let mut bases = (0..far).map(|at| at * len);
        let outbox_of = |card: &Option<EpEndpoint>| {
            let base = card.as_ref().and_then(|_| bases.next())?;
            Some(match staging {
                Staging::Rings => Outbox::new(base, len),
                Staging::Mirrors => Outbox::mirror(base, len),
            })
        };
        let shared = Arc::new(ProxyState::new(cards.iter().map(outbox_of).collect()));
        let fifo = Fifo::in_memory(SLOTS).map_err(os("making a ring of commands".to_owned()))?;
        let peer = |(card, conn): (&Option<EpEndpoint>, &Option<ConnId>)| {
            Some(Peer::new((*conn)?, card.as_ref()?.window))
        };
        let proxy = Proxy {
            endpoint: endpoint.clone(),
            shared: Arc::clone(&shared),
            popper: Popper::new(fifo.clone()),
            source: (mr, outbox.as_ptr().addr()),
            peers: cards.iter().zip(&conns).map(peer).collect(),
            timeout: 2 * timeout,
            most,
            sleep,
        };
        let proxy = thread::Builder::new()
            .name("uccl-ep-proxy".into())
            .spawn(move || proxy.run())
            .map_err(os("starting a thread".to_owned()))?;
        let proxy = Some(proxy);
        Ok(Self { endpoint, conns, shared, fifo, outbox, window, proxy, timeout })
    }

    /// Begins to write to a peer's window. `None` if nothing can be written there any more.
    pub(crate) fn begin_write(&self, to: usize) -> Option<RemoteWrite<'_>> {
        let outbox = self.shared.outboxes.get(to)?.as_ref()?;
        let deadline = Instant::now() + self.timeout;
        let head = outbox.lock(deadline);
        if head.is_none() {
            outbox.fail(|| "did not take what was sent to it in time".to_owned());
        }
        let (head, pending, discarded) = (head?, None, Vec::new());
        Some(RemoteWrite { far: self, outbox, to, head, deadline, pending, discarded })
    }

    /// Sets a word of a peer's window after all data that was written there before.
    pub(crate) fn signal(&self, to: usize, word: usize, mark: u64) {
        self.push(Command::Signal { peer: to as u16, word: word as u32, mark }, self.deadline());
        self.wake();
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    fn push(&self, command: Command, deadline: Instant) {
        let (Command::Write { peer, .. } | Command::Signal { peer, .. }) = command;
        let Some(outbox) = &self.shared.outboxes[usize::from(peer)] else { return };
        let Some(halves) = command.to_halves() else {
            return outbox.fail(|| format!("cannot be reached by {command:?}"));
        };
        if !self.fifo.try_push(halves) {
            self.wake();
            if !self.has_proxy() || !self.fifo.push(halves, deadline) {
                outbox.fail(|| "is behind others that do not take what is sent".to_owned());
            }
        }
    }

    fn wake(&self) {
        if let Some(proxy) = &self.proxy {
            self.shared.wake(proxy.thread());
        }
    }

    /// The reason for which a peer cannot be written to, or is not heard any more.
    pub(crate) fn failure(&self, peer: usize) -> Option<String> {
        let outbox = self.shared.outboxes.get(peer)?.as_ref()?;
        let conn = self.conns[peer]?;
        // The end of this rank's proxy is no peer's fault.
        if !self.has_proxy() {
            return Some(NO_PROXY.to_owned());
        }
        let lost = || self.endpoint.check_connection(conn).err().map(|e| e.to_string());
        outbox.failure().map(str::to_owned).or_else(lost)
    }

    fn has_proxy(&self) -> bool {
        self.proxy.as_ref().is_some_and(|proxy| !proxy.is_finished())
    }

    /// The ring of commands, for a device that pushes to it, and how many commands it holds.
    pub(crate) fn ring(&self) -> (&Arc<Mapping>, u64) {
        (self.fifo.memory(), SLOTS)
    }

    /// The memory that is sent from.
    pub(crate) fn outbox(&self) -> &Arc<Mapping> {
        &self.outbox
    }

    /// The offset of a far peer's part in the memory that is sent from.
    pub(crate) fn staging_offset(&self, peer: usize) -> Option<usize> {
        Some(self.shared.outboxes.get(peer)?.as_ref()?.base())
    }

    /// Sends nothing more to these peers. In their last call they may still wait for earlier data:
    /// so this [waits](Self::flush) until they have it.
    pub(crate) fn give_up(&self, peers: &[usize]) {
        let outboxes = peers.iter().filter_map(|peer| self.shared.outboxes.get(*peer)?.as_ref());
        if outboxes.clone().all(|outbox| outbox.failure().is_some()) {
            return;
        }
        self.flush();
        outboxes.for_each(|outbox| outbox.fail(|| "has left the group".to_owned()));
    }

    /// The endpoint's counters.
    pub(crate) fn stats(&self) -> Option<uccl_p2p::Stats> {
        self.endpoint.stats().ok()
    }

    /// The proxy's counters.
    pub(crate) fn proxy_stats(&self) -> ProxyStats {
        self.shared.counters.read()
    }

    /// Waits until all peers have the data that was sent to them, for `LINGER` at most.
    fn flush(&self) {
        let (flush, deadline) =
            (self.shared.request_flush(), Instant::now() + LINGER.min(self.timeout));
        self.shared.outboxes.iter().flatten().for_each(Outbox::request_send);
        self.wake();
        while self.has_proxy() && !self.shared.is_flushed(flush) && Instant::now() < deadline {
            thread::sleep(NAP);
        }
    }
}

impl Drop for FarPeers {
    fn drop(&mut self) {
        // A peer may still wait for the last word.
        self.flush();
        self.shared.is_closed.store(true, Ordering::Release);
        self.wake();
        let ended = self.proxy.take().map(JoinHandle::join);
        if self.endpoint.close().is_err() || matches!(ended, Some(Err(_))) {
            // Peers may still write to the window, or the kernel read the outbox.
            mem::forget((Arc::clone(&self.window), Arc::clone(&self.outbox)));
        }
    }
}

/// Pieces for one peer's window, while they are put together.
pub(crate) struct RemoteWrite<'a> {
    far: &'a FarPeers,
    outbox: &'a Outbox,
    to: usize,
    head: MutexGuard<'a, u64>,
    deadline: Instant,
    /// The piece that is being filled.
    pending: Option<Command>,
    /// Room for pieces that are not sent.
    discarded: Vec<u64>,
}

impl RemoteWrite<'_> {
    /// Memory for `len` bytes that will be `target` bytes from the start of the window. The piece
    /// before it is complete.
    pub(crate) fn memory_at(&mut self, target: usize, len: usize) -> *mut u8 {
        self.push();
        let (peer, len) = (self.to as u16, len.next_multiple_of(UNIT));
        let Some(source) = self.room(len) else {
            // Nothing is sent to a peer that has failed: its pieces are thrown away.
            self.discarded.resize(len / 8, 0);
            return self.discarded.as_mut_ptr().cast();
        };
        self.pending = Some(Command::Write { peer, source, target, len });
        // SAFETY: inside the mapping, of which the ring is a part.
        unsafe { self.far.outbox.as_ptr().add(source) }
    }

    /// Waits for room. `None`: the peer has failed, or does so now, as it has taken nothing for too
    /// long.
    fn room(&mut self, len: usize) -> Option<usize> {
        let outbox = self.outbox;
        if !outbox.holds(len) {
            outbox.fail(|| format!("cannot be sent {len} bytes in one piece"));
        }
        while outbox.failure().is_none() {
            if let Some(source) = outbox.room(&mut self.head, len) {
                return Some(source);
            }
            outbox.request_send();
            self.far.wake();
            if !self.far.has_proxy() {
                outbox.fail(|| NO_PROXY.to_owned());
            } else if Instant::now() >= self.deadline {
                outbox.fail(|| "did not take what was sent to it in time".to_owned());
            }
            thread::sleep(NAP);
        }
        None
    }

    fn push(&mut self) {
        if let Some(command) = self.pending.take() {
            self.far.push(command, self.deadline);
        }
    }
}

impl Drop for RemoteWrite<'_> {
    fn drop(&mut self) {
        self.push();
    }
}

fn network_error(what: &'static str) -> impl Fn(uccl_p2p::Error) -> Error {
    move |source| Error::Network { what, source }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;
    use crate::{
        Config, Group,
        host::dispatch::{Dispatch, DispatchInput, Payload, Room},
        shared::routing::{Choices, Routing},
    };

    /// More than a group that is dropped waits for its peers.
    const TIMEOUT: Duration = Duration::from_secs(20);
    /// Bytes of a row.
    const ROW: usize = 128 << 10;

    /// Two ranks that are far from each other.
    fn pair() -> [Arc<Group>; 2] {
        let (board, barrier) = (Mutex::new(vec![None; 2]), Barrier::new(2));
        let join = |rank: usize| {
            let mut exchange = |mine: Vec<u8>| {
                board.lock().unwrap()[rank] = Some(mine);
                barrier.wait();
                let all = board.lock().unwrap().clone();
                barrier.wait();
                Ok(all)
            };
            let bind = Some([127, 0, 0, 1].into());
            let network = Some(uccl_p2p::Config { bind, num_cpus: 1, ..Default::default() });
            let (node, masks_late) = (Some(rank as u64), false);
            let (ranks, pool, timeout) = (2, 8 * OUTBOX_LEN, TIMEOUT);
            let config = Config { rank, ranks, pool, timeout, masks_late, node, network };
            Group::join(config, &mut exchange).unwrap()
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| join(1));
            [join(0), other.join().unwrap()]
        })
    }

    /// A rank after the end of its proxy, and its peer.
    fn without_proxy() -> [Arc<Group>; 2] {
        let [own, peer] = pair();
        let far = own.window().far().unwrap();
        far.shared.is_closed.store(true, Ordering::Release);
        let deadline = Instant::now() + TIMEOUT;
        while far.has_proxy() {
            assert!(Instant::now() < deadline, "the proxy does not end");
            thread::sleep(NAP);
        }
        [own, peer]
    }

    /// The error of a dispatch of `count` rows to rank 1.
    fn fails(group: &Arc<Group>, count: usize) -> Error {
        let (rows, experts) = (vec![0u8; count * ROW], vec![1; count]);
        let choices = Choices { experts: &experts, top_k: 1, num_experts: 2, ranks: 2 };
        let (routing, len) = (Arc::new(Routing::new(choices).unwrap()), ROW);
        let tokens = DispatchInput {
            rows: rows.as_ptr(),
            stride: len,
            payload: Payload::Bytes(len),
            scales: None,
            weights: None,
            is_stable: true,
        };
        // SAFETY: the rows live until the dispatch is over.
        let begun =
            unsafe { Dispatch::begin(group, routing, tokens, Room::Tokens(count), &mut || false) };
        begun.and_then(|mut begun| begun.counts(&mut || false).map(drop)).unwrap_err()
    }

    #[test]
    fn calls_of_a_rank_without_proxy_say_so_before_their_time_is_over() {
        // The first number of rows fits an outbox, the second waits for room there.
        for count in [1, 2 * OUTBOX_LEN / ROW] {
            let [own, _peer] = without_proxy();
            let began = Instant::now();
            let why = fails(&own, count).to_string();
            assert!(
                why.contains("rank 1 cannot be written to: this rank's proxy has ended"),
                "{why}"
            );
            assert!(began.elapsed() < TIMEOUT, "{:?}", began.elapsed());
        }
    }

    #[test]
    fn nobody_waits_for_a_proxy_that_has_ended() {
        let [own, _peer] = without_proxy();
        let began = Instant::now();
        drop(own);
        assert!(began.elapsed() < LINGER, "{:?}", began.elapsed());
    }
}
