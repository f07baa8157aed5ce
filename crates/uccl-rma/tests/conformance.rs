//! The tests that every link must pass, over rails that misbehave.

use uccl_chaos::{RailFaults, RailNetwork};
use uccl_conformance::over_rails;

fn holds(link: &str, faults: &[RailFaults]) {
    uccl_conformance::run(link, || {
        let network = RailNetwork::default();
        let rails = |seed: u64| {
            let rail = |(n, faults): (usize, &RailFaults)| {
                network.rail(&format!("rail{n}"), seed << 8 | n as u64, faults.clone()) as _
            };
            faults.iter().enumerate().map(rail).collect()
        };
        over_rails([rails(1), rails(2)])
    });
}

#[test]
fn one_rail() {
    holds("a rail", &[RailFaults::default()]);
}

#[test]
fn two_rails_out_of_order() {
    let slow = RailFaults { delay_polls: 3, depth: 8, reorder: true, ..RailFaults::default() };
    let short = RailFaults { chunk_bytes: 5000, reorder: true, ..RailFaults::default() };
    holds("two rails", &[slow, short]);
}
