//! Two endpoints joined by lanes that misbehave, and memory with a watch on every byte.

use std::{
    sync::{Arc, Weak, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};

use fastrand::Rng;
use uccl_chaos::{
    ChaosEnd, ChaosLane, ChaosPipe, ChaosRail, Faults, LaneFaults, RailFaults, RailNetwork, pair_of,
};
use uccl_fabric::{
    gpu::CopyBy,
    lane::{HostLane, MessageLane, RailLane},
    rail::Rail,
};
use uccl_rma::{Rails, RmaLane, Role};
use uccl_stream::{StreamLane, StreamOptions};

use crate::{
    Config, ConnId, Endpoint, Iov, MrId, Transport,
    drive::{
        core::{
            Devices,
            connection::{Connection, Peer},
            workers::Workers,
        },
        links::Links,
        pair::on_loopback,
    },
    wire::advert::Advert,
};

/// An awaited event has happened long before.
pub(super) const FAR: Duration = Duration::from_secs(30);

pub(super) type TestLane = ChaosLane<StreamLane<ChaosPipe>>;

/// The faults of one lane: in each direction of its pipe, and at each end.
#[derive(Clone, Default)]
pub(super) struct LaneChaos {
    pub(super) pipe: [Faults; 2],
    pub(super) ends: [LaneFaults; 2],
}

impl LaneChaos {
    /// The most bytes of one transfer that this lane can move in a short time.
    pub(super) fn bearable_bytes(&self) -> usize {
        let slowest = self.pipe.iter().map(|p| p.capacity_bytes.min(p.split_bytes)).min();
        (slowest.unwrap_or(0) * 10).clamp(30_000, 3 << 20)
    }

    /// Random faults that every lane survives.
    pub(super) fn some(rng: &mut Rng) -> Self {
        let mut pipe = || Faults {
            capacity_bytes: [4000, 64 << 10, 256 << 10, 4 << 20][rng.usize(0..4)],
            split_bytes: [2000, 10_000, 100_000, usize::MAX][rng.usize(0..4)],
            delay_polls: [0, 0, 3][rng.usize(0..3)],
            delay: Duration::from_micros([0, 0, 20, 300][rng.usize(0..4)]),
            ..Faults::default()
        };
        let pipe = [pipe(), pipe()];
        let mut end = || LaneFaults {
            hold_completions: [0, 0, 5][rng.usize(0..3)],
            repeat_writes_percent: [0, 0, 30][rng.usize(0..3)],
            ..LaneFaults::default()
        };
        Self { pipe, ends: [end(), end()] }
    }
}

/// One of the two endpoints, and its end of the connection.
pub(super) struct Side {
    pub(super) ep: Endpoint,
    pub(super) conn: ConnId,
    pub(super) lanes: Vec<Arc<TestLane>>,
    /// Its end of each rail.
    pub(super) rails: Vec<Arc<ChaosRail>>,
    inner: Weak<Connection>,
}

/// Joins two endpoints by lanes over chaos pipes.
pub(super) fn join(seed: u64, lanes: &[LaneChaos], timeout: Duration) -> [Side; 2] {
    // From a generator of its own, so that seeds keep their meaning.
    let mut rng = Rng::with_seed(seed ^ 0x3c6e_f372);
    join_asking(seed, lanes, timeout, [(); 2].map(|()| rng.u8(0..3) > 0))
}

/// The same with given sides that ask their peers to copy, and copy when they are asked.
pub(super) fn join_asking(
    seed: u64,
    lanes: &[LaneChaos],
    timeout: Duration,
    asks: [bool; 2],
) -> [Side; 2] {
    join_all(seed, lanes, timeout, asks, None)
}

/// Rails between two endpoints, beside the lanes.
pub(super) struct ByRails<'a> {
    pub(super) faults: &'a [RailFaults],
    /// The endpoints' timeout: a peer or lane that is silent for this long is lost; with zero, none
    /// is.
    pub(super) timeout: Duration,
    /// The copier of data that the rails do not take, at either end.
    pub(super) copy_by: [CopyBy; 2],
}

impl<'a> ByRails<'a> {
    pub(super) fn new(faults: &'a [RailFaults]) -> Self {
        Self { faults, timeout: FAR, copy_by: [CopyBy::default(), CopyBy::default()] }
    }

    /// Joins two endpoints by a lane over a chaos pipe and by rails with these faults, two ends
    /// each.
    pub(super) fn join(self, seed: u64) -> [Side; 2] {
        let sides = self.join_untried(seed);
        sides[0].until("the first try of every rail", || {
            let settled = |side: &Side| {
                side.connection().lanes.rails.as_ref().is_some_and(|r| r.is_settled())
            };
            sides.iter().all(settled)
        });
        sides
    }

    /// The same, whether or not the rails have been tried.
    pub(super) fn join_untried(self, seed: u64) -> [Side; 2] {
        let network = RailNetwork::default();
        let [by_a, by_b] = self.copy_by;
        let ends = [(0, by_a), (1, by_b)].map(|(end, copy_by): (u64, _)| {
            let rail = |(n, faults): (usize, &RailFaults)| {
                network.rail(&format!("rail{n}"), seed ^ (n as u64) << 1 ^ end, faults.clone())
            };
            Ends { rails: self.faults.iter().enumerate().map(rail).collect(), copy_by }
        });
        join_all(seed, &[LaneChaos::default()], self.timeout, [false; 2], Some(ends))
    }
}

/// One side's ends of the rails, and the copier of data that they do not take.
struct Ends {
    rails: Vec<Arc<ChaosRail>>,
    copy_by: CopyBy,
}

fn join_all(
    seed: u64,
    lanes: &[LaneChaos],
    timeout: Duration,
    asks: [bool; 2],
    rails: Option<[Ends; 2]>,
) -> [Side; 2] {
    let mut rng = Rng::with_seed(seed ^ 0x6a09_e667);
    let eps = asks.map(|asks| endpoint(timeout, asks));
    let mut made: [Vec<Arc<TestLane>>; 2] = [Vec::new(), Vec::new()];
    for chaos in lanes {
        let [there, back] = chaos.pipe.clone();
        let (a, b) = pair_of(rng.u64(..), there, back).expect("a pair");
        let checksum = rng.bool();
        for (i, end) in [a, b].into_iter().enumerate() {
            let faults = chaos.ends[i].clone();
            made[i].push(Arc::new(lane(&eps[i], end, checksum, rng.u64(..), faults)));
        }
    }
    let rails = rails.map_or([None, None], |rails| rails.map(Some));
    let [rails_a, rails_b] = rails;
    let rails = [
        open_rails(&eps[0], Role::Connector, rails_a),
        open_rails(&eps[1], Role::Acceptor, rails_b),
    ];
    connect(&eps, made, rails)
}

/// Another connection between the endpoints of two sides, over one lane.
pub(super) fn join_again(sides: &[Side; 2], seed: u64) -> [Side; 2] {
    let eps = [0, 1].map(|at: usize| sides[at].ep.clone());
    let (a, b) = pair_of(seed, Faults::default(), Faults::default()).expect("a pair");
    let made = [(0, a), (1, b)].map(|(at, end): (usize, _)| {
        vec![Arc::new(lane(&eps[at], end, false, seed, LaneFaults::default()))]
    });
    connect(&eps, made, [(None, Vec::new()), (None, Vec::new())])
}

/// The lane over the rails of an endpoint, if it has one, and the rails.
type RailSide = (Option<Arc<RmaLane>>, Vec<Arc<ChaosRail>>);

fn connect(eps: &[Endpoint; 2], lanes: [Vec<Arc<TestLane>>; 2], rails: [RailSide; 2]) -> [Side; 2] {
    let ([of_a, of_b], [rails_a, rails_b]) = (lanes, rails);
    let a = side(&eps[0], &eps[1], "peer-b", of_a, rails_a);
    let b = side(&eps[1], &eps[0], "peer-a", of_b, rails_b);
    [a, b]
}

/// Gives an endpoint its rails, or none: it then looks for no others.
fn open_rails(ep: &Endpoint, role: Role, ends: Option<Ends>) -> RailSide {
    let core = ep.core();
    let is_railed = ends.is_some();
    let Ends { rails, copy_by } =
        ends.unwrap_or_else(|| Ends { rails: Vec::new(), copy_by: CopyBy::default() });
    let devices = rails.iter().map(|rail| Arc::clone(rail) as Arc<dyn Rail>).collect();
    let devices =
        Devices { rails: Arc::new(Rails::new(devices).copying_by(copy_by)), ..Devices::default() };
    assert!(core.rails.set(devices).is_ok(), "it had none");
    (is_railed.then(|| core.rail_lane(role).expect("a lane")), rails)
}

fn endpoint(timeout: Duration, ask_owners: bool) -> Endpoint {
    let config = Config {
        transport: Transport::Tcp,
        num_cpus: 2,
        timeout,
        transfer_timeout: FAR,
        spin: Duration::from_micros(20),
        ask_owners,
        publish: true,
        ..on_loopback()
    };
    Endpoint::new(config).expect("an endpoint")
}

fn lane(
    ep: &Endpoint,
    (pipe, tx, rx): ChaosEnd,
    checksum: bool,
    seed: u64,
    faults: LaneFaults,
) -> TestLane {
    let options = StreamOptions {
        regions: Arc::clone(&ep.core().mrs.table),
        checksum,
        copy_by: CopyBy::default(),
    };
    ChaosLane::new(StreamLane::new(pipe, tx, rx, options), seed, faults)
}

fn side(
    ep: &Endpoint,
    other: &Endpoint,
    name: &str,
    lanes: Vec<Arc<TestLane>>,
    (rail_lane, rails): RailSide,
) -> Side {
    let core = ep.core();
    let peer = Peer {
        name: name.into(),
        addr: other.addr(),
        gpu_index: 0,
        instance: other.core().instance,
        same_host: true,
        takes_signals: true,
        publishes: true,
    };
    let streams: Vec<_> =
        lanes.iter().map(|lane| Arc::clone(lane) as Arc<dyn MessageLane>).collect();
    let host = lanes.first().map(|lane| Arc::clone(lane) as Arc<dyn HostLane>);
    let rails_at_work = rail_lane.map(|lane| lane as Arc<dyn RailLane>);
    let links = Links { streams, host, rails: rails_at_work };
    let conn = core
        .add_conn(|id| Arc::new(Connection::new(id, Arc::clone(core), peer, links)))
        .expect("a connection");
    Workers::attach(core, &conn).expect("attached");
    Side { ep: ep.clone(), conn: conn.id, lanes, rails, inner: Arc::downgrade(&conn) }
}

impl Side {
    pub(super) fn register(&self, memory: &Memory) -> MrId {
        // SAFETY: the tests keep their memory until both endpoints are closed.
        unsafe { self.ep.register(memory.addr(), memory.len()) }.expect("registered")
    }

    pub(super) fn connection(&self) -> Arc<Connection> {
        self.inner.upgrade().expect("a connection")
    }

    pub(super) fn living_lanes(&self) -> usize {
        self.ep.connection(self.conn).expect("a connection").lanes
    }

    /// Loses one of its lanes and wakes a worker: as with a link that is gone, but without the
    /// link's event.
    pub(super) fn lose(&self, lane: usize) {
        self.lanes[lane].lose();
        self.connection().kick_lane(lane);
    }

    /// Waits for an event that must happen.
    pub(super) fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < FAR, "{what} never happens");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the connection if it has not ended. Nothing may be left of it.
    pub(super) fn leave(&mut self) {
        // The thread that ended the last transfer may still be counting it.
        self.until("the end of every transfer", || {
            let stats = self.ep.stats().expect("ours");
            let pending = self.ep.core().transfers.pending.load(SeqCst);
            pending == 0 && stats.transfers_posted == stats.transfers_done + stats.transfers_failed
        });
        self.ep.disconnect(self.conn).expect("it was there");
        let inner = self.inner.clone();
        self.until("the end of a connection's memory", || inner.strong_count() == 0);
        self.ep.close().expect("nobody touches anything");
    }
}

/// Memory of one job: pieces, with guard bytes between them.
pub(super) struct Memory {
    bytes: Box<[u8]>,
    before: Vec<u8>,
    pieces: Vec<std::ops::Range<usize>>,
}

impl Memory {
    pub(super) fn new(rng: &mut Rng, lens: &[usize]) -> Self {
        let (mut at, mut pieces) = (0, Vec::new());
        for len in lens {
            at += rng.usize(1..20);
            pieces.push(at..at + len);
            at += len;
        }
        let mut bytes = vec![0; at + rng.usize(1..20)].into_boxed_slice();
        rng.fill(&mut bytes);
        Self { before: bytes.to_vec(), bytes, pieces }
    }

    pub(super) fn addr(&self) -> usize {
        self.bytes.as_ptr() as usize
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn iovs(&self, mr: MrId) -> Vec<Iov> {
        let iov = |p: &std::ops::Range<usize>| Iov { mr, ptr: self.addr() + p.start, len: p.len() };
        self.pieces.iter().map(iov).collect()
    }

    pub(super) fn adverts(&self, owner: &Side, mr: MrId) -> Vec<Advert> {
        let advert = |iov: Iov| owner.ep.advertise(mr, iov.ptr, iov.len).expect("advertised");
        self.iovs(mr).into_iter().map(advert).collect()
    }

    /// Its present bytes. Links may be writing to it.
    pub(super) fn now(&self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        // SAFETY: our own memory, both of the same length.
        unsafe {
            std::ptr::copy_nonoverlapping(self.addr() as *const u8, out.as_mut_ptr(), out.len());
        };
        out
    }

    pub(super) fn pieces(&self) -> Vec<Vec<u8>> {
        let now = self.now();
        self.pieces.iter().map(|p| now[p.clone()].to_vec()).collect()
    }

    pub(super) fn unchanged(&self) -> bool {
        self.now() == self.before
    }

    /// Whether the bytes between the pieces are unchanged.
    pub(super) fn guards_hold(&self) -> bool {
        let mut now = self.now();
        for piece in &self.pieces {
            now[piece.clone()].copy_from_slice(&self.before[piece.clone()]);
        }
        now == self.before
    }

    /// Overwrites it, as a caller may that has its memory back. From now on nobody else may touch
    /// it.
    pub(super) fn reuse(&mut self, rng: &mut Rng) {
        rng.fill(&mut self.bytes);
        self.before = self.bytes.to_vec();
    }

    /// Writes a number to its beginning.
    pub(super) fn number(&mut self, number: u64) {
        let at = self.pieces[0].start;
        self.bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        self.before = self.bytes.to_vec();
    }
}
