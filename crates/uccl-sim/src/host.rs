//! Hosts, and the ends of flows on them.

use std::collections::VecDeque;

use fastrand::Rng;
use uccl_tran::{
    control::CreditPacer,
    multipath::{MultipathReceiver, MultipathSender, Techniques},
};

use crate::{
    pattern::FlowPlan,
    scenario::{HEADER_LEN, Scenario, ScenarioError},
    topology::{Route, route},
};

/// Chunks that a grant of credits is for.
const QUANTUM_CHUNKS: u64 = 2;
/// The part of the link's speed that is granted: the rest is for acknowledgements.
const GRANTED: f64 = 0.97;

/// A host.
#[derive(Debug)]
pub(crate) struct Host {
    /// Flows that may have something to send, the next one first.
    pub(crate) ready: VecDeque<u32>,
    /// An event will tell when its port has room.
    pub(crate) is_port_awaited: bool,
    /// Grants for the flows to this host, and when the next event for them is.
    pub(crate) pacer: CreditPacer,
    pub(crate) grants_at_ns: Option<u64>,
}

impl Host {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let chunk = u64::from(scenario.chunk_len);
        let wire = (QUANTUM_CHUNKS * (chunk + u64::from(HEADER_LEN))) as f64;
        let speed = scenario.links.bytes_per_s * scenario.links.bottleneck.min(1.0) * GRANTED;
        let interval_ns = (wire / speed * 1e9) as u64;
        Self {
            ready: VecDeque::new(),
            is_port_awaited: false,
            pacer: CreditPacer::new(QUANTUM_CHUNKS * chunk, interval_ns, chunk),
            grants_at_ns: None,
        }
    }
}

/// The way of a path, there and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathRoutes {
    pub(crate) there: Route,
    pub(crate) back: Route,
    /// Packets of a path that was closed count for nothing when it is opened again.
    pub(crate) epoch: u8,
}

/// A flow: both its ends.
#[derive(Debug)]
pub(crate) struct Flow {
    pub(crate) plan: FlowPlan,
    pub(crate) group: usize,
    pub(crate) sender: MultipathSender,
    pub(crate) receiver: MultipathReceiver,
    pub(crate) paths: Vec<PathRoutes>,
    /// When each message was pushed.
    pub(crate) begun_ns: Vec<u64>,
    /// Messages that all chunks are acknowledged of.
    pub(crate) sent: u32,
    /// The completion times, in nanoseconds, and the last completion.
    pub(crate) times_ns: Vec<u64>,
    pub(crate) last_ns: u64,
    pub(crate) timer_ns: Option<u64>,
    pub(crate) is_ready: bool,
    pub(crate) chunks: u64,
}

impl Flow {
    pub(crate) fn new(
        scenario: &Scenario,
        plan: FlowPlan,
        group: usize,
        techniques: Techniques,
        rng: &mut Rng,
    ) -> Result<Self, ScenarioError> {
        let params = scenario.params();
        let mut receiver = MultipathReceiver::new(params)?;
        for _ in 0..scenario.messages {
            receiver.post(scenario.message_bytes);
        }
        let mut flow = Self {
            plan,
            group,
            sender: MultipathSender::new(params, techniques, 0)?,
            receiver,
            paths: Vec::new(),
            begun_ns: Vec::new(),
            sent: 0,
            times_ns: Vec::new(),
            last_ns: 0,
            timer_ns: None,
            is_ready: false,
            chunks: 0,
        };
        flow.paths = (0..scenario.paths).map(|_| flow.routes(scenario, rng, 0)).collect();
        Ok(flow)
    }

    /// A path with an entropy of its own.
    pub(crate) fn routes(&self, scenario: &Scenario, rng: &mut Rng, epoch: u8) -> PathRoutes {
        let (entropy, plan) = (rng.u64(..), self.plan);
        PathRoutes {
            there: route(&scenario.topology, plan.from, plan.to, entropy),
            back: route(&scenario.topology, plan.to, plan.from, entropy),
            epoch,
        }
    }
}
