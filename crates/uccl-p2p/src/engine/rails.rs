//! Connections over devices that move memory one-sidedly, beside the lanes that carry their messages.

use std::sync::Arc;

use uccl_fabric::{
    lane::{Completion, Lane, OpError},
    rma::{Rails, RmaLane, Role},
};
use uccl_wire::message::{self, PREFIX_LEN};

use super::{
    connection::{Connection, Core, RailLane, Transfer},
    core::Devices,
    sends::MAX_QUEUED,
    work::Work,
};
use crate::{
    devices,
    error::{Error, Result},
    types::Accepted,
};

/// Bytes that wait for a peer that goes on asking. Whoever reads what comes never leaves so many: of what we send by
/// ourselves, less may wait.
const MAX_UNREAD: usize = 2 * MAX_QUEUED;

impl Core {
    /// The devices of this endpoint, opened at the first call.
    pub(crate) fn devices(&self) -> &Devices {
        let mut opened = false;
        let devices = self.rails.get_or_init(|| {
            opened = true;
            let devices::Opened { rails, why_none } = devices::open(&self.config);
            Devices { rails: Arc::new(Rails::new(rails)), why_none }
        });
        if opened {
            // Regions that are added from now on find the devices by themselves.
            self.mrs
                .each(|mr| devices.rails.add(mr.region.slot, mr.span, mr.kind, mr.region.rights));
        }
        devices
    }

    /// A lane over the rails that the two ends have.
    pub(crate) fn rail_lane(&self, role: Role) -> Result<Arc<RmaLane>> {
        let (rails, regions) = (Arc::clone(&self.devices().rails), Arc::clone(&self.mrs.table));
        let stall = Some(self.config.timeout);
        let lane = RmaLane::new(role, rails, regions, stall);
        lane.map(Arc::new).map_err(|e| Error::os("making a lane over rails", e))
    }
}

impl Connection {
    /// What one end of the rails' lane says to the other goes with the messages of the first lane.
    pub(crate) fn forward_notes(&self) {
        let Some(RailLane { lane, index }) = &self.rails else { return };
        while lane.has_notes() {
            let Some(_in_order) = self.talk.try_lock() else {
                // Whoever looks after that lane next tries again.
                return self.kick_lane(*index);
            };
            let Some(note) = lane.take_note() else { return };
            let mut bytes = Vec::with_capacity(PREFIX_LEN + 64);
            message::link_head(*index as u16, &mut bytes);
            note.encode_to(&mut bytes);
            self.send_message(&[&bytes]);
        }
    }

    /// The peer's end of a lane has something to say to ours.
    pub(crate) fn on_link(self: &Arc<Self>, lane: u16, note: &[u8]) -> Result<(), String> {
        let Some(rails) = self.rails.as_ref().filter(|rails| rails.index == usize::from(lane))
        else {
            return Err(format!("a note for lane {lane}, which takes none"));
        };
        rails.lane.hear(note)?;
        self.forward_notes();
        let waiting = self.lanes[0].queued_bytes();
        if waiting > MAX_UNREAD {
            return Err(format!("more is asked than is read of the answers: {waiting} bytes wait"));
        }
        if rails.lane.is_settled() {
            self.offer_accept();
        }
        Ok(())
    }

    /// Hands the connection to whoever accepts, now or when its rails have been tried or have had their time.
    pub(crate) fn accept_when_settled(self: &Arc<Self>, accepted: Accepted) {
        *self.accepting.lock() = Some(accepted);
        let is_settled = || self.rails.as_ref().is_none_or(|rails| rails.lane.is_settled());
        if !is_settled() {
            self.core.await_rails(self);
        }
        // Again: the last of them may have been tried meanwhile.
        if is_settled() {
            self.offer_accept();
        }
    }

    /// The peer has not said in time that the rails have been tried.
    pub(super) fn do_without_rails(self: &Arc<Self>) {
        if self.rails_up().is_none() && self.core.config.transport.needs_rails() {
            let why = self.why_no_rails();
            return self.close(self.lost_to(format!("no rail works: {why}")));
        }
        self.offer_accept();
    }

    fn offer_accept(&self) {
        if let Some(accepted) = self.accepting.lock().take() {
            self.core.offer_accept(accepted);
        }
    }

    /// The rails, if they carry what is between this memory of ours and the peer's.
    pub(crate) fn rails_for(&self, work: &Work) -> Option<&RailLane> {
        let rails = self.rails.as_ref()?;
        let lost = self.fates.lost(rails.index);
        (!lost && work.len_bytes() > 0 && rails.lane.reaches(&work.local, work.memory))
            .then_some(rails)
    }

    /// The lanes over rails that work now.
    pub(crate) fn rails_up(&self) -> Option<&RailLane> {
        self.rails.as_ref().filter(|rails| rails.lane.paths_up() > 0)
    }

    /// The rails, if something is on its way over them: it is back sooner than a socket can be asked.
    pub(super) fn rails_under_way(&self) -> Option<&RailLane> {
        self.rails
            .as_ref()
            .filter(|rails| rails.lane.is_under_way() && !self.fates.lost(rails.index))
    }

    /// Whether a lane is not the rails'.
    pub(super) fn is_stream(&self, index: usize) -> bool {
        self.rails.as_ref().is_none_or(|rails| rails.index != index)
    }

    /// The living lanes that are not the rails'.
    pub(super) fn streams(&self) -> impl Iterator<Item = (usize, &Arc<dyn Lane>)> {
        self.living().filter(|(index, _)| self.is_stream(*index))
    }

    /// The rails do not reach what an operation is about, or not any more: the other lanes do it.
    pub(super) fn post_elsewhere(self: &Arc<Self>, transfer: &Arc<Transfer>, work: Work) {
        let is_fenced = transfer.body.lock().fence.is_some();
        if is_fenced || self.is_failed() {
            // What that means is told by the fence, or by the connection.
            return Arc::clone(transfer).complete(Err(OpError::LaneDown));
        }
        self.post_on_streams(transfer, work);
        transfer.op_ended();
    }

    /// Why no rail works, for people.
    pub(crate) fn why_no_rails(&self) -> String {
        let Some(rails) = &self.rails else { return "the peer offers none".into() };
        let paths = rails.lane.describe();
        if paths.is_empty() {
            let Devices { rails, why_none } = self.core.devices();
            return match rails.all() {
                [] => why_none.clone(),
                [rail, ..] => format!("the peer has no rail of the kind of {}", rail.info().name),
            };
        }
        let why = paths.iter().map(|(name, why)| match why {
            Ok(()) => format!("{name} works"),
            Err(why) => format!("{name}: {why}"),
        });
        why.collect::<Vec<_>>().join("; ")
    }
}
