//! One end of a pair of lanes.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use parking_lot::Mutex;
use uccl_fabric::{
    lane::{Handling, HostLane, Lane, MessageLane, MessageSink, RailLane},
    region::{Region, RegionTable},
};

/// The devices of rails, which learn of regions as the table does.
pub trait Devices: Send + Sync {
    /// Registers a region.
    fn add(&self, region: &Region);

    /// Lets the peer begin no new access to a region.
    fn retire(&self, slot: u32);

    /// Whether a device still works on a region for this end.
    fn is_busy_with(&self, slot: u32) -> bool;

    /// Unregisters a region that nothing touches any more.
    fn remove(&self, slot: u32);
}

/// One end: its lane by each trait that it implements, and the regions that the peer may touch.
pub struct End {
    pub(crate) lane: Arc<dyn Lane>,
    pub(crate) messages: Option<Arc<dyn MessageLane>>,
    pub(crate) host: Option<Arc<dyn HostLane>>,
    pub(crate) rails: Option<Arc<dyn RailLane>>,
    pub(crate) regions: Arc<RegionTable>,
    pub(crate) devices: Option<Arc<dyn Devices>>,
    pub(crate) inbox: Inbox,
}

impl End {
    /// The end of a lane that carries messages.
    pub fn of_messages(lane: Arc<impl MessageLane + 'static>, regions: Arc<RegionTable>) -> Self {
        let messages = Some(Arc::clone(&lane) as _);
        let (host, rails, devices, inbox) = (None, None, None, Inbox::default());
        Self { lane, messages, host, rails, regions, devices, inbox }
    }

    /// The end of a lane between processes of one host.
    pub fn of_host(lane: Arc<impl HostLane + 'static>, regions: Arc<RegionTable>) -> Self {
        Self { host: Some(Arc::clone(&lane) as _), ..Self::of_messages(lane, regions) }
    }

    /// The end of a lane over rails.
    pub fn of_rails(
        lane: Arc<impl RailLane + 'static>,
        regions: Arc<RegionTable>,
        devices: Arc<dyn Devices>,
    ) -> Self {
        let rails = Some(Arc::clone(&lane) as _);
        let (messages, host, devices) = (None, None, Some(devices));
        Self { lane, messages, host, rails, regions, devices, inbox: Inbox::default() }
    }
}

/// Received messages, in order, and the number of signals.
#[derive(Default)]
pub struct Inbox(pub Mutex<Vec<Vec<u8>>>, pub AtomicUsize);

impl MessageSink for Inbox {
    fn message(&self, bytes: &[u8]) -> Result<Handling, String> {
        self.0.lock().push(bytes.to_vec());
        Ok(Handling::Ended)
    }

    fn go_on(&self) -> Handling {
        Handling::Ended
    }

    fn signalled(&self) {
        self.1.fetch_add(1, Relaxed);
    }
}
