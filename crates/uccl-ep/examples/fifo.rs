//! How many commands a second go through one ring, from one producer to one proxy: the best and the
//! median of some rounds.
//!
//! `cargo run --release -p uccl-ep --example fifo`

#[path = "../src/far/command.rs"]
#[allow(dead_code, reason = "as in the library")]
mod command;
#[path = "../src/far/fifo.rs"]
#[allow(dead_code, reason = "as in the library")]
mod fifo;

use std::{thread, time::Instant};

use crate::{
    command::Command,
    fifo::{Fifo, Popper},
};

const COMMANDS: usize = 4_000_000;
const ROUNDS: usize = 15;

fn main() -> std::io::Result<()> {
    let mut rates = Vec::new();
    for _ in 0..ROUNDS {
        rates.push(round()?);
    }
    rates.sort_by(f64::total_cmp);
    println!(
        "{COMMANDS} commands: {:.1} million a second at best, {:.1} in the median of {ROUNDS}",
        rates[ROUNDS - 1],
        rates[ROUNDS / 2]
    );
    Ok(())
}

/// Millions a second.
fn round() -> std::io::Result<f64> {
    let fifo = Fifo::in_memory(2048)?;
    let mut popper = Popper::new(fifo.clone());
    let began = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            for at in 0..COMMANDS {
                let (source, target) = (at % 4096 * 32, at % 1024 * 32);
                let write = Command::Write { peer: 1, source, target, len: 7168 };
                let Some(halves) = write.to_halves() else { return };
                let mut looks = 0;
                while !fifo.try_push(halves) {
                    pause(&mut looks);
                }
            }
        });
        let (mut taken, mut looks) = (0, 0);
        while taken < COMMANDS {
            match popper.pop().map(Command::of_halves) {
                Some(Command::Write { len: 7168, .. }) => (taken, looks) = (taken + 1, 0),
                Some(other) => panic!("{other:?} was never pushed"),
                None => pause(&mut looks),
            }
        }
    });
    Ok(COMMANDS as f64 / began.elapsed().as_secs_f64() / 1e6)
}

/// Spins, and then lets others have the core: the other side may need it.
fn pause(looks: &mut u32) {
    *looks += 1;
    match looks {
        ..256 => std::hint::spin_loop(),
        _ => thread::yield_now(),
    }
}
