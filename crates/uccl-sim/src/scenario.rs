//! The input of a simulation.

use uccl_tran::{
    control::LinkFacts,
    multipath::{MultipathParams, Repeats},
    recovery::TailProbe,
};

use crate::{
    faults::LinkFaults,
    pattern::Pattern,
    topology::{Links, Topology},
};

/// Bytes on the wire in front of each chunk.
pub(crate) const HEADER_LEN: u32 = 64;
/// Bytes on the wire of an acknowledgement, a probe, a credit.
pub(crate) const CONTROL_LEN: u32 = 84;

/// A network, its traffic and its faults.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scenario {
    /// The shape of the network.
    pub topology: Topology,
    /// Its links.
    pub links: Links,
    /// Its traffic.
    pub pattern: Pattern,
    /// Bytes of a message.
    pub message_bytes: u64,
    /// Messages of each flow.
    pub messages: u32,
    /// Messages of a flow that are under way at any time.
    pub at_once: u32,
    /// Paths of each flow.
    pub paths: u16,
    /// Bytes of a chunk, which is a packet.
    pub chunk_len: u32,
    /// Whether chunks may be under way twice.
    pub repeats: Repeats,
    /// Chunks of a path after which the receiver acknowledges.
    pub ack_every: u32,
    /// Flows begin at random times up to this, in nanoseconds.
    pub jitter_ns: u64,
    /// Flows that heed nothing, between random hosts, each over one route.
    pub background_flows: u16,
    /// The speed of each of these, as part of a link's.
    pub background_load: f64,
    /// The time at which the simulation ends in any case, in nanoseconds.
    pub limit_ns: u64,
    /// Where random numbers begin.
    pub seed: u64,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            topology: Topology::OneSwitch { hosts: 16 },
            links: Links {
                bytes_per_s: 12.5e9,
                delay_ns: 1_000,
                bottleneck: 1.0,
                queue_bytes: 4 << 20,
                mark: Some((40_000, 160_000)),
                faults: LinkFaults::default(),
                fabric_faults: LinkFaults::default(),
                faulty_links: 0,
                faulty_speed: 1.0,
            },
            pattern: Pattern::Incast { senders: 15 },
            message_bytes: 1 << 20,
            messages: 1,
            at_once: 1,
            paths: 16,
            chunk_len: 4096,
            repeats: Repeats::Harmless,
            ack_every: 1,
            jitter_ns: 500,
            background_flows: 0,
            background_load: 0.5,
            limit_ns: 10_000_000_000,
            seed: 1,
        }
    }
}

/// Why a scenario cannot be simulated.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScenarioError {
    /// The pattern needs more hosts.
    #[error("the pattern needs {needed} hosts; the network has {hosts}")]
    Hosts {
        /// How many it needs.
        needed: u32,
        /// How many there are.
        hosts: u32,
    },
    /// There are too many ports or flows to be numbered.
    #[error("{count} {things} are too many; {most} is the limit")]
    TooMany {
        /// How many.
        count: u64,
        /// Their kind.
        things: &'static str,
        /// The limit.
        most: u64,
    },
    /// A number must be above 0.
    #[error("{0} must be above 0")]
    Zero(&'static str),
    /// Not a fraction between 0 and 1.
    #[error("{0} is {1}, not between 0 and 1")]
    Fraction(&'static str, f64),
    /// There is no technique of this name.
    #[error("there is no {kind} {name:?}; there are {known}")]
    Name {
        /// Of which kind.
        kind: &'static str,
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// The transport refuses its parameters.
    #[error(transparent)]
    Params(#[from] uccl_tran::ParamsError),
}

impl Scenario {
    /// The properties of the network from which algorithms derive their constants.
    #[must_use]
    pub fn link_facts(&self) -> LinkFacts {
        LinkFacts {
            bytes_per_s: self.links.bytes_per_s,
            base_rtt_ns: self.base_rtt_ns(),
            chunk_len: self.chunk_len.into(),
        }
    }

    /// The round trip of a chunk and its acknowledgement through empty queues, in nanoseconds.
    #[must_use]
    pub fn base_rtt_ns(&self) -> u64 {
        let hops = self.topology.most_hops();
        let wire = f64::from(self.chunk_len + HEADER_LEN + CONTROL_LEN) * hops as f64;
        2 * hops * self.links.delay_ns + (wire / self.links.bytes_per_s * 1e9) as u64
    }

    /// The least time of a message over a link that so many flows share, in nanoseconds.
    #[must_use]
    pub fn ideal_ns(&self, sharers: u16) -> f64 {
        let chunks = self.message_bytes.div_ceil(self.chunk_len.into()).max(1);
        let wire = (self.message_bytes + chunks * u64::from(HEADER_LEN)) * u64::from(sharers);
        let speed = match self.topology {
            Topology::OneSwitch { .. } => self.links.bytes_per_s * self.links.bottleneck.min(1.0),
            Topology::LeafSpine { .. } => self.links.bytes_per_s,
        };
        let hops = self.topology.most_hops();
        let first = f64::from(self.chunk_len + HEADER_LEN) * (hops - 1) as f64;
        wire as f64 / speed * 1e9
            + (hops * self.links.delay_ns) as f64
            + first / self.links.bytes_per_s * 1e9
    }

    /// The transport's parameters.
    #[must_use]
    pub fn params(&self) -> MultipathParams {
        let rtt_ns = self.base_rtt_ns();
        MultipathParams {
            paths: self.paths,
            chunk_len: self.chunk_len,
            repeats: self.repeats,
            most_open: self.at_once.max(1),
            ack_every: self.ack_every,
            ack_delay_ns: rtt_ns,
            initial_rtt_ns: 2 * rtt_ns,
            tail_probe: TailProbe { least_ns: 2 * rtt_ns, ..TailProbe::default() },
            ..MultipathParams::default()
        }
    }

    pub(crate) fn check(&self) -> Result<(), ScenarioError> {
        let zeros = [
            ("the number of hosts", self.topology.hosts() == 0),
            ("the speed of links", self.links.bytes_per_s <= 0.0),
            ("the bottleneck's part", self.links.bottleneck <= 0.0),
            ("the speed of faulty links", self.links.faulty_speed <= 0.0),
            ("the number of messages", self.messages == 0),
            ("the background's load", self.background_load <= 0.0),
        ];
        if let Some((name, _)) = zeros.into_iter().find(|(_, zero)| *zero) {
            return Err(ScenarioError::Zero(name));
        }
        let (needed, hosts) = (self.pattern.least_hosts(), u32::from(self.topology.hosts()));
        if hosts < needed {
            return Err(ScenarioError::Hosts { needed, hosts });
        }
        for faults in [self.links.faults, self.links.fabric_faults] {
            let bursts = faults.bursts.map_or((0.0, 0.0), |bursts| (bursts.begin, bursts.end));
            let part = faults.reordering.map_or(0.0, |reordering| reordering.part);
            for (name, part) in [
                ("the loss", faults.loss),
                ("the begin of bursts", bursts.0),
                ("the end of bursts", bursts.1),
                ("the part of reordering", part),
            ] {
                if !(0.0..=1.0).contains(&part) {
                    return Err(ScenarioError::Fraction(name, part));
                }
            }
        }
        self.check_counts()
    }

    fn check_counts(&self) -> Result<(), ScenarioError> {
        let hosts = u64::from(self.topology.hosts());
        let between = match self.topology {
            Topology::OneSwitch { .. } => 0,
            Topology::LeafSpine { leaves, spines, .. } => u64::from(leaves) * u64::from(spines),
        };
        let flows = match self.pattern {
            Pattern::AllToAll => hosts * hosts,
            Pattern::Pair { flows } => flows.into(),
            _ => hosts,
        };
        for (things, count, most) in [
            ("ports", 2 * hosts + 2 * between, u64::from(u16::MAX)),
            ("flows with their paths", flows * u64::from(self.paths), 1 << 22),
            ("bytes of a chunk", self.chunk_len.into(), 1 << 20),
        ] {
            if count > most {
                return Err(ScenarioError::TooMany { count, things, most });
            }
        }
        Ok(())
    }
}
