//! The lane over rails (devices that move memory one-sidedly), beside the streams that carry
//! messages.

use std::sync::Arc;

use uccl_fabric::lane::RailLane;
use uccl_rma::{RmaLane, Role};
use uccl_wire::message::{self, PREFIX_LEN};

use super::{
    core::{Core, Devices, connection::Connection},
    timers,
    work::Work,
};
use crate::{
    devices,
    error::{Error, Result},
};

impl Core {
    /// The devices of this endpoint. The first call starts to open them, and to show them the
    /// regions that there are, on a thread of its own.
    pub(crate) fn devices(&self) -> &Devices {
        self.devices_by(|| {
            let config = self.config.clone();
            move || devices::open(&config)
        })
    }

    /// The devices of this endpoint; `how` gives the function that opens them.
    pub(crate) fn devices_by<O>(&self, how: impl FnOnce() -> O) -> &Devices
    where
        O: FnOnce() -> devices::OpenedDevices + Send + 'static,
    {
        let mut is_first = false;
        let devices = self.rails.get_or_init(|| {
            is_first = true;
            Devices::default()
        });
        if is_first {
            // Regions that are added from now on are shown to the devices by the threads that add
            // them.
            self.mrs
                .each(|mr| devices.rails.add(mr.region.slot, mr.span, mr.kind, mr.region.rights));
            let (open, why_none) = (how(), Arc::clone(&devices.why_none));
            devices.rails.open_by(move || {
                let opened = open();
                // They are opened once.
                let _ = why_none.set(opened.why_none);
                opened.rails
            });
        }
        devices
    }

    /// Makes a lane over the rails that both ends have.
    pub(crate) fn rail_lane(&self, role: Role) -> Result<Arc<RmaLane>> {
        let (rails, regions) = (Arc::clone(&self.devices().rails), Arc::clone(&self.mrs.table));
        let lane = RmaLane::new(role, rails, regions, timers::of_rails(&self.config));
        lane.map(Arc::new).map_err(|e| Error::os("making a lane over rails", e))
    }
}

impl Connection {
    /// Sends the rail lane's notes to its other end, as messages on the first lane.
    pub(crate) fn forward_notes(&self) {
        let Some(lane) = &self.lanes.rails else { return };
        while lane.has_notes() {
            let Some(_in_order) = self.talk.try_lock() else {
                // Another thread holds the session: the worker that is woken here tries again.
                return self.kick_lane(self.lanes.rails_place());
            };
            let Some(note) = lane.take_note() else { return };
            let mut bytes = Vec::with_capacity(PREFIX_LEN + 64);
            message::link_head(self.lanes.rails_place() as u16, &mut bytes);
            note.encode_to(&mut bytes);
            self.send_message(&[&bytes]);
        }
    }

    /// Hands a note from the peer's end of a lane to our end. Returns whether all rails have been
    /// tried.
    pub(crate) fn on_link(self: &Arc<Self>, lane: u16, note: &[u8]) -> Result<bool, String> {
        let is_theirs = usize::from(lane) == self.lanes.rails_place();
        let Some(rails) = self.lanes.rails.as_ref().filter(|_| is_theirs) else {
            return Err(format!("a note for lane {lane}, which takes none"));
        };
        rails.hear(note)?;
        self.forward_notes();
        Ok(rails.is_settled())
    }

    /// The rail lane, if it is not lost and reaches this work's local memory.
    pub(crate) fn rails_for(&self, work: &Work) -> Option<&dyn RailLane> {
        let rails = &**self.lanes.rails.as_ref()?;
        let lost = self.lanes.lost.has(self.lanes.rails_place());
        (!lost && work.len_bytes() > 0 && rails.reaches(&work.local, work.memory)).then_some(rails)
    }

    /// Why no rail works, as text for people.
    pub(crate) fn why_no_rails(&self) -> String {
        let Some(rails) = &self.lanes.rails else { return "the peer offers none".into() };
        let paths = rails.describe();
        if paths.is_empty() {
            let Devices { rails, why_none } = self.core.devices();
            return match rails.all() {
                [] if !rails.are_open() => "the devices are still being opened".into(),
                [] => why_none.get().cloned().unwrap_or_default(),
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
