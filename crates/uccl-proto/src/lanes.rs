//! Lanes that are lost while their connection lives: the other lanes take over their unfinished
//! operations.
//!
//! Any lane but the first, which carries the messages, can be lost. Its operations may still be on
//! their way to the peer. So an operation is posted again only when nothing of the first attempt
//! can land any more: our end is dead, and the peer has said that its end is dead, too. Until then
//! the operations wait as orphans of their lane.

use uccl_wire::message;

use crate::Violation;

/// The lost lanes of a connection.
pub struct Lanes<O> {
    /// One entry per lane, up to the last that was lost.
    fates: Vec<LostLane<O>>,
    /// Whether the connection has ended: nothing is posted again.
    is_closed: bool,
}

/// The state of a lost lane.
struct LostLane<O> {
    /// When our end died; `None` while it lives.
    dead_since_ms: Option<u64>,
    is_peer_dead: bool,
    /// Operations that wait until both ends are dead.
    orphans: Vec<O>,
}

impl<O> Default for Lanes<O> {
    fn default() -> Self {
        Self { fates: Vec::new(), is_closed: false }
    }
}

impl<O> Default for LostLane<O> {
    fn default() -> Self {
        Self { dead_since_ms: None, is_peer_dead: false, orphans: Vec::new() }
    }
}

impl<O> LostLane<O> {
    fn is_settled(&self) -> bool {
        self.dead_since_ms.is_some() && self.is_peer_dead
    }

    /// If both ends are dead: the operations, which can be posted once more now.
    fn settle(&mut self) -> Option<Vec<O>> {
        self.is_settled().then(|| std::mem::take(&mut self.orphans))
    }
}

/// The next step of an operation on a lost lane.
#[derive(PartialEq, Eq, Debug)]
pub enum OrphanStep<O> {
    /// It ends, because its connection does.
    End(O),
    /// Post it again.
    Post(O),
    /// It waits until both ends of its lane are dead.
    Waits,
}

impl<O> Lanes<O> {
    /// Notes that our end of a lane is dead, and encodes that for the peer. If the peer's end is
    /// dead as well, returns the operations to post again.
    pub fn our_end_died(&mut self, lane: u16, now_ms: u64, out: &mut Vec<u8>) -> Option<Vec<O>> {
        message::lane_down(lane, out);
        let fate = self.fate(lane.into());
        fate.dead_since_ms = Some(now_ms);
        fate.settle()
    }

    /// Notes that the peer's end of a lane is dead. If our end is dead as well, returns the
    /// operations to post again.
    pub(crate) fn peer_end_died(
        &mut self,
        lane: u16,
        lanes: usize,
    ) -> Result<Option<Vec<O>>, Violation> {
        let lane = usize::from(lane);
        if lane == 0 || lane >= lanes {
            return Err(Violation::UnknownLane { lane, lanes });
        }
        let fate = self.fate(lane);
        if std::mem::replace(&mut fate.is_peer_dead, true) {
            return Err(Violation::RepeatedLaneDown(lane));
        }
        Ok(fate.settle())
    }

    /// Decides about an operation that has ended because its lane died.
    pub fn orphaned(&mut self, lane: usize, operation: O) -> OrphanStep<O> {
        if lane == 0 || self.is_closed {
            return OrphanStep::End(operation);
        }
        let fate = self.fate(lane);
        if fate.is_settled() {
            return OrphanStep::Post(operation);
        }
        fate.orphans.push(operation);
        OrphanStep::Waits
    }

    /// Since when the peer owes us a message that its end of some lane is dead.
    pub fn owed_since_ms(&self) -> Option<u64> {
        let owed = self.fates.iter().filter(|fate| !fate.is_peer_dead);
        owed.filter_map(|fate| fate.dead_since_ms).min()
    }

    /// The connection ends, and nothing is posted again. Returns the operations that waited.
    pub fn close(&mut self) -> Vec<O> {
        self.is_closed = true;
        std::mem::take(&mut self.fates).into_iter().flat_map(|fate| fate.orphans).collect()
    }

    fn fate(&mut self, lane: usize) -> &mut LostLane<O> {
        if self.fates.len() <= lane {
            self.fates.resize_with(lane + 1, LostLane::default);
        }
        &mut self.fates[lane]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_wait_until_neither_end_of_their_lane_lives() {
        let (mut lanes, mut out) = (Lanes::default(), Vec::new());
        assert_eq!(lanes.orphaned(1, "a"), OrphanStep::Waits);
        assert_eq!(lanes.our_end_died(1, 7, &mut out), None);
        assert_eq!((lanes.owed_since_ms(), out.is_empty()), (Some(7), false));
        assert_eq!(lanes.orphaned(1, "b"), OrphanStep::Waits);
        assert_eq!(lanes.peer_end_died(1, 3), Ok(Some(vec!["a", "b"])));
        assert_eq!((lanes.owed_since_ms(), lanes.orphaned(1, "c")), (None, OrphanStep::Post("c")));
        assert_eq!(lanes.peer_end_died(2, 3), Ok(None));
        assert_eq!(lanes.orphaned(2, "d"), OrphanStep::Waits);
        assert_eq!(lanes.our_end_died(2, 9, &mut out), Some(vec!["d"]));
    }

    #[test]
    fn a_lane_ends_once_and_the_first_with_its_connection() {
        let mut lanes = Lanes::<()>::default();
        assert_eq!(lanes.peer_end_died(0, 2), Err(Violation::UnknownLane { lane: 0, lanes: 2 }));
        assert_eq!(lanes.peer_end_died(2, 2), Err(Violation::UnknownLane { lane: 2, lanes: 2 }));
        assert_eq!(lanes.peer_end_died(1, 2), Ok(None));
        assert_eq!(lanes.peer_end_died(1, 2), Err(Violation::RepeatedLaneDown(1)));
        assert_eq!(lanes.orphaned(0, ()), OrphanStep::End(()));
        assert_eq!(lanes.orphaned(1, ()), OrphanStep::Waits);
        assert_eq!(lanes.close(), [()]);
        assert_eq!(lanes.orphaned(1, ()), OrphanStep::End(()));
    }
}
