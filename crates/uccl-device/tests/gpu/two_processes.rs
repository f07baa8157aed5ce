//! Memory that is shared with another process: this same program, started with a role.

use std::{fs::File, sync::Arc};

use uccl_device::cuda::{
    AddressRange, DeviceBuffer, Exporter, GpuError, Gpus, Importer, IpcHandle, LegacyExport,
    Mapping, MemoryExport, PeerId, Physical, PinnedBuffer, PoolBuffer,
};

use crate::{
    devices, gather,
    support::{Peer, assert_same, borrowed, buffer, download, gpus, pattern, stream, upload},
    topology,
};

const LEN: usize = (3 << 20) + 4096;
const PEER: PeerId = PeerId(1);

/// Not a test: the program of the other process.
#[test]
#[ignore = "the other process of a test"]
fn other_process() {
    let Some((role, peer)) = Peer::of_this_process() else { return };
    match role.as_str() {
        "list" => devices::list(&peer),
        "open" => open(&peer),
        "map" => map(&peer),
        "hold" => hold(&peer),
        "order" => topology::order(&peer),
        "own" => own(&peer),
        "poison" => gather::poison(&peer),
        role => panic!("there is no role {role}"),
    }
}

/// A handle in a message: the bytes, and the GPU that shall open it.
fn message(gpu: u32, export: &LegacyExport) -> Vec<u8> {
    [gpu.to_le_bytes().as_slice(), &export.handle.0].concat()
}

fn opened(importer: &Importer, message: &[u8]) -> Result<Arc<Mapping>, GpuError> {
    let (gpu, handle) = message.split_first_chunk::<4>().expect("a GPU");
    let context = Gpus::get().device(u32::from_le_bytes(*gpu))?.context()?;
    importer.open(context, PEER, IpcHandle(handle.try_into().expect("a handle")))
}

fn legacy(exporter: &Exporter, address: u64, len: usize) -> LegacyExport {
    match exporter.export(address, len).expect("it can be exported") {
        MemoryExport::Legacy(export) => export,
        other => panic!("plain memory has a handle, and not {other:?}"),
    }
}

/// The last GPU: another one where there are two.
fn last_gpu() -> u32 {
    Gpus::get().devices().len() as u32 - 1
}

/// Opens a handle, checks the contents, writes others, and reports it.
fn open(peer: &Peer) {
    let importer = Importer::default();
    let request = peer.hear();
    let mapping = opened(&importer, &request).expect("it opens");
    let again = opened(&importer, &request).expect("it is open");
    assert!(Arc::ptr_eq(&mapping, &again));
    assert_eq!(importer.len(), 1);
    assert!(mapping.len_bytes() >= LEN, "{} bytes", mapping.len_bytes());
    let found = download(mapping.context(), mapping.address(), LEN);
    assert_same(&found, &pattern(10, LEN), "what the owner wrote");
    upload(mapping.context(), mapping.address(), &pattern(11, LEN));
    drop((mapping, again));
    assert!(importer.is_empty());
    peer.say(b"written");
}

#[test]
fn a_handle_opens_the_memory_in_another_process() {
    let Some(found) = gpus(1) else { return };
    let mut reaching = vec![0, last_gpu()];
    reaching.dedup();
    for gpu in reaching {
        let memory = buffer(found[0], &pattern(10, LEN));
        let exporter = Exporter::default();
        let export = legacy(&exporter, memory.address() + 100, LEN - 100);
        assert_eq!(export.base, memory.address());
        assert_eq!(legacy(&exporter, memory.address(), LEN), export);
        assert_eq!(exporter.len(), 1);
        assert!(exporter.export(memory.address(), usize::MAX).is_err());
        assert!(exporter.export(memory.address(), 1 << 40).is_err());
        let peer = Peer::start("open");
        peer.say(&message(gpu, &export));
        assert_eq!(peer.hear(), b"written");
        peer.finish();
        let now = download(found[0], memory.address(), LEN);
        assert_same(&now, &pattern(11, LEN), "what the other process wrote");
    }
}

/// Maps descriptors, checks the contents, writes others, and reports it.
fn map(peer: &Peer) {
    let (request, fds) = peer.receive();
    let (gpu, piece) = request.split_first_chunk::<4>().expect("a GPU");
    let piece = u64::from_le_bytes(piece.try_into().expect("a length")) as usize;
    let gpu = u32::from_le_bytes(*gpu);
    let context = Gpus::get().device(gpu).expect("a GPU").context().expect("a context");
    let long: Vec<_> = fds.iter().map(|fd| (fd, 64 * piece)).collect();
    let error = Importer::map(context, &long).map(|_| ()).expect_err("longer than it is");
    assert!(error.code().is_some(), "{error}");
    let pieces: Vec<_> = fds.iter().map(|fd| (fd, piece)).collect();
    let mapping = Importer::map(context, &pieces).expect("it is mapped");
    drop(pieces);
    drop(fds);
    let len = mapping.len_bytes();
    let found = download(context, mapping.address(), len);
    assert_same(&found, &pattern(12, len), "what the owner wrote");
    upload(context, mapping.address(), &pattern(13, len));
    context.probe().expect("nothing is lost");
    peer.say(b"written");
}

#[test]
fn descriptors_map_pieces_in_another_process() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    if !context.device().exports_descriptors() {
        eprintln!("skipped: lacks a GPU that shares memory as file descriptors");
        return;
    }
    let mut reaching = vec![0, last_gpu()];
    reaching.dedup();
    for gpu in reaching {
        let piece = Physical::granularity(context).expect("a granularity");
        let mut range = AddressRange::reserve(context, 3 * piece).expect("addresses");
        for index in 0..3 {
            let physical = Physical::new(context, piece, true).expect("physical memory");
            range.map(index * piece, piece, &physical).expect("mapped");
        }
        upload(context, range.address(), &pattern(12, 3 * piece));
        let exporter = Exporter::default();
        let second = exporter.export(range.address() + piece as u64 + 5, 100).expect("exported");
        assert!(
            matches!(&second, MemoryExport::Descriptors(list) if list.len() == 1),
            "{second:?}"
        );
        let exported = exporter.export(range.address(), 3 * piece).expect("exported");
        let MemoryExport::Descriptors(list) = exported else { panic!("not by descriptor") };
        let bases: Vec<_> = list.iter().map(|export| export.base - range.address()).collect();
        assert_eq!(bases, [0, piece as u64, 2 * piece as u64]);
        let fds: Vec<_> = list.into_iter().map(|export| export.fd).collect();
        let peer = Peer::start("map");
        let request = [gpu.to_le_bytes().as_slice(), &(piece as u64).to_le_bytes()].concat();
        peer.send(&request, &borrowed(&fds));
        drop(fds);
        assert_eq!(peer.hear(), b"written");
        peer.finish();
        let now = download(context, range.address(), 3 * piece);
        assert_same(&now, &pattern(13, 3 * piece), "what the other process wrote");
    }
}

#[test]
fn memory_that_cannot_be_shared_says_why() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let exporter = Exporter::default();
    let why = |address: u64| match exporter.export(address, 16) {
        Err(GpuError::NotExportable { why, .. }) => {
            println!("{why}");
            why
        }
        other => panic!("{other:?}"),
    };
    let stream = stream(context);
    let pooled = PoolBuffer::new(&stream, 1 << 20).expect("memory of a pool");
    assert!(why(pooled.address()).contains("pool"));
    let piece = Physical::granularity(context).expect("a granularity");
    let mut range = AddressRange::reserve(context, piece).expect("addresses");
    let physical = Physical::new(context, piece, false).expect("physical memory");
    range.map(0, piece, &physical).expect("mapped");
    assert!(why(range.address()).contains("POSIX_FILE_DESCRIPTOR"));
    let pinned = PinnedBuffer::new(context, 4096).expect("pinned memory");
    assert!(why(pinned.address()).contains("pinned"));
    let plain = [0_u8; 16];
    assert!(why(plain.as_ptr().addr() as u64).contains("host"));
    assert!(exporter.is_empty());
}

#[test]
fn a_forged_handle_is_refused_and_harms_nothing() {
    let Some(found) = gpus(1) else { return };
    let importer = Importer::default();
    let memory = buffer(found[0], &pattern(14, LEN));
    let real = legacy(&Exporter::default(), memory.address(), LEN);
    let random: [u8; 64] = pattern(15, 64).try_into().expect("64 bytes");
    for bytes in [[0; 64], [0xff; 64], random] {
        let error = importer.open(found[0], PEER, IpcHandle(bytes)).expect_err("forged");
        println!("forged: {error}");
        assert!(matches!(error, GpuError::Driver { .. }), "{error}");
    }
    // Its own handle is of no use to a process.
    assert!(importer.open(found[0], PEER, real.handle).is_err());
    assert!(importer.is_empty());
    let file = File::open("/dev/null").expect("a file");
    let error = Importer::map(found[0], &[(&file, LEN)]).map(|_| ()).expect_err("forged");
    println!("forged: {error}");
    assert!(Importer::map::<File>(found[0], &[]).is_err());
    found[0].probe().expect("nothing is lost");
    assert_same(&download(found[0], memory.address(), LEN), &pattern(14, LEN), "the memory");
}

/// Opens a handle and holds it while the owner frees the memory.
fn hold(peer: &Peer) {
    let importer = Importer::default();
    let mapping = opened(&importer, &peer.hear()).expect("it opens");
    let context = mapping.context();
    peer.say(b"open");
    assert_eq!(peer.hear(), b"freed");
    assert_eq!(download(context, mapping.address(), LEN).len(), LEN);
    upload(context, mapping.address(), &pattern(16, LEN));
    drop(mapping);
    context.probe().expect("nothing is lost");
    peer.say(b"closed");
    // The new memory at the old address opens, and holds its new contents.
    let mapping = opened(&importer, &peer.hear()).expect("it opens");
    let found = download(context, mapping.address(), LEN);
    assert_same(&found, &pattern(17, LEN), "the new memory");
    peer.say(b"checked");
}

#[test]
fn an_owner_may_free_memory_that_another_process_has_open() {
    let Some(found) = gpus(1) else { return };
    let exporter = Exporter::default();
    let memory = buffer(found[0], &pattern(10, LEN));
    let old = memory.address();
    let export = legacy(&exporter, old, LEN);
    let peer = Peer::start("hold");
    peer.say(&message(last_gpu(), &export));
    assert_eq!(peer.hear(), b"open");
    drop(memory);
    peer.say(b"freed");
    assert_eq!(peer.hear(), b"closed");
    let memory = buffer(found[0], &pattern(17, LEN));
    println!(
        "the address was {}given out again",
        if memory.address() == old { "" } else { "not " }
    );
    let export = legacy(&exporter, memory.address(), LEN);
    peer.say(&message(last_gpu(), &export));
    assert_eq!(peer.hear(), b"checked");
    peer.finish();
    found[0].probe().expect("nothing is lost");
    assert_same(&download(found[0], memory.address(), LEN), &pattern(17, LEN), "the memory");
}

/// Owns memory until it is killed.
fn own(peer: &Peer) {
    let context = Gpus::get().device(0).expect("a GPU").context().expect("a context");
    let memory = buffer(context, &pattern(18, LEN));
    let export = legacy(&Exporter::default(), memory.address(), LEN);
    peer.say(&message(last_gpu(), &export));
    peer.hear();
}

#[test]
fn an_owner_may_die_while_its_memory_is_open() {
    let Some(found) = gpus(1) else { return };
    let importer = Importer::default();
    let mut peer = Peer::start("own");
    let mapping = opened(&importer, &peer.hear()).expect("it opens");
    let context = mapping.context();
    let before = download(context, mapping.address(), LEN);
    assert_same(&before, &pattern(18, LEN), "before its owner died");
    peer.kill();
    assert_eq!(download(context, mapping.address(), LEN).len(), LEN);
    drop(mapping);
    context.probe().expect("nothing is lost");
    found[0].probe().expect("nothing is lost");
}

#[test]
fn nothing_is_left_of_two_hundred_rounds() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let exporter = Exporter::default();
    let round = || {
        let memory = DeviceBuffer::new(context, 8 << 20).expect("device memory");
        legacy(&exporter, memory.address(), 8 << 20);
        exporter.forget(memory.address() + 5);
        let piece = Physical::granularity(context).expect("a granularity");
        let mut range = AddressRange::reserve(context, piece).expect("addresses");
        range.map(0, piece, &Physical::new(context, piece, true).expect("memory")).expect("mapped");
        exporter.export(range.address(), piece).expect("exported");
    };
    round();
    let descriptors = || std::fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0);
    let fds = descriptors();
    (0..200).for_each(|_| round());
    // Other tests use the same GPU and the same table of descriptors at the same time; 200 rounds
    // that leak leave more than they ever do.
    assert!(descriptors() < fds + 150, "{} descriptors were {fds}", descriptors());
    assert!(exporter.is_empty(), "{} handles are known", exporter.len());
}
