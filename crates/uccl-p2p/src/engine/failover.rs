//! Lanes that die while their connection lives: their unfinished operations go to the others.
//!
//! Any lane but the first, which carries the messages, can be lost. What was posted on it may still be on
//! its way to the peer, so a piece is posted again only when nothing of the first attempt can land any
//! more: when our end is dead (`Lane::kill` has returned), and the peer has said that its end is, too.
//! Until then the pieces wait as orphans of their lane. A side that loses a lane, or hears that the peer
//! has lost it, kills its end and says so with [`LaneDown`](uccl_wire::message::Message::LaneDown).
//!
//! Noting that a lane is lost touches no lane, so it can be done from completions and messages;
//! whoever makes progress next, a worker if nobody else, kills it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::*},
};

use parking_lot::Mutex;
use uccl_fabric::{
    clock,
    lane::{Completion, Lane, OpError, OpResult},
};
use uccl_wire::message;

use super::{connection::Connection, plan::Work, transfer::Transfer};

/// An operation of a connection with several lanes: it can be posted again when its lane dies.
#[derive(Clone)]
pub(crate) struct Piece {
    pub(crate) transfer: Arc<Transfer>,
    pub(crate) work: Work,
    /// Where it was posted.
    pub(crate) lane: usize,
}

impl Completion for Piece {
    fn complete(self: Arc<Self>, result: OpResult) {
        let conn = &self.transfer.conn;
        match result {
            Err(OpError::LaneDown) => return Arc::clone(conn).orphaned(self),
            Err(OpError::Unreachable) => {
                return conn.post_elsewhere(&self.transfer, self.work.clone());
            }
            _ => {}
        }
        Arc::clone(&self.transfer).complete(result);
    }
}

/// Which lanes of a connection are lost, and what becomes of their operations.
#[derive(Default)]
pub(crate) struct Lanes {
    /// Lanes not to be used any more, one bit each.
    lost: AtomicU64,
    /// Those of them that somebody has begun to kill, or has killed.
    ending: AtomicU64,
    fates: Mutex<Fates>,
}

#[derive(Default)]
struct Fates {
    /// One a lane, as far as they are lost.
    lanes: Vec<Fate>,
    /// The connection is at its end: nothing is posted again.
    closed: bool,
}

/// What is known of a lane that is lost.
#[derive(Default)]
struct Fate {
    /// Our end is dead since then.
    dead_since_ms: Option<u64>,
    /// The peer's end is dead.
    peer_dead: bool,
    /// Operations that wait for both.
    orphans: Vec<Arc<Piece>>,
}

impl Fate {
    fn settled(&self) -> bool {
        self.dead_since_ms.is_some() && self.peer_dead
    }
}

impl Fates {
    fn of(&mut self, lane: usize) -> &mut Fate {
        if self.lanes.len() <= lane {
            self.lanes.resize_with(lane + 1, Fate::default);
        }
        &mut self.lanes[lane]
    }
}

impl Lanes {
    /// Whether a lane is lost.
    pub(crate) fn lost(&self, lane: usize) -> bool {
        self.lost.load(Acquire) & bit(lane) != 0
    }

    /// Whether a lane is lost, and its killing at least begun.
    pub(crate) fn ending(&self, lane: usize) -> bool {
        self.ending.load(Acquire) & bit(lane) != 0
    }

    /// Whether some lane waits to be killed.
    pub(crate) fn to_be_ended(&self) -> bool {
        self.lost.load(Acquire) & !self.ending.load(Acquire) != 0
    }

    /// Since when the peer owes us the word that its end of some lane is dead.
    pub(crate) fn peer_owes_since_ms(&self) -> Option<u64> {
        if self.lost.load(Acquire) == 0 {
            return None;
        }
        let fates = self.fates.lock();
        let owed = fates.lanes.iter().filter(|fate| !fate.peer_dead);
        owed.filter_map(|fate| fate.dead_since_ms).min()
    }

    /// Forgets everything, for a connection that ends: nothing is posted again.
    pub(crate) fn close(&self) {
        let fates =
            std::mem::replace(&mut *self.fates.lock(), Fates { closed: true, ..Fates::default() });
        drop(fates);
    }
}

/// The bit that stands for a lane.
pub(super) fn bit(lane: usize) -> u64 {
    // A connection has no more lanes than bits; what it has not is not lost.
    u32::try_from(lane).ok().and_then(|lane| 1u64.checked_shl(lane)).unwrap_or(0)
}

impl Connection {
    /// The lanes that are not lost.
    pub(crate) fn living(&self) -> impl Iterator<Item = (usize, &Arc<dyn Lane>)> {
        self.lanes.iter().enumerate().filter(|(lane, _)| !self.fates.lost(*lane))
    }

    /// Notes that a lane other than the first is lost, and has it looked after. May be called from
    /// completions and messages.
    pub(crate) fn condemn(&self, lane: usize, why: impl std::fmt::Display) {
        if self.fates.lost.fetch_or(bit(lane), AcqRel) & bit(lane) != 0 {
            return;
        }
        if self.is_failed() {
            return;
        }
        tracing::warn!(conn = %self.id, peer = %self.peer.name, "lane {lane} is lost, the others take over: {why}");
        self.kick_lane(lane);
        self.ring_sleepers();
    }

    /// Kills our end of a lane that is lost, and tells the peer; false if that has been done. Must not be
    /// called from a completion or a message.
    pub(crate) fn end_lane(self: &Arc<Self>, lane: usize) -> bool {
        if self.fates.ending.fetch_or(bit(lane), AcqRel) & bit(lane) != 0 {
            return false;
        }
        self.detach_lane(lane);
        self.lanes[lane].kill();
        self.say_lane_down(lane);
        let orphans = {
            let mut fates = self.fates.fates.lock();
            let fate = fates.of(lane);
            fate.dead_since_ms = Some(clock::coarse_ms());
            self.settle(fate)
        };
        self.adopt(orphans);
        true
    }

    /// Kills a lane that is of no more use.
    pub(crate) fn lose_lane(self: &Arc<Self>, lane: usize, why: impl std::fmt::Display) {
        self.condemn(lane, why);
        self.end_lane(lane);
    }

    fn say_lane_down(&self, lane: usize) {
        let mut bytes = Vec::new();
        message::lane_down(lane as u16, &mut bytes);
        let _in_order = self.outbox.lock();
        self.send_message(&[&bytes]);
    }

    /// The peer's end of a lane is dead.
    pub(crate) fn on_lane_down(self: &Arc<Self>, lane: u16) -> Result<(), String> {
        let lane = usize::from(lane);
        if lane == 0 || lane >= self.lanes.len() {
            return Err(format!("the end of lane {lane}, of {}", self.lanes.len()));
        }
        let orphans = {
            let mut fates = self.fates.fates.lock();
            let fate = fates.of(lane);
            if std::mem::replace(&mut fate.peer_dead, true) {
                return Err(format!("a second end of lane {lane}"));
            }
            self.settle(fate)
        };
        self.condemn(lane, "the peer has lost it");
        self.adopt(orphans);
        Ok(())
    }

    /// The operations that can be posted again now.
    fn settle(&self, fate: &mut Fate) -> Vec<Arc<Piece>> {
        if !fate.settled() {
            return Vec::new();
        }
        self.core.counters.lanes_lost.fetch_add(1, Relaxed);
        std::mem::take(&mut fate.orphans)
    }

    /// An operation has ended with its lane.
    fn orphaned(self: &Arc<Self>, piece: Arc<Piece>) {
        let lane = piece.lane;
        let homeless = {
            let mut fates = self.fates.fates.lock();
            if lane == 0 || fates.closed {
                drop(fates);
                return Arc::clone(&piece.transfer).complete(Err(OpError::LaneDown));
            }
            let fate = fates.of(lane);
            if fate.settled() {
                vec![piece]
            } else {
                fate.orphans.push(piece);
                Vec::new()
            }
        };
        self.condemn(lane, OpError::LaneDown);
        self.adopt(homeless);
    }

    /// Posts operations again, on the lanes that are left; those that are to end do.
    fn adopt(self: &Arc<Self>, orphans: Vec<Arc<Piece>>) {
        if orphans.is_empty() {
            return;
        }
        tracing::debug!(conn = %self.id, "{} operations are posted again", orphans.len());
        for piece in orphans {
            let is_fenced = piece.transfer.body.lock().fence.is_some();
            if is_fenced || piece.transfer.finished() {
                Arc::clone(&piece.transfer).complete(Err(OpError::Cancelled));
            } else {
                let mut piece = Arc::unwrap_or_clone(piece);
                piece.lane = self.least_loaded();
                self.post_piece(piece);
            }
        }
        self.kick_if_busy();
    }
}
