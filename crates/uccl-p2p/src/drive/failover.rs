//! Lanes that die while their connection lives: the other lanes take over their unfinished
//! operations.
//!
//! Any lane but the first, which carries the messages, can be lost. Its operations may still be on
//! their way to the peer. So a piece is posted again only when nothing of the first attempt can
//! land any more: our end is dead (`Lane::kill` has returned), and the peer has said that its end
//! is dead, too. Until then the pieces wait as orphans of their lane. A side that loses a lane, or
//! hears that the peer has lost it, kills its end and says so with
//! [`LaneDown`](uccl_wire::message::Message::LaneDown).
//!
//! Marking a lane as lost touches no lane, so completions and messages can do it. The next thread
//! that makes progress, a worker if nobody else, kills the lane.

use std::sync::{Arc, atomic::Ordering::*};

use uccl_fabric::{
    clock,
    lane::{Completion, OpError, OpResult, RailLane},
};
use uccl_proto::lanes::OrphanStep;

use super::{
    core::connection::{Connection, talk::Piece, transfer::Transfer},
    work::Work,
};

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

impl Connection {
    /// Since when the peer owes us a message that its end of some lane is dead.
    pub(crate) fn peer_owes_since_ms(&self) -> Option<u64> {
        if !self.lanes.lost.any() {
            return None;
        }
        self.talk.lock().session.lanes.owed_since_ms()
    }

    /// Kills our end of a lost lane, and tells the peer; false if that was done before. Must not be
    /// called from a completion or a message.
    pub(crate) fn end_lane(self: &Arc<Self>, lane: usize) -> bool {
        if !self.lanes.lost.begin_end(lane) {
            return false;
        }
        self.core.workers.detach(&self.care.take_lane(lane));
        self.lanes.all[lane].kill();
        let is_left = |rails: &Arc<dyn RailLane>| rails.aftermath().is_some();
        if lane == self.lanes.rails_place() && self.lanes.rails.as_ref().is_some_and(is_left) {
            // The peer cannot be told that our end is dead, so it posts nothing again.
            self.fail(self.lost_to("a device does not end what was on it"));
            return true;
        }
        let now = clock::coarse_ms();
        let orphans = self.tell(|session, out| session.lanes.our_end_died(lane as u16, now, out));
        self.lane_settled(orphans);
        true
    }

    /// Marks a lane as lost, and kills it.
    pub(crate) fn lose_lane(self: &Arc<Self>, lane: usize, why: impl std::fmt::Display) {
        self.condemn(lane, why);
        self.end_lane(lane);
    }

    /// Handles the peer's message that its end of a lane is dead.
    pub(super) fn peer_lost_lane(self: &Arc<Self>, lane: usize, orphans: Option<Vec<Arc<Piece>>>) {
        self.condemn(lane, "the peer has lost it");
        self.lane_settled(orphans);
    }

    /// If `orphans` are given, both ends of their lane are dead: posts them again.
    fn lane_settled(self: &Arc<Self>, orphans: Option<Vec<Arc<Piece>>>) {
        if let Some(orphans) = orphans {
            self.core.counters.lanes_lost.fetch_add(1, Relaxed);
            self.adopt(orphans);
        }
    }

    /// Does work over the streams that the rails do not reach, or do not reach any more.
    pub(super) fn post_elsewhere(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        let is_fenced = transfer.body.lock().fence.is_some();
        if is_fenced || self.is_failed() {
            // The fence or the connection decides which error the caller sees.
            return Arc::clone(transfer).complete(Err(OpError::LaneDown));
        }
        let route = self.choose_streams(&work);
        self.post(transfer, work, route);
        transfer.op_ended();
    }

    /// Handles an operation that has ended because its lane died.
    fn orphaned(self: &Arc<Self>, piece: Arc<Piece>) {
        let lane = piece.lane;
        let orphan = self.talk.lock().session.lanes.orphaned(lane, piece);
        match orphan {
            OrphanStep::End(piece) => Arc::clone(&piece.transfer).complete(Err(OpError::LaneDown)),
            OrphanStep::Post(piece) => {
                self.condemn(lane, OpError::LaneDown);
                self.adopt(vec![piece]);
            }
            OrphanStep::Waits => self.condemn(lane, OpError::LaneDown),
        }
    }

    /// Posts operations again on the lanes that are left. Those that were called off end instead.
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
