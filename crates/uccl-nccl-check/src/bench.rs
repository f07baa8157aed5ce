//! `--bench`: the time that messages of collectives take, in NCCL's sizes and order, with GPUs that
//! cost no time.
//!
//! Two ranks pass the messages of one collective after the other. Protocol and channels are those
//! that NCCL chooses by the device's speed and the library's tuner.

mod drive;
mod pattern;

use std::{
    fmt::Write as _,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use uccl_nccl_abi::{
    plan::{Generation, Plan},
    tuner::{ALGORITHMS, PROTOCOLS, algorithm, collective, protocol},
};

use self::{
    drive::Channel,
    pattern::{Message, Pattern, Protocol},
};
use crate::{
    behaviours::{
        Behaviour, Over,
        tuner::{Call, Open},
    },
    rank::{Network, Rank, Registration},
};

/// The bench, as a rank runs it.
pub(crate) const BENCH: Behaviour = Behaviour {
    name: "bench",
    about: "the time of collectives' messages",
    over: Over::Nets,
    ranks: 2,
    is_apart: false,
    run,
};

const ALL_REDUCES: [usize; 8] =
    [8, 8 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 16 << 20];
const ALL_TO_ALLS: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
/// Bytes of a channel's memory in each direction.
const ROOM: usize = 4 << 20;
const MOST_CHANNELS: u32 = 16;
const BATCHES: usize = 5;
/// Collectives after a pause, and the pause, in which threads of a plugin fall asleep.
const LONE: usize = 15;
const PAUSE: Duration = Duration::from_millis(3);

/// The measurement of one collective.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    collective: String,
    bytes: usize,
    protocol: Protocol,
    channels: usize,
    /// Medians: one behind the other, and after a pause.
    us: f64,
    lone_us: f64,
    /// Waits for the scheduler of the first rank's process, and its cores, one behind the other.
    switches: f64,
    cores: f64,
}

/// All rows, as a table.
pub(crate) fn text(rows: &[Row]) -> String {
    let mut out = format!(
        "{:<12}{:>10}{:>10}{:>10}{:>12}{:>12}{:>10}{:>8}\n",
        "", "bytes", "protocol", "channels", "us", "lone us", "waits", "cores"
    );
    for row in rows {
        let protocol = format!("{:?}", row.protocol);
        let (name, bytes, channels) = (&row.collective, row.bytes, row.channels);
        let _ = writeln!(
            out,
            "{name:<12}{bytes:>10}{protocol:>10}{channels:>10}{:>12.1}{:>12.1}{:>10.1}{:>8.1}",
            row.us, row.lone_us, row.switches, row.cores
        );
    }
    out
}

fn run(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let plan = Generation::Hopper.plan(started.properties.speed_mbps.unsigned_abs());
    let plan = Plan { channels: plan.channels.min(MOST_CHANNELS), ..plan };
    let tuner = Open::newest(rank, 2, 2)?;
    let mut channels = Vec::new();
    for _ in 0..plan.channels {
        channels.push(channel(rank, &started)?);
    }
    let mut rows = Vec::new();
    for bytes in ALL_REDUCES {
        let (protocol, count) = chosen(bytes, plan, tuner.as_ref())?;
        let pattern = Pattern::all_reduce(bytes, protocol, count);
        rows.push(
            Bench { rank: &mut *rank, started: &started, channels: &channels, pattern }.row(
                "all_reduce",
                bytes,
                protocol,
            )?,
        );
    }
    for bytes in ALL_TO_ALLS {
        let pattern = Pattern::all_to_all(bytes);
        rows.push(
            Bench { rank: &mut *rank, started: &started, channels: &channels, pattern }.row(
                "all_to_all",
                bytes,
                Protocol::Simple,
            )?,
        );
    }
    if let Some(tuner) = tuner {
        tuner.close()?;
    }
    rank.meet()?;
    for one in channels {
        one.out.end(&started)?;
        one.into.end(&started)?;
        started.net.close(one.send)?;
        started.net.close(one.recv)?;
    }
    started.net.finalize(started.context)?;
    Ok(serde_json::to_string(&rows)?)
}

fn channel(rank: &mut Rank, started: &Network) -> Result<Channel> {
    let pair = [rank.one_way(started, 0, 1)?, rank.one_way(started, 1, 0)?];
    let [send, recv] = if rank.is_first() { pair } else { [pair[1], pair[0]] };
    let out = Registration::new(started, send, ROOM)?;
    let into = Registration::new(started, recv, ROOM)?;
    Ok(Channel { send, recv, out, into })
}

/// The protocol and the channels of an all-reduce.
fn chosen(bytes: usize, plan: Plan, tuner: Option<&Open>) -> Result<(Protocol, usize)> {
    let [ll_us, simple_us] = plan.all_reduce_us(bytes as u64);
    let mut table = [[-1.0; PROTOCOLS]; ALGORITHMS];
    table[algorithm::RING][protocol::LL] = ll_us as f32;
    table[algorithm::RING][protocol::SIMPLE] = simple_us as f32;
    let mut asked = 0;
    if let Some(tuner) = tuner {
        let call = Call {
            collective: collective::ALL_REDUCE,
            bytes,
            operations: 1,
            table,
            is_registered: 0,
        };
        (table, asked) = tuner.ask(&call)?;
    }
    let ring = table[algorithm::RING];
    let is_ll = ring[protocol::LL] < ring[protocol::SIMPLE];
    let protocol = if is_ll { Protocol::LL } else { Protocol::Simple };
    let count = match usize::try_from(asked) {
        Ok(asked) if asked > 0 => asked.min(plan.channels as usize),
        _ => pattern::channels(bytes, protocol, plan),
    };
    Ok((protocol, count))
}

/// The measurement of one pattern.
struct Bench<'a> {
    rank: &'a mut Rank,
    started: &'a Network,
    channels: &'a [Channel],
    pattern: Pattern,
}

impl Bench<'_> {
    fn row(mut self, collective: &str, bytes: usize, protocol: Protocol) -> Result<Row> {
        self.rank.step(format!("{collective} of {bytes} bytes"))?;
        let count = self.calls()?;
        let mut times = Vec::new();
        let (before, start) = (Usage::now(), Instant::now());
        for _ in 0..BATCHES {
            times.push(self.time(count)? / count as f64);
        }
        let (used, took) = (Usage::now(), start.elapsed());
        let all = (BATCHES * count) as f64;
        let mut lone = Vec::new();
        for _ in 0..LONE {
            thread::sleep(PAUSE);
            // Both begin together.
            self.pass(&alone(8))?;
            lone.push(self.time(1)?);
        }
        Ok(Row {
            collective: collective.into(),
            bytes,
            protocol,
            channels: self.pattern.messages.len(),
            us: median(times),
            lone_us: median(lone),
            switches: (used.switches - before.switches) as f64 / all,
            cores: (used.cpu_s - before.cpu_s) / took.as_secs_f64(),
        })
    }

    /// The collectives of a batch, as the first rank decides.
    fn calls(&mut self) -> Result<usize> {
        self.time(3)?;
        let once = self.time(3)? / 3.0;
        if self.rank.is_first() {
            let count = (self.rank.job.batch_ms as f64 * 1000.0 / once).clamp(1.0, 10_000.0) as u32;
            self.rank.tell(1, &count.to_ne_bytes())?;
            return Ok(count as usize);
        }
        let bytes = self.rank.hear(0)?;
        let bytes = bytes.try_into().ok().context("a number of four bytes")?;
        Ok(u32::from_ne_bytes(bytes) as usize)
    }

    /// Microseconds of so many collectives.
    fn time(&self, count: usize) -> Result<f64> {
        let start = Instant::now();
        for _ in 0..count {
            self.pass(&self.pattern)?;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    fn pass(&self, pattern: &Pattern) -> Result<()> {
        drive::pass(self.started, self.channels, pattern)
    }
}

/// A message each way over the first channel.
fn alone(bytes: usize) -> Pattern {
    let message = Message { bytes, receives: 0 };
    Pattern { messages: vec![vec![message]], depth: 1, room: bytes }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// The use of processors by this process.
struct Usage {
    cpu_s: f64,
    switches: i64,
}

impl Usage {
    fn now() -> Self {
        // SAFETY: numbers alone.
        let mut usage = unsafe { std::mem::zeroed::<libc::rusage>() };
        // SAFETY: the place outlives the call, which fails for no process that asks for itself.
        unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        Self { cpu_s: seconds(usage.ru_utime) + seconds(usage.ru_stime), switches: usage.ru_nvcsw }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_chooses_by_the_speed() {
        let of =
            |mbps, bytes| chosen(bytes, Generation::Hopper.plan(mbps), None).expect("a choice");
        assert_eq!(of(80_000, 64 << 10), (Protocol::LL, 8));
        assert_eq!(of(80_000, 1 << 20), (Protocol::Simple, 8));
        assert_eq!(of(48_000, 64 << 10), (Protocol::LL, 2));
        assert_eq!(of(48_000, 256 << 10), (Protocol::Simple, 2));
        assert_eq!(of(10_000, 64 << 10), (Protocol::Simple, 2));
    }
}
