//! Two lanes over rails within this process, whose notes are carried by hand.

mod keys;

use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::smallvec;
use uccl_device::MemoryKind;
use uccl_wire::rails::{Note, RegionId};

use super::{Rails, RmaLane, Role, rail::Rail};
use crate::{
    chaos::{ChaosRail, RailFaults, RailNetwork},
    lane::{Completion, Lane, MessageSink, OpKind, OpResult, Operation, Posted},
    mem::{RemoteSpan, Span},
    region::{Region, RegionTable, Rights},
};

struct Nobody;

impl MessageSink for Nobody {
    fn message(&self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// How an operation ended, once it has.
#[derive(Default)]
pub(super) struct Told(Mutex<Option<OpResult>>);

impl Completion for Told {
    fn complete(self: Arc<Self>, result: OpResult) {
        *self.0.lock() = Some(result);
    }
}

impl Told {
    pub(super) fn result(&self) -> Option<OpResult> {
        self.0.lock().clone()
    }
}

/// One end.
pub(super) struct End {
    pub(super) lane: RmaLane,
    pub(super) rails: Arc<Rails>,
    pub(super) regions: Arc<RegionTable>,
    pub(super) rail: Arc<ChaosRail>,
}

impl End {
    fn new(role: Role, rail: Arc<ChaosRail>) -> Self {
        let regions = Arc::new(RegionTable::new().expect("a table"));
        let rails = Arc::new(Rails::new(vec![Arc::clone(&rail) as Arc<dyn Rail>]));
        let lane = RmaLane::new(role, Arc::clone(&rails), Arc::clone(&regions), None);
        Self { lane: lane.expect("a lane"), rails, regions, rail }
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
    pub(super) fn post(&self, kind: OpKind, local: Span, remote: RemoteSpan) -> Arc<Told> {
        let told = Arc::new(Told::default());
        let done = Arc::clone(&told) as Arc<dyn Completion>;
        let (local, remote) = (smallvec![local], smallvec![remote]);
        let op = Operation { kind, local, memory: MemoryKind::Host, remote, done };
        // SAFETY: the tests keep the memory until the operation has ended or the lanes are gone.
        match unsafe { self.lane.post(op) }.expect("it lives") {
            Posted::Pending(_) => told,
            Posted::Done(result) => panic!("it ended at once: {result:?}"),
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
    pub(super) fn joined() -> Self {
        let network = RailNetwork::default();
        let rail = |name, seed| network.rail(name, seed, RailFaults::default());
        let (a, b) =
            (End::new(Role::Connector, rail("a", 1)), End::new(Role::Acceptor, rail("b", 2)));
        let ends = Self { a, b, network };
        ends.until("the path is up", || ends.a.lane.paths_up() + ends.b.lane.paths_up() == 2);
        ends
    }

    /// Brings each end what the other has to say, and lets both go on.
    pub(super) fn turn(&self) {
        for (from, to) in [(&self.a, &self.b), (&self.b, &self.a)] {
            from.progress();
            while let Some(note) = from.lane.take_note() {
                to.hear(&note).expect("an honest peer");
            }
        }
    }

    pub(super) fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        for _ in 0..100_000 {
            if is_so() {
                return;
            }
            self.turn();
            std::thread::yield_now();
        }
        panic!("not so: {what}");
    }
}

pub(super) fn id_of(region: &Region) -> RegionId {
    RegionId { slot: region.slot, key: region.key }
}

/// Some of memory.
pub(super) fn part(span: Span, from: usize, len: usize) -> Span {
    assert!(from + len <= span.len);
    Span { addr: span.addr + from, len }
}
