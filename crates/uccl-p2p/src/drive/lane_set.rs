//! The lanes of a connection: their kinds, and which of them are lost.

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;
use uccl_fabric::lane::{HostLane, Lane, MessageLane, OpName, RailLane};

use super::{links::Links, lost_lanes::LostLanes};

/// The lanes of a connection.
pub(crate) struct LaneSet {
    /// The same as in [`Links`].
    pub(crate) streams: Vec<Arc<dyn MessageLane>>,
    pub(crate) host: Option<Arc<dyn HostLane>>,
    pub(crate) rails: Option<Arc<dyn RailLane>>,
    /// All of them, in the order of their indices.
    pub(crate) all: Vec<Arc<dyn Lane>>,
    pub(crate) lost: LostLanes,
}

impl LaneSet {
    pub(crate) fn new(links: Links) -> Self {
        let (all, lost) = (links.lanes(), LostLanes::default());
        let Links { streams, host, rails } = links;
        Self { streams, host, rails, all, lost }
    }

    /// The lane that carries messages.
    pub(super) fn messages(&self) -> &dyn MessageLane {
        &*self.streams[0]
    }

    /// The streams that are not lost.
    pub(super) fn living_streams(&self) -> impl Iterator<Item = (usize, &Arc<dyn MessageLane>)> {
        self.streams.iter().enumerate().filter(|(index, _)| !self.lost.has(*index))
    }

    /// Whether a lane is a stream, and not the rail lane.
    pub(super) fn is_stream(&self, index: usize) -> bool {
        index < self.rails_place()
    }

    /// The index of the rail lane, if there is one: the last.
    pub(crate) fn rails_place(&self) -> usize {
        self.streams.len()
    }

    /// The rail lane, if at least one of its paths works now.
    pub(crate) fn rails_up(&self) -> Option<&dyn RailLane> {
        self.rails.as_deref().filter(|rails| rails.paths_up() > 0)
    }

    /// The rail lane, if operations are under way on it: they end sooner than a socket could be
    /// polled.
    pub(super) fn rails_under_way(&self) -> Option<&dyn RailLane> {
        let lost = || self.lost.has(self.rails_place());
        self.rails.as_deref().filter(|rails| rails.is_under_way() && !lost())
    }

    /// The lanes that are not lost.
    pub(crate) fn living(&self) -> impl Iterator<Item = (usize, &Arc<dyn Lane>)> {
        self.all.iter().enumerate().filter(|(lane, _)| !self.lost.has(*lane))
    }

    /// Whether only this process still has work to do for these operations.
    pub(super) fn is_ours(&self, ops: &[(u16, OpName)]) -> bool {
        let host = self.host.as_ref();
        ops.iter().all(|(lane, op)| *lane == 0 && host.is_some_and(|host| host.is_ours(*op)))
    }

    /// Does one part of the work that threads can share; false when there is none.
    pub(super) fn help(&self) -> bool {
        self.host.as_ref().is_some_and(|host| host.help())
    }

    /// Whether there is work that several threads can share.
    pub(super) fn wants_help(&self) -> bool {
        self.host.as_ref().is_some_and(|host| host.wants_help())
    }

    /// Whether a socket shows that the peer has closed it, or that its process has ended.
    pub(super) fn shows_end(&self) -> bool {
        let lanes: SmallVec<[_; 4]> =
            self.living_streams().map(|(_, lane)| lane.interest()).collect();
        let sockets = lanes.iter().map(|lane| PollFd::from_borrowed_fd(lane.fd, PollFlags::RDHUP));
        let processes = lanes.iter().filter_map(|lane| lane.end);
        let processes = processes.map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN));
        let mut fds: SmallVec<[PollFd<'_>; 4]> = sockets.chain(processes).collect();
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|shown| shown > 0)
    }
}
