//! Groups over links that misbehave: rails that reorder, delay, split, break and are pulled, and
//! TCP through a forwarder in the middle.

mod middle;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use fastrand::Rng;
use uccl_chaos::{ChaosRail, RailFaults, RailNetwork, each_seed};
use uccl_ep::{Exchange, Group, Result};
use uccl_p2p::{Endpoint, Transport};
use uccl_wire::ep_card::EpCard;

use self::middle::{Middle, STREAMS};
use super::{Ranks, multiples_of, world_by};

/// Rails of each rank.
const RAILS: usize = 2;
/// Numbers of ranks, and of the nodes that they are on: one on each node, far from each other, or
/// several, with relays.
const SPREADS: [(usize, usize); 3] = [(2, 2), (4, 2), (6, 3)];

/// The faults of one case's rails.
fn faults(random: &mut Rng) -> RailFaults {
    RailFaults {
        delay_polls: random.u32(0..6),
        depth: [2, 16, 64][random.usize(..3)],
        chunk_bytes: [512, 4096, 64 << 10][random.usize(..3)],
        reorder: random.bool(),
        break_permille: [0, 0, 3][random.usize(..3)],
        refuse_memory_percent: 0,
        keys_of_channels: random.bool(),
    }
}

/// Sets a flag when a case is over, however it ends.
struct EndFlag<'a>(&'a AtomicBool);

impl Drop for EndFlag<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Pulls one rail after another and plugs it again, until the case is over. Returns the number of
/// pulls.
fn pull_and_plug(
    rails: &[Arc<ChaosRail>],
    mut random: Rng,
    network: &RailNetwork,
    is_over: &AtomicBool,
) -> u32 {
    let mut pulled = 0;
    while !is_over.load(Ordering::Relaxed) {
        // Ranks cannot join without a rail that works.
        if network.carried() > 0 {
            let rail = &rails[random.usize(..rails.len())];
            rail.pull();
            pulled += 1;
            thread::sleep(Duration::from_millis(random.u64(..20)));
            rail.plug();
        }
        thread::sleep(Duration::from_millis(random.u64(..60)));
    }
    pulled
}

#[test]
fn rails_that_reorder_delay_split_and_are_pulled_lose_nothing() {
    each_seed(|seed| {
        let mut random = Rng::with_seed(seed);
        let (count, nodes) = SPREADS[seed as usize % SPREADS.len()];
        // This transport uses the rails of given endpoints.
        let places = Ranks::apart(count, nodes, Transport::Verbs);
        let (network, faults) = (RailNetwork::default(), faults(&mut random));
        let rail = |nth: usize| {
            let seed = seed << 8 | nth as u64;
            network.rail(&format!("rail{}", nth % RAILS), seed, faults.clone())
        };
        let rails: Vec<_> = (0..count * RAILS).map(rail).collect();
        let join = |me: usize, exchange: &mut Exchange<'_>| -> Result<Arc<Group>> {
            let of_rank = &rails[me * RAILS..][..RAILS];
            let mut make = |settings| {
                let rails = of_rank.iter().map(|rail| Arc::clone(rail) as _).collect();
                Endpoint::with_rails(settings, rails)
            };
            Group::join_by(places.config(me), exchange, &mut make)
        };
        let is_over = AtomicBool::new(false);
        let pulled = thread::scope(|scope| {
            let puller = scope.spawn(|| pull_and_plug(&rails, random, &network, &is_over));
            let over = EndFlag(&is_over);
            world_by(count, join, |group| multiples_of(&group, seed..seed + 1));
            drop(over);
            puller.join().unwrap()
        });
        let broken: u64 = rails.iter().map(|rail| rail.broken()).sum();
        let carried = network.carried();
        assert!(carried > 0, "the rails carried nothing");
        eprintln!(
            "{count} ranks, {nodes} nodes: {carried} bytes by rails, {pulled} pulled, {broken} broken"
        );
    });
}

/// Makes a rank connect to the far ranks behind it through forwarders in the middle.
fn through(me: usize, cards: &mut [Option<Vec<u8>>], seed: u64) -> Vec<Middle> {
    let card = |bytes: &Option<Vec<u8>>| bytes.as_deref().and_then(|b| EpCard::decode(b).ok());
    let Some(mine) = card(&cards[me]) else { return Vec::new() };
    let mut middles = Vec::new();
    for (rank, bytes) in cards.iter_mut().enumerate().skip(me + 1) {
        let Some(mut theirs) = card(bytes).filter(|card| card.node != mine.node) else { continue };
        let Some(endpoint) = &mut theirs.endpoint else { continue };
        let middle = Middle::before(endpoint.addr, seed << 8 | (me * 16 + rank) as u64);
        endpoint.addr = middle.addr;
        *bytes = Some(theirs.encode().to_vec());
        middles.push(middle);
    }
    middles
}

#[test]
fn streams_that_are_delayed_split_and_cut_lose_nothing() {
    let lost = AtomicU64::new(0);
    each_seed(|seed| {
        let (count, nodes) = SPREADS[seed as usize % SPREADS.len()];
        let places = Ranks::apart(count, nodes, Transport::Tcp);
        let middles = Mutex::new(Vec::new());
        let join = |me: usize, exchange: &mut Exchange<'_>| -> Result<Arc<Group>> {
            let mut exchange = |mine: Vec<u8>| {
                let mut all = exchange(mine)?;
                middles.lock().unwrap().extend(through(me, &mut all, seed));
                Ok(all)
            };
            let mut config = places.config(me);
            config.network.iter_mut().for_each(|network| network.tcp_streams = STREAMS);
            Group::join(config, &mut exchange)
        };
        world_by(count, join, |group| {
            multiples_of(&group, seed..seed + 1);
            let stats = group.network_stats().unwrap();
            lost.fetch_add(stats.lanes_lost, Ordering::Relaxed);
        });
    });
    let lost = lost.into_inner();
    eprintln!("{lost} ends of streams were lost");
    assert!(lost > 0, "no stream was cut");
}
