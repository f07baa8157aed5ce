//! The side that leads: measures each point.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{
    control::{EndpointOptions, Phase, Point, Reply, Request, unexpected},
    kinds::{Direction, Memory, OpKind, TransportKind},
    peer::Peer,
    place,
    plan::BenchArgs,
    report::{GpuNames, Row, Verification},
    role::Role,
    side::{ListeningEndpoint, PointMemory, Side},
    stats::{Latencies, gb_per_s, median},
};

/// Rates are the median of this many batches.
const BATCHES: u32 = 5;

/// The fewest batches with a meaningful median.
const FEWEST_BATCHES: u32 = 3;

/// The most transfers of a batch.
const MAX_COUNT: u64 = 10_000_000;

/// Two endpoints with a connection between them.
pub(crate) struct Session<'a> {
    peer: &'a mut Peer,
    side: Side,
    /// Names of the two sides' GPUs.
    pub(crate) gpus: GpuNames,
    transport: TransportKind,
    duration: Duration,
    inflight: usize,
    slots: usize,
    verify: bool,
}

impl<'a> Session<'a> {
    pub(crate) fn open(
        peer: &'a mut Peer,
        args: &BenchArgs,
        transport: TransportKind,
    ) -> Result<Self> {
        let places = args.places(Memory::Heap, peer.gpu);
        let open = EndpointOptions {
            transport,
            checksum: args.checksum,
            streams: args.streams,
            loopback: peer.is_local(),
            timeout_ms: u64::try_from(args.timeout.as_millis())?,
            gpu: places.lead.gpu(),
        };
        // A phase may take as long as its transfers; the slowest is one that times out.
        peer.channel.set_patience(args.timeout + args.duration * 10);
        let theirs = EndpointOptions { gpu: places.serve.gpu(), ..open };
        let (side, gpus) = join(peer, &open, theirs)?;
        Ok(Self {
            peer,
            side,
            gpus,
            transport,
            duration: args.duration,
            inflight: args.inflight(),
            slots: args.slots(),
            verify: args.verify,
        })
    }

    /// The GPU that the other side uses, if it uses one.
    pub(crate) fn peer_gpu(&self) -> u32 {
        self.peer.gpu
    }

    /// Closes the session on both sides.
    pub(crate) fn close(self) -> Result<()> {
        self.peer.channel.order(&Request::Close)
    }

    pub(crate) fn measure(&mut self, point: Point) -> Result<Row> {
        let mut memory = prepare(self.peer, &self.side, point)?;
        let mut latency = BatchRates::default();
        let mut rate = BatchRates::default();
        let inflight = if point.op == OpKind::Pingpong { 1 } else { self.inflight };
        let latencies = match inflight {
            // With one outstanding, the rate follows from the same transfers.
            1 if point.op != OpKind::Notif => {
                let alone = self.phase(&point, 1);
                self.batches(&mut memory, alone, BATCHES, self.duration, &mut rate)?
            }
            inflight => {
                let alone = self.phase(&point, 1);
                let half = self.duration / 2;
                let latencies = self.batches(&mut memory, alone, 2, half, &mut latency)?;
                let many = Phase { ping_pong: false, ..self.phase(&point, inflight) };
                self.batches(&mut memory, many, BATCHES, half, &mut rate)?;
                latencies
            }
        };
        let verified = match self.verify {
            true => self.verify(&mut memory)?,
            false => (Verification::Skipped, None),
        };
        let path = memory.path(&self.side)?;
        self.peer.channel.order(&Request::Release)?;
        drop(memory);
        let hops = if point.op.goes_back_and_forth() { 2 } else { 1 };
        Ok(Row {
            gb_per_s: median(&rate.gb_per_s),
            latency_us: latencies.summary(hops),
            count: rate.count + latency.count,
            verified: verified.0,
            inflight: inflight as u64,
            note: verified
                .1
                .or_else(|| point.stream.then(|| "in the order of a stream".to_owned())),
            ..self.row(&point, path)
        })
    }

    fn row(&self, point: &Point, path: String) -> Row {
        Row {
            op: point.op.to_string(),
            path,
            transport: Some(self.transport.to_string()),
            memory: (point.op != OpKind::Notif).then(|| point.places.lead.to_string()),
            peer_memory: (point.op != OpKind::Notif).then(|| point.places.serve.to_string()),
            direction: Some(point.direction.to_string()),
            iovs: point.iovs as u64,
            total_bytes: point.size.saturating_mul(point.iovs as u64),
            inflight: self.inflight as u64,
            ..Row::limit("", point.size)
        }
    }

    /// A phase with `inflight` outstanding transfers; `batches` sets its count.
    fn phase(&self, point: &Point, inflight: usize) -> Phase {
        let ping_pong = point.op.goes_back_and_forth();
        Phase { count: 1, inflight, slots: inflight.min(self.slots), ping_pong, seed: None }
    }

    /// Runs batches of a phase that together take about `time`.
    fn batches(
        &mut self,
        memory: &mut PointMemory,
        phase: Phase,
        batches: u32,
        time: Duration,
        measured: &mut BatchRates,
    ) -> Result<Latencies> {
        let count = self.calibrate(memory, phase, time / batches)?;
        let mut all = Latencies::new();
        let started = Instant::now();
        for batch in 0..batches {
            // Where one transfer takes longer than a batch should, three batches must do.
            if batch >= FEWEST_BATCHES && started.elapsed() > time * 2 {
                break;
            }
            let (elapsed, latencies) = self.run_phase(memory, &Phase { count, ..phase })?;
            all.add(&latencies);
            measured.count += count;
            measured.gb_per_s.push(gb_per_s(memory.bytes(&phase, count), elapsed));
        }
        Ok(all)
    }

    /// The number of transfers that take about `time`. Its runs warm up the memory and paths of the
    /// batches; the time of the first is ignored, because it may include set-up.
    fn calibrate(&mut self, memory: &mut PointMemory, phase: Phase, time: Duration) -> Result<u64> {
        let least = phase.inflight as u64;
        let mut count = least;
        self.run_phase(memory, &Phase { count, ..phase })?;
        loop {
            let (elapsed, _) = self.run_phase(memory, &Phase { count, ..phase })?;
            let target = time.as_secs_f64() / elapsed.as_secs_f64().max(1e-9) * count as f64;
            if elapsed * 4 >= time || count >= MAX_COUNT {
                return Ok((target as u64).clamp(least, MAX_COUNT));
            }
            count = (target as u64).clamp(count * 2, count * 16).min(MAX_COUNT);
        }
    }

    /// Runs a phase on both sides; the elapsed time is the slower side's.
    fn run_phase(
        &mut self,
        memory: &mut PointMemory,
        phase: &Phase,
    ) -> Result<(Duration, Latencies)> {
        let together = memory.needs_both();
        if together {
            match self.peer.channel.ask(&Request::Go(*phase))? {
                Reply::Ready => {}
                other => return Err(unexpected(&other)),
            }
        }
        let started = Instant::now();
        let took = memory.run_phase(&self.side, phase, &self.peer.channel);
        if !together {
            let took = took?;
            return Ok((took.elapsed, took.latencies));
        }
        let finished = self.peer.channel.reply();
        let elapsed = started.elapsed();
        // Both may have failed because one did, so the error has the messages of both.
        match (took, finished) {
            (Ok(took), Ok(Reply::Finished { elapsed_ns })) => {
                let theirs = Duration::from_nanos(elapsed_ns).min(elapsed);
                Ok((took.elapsed.max(theirs), took.latencies))
            }
            (Ok(_), Ok(other)) => Err(unexpected(&other)),
            (Ok(_), Err(error)) => Err(error),
            (Err(error), Ok(_)) => Err(error),
            (Err(mine), Err(theirs)) => bail!("{mine:#}; {theirs:#}"),
        }
    }

    /// Runs one round and checks every byte.
    fn verify(&mut self, memory: &mut PointMemory) -> Result<(Verification, Option<String>)> {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).context("the system has no random numbers")?;
        let seed = u64::from_le_bytes(seed);
        self.peer.channel.send(&Request::Fill { seed })?;
        memory.fill(seed)?;
        match self.peer.channel.reply()? {
            Reply::Done => {}
            other => return Err(unexpected(&other)),
        }
        let slots = self.slots;
        let round =
            Phase { count: slots as u64, inflight: 1, slots, ping_pong: false, seed: Some(seed) };
        self.run_phase(memory, &round)?;
        let theirs = match self.peer.channel.ask(&Request::Check { seed })? {
            Reply::Checked { wrong } => wrong.map(|wrong| format!("the other side's {wrong}")),
            other => return Err(unexpected(&other)),
        };
        let wrong = match theirs {
            None => memory.check(seed)?,
            wrong => wrong,
        };
        Ok((if wrong.is_some() { Verification::No } else { Verification::Yes }, wrong))
    }
}

/// Connects an endpoint of this side, with the options `here`, with one of the peer's.
pub(crate) fn join(
    peer: &mut Peer,
    here: &EndpointOptions,
    there: EndpointOptions,
) -> Result<(Side, GpuNames)> {
    let listening = ListeningEndpoint::start(here)?;
    let this = here.gpu.map(place::name).transpose()?;
    let (port, other) = match peer.channel.ask(&Request::Open(there))? {
        Reply::Opened { port, gpu } => (port, gpu),
        other => return Err(unexpected(&other)),
    };
    let side = match listening.connect(peer.ip, port, &mut peer.channel.watch()?) {
        Ok(side) => side,
        Err(error) => {
            // The other side waits for a connection that will not come.
            peer.channel.send(&Request::Close)?;
            let _ = peer.channel.reply();
            let _ = peer.channel.reply()?;
            return Err(error.context(remedy(here.transport, peer)));
        }
    };
    match peer.channel.reply()? {
        Reply::Accepted => Ok((side, GpuNames { this, other })),
        other => Err(unexpected(&other)),
    }
}

/// Makes the memory of a point on both sides.
pub(crate) fn prepare(peer: &mut Peer, side: &Side, point: Point) -> Result<PointMemory> {
    let mut memory = PointMemory::new(side, point, Role::Lead)?;
    let adverts = memory.adverts()?;
    match peer.channel.ask(&Request::Prepare { point, adverts })? {
        Reply::Prepared { adverts } => memory.meet(adverts)?,
        other => return Err(unexpected(&other)),
    }
    Ok(memory)
}

#[derive(Default)]
struct BatchRates {
    gb_per_s: Vec<f64>,
    count: u64,
}

fn remedy(transport: TransportKind, peer: &Peer) -> String {
    match transport {
        TransportKind::Local => {
            "no path through this host's memory: are both processes on one host? \
             `uccl doctor` says what forbids it; --transport tcp does without"
        }
        devices if devices.needs_devices() => {
            "do both sides have devices of this kind on one network? `uccl topo` shows those of this \
             host; --transport tcp does without"
        }
        _ if peer.is_local() => "the two processes cannot connect on loopback; see `uccl doctor`",
        _ => {
            "the endpoints cannot connect: does a firewall stop the endpoint's port \
             (UCCL_P2P_BASE_PORT, 28100)?"
        }
    }
    .to_owned()
}

impl PointMemory {
    /// Bytes that a phase's transfers move, both ways.
    fn bytes(&self, phase: &Phase, count: u64) -> u64 {
        let point = self.point();
        let ways = match point.direction {
            Direction::Bi => 2,
            Direction::Uni if phase.ping_pong => 2,
            Direction::Uni => 1,
        };
        point.size * point.iovs as u64 * count * ways
    }
}
