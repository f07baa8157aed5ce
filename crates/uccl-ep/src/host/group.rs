//! One rank's end of a group of ranks.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::Process;
use uccl_p2p::Endpoint;
use uccl_wire::ep_card::{EpCard, EpEndpoint};

use crate::{
    far::{FarPeers, ProxyStats, Staging},
    host::{
        blocks::{Block, Blocks},
        scratch::ScratchPool,
        wait_times::WaitTimes,
        window::Window,
    },
    shared::{
        backoff::{Backoff, MissingTimes},
        error::{Error, Phase, Result, describe},
        join::{EndpointMaker, Exchange, Position, agree, all_joined},
        nodes::Nodes,
        places::{PLACE_ALIGN, Place, Places, SLOTS},
        protocol::{Call, MissingMark, Participants, Step, Streams, Words},
        rank_set::MAX_RANKS,
        routing::MAX_RANKS_OF_NODE,
    },
};

/// How a rank takes part in a group.
#[derive(Clone, Debug)]
pub struct Config {
    /// This rank's number.
    pub rank: usize,
    /// The number of ranks, with those that have not come yet.
    pub ranks: usize,
    /// Bytes of the pool in which calls are placed; all ranks have the same.
    pub pool: usize,
    /// How long a call waits for its peers.
    pub timeout: Duration,
    /// Whether a peer that is late is masked, and the call goes on without it, instead of failing.
    pub masks_late: bool,
    /// A number for this rank's node. Ranks of one host and one node map each other's windows, and
    /// reach all others over the network. `None`: ranks are on one node if their processes can see
    /// each other.
    pub node: Option<u64>,
    /// Settings of the network, except its timeouts, which follow from `timeout`. `None`: the
    /// environment's ([`uccl_p2p::Config::from_env`]).
    pub network: Option<uccl_p2p::Config>,
}

/// A function that a waiting call runs now and then: if it returns true, the call ends.
pub type InterruptCheck<'a> = dyn FnMut() -> bool + 'a;

/// One rank's end of a group. Dropping it tells the other ranks nothing.
///
/// It belongs to one *generation*: the ranks that met. When ranks come or go, those that are there
/// [meet anew](Self::regroup).
pub struct Group {
    config: Config,
    generation: u32,
    /// The next generation; 0 if this is the last.
    next_generation: AtomicU32,
    nodes: Nodes,
    window: Window,
    places: Mutex<Places>,
    masked: Vec<AtomicBool>,
    /// Processes of the peers; `None` for ranks in this process.
    processes: Vec<Option<Process>>,
    /// By rank, the process that joined as it.
    members: Vec<Option<Member>>,
    blocks: Blocks,
    scratch: ScratchPool,
}

impl Group {
    /// Joins the ranks of a group: each calls this, maps the windows of those that are near, and
    /// connects to those that are far.
    ///
    /// # Errors
    /// A rank's window cannot be reached, or ranks do not agree on the group. All ranks fail then.
    pub fn join(config: Config, exchange: &mut Exchange<'_>) -> Result<Arc<Self>> {
        Self::join_by(config, exchange, &mut Endpoint::new)
    }

    /// Joins a group like [`join`](Self::join), with an endpoint that the caller makes if there are
    /// far ranks. `make` gets the network's settings with the group's timeouts.
    ///
    /// # Errors
    /// As [`join`](Self::join), or there is no endpoint.
    pub fn join_by(
        config: Config,
        exchange: &mut Exchange<'_>,
        make: &mut EndpointMaker<'_>,
    ) -> Result<Arc<Self>> {
        let Config { rank: me, ranks, .. } = config;
        if me >= ranks {
            return Err(Error::invalid(format!("there is no rank {me} of {ranks}")));
        }
        if ranks > MAX_RANKS {
            let why = format!("{ranks} ranks; a group has up to {MAX_RANKS}");
            return Err(Error::invalid(why));
        }
        let params = MeetingParams { position: Position::FIRST, staging: Staging::Rings };
        Self::meet(config, params, exchange, make)
    }

    /// Joins a group like [`join`](Self::join), for a rank with calls made by a device: it gets
    /// mirrors of far ranks' windows.
    pub(crate) fn join_for_device(
        config: Config,
        exchange: &mut Exchange<'_>,
    ) -> Result<Arc<Self>> {
        let params = MeetingParams { position: Position::FIRST, staging: Staging::Mirrors };
        Self::meet(config, params, exchange, &mut Endpoint::new)
    }

    /// Makes the group of the ranks that are there now: every rank that stays calls this, and a
    /// rank that comes [joins](Self::join), with the same exchange. Ranks that give no bytes to the
    /// exchange are left out.
    ///
    /// Ranks meet in new windows. No rank reads later writes to the old windows, by a rank that has
    /// gone or was stopped for a while. The old windows live until the calls that were begun in
    /// them are over. New calls of this group are refused.
    ///
    /// # Errors
    /// As [`join`](Self::join); this group then stays as it is.
    pub fn regroup(&self, exchange: &mut Exchange<'_>) -> Result<Arc<Self>> {
        self.check_is_last(Phase::Join)?;
        let position = self.position();
        self.meet_anew(MeetingParams { position, staging: Staging::Rings }, exchange)
    }

    /// As [`regroup`](Self::regroup), for a rank whose calls are made by a device, which numbers
    /// them: the next one is `next_call`.
    pub(crate) fn regroup_for_device(
        &self,
        next_call: u64,
        exchange: &mut Exchange<'_>,
    ) -> Result<Arc<Self>> {
        self.check_is_last(Phase::Join)?;
        let position = Position { next_call, ..self.position() };
        self.meet_anew(MeetingParams { position, staging: Staging::Mirrors }, exchange)
    }

    /// This rank's progress.
    pub(crate) fn position(&self) -> Position {
        Position { generation: self.generation, next_call: self.places.lock().next_call() }
    }

    fn meet_anew(&self, params: MeetingParams, exchange: &mut Exchange<'_>) -> Result<Arc<Self>> {
        let generation = self.generation;
        let next = Self::meet(self.config.clone(), params, exchange, &mut Endpoint::new)?;
        self.next_generation.store(next.generation, Ordering::Relaxed);
        let stays = |rank: &usize| {
            let (then, now) = (self.members[*rank], next.members[*rank]);
            then.zip(now).is_some_and(|(then, now)| now.is_after(then, generation))
        };
        let gone: Vec<_> = (0..self.ranks()).filter(|rank| !stays(rank)).collect();
        // Neither a check whether blocks are read, nor the drop of this group, waits for these
        // ranks.
        gone.iter().for_each(|rank| self.masked[*rank].store(true, Ordering::Relaxed));
        self.window.give_up(&gone);
        Ok(next)
    }

    fn meet(
        config: Config,
        params: MeetingParams,
        exchange: &mut Exchange<'_>,
        make: &mut EndpointMaker<'_>,
    ) -> Result<Arc<Self>> {
        let Config { rank: me, ranks, pool, node, .. } = config;
        let peers = match Window::new(me, ranks, pool, node) {
            Ok(mut window) => {
                let peers = reach_all(&config, &mut window, params, exchange, make)?;
                peers.map(|peers| (window, peers))
            }
            // A rank that failed sends no card, so that the others do not wait for it in vain.
            Err(why) => exchange(Vec::new()).and(Err(why)),
        };
        let (window, peers) = all_joined(me, peers, exchange)?;
        let Peers { processes, nodes, blocks, position, members } = peers;
        Ok(Arc::new(Self {
            config,
            generation: position.generation,
            next_generation: AtomicU32::new(0),
            nodes,
            places: Mutex::new(Places::from_call(position.next_call)),
            masked: (0..ranks).map(|rank| AtomicBool::new(!window.has(rank))).collect(),
            window,
            processes,
            members,
            blocks,
            scratch: ScratchPool::default(),
        }))
    }

    /// The number of meetings of the ranks, with this one.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// # Errors
    /// Ranks have met anew since.
    pub fn check_is_last(&self, phase: Phase) -> Result<()> {
        match self.next_generation.load(Ordering::Relaxed) {
            0 => Ok(()),
            is => Err(Error::Stale { phase, rank: self.rank(), of: self.generation, is }),
        }
    }

    /// This rank's number.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.config.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.config.ranks
    }

    /// How long a call waits for its peers.
    pub(crate) fn timeout(&self) -> Duration {
        self.config.timeout
    }

    /// The spread of ranks over nodes: one node, unless all nodes have as many ranks, one behind
    /// the other.
    #[must_use]
    pub fn nodes(&self) -> Nodes {
        self.nodes
    }

    /// The nodes on which tokens can be relayed: there are several, with several ranks each, and no
    /// rank is left out. A group that masks ranks relays nothing, because the loss of a relay would
    /// cut off its peers on other nodes.
    #[must_use]
    pub fn relays(&self) -> Option<Nodes> {
        let Nodes { count, ranks } = self.nodes;
        let is_whole = (0..self.ranks()).all(|rank| !self.is_masked(rank));
        let can = count > 1 && (2..=MAX_RANKS_OF_NODE).contains(&ranks);
        (can && is_whole && !self.config.masks_late).then_some(self.nodes)
    }

    /// Bytes of the pool.
    #[must_use]
    pub fn pool_len(&self) -> usize {
        self.window.own().pool_len()
    }

    /// This rank's own pool.
    #[must_use]
    pub fn pool(&self) -> *mut u8 {
        self.window.own().pool(0, self.pool_len())
    }

    /// Counts of traffic over the network; `None` if all ranks are near.
    #[must_use]
    pub fn network_stats(&self) -> Option<uccl_p2p::Stats> {
        self.window.network_stats()
    }

    /// Counts of this rank's proxy; `None` if all ranks are near.
    #[must_use]
    pub fn proxy_stats(&self) -> Option<ProxyStats> {
        self.window.far().map(FarPeers::proxy_stats)
    }

    /// Leaves a rank out of later calls, or readmits it.
    ///
    /// # Errors
    /// There is no such rank, it has no window here, or it is this one and would be left out.
    pub fn mask(&self, rank: usize, is_masked: bool) -> Result<()> {
        let masked = self.masked.get(rank);
        let masked =
            masked.ok_or_else(|| Error::invalid(format!("no rank {rank} of {}", self.ranks())))?;
        if !is_masked && !self.window.has(rank) {
            return Err(Error::invalid(format!("rank {rank} has not joined")));
        }
        if is_masked && rank == self.rank() {
            let why = format!("rank {rank} is this one, and a rank does not leave itself out");
            return Err(Error::invalid(why));
        }
        masked.store(is_masked, Ordering::Relaxed);
        Ok(())
    }

    /// Whether a rank is there, masked or not.
    #[must_use]
    pub fn has(&self, rank: usize) -> bool {
        self.members.get(rank).is_some_and(Option::is_some)
    }

    /// Whether a rank is left out.
    #[must_use]
    pub fn is_masked(&self, rank: usize) -> bool {
        self.masked[rank].load(Ordering::Relaxed)
    }

    /// Makes memory that peers can read in place: a combine of rows in it copies none.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn block(&self, len: usize) -> Result<Arc<Block>> {
        self.blocks.make(len)
    }

    /// Whether memory is in a block of this rank.
    #[must_use]
    pub fn has_block(&self, memory: &Range<usize>) -> bool {
        self.blocks.find(memory).is_some()
    }

    /// Whether no peer reads from a block any more, so that it may be written to.
    #[must_use]
    pub fn is_read(&self, block: &Block) -> bool {
        let mut calls = block.calls.lock();
        self.forget_ended(&mut calls);
        calls.is_empty()
    }

    /// Notes that a call reads from a block.
    pub(crate) fn note_reading(&self, block: &Block, call: u64) {
        let mut calls = block.calls.lock();
        self.forget_ended(&mut calls);
        calls.push(call);
    }

    /// Forgets calls that all ranks have ended.
    fn forget_ended(&self, calls: &mut SmallVec<[u64; SLOTS]>) {
        calls.retain(|call| {
            let has_ended = |rank: usize| {
                let mark = self.window.taken(rank, *call as usize % SLOTS);
                mark.call > *call || mark.call == *call && mark.is_last
            };
            !(0..self.ranks()).all(|rank| self.is_masked(rank) || has_ended(rank))
        });
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    pub(crate) fn scratch(&self) -> &ScratchPool {
        &self.scratch
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// The next call's place.
    pub(crate) fn place(&self, len: usize) -> Result<Place> {
        let pool = self.pool_len();
        let len = len.next_multiple_of(PLACE_ALIGN);
        self.places.lock().take(len, pool).ok_or_else(|| {
            let why = format!(
                "the call needs {len} bytes of the buffer, which has {pool}; make it with more"
            );
            Error::invalid(why)
        })
    }

    /// The ranks that take part in a call that begins now, if it is relayed on so many nodes.
    pub(crate) fn participants(&self, nodes: Nodes) -> Participants {
        let (me, ranks) = (self.rank(), self.ranks());
        let is_there = (0..ranks).map(|rank| !self.is_masked(rank)).collect();
        let streams = match nodes.count {
            1 => Streams::flat(me, ranks),
            _ => Streams::two_level(me, nodes),
        };
        Participants { me, is_there, streams }
    }

    /// Does the steps of a call until `until`. `act` copies the data that is sent or taken.
    pub(crate) fn drive(
        &self,
        call: &mut Call,
        until: Milestone,
        wait: &mut WaitContext<'_, '_>,
        mut act: impl FnMut(&Call, Step) -> Result<()>,
    ) -> Result<()> {
        let window = &self.window;
        let (mut backoff, mut missing_times) = (Backoff::new(), MissingTimes::default());
        let driven = loop {
            if let Some(wait_times) = &mut wait.wait_times {
                wait_times.update(|rank| call.has_first_rounds_of(rank, window));
            }
            let step = call.next(window, until == Milestone::Over);
            let done = match step {
                Some(Step::SetTaken { to, word, mark }) => {
                    window.set_taken(to, word, mark);
                    Ok(())
                }
                Some(step @ (Step::Send { stream, mark } | Step::Relay { stream, mark })) => {
                    act(call, step).map(|()| {
                        window.set_arrived(&stream, mark);
                        call.sent(&stream, window);
                    })
                }
                Some(step @ Step::Take { stream, .. }) => {
                    act(call, step).map(|()| call.took(stream, window))
                }
                None if until.is_reached(call, window) => return Ok(()),
                None => self.wait(call, until, wait, (&mut backoff, &mut missing_times)),
            };
            if step.is_some() {
                backoff = Backoff::new();
            }
            if let Err(e) = done {
                break e;
            }
        };
        window.set_fault(call.number());
        Err(driven)
    }

    /// Waits a moment; fails once the wait has no end in sight.
    fn wait(
        &self,
        call: &mut Call,
        until: Milestone,
        wait: &mut WaitContext<'_, '_>,
        (backoff, missing_times): (&mut Backoff, &mut MissingTimes),
    ) -> Result<()> {
        let Some(waited) = backoff.due() else {
            backoff.pause();
            return Ok(());
        };
        if (wait.is_interrupted)() {
            return Err(Error::Interrupted);
        }
        let (phase, rank, masks_late) = (wait.phase, self.rank(), self.config.masks_late);
        let lost = |call: &Call| lost_of(|| self.missing(call), |peer| self.failure(peer));
        while let Some((late, why)) = lost(call) {
            let peer = late.peer;
            if !masks_late || peer == rank {
                let why = format!("{why}; {}", describe(&late));
                return Err(Error::PeerLost { phase, rank, peer, why });
            }
            self.drop_peer(peer, call);
        }
        let (mut awaited, timeout) = (self.missing(call), self.config.timeout);
        awaited.retain(|late| until.needs(late) || late.peer == rank);
        if awaited.is_empty() {
            // The missing word may have come since, but not twice in a row.
            let was_idle = std::mem::replace(&mut backoff.was_idle, waited >= timeout);
            let is_stuck = was_idle && waited >= timeout;
            return if is_stuck {
                Err(Error::Overdue { phase, rank, awaited, waited })
            } else {
                Ok(())
            };
        }
        let times = missing_times.times(&awaited, backoff.began(), waited);
        let Some(waited) = times.iter().max().copied().filter(|longest| *longest >= timeout) else {
            return Ok(());
        };
        let is_own = awaited.iter().any(|late| late.peer == rank);
        if !masks_late || is_own {
            return Err(Error::Overdue { phase, rank, awaited, waited });
        }
        let late = awaited.iter().zip(times).filter(|(_, time)| *time >= timeout);
        let late: Vec<_> = late.map(|(late, _)| late).collect();
        first_to_drop(&late).for_each(|late| self.drop_peer(late.peer, call));
        (*backoff, *missing_times) = (Backoff::new(), MissingTimes::default());
        Ok(())
    }

    /// The words that a call waits for. Of this rank's own, only those that an earlier call of it
    /// holds up: room for its rounds comes with the peers' data.
    fn missing(&self, call: &Call) -> Vec<MissingMark> {
        let mut awaited = call.awaited(&self.window);
        let is_held_up = |late: &MissingMark| late.expected.call != call.number();
        awaited.retain(|late| late.peer != self.rank() || is_held_up(late));
        awaited
    }

    /// Tells all peers that this rank makes no more calls.
    pub(crate) fn report_fault(&self, why: u64) {
        self.window.set_fault(why);
    }

    /// The reason why no more words are to be expected of a peer.
    fn failure(&self, peer: usize) -> Option<String> {
        if let Some(call) = self.window.fault(peer) {
            return Some(format!("gave up on call {call}"));
        }
        self.loss(peer)
    }

    /// The reason why a peer is gone.
    pub(crate) fn loss(&self, peer: usize) -> Option<String> {
        match &self.processes[peer] {
            Some(process) => process.has_ended().then(|| "has ended".to_owned()),
            None => self.window.failure(peer),
        }
    }

    fn drop_peer(&self, peer: usize, call: &mut Call) {
        self.masked[peer].store(true, Ordering::Relaxed);
        call.drop_rank(peer);
    }
}

/// The late words of the peers that are dropped first. A rank that has not made room may itself
/// wait for the ranks with missing data, so it gets the same time again.
fn first_to_drop<'a>(late: &'a [&MissingMark]) -> impl Iterator<Item = &'a MissingMark> {
    let lacks_data = late.iter().any(|late| late.what == MissingMark::DATA);
    late.iter().copied().filter(move |late| !lacks_data || late.what == MissingMark::DATA)
}

/// An awaited word of a peer from which no more words are to be expected, and the reason.
fn lost_of(
    awaited: impl Fn() -> Vec<MissingMark>,
    failure: impl Fn(usize) -> Option<String>,
) -> Option<(MissingMark, String)> {
    let lost = |late: MissingMark| Some((late, failure(late.peer)?));
    // Words that the peer set before it ended may have come since.
    awaited().into_iter().filter_map(lost).find(|(late, _)| awaited().contains(late))
}

/// A call that this rank has begun. A drop before its end tells the peers, so that none waits for
/// it in vain.
pub(crate) struct CallGuard {
    group: Arc<Group>,
    call: u64,
    pub(crate) has_ended: bool,
}

impl CallGuard {
    pub(crate) fn new(group: &Arc<Group>, call: &Call) -> Self {
        Self { group: Arc::clone(group), call: call.number(), has_ended: false }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        if !self.has_ended {
            self.group.window.set_fault(self.call);
        }
    }
}

/// Parameters of a meeting.
#[derive(Clone, Copy)]
struct MeetingParams {
    position: Position,
    staging: Staging,
}

/// The peers, once this rank has reached them.
struct Peers {
    processes: Processes,
    members: Vec<Option<Member>>,
    nodes: Nodes,
    blocks: Blocks,
    position: Position,
}

/// Reaches the windows of all ranks that are there, and watches the processes of those that are
/// near. The inner error is this rank's own, and the others have to be told of it.
fn reach_all(
    config: &Config,
    window: &mut Window,
    MeetingParams { position, staging }: MeetingParams,
    exchange: &mut Exchange<'_>,
    make: &mut EndpointMaker<'_>,
) -> Result<Result<Peers>> {
    let Config { rank: me, timeout, .. } = *config;
    let cards = exchange(window.card(position, None).encode().to_vec())?;
    let cards = match cards_of(config, window, &cards) {
        Ok(cards) => cards,
        Err(e) => return Ok(Err(e)),
    };
    let mut known = cards.iter().flatten();
    let first = known.next();
    // All ranks see the same cards, so all take part in the next exchange, or none.
    if known.all(|card| first.is_some_and(|first| first.is_near(card))) {
        let nodes = Nodes::one(cards.len());
        let blocks = Blocks::new(&cards, me);
        let (position, members) = (next_position(&cards), members_of(&cards));
        let peers = |processes| Peers { processes, members, nodes, blocks, position };
        return Ok(map_near(window, &cards, me).map(peers));
    }
    let node_of = |card: &Option<EpCard>| card.map(|card| (card.host, card.node));
    let nodes = Nodes::of(&cards.iter().map(node_of).collect::<Vec<_>>());
    let listener = window.listen(config.network.clone(), (timeout, staging), make);
    let endpoint = listener.as_ref().ok().map(|listener| listener.card());
    let cards = exchange(window.card(position, endpoint).encode().to_vec())?;
    Ok(listener.and_then(|listener| {
        let cards = cards_of(config, window, &cards)?;
        let processes = map_near(window, &cards, me)?;
        let lost = |(peer, why)| Error::PeerLost { phase: Phase::Join, rank: me, peer, why };
        let far = far_of(&cards, me).map_err(lost)?;
        window.join_far(listener.connect(me, &far).map_err(lost)?, &far);
        let (position, members) = (next_position(&cards), members_of(&cards));
        Ok(Peers { processes, members, nodes, blocks: Blocks::new(&cards, me), position })
    }))
}

/// The generation and the call from which the ranks of these cards continue.
fn next_position(cards: &[Option<EpCard>]) -> Position {
    let position =
        |card: &EpCard| Position { generation: card.generation, next_call: card.next_call };
    Position::after(cards.iter().flatten().map(position))
}

/// The process that joined as a rank.
#[derive(Clone, Copy)]
struct Member {
    pid: u32,
    /// The number of its meetings before; 0 for a new process.
    meetings: u32,
}

impl Member {
    /// Whether this is the process that joined as `then`, and has taken part in that generation.
    /// The pid alone does not tell: a process in another container, or a later one, may have the
    /// same.
    fn is_after(self, then: Self, generation: u32) -> bool {
        self.pid == then.pid && self.meetings >= generation
    }
}

fn members_of(cards: &[Option<EpCard>]) -> Vec<Option<Member>> {
    let member = |card: EpCard| Member { pid: card.pid, meetings: card.generation };
    cards.iter().map(|card| card.map(member)).collect()
}

/// By rank; `None` for ranks in this process or on another node.
type Processes = Vec<Option<Process>>;

/// Reads the cards of all ranks, and checks that they agree with this rank.
fn cards_of(
    config: &Config,
    window: &Window,
    cards: &[Option<Vec<u8>>],
) -> Result<Vec<Option<EpCard>>> {
    let Config { rank: me, ranks, .. } = *config;
    if cards.len() != ranks {
        return Err(Error::invalid(format!("{} cards for {ranks} ranks", cards.len())));
    }
    let read = |(rank, card): (usize, &Option<Vec<u8>>)| {
        let Some(card) = card else { return Ok(None) };
        if card.is_empty() {
            let (phase, why) = (Phase::Join, "could not make its window".to_owned());
            return Err(Error::PeerLost { phase, rank: me, peer: rank, why });
        }
        let card = EpCard::decode(card).map_err(|e| Error::invalid(format!("rank {rank}: {e}")))?;
        let facts = [
            ("its rank", u64::from(card.rank), rank as u64),
            ("as the number of ranks", u64::from(card.ranks), ranks as u64),
            ("as bytes of the pool", card.pool, window.own().pool_len() as u64),
        ];
        agree(me, rank, &facts)?;
        Ok(Some(card))
    };
    cards.iter().enumerate().map(read).collect()
}

/// Maps the windows of the ranks that are near, and watches their processes.
fn map_near(window: &mut Window, cards: &[Option<EpCard>], me: usize) -> Result<Processes> {
    let own = window.card(Position::FIRST, None);
    let open = |(rank, card): (usize, &Option<EpCard>)| {
        let Some(card) = card.filter(|card| card.is_near(&own) && rank != me) else {
            return Ok(None);
        };
        window.map(&card)?;
        if card.pid == std::process::id() {
            return Ok(None);
        }
        let os = |source| Error::Os { what: format!("watching rank {rank}"), source };
        Process::open(card.pid.cast_signed()).map(Some).map_err(os)
    };
    cards.iter().enumerate().map(open).collect()
}

/// The endpoints of the ranks that are far; the error is a rank that has none.
fn far_of(cards: &[Option<EpCard>], me: usize) -> Result<Vec<Option<EpEndpoint>>, (usize, String)> {
    let own = cards[me];
    let endpoint = |(rank, card): (usize, &Option<EpCard>)| {
        let is_far = |card: &EpCard| own.is_some_and(|own| !own.is_near(card));
        let Some(card) = card.filter(is_far) else { return Ok(None) };
        card.endpoint.map(Some).ok_or_else(|| (rank, "has no endpoint for other nodes".to_owned()))
    };
    cards.iter().enumerate().map(endpoint).collect()
}

/// The point up to which a call is driven.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Milestone {
    /// All data has been sent.
    AllSent,
    /// The first round of every rank is there.
    FirstRounds,
    /// No step is left.
    Over,
}

impl Milestone {
    fn is_reached(self, call: &Call, window: &Window) -> bool {
        match self {
            Self::AllSent => call.has_sent_all(),
            Self::FirstRounds => call.has_all_first_rounds(window),
            Self::Over => call.is_over(window),
        }
    }

    /// Whether the point needs this word.
    fn needs(self, late: &MissingMark) -> bool {
        match self {
            Self::AllSent => late.what == MissingMark::ROOM,
            Self::FirstRounds => late.what == MissingMark::DATA && late.expected.round == 0,
            Self::Over => true,
        }
    }
}

/// A waiting call's callbacks.
pub(crate) struct WaitContext<'a, 'b> {
    pub(crate) phase: Phase,
    pub(crate) is_interrupted: &'a mut InterruptCheck<'b>,
    /// The counters of a receive's waiting time.
    pub(crate) wait_times: Option<&'a mut WaitTimes>,
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, sync::Barrier, thread};

    use super::*;
    use crate::shared::protocol::Mark;

    /// Two ranks of this process that map each other's windows.
    fn pair() -> [Arc<Group>; 2] {
        let (board, barrier) = (Mutex::new(vec![None; 2]), Barrier::new(2));
        let join = |rank: usize| {
            let mut exchange = |mine: Vec<u8>| {
                board.lock()[rank] = Some(mine);
                barrier.wait();
                let all = board.lock().clone();
                barrier.wait();
                Ok(all)
            };
            let (ranks, pool, timeout) = (2, 4096, Duration::from_secs(20));
            let (node, masks_late, network) = (Some(0), false, None);
            let config = Config { rank, ranks, pool, timeout, masks_late, node, network };
            Group::join(config, &mut exchange).unwrap()
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| join(1));
            [join(0), other.join().unwrap()]
        })
    }

    #[test]
    fn a_block_is_read_until_all_have_ended_the_call_and_not_only_a_round() {
        let [own, peer] = pair();
        let block = own.block(64).unwrap();
        own.note_reading(&block, 3);
        let says = |who: &Group, call, round, is_last| {
            who.window.set_taken(0, who.rank(), Mark { call, round, is_last });
        };
        says(&own, 3, 0, true);
        assert!(!own.is_read(&block), "the peer has said nothing");
        for round in 0..3 {
            says(&peer, 3, round, false);
            assert!(!own.is_read(&block), "it has taken round {round}, and reads on");
        }
        own.masked[1].store(true, Ordering::Relaxed);
        assert!(own.is_read(&block), "nobody waits for a rank that is left out");
        own.note_reading(&block, 3);
        own.masked[1].store(false, Ordering::Relaxed);
        // The words of the call eight later are the same.
        says(&peer, 3 + SLOTS as u64, 0, false);
        says(&own, 3 + SLOTS as u64, 0, false);
        assert!(own.is_read(&block), "who takes part in a later call has ended this one");
    }

    #[test]
    fn ranks_with_missing_data_are_dropped_before_ranks_without_room() {
        let late = |peer, what| {
            let mark = Mark { call: 1, round: 0, is_last: false };
            MissingMark { peer, owner: peer, what, expected: mark, seen: mark }
        };
        let [room, data, end] = [MissingMark::ROOM, MissingMark::DATA, MissingMark::END];
        let dropped = |late: &[MissingMark]| {
            let late: Vec<_> = late.iter().collect();
            first_to_drop(&late).map(|late| late.peer).collect::<Vec<_>>()
        };
        assert_eq!(dropped(&[late(1, room), late(2, data), late(3, end), late(4, data)]), [2, 4]);
        assert_eq!(dropped(&[late(1, room), late(3, end)]), [1, 3], "no data is missing");
    }

    #[test]
    fn a_peer_that_did_its_part_before_it_ended_is_not_lost() {
        let mark = |call| Mark { call, round: 0, is_last: true };
        let late = |peer| {
            let (expected, seen) = (mark(1), mark(0));
            MissingMark { peer, owner: peer, what: "data", expected, seen }
        };
        // The data comes, and then the peer ends, between the reads of its words and of its
        // process.
        let has_ended = Cell::new(false);
        let awaited = || if has_ended.get() { vec![late(2)] } else { vec![late(1), late(2)] };
        let failure = |peer: usize| {
            has_ended.set(true);
            (peer == 1).then(|| "has ended".to_owned())
        };
        assert_eq!(lost_of(awaited, failure), None);
        // A peer that has not done its part is named, even behind one that is only late.
        let found =
            lost_of(|| vec![late(1), late(2)], |peer| (peer == 2).then(|| "has ended".to_owned()));
        assert_eq!(found, Some((late(2), "has ended".to_owned())));
    }
}
