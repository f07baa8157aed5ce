//! The limits of this machine, measured without the engine in the same run: the ceilings for
//! transfers.
//!
//! | row | measurement |
//! | --- | --- |
//! | `memcpy` | one thread copies between two buffers of its own, over and over |
//! | `vm-read`, `vm-write` | `process_vm_readv` and `process_vm_writev` on another process's memory |
//! | `tcp-stream` | one TCP stream, blocking calls of 1 MiB, the better of cubic and the default |
//! | `tcp-rtt` | round trip of 64 bytes over TCP, both sides spinning |
//! | `shm-rtt` | round trip of 64 bytes through memory that two processes share, both spinning |
//! | `thread-hop` | one way between two threads through a single-producer, single-consumer queue |
//! | `put`, `get` | where a side is a GPU, instead: its driver's copies to the other side's kind of memory and from it, one after the other |
//! | `put-sync`, `get-sync` | such a copy and the wait for it |

mod gpu;
mod memcpy;
mod shm;
mod tcp;
mod threads;
mod vm;

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use super::{
    control::{Channel, LimitRequest, Reply},
    kinds::DeviceKind,
    peer::Peer,
    plan::BenchArgs,
    report::Row,
    size::Size,
    stats::{Latencies, gb_per_s, median},
};

/// Does the other side's part. `lead` is the leading side's address, or nothing if it is this
/// process's parent: only a parent may name file descriptors and receive addresses.
pub(crate) fn serve(
    request: &LimitRequest,
    channel: &mut Channel,
    lead: Option<IpAddr>,
) -> Result<Reply> {
    match (request, lead) {
        (LimitRequest::Memory { len }, None) => vm::serve(*len, channel),
        (LimitRequest::Shared { pid, fd }, None) => shm::serve(*pid, *fd, channel),
        (LimitRequest::TcpEcho, _) => tcp::serve_echo(channel, lead),
        (LimitRequest::TcpSink, _) => tcp::serve_sink(channel, lead),
        _ => bail!("memory is shared with a process of this host only"),
    }
}

/// Sizes of limits that have a size, when none are asked for and no transfers are measured.
const SIZES: [u64; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

fn sizes(args: &BenchArgs) -> Vec<Size> {
    match args.limits && args.size.is_empty() {
        true => SIZES.map(Size).to_vec(),
        // As many as the longest vectors leave of the default sweep.
        false => args.sizes(args.iovs.iter().copied().max().unwrap_or(1)),
    }
}

/// Whether the limits are a GPU's copies: within one host, and if a GPU is on one side.
fn of_gpus(args: &BenchArgs) -> bool {
    let gpu = [args.device, args.peer_device()].contains(&DeviceKind::Gpu);
    gpu && args.connect.is_none()
}

/// How many rows `measure` will make.
pub(crate) fn count(args: &BenchArgs) -> usize {
    match args.connect {
        _ if of_gpus(args) => sizes(args).len() * gpu::ROWS,
        Some(_) => sizes(args).len() + 3,
        None => sizes(args).len() * 3 + 4,
    }
}

/// Measures every limit and hands over its rows as they come.
pub(crate) fn measure(peer: &mut Peer, args: &BenchArgs, mut row: impl FnMut(Row)) -> Result<()> {
    let time = args.duration;
    let sizes = sizes(args);
    if of_gpus(args) {
        return gpu::measure(args.places(args.memory[0], peer.gpu), &sizes, time, &mut row);
    }
    for &size in &sizes {
        row(memcpy::measure(size, time)?);
    }
    if peer.is_local() {
        vm::measure(&mut peer.channel, &sizes, time, &mut row)?;
        row(shm::measure(&mut peer.channel, time)?);
    }
    row(tcp::measure_stream(&mut peer.channel, peer.ip, time)?);
    row(tcp::measure_round_trip(&mut peer.channel, peer.ip, time)?);
    row(threads::measure(time)?);
    Ok(())
}

const BATCHES: u32 = 5;

/// Rate of calls that move `bytes` each: median of batches that together take about `time`, and how
/// many calls they were.
fn rate(
    bytes: u64,
    time: Duration,
    mut call: impl FnMut() -> Result<()>,
) -> Result<(Option<f64>, u64)> {
    rate_of(bytes, time, |count| {
        let started = Instant::now();
        for _ in 0..count {
            call()?;
        }
        Ok(started.elapsed())
    })
}

/// As [`rate`], for a batch of calls that returns its own time.
fn rate_of(
    bytes: u64,
    time: Duration,
    mut batch: impl FnMut(u64) -> Result<Duration>,
) -> Result<(Option<f64>, u64)> {
    let target = time / BATCHES;
    let mut count = 1;
    let mut elapsed = batch(count)?;
    while elapsed * 4 < target {
        count *= 4;
        elapsed = batch(count)?;
    }
    let scaled = count as f64 * target.as_secs_f64() / elapsed.as_secs_f64().max(1e-9);
    let count = (scaled as u64).max(1);
    let mut rates = Vec::new();
    for _ in 0..BATCHES {
        rates.push(gb_per_s(bytes * count, batch(count)?));
    }
    Ok((median(&rates), count * u64::from(BATCHES)))
}

/// Latencies of calls one by one, for about `time`.
fn latencies(time: Duration, mut call: impl FnMut() -> Result<()>) -> Result<Latencies> {
    let mut latencies = Latencies::new();
    call()?;
    let end = Instant::now() + time;
    let mut now = Instant::now();
    while now < end {
        call()?;
        let after = Instant::now();
        latencies.record(after - now);
        now = after;
    }
    Ok(latencies)
}

/// Rate and latency of one size.
fn sized(
    op: &str,
    size: Size,
    time: Duration,
    mut call: impl FnMut() -> Result<()>,
) -> Result<Row> {
    let (gb_per_s, count) = rate(size.0, time * 3 / 4, &mut call)?;
    let latencies = latencies(time / 4, call)?;
    Ok(Row { gb_per_s, count, latency_us: latencies.summary(1), ..Row::limit(op, size.0) })
}

/// Spinning that lets others run now and then, and ends if nothing comes.
struct Spin {
    turns: u32,
    since: Option<Instant>,
}

const SPINS_BETWEEN_YIELDS: u32 = 1 << 8;
const LONGEST_SPIN: Duration = Duration::from_secs(10);

impl Spin {
    fn new() -> Self {
        Self { turns: 0, since: None }
    }

    fn turn(&mut self) -> Result<()> {
        std::hint::spin_loop();
        self.turns += 1;
        if self.turns.is_multiple_of(SPINS_BETWEEN_YIELDS) {
            std::thread::yield_now();
            if self.since.get_or_insert_with(Instant::now).elapsed() > LONGEST_SPIN {
                bail!("the other side has been silent for {LONGEST_SPIN:?}");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_counts_its_calls() {
        let mut calls = 0;
        let (rate, count) = rate(1000, Duration::from_millis(5), || {
            calls += 1;
            std::thread::sleep(Duration::from_micros(100));
            Ok(())
        })
        .expect("a rate");
        assert!(count >= u64::from(BATCHES) && count < calls);
        // No call takes less than it sleeps.
        assert!(rate.is_some_and(|rate| rate > 0.0 && rate <= 1000.0 / 100e-6 / 1e9));
    }

    #[test]
    fn a_failing_call_ends_the_measurement() {
        assert!(rate(1, Duration::from_millis(1), || bail!("no")).is_err());
        assert!(latencies(Duration::from_millis(1), || bail!("no")).is_err());
    }
}
