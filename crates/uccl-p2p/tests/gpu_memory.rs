//! GPU memory that was freed, and other memory at its address, on a fake driver.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
#[path = "support/loopback.rs"]
mod loopback;

use std::time::Duration;

use uccl_p2p::{
    Endpoint, Error, MrId,
    device::cuda::{Context, DeviceBuffer, Gpus, wait_until_given_back},
};

use self::loopback::on_loopback;

const LEN: usize = 1 << 20;

fn memory(context: &'static Context) -> DeviceBuffer {
    DeviceBuffer::new(context, LEN).expect("memory")
}

/// A region of memory that was freed, and other memory at its address.
fn replaced(ep: &Endpoint, context: &'static Context) -> Option<(MrId, DeviceBuffer)> {
    let first = memory(context);
    let at = first.address();
    // SAFETY: no copy uses the memory.
    let mr = unsafe { ep.register(at as usize, LEN) }.expect("registered");
    assert!(ep.is_same_memory(mr).expect("a region"));
    drop(first);
    assert!(wait_until_given_back(Duration::from_secs(20)));
    assert!(!ep.is_same_memory(mr).expect("a region"), "nothing is there");
    let mut others: Vec<_> = (0..8).map(|_| memory(context)).collect();
    match others.iter().position(|other| other.address() == at) {
        Some(there) => Some((mr, others.swap_remove(there))),
        None => {
            ep.deregister(mr).expect("ended");
            None
        }
    }
}

#[test]
fn a_region_is_not_of_the_memory_that_came_to_its_address() {
    fake_driver::load();
    let context = Gpus::get().device(0).expect("a GPU").context().expect("its context");
    let config = on_loopback();
    let ep = Endpoint::new(config).expect("an endpoint");
    // A thread may have taken the address meanwhile, for its stack.
    let found = (0..50).find_map(|_| replaced(&ep, context));
    let (mr, other) = found.expect("memory is used again");
    let at = other.address();
    assert!(!ep.is_same_memory(mr).expect("a region"), "something else is there");
    ep.deregister(mr).expect("ended");
    assert!(matches!(ep.is_same_memory(mr), Err(Error::UnknownRegion(_))));
    // SAFETY: as above.
    let mr = unsafe { ep.register(at as usize, LEN) }.expect("registered");
    assert!(ep.is_same_memory(mr).expect("a region"));
    // Memory that the driver does not know is taken for the same.
    let host = [0u8; 64];
    // SAFETY: as above.
    let mr = unsafe { ep.register(host.as_ptr() as usize, 64) }.expect("registered");
    assert!(ep.is_same_memory(mr).expect("a region"));
}
