//! Ends over rails: a lane over any devices.

use std::sync::Arc;

use uccl_device::MemoryKind;
use uccl_fabric::{
    rail::Rail,
    region::{Region, RegionTable},
};
use uccl_rma::{Rails, RmaLane, Role, Silence};

use crate::end::{Devices, End};

/// Two ends, each with these rails.
pub fn over_rails(rails: [Vec<Arc<dyn Rail>>; 2]) -> [End; 2] {
    let [ours, theirs] = rails;
    [end(Role::Connector, ours), end(Role::Acceptor, theirs)]
}

fn end(role: Role, rails: Vec<Arc<dyn Rail>>) -> End {
    let (rails, regions) = (Arc::new(Rails::new(rails)), RegionTable::new().expect("a table"));
    let regions = Arc::new(regions);
    let lane = RmaLane::new(role, Arc::clone(&rails), Arc::clone(&regions), Silence::default());
    End::of_rails(Arc::new(lane.expect("a lane")), regions, Arc::new(RegisteredRails(rails)))
}

/// Registers regions with devices and takes them back, as an engine does.
struct RegisteredRails(Arc<Rails>);

impl Devices for RegisteredRails {
    fn add(&self, region: &Region) {
        self.0.add(region.slot, region.span, MemoryKind::Host, region.rights);
    }

    fn retire(&self, slot: u32) {
        let _ = self.0.retire(slot);
    }

    fn is_busy_with(&self, slot: u32) -> bool {
        self.0.is_busy_with(slot)
    }

    fn remove(&self, slot: u32) {
        self.0.remove(slot).expect("the device lets go");
    }
}
