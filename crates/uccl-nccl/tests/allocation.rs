//! A small message through the tables does not allocate.

#[path = "../../uccl-flow/tests/allocations/mod.rs"]
mod allocations;

use std::{
    ffi::c_void,
    ptr::null_mut,
    time::{Duration, Instant},
};

use nccl_net_uccl::tables::ncclNetPlugin_v12 as TABLE;
use uccl_nccl_abi::{CommConfig, HANDLE_BYTES, NcclResult};

/// Calls until the place is filled.
fn filled(mut call: impl FnMut(*mut *mut c_void) -> NcclResult) -> *mut c_void {
    let begun = Instant::now();
    loop {
        let mut made = null_mut();
        assert_eq!(call(&raw mut made), NcclResult::SUCCESS);
        if !made.is_null() {
            return made;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "nothing happened");
        std::thread::yield_now();
    }
}

fn end(request: *mut c_void) {
    let test = TABLE.test.expect("test");
    let begun = Instant::now();
    let mut done = 0;
    while done == 0 {
        // SAFETY: a request that has not ended; nobody asks for its length.
        assert_eq!(unsafe { test(request, &raw mut done, null_mut()) }, NcclResult::SUCCESS);
        assert!(begun.elapsed() < Duration::from_secs(20), "nothing happened");
        std::thread::yield_now();
    }
}

#[test]
fn small_messages_allocate_nothing() {
    let config = CommConfig { traffic_class: -1 };
    // SAFETY: called as NCCL does; the places outlive the calls.
    let context = filled(|to| unsafe { TABLE.init.expect("init")(to, 1, &config, None, None) });
    let mut handle = [0u8; HANDLE_BYTES];
    let at = handle.as_mut_ptr().cast();
    // SAFETY: as above.
    let listen = filled(|to| unsafe { TABLE.listen.expect("listen")(context, 0, at, to) });
    let connect = TABLE.connect.expect("connect");
    // SAFETY: as above.
    let send = filled(|to| unsafe { connect(context, 0, at, to, null_mut()) });
    // SAFETY: as above.
    let recv = filled(|to| unsafe { TABLE.accept.expect("accept")(listen, to, null_mut()) });
    let (isend, irecv) = (TABLE.isend.expect("isend"), TABLE.irecv.expect("irecv"));
    let (mut data, mut room) = (vec![3u8; 4096], vec![0u8; 8192]);
    let (mut into, mut len, mut tag): (*mut c_void, _, _) = (room.as_mut_ptr().cast(), 8192, 0);
    let mut exchange = || {
        let none: *mut c_void = null_mut();
        let from = data.as_mut_ptr().cast();
        // SAFETY: one place in each array; the memory lives until the request has ended, below.
        let receive = filled(|to| unsafe {
            irecv(recv, 1, &raw mut into, &raw mut len, &raw mut tag, none.cast(), none.cast(), to)
        });
        // SAFETY: as above.
        let message = filled(|to| unsafe { isend(send, from, 4096, 0, none, none, to) });
        end(message);
        end(receive);
    };
    // The first receives take room in lists that keep it.
    (0..40).for_each(|_| exchange());
    let before = allocations::count();
    (0..100).for_each(|_| exchange());
    assert_eq!(allocations::count() - before, 0);
    assert!(room[..4096] == data[..]);
    // SAFETY: each is closed once, and not used afterwards.
    unsafe {
        assert_eq!(TABLE.close_send.expect("closeSend")(send), NcclResult::SUCCESS);
        assert_eq!(TABLE.close_recv.expect("closeRecv")(recv), NcclResult::SUCCESS);
        assert_eq!(TABLE.close_listen.expect("closeListen")(listen), NcclResult::SUCCESS);
        assert_eq!(TABLE.finalize.expect("finalize")(context), NcclResult::SUCCESS);
    }
}
