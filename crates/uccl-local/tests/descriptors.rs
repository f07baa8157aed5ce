//! A process that has as many descriptors open as it may. The test is alone in its process, because
//! the shortage affects all of it.

mod support;

use std::{os::fd::OwnedFd, sync::Arc};

use rustix::{
    event::{EventfdFlags, eventfd},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use uccl_fabric::{
    alloc::{Shareable, SharedBuf, lookup},
    lane::{HostLane, Lane, OpKind},
    mem::RemoteSpan,
    region::{RegionTable, Rights},
};

use support::{carry, lanes, span_of};

const LEN: usize = 100_000;

/// Opens all descriptors that the process may have.
fn hoard() -> Vec<OwnedFd> {
    std::iter::from_fn(|| eventfd(0, EventfdFlags::CLOEXEC).ok()).collect()
}

/// Runs the tests one after the other: both look at the open descriptors of the process.
#[test]
fn descriptors_are_neither_kept_nor_missed() {
    mapped_memory_holds_no_descriptor();
    a_lane_outlives_a_shortage_of_descriptors();
}

fn a_lane_outlives_a_shortage_of_descriptors() {
    let limit = Rlimit { current: Some(200), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("a lower limit");
    let table = || Arc::new(RegionTable::new().expect("a table"));
    let (ours, theirs) = (table(), table());
    let (a, b) = lanes(&ours, &theirs);
    let [missed, taken] = [(); 2].map(|()| SharedBuf::new(LEN).expect("memory"));
    let region = |buf: &Arc<SharedBuf>| -> RemoteSpan {
        let backing = lookup(buf.span()).map(|(backing, _)| backing);
        theirs.insert(buf.span(), Rights::ALL, backing).expect("a region").remote()
    };
    let source = vec![5; LEN];
    let write = |to| carry(&[&a, &b], OpKind::Write, span_of(&source), to);

    let all = hoard();
    b.offer(&Shareable::Host(Arc::clone(&missed)));
    // A lane that prepares for sleep receives the peer's messages.
    a.arm();
    let missed_region = region(&missed);
    assert_eq!(a.path_to(&missed_region), "shm", "there was no descriptor for it");
    assert_eq!(write(missed_region), Ok(()));
    drop(all);

    b.offer(&Shareable::Host(Arc::clone(&taken)));
    a.arm();
    let taken_region = region(&taken);
    assert_eq!(a.path_to(&taken_region), "mapped");
    assert_eq!(write(taken_region), Ok(()));
    for buf in [&missed, &taken] {
        // SAFETY: the buffer lives, and nobody writes to it any more.
        let bytes = unsafe { std::slice::from_raw_parts(buf.as_ptr(), LEN) };
        assert!(bytes == source);
    }
}

/// A peer's offer takes a descriptor no longer than the mapping of its memory takes.
fn mapped_memory_holds_no_descriptor() {
    let open = || std::fs::read_dir("/proc/self/fd").expect("a list").count();
    let table = || Arc::new(RegionTable::new().expect("a table"));
    let (a, b) = lanes(&table(), &table());
    let memory: Vec<_> = (0..20).map(|_| SharedBuf::new(LEN).expect("memory")).collect();
    let before = open();
    memory.iter().for_each(|buf| b.offer(&Shareable::Host(Arc::clone(buf))));
    a.arm();
    assert_eq!(open(), before);
}
