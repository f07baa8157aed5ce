//! The side that reads weights.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use uccl_p2p::{ConnId, Endpoint, Interrupt, PreparedTransfer};

use super::{
    bounds::Bounds,
    error::{Error, Result},
    links::{Link, run},
    manifest::Manifest,
    mark::{MOST_STEPS, Mark},
    memory::{Memory, end_region},
    party::{Party, readers_of},
    publisher::wait_taken,
    shard::Shard,
    words::Words,
};
use crate::plan::{Peer, TargetPlan};

/// A rank that reads shards into its memory.
///
/// A fetch that succeeds has filled all of it with bytes of one version. After one that fails, the
/// memory may hold bytes of several versions, and the [mark](Self::mark) is not whole.
pub struct Reader {
    endpoint: Endpoint,
    memory: Memory,
    is_aborted: AtomicBool,
    exchange: Mutex<Option<Exchange>>,
}

/// The result of a fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FetchOutcome {
    /// The version of all bytes.
    pub version: u64,
    /// The number of bytes that were read.
    pub bytes: u64,
    /// How often a source changed its bytes meanwhile, so that all were read again.
    pub retries: u32,
}

/// The plan of this rank, ready to be posted.
struct Exchange {
    links: Vec<Link>,
    steps: Vec<Vec<PostedRead>>,
    scratch: Words,
    readers: Vec<usize>,
    bytes: u64,
}

/// A read of a step.
struct PostedRead {
    link: usize,
    transfers: Vec<PreparedTransfer>,
}

/// The end of an attempt.
enum Attempt {
    Whole,
    /// A rank went on to another version meanwhile.
    Torn,
}

impl Reader {
    /// Registers the memory that shards are read into. The endpoint accepts every peer from now on,
    /// since targets may read from each other.
    ///
    /// # Errors
    /// The engine refuses memory.
    ///
    /// # Safety
    /// The memory of the shards must stay allocated until [`close`](Self::close) or the endpoint's
    /// `close` has returned `Ok`. Nothing else accesses it during a fetch.
    pub unsafe fn new(endpoint: &Endpoint, shards: &[Shard]) -> Result<Self> {
        endpoint.start_passive_accept()?;
        // SAFETY: the caller's duty is this function's.
        let memory = unsafe { Memory::register(endpoint, shards) }?;
        let endpoint = endpoint.clone();
        Ok(Self {
            endpoint,
            memory,
            is_aborted: AtomicBool::new(false),
            exchange: Mutex::new(None),
        })
    }

    /// The description of this rank, for all others.
    ///
    /// # Errors
    /// The endpoint is closed.
    pub fn manifest(&self) -> Result<Manifest> {
        Manifest::of(&self.endpoint, &self.memory)
    }

    /// Plans with the ranks of the exchange, of which this is target `index`. No connection is made
    /// yet.
    ///
    /// # Errors
    /// There is no plan for them, or the target is another rank.
    pub fn join(&self, party: &Party, index: usize) -> Result<()> {
        if party.targets.get(index) != Some(&self.manifest()?) {
            return Err(Error::Invalid(format!("target {index} is another rank")));
        }
        let plan = party.plan()?;
        let own = &plan.targets[index];
        if own.steps.len() > MOST_STEPS {
            return Err(Error::Invalid(format!("the plan has more than {MOST_STEPS} steps")));
        }
        let made = self.exchange(party, own, index, readers_of(&plan, Peer::Target(index)))?;
        let old = self.exchange.lock().replace(made);
        old.map_or(Ok(()), |old| Ok(self.endpoint.deregister(old.scratch.mr())?))
    }

    fn exchange(
        &self,
        party: &Party,
        plan: &TargetPlan,
        index: usize,
        readers: Vec<usize>,
    ) -> Result<Exchange> {
        let reads = plan.steps.iter().flat_map(|step| &step.reads);
        let peers: BTreeMap<Peer, usize> = reads.map(|read| (read.from, 0)).collect();
        let scratch = Words::new(&self.endpoint, 2 * peers.len())?;
        let mut links = Vec::with_capacity(peers.len());
        let mut places = peers;
        for (place, (peer, at)) in places.iter_mut().enumerate() {
            let rank = (*peer, party.manifest(*peer));
            links.push(Link::new(&self.endpoint, rank, (&scratch, 2 * place), index)?);
            *at = place;
        }
        let mut steps = Vec::with_capacity(plan.steps.len());
        for step in &plan.steps {
            let mut reads = Vec::with_capacity(step.reads.len());
            for read in &step.reads {
                let link = places[&read.from];
                let transfers = links[link].prepare(&self.endpoint, &self.memory, read)?;
                reads.push(PostedRead { link, transfers });
            }
            steps.push(reads);
        }
        Ok(Exchange { links, steps, scratch, readers, bytes: plan.len_bytes() })
    }

    /// Reads the newest version that all its sources have, which is `version` or a later one, and
    /// waits for it. `None` is the endpoint's time for transfers. When this returns, no byte of the
    /// fetch lands any more.
    ///
    /// # Errors
    /// The time is over, a rank is lost, the fetch was aborted or interrupted, or the rank has not
    /// [joined](Self::join).
    pub fn fetch(
        &self,
        version: u64,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<FetchOutcome> {
        let exchange = self.exchange.lock();
        let Some(exchange) = &*exchange else { return Err(not_joined()) };
        let time = timeout.unwrap_or(self.endpoint.config().transfer_timeout);
        let mut bounds = Bounds::new(time, interrupt, &self.is_aborted);
        let mut conns = Vec::with_capacity(exchange.links.len());
        for link in &exchange.links {
            conns.push(link.reach(&self.endpoint, &mut bounds)?);
        }
        let mut fetch = Fetch { reader: self, exchange, conns, bounds };
        let mut retries = 0;
        loop {
            let version = fetch.agree(version)?;
            self.memory.mark.set(Mark::partial(version, 0));
            if matches!(fetch.attempt(version)?, Attempt::Whole) {
                self.memory.mark.set(Mark::whole(version));
                fetch.take(version)?;
                return Ok(FetchOutcome { version, bytes: exchange.bytes, retries });
            }
            retries += 1;
            fetch
                .bounds
                .check(|| format!("sources change faster than {} bytes come", exchange.bytes))?;
        }
    }

    /// Ends the fetch that is under way, if there is one, with [`Error::Aborted`]. When this
    /// returns, no byte of it lands any more.
    pub fn abort(&self) {
        self.is_aborted.store(true, Ordering::SeqCst);
        let _ended = self.exchange.lock();
        self.is_aborted.store(false, Ordering::SeqCst);
    }

    /// Says that the memory is about to change by other means than a fetch: targets that read from
    /// this one wait for the next fetch. Call it before the first change, and after
    /// [`wait_taken`](Self::wait_taken).
    pub fn begin(&self) {
        let _no_fetch = self.exchange.lock();
        self.memory.mark.set(Mark::partial(self.mark().version(), 0));
    }

    /// The mark of its memory.
    #[must_use]
    pub fn mark(&self) -> Mark {
        self.memory.mark()
    }

    /// Waits until every target that reads from this one has a version, or a later one. The memory
    /// may change then, and not before.
    ///
    /// # Errors
    /// The time is over, the wait was interrupted, or the rank has not [joined](Self::join).
    pub fn wait_taken(
        &self,
        version: u64,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<()> {
        let readers = self.exchange.lock().as_ref().map(|exchange| exchange.readers.clone());
        let readers = readers.ok_or_else(not_joined)?;
        let time = timeout.unwrap_or(self.endpoint.config().transfer_timeout);
        wait_taken(&self.memory, &readers, version, (time, interrupt))
    }

    /// Aborts a fetch and ends the regions. After `Ok` nothing touches the memory. Call it again to
    /// wait again.
    ///
    /// # Errors
    /// A peer may still read.
    pub fn close(&self) -> Result<()> {
        self.abort();
        if let Some(old) = self.exchange.lock().take() {
            end_region(&self.endpoint, old.scratch.mr())?;
        }
        self.memory.close(&self.endpoint)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // The memory stays the caller's to keep if this fails, as `new` says; its close reports it.
        let _may_be_touched = self.close();
    }
}

fn not_joined() -> Error {
    Error::Invalid("the reader does not know its sources yet: join".into())
}

/// A fetch under way.
struct Fetch<'a> {
    reader: &'a Reader,
    exchange: &'a Exchange,
    /// By link.
    conns: Vec<ConnId>,
    bounds: Bounds<'a>,
}

impl Fetch<'_> {
    /// Waits until all sources have the same version, which is `least` or a later one.
    fn agree(&mut self, least: u64) -> Result<u64> {
        let Self { reader, exchange, conns, bounds } = self;
        let reason = || format!("the sources have no whole version from {least} on in common");
        bounds.until(reason, |bounds| {
            let mut common = None;
            for (link, conn) in exchange.links.iter().zip(conns.iter()) {
                if !matches!(link.peer, Peer::Source(_)) {
                    continue;
                }
                let mark = link.mark(&reader.endpoint, *conn, &exchange.scratch, bounds)?;
                let Some(mark) = mark.filter(|mark| mark.is_whole()) else { return Ok(None) };
                let version = mark.version();
                if version < least || common.is_some_and(|common| common != version) {
                    return Ok(None);
                }
                common = Some(version);
            }
            // A rank that reads from targets alone takes the version that they have.
            match common {
                Some(version) => Ok(Some(version)),
                None => Self::agree_with_targets((reader, exchange, conns), bounds, least),
            }
        })
    }

    /// The version of the first target, once it is not older than `least`.
    fn agree_with_targets(
        (reader, exchange, conns): (&Reader, &Exchange, &[ConnId]),
        bounds: &mut Bounds<'_>,
        least: u64,
    ) -> Result<Option<u64>> {
        let Some((link, conn)) = exchange.links.iter().zip(conns).next() else {
            // It reads nothing.
            return Ok(Some(least));
        };
        let mark = link.mark(&reader.endpoint, *conn, &exchange.scratch, bounds)?;
        Ok(mark.map(Mark::version).filter(|version| *version >= least.max(1)))
    }

    fn attempt(&mut self, version: u64) -> Result<Attempt> {
        for (number, step) in self.exchange.steps.iter().enumerate() {
            for read in step {
                if let Attempt::Torn = self.wait_for(read.link, version, number)? {
                    return Ok(Attempt::Torn);
                }
            }
            let transfers: Vec<_> = step
                .iter()
                .flat_map(|read| read.transfers.iter().map(|one| (self.conns[read.link], one)))
                .collect();
            run(&self.reader.endpoint, &transfers, &mut self.bounds)?;
            for read in step {
                let has = self
                    .mark(read.link)?
                    .is_some_and(|mark| self.has(read.link, mark, version, number));
                if !has {
                    return Ok(Attempt::Torn);
                }
            }
            self.reader.memory.mark.set(Mark::partial(version, number + 1));
        }
        Ok(Attempt::Whole)
    }

    /// Waits until a rank has the bytes of a step.
    fn wait_for(&mut self, link: usize, version: u64, step: usize) -> Result<Attempt> {
        let peer = self.exchange.links[link].peer;
        let reason = || format!("{peer:?} has not come to step {step} of version {version}");
        let Self { reader, exchange, conns, bounds } = self;
        bounds.until(reason, |bounds| {
            let rank = &exchange.links[link];
            let mark = rank.mark(&reader.endpoint, conns[link], &exchange.scratch, bounds)?;
            Ok(match mark {
                Some(mark) if has(peer, mark, version, step) => Some(Attempt::Whole),
                // A source does not come back to a version. A target may still come to it.
                Some(mark) if mark.version() > version => Some(Attempt::Torn),
                Some(_) if matches!(peer, Peer::Source(_)) => Some(Attempt::Torn),
                _ => None,
            })
        })
    }

    fn mark(&mut self, link: usize) -> Result<Option<Mark>> {
        let rank = &self.exchange.links[link];
        rank.mark(&self.reader.endpoint, self.conns[link], &self.exchange.scratch, &mut self.bounds)
    }

    fn has(&self, link: usize, mark: Mark, version: u64, step: usize) -> bool {
        has(self.exchange.links[link].peer, mark, version, step)
    }

    /// Tells all ranks that it read from.
    fn take(&mut self, version: u64) -> Result<()> {
        for (link, conn) in self.exchange.links.iter().zip(&self.conns) {
            link.take(&self.reader.endpoint, *conn, version, &mut self.bounds)?;
        }
        Ok(())
    }
}

/// Whether a rank with this mark has the bytes that a target reads in a step.
fn has(peer: Peer, mark: Mark, version: u64, step: usize) -> bool {
    match peer {
        Peer::Source(_) => mark == Mark::whole(version),
        Peer::Target(_) => mark.has(version, step),
    }
}
