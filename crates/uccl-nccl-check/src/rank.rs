//! A rank of a check: its table, its peers, and waits with a deadline.

use std::{
    collections::VecDeque,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    library::{Library, NetTable},
    memory::GuardedMemory,
    message::{Fate, FromRank, Job, Lines, Outcome, ToRank},
    net::{Comm, Completion, Handle, Net, Part, Pointer, Properties, Side},
    rma_table::RmaTable,
};

/// The longest wait for anything that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A rank's means.
pub(crate) struct Rank {
    pub(crate) job: Job,
    lines: Lines,
    early: VecDeque<(usize, Vec<u8>)>,
    pub(crate) library: Option<Library>,
}

/// Why a check does not apply.
#[derive(Debug)]
pub(crate) struct NotApplicable(pub(crate) String);

impl std::fmt::Display for NotApplicable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotApplicable {}

impl Rank {
    /// A rank with its job, from the check at the other end.
    pub(crate) fn new(mut lines: Lines) -> Result<Self> {
        let ToRank::Job(job) = lines.receive()? else { bail!("the first message is no job") };
        let library = Some(Library::open(&job.library)?);
        Ok(Self { job, lines, early: VecDeque::new(), library })
    }

    /// Tells the outcome.
    pub(crate) fn end(mut self, outcome: Outcome) -> Result<()> {
        self.lines.send(&FromRank::End(outcome))
    }

    pub(crate) fn step(&mut self, step: impl Into<String>) -> Result<()> {
        self.lines.send(&FromRank::Step(step.into()))
    }

    pub(crate) fn is_first(&self) -> bool {
        self.job.rank == 0
    }

    /// The other rank of two.
    pub(crate) fn peer(&self) -> usize {
        1 - self.job.rank
    }

    pub(crate) fn tell(&mut self, to: usize, bytes: &[u8]) -> Result<()> {
        self.lines.send(&FromRank::Data { to, bytes: bytes.to_vec() })
    }

    pub(crate) fn hear(&mut self, from: usize) -> Result<Vec<u8>> {
        if let Some(at) = self.early.iter().position(|(rank, _)| *rank == from) {
            let found = self.early.remove(at).context("a message that was just there")?;
            return Ok(found.1);
        }
        loop {
            match self.lines.receive()? {
                ToRank::Data { from: rank, bytes } if rank == from => return Ok(bytes),
                ToRank::Data { from: rank, bytes } => self.early.push_back((rank, bytes)),
                ToRank::Done | ToRank::Job(_) => bail!("an answer that nothing asked for"),
            }
        }
    }

    /// Waits until all ranks are here.
    pub(crate) fn meet(&mut self) -> Result<()> {
        let others: Vec<usize> =
            (0..self.job.ranks).filter(|rank| *rank != self.job.rank).collect();
        for other in &others {
            self.tell(*other, b"here")?;
        }
        for other in others {
            ensure!(self.hear(other)? == b"here", "rank {other} is at another step");
        }
        Ok(())
    }

    /// Has the check do something to a rank.
    pub(crate) fn have(&mut self, fate: Fate, to: usize) -> Result<()> {
        self.lines.send(&FromRank::Do { fate, to })?;
        loop {
            match self.lines.receive()? {
                ToRank::Done => return Ok(()),
                ToRank::Data { from, bytes } => self.early.push_back((from, bytes)),
                ToRank::Job(_) => bail!("a second job"),
            }
        }
    }

    /// The table that the job is about.
    pub(crate) fn table(&self) -> Result<NetTable> {
        let library = self.library.as_ref().context("the library is loaded")?;
        let version = self.job.version;
        let found = library.nets().into_iter().find(|table| table.version() == version);
        found.with_context(|| format!("there is no ncclNetPlugin_v{version}"))
    }

    /// The one-sided table that the job is about.
    pub(crate) fn rma_table(&self) -> Result<RmaTable> {
        let library = self.library.as_ref().context("the library is loaded")?;
        let version = self.job.version;
        let found = library.rmas().into_iter().find(|table| table.version() == version);
        found.with_context(|| format!("there is no ncclRmaPlugin_v{version}"))
    }

    /// The network, initialised once.
    pub(crate) fn start(&self) -> Result<Network> {
        let net = Net::new(self.table()?);
        let context = net.init(0x5EED)?;
        ensure!(net.devices()? > 0, "there is no device");
        let properties = net.properties(0)?;
        Ok(Network { net, context, properties })
    }

    /// Checks the calls' times, and ends the network.
    pub(crate) fn finish(&self, started: Network) -> Result<()> {
        started.net.finalize(started.context)?;
        self.check_times(&started.net)
    }

    /// Fails if a call that must return at once took longer than the limit.
    pub(crate) fn check_times(&self, net: &Net) -> Result<()> {
        self.check_slowest(net.slowest())
    }

    pub(crate) fn check_slowest(&self, slowest: Option<(&'static str, Duration)>) -> Result<()> {
        let limit = Duration::from_millis(self.job.call_limit_ms);
        match slowest {
            Some((name, took)) if took > limit => bail!("{name} took {took:?}: it must not block"),
            _ => Ok(()),
        }
    }

    /// Makes one connection, from one rank to another; called by these two.
    pub(crate) fn one_way(&mut self, started: &Network, from: usize, to: usize) -> Result<Comm> {
        if self.job.rank == from {
            let mut handle = self.hear_handle(to)?;
            return started.connect(&mut handle);
        }
        let (handle, listen) = started.net.listen(started.context, 0)?;
        self.tell(from, &handle)?;
        let comm = started.accept(listen)?;
        started.net.close_listen(listen)?;
        Ok(comm)
    }

    pub(crate) fn hear_handle(&mut self, from: usize) -> Result<Handle> {
        self.hear(from)?.try_into().ok().context("a handle has 128 bytes")
    }
}

/// An initialised network.
#[derive(Clone)]
pub(crate) struct Network {
    pub(crate) net: Net,
    pub(crate) context: Pointer,
    pub(crate) properties: Properties,
}

// SAFETY: NCCL calls a plugin from several threads.
unsafe impl Send for Network {}

impl Network {
    pub(crate) fn connect(&self, handle: &mut Handle) -> Result<Comm> {
        until("connect", || self.net.connect(self.context, 0, handle))
    }

    pub(crate) fn accept(&self, listen: Pointer) -> Result<Comm> {
        until("accept", || self.net.accept(listen))
    }

    /// Posts a send as soon as the plugin takes it.
    pub(crate) fn send(&self, comm: Comm, part: Part) -> Result<Pointer> {
        until("isend", || self.net.isend(comm, part, 0))
    }

    /// Posts a receive as soon as the plugin takes it.
    pub(crate) fn recv(&self, comm: Comm, part: Part) -> Result<Pointer> {
        until("irecv", || self.net.irecv(comm, &[part], &[0], Completion::Needed))
    }

    /// Waits for a request; returns its bytes, for a receive those that came.
    pub(crate) fn wait(&self, request: Pointer) -> Result<i32> {
        let [bytes] = until("test", || self.net.test::<1>(request))?;
        Ok(bytes)
    }

    /// Begins a send or a receive.
    pub(crate) fn post(&self, comm: Comm, part: Part) -> Result<Pointer> {
        match comm.side {
            Side::Send => self.send(comm, part),
            Side::Recv => self.recv(comm, part),
        }
    }

    /// Sends or receives one message to its end.
    pub(crate) fn pass(&self, comm: Comm, part: Part) -> Result<i32> {
        self.wait(self.post(comm, part)?)
    }
}

/// Registered memory of one communicator.
pub(crate) struct Registration {
    pub(crate) memory: GuardedMemory,
    comm: Comm,
    registration: Pointer,
}

impl Registration {
    pub(crate) fn new(started: &Network, comm: Comm, bytes: usize) -> Result<Self> {
        let memory = GuardedMemory::new(bytes)?;
        let registration = started.net.register(comm, memory.at(), bytes)?;
        Ok(Self { memory, comm, registration })
    }

    /// A part of it, by its offset.
    pub(crate) fn part(&self, from: usize, bytes: usize) -> Part {
        assert!(from + bytes <= self.memory.len(), "a part beyond the memory");
        // SAFETY: within the memory.
        let at = unsafe { self.memory.at().add(from) };
        Part { at, bytes, registration: self.registration }
    }

    pub(crate) fn all(&self) -> Part {
        self.part(0, self.memory.len())
    }

    pub(crate) fn end(&self, started: &Network) -> Result<()> {
        started.net.deregister(self.comm, self.registration)
    }
}

/// Calls until there is a result.
pub(crate) fn until<T>(name: &str, mut call: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = call()? {
            return Ok(value);
        }
        if Instant::now() > end {
            bail!("{name} was called for {PATIENCE:?} and is not done");
        }
        // As NCCL's proxy does between its rounds.
        thread::yield_now();
    }
}
