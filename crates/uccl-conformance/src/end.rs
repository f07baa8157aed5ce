//! One end of a pair of lanes.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use parking_lot::Mutex;
use uccl_fabric::{
    lane::{HostLane, Lane, MessageLane, MessageSink, RailLane},
    region::{Region, RegionTable},
};

/// What else than the table learns of regions: the devices of rails.
pub trait Devices: Send + Sync {
    /// Registers a region.
    fn add(&self, region: &Region);

    /// Nothing new is asked of a region from now on.
    fn retire(&self, slot: u32);

    /// Whether a device has still something to do with it for us.
    fn is_busy_with(&self, slot: u32) -> bool;

    /// Lets go of a region that nothing touches any more.
    fn remove(&self, slot: u32);
}

/// One end: its lane, as all that it is, and what its owner lets the peer touch.
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
    /// Of a lane that carries messages.
    pub fn of_messages(lane: Arc<impl MessageLane + 'static>, regions: Arc<RegionTable>) -> Self {
        let messages = Some(Arc::clone(&lane) as _);
        let (host, rails, devices, inbox) = (None, None, None, Inbox::default());
        Self { lane, messages, host, rails, regions, devices, inbox }
    }

    /// Of a lane between processes of one host.
    pub fn of_host(lane: Arc<impl HostLane + 'static>, regions: Arc<RegionTable>) -> Self {
        Self { host: Some(Arc::clone(&lane) as _), ..Self::of_messages(lane, regions) }
    }

    /// Of a lane over rails.
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

/// Messages that came in, in order, and how many words have changed.
#[derive(Default)]
pub struct Inbox(pub Mutex<Vec<Vec<u8>>>, pub AtomicUsize);

impl MessageSink for Inbox {
    fn message(&self, bytes: &[u8]) -> Result<(), String> {
        self.0.lock().push(bytes.to_vec());
        Ok(())
    }

    fn signalled(&self) {
        self.1.fetch_add(1, Relaxed);
    }
}
