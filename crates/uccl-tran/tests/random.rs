//! Random paths, loads and parameters: every item is delivered once, and none while anything of it
//! is on its way.

mod sim;

use std::{cell::Cell, time::Duration};

use fastrand::Rng;
use sim::{Load, Path, World, each_seed};
use uccl_tran::{Congestion, Params};

const MS: Duration = Duration::from_millis(1);
const US: Duration = Duration::from_micros(1);
const LOSSES: [f64; 5] = [0.0, 0.001, 0.01, 0.05, 0.2];

fn params(rng: &mut Rng, reorder: u32) -> Params {
    Params {
        window: rng.u32(1..=256 - reorder),
        reorder,
        // Half of the runs begin near the end, so that numbers wrap soon.
        first: if rng.bool() { rng.u32(..) } else { u32::MAX - rng.u32(..100) },
        ack_every: rng.u32(1..20),
        ack_delay: rng.u32(0..200) * US,
        congestion: rng.bool().then(Congestion::default),
        ..Params::default()
    }
}

fn path(rng: &mut Rng, loss: f64, reorder: u32) -> Path {
    Path {
        bytes_per_second: [100e6, 1e9, 12.5e9, 50e9][rng.usize(..4)],
        delay: rng.u32(1..200) * US,
        jitter: if rng.bool() { rng.u32(0..500) * US } else { Duration::ZERO },
        queue_bytes: if rng.bool() { f64::INFINITY } else { 4e6 },
        loss,
        reorder,
        ack_loss: if rng.bool() { loss } else { 0.0 },
        ack_repeats: if rng.bool() { 0.1 } else { 0.0 },
        ..Path::default()
    }
}

fn load(rng: &mut Rng, items: u64) -> Load {
    let most = [8, 4096, 65536, 1 << 20][rng.usize(..4)];
    Load { items, bytes: 1..=most, at_once: rng.usize(1..400), flushes: rng.bool() }
}

fn world(seed: u64) -> (World, f64) {
    let mut rng = Rng::with_seed(seed);
    let loss = LOSSES[seed as usize % LOSSES.len()];
    let reorder = if rng.bool() { 0 } else { rng.u32(0..60) };
    let (params, load) = (params(&mut rng, reorder), load(&mut rng, 300));
    let mut world = World::new(rng.u64(..), path(&mut rng, loss, reorder));
    world.add(params, load);
    (world, loss)
}

#[test]
fn every_item_is_delivered_once() {
    each_seed(3000, |seed| {
        let (mut world, _) = world(seed);
        world.run(Duration::from_secs(600));
        let flow = &world.flows[0];
        let tally = flow.tally;
        assert_eq!((tally.delivered, flow.dead_at), (300, None), "{tally:?}");
        // Only lost items are posted twice.
        assert_eq!(tally.posted, tally.delivered + tally.dropped, "{tally:?}");
    });
}

#[test]
fn a_hole_is_survived() {
    each_seed(500, |seed| {
        let (mut world, _) = world(seed);
        let from = MS * world.rng.u32(..50);
        world.link.path.holes.push(from..from + MS * world.rng.u32(1..5000));
        world.run(Duration::from_secs(600));
        let flow = &world.flows[0];
        assert_eq!((flow.tally.delivered, flow.dead_at), (300, None), "{:?}", flow.tally);
    });
}

#[test]
fn a_dead_path_is_noticed_in_time() {
    each_seed(500, |seed| {
        let (mut world, _) = world(seed);
        let from = US * world.rng.u32(..2000);
        world.link.path.holes.push(from..Duration::MAX);
        world.run(Duration::from_secs(600));
        let flow = &world.flows[0];
        let Some(dead_at) = flow.dead_at else {
            assert_eq!(flow.tally.delivered, 300);
            return;
        };
        // The last that was heard may have been a probe's echo, of which the model does not know.
        let silence = dead_at - flow.heard_at;
        let after = Params::default().dead_after;
        assert!((after..after + 1000 * MS).contains(&silence), "{silence:?}");
        let left = flow.sender.unsettled().count() as u64;
        assert!(left > 0 && left + flow.tally.delivered <= 300, "{left} {:?}", flow.tally);
        assert!(flow.tally.probes < 100 * 61, "{:?}", flow.tally);
    });
}

/// Timeouts that fire needlessly cost an empty message each; they are few.
#[test]
fn a_sound_path_is_hardly_probed() {
    each_seed(200, |seed| {
        let mut rng = Rng::with_seed(seed);
        let (params, load) = (params(&mut rng, 0), load(&mut rng, 2000));
        let mut world = World::new(seed, Path { jitter: MS, ..path(&mut rng, 0.0, 0) });
        world.link.path.queue_bytes = f64::INFINITY;
        world.link.path.ack_loss = 0.0;
        world.add(params, load);
        world.run(Duration::from_secs(600));
        let tally = world.flows[0].tally;
        assert_eq!((tally.delivered, tally.posted), (2000, 2000));
        assert!(tally.probes <= 20, "{tally:?}");
    });
}

/// A message that lands after its end was reported is noticed when it lands, so there is at most
/// one.
#[test]
fn a_path_that_does_not_keep_order_is_given_up_at_once() {
    const ITEMS: u64 = 2000;
    for held in [1e-4, 1e-3, 1e-2] {
        let [mut broken, mut late] = [0; 2].map(Cell::new);
        each_seed(20, |seed| {
            let mut rng = Rng::with_seed(seed);
            let (params, load) = (params(&mut rng, 0), load(&mut rng, ITEMS));
            let path = Path { held, held_for: 5 * MS, ..path(&mut rng, 0.001, 0) };
            let mut world = World::new(seed, path);
            world.add(params, load);
            world.run(Duration::from_secs(600));
            let flow = &world.flows[0];
            assert!(flow.late <= 1, "{}", flow.late);
            assert!(flow.broken.is_some() || flow.tally.delivered == ITEMS, "{:?}", flow.tally);
            broken.set(broken.get() + u64::from(flow.broken.is_some()));
            late.set(late.get() + flow.late);
        });
        let (broken, late) = (*broken.get_mut(), *late.get_mut());
        println!("{held}: {broken} paths were given up, {late} of them after the fact");
        assert!(held < 1e-2 || broken > 0, "the model holds messages up: {broken}");
    }
}
