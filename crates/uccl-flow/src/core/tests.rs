//! Scheduler and inboxes in virtual time, over streams that stall, slow down and die.

mod net;
mod own;
mod sim;
mod unit;
mod width;

use self::{
    net::Faults,
    sim::{Sim, Work},
};

/// Seeds of the random runs; a failure prints its own.
const SEEDS: u64 = 10_000;

#[test]
fn every_byte_lands_once_its_message_is_open_and_none_after() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for seed in (thread..SEEDS).step_by(threads as usize) {
                    let mut sim = Sim::random(seed);
                    sim.run();
                }
            });
        }
    });
}

#[test]
fn a_slow_stream_costs_no_more_than_its_share() {
    let time = |faults: Faults| {
        let mut sim = Sim::new(7, 4, Work { flows: 2, messages: 64, longest: 256 << 10 });
        sim.net.set_rates(1000);
        sim.net.faults = faults;
        sim.run();
        (sim.now_us(), sim.net.delivered())
    };
    let (even_us, even) = time(Faults::None);
    let (slow_us, slow) = time(Faults::Slow { stream: 2, by: 10 });
    assert!(even.iter().all(|bytes| *bytes > 0), "every stream has work: {even:?}");
    assert!(slow.iter().all(|bytes| *bytes > 0), "the slow one too: {slow:?}");
    // Three and a tenth of four streams are left.
    assert!(slow_us * 100 < even_us * 150, "{slow_us} us with a slow stream, {even_us} us without");
}

#[test]
fn a_stream_that_is_fast_again_gets_its_share_again() {
    let mut sim = Sim::new(3, 4, Work { flows: 4, messages: 200, longest: 256 << 10 });
    sim.net.set_rates(1000);
    sim.net.faults = Faults::Stall { stream: 1, from_us: 5_000, to_us: 60_000 };
    sim.run_until(90_000);
    let before = sim.net.delivered();
    sim.run();
    let after: Vec<_> =
        sim.net.delivered().iter().zip(before).map(|(all, old)| all - old).collect();
    assert!(after[1] * 2 > after[0], "{after:?}");
}

#[test]
fn a_host_that_was_cut_off_goes_on_where_it_was() {
    let time = |faults| {
        let mut sim = Sim::new(5, 4, Work { flows: 3, messages: 50, longest: 64 << 10 });
        sim.net.set_rates(4000);
        sim.net.faults = faults;
        sim.run();
        assert!(!sim.has_failed());
        sim.now_us()
    };
    let (whole_us, cut_us) =
        (time(Faults::None), time(Faults::Cut { from_us: 40_000, to_us: 700_000 }));
    // The cut itself, and the time to find a way again.
    assert!(cut_us < whole_us + 660_000 + 50_000, "{cut_us} us with a cut, {whole_us} us without");
}

#[test]
fn a_peer_that_stays_away_is_an_error_at_the_limit() {
    let mut sim = Sim::new(5, 4, Work { flows: 3, messages: 50, longest: 256 << 10 });
    sim.net.set_rates(1000);
    sim.net.faults = Faults::Cut { from_us: 4_000, to_us: u64::MAX };
    sim.run();
    assert!(sim.has_failed());
    let limit = sim::params(4).limit_us;
    assert!((limit..limit + 50_000).contains(&sim.now_us()), "failed at {} us", sim.now_us());
}
