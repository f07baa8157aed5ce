//! Giving memory back: regions are revoked, accesses to them are waited for, and an error names the
//! party that does not let go.
//!
//! `deregister`, `close` and dropping the last handle all go through here. A revoked region stays
//! in the list of ending regions until nothing touches it any more, so that a wait that was in vain
//! can be repeated.

use std::{
    sync::{
        Arc,
        atomic::{
            AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, Instant},
};

use uccl_fabric::{gpu::advance_words, rail::RailError};

use super::{
    aftermath::IN_THE_MIDDLE,
    core::{Core, connection::Connection},
    regions::EndingRegion,
    timers,
};
use crate::{
    error::{Error, Result},
    ids::MrId,
};

/// How long a wait only yields its processor before it begins to sleep: most accesses are over in
/// microseconds.
const BRISK: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(200);

/// Connections that are ended at the same time: each may have to wait for a copy that the kernel
/// holds up.
const AT_A_TIME: usize = 64;

/// Ends connections in parallel, so that none has to wait for another.
fn beside_each_other(conns: &[Arc<Connection>], end: impl Fn(&Arc<Connection>) + Sync) {
    let next = AtomicUsize::new(0);
    let end_some = || {
        while let Some(conn) = conns.get(next.fetch_add(1, Relaxed)) {
            end(conn);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..conns.len().min(AT_A_TIME) {
            let thread = std::thread::Builder::new().name("uccl-close".into());
            // Without this thread, the others end its connections.
            let _ = thread.spawn_scoped(scope, end_some);
        }
        end_some();
    });
}

/// A peer, device or endpoint that may touch a region.
struct Toucher {
    name: Arc<str>,
    reason: Arc<str>,
    /// Its connection, unless that was given up already.
    conn: Option<Arc<Connection>>,
    /// Whether waiting may help.
    is_passing: bool,
}

impl Toucher {
    fn peer(name: &Arc<str>, conn: Option<Arc<Connection>>) -> Self {
        Self { name: Arc::clone(name), reason: IN_THE_MIDDLE.into(), conn, is_passing: true }
    }

    fn ourselves() -> Self {
        let reason = "a transfer that uses it, or its registration, has not ended".into();
        Self { name: "this endpoint".into(), reason, conn: None, is_passing: true }
    }

    fn device(e: &RailError) -> Self {
        let reason = format!("it did not let go of it: {e}").into();
        Self { name: "a device".into(), reason, conn: None, is_passing: false }
    }

    fn busy_gpu() -> Self {
        let reason = "it is changing a word there for a peer".into();
        Self { name: "a GPU".into(), reason, conn: None, is_passing: true }
    }

    fn busy_device() -> Self {
        let reason = "it is being shown it for a peer that asked".into();
        Self { name: "a device".into(), reason, conn: None, is_passing: true }
    }
}

impl Core {
    /// Revokes a region and waits until nothing touches it any more, for at most the endpoint's
    /// timeout. Then the peer that touches it is given up, and a further call waits again.
    pub(crate) fn release_region(self: &Arc<Self>, id: MrId) -> Result<()> {
        let until = timers::end_unless_zero(timers::to_let_go(&self.config));
        self.held.end_those_of(id, until);
        let ending = self.mrs.revoke(id)?;
        self.drain(vec![ending], until)
    }

    /// Closes the endpoint. No region can be added any more. Waits until nothing touches the
    /// regions that there were, for at most the endpoint's timeout, and for the workers. A further
    /// call waits again.
    pub(crate) fn close(self: &Arc<Self>) -> Result<()> {
        self.closed.store(true, SeqCst);
        // All waits below count their time from here.
        let let_go = timers::end_unless_zero(timers::to_let_go(&self.config));
        let stopped = timers::end_unless_zero(timers::to_stop(&self.config));
        // Streams that wait for words end with the close as their reason, not with the loss of a
        // connection.
        self.held.close();
        // Regions first: a peer that does not learn of the end from its lane finds the regions
        // revoked.
        let endings = self.mrs.revoke_all();
        beside_each_other(&self.open_conns(), |conn| {
            conn.close(Error::Closed);
            conn.wait_for_end();
            self.forget_conn(conn.id);
        });
        self.accepted.notify_all();
        self.notified.notify_all();
        let running = self.workers.stop(stopped);
        self.drain(endings, let_go)?;
        self.workers_ended(running)?;
        self.forget_aftermaths();
        Ok(())
    }

    fn workers_ended(&self, running: usize) -> Result<()> {
        if running == 0 {
            return Ok(());
        }
        let (by, reason) = ("a worker of this endpoint".into(), IN_THE_MIDDLE.into());
        Err(Error::StillTouched { regions: [].into(), by, reason })
    }

    /// The same as [`close`](Self::close), when the last handle is dropped. If a close has waited
    /// in vain, this does not wait again.
    pub(crate) fn end(self: &Arc<Self>) -> Result<()> {
        if !self.closed.load(SeqCst) {
            return self.close();
        }
        self.drain(self.mrs.revoke_all(), Some(Instant::now()))
    }

    /// Waits until nothing touches these regions. Lets go of each as soon as nothing touches it.
    pub(crate) fn drain(
        self: &Arc<Self>,
        mut endings: Vec<Arc<EndingRegion>>,
        until: Option<Instant>,
    ) -> Result<()> {
        let started = Instant::now();
        loop {
            // Before the check below: a peer is given up only if it still touches a region after
            // the time is up.
            let is_late = until.is_some_and(|until| until <= Instant::now());
            let mut toucher: Option<Toucher> = None;
            endings.retain(|ending| match self.let_go_if_untouched(ending) {
                Ok(()) => false,
                Err(who) => {
                    toucher = toucher.take().filter(|other| other.is_passing).or(Some(who));
                    true
                }
            });
            let Some(toucher) = toucher else { return Ok(()) };
            if is_late || !toucher.is_passing {
                return Err(give_up(&endings, toucher));
            }
            // This finds out that a given-up peer is done, and ends the transfers that waited for
            // it.
            self.look_after_aftermaths();
            self.held.look();
            match started.elapsed() < BRISK {
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
        }
    }

    fn let_go_if_untouched(self: &Arc<Self>, ending: &EndingRegion) -> Result<(), Toucher> {
        ending.let_go(|mr| {
            // Before the look: a lane that is made after it must not request anything with the
            // region.
            self.rails.get().map(|devices| devices.rails.retire(ending.mr.region.slot));
            self.toucher(ending).map_or(Ok(()), Err)?;
            self.let_go_of_memory(mr).map_err(|e| Toucher::device(&e))
        })?;
        self.mrs.forget(ending.mr.id);
        Ok(())
    }

    /// One of the parties that may touch a region; all of them are asked to stop.
    fn toucher(self: &Arc<Self>, ending: &EndingRegion) -> Option<Toucher> {
        let slot = ending.mr.region.slot;
        let mut touching = None;
        for conn in self.open_conns() {
            let asked = conn.end_copies(slot);
            if asked || conn.lanes.all.iter().any(|lane| lane.touched_by_peer(slot)) {
                // The lane may have a note for the peer, which asks it to stop.
                conn.forward_notes();
                touching = Some(conn);
            }
        }
        if let Some(conn) = touching {
            return Some(Toucher::peer(&Arc::clone(&conn.peer.name), Some(conn)));
        }
        // After the connections: one that ends is added to the aftermaths before it leaves the list
        // of connections.
        if let Some(peer) = self.toucher_left(ending) {
            return Some(Toucher::peer(&peer, None));
        }
        advance_words();
        if self.mrs.table.is_in_use(slot) {
            return Some(Toucher::busy_gpu());
        }
        let devices = self.rails.get();
        if devices.is_some_and(|devices| devices.rails.is_busy_with(slot)) {
            return Some(Toucher::busy_device());
        }
        ending.is_leased().then(Toucher::ourselves)
    }
}

/// Makes the error, and ends the connection of a peer that has touched regions for too long.
fn give_up(endings: &[Arc<EndingRegion>], toucher: Toucher) -> Error {
    let regions: Arc<[MrId]> = endings.iter().map(|ending| ending.mr.id).collect();
    let Toucher { name: by, reason, conn, .. } = toucher;
    if let Some(conn) = conn {
        conn.fail(Error::ConnectionLost { peer: Arc::clone(&by), reason: reason.to_string() });
    }
    Error::StillTouched { regions, by, reason }
}
