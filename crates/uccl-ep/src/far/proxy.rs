//! The thread that carries out commands: it gathers the pieces for one peer into few writes, each
//! with the signal behind it.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    thread,
    time::{Duration, Instant},
};

use uccl_p2p::{
    Change, ConnId, Endpoint, Iov, MrId, Op, Request, Signal, Status, TransferId,
    wire::advert::Advert,
};

use super::{
    command::Command,
    counters::Counters,
    fifo::{Popper, Storage},
    outbox::Outbox,
};

/// State that producers and the proxy share.
pub(super) struct ProxyState {
    /// By rank; none for near ranks.
    pub(super) outboxes: Vec<Option<Outbox>>,
    /// The number of flushes requested: each asks that the peers have all that was pushed before.
    flushes_requested: AtomicU64,
    /// The number of flushes completed: the peers have all, or have failed.
    flushes_completed: AtomicU64,
    pub(super) is_closed: AtomicBool,
    pub(super) counters: Counters,
    is_asleep: AtomicBool,
}

impl ProxyState {
    pub(super) fn new(outboxes: Vec<Option<Outbox>>) -> Self {
        let (count, flag) = (|| AtomicU64::new(0), || AtomicBool::new(false));
        let (flushes_requested, flushes_completed, counters) =
            (count(), count(), Counters::default());
        Self {
            outboxes,
            flushes_requested,
            flushes_completed,
            is_closed: flag(),
            counters,
            is_asleep: flag(),
        }
    }

    /// Requests a flush, after which the peers have all that was pushed before; returns its number.
    pub(super) fn request_flush(&self) -> u64 {
        self.flushes_requested.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Whether a flush is complete: the peers have all that was pushed before it, or have failed.
    pub(super) fn is_flushed(&self, flush: u64) -> bool {
        self.flushes_completed.load(Ordering::Acquire) >= flush
    }

    /// Wakes the proxy, if it sleeps, after something was pushed.
    pub(super) fn wake(&self, proxy: &thread::Thread) {
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::Relaxed) {
            proxy.unpark();
        }
    }
}

/// A peer, as the proxy knows it.
pub(super) struct Peer {
    pub(super) conn: ConnId,
    /// All of its window.
    pub(super) window: Advert,
    /// The pieces of the next write.
    iovs: Vec<Iov>,
    adverts: Vec<Advert>,
    bytes: usize,
    /// The outbox's position behind all gathered pieces.
    position: u64,
    /// Posted writes, in order.
    posted: VecDeque<PostedWrite>,
}

struct PostedWrite {
    transfer: TransferId,
    has_data: bool,
    /// The word that its signal sets.
    word: Option<u32>,
    position: u64,
}

impl PostedWrite {
    /// Whether a signal for `word` that overtook it would do harm.
    fn comes_before(&self, word: u32) -> bool {
        // The writes of two calls may be mixed, and long ones are sent in parts. A word that is set
        // twice must keep the later mark: a rank that is left out gets marks of calls, and does not
        // hold up the next one that uses the word.
        self.has_data || self.word == Some(word)
    }
}

impl Peer {
    /// A signal that is there after all data that was posted before it, and after earlier signals
    /// for its word.
    fn signal(&self, word: u32, mark: u64) -> Signal {
        Signal {
            advert: self.advert(8 * word as usize, 8),
            change: Change::Set(mark),
            strong: self.posted.iter().any(|write| write.comes_before(word)),
        }
    }

    pub(super) fn new(conn: ConnId, window: Advert) -> Self {
        let (iovs, adverts, posted) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { conn, window, iovs, adverts, bytes: 0, position: 0, posted }
    }

    fn advert(&self, at: usize, len: usize) -> Advert {
        Advert { addr: self.window.addr + at as u64, len: len as u64, ..self.window }
    }
}

pub(super) struct Proxy<S> {
    pub(super) endpoint: Endpoint,
    pub(super) shared: Arc<ProxyState>,
    pub(super) popper: Popper<S>,
    /// The memory to send from: its region and its address.
    pub(super) source: (MrId, usize),
    /// By rank.
    pub(super) peers: Vec<Option<Peer>>,
    /// How long a peer may take for a write.
    pub(super) timeout: Duration,
    /// Bytes that are gathered without a signal before they are sent.
    pub(super) most: usize,
    /// The sleep while there is nothing to do, unless the proxy is [woken](ProxyState::wake).
    pub(super) sleep: Duration,
}

/// Commands that are taken before the writes under way are looked at.
const BATCH: usize = 256;
/// Rounds without work before the proxy sleeps.
const SPINS: u32 = 64;
/// The sleep while writes are under way.
pub(super) const NAP: Duration = Duration::from_micros(50);
/// The time that a proxy without wake-ups polls after its last work: the next call of a layer comes
/// sooner than a sleep would end.
const AWAKE: Duration = Duration::from_millis(1);

impl<S: Storage> Proxy<S> {
    /// Carries out commands until the group is dropped.
    pub(super) fn run(mut self) {
        let (mut idle, mut before) = (0, Instant::now());
        let mut worked = before;
        while !self.shared.is_closed.load(Ordering::Acquire) {
            let requested = self.shared.flushes_requested.load(Ordering::Acquire);
            let (began, was_busy) = (Instant::now(), self.is_busy());
            let has_worked = self.take_commands() | self.poll_peers();
            let now = Instant::now();
            if was_busy {
                self.shared.counters.add_under_way(now - before);
            }
            before = now;
            if has_worked {
                self.shared.counters.add_working(now - began);
                (idle, worked) = (0, now);
                continue;
            }
            if self.is_drained() {
                self.shared.flushes_completed.store(requested, Ordering::Release);
            }
            self.pause(&mut idle, now - worked);
        }
    }

    fn take_commands(&mut self) -> bool {
        for taken in 0..BATCH {
            let Some(halves) = self.popper.pop() else { return taken > 0 };
            self.shared.counters.count_command();
            self.carry_out(Command::of_halves(halves));
        }
        true
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Write { peer, source, target, len } => {
                let Some((to, outbox)) = self.peer(peer) else { return };
                to.position = outbox.end_of(to.position, source, len);
                let advert = to.advert(target, len);
                let (mr, base) = self.source;
                let Some(to) = self.peers[usize::from(peer)].as_mut() else { return };
                to.iovs.push(Iov { mr, ptr: base + source, len });
                to.adverts.push(advert);
                to.bytes += len;
                if to.bytes >= self.most {
                    self.post(peer.into(), None);
                }
            }
            Command::Signal { peer, word, mark } => self.post(peer.into(), Some((word, mark))),
        }
    }

    /// A far peer that has not failed.
    fn peer(&mut self, rank: u16) -> Option<(&mut Peer, &Outbox)> {
        let peer = self.peers.get_mut(usize::from(rank))?.as_mut()?;
        let outbox = self.shared.outboxes[usize::from(rank)].as_ref()?;
        outbox.failure().is_none().then_some((peer, outbox))
    }

    /// Posts the gathered pieces for a peer, with the signal that follows them.
    fn post(&mut self, rank: usize, signal: Option<(u32, u64)>) {
        let Some(Some(outbox)) = self.shared.outboxes.get(rank) else { return };
        let Some(peer) = &mut self.peers[rank] else { return };
        let word = signal.map(|(word, _)| word);
        let signal = signal.map(|(word, mark)| peer.signal(word, mark));
        let mut request = Request::new(peer.conn, Op::Write, &peer.iovs, &peer.adverts);
        (request.signal, request.timeout) = (signal, Some(self.timeout));
        if outbox.failure().is_none() {
            match self.endpoint.post(&request) {
                Ok(transfer) => {
                    let (has_data, position) = (!peer.iovs.is_empty(), peer.position);
                    peer.posted.push_back(PostedWrite { transfer, has_data, word, position });
                    self.shared.counters.count_write();
                }
                Err(e) => outbox.fail(|| format!("cannot be written to: {e}")),
            }
        }
        peer.iovs.clear();
        peer.adverts.clear();
        peer.bytes = 0;
    }

    /// Posts pieces that a producer waits for, and polls the writes under way. Returns whether any
    /// has ended.
    fn poll_peers(&mut self) -> bool {
        let mut has_ended = false;
        for rank in 0..self.peers.len() {
            let Some(outbox) = &self.shared.outboxes[rank] else { continue };
            if outbox.take_send_request()
                && self.peers[rank].as_ref().is_some_and(|peer| peer.bytes > 0)
            {
                self.post(rank, None);
            }
            let Some(peer) = &mut self.peers[rank] else { continue };
            let Some(outbox) = &self.shared.outboxes[rank] else { continue };
            while let Some(write) = peer.posted.front() {
                match self.endpoint.poll(write.transfer) {
                    Ok(Status::Pending) => break,
                    Ok(Status::Done(_)) => outbox.set_taken(write.position),
                    Ok(Status::Failed(e)) | Err(e) => {
                        outbox.fail(|| format!("cannot be written to: {e}"))
                    }
                }
                peer.posted.pop_front();
                has_ended = true;
            }
        }
        has_ended
    }

    /// Whether writes are under way.
    fn is_busy(&self) -> bool {
        self.peers.iter().flatten().any(|peer| !peer.posted.is_empty())
    }

    /// Whether nothing is gathered or under way.
    fn is_drained(&self) -> bool {
        self.peers.iter().flatten().all(|peer| peer.posted.is_empty() && peer.bytes == 0)
    }

    /// Whether the proxy gets no wake-ups, and has worked not long ago.
    fn is_awake(&self, since_work: Duration) -> bool {
        self.sleep <= NAP && since_work < AWAKE
    }

    /// Waits for commands, or for writes to end.
    fn pause(&mut self, idle: &mut u32, since_work: Duration) {
        *idle += 1;
        if *idle < SPINS || self.is_awake(since_work) {
            thread::yield_now();
            return;
        }
        self.shared.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // A producer that has not seen the flag has pushed before.
        if !self.take_commands() && !self.shared.is_closed.load(Ordering::Acquire) {
            thread::park_timeout(if self.is_busy() { NAP } else { self.sleep });
        }
        self.shared.is_asleep.store(false, Ordering::Relaxed);
    }
}

impl<S> Drop for Proxy<S> {
    /// When the proxy panics, peers get nothing more. The closed endpoint tells them so at once,
    /// before their timeouts.
    fn drop(&mut self) {
        if thread::panicking() {
            // Waiting callers check connections, also if this fails.
            let _ = self.endpoint.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use uccl_fabric::shm::sync::Word;
    use uccl_p2p::NoInterrupt;

    use super::{
        super::{
            command::LAP,
            fifo::{Fifo, RingMemory, SLOTS_AT},
        },
        *,
    };

    /// A ring that panics in the proxy's thread.
    struct PanickingRing([AtomicU64; 64]);

    impl Storage for PanickingRing {
        type Word = AtomicU64;

        fn words(&self) -> &[AtomicU64] {
            assert!(thread::current().name().is_none_or(|name| name != "proxy"), "for a test");
            &self.0
        }
    }

    fn endpoint() -> Endpoint {
        let bind = Some([127, 0, 0, 1].into());
        Endpoint::new(uccl_p2p::Config { bind, num_cpus: 1, ..Default::default() }).unwrap()
    }

    /// Two endpoints, and their connection as each knows it.
    fn connected() -> [(Endpoint, ConnId); 2] {
        let (own, peer) = (endpoint(), endpoint());
        let patience = Some(Duration::from_secs(20));
        let (to, from) = thread::scope(|scope| {
            let accepted = scope.spawn(|| peer.accept(patience, &mut NoInterrupt).unwrap().conn);
            let to = own.connect(peer.addr(), patience, &mut NoInterrupt).unwrap();
            (to, accepted.join().unwrap())
        });
        [(own, to), (peer, from)]
    }

    /// A peer as a proxy knows it, and a signal to it that is under way.
    fn far_peer(
        [(own, to), (peer, _)]: &[(Endpoint, ConnId); 2],
        memory: &[u8],
    ) -> (Peer, TransferId) {
        let (at, len) = (memory.as_ptr().addr(), memory.len());
        // SAFETY: callers keep the memory longer than the endpoints.
        let mr = unsafe { peer.register(at, len) }.unwrap();
        let far = Peer::new(*to, peer.advertise(mr, at, len).unwrap());
        let mut request = Request::new(*to, Op::Write, &[], &[]);
        request.signal = Some(far.signal(0, 1));
        let transfer = own.post(&request).unwrap();
        (far, transfer)
    }

    #[test]
    fn a_signal_is_there_after_the_data_that_was_posted_before_it() {
        let memory = vec![0; 64];
        let both = connected();
        let (mut far, transfer) = far_peer(&both, &memory);
        let posted =
            |has_data, word| PostedWrite { transfer, has_data, word: Some(word), position: 0 };
        assert!(!far.signal(0, 2).strong, "nothing was posted before");
        far.posted.push_back(posted(false, 1));
        assert!(!far.signal(0, 2).strong, "marks are of different words");
        assert!(far.signal(1, 2).strong, "a mark that came later would be lost");
        far.posted.push_back(posted(true, 2));
        far.posted.push_back(posted(false, 3));
        assert!(far.signal(0, 2).strong, "data may take another lane");
        drop(both);
    }

    #[test]
    fn a_proxy_is_not_drained_while_data_is_gathered_or_under_way() {
        let memory = vec![0; 64];
        let both = connected();
        let (far, transfer) = far_peer(&both, &memory);
        // SAFETY: the memory outlives the endpoint.
        let mr = unsafe { both[0].0.register(memory.as_ptr().addr(), memory.len()) }.unwrap();
        let mut proxy = Proxy {
            endpoint: both[0].0.clone(),
            shared: Arc::new(ProxyState::new(Vec::new())),
            popper: Popper::new(Fifo::in_memory(64).unwrap()),
            source: (mr, memory.as_ptr().addr()),
            peers: vec![None, Some(far)],
            timeout: Duration::from_secs(20),
            most: 64,
            sleep: NAP,
        };
        let far = |proxy: &mut Proxy<_>| proxy.peers[1].take().unwrap();
        assert!(proxy.is_drained() && !proxy.is_busy());
        let mut peer = far(&mut proxy);
        peer.bytes = 8;
        proxy.peers[1] = Some(peer);
        assert!(!proxy.is_drained() && !proxy.is_busy(), "gathered, and not sent");
        let mut peer = far(&mut proxy);
        peer.bytes = 0;
        let write = PostedWrite { transfer, has_data: true, word: None, position: 0 };
        peer.posted.push_back(write);
        proxy.peers[1] = Some(peer);
        assert!(!proxy.is_drained() && proxy.is_busy(), "sent, and not there");
        drop(both);
    }

    /// A proxy with one far peer, of rank 1.
    fn proxy_of(own: &Endpoint, far: Peer, memory: &[u8]) -> Proxy<RingMemory> {
        // SAFETY: callers keep the memory longer than the endpoint.
        let mr = unsafe { own.register(memory.as_ptr().addr(), memory.len()) }.unwrap();
        let outboxes = vec![None, Some(Outbox::new(0, memory.len()))];
        Proxy {
            endpoint: own.clone(),
            shared: Arc::new(ProxyState::new(outboxes)),
            popper: Popper::new(Fifo::in_memory(64).unwrap()),
            source: (mr, memory.as_ptr().addr()),
            peers: vec![None, Some(far)],
            timeout: Duration::from_secs(20),
            most: memory.len(),
            sleep: NAP,
        }
    }

    /// Its data does not count as there.
    #[test]
    fn a_write_that_fails_is_told_and_the_last_one() {
        let memory = vec![0; 64];
        let both = connected();
        let (mut far, _) = far_peer(&both, &memory);
        let key = far.window.key;
        // The peer refuses it.
        far.window.key ^= 1;
        let mut proxy = proxy_of(&both[0].0, far, &memory);
        let shared = Arc::clone(&proxy.shared);
        let outbox = shared.outboxes[1].as_ref().unwrap();
        let write = Command::Write { peer: 1, source: 0, target: 8, len: 8 };
        let signal = Command::Signal { peer: 1, word: 0, mark: 2 };
        proxy.carry_out(write);
        proxy.carry_out(signal);
        let deadline = Instant::now() + Duration::from_secs(20);
        while proxy.is_busy() {
            assert!(Instant::now() < deadline, "it does not end");
            proxy.poll_peers();
        }
        assert!(outbox.failure().is_some(), "nobody is told");
        let mut head = 64;
        assert!(outbox.room(&mut head, 64).is_none(), "it is taken to be there");
        let sent = shared.counters.read().writes;
        proxy.peers[1].as_mut().unwrap().window.key = key;
        proxy.carry_out(write);
        proxy.carry_out(signal);
        assert!(shared.counters.read().writes == sent && !proxy.is_busy(), "it is written to");
        drop(both);
    }

    /// The words of a ring of one slot.
    struct LateRing(Vec<LateWord>);

    /// A word of a ring. The one with a push is the last that a look at the ring loads.
    struct LateWord {
        value: Arc<AtomicU64>,
        push: Option<LatePush>,
    }

    /// A producer that pushes a command, and requests a flush, right behind the proxy's first look
    /// at the ring.
    struct LatePush {
        first_half: Arc<AtomicU64>,
        shared: Arc<ProxyState>,
        looks: AtomicU64,
        /// Whether the flush is complete at the proxy's second look, which finds the command.
        is_early: Arc<AtomicBool>,
    }

    impl Word for LateWord {
        fn new(value: u64) -> Self {
            Self { value: Arc::new(AtomicU64::new(value)), push: None }
        }

        fn load(&self, order: Ordering) -> u64 {
            let seen = self.value.load(order);
            let Some(push) = &self.push else { return seen };
            match push.looks.fetch_add(1, Ordering::AcqRel) {
                0 => {
                    let signal = Command::Signal { peer: 1, word: 0, mark: 2 };
                    let [first, second] = signal.to_halves().unwrap().map(|half| half | LAP);
                    push.first_half.store(first, Ordering::Release);
                    self.value.store(second, Ordering::Release);
                    push.shared.request_flush();
                }
                1 => push.is_early.store(push.shared.is_flushed(1), Ordering::Release),
                _ => {}
            }
            seen
        }

        fn store(&self, value: u64, order: Ordering) {
            self.value.store(value, order);
        }

        fn swap(&self, value: u64, order: Ordering) -> u64 {
            self.value.swap(value, order)
        }

        fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
            self.value.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
        }

        fn fence(order: Ordering) {
            fence(order);
        }

        fn fence_for_loom() {}
    }

    impl Storage for LateRing {
        type Word = LateWord;

        fn words(&self) -> &[LateWord] {
            &self.0
        }
    }

    #[test]
    fn a_flush_that_is_requested_behind_a_look_covers_the_push_before_it() {
        let own = endpoint();
        let memory = vec![0u8; 64];
        // SAFETY: the memory outlives the endpoint.
        let mr = unsafe { own.register(memory.as_ptr().addr(), memory.len()) }.unwrap();
        let shared = Arc::new(ProxyState::new(Vec::new()));
        let is_early = Arc::new(AtomicBool::new(false));
        let mut words: Vec<_> = (0..SLOTS_AT + 2).map(|_| LateWord::new(0)).collect();
        words[SLOTS_AT + 1].push = Some(LatePush {
            first_half: Arc::clone(&words[SLOTS_AT].value),
            shared: Arc::clone(&shared),
            looks: AtomicU64::new(0),
            is_early: Arc::clone(&is_early),
        });
        let proxy = Proxy {
            endpoint: own.clone(),
            shared: Arc::clone(&shared),
            popper: Popper::new(Fifo::new(LateRing(words), 1)),
            source: (mr, memory.as_ptr().addr()),
            peers: Vec::new(),
            timeout: Duration::from_secs(20),
            most: 64,
            sleep: NAP,
        };
        let proxy = thread::spawn(move || proxy.run());
        let deadline = Instant::now() + Duration::from_secs(20);
        while !shared.is_flushed(1) {
            assert!(Instant::now() < deadline, "it is never complete");
            thread::sleep(NAP);
        }
        shared.is_closed.store(true, Ordering::Release);
        proxy.join().unwrap();
        assert_eq!(shared.counters.read().commands, 1);
        assert!(!is_early.load(Ordering::Acquire), "complete before the command is taken");
        drop((own, memory));
    }

    #[test]
    fn peers_learn_at_once_of_a_proxy_that_panics() {
        let [(own, _), (peer, conn)] = connected();
        let memory = vec![0u8; 64];
        // SAFETY: the memory outlives the endpoint.
        let mr = unsafe { own.register(memory.as_ptr().addr(), memory.len()) }.unwrap();
        let broken = PanickingRing(std::array::from_fn(|_| AtomicU64::new(0)));
        let proxy = Proxy {
            endpoint: own.clone(),
            shared: Arc::new(ProxyState::new(Vec::new())),
            popper: Popper::new(Fifo::new(broken, 1)),
            source: (mr, memory.as_ptr().addr()),
            peers: Vec::new(),
            timeout: Duration::from_secs(20),
            most: 64,
            sleep: NAP,
        };
        let proxy = thread::Builder::new().name("proxy".into()).spawn(move || proxy.run()).unwrap();
        assert!(proxy.join().is_err());
        let deadline = Instant::now() + Duration::from_secs(5);
        while peer.check_connection(conn).is_ok() {
            assert!(Instant::now() < deadline, "it is still connected");
            thread::sleep(NAP);
        }
        drop((own, memory));
    }
}
