//! Which copies a lane over shared memory leaves to the owner of the memory.

use std::{sync::Arc, thread};

use uccl_device::MemoryKind::{self, Cuda, Host, Managed, Pinned};
use uccl_fabric::{
    lane::HostLane,
    mem::{RemoteSpan, Span},
    region::{RegionTable, Rights, SharedBacking},
};
use uccl_local as local;
use uccl_local::{
    LocalLane, Setup,
    fdpass::{FdListener, FdSocket, Message},
};

fn next(socket: &mut FdSocket) -> Message {
    loop {
        match socket.recv().expect("the other end") {
            Some(message) => return message,
            None => thread::yield_now(),
        }
    }
}

/// Our end of a lane, and the table of the peer's regions.
fn lane() -> (LocalLane, LocalLane, Arc<RegionTable>) {
    let name = format!("uccl-owner-{}-{:?}", std::process::id(), thread::current().id());
    let listener = FdListener::bind(name.as_bytes()).expect("a name of its own");
    let mut ours = FdSocket::connect(name.as_bytes()).expect("its listener");
    let mut other = listener.accept().expect("a socket").expect("who connected");
    let table = || Arc::new(RegionTable::new().expect("a table"));
    let (regions, theirs) = (table(), table());
    let setup = |regions: &Arc<RegionTable>| Setup {
        regions: Arc::clone(regions),
        process: None,
        checksum: false,
    };
    let invitation = local::invite(&mut ours, 7, &regions).expect("an invitation");
    let asked = next(&mut other);
    let b = local::accept(other, asked, setup(&theirs)).expect("a lane");
    let answer = next(&mut ours);
    let a = invitation.accepted(ours, answer, setup(&regions)).expect("a lane");
    (a, b, theirs)
}

#[test]
fn locked_memory_of_its_own_is_left_to_its_owner() {
    let (lane, _peer, theirs) = lane();
    let region = |kind: MemoryKind, backing| {
        let span = Span { addr: 0x10_0000, len: 1 << 20 };
        theirs.insert_kind(kind, span, Rights::ALL, backing).expect("a region").remote()
    };
    let locked = region(Pinned, None);
    let mappable = region(Pinned, Some(SharedBacking { id: 5, offset: 0 }));
    let others = [region(Host, None), region(Managed { device: 0 }, None), mappable];
    let on_gpu = region(Cuda { device: 0 }, None);
    let gpu = Cuda { device: 1 };
    assert_eq!(lane.owner_copies(gpu, &[locked, locked]), [true, true]);
    for ours in [Host, Pinned, Managed { device: 0 }] {
        assert!(lane.owner_copies(ours, &[locked]).is_empty(), "{ours} is the CPU's to copy");
    }
    for other in others.into_iter().chain([on_gpu]) {
        assert!(lane.owner_copies(gpu, &[other, other]).is_empty());
        assert_eq!(
            lane.owner_copies(gpu, &[other, locked, locked, other, locked]),
            [false, true, true, false, true]
        );
    }
    let forged = RemoteSpan { key: locked.key ^ 1, ..locked };
    assert_eq!(lane.owner_copies(gpu, &[locked, forged]), [true, false]);
    theirs.revoke(locked.slot, locked.key).map(drop).expect("it was there");
    assert!(lane.owner_copies(gpu, &[locked]).is_empty());
}

#[test]
fn nobody_copies_as_owner_memory_that_no_gpu_reaches() {
    let (lane, _peer, theirs) = lane();
    let span = Span { addr: 0x10_0000, len: 1 << 20 };
    let gpu = Cuda { device: 0 };
    // It was never offered, so no GPU of ours opens it.
    let theirs = theirs.insert_kind(gpu, span, Rights::ALL, None).expect("a region").remote();
    for ours in [Host, Pinned, gpu] {
        assert!(!lane.copies_as_owner(ours, &[theirs]));
    }
}
