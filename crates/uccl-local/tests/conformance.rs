//! The conformance suite of links, between two ends on this host: with copies through the kernel,
//! over rings, and with injected faults.

mod support;

use std::{os::unix::net::UnixStream, sync::Arc, thread};

use uccl_chaos::{ChaosLane, LaneFaults};
use uccl_conformance::End;
use uccl_device::Process;
use uccl_fabric::region::RegionTable;
use uccl_local::{LocalLane, fdpass::FdSocket};

use self::support::{accept, invite, setup};

/// Both ends. With `by_kernel`, they reach private memory by copies to and from this process.
fn lanes(by_kernel: bool) -> [(LocalLane, Arc<RegionTable>); 2] {
    let process =
        || by_kernel.then(|| Process::open(std::process::id() as i32).expect("this process"));
    let (one, other) = UnixStream::pair().expect("a pair of sockets");
    let [one, other] = [one, other].map(|end| FdSocket::new(end).expect("a socket"));
    let [ours, theirs] = [(); 2].map(|()| Arc::new(RegionTable::new().expect("a table")));
    let (a, b) = thread::scope(|scope| {
        let accepted = scope.spawn(|| accept(other, setup(&theirs, process())));
        (invite(one, setup(&ours, process())), accepted.join().expect("a lane"))
    });
    [(a, ours), (b, theirs)]
}

fn ends(by_kernel: bool) -> [End; 2] {
    lanes(by_kernel).map(|(lane, regions)| End::of_host(Arc::new(lane), regions))
}

#[test]
fn by_the_kernel() {
    uccl_conformance::run("cma", || ends(true));
}

#[test]
fn over_rings() {
    uccl_conformance::run("shm", || ends(false));
}

#[test]
fn in_chaos() {
    let faults =
        LaneFaults { hold_completions: 3, repeat_writes_percent: 30, ..LaneFaults::default() };
    uccl_conformance::run("cma in chaos", || {
        lanes(true).map(|(lane, regions)| {
            End::of_host(Arc::new(ChaosLane::of_host(lane, 3, faults.clone())), regions)
        })
    });
}
