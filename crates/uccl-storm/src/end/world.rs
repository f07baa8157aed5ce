//! The endpoint of this process, until it is closed and another takes its place.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use parking_lot::{Mutex, RwLock};
use uccl_p2p::{ConnId, Endpoint, MrId};

use crate::link::Link;

/// An endpoint and its connections.
pub(crate) struct World {
    pub(crate) ep: Endpoint,
    pub(crate) conns: Mutex<Vec<ConnId>>,
    /// `close` has returned.
    pub(crate) closed: AtomicBool,
    /// The regions that `close` reported as still touched.
    pub(crate) kept: Mutex<Vec<MrId>>,
}

impl World {
    pub(crate) fn new(link: Link, rng: &mut fastrand::Rng) -> anyhow::Result<Arc<Self>> {
        let ep = Endpoint::new(link.config(rng))?;
        let (closed, kept) = (AtomicBool::new(false), Mutex::default());
        Ok(Arc::new(Self { ep, conns: Mutex::default(), closed, kept }))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// A random connection, if there is one.
    pub(crate) fn conn(&self, rng: &mut fastrand::Rng) -> Option<ConnId> {
        let conns = self.conns.lock();
        (!conns.is_empty()).then(|| conns[rng.usize(0..conns.len())])
    }
}

/// The other end, from its latest `ControlMessage::Up`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) addr: SocketAddr,
    pub(crate) instance: u64,
}

/// Counts of the moves by their outcome, and of the kept buffers.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) done: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) kept: AtomicU64,
}

/// State that the threads of this end share.
pub(crate) struct SharedState {
    pub(crate) link: Link,
    /// 0 connects, 1 accepts.
    pub(crate) number: u32,
    pub(crate) world: RwLock<Arc<World>>,
    pub(crate) peer: Mutex<Option<Peer>>,
    /// The workers begin no more operations.
    pub(crate) ending: AtomicBool,
    pub(crate) workers_ended: AtomicU64,
    pub(crate) counts: Counts,
    pub(crate) next_grant: AtomicU64,
    pub(crate) next_stamp: AtomicU64,
}

impl SharedState {
    pub(crate) fn world(&self) -> Arc<World> {
        Arc::clone(&self.world.read())
    }

    /// A stamp that no other pattern of this process has.
    pub(crate) fn stamp(&self) -> u32 {
        self.next_stamp.fetch_add(1, SeqCst) as u32
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(SeqCst)
    }
}
