//! The conformance tests of links: over TCP, over pipes with faults, and over lanes with faults.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;

use std::{
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
    time::Duration,
};

use uccl_chaos::{ChaosLane, Faults, LaneFaults, pair_of};
use uccl_conformance::End;
use uccl_device::cuda::Gpus;
use uccl_fabric::{gpu::CopyBy, pipe::Pipe, region::RegionTable};
use uccl_stream::{
    StreamLane, StreamOptions,
    sealed::SealedPipe,
    tcp::{TcpOptions, TcpPipe, TcpRx, TcpTx},
};
use uccl_wire::record::{Opener, Sealer};

fn table() -> Arc<RegionTable> {
    Arc::new(RegionTable::new().expect("a table"))
}

fn lane<P: Pipe>(
    (pipe, tx, rx): (P, P::Tx, P::Rx),
    regions: &Arc<RegionTable>,
    checksum: bool,
) -> StreamLane<P> {
    let options =
        StreamOptions { regions: Arc::clone(regions), checksum, copy_by: CopyBy::default() };
    StreamLane::new(pipe, tx, rx, options)
}

fn end<P: Pipe>(parts: (P, P::Tx, P::Rx), checksum: bool) -> End {
    let regions = table();
    End::of_messages(Arc::new(lane(parts, &regions, checksum)), regions)
}

fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let address = listener.local_addr().expect("an address");
    let one = TcpStream::connect(address).expect("connected");
    (one, listener.accept().expect("accepted").0)
}

fn over(socket: TcpStream) -> (TcpPipe, TcpTx, TcpRx) {
    let options = TcpOptions { congestion: None, timeout: Duration::from_secs(10) };
    TcpPipe::new(socket, &options).expect("a pipe")
}

fn over_tcp(checksum: bool) -> [End; 2] {
    let (one, other) = connected();
    [one, other].map(|socket| end(over(socket), checksum))
}

#[test]
fn tcp() {
    uccl_conformance::run("tcp", || over_tcp(false));
}

#[test]
fn tcp_with_checksums() {
    uccl_conformance::run("tcp with checksums", || over_tcp(true));
}

/// Both ends of one direction of records.
fn keyed(key: u8) -> (Sealer, Opener) {
    (Sealer::new(&[key; 32]), Opener::new(&[key; 32]))
}

#[test]
fn tcp_in_records() {
    uccl_conformance::run("tcp in records", || {
        let [there, back] = [1, 2].map(keyed);
        let (one, other) = connected();
        let ends = [(one, there.0, back.1), (other, back.0, there.1)];
        ends.map(|(socket, sealer, opener)| {
            end(SealedPipe::over(over(socket), sealer, opener), false)
        })
    });
}

#[test]
fn tcp_with_memory_of_a_gpu() {
    // Before anyone asks for a driver: a real one where there is one.
    if !Path::new("/dev/nvidiactl").exists() {
        fake_driver::load();
    }
    let gpu = Gpus::get().device(0).expect("a GPU").context().expect("its context");
    uccl_conformance::run_on_gpu("tcp to a GPU", gpu, || over_tcp(false));
}

#[test]
fn pipes_that_split_and_delay() {
    let faults = Faults {
        capacity_bytes: 100_000,
        split_bytes: 20_000,
        delay_polls: 2,
        ..Faults::default()
    };
    uccl_conformance::run("a slow pipe", || {
        let (a, b) = pair_of(5, faults.clone(), faults.clone()).expect("a pipe");
        [end(a, false), end(b, false)]
    });
}

#[test]
fn records_over_pipes_that_split_and_delay() {
    let faults = Faults {
        capacity_bytes: 100_000,
        split_bytes: 20_000,
        delay_polls: 2,
        ..Faults::default()
    };
    uccl_conformance::run("records over a slow pipe", || {
        let (a, b) = pair_of(5, faults.clone(), faults.clone()).expect("a pipe");
        let [there, back] = [1, 2].map(keyed);
        let a = SealedPipe::over(a, there.0, back.1);
        let b = SealedPipe::over(b, back.0, there.1);
        [end(a, false), end(b, false)]
    });
}

#[test]
fn lanes_that_hold_completions_and_repeat_writes() {
    let faults =
        LaneFaults { hold_completions: 3, repeat_writes_percent: 30, ..LaneFaults::default() };
    uccl_conformance::run("a chaos lane", || {
        let (a, b) = pair_of(6, Faults::default(), Faults::default()).expect("a pipe");
        [a, b].map(|parts| {
            let regions = table();
            let lane = ChaosLane::new(lane(parts, &regions, false), 7, faults.clone());
            End::of_messages(Arc::new(lane), regions)
        })
    });
}
