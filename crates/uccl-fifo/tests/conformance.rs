//! The checks that every link must pass.

use std::{
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use uccl_conformance::End;
use uccl_fabric::{gpu::CopyBy, region::RegionTable};
use uccl_fifo::{FifoPipe, FifoRx, FifoTx};
use uccl_stream::{StreamLane, StreamOptions};

fn end((pipe, tx, rx): (FifoPipe, FifoTx, FifoRx)) -> End {
    let regions = Arc::new(RegionTable::new().expect("a table"));
    let options =
        StreamOptions { regions: Arc::clone(&regions), checksum: false, copy_by: CopyBy::Gpus };
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
