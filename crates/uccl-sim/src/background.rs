//! Traffic that heeds nothing.

use fastrand::Rng;

use crate::{
    scenario::{HEADER_LEN, Scenario},
    topology::{Route, route},
};

/// A flow of packets at a constant speed, over one route.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackgroundFlow {
    pub(crate) route: Route,
    /// Bytes of a packet on the wire.
    pub(crate) bytes: u32,
    /// From one packet to the next, in nanoseconds.
    pub(crate) interval_ns: u64,
}

/// The background of a scenario, between random hosts. No host sends or receives two of its flows
/// while there are other hosts.
pub(crate) fn flows(scenario: &Scenario, rng: &mut Rng) -> Vec<BackgroundFlow> {
    let mut hosts: Vec<u16> = (0..scenario.topology.hosts()).collect();
    rng.shuffle(&mut hosts);
    let bytes = scenario.chunk_len + HEADER_LEN;
    let speed = scenario.links.bytes_per_s * scenario.background_load;
    let interval_ns = ((f64::from(bytes) / speed * 1e9) as u64).max(1);
    let flow = |nth: usize| {
        let [from, to] = [nth, nth + 1].map(|at| hosts[at % hosts.len()]);
        let route = route(&scenario.topology, from, to, rng.u64(..));
        BackgroundFlow { route, bytes, interval_ns }
    };
    (0..usize::from(scenario.background_flows)).map(flow).collect()
}
