//! The checks that every link must pass.

use std::{
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use uccl_conformance::End;
use uccl_fabric::{
    gpu::CopyBy,
    mem::Span,
    pipe::{Pipe, PipeRx},
    region::RegionTable,
};
use uccl_fifo::{FifoPipe, FifoRx, FifoTx};
use uccl_stream::{StreamLane, StreamOptions};

fn end((pipe, tx, rx): (FifoPipe, FifoTx, FifoRx)) -> End {
    let regions = Arc::new(RegionTable::new().expect("a table"));
    let options = StreamOptions {
        regions: Arc::clone(&regions),
        checksum: false,
        copy_by: CopyBy::default(),
    };
    End::of_messages(Arc::new(StreamLane::new(pipe, tx, rx, options)), regions)
}

#[test]
fn fifos() {
    let (folder, count) = (std::env::temp_dir(), AtomicU32::new(0));
    uccl_conformance::run("fifo", || {
        let name = format!("uccl-test-{}-{}", std::process::id(), count.fetch_add(1, Relaxed));
        let (near, far) = UnixStream::pair().expect("a pair");
        let offered = uccl_fifo::offer(&folder, &name, far.into()).expect("offered");
        [uccl_fifo::join(&folder, &name, near.into()).expect("joined"), offered].map(end)
    });
}

#[test]
fn a_peer_that_leaves_before_it_is_heard_is_an_end() {
    let folder = std::env::temp_dir();
    for joins in [false, true] {
        let name = format!("uccl-test-{}-left-{joins}", std::process::id());
        let (near, far) = UnixStream::pair().expect("a pair");
        let (_pipe, _tx, mut rx) = uccl_fifo::offer(&folder, &name, far.into()).expect("offered");
        let mut bytes = [0_u8; 8];
        let span = Span { addr: bytes.as_mut_ptr() as usize, len: bytes.len() };
        // SAFETY: the bytes are this test's own, and outlive the call.
        let mut recv = || unsafe { rx.recv(&[span]) }.expect("no fault");
        assert_eq!(recv(), None, "the peer has not joined yet");
        match joins {
            // The cut takes back the byte that says that it has joined.
            true => {
                let (pipe, ..) = uccl_fifo::join(&folder, &name, near.into()).expect("joined");
                pipe.cut();
            }
            false => drop(near),
        }
        assert_eq!(recv(), Some(0), "joins: {joins}");
    }
}
