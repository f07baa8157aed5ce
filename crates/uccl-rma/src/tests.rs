//! Two lanes over rails within this process. The tests carry the lanes' notes by hand.

mod devices;
mod ends;
mod exports;
mod keys;
mod peers;

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_chaos::{ChaosRail, RailFaults, RailNetwork, warnings_of};
use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{
        Completion, Handling, Lane, MessageSink, OpKind, OpName, OpResult, Operation, PostOutcome,
        RailLane,
    },
    mem::{RemoteSpan, Span},
    region::{Region, RegionTable, Rights},
};
use uccl_wire::rails::{Note, RegionId};

use super::{Rails, RmaLane, Role, Silence};

/// A test fails if it waits longer than this for an event. Events come much sooner.
pub(super) const FAR: Duration = Duration::from_secs(20);

struct Nobody;

impl MessageSink for Nobody {
    fn message(&self, _: &[u8]) -> Result<Handling, String> {
        Ok(Handling::Ended)
    }

    fn go_on(&self) -> Handling {
        Handling::Ended
    }

    fn signalled(&self) {}
}

/// The result of an operation, once it has ended.
#[derive(Default)]
pub(super) struct OpReport {
    result: Mutex<Option<OpResult>>,
    name: OnceLock<OpName>,
}

impl Completion for OpReport {
    fn complete(self: Arc<Self>, result: OpResult) {
        *self.result.lock() = Some(result);
    }
}

impl OpReport {
    pub(super) fn result(&self) -> Option<OpResult> {
        self.result.lock().clone()
    }

    pub(super) fn name(&self) -> OpName {
        *self.name.get().expect("it was posted")
    }
}

/// One end.
pub(super) struct End {
    pub(super) lane: RmaLane,
    pub(super) rails: Arc<Rails>,
    pub(super) regions: Arc<RegionTable>,
    pub(super) devices: Vec<Arc<ChaosRail>>,
}

impl End {
    pub(super) fn new(role: Role, devices: Vec<Arc<ChaosRail>>) -> Self {
        let rails = Rails::new(devices.iter().map(|rail| Arc::clone(rail) as _).collect());
        Self::with(role, devices, rails)
    }

    /// One with these rails, which are or will be its devices.
    pub(super) fn with(role: Role, devices: Vec<Arc<ChaosRail>>, rails: Rails) -> Self {
        let (regions, rails) = (Arc::new(RegionTable::new().expect("a table")), Arc::new(rails));
        let lane = RmaLane::new(role, Arc::clone(&rails), Arc::clone(&regions), Silence::default());
        Self { lane: lane.expect("a lane"), rails, regions, devices }
    }

    /// Its only device, or the first.
    pub(super) fn rail(&self) -> &ChaosRail {
        &self.devices[0]
    }

    /// Registers memory with the table and the devices.
    pub(super) fn register(&self, bytes: &[u8]) -> Region {
        let span = Span { addr: bytes.as_ptr().expose_provenance(), len: bytes.len() };
        let region = self.regions.insert(span, Rights::ALL, None).expect("a region");
        self.rails.add(region.slot, span, MemoryKind::Host, region.rights);
        region
    }

    pub(super) fn hear(&self, note: &Note) -> Result<(), String> {
        let mut bytes = Vec::new();
        note.encode_to(&mut bytes);
        self.lane.hear(&bytes)
    }

    pub(super) fn progress(&self) {
        self.lane.progress(&Nobody).expect("it lives");
    }

    /// Posts an operation, which does not end at once.
    pub(super) fn post(&self, kind: OpKind, local: Span, remote: RemoteSpan) -> Arc<OpReport> {
        let told = Arc::new(OpReport::default());
        let done = Arc::clone(&told) as Arc<dyn Completion>;
        let (local, remote) = ([local].into(), [remote].into());
        let op = Operation { kind, local, memory: MemoryKind::Host, remote, done };
        // SAFETY: the tests keep the memory until the operation has ended or the lanes are gone.
        match unsafe { self.lane.post(op) }.expect("it lives") {
            PostOutcome::Pending(name) => {
                told.name.set(name).expect("it has one name");
                told
            }
            PostOutcome::Done(result) => panic!("it ended at once: {result:?}"),
        }
    }
}

/// Two ends with a path between them.
pub(super) struct Ends {
    pub(super) a: End,
    pub(super) b: End,
    pub(super) network: RailNetwork,
}

impl Ends {
    pub(super) fn of(&self, role: Role) -> &End {
        match role {
            Role::Connector => &self.a,
            Role::Acceptor => &self.b,
        }
    }

    pub(super) fn joined() -> Self {
        Self::over(&[RailFaults::default()])
    }

    /// Over pairs of rails with these faults.
    pub(super) fn over(pairs: &[RailFaults]) -> Self {
        let network = RailNetwork::default();
        let rail = |seed: u64, n: usize| {
            network.rail(&format!("rail{n}"), seed << 8 | n as u64, pairs[n].clone())
        };
        let rails = |seed| (0..pairs.len()).map(|n| rail(seed, n)).collect();
        let (a, b) = (End::new(Role::Connector, rails(1)), End::new(Role::Acceptor, rails(2)));
        let ends = Self { a, b, network };
        ends.until("the paths are up", || ends.are_up(pairs.len()));
        ends
    }

    /// Whether both ends have this many working paths.
    pub(super) fn are_up(&self, paths: usize) -> bool {
        [&self.a, &self.b].iter().all(|end| end.lane.paths_up() == paths)
    }

    /// Brings each end the notes of the other, and lets both go on.
    pub(super) fn turn(&self) {
        self.turn_without(|_| false);
    }

    /// Like [`Self::turn`], but loses some notes.
    pub(super) fn turn_without(&self, is_lost: impl Fn(&Note) -> bool) {
        for (from, to) in [(&self.a, &self.b), (&self.b, &self.a)] {
            from.progress();
            while let Some(note) = from.lane.take_note() {
                if !is_lost(&note) {
                    to.hear(&note).expect("an honest peer");
                }
            }
        }
    }

    pub(super) fn until(&self, what: &str, is_so: impl FnMut() -> bool) {
        self.until_without(|_| false, what, is_so);
    }

    pub(super) fn until_without(
        &self,
        is_lost: impl Fn(&Note) -> bool,
        what: &str,
        mut is_so: impl FnMut() -> bool,
    ) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < FAR, "not so: {what}");
            self.turn_without(&is_lost);
            std::thread::yield_now();
        }
    }
}

pub(super) fn id_of(region: &Region) -> RegionId {
    RegionId { slot: region.slot, key: region.key }
}

/// A part of a span.
pub(super) fn part(span: Span, from: usize, len: usize) -> Span {
    assert!(from + len <= span.len);
    Span { addr: span.addr + from, len }
}
