//! The simulator's own speed.

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};
use uccl_sim::{Pattern, Scenario, Simulation, Topology};

/// Prints the packets that a core simulates in a second of its time, over two and four links.
pub(super) fn run() -> Result<()> {
    let incast = Scenario { message_bytes: 64 << 20, ..Scenario::default() };
    let topology = Topology::LeafSpine { leaves: 8, hosts_per_leaf: 8, spines: 8 };
    let permutation = Scenario {
        topology,
        pattern: Pattern::Permutation,
        message_bytes: 8 << 20,
        ..Scenario::default()
    };
    println!("{:<34}  {:>10}  {:>12}  {:>12}", "simulation", "packets", "packets/s", "events/s");
    for (name, scenario, names) in [
        ("incast of 15, one switch, fixed", incast, ["round-robin", "time", "fixed"]),
        ("permutation of 64, leaf and spine", permutation, ["recycled", "time", "delay-ecn"]),
    ] {
        let [choice, loss, control] = names;
        let simulation = Simulation::named(&scenario, choice, loss, control)?;
        let begun = cpu_seconds();
        let report = simulation.run(|_| ());
        let seconds = (cpu_seconds() - begun).max(1e-9);
        println!(
            "{name:<34}  {:>10}  {:>12.0}  {:>12.0}",
            report.packets,
            report.packets as f64 / seconds,
            report.events as f64 / seconds
        );
    }
    Ok(())
}

/// The time that this thread has had a core.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
