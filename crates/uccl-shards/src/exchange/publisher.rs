//! The side that writes weights.

use std::{sync::atomic::AtomicBool, time::Duration};

use parking_lot::Mutex;
use uccl_p2p::{Endpoint, Interrupt};

use super::{
    bounds::Bounds,
    error::{Error, Result},
    manifest::Manifest,
    mark::{MAX_VERSION, Mark},
    memory::Memory,
    party::{Party, readers_of},
    shard::Shard,
};
use crate::plan::Peer;

/// A rank that publishes its shards, version after version.
///
/// [`begin`](Self::begin) comes before the first change of a byte, [`publish`](Self::publish) after
/// the last one. A target that read meanwhile notices, and reads again. To have none read in vain,
/// wait with [`wait_taken`](Self::wait_taken) before the next `begin`.
pub struct Publisher {
    endpoint: Endpoint,
    memory: Memory,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    version: u64,
    readers: Option<Vec<usize>>,
}

impl Publisher {
    /// Registers the shards. Peers that know the manifest may read them from now on: the endpoint
    /// accepts every peer, and `accept` returns none any more.
    ///
    /// # Errors
    /// The engine refuses memory.
    ///
    /// # Safety
    /// The memory of the shards must stay allocated until [`close`](Self::close) or the endpoint's
    /// `close` has returned `Ok`.
    pub unsafe fn new(endpoint: &Endpoint, shards: &[Shard]) -> Result<Self> {
        endpoint.start_passive_accept()?;
        // SAFETY: the caller's duty is this function's.
        let memory = unsafe { Memory::register(endpoint, shards) }?;
        Ok(Self { endpoint: endpoint.clone(), memory, state: Mutex::default() })
    }

    /// The description of this rank, for all others.
    ///
    /// # Errors
    /// The endpoint is closed.
    pub fn manifest(&self) -> Result<Manifest> {
        Manifest::of(&self.endpoint, &self.memory)
    }

    /// Tells it the ranks of the exchange. It is source `index` of them.
    ///
    /// # Errors
    /// There is no plan for them, or the source is another rank.
    pub fn join(&self, party: &Party, index: usize) -> Result<()> {
        if party.sources.get(index) != Some(&self.manifest()?) {
            return Err(Error::Invalid(format!("source {index} is another rank")));
        }
        self.state.lock().readers = Some(readers_of(&party.plan()?, Peer::Source(index)));
        Ok(())
    }

    /// Says that bytes are about to change. Call it before the first change.
    pub fn begin(&self) {
        let state = self.state.lock();
        self.memory.mark.set(Mark::partial(state.version, 0));
    }

    /// Says that all bytes are of a version, which is higher than those before. Everything that
    /// wrote them must have ended, on GPUs too.
    ///
    /// # Errors
    /// The version is not higher, or above [`MAX_VERSION`].
    pub fn publish(&self, version: u64) -> Result<()> {
        let mut state = self.state.lock();
        if version <= state.version || version > MAX_VERSION {
            return Err(Error::Invalid(format!(
                "version {version} is not between {} and {MAX_VERSION}",
                state.version + 1
            )));
        }
        state.version = version;
        self.memory.mark.set(Mark::whole(version));
        Ok(())
    }

    /// The mark that peers see.
    #[must_use]
    pub fn mark(&self) -> Mark {
        self.memory.mark()
    }

    /// Waits until every target that reads from this rank has a version, or a later one. `None` is
    /// the endpoint's time for transfers.
    ///
    /// # Errors
    /// The time is over, the wait was interrupted, or the rank has not [joined](Self::join).
    pub fn wait_taken(
        &self,
        version: u64,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<()> {
        let Some(readers) = self.state.lock().readers.clone() else {
            return Err(Error::Invalid("the publisher does not know its readers yet: join".into()));
        };
        let time = timeout.unwrap_or(self.endpoint.config().transfer_timeout);
        wait_taken(&self.memory, &readers, version, (time, interrupt))
    }

    /// Ends the regions. After `Ok` no peer touches the shards' memory. Call it again to wait
    /// again.
    ///
    /// # Errors
    /// A peer may still read.
    pub fn close(&self) -> Result<()> {
        self.memory.close(&self.endpoint)
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // The memory stays the caller's to keep if this fails, as `new` says; its close reports it.
        let _may_be_touched = self.memory.close(&self.endpoint);
    }
}

/// Waits until these targets have taken a version.
pub(super) fn wait_taken(
    memory: &Memory,
    readers: &[usize],
    version: u64,
    (time, interrupt): (Duration, &mut dyn Interrupt),
) -> Result<()> {
    let late = || readers.iter().find(|reader| memory.taken.load(**reader) < version);
    let reason = || format!("target {} has not taken version {version}", late().unwrap_or(&0));
    let never = AtomicBool::new(false);
    Bounds::new(time, interrupt, &never).until(reason, |_| Ok(late().is_none().then_some(())))
}
