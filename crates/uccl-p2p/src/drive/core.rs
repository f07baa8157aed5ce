//! The state that all parts of an endpoint share: the core owns the connections, and a connection
//! owns its transfers. A transfer ends on any thread and needs its connection then, so each part
//! also holds the part that owns it. That is why their modules are inside each other.

pub(crate) mod abandoned_peer;
pub(crate) mod connection;
pub(crate) mod workers;

use std::{
    collections::VecDeque,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, RwLock};
use slab::Slab;
use uccl_rma::Rails;

use self::{
    abandoned_peer::Aftermaths,
    connection::{Connection, transfers::Transfers},
    workers::Workers,
};
use super::{
    peers_by_address::PeersByAddress, regions::Mrs, seats::Seats, stream_waits::StreamWaits,
};
use crate::{
    config::Config,
    error::{Error, Result},
    ids::ConnId,
    types::{Acceptance, ConnInfo, Notification, Op},
};

/// Bytes of notifications that may wait to be taken, before peers have to wait.
pub(crate) const NOTIF_LIMIT: usize = 256 << 20;
/// Threads that wait for words which peers change by signals.
#[derive(Default)]
pub(crate) struct SignalWaiters {
    lock: Mutex<()>,
    changed: Condvar,
}

impl SignalWaiters {
    /// Wakes them: a word has changed.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Sleeps until a word may have changed.
    pub(crate) fn sleep(&self, at_most: Duration) {
        self.changed.wait_for(&mut self.lock.lock(), at_most);
    }
}

/// The bytes that a notification counts in addition to its payload: empty ones take memory, too.
const NOTIF_CHARGE: usize = 128;
/// Connections that may wait for accept.
pub(crate) const MAX_ACCEPTS: usize = 1024;

/// The devices of an endpoint.
#[derive(Default)]
pub(crate) struct Devices {
    pub(crate) rails: Arc<Rails>,
    /// Why there are none, as text for people. Empty until they are open.
    pub(crate) why_none: Arc<OnceLock<String>>,
}

/// The entry of a connection id.
pub(super) enum Entry {
    Lost(ConnId, Error, Box<ConnInfo>),
    Open(Arc<Connection>),
}

pub(super) struct Conns {
    pub(super) slab: Slab<Entry>,
    pub(super) lost: VecDeque<usize>,
    pub(super) generation: u32,
}

/// Counters; see [`crate::types::Stats`].
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) posted: AtomicU64,
    pub(crate) done: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) bytes_sent: AtomicU64,
    pub(crate) bytes_received: AtomicU64,
    pub(crate) notifs_sent: AtomicU64,
    pub(crate) notifs_received: AtomicU64,
    pub(crate) refused_handshakes: AtomicU64,
    pub(crate) lanes_lost: AtomicU64,
    pub(crate) copied_for_peers: AtomicU64,
}

impl Counters {
    /// Counts a caller's successful transfer: an operation that moved `bytes`, or a notification.
    pub(crate) fn ended_well(&self, op: Option<Op>, bytes: u64) {
        let (moved, much) = match op {
            Some(Op::Read | Op::Recv) => (&self.bytes_received, bytes),
            Some(Op::Send | Op::Write) => (&self.bytes_sent, bytes),
            None => (&self.notifs_sent, 1),
        };
        moved.fetch_add(much, Relaxed);
        self.done.fetch_add(1, Relaxed);
    }
}

/// The state of one endpoint, without its threads.
pub(crate) struct Core {
    pub(crate) config: Config,
    /// Random; a restarted endpoint has another.
    pub(crate) instance: u64,
    pub(crate) mrs: Mrs,
    /// The rails and their registrations, once they are being opened.
    pub(crate) rails: OnceLock<Devices>,
    pub(crate) transfers: Transfers,
    pub(crate) workers: Workers,
    pub(crate) counters: Counters,
    pub(crate) closed: AtomicBool,
    pub(crate) panicked: OnceLock<Arc<str>>,
    pub(super) conns: RwLock<Conns>,
    /// Peers that were given up and may still touch memory.
    pub(crate) aftermaths: Aftermaths,
    pub(crate) accepts: Mutex<Accepts>,
    pub(crate) accepted: Condvar,
    /// The connections to peers that callers know by address only.
    pub(crate) reached: PeersByAddress,
    /// The room for streams that peers open.
    pub(crate) seats: Seats,
    pub(super) notifs: Mutex<VecDeque<Notification>>,
    pub(super) have_notifs: AtomicBool,
    pub(crate) notif_bytes: AtomicUsize,
    pub(crate) notified: Condvar,
    pub(crate) signalled: SignalWaiters,
    /// Streams that wait for words.
    pub(crate) held: StreamWaits,
}

/// Connections that wait for accept.
pub(crate) struct Accepts {
    pub(crate) waiting: VecDeque<Acceptance>,
    /// Whether callers do not use `accept`: connections are usable as they come.
    pub(crate) passive: bool,
    /// Connections that do not wait for accept yet because their rails have not been tried, and
    /// since when.
    pub(super) untried: Vec<(Weak<Connection>, Instant)>,
}

impl Core {
    pub(crate) fn new(config: Config, workers: Workers) -> Result<Self> {
        let instance = getrandom::u64()
            .map_err(|e| Error::os("reading random bytes", std::io::Error::other(e)))?;
        Ok(Self {
            mrs: Mrs::new(config.ipc)?,
            rails: OnceLock::new(),
            seats: Seats::new(config.max_streams),
            config,
            instance,
            transfers: Transfers::new(),
            workers,
            counters: Counters::default(),
            closed: AtomicBool::new(false),
            panicked: OnceLock::new(),
            conns: RwLock::new(Conns { slab: Slab::new(), lost: VecDeque::new(), generation: 0 }),
            aftermaths: Aftermaths::default(),
            accepts: Mutex::new(Accepts {
                waiting: VecDeque::new(),
                passive: false,
                untried: Vec::new(),
            }),
            accepted: Condvar::new(),
            reached: PeersByAddress::default(),
            notifs: Mutex::default(),
            have_notifs: AtomicBool::new(false),
            notif_bytes: AtomicUsize::new(0),
            notified: Condvar::new(),
            signalled: SignalWaiters::default(),
            held: StreamWaits::default(),
        })
    }

    /// Fails if the endpoint is closed or a worker has panicked.
    pub(crate) fn usable(&self) -> Result<()> {
        if let Some(message) = self.panicked.get() {
            return Err(Error::Panicked(Arc::clone(message)));
        }
        if self.closed.load(Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    /// Puts a notification where callers take it, and `answer`s its sender. Nobody can take it
    /// before the sender has been answered, because a caller that has it may close at once. A
    /// thread that knows of the answer finds the notification.
    pub(crate) fn push_notif(&self, notif: Notification, answer: impl FnOnce()) {
        self.counters.notifs_received.fetch_add(1, Relaxed);
        self.notif_bytes.fetch_add(charge(&notif), Relaxed);
        let mut notifs = self.notifs.lock();
        self.have_notifs.store(true, Release);
        answer();
        notifs.push_back(notif);
        drop(notifs);
        self.notified.notify_all();
    }

    /// Sleeps until a notification may have come.
    pub(crate) fn sleep_for_notif(&self, at_most: Duration) {
        let mut notifs = self.notifs.lock();
        if notifs.is_empty() {
            self.notified.wait_for(&mut notifs, at_most);
        }
    }
}

/// How many bytes a notification counts while it waits.
pub(super) fn charge(notif: &Notification) -> usize {
    notif.payload.len() + NOTIF_CHARGE
}
