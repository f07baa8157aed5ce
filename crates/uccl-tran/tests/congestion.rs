//! The congestion window on paths that queue, in virtual time: use of the link, length of the
//! queue, and fairness between two senders.

mod sim;

use std::time::Duration;

use sim::{Load, Path, World};
use uccl_tran::{Congestion, Params};

const US: Duration = Duration::from_micros(1);

/// Figures of the second half of a run.
struct Use {
    /// Part of the link's bandwidth that delivered items.
    link: f64,
    /// The longest wait in its queue.
    wait: Duration,
    /// The smallest sender's part of an equal share.
    fair: f64,
}

impl std::fmt::Display for Use {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { link, wait, fair } = self;
        write!(f, "{:3.0} % used, waits {wait:9.1?}, fairness {fair:.2}", link * 100.0)
    }
}

fn run(path: Path, congestion: Option<Congestion>, bytes: u64, senders: usize) -> Use {
    let mut world = World::new(1, path);
    for _ in 0..senders {
        let params = Params { congestion, ..Params::default() };
        let load = Load { items: u64::MAX, bytes: bytes..=bytes, at_once: 1000, flushes: true };
        world.add(params, load);
    }
    let delivered = |world: &World| -> Vec<u64> {
        world.flows.iter().map(|flow| flow.tally.delivered_bytes).collect()
    };
    // Long enough for 20,000 items each time.
    let half = Duration::from_secs_f64(20_000.0 * bytes as f64 / world.link.path.bytes_per_second);
    world.run(half);
    world.link.longest_wait = Duration::ZERO;
    let before = delivered(&world);
    world.run(half * 2);
    let each: Vec<_> =
        delivered(&world).iter().zip(before).map(|(all, early)| all - early).collect();
    let (all, least) = (each.iter().sum::<u64>() as f64, each.iter().min().copied().unwrap_or(0));
    Use {
        link: all / world.link.path.bytes_per_second / half.as_secs_f64(),
        wait: world.link.longest_wait,
        fair: least as f64 * senders as f64 / all,
    }
}

fn path(bytes_per_second: f64, delay: Duration, loss: f64) -> Path {
    Path { bytes_per_second, delay, loss, ..Path::default() }
}

fn paths() -> [(&'static str, Path); 7] {
    [
        ("100G, 5 us", path(12.5e9, 5 * US, 0.0)),
        ("400G, 5 us", path(50e9, 5 * US, 0.0)),
        ("100G, 100 us", path(12.5e9, 100 * US, 0.0)),
        ("100 MB/s, 50 us", path(1e8, 50 * US, 0.0)),
        ("100G, 5 us, 1 % lost", path(12.5e9, 5 * US, 0.01)),
        ("100G, 5 us, 20 % lost", path(12.5e9, 5 * US, 0.2)),
        ("100G, 100 us, 1 % lost", path(12.5e9, 100 * US, 0.01)),
    ]
}

/// The whole table: `cargo test -p uccl-tran --test congestion -- --nocapture`.
#[test]
fn the_link_is_used_and_its_queue_is_short() {
    let on = Congestion::default();
    for (name, path) in paths() {
        for (bytes, senders) in
            [(4 << 10, 1), (64 << 10, 1), (64 << 10, 2), (64 << 10, 8), (1 << 20, 1), (1 << 20, 8)]
        {
            let without = run(path.clone(), None, bytes, senders);
            let with = run(path.clone(), Some(on), bytes, senders);
            eprintln!("{name}, {senders} x {bytes} B\n   without {without}\n   with    {with}");
            assert!(with.link > without.link * 0.9, "the window costs bandwidth");
            // The floor of each sender is always on its way, and each may take the others' queue
            // for the path.
            let floor = u64::from(on.floor_messages) * bytes * senders as u64;
            let floor = Duration::from_secs_f64(floor as f64 / path.bytes_per_second);
            let target = (on.target + 2 * path.delay) * (1 + senders as u32);
            assert!(
                with.wait < (target + floor) * 4 || with.wait < without.wait,
                "the queue is long"
            );
        }
    }
}
