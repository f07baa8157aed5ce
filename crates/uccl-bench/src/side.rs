//! One side of a benchmark on the engine: its endpoint, its memory of a point, its part of a phase.

use std::{
    collections::VecDeque,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::Range,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use quanta::Instant;
use uccl_p2p::{
    Bytes, Change, Checksum, Config, ConnId, Endpoint, Error, Iov, MrId, Op, Request, Signal,
    Status, TransferId, wire::advert::Advert,
};

use super::{
    buffer::{Buffer, POISON},
    control::{Channel, EndpointOptions, HangUp, Phase, Point, WireAdvert},
    flag::Flag,
    kinds::{ChecksumMode, OpKind},
    ordered_stream::OrderedStream,
    pattern,
    pieces::Pieces,
    place::{self, Place},
    role::Role,
    stats::Latencies,
};

/// Bytes of a word for signals.
const WORD: usize = 8;
/// How long two endpoints may take to meet.
const MEET: Duration = Duration::from_secs(10);

/// An endpoint that listens, before it has a connection.
pub(crate) struct ListeningEndpoint {
    endpoint: Endpoint,
    timeout: Duration,
}

/// An endpoint with one connection.
pub(crate) struct Side {
    endpoint: Endpoint,
    conn: ConnId,
    timeout: Duration,
}

impl ListeningEndpoint {
    pub(crate) fn start(open: &EndpointOptions) -> Result<Self> {
        let mut config = Config::from_env().context("an environment variable is not understood")?;
        if let Some(transport) = open.transport.setting() {
            config.transport = transport;
        }
        if let Some(checksum) = open.checksum {
            config.checksum = match checksum {
                ChecksumMode::Auto => Checksum::Auto,
                ChecksumMode::On => Checksum::On,
                ChecksumMode::Off => Checksum::Off,
            };
        }
        if let Some(streams) = open.streams {
            config.tcp_streams = streams;
        }
        if open.loopback {
            config.bind = Some(Ipv4Addr::LOCALHOST.into());
        }
        if let Some(gpu) = open.gpu {
            // Before a connection is waited for: without the GPU there is nothing to measure.
            place::context(gpu)?;
            config.gpu_index = gpu;
        }
        let endpoint = Endpoint::new(config).context("cannot start an endpoint")?;
        Ok(Self { endpoint, timeout: Duration::from_millis(open.timeout_ms) })
    }

    pub(crate) fn port(&self) -> u16 {
        self.endpoint.addr().port()
    }

    pub(crate) fn accept(self, watch: &mut HangUp) -> Result<Side> {
        let accepted = self.endpoint.accept(Some(MEET), watch);
        let conn = accepted.context("the leading side's endpoint did not connect")?.conn;
        Ok(Side { endpoint: self.endpoint, conn, timeout: self.timeout })
    }

    pub(crate) fn connect(self, ip: IpAddr, port: u16, watch: &mut HangUp) -> Result<Side> {
        let addr = SocketAddr::new(ip, port);
        let conn = self.endpoint.connect(addr, Some(MEET), watch)?;
        Ok(Side { endpoint: self.endpoint, conn, timeout: self.timeout })
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // Memory that peers may still write shows in `deregister`, which the Drop of `Slots` calls.
        let _ = self.endpoint.close();
    }
}

/// Registered memory of one role in a point, a buffer for each outstanding transfer.
struct Slots {
    endpoint: Endpoint,
    pieces: Pieces,
    slots: Vec<Slot>,
    /// The stream that its transfers keep the order of, if there is one.
    ordered: Option<OrderedStream>,
}

struct Slot {
    buffer: Buffer,
    mr: MrId,
    iovs: Vec<Iov>,
    /// Adverts of the peer's memory that it is copied to or from; empty for two-sided operations.
    adverts: Vec<Advert>,
    /// The word for signals, if the point has any.
    word: Option<Iov>,
    /// The peer's word.
    signal: Option<Signal>,
}

impl Slot {
    /// The last byte of its memory.
    fn flag(&self) -> Result<Flag<'_>> {
        let last = self.iovs.last().filter(|iov| iov.len > 0).context("pingpong needs a byte")?;
        // SAFETY: the byte is in the buffer, which lives as long as this borrow, and pingpong is
        // refused for memory that a processor cannot read.
        Ok(unsafe { Flag::at(last.ptr + last.len - 1) })
    }
}

impl Slots {
    fn new(side: &Side, point: &Point, role: Role) -> Result<Self> {
        let place = point.places.of(role);
        let len = usize::try_from(point.size).context("--size is larger than an address")?;
        let is_signalled = point.op == OpKind::Signal;
        let pieces = Pieces::new(point.iovs, len).context("--size times --iovs is too large")?;
        let mut this =
            Self { endpoint: side.endpoint.clone(), pieces, slots: Vec::new(), ordered: None };
        for _ in 0..point.slots {
            let word_at = pieces.buffer_len().next_multiple_of(WORD);
            let room = if is_signalled { word_at + WORD } else { pieces.buffer_len() };
            let buffer = Buffer::new(&side.endpoint, place, room)?;
            let (address, len) = (buffer.address(), buffer.len());
            // SAFETY: the buffer lives in the slot beside its region, and is let go of only after
            // the region has been deregistered (see Drop).
            let mr = unsafe { side.endpoint.register(address, len) }?;
            let iov = |piece: Range<usize>| {
                let ptr = address + piece.start;
                Iov { mr, ptr, len: piece.len() }
            };
            let iovs = pieces.iter().map(iov).collect();
            let word = is_signalled.then(|| iov(word_at..word_at + WORD));
            this.slots.push(Slot { buffer, mr, iovs, adverts: Vec::new(), word, signal: None });
        }
        Ok(this)
    }

    /// From now on its transfers are in the order of a stream, if the point's are to be.
    fn in_order(mut self, point: &Point, role: Role) -> Result<Self> {
        if let (true, Place::Gpu(gpu)) = (point.stream, point.places.of(role)) {
            let ordered = OrderedStream::new(gpu, point.op, self.slots.len(), point.size as usize)?;
            self.ordered = Some(ordered);
        }
        Ok(self)
    }

    fn advertise(&self) -> Result<Vec<WireAdvert>> {
        let advert = |iov: &Iov| Ok(self.endpoint.advertise(iov.mr, iov.ptr, iov.len)?.into());
        self.slots.iter().flat_map(|slot| slot.iovs.iter().chain(&slot.word)).map(advert).collect()
    }

    fn meet(&mut self, adverts: Vec<WireAdvert>) -> Result<()> {
        let count = |slot: &Slot| slot.iovs.len() + usize::from(slot.word.is_some());
        let wanted: usize = self.slots.iter().map(count).sum();
        if adverts.len() != wanted {
            bail!("the other side sent {} adverts, not {wanted}", adverts.len());
        }
        let mut adverts = adverts.into_iter().map(Advert::from);
        for slot in &mut self.slots {
            slot.adverts = adverts.by_ref().take(slot.iovs.len()).collect();
            let word = slot.word.and_then(|_| adverts.next());
            // The word already holds this value: nothing but the pieces may change.
            let change = Change::Set(u64::from_ne_bytes([POISON; WORD]));
            let signal = |advert| Signal { advert, change, strong: false };
            slot.signal = word.map(signal);
        }
        Ok(())
    }

    fn slot_seed(seed: u64, index: usize) -> u64 {
        seed.rotate_left(32).wrapping_add(index as u64)
    }

    fn fill(&mut self, seed: u64) -> Result<()> {
        let mut slots = self.slots.iter_mut().enumerate();
        slots.try_for_each(|(index, slot)| {
            slot.buffer.fill(&self.pieces, Self::slot_seed(seed, index))?;
            self.ordered.as_ref().map_or(Ok(()), |ordered| ordered.keep(index, slot.iovs[0].ptr))
        })
    }

    fn poison(&mut self) -> Result<()> {
        self.slots.iter_mut().try_for_each(|slot| slot.buffer.poison())
    }

    fn check(&self, seed: u64) -> Result<Option<String>> {
        for (index, slot) in self.slots.iter().enumerate() {
            let mut wrong = slot.buffer.check(&self.pieces, Self::slot_seed(seed, index))?;
            if let (None, Some(ordered)) = (&wrong, &self.ordered) {
                wrong = ordered.check(index, slot.iovs[0].ptr)?;
            }
            if let Some(wrong) = wrong {
                return Ok(Some(format!("buffer {index}: {wrong}")));
            }
        }
        Ok(None)
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // A stream that failed has ended its work too.
        let _ = self.ordered.as_ref().map(OrderedStream::finish);
        for slot in self.slots.drain(..) {
            // A buffer that peers may still write to is leaked. A region that is unknown has ended
            // with its endpoint.
            match self.endpoint.deregister(slot.mr) {
                Ok(()) | Err(Error::UnknownRegion(_)) => {}
                Err(_) => std::mem::forget(slot.buffer),
            }
        }
    }
}

/// A side's memory for one point.
pub(crate) struct PointMemory {
    point: Point,
    role: Role,
    /// Memory of this side's own transfers.
    active: Option<Slots>,
    /// Memory that the other side's transfers use.
    passive: Option<Slots>,
    payload: Bytes,
    /// Transfers of earlier phases, the same number on both sides.
    rounds: u64,
}

/// Whether a side posts transfers, or is the target of the other side's, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Roles {
    active: bool,
    passive: bool,
}

impl Roles {
    fn of(role: Role, point: &Point) -> Self {
        let both = point.goes_both_ways();
        match role {
            Role::Lead => Self { active: true, passive: both },
            Role::Serve => Self { active: both, passive: true },
        }
    }
}

/// Times of a phase on this side.
pub(crate) struct PhaseTimes {
    pub(crate) elapsed: Duration,
    pub(crate) latencies: Latencies,
}

impl PointMemory {
    pub(crate) fn new(side: &Side, point: Point, role: Role) -> Result<Self> {
        let roles = Roles::of(role, &point);
        let memory = |wanted: bool| match wanted && point.op != OpKind::Notif {
            true => Slots::new(side, &point, role).map(Some),
            false => Ok(None),
        };
        let mut active = memory(roles.active)?;
        if let Some(slots) = active.take() {
            active = Some(slots.in_order(&point, role)?);
        }
        let passive = memory(roles.passive)?;
        if let (OpKind::Pingpong, Some(slots)) = (point.op, &passive) {
            slots.slots.iter().try_for_each(|slot| slot.flag().map(|flag| flag.clear()))?;
        }
        let payload_len = if point.op == OpKind::Notif { point.size as usize } else { 0 };
        Ok(Self { point, role, active, passive, payload: vec![0; payload_len].into(), rounds: 0 })
    }

    pub(crate) fn point(&self) -> &Point {
        &self.point
    }

    /// Whether the other side has something to do while this one's transfers run.
    pub(crate) fn needs_both(&self) -> bool {
        self.point.goes_both_ways() || self.is_two_sided()
    }

    fn is_two_sided(&self) -> bool {
        matches!(self.point.op, OpKind::Notif | OpKind::Send)
    }

    /// Adverts for the other side's transfers.
    pub(crate) fn adverts(&self) -> Result<Vec<WireAdvert>> {
        match (&self.passive, self.point.op) {
            (Some(slots), op) if op.is_one_sided() => slots.advertise(),
            _ => Ok(Vec::new()),
        }
    }

    /// Takes the other side's adverts for this side's transfers.
    pub(crate) fn meet(&mut self, adverts: Vec<WireAdvert>) -> Result<()> {
        match (&mut self.active, self.point.op) {
            (Some(slots), op) if op.is_one_sided() => slots.meet(adverts),
            _ => Ok(()),
        }
    }

    /// The path that this side's transfers take.
    pub(crate) fn path(&self, side: &Side) -> Result<String> {
        match self.first_transfer().is_some() {
            true => self.one_sided_path(side).map(str::to_owned),
            false => Ok(side.endpoint.connection(side.conn)?.path),
        }
    }

    /// The path of this side's transfers, which need the other side's adverts.
    pub(crate) fn one_sided_path(&self, side: &Side) -> Result<&'static str> {
        let (mr, advert) = self.first_transfer().context("no advert of the other side's memory")?;
        Ok(side.endpoint.path_from(side.conn, mr, advert)?)
    }

    fn first_transfer(&self) -> Option<(MrId, &Advert)> {
        let slot = self.active.as_ref()?.slots.first()?;
        Some((slot.mr, slot.adverts.first()?))
    }

    /// Fills source memory and poisons destination memory.
    pub(crate) fn fill(&mut self, seed: u64) -> Result<()> {
        let (sources, destinations) = match self.point.op {
            OpKind::Read => (&mut self.passive, &mut self.active),
            _ => (&mut self.active, &mut self.passive),
        };
        sources.iter_mut().try_for_each(|slots| slots.fill(seed))?;
        destinations.iter_mut().try_for_each(Slots::poison)
    }

    /// Checks destination memory; returns a description of the first fault.
    pub(crate) fn check(&self, seed: u64) -> Result<Option<String>> {
        let destinations = match self.point.op {
            OpKind::Read => &self.active,
            _ => &self.passive,
        };
        destinations.as_ref().map_or(Ok(None), |slots| slots.check(seed))
    }

    /// Does this side's part of a phase, until it is done or the other side hangs up.
    pub(crate) fn run_phase(
        &mut self,
        side: &Side,
        phase: &Phase,
        channel: &Channel,
    ) -> Result<PhaseTimes> {
        if let Some(seed) = phase.seed {
            let mut payload = vec![0; self.payload.len()];
            pattern::fill(&mut payload, seed);
            self.payload = payload.into();
        }
        let first = self.rounds;
        self.rounds += phase.count;
        let this = &*self;
        let (mut mine, mut theirs) = (channel.watch()?, channel.watch()?);
        let roles = Roles::of(this.role, &this.point);
        let started = Instant::now();
        let latencies = match (roles.active, roles.passive && this.is_two_sided()) {
            _ if phase.ping_pong && this.point.op == OpKind::Pingpong => {
                this.exchange_writes(side, first..first + phase.count, &mut mine)?
            }
            _ if phase.ping_pong => this.ping_pong(side, phase, &mut mine)?,
            (true, false) => this.post_all(side, phase, &mut mine)?,
            (false, true) => {
                this.serve_all(side, phase, &mut mine)?;
                Latencies::new()
            }
            (false, false) => Latencies::new(),
            (true, true) => thread::scope(|scope| {
                let serving = scope.spawn(|| this.serve_all(side, phase, &mut theirs));
                let latencies = this.post_all(side, phase, &mut mine);
                serving.join().map_err(|_| anyhow!("the receiving thread panicked"))??;
                latencies
            })?,
        };
        Ok(PhaseTimes { elapsed: started.elapsed(), latencies })
    }

    fn post_all(&self, side: &Side, phase: &Phase, watch: &mut HangUp) -> Result<Latencies> {
        match self.point.op {
            OpKind::Notif => {
                side.window(phase, watch, |_| side.notify(&self.payload))?;
                Ok(Latencies::new())
            }
            OpKind::Read => side.transfers(phase, Op::Read, self.active.as_ref(), watch),
            OpKind::Send => side.transfers(phase, Op::Send, self.active.as_ref(), watch),
            OpKind::Write | OpKind::Pingpong | OpKind::Signal => {
                side.transfers(phase, Op::Write, self.active.as_ref(), watch)
            }
        }
    }

    fn serve_all(&self, side: &Side, phase: &Phase, watch: &mut HangUp) -> Result<()> {
        match self.point.op {
            OpKind::Notif => side.notified(phase.count, &self.expected(phase), watch),
            OpKind::Read | OpKind::Write | OpKind::Pingpong | OpKind::Signal => Ok(()),
            OpKind::Send => {
                side.transfers(phase, Op::Recv, self.passive.as_ref(), watch).map(|_| ())
            }
        }
    }

    fn ping_pong(&self, side: &Side, phase: &Phase, watch: &mut HangUp) -> Result<Latencies> {
        let expected = self.expected(phase);
        let mut latencies = Latencies::new();
        for _ in 0..phase.count {
            let sent = match self.role {
                Role::Lead => {
                    let started = Instant::now();
                    let sent = side.notify(&self.payload)?;
                    side.notified(1, &expected, watch)?;
                    latencies.record(started.elapsed());
                    sent
                }
                Role::Serve => {
                    side.notified(1, &expected, watch)?;
                    side.notify(&self.payload)?
                }
            };
            side.finish(sent, watch)?;
        }
        Ok(latencies)
    }

    /// Writes back and forth, each side waiting for the other's in its own memory.
    fn exchange_writes(
        &self,
        side: &Side,
        rounds: Range<u64>,
        watch: &mut HangUp,
    ) -> Result<Latencies> {
        let (Some(mine), Some(theirs)) = (&self.active, &self.passive) else {
            bail!("a phase was asked for before its memory");
        };
        let (mine, theirs) = (&mine.slots[0], &theirs.slots[0]);
        let (out, back) = (mine.flag()?, theirs.flag()?);
        let request = side.request(Op::Write, mine);
        let mut latencies = Latencies::new();
        for round in rounds {
            let started = Instant::now();
            if self.role == Role::Serve {
                back.await_round(round, side.timeout, watch)?;
            }
            out.raise(round);
            side.endpoint.run(&request, watch)?;
            if self.role == Role::Lead {
                back.await_round(round, side.timeout, watch)?;
                latencies.record(started.elapsed());
            }
        }
        Ok(latencies)
    }

    fn expected(&self, phase: &Phase) -> ExpectedNotification {
        ExpectedNotification { len: self.payload.len(), seed: phase.seed }
    }
}

/// The expected length and pattern of each notification of a phase.
struct ExpectedNotification {
    len: usize,
    seed: Option<u64>,
}

impl ExpectedNotification {
    fn check(&self, payload: &[u8]) -> Result<()> {
        if payload.len() != self.len {
            bail!("a notification of {} bytes arrived as {}", self.len, payload.len());
        }
        match self.seed.and_then(|seed| pattern::mismatch(payload, seed)) {
            Some(at) => bail!("a notification arrived wrong from its byte {at} on"),
            None => Ok(()),
        }
    }
}

impl Side {
    /// Runs a phase's transfers of one kind. One at a time they run on this thread and are timed
    /// one by one.
    fn transfers(
        &self,
        phase: &Phase,
        op: Op,
        slots: Option<&Slots>,
        watch: &mut HangUp,
    ) -> Result<Latencies> {
        if let Some(Slots { slots, ordered: Some(ordered), .. }) = slots {
            return self.ordered_transfers(phase, op, (slots, ordered), watch);
        }
        let slots = slots.map(|slots| &slots.slots[..]).unwrap_or_default();
        let slots = &slots[..phase.slots.min(slots.len())];
        if slots.is_empty() {
            bail!("a phase was asked for before its memory");
        }
        let request = |index: u64| self.request(op, &slots[(index % slots.len() as u64) as usize]);
        let mut latencies = Latencies::new();
        match phase.inflight {
            1 => {
                for index in 0..phase.count {
                    let started = Instant::now();
                    self.endpoint.run(&request(index), watch)?;
                    latencies.record(started.elapsed());
                }
            }
            _ => self.window(phase, watch, |index| Ok(self.endpoint.post(&request(index))?))?,
        }
        Ok(latencies)
    }

    /// As `transfers`, in the order of a stream.
    fn ordered_transfers(
        &self,
        phase: &Phase,
        op: Op,
        (slots, ordered): (&[Slot], &OrderedStream),
        watch: &mut HangUp,
    ) -> Result<Latencies> {
        let turns = phase.slots.clamp(1, slots.len()) as u64;
        let mut latencies = Latencies::new();
        let step = |index: u64| {
            let index = (index % turns) as usize;
            self.step(op, &slots[index], index, ordered)
        };
        match phase.inflight {
            1 => {
                for index in 0..phase.count {
                    let started = Instant::now();
                    let transfer = step(index)?;
                    self.finish(transfer, watch).inspect_err(|_| {
                        let _ = self.endpoint.cancel(transfer);
                    })?;
                    latencies.record(started.elapsed());
                }
            }
            _ => self.window(phase, watch, step)?,
        }
        ordered.finish()?;
        Ok(latencies)
    }

    /// Enqueues some work, a transfer after it, and some work after that.
    fn step(
        &self,
        op: Op,
        slot: &Slot,
        index: usize,
        ordered: &OrderedStream,
    ) -> Result<TransferId> {
        let piece = slot.iovs[0].ptr;
        ordered.before(index, piece)?;
        let stream = ordered.stream();
        let request = Request { after: Some(stream), ..self.request(op, slot) };
        let transfer = self.endpoint.post(&request)?;
        let held = self.endpoint.hold_stream(transfer, stream).map_err(anyhow::Error::from);
        if let Err(error) = held.and_then(|()| ordered.after(index, piece)) {
            let _ = self.endpoint.cancel(transfer);
            return Err(error);
        }
        Ok(transfer)
    }

    fn request<'a>(&self, op: Op, slot: &'a Slot) -> Request<'a> {
        let plain = Request::new(self.conn, op, &slot.iovs, &slot.adverts);
        Request { timeout: Some(self.timeout), signal: slot.signal, ..plain }
    }

    /// Posts a phase's transfers, as many at once as it allows, and sees each to its end.
    fn window(
        &self,
        phase: &Phase,
        watch: &mut HangUp,
        mut post: impl FnMut(u64) -> Result<TransferId>,
    ) -> Result<()> {
        let mut under_way = VecDeque::with_capacity(phase.inflight);
        let mut all = || -> Result<()> {
            for index in 0..phase.count {
                if under_way.len() >= phase.inflight
                    && let Some(oldest) = under_way.pop_front()
                {
                    self.finish(oldest, watch)?;
                }
                under_way.push_back(post(index)?);
            }
            while let Some(oldest) = under_way.pop_front() {
                self.finish(oldest, watch)?;
            }
            Ok(())
        };
        let result = all();
        // After a failure no byte of the others may land in memory that is about to go.
        for transfer in under_way {
            let _ = self.endpoint.cancel(transfer);
        }
        result
    }

    fn finish(&self, transfer: TransferId, watch: &mut HangUp) -> Result<()> {
        match self.endpoint.wait(transfer, Some(self.timeout), watch)? {
            Status::Done(_) => Ok(()),
            Status::Failed(error) => Err(error.into()),
            Status::Pending => bail!("a transfer took longer than --timeout {:?}", self.timeout),
        }
    }

    fn notify(&self, payload: &Bytes) -> Result<TransferId> {
        Ok(self.endpoint.send_notif(self.conn, payload.clone(), Some(self.timeout))?)
    }

    fn notified(
        &self,
        count: u64,
        expected: &ExpectedNotification,
        watch: &mut HangUp,
    ) -> Result<()> {
        let mut missing = count;
        while missing > 0 {
            let notifs = self.endpoint.wait_notifs(Some(self.timeout), watch)?;
            if notifs.is_empty() {
                bail!("{missing} of {count} notifications did not come within {:?}", self.timeout);
            }
            notifs.iter().try_for_each(|notif| expected.check(&notif.payload))?;
            let surplus = || format!("{} notifications too many", notifs.len() as u64 - missing);
            missing = missing.checked_sub(notifs.len() as u64).with_context(surplus)?;
        }
        Ok(())
    }
}
