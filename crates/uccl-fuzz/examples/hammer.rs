//! Throws random and mutated bytes at every parser of uccl-wire.
//!
//! ```text
//! cargo run --release -p uccl-fuzz --example hammer -- [COUNT [SEED]]
//! ```
//!
//! Frame i depends on the seed and i alone, so a failure is found again with its seed. Fails if a
//! parser panics, or if one ever takes more memory than its input justifies.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    thread,
    time::Instant,
};

use fastrand::Rng;
use peak_alloc::PeakAlloc;
use uccl_fuzz::{PARSERS, samples};

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Most bytes of a frame.
const MAX_FRAME_LEN: usize = 4096;
/// The most memory that a thread may take beyond its start: some frames, and the parsers' results.
const MAX_GROWTH_BYTES: usize = 1 << 20;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let number = |arg: Option<String>, default: u64| arg.map_or(Ok(default), |a| a.parse());
    let (Ok(count), Ok(seed)) =
        (number(args.next(), 1_000_000), number(args.next(), fastrand::u64(..)))
    else {
        eprintln!("usage: hammer [COUNT [SEED]]");
        return ExitCode::from(2);
    };
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    println!("{count} frames, seed {seed}, {threads} threads");
    let samples = samples();
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let start = Instant::now();
    let samples = &samples;
    let results: Vec<_> = thread::scope(|scope| {
        let first = 0..threads as u64;
        let workers: Vec<_> = first
            .map(|first| {
                let frames = (first..count).step_by(threads);
                scope.spawn(move || frames.map(|i| hammer(samples, seed, i)).sum())
            })
            .collect();
        workers.into_iter().map(|w| w.join().unwrap_or(Tally::lost())).collect()
    });
    let tally: Tally = results.into_iter().sum();
    let growth = ALLOCATED.peak_usage().saturating_sub(before);
    let seconds = start.elapsed().as_secs_f64();
    for (parser, taken) in PARSERS.iter().zip(tally.taken) {
        println!("{:>14} took {taken} as valid", parser.name);
    }
    println!("{seconds:.1} s, {} panics, {growth} bytes at most on top", tally.panics);
    let bounded = growth <= MAX_GROWTH_BYTES * threads;
    if !bounded {
        eprintln!("more than the {} bytes allowed", MAX_GROWTH_BYTES * threads);
    }
    if tally.panics == 0 && bounded { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Counts of the parsers' results.
#[derive(Default)]
struct Tally {
    taken: [u64; PARSERS.len()],
    panics: u64,
}

impl Tally {
    /// A thread that ended early.
    fn lost() -> Self {
        Self { panics: 1, ..Self::default() }
    }
}

impl std::iter::Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(tallies: I) -> Self {
        tallies.fold(Self::default(), |mut sum, tally| {
            sum.taken.iter_mut().zip(tally.taken).for_each(|(sum, taken)| *sum += taken);
            sum.panics += tally.panics;
            sum
        })
    }
}

/// Throws frame `index` at every parser.
fn hammer(samples: &[Vec<u8>], seed: u64, index: u64) -> Tally {
    let mut tally = Tally::default();
    let frame =
        frame(samples, &mut Rng::with_seed(seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    for (parser, taken) in PARSERS.iter().zip(&mut tally.taken) {
        match catch_unwind(AssertUnwindSafe(|| (parser.takes)(&frame))) {
            Ok(valid) => *taken += u64::from(valid),
            Err(_) => {
                tally.panics += 1;
                eprintln!("{} panicked at frame {index} of seed {seed}: {frame:02x?}", parser.name);
            }
        }
    }
    tally
}

/// One frame in eight is random, the others are samples with a few changes.
fn frame(samples: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    if rng.u8(..8) == 0 {
        let longest = [16, 64, 256, MAX_FRAME_LEN][rng.usize(..4)];
        let mut bytes = vec![0; rng.usize(..=longest)];
        rng.fill(&mut bytes);
        return bytes;
    }
    let mut bytes = samples[rng.usize(..samples.len())].clone();
    for _ in 0..rng.u8(1..5) {
        mutate(&mut bytes, samples, rng);
    }
    bytes.truncate(MAX_FRAME_LEN);
    bytes
}

fn mutate(bytes: &mut Vec<u8>, samples: &[Vec<u8>], rng: &mut Rng) {
    let at = rng.usize(..=bytes.len());
    match rng.u8(..7) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, rng.u8(..)),
        2 => bytes.extend_from_slice(&samples[rng.usize(..samples.len())]),
        3 => drop(bytes.drain(at..(at + rng.usize(..9)).min(bytes.len()))),
        4 => overwrite(bytes, at, rng),
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << rng.u8(..8);
            }
        }
    }
}

/// Writes a number that is the edge of some field's range.
fn overwrite(bytes: &mut [u8], at: usize, rng: &mut Rng) {
    let edges = [0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 1 << 20, u32::MAX.into(), u64::MAX, 1 << 63];
    let edge = edges[rng.usize(..edges.len())].to_le_bytes();
    let width = 1 << rng.u8(..4);
    for (byte, edge) in bytes.iter_mut().skip(at).zip(&edge[..width]) {
        *byte = *edge;
    }
}
