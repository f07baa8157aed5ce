//! The conformance suite of links, with all memory on a GPU: a real one if there is one, else one
//! of the fake driver.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
mod support;

use std::{path::Path, sync::Arc};

use uccl_chaos::{ChaosLane, LaneFaults};
use uccl_conformance::End;
use uccl_device::cuda::Gpus;
use uccl_fabric::region::RegionTable;
use uccl_local::LocalLane;

fn lanes() -> [(LocalLane, Arc<RegionTable>); 2] {
    let [ours, theirs] = [(); 2].map(|()| Arc::new(RegionTable::new().expect("a table")));
    let (a, b) = support::lanes(&ours, &theirs);
    [(a, ours), (b, theirs)]
}

fn holds(link: &str, join: impl Fn() -> [End; 2]) {
    // The fake driver is loaded before the first use of a driver.
    if !Path::new("/dev/nvidiactl").exists() {
        fake_driver::load();
    }
    let gpu = Gpus::get().device(0).expect("a GPU").context().expect("its context");
    uccl_conformance::run_on_gpu(link, gpu, join);
}

#[test]
fn by_the_gpu() {
    holds("cuda_ipc", || lanes().map(|(lane, regions)| End::of_host(Arc::new(lane), regions)));
}

#[test]
fn in_chaos() {
    let faults =
        LaneFaults { hold_completions: 3, repeat_writes_percent: 30, ..LaneFaults::default() };
    holds("cuda_ipc in chaos", || {
        lanes().map(|(lane, regions)| {
            End::of_host(Arc::new(ChaosLane::of_host(lane, 3, faults.clone())), regions)
        })
    });
}
