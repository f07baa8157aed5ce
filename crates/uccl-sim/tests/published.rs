//! The order of algorithms, and the figures that networks in virtual time must reach.

use uccl_sim::{LinkFaults, Pattern, Report, Scenario, Simulation, Topology, percentile};

#[path = "../examples/dctcp.rs"]
mod dctcp;

fn run(scenario: &Scenario, names: [&str; 3]) -> Report {
    let [choice, loss, control] = names;
    let simulation = Simulation::named(scenario, choice, loss, control).expect("a scenario");
    let report = simulation.run(|_| ());
    let group = &report.groups[0];
    eprintln!(
        "{} over {} paths, seed {}: p99 {:.0} us of {:.0}, {:.2} GB/s, queue {} KiB, {} repeats",
        group.name,
        scenario.paths,
        report.seed,
        group.times.p99_us,
        group.ideal_us,
        group.goodput_gb_per_s,
        report.queue_max_bytes / 1024,
        group.repeats
    );
    assert_eq!(report.unfinished, 0, "seed {}", report.seed);
    report
}

/// The completion time of 99 of 100 messages, divided by the ideal.
fn slowdown(report: &Report) -> f64 {
    percentile(&report.groups[0].slowdowns, 0.99)
}

fn permutation(paths: u16, seed: u64) -> Scenario {
    Scenario {
        topology: Topology::LeafSpine { leaves: 4, hosts_per_leaf: 8, spines: 8 },
        pattern: Pattern::Permutation,
        message_bytes: 4 << 20,
        paths,
        seed,
        ..Scenario::default()
    }
}

#[test]
fn sixteen_paths_carry_a_permutation_and_one_by_hash_does_not() {
    for (choice, seeds, limit) in
        [("recycled", 1..=8, 1.3), ("two-choices", 1..=3, 1.6), ("skip-marked", 1..=3, 1.6)]
    {
        for seed in seeds {
            let names = [choice, "time", "delay-ecn"];
            let many = slowdown(&run(&permutation(16, seed), names));
            let one = slowdown(&run(&permutation(1, seed), names));
            assert!(many <= limit, "{choice}, seed {seed}: {many} of the ideal");
            assert!(
                one >= 2.0 * many,
                "{choice}, seed {seed}: {one} by hash, {many} over 16 paths"
            );
        }
    }
}

#[test]
fn credits_keep_the_queue_of_an_incast_short() {
    for seed in 1..=5 {
        let scenario = Scenario { seed, ..Scenario::default() };
        let credits = run(&scenario, ["round-robin", "time", "eqds"]);
        assert!(credits.queue_max_bytes <= 64 << 10, "{} bytes", credits.queue_max_bytes);
        assert!(slowdown(&credits) <= 1.2, "{} of the ideal", slowdown(&credits));
        let fixed = run(&scenario, ["round-robin", "time", "fixed"]);
        assert!(fixed.queue_max_bytes > 8 * credits.queue_max_bytes);
    }
}

#[test]
fn losses_at_random_cost_little_goodput() {
    let goodput = |loss: f64, control: &str, seed| {
        let mut scenario = Scenario {
            pattern: Pattern::Pair { flows: 1 },
            message_bytes: 16 << 20,
            messages: 4,
            seed,
            ..Scenario::default()
        };
        scenario.links.faults = LinkFaults { loss, ..LinkFaults::default() };
        run(&scenario, ["recycled", "time", control]).groups[0].goodput_gb_per_s
    };
    for control in ["delay-ecn", "swift", "eqds"] {
        for seed in 1..=2 {
            let clean = goodput(0.0, control, seed);
            let parts = [0.001, 0.01].map(|loss| goodput(loss, control, seed) / clean);
            assert!(parts[0] >= 0.95 && parts[1] >= 0.85, "{control}, seed {seed}: {parts:?}");
        }
    }
}

#[test]
fn a_seed_repeats_a_simulation() {
    let mut scenario = permutation(16, 9);
    scenario.message_bytes = 256 << 10;
    scenario.links.faults.loss = 0.01;
    let names = ["two-choices", "time", "swift"];
    let (first, again) = (run(&scenario, names), run(&scenario, names));
    assert_eq!(first, again);
    scenario.seed = 10;
    assert_ne!(first.groups[0].times, run(&scenario, names).groups[0].times);
}

#[test]
fn the_example_runs_and_holds_its_queue_near_the_mark() {
    dctcp::main().expect("a simulation");
    let mark = 64 << 10;
    let scenario = dctcp::scenario(mark);
    let report = dctcp::simulate(&scenario, "DCTCP", |link| Box::new(dctcp::Dctcp::new(link)));
    let report = report.expect("a simulation");
    let group = &report.groups[0];
    // Section 3.3 of the paper: the queue stays around K, and the link is full above C x RTT / 7.
    assert!(report.queue_p99_bytes < 2 * mark, "{} bytes", report.queue_p99_bytes);
    assert!(group.goodput_gb_per_s > 0.93 * scenario.links.bytes_per_s / 1e9);
    assert!(group.fairness > 0.98, "{}", group.fairness);
}
