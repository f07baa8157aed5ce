//! Early ends on a stream lane: revoked regions, fences that wait, cancelled reads.

mod support;

use std::sync::Arc;

use fastrand::Rng;
use uccl_chaos::{Faults, GpuFaults};
use uccl_device::MemoryKind;
use uccl_fabric::lane::{Lane, OpError, OpKind, OpName, OpResult};
use uccl_fabric::mem::{RemoteSpan, Span};
use uccl_fabric::region::Rights;
use uccl_wire::frame::{
    DESC_LEN, Desc, HEADER_LEN, Header, Kind, MAX_DESC_BYTES, MAX_PAYLOAD, Status, TRAILER_LEN,
    Trailer, decode_descs,
};

use support::{
    Patch, ResultAndCopy, copy_of, run_until, sides,
    stage::{Stage, stage, stage_with_gpu},
};

/// The bytes by which a peer begins a write of one piece.
fn write(to: &RemoteSpan, op: u64) -> Vec<u8> {
    let header = Header { last: true, descs: 1, len: to.len, ..Header::bare(Kind::Write, op, 0) };
    let mut bytes = header.encode().to_vec();
    Desc { addr: to.addr, len: to.len, key: to.key, slot: to.slot }.encode_to(&mut bytes);
    bytes
}

fn trailer() -> [u8; TRAILER_LEN] {
    Trailer { crc: 0, status: Status::Ok }.encode()
}

/// The answers that the lane has sent. It must have sent nothing else.
fn answers(stage: &mut Stage) -> Vec<(u64, Status)> {
    let (frames, rest) = {
        let bytes = stage.hear();
        let (frames, rest) = bytes.as_chunks::<HEADER_LEN>();
        (frames.to_vec(), rest.len())
    };
    assert_eq!(rest, 0);
    let headers = frames.iter().map(|bytes| Header::decode(bytes).expect("a frame"));
    headers.map(|header| (header.op, header.status())).collect()
}

/// The answers that the lane sends next, as it makes progress.
fn next_answers(stage: &mut Stage) -> Vec<(u64, Status)> {
    for _ in 0..10_000 {
        let answers = answers(stage);
        if !answers.is_empty() {
            return answers;
        }
        stage.side.progress().expect("alive");
    }
    panic!("the lane does not answer");
}

/// A write is checked for each stretch that comes, also where its bytes go straight from the pipe
/// to the memory.
#[test]
fn a_write_that_has_begun_stops_where_its_region_goes() {
    const LEN: usize = 200_000;
    // The rest is received straight into place, or by way of the lane's own buffer.
    for left in [LEN / 2, 100] {
        let mut stage = stage(2 * LEN);
        let dest = Patch::new(&mut Rng::with_seed(1), &[LEN]);
        let region = stage.side.register(dest.whole(), Rights::WRITE);
        let to = dest.remote(&region)[0];
        let data = vec![0xAB; LEN];
        stage.say(&write(&to, 7));
        stage.say(&data[left..]);
        while stage.side.progress().expect("alive") {}
        let begun = dest.now();
        let landed = dest.pieces_of(&begun).iter().filter(|byte| **byte == 0xAB).count();
        assert!(landed >= LEN - left, "the first part has landed");
        drop(stage.side.regions.revoke(region.slot, region.key).expect("registered"));
        stage.say(&data[..left]);
        stage.say(&trailer());
        while stage.side.progress().expect("alive") {}
        assert!(dest.now() == begun, "{left} bytes came after the region had gone");
        assert_eq!(answers(&mut stage), [(7, Status::UnknownKey)]);
    }
}

/// Frames that have left may still land, and a frame in progress is still sent from the memory.
#[test]
fn a_write_that_was_cut_ends_when_the_peer_has_answered_its_fence() {
    const LEN: usize = 3 * MAX_PAYLOAD as usize;
    let mut stage = stage(100_000);
    let source = Patch::new(&mut Rng::with_seed(6), &[LEN]);
    let done = ResultAndCopy::watching(Span { len: 1, ..source.whole() });
    let far = RemoteSpan { addr: 4096, len: LEN as u64, key: 1, slot: 0 };
    let far = [far].into_iter().collect();
    let name = stage.side.post(OpKind::Write, source.spans(), far, &done).expect("alive");
    stage.side.lane.cancel(name);
    assert_eq!(done.result(), None, "a frame of it is being sent");
    // That frame is sent to its end, and a fence behind it.
    let mut said = Vec::new();
    let first = HEADER_LEN + DESC_LEN + MAX_PAYLOAD as usize + TRAILER_LEN;
    while said.len() < first + HEADER_LEN {
        let more = stage.hear();
        let moved = stage.side.progress().expect("alive");
        assert!(moved || !more.is_empty(), "only {} bytes were sent", said.len());
        said.extend(more);
    }
    let fence = said[first..].try_into().expect("a header, and nothing else");
    let fence = Header::decode(fence).expect("a frame");
    assert_eq!((fence.kind, fence.op), (Kind::Fence, name.0));
    assert_eq!(done.result(), None, "the peer may not have placed all of it");
    stage.say(&Header::bare(Kind::Ack, name.0, Status::Cut as u64).encode());
    stage.side.progress().expect("alive");
    assert_eq!(done.result(), Some(Err(OpError::Cancelled)));
}

/// The answer to a fence means that nothing lands any more: it waits for copies to a GPU.
#[test]
fn a_fence_waits_for_copies() {
    const LEN: usize = 50_000;
    let late = GpuFaults { delay_polls: 1000, seed: 3, ..GpuFaults::default() };
    let mut stage = stage_with_gpu(2 * LEN, late);
    let dest = Patch::new(&mut Rng::with_seed(1), &[LEN]);
    let gpu = MemoryKind::Cuda { device: 0 };
    let region = stage.side.register_as(gpu, dest.whole(), Rights::WRITE);
    let mut frame = write(&dest.remote(&region)[0], 7);
    // More of the same operation is to come, and never does.
    frame[1] = 0;
    stage.say(&frame);
    stage.say(&vec![0xAB; LEN]);
    stage.say(&trailer());
    stage.say(&Header::bare(Kind::Fence, 7, 0).encode());
    stage.side.progress().expect("alive");
    assert!(dest.now() == dest.before, "the copy is late");
    assert_eq!(next_answers(&mut stage), [(7, Status::Cut)]);
    let fenced = dest.now();
    for _ in 0..2000 {
        stage.side.progress().expect("alive");
    }
    assert!(dest.now() == fenced, "nothing lands after the answer");
    assert!(dest.pieces_of(&fenced).iter().all(|byte| *byte == 0xAB), "all landed before");
}

#[test]
fn a_write_is_answered_when_the_copies_of_a_gpu_have_landed() {
    const LEN: usize = 50_000;
    let late = GpuFaults { delay_polls: 1000, seed: 3, ..GpuFaults::default() };
    let mut stage = stage_with_gpu(2 * LEN, late);
    let dest = Patch::new(&mut Rng::with_seed(1), &[LEN]);
    let gpu = MemoryKind::Cuda { device: 0 };
    let region = stage.side.register_as(gpu, dest.whole(), Rights::WRITE);
    stage.say(&write(&dest.remote(&region)[0], 7));
    stage.say(&vec![0xAB; LEN]);
    stage.say(&trailer());
    stage.side.progress().expect("alive");
    assert!(dest.now() == dest.before, "the copy is late");
    assert_eq!(next_answers(&mut stage), [(7, Status::Ok)]);
    assert!(dest.pieces_of(&dest.now()).iter().all(|byte| *byte == 0xAB), "all landed before");
}

/// A read of ours into a GPU's memory: half of the data has come and is copied late.
fn half_read(dest: &Patch) -> (Stage, OpName, Arc<ResultAndCopy>) {
    let len = dest.spans()[0].len;
    let late = GpuFaults { delay_polls: 1000, seed: 3, ..GpuFaults::default() };
    let mut stage = stage_with_gpu(2 * len, late);
    let done = ResultAndCopy::watching(dest.whole());
    let remote = RemoteSpan { addr: 4096, len: len as u64, key: 1, slot: 0 };
    let (gpu, remote) = (MemoryKind::Cuda { device: 0 }, [remote].into_iter().collect());
    let posted = stage.side.post_from(gpu, OpKind::Read, dest.spans(), remote, &done);
    let name = posted.expect("alive");
    stage.hear();
    let half = len / 2;
    let frame =
        Header { last: false, len: half as u64, ..Header::bare(Kind::Data, name.0, 0) }.encode();
    [&frame[..], &vec![0xAB; half], &trailer()].iter().for_each(|said| _ = stage.say(said));
    stage.side.progress().expect("alive");
    assert!(dest.now() == dest.before, "the copy is late");
    (stage, name, done)
}

/// Makes progress until an operation has ended, and for a while after that: nothing lands any more.
fn end_of(stage: &Stage, done: &ResultAndCopy, dest: &Patch) -> Option<OpResult> {
    let mut looks = 0;
    while done.result().is_none() && looks < 10_000 {
        stage.side.progress().expect("alive");
        looks += 1;
    }
    (0..2000).for_each(|_| _ = stage.side.progress().expect("alive"));
    assert!(done.result().is_none() || dest.now() == done.held(), "it landed after the end");
    done.result()
}

/// A cancel does not wait for a GPU.
#[test]
fn a_cancelled_read_ends_when_the_copies_of_a_gpu_have_landed() {
    let dest = Patch::new(&mut Rng::with_seed(1), &[50_000]);
    let (stage, name, done) = half_read(&dest);
    stage.side.lane.cancel(name);
    stage.side.lane.cancel(name);
    assert_eq!(done.result(), None);
    assert!(stage.side.lane.has_work(), "somebody must look");
    assert_eq!(end_of(&stage, &done, &dest), Some(Err(OpError::Cancelled)));
}

#[test]
fn a_read_that_the_peer_refuses_halfway_ends_when_its_copies_have_ended() {
    let dest = Patch::new(&mut Rng::with_seed(1), &[50_000]);
    let (mut stage, name, done) = half_read(&dest);
    stage.say(&Header::bare(Kind::Ack, name.0, Status::Fault as u64).encode());
    assert_eq!(end_of(&stage, &done, &dest), Some(Err(OpError::Remote(Status::Fault))));
}

/// All of it has come, and the GPU has yet to copy it.
#[test]
fn a_read_ends_when_the_copies_of_a_gpu_have_landed() {
    let dest = Patch::new(&mut Rng::with_seed(1), &[50_000]);
    let (mut stage, name, done) = half_read(&dest);
    let frame = Header { last: true, len: 25_000, ..Header::bare(Kind::Data, name.0, 0) }.encode();
    [&frame[..], &[0xAB; 25_000], &trailer()].iter().for_each(|said| _ = stage.say(said));
    stage.side.progress().expect("alive");
    assert_eq!(done.result(), None, "the copies are late");
    assert_eq!(end_of(&stage, &done, &dest), Some(Ok(())));
    assert!(dest.pieces_of(&done.held()).iter().all(|byte| *byte == 0xAB), "all of it");
}

#[test]
fn a_kill_waits_for_late_copies_and_ends_a_cancelled_read() {
    let dest = Patch::new(&mut Rng::with_seed(1), &[50_000]);
    let (stage, name, done) = half_read(&dest);
    stage.side.lane.cancel(name);
    stage.side.lane.kill();
    assert_eq!(done.result(), Some(Err(OpError::LaneDown)));
    assert_eq!(dest.pieces_of(&done.held())[..25_000], [0xAB; 25_000]);
}

/// The peer sends no more of the read than the frame that is on its way, and the lane is free for
/// others.
#[test]
fn a_read_that_is_cancelled_is_not_sent_to_its_end() {
    const LEN: usize = 32 << 20;
    const PIPE_BYTES: usize = 256 << 10;
    let mut rng = Rng::with_seed(4);
    for gpu in [false, true] {
        let short = Faults { capacity_bytes: PIPE_BYTES, ..Faults::default() };
        let sides = sides(0, short.clone(), short, [false; 2]);
        let (source, dest) = (Patch::new(&mut rng, &[LEN]), Patch::new(&mut rng, &[LEN]));
        let kind = if gpu { MemoryKind::Cuda { device: 0 } } else { MemoryKind::Host };
        let region = sides[1].register_as(kind, source.whole(), Rights::READ);
        let first = ResultAndCopy::watching(Span { len: 1, ..dest.whole() });
        let remote = source.remote(&region);
        let name = sides[0].post(OpKind::Read, dest.spans(), remote, &first).expect("alive");
        let start = Span { len: 64, ..dest.spans()[0] };
        let before = copy_of(start);
        run_until(&sides, || copy_of(start) != before).expect("alive");
        sides[0].lane.cancel(name);
        assert_eq!(first.result(), Some(Err(OpError::Cancelled)), "at once");
        let held = dest.now();
        let small = Patch::new(&mut rng, &[10]);
        let second = ResultAndCopy::watching(small.whole());
        let piece = RemoteSpan { len: 10, ..source.remote(&region)[0] };
        let remote = [piece].into_iter().collect();
        sides[0].post(OpKind::Read, small.spans(), remote, &second).expect("alive");
        let mut rounds = 0;
        run_until(&sides, || {
            rounds += 1;
            second.result().is_some()
        })
        .expect("alive");
        assert_eq!(second.result(), Some(Ok(())));
        // A round moves at most the pipe's capacity: all of the read would have taken far more
        // rounds.
        let sent = rounds * PIPE_BYTES;
        assert!(sent < LEN / 2, "{sent} bytes were sent before the next read had its data");
        assert!(dest.now() == held);
        assert_eq!(sides[0].lane.load(), 0, "nothing of the cancelled read is waited for");
        sides[0].lane.cancel(name);
    }
}

/// A piece may be longer than one descriptor can name.
#[test]
fn a_read_of_a_tebibyte_is_asked_for_in_pieces() {
    const LEN: u64 = 1 << 40;
    let mut stage = stage(100_000);
    let own = Patch::new(&mut Rng::with_seed(5), &[1]);
    let done = ResultAndCopy::watching(own.whole());
    let local = Span { addr: 4096, len: LEN as usize };
    let remote = RemoteSpan { addr: 1 << 41, len: LEN, key: 5, slot: 6 };
    let (local, remote) = ([local].into_iter().collect(), [remote].into_iter().collect());
    stage.side.post(OpKind::Read, local, remote, &done).expect("alive");
    let asked = stage.hear();
    let (header, rest) = asked.split_first_chunk::<HEADER_LEN>().expect("a frame");
    let header = Header::decode(header).expect("a frame");
    assert_eq!((header.kind, header.aux), (Kind::Read, LEN));
    let mut descs = Vec::new();
    decode_descs(&header, rest, &mut descs).expect("they add up");
    let mut at = 1 << 41;
    for desc in descs {
        assert_eq!((desc.addr, desc.key, desc.slot), (at, 5, 6));
        assert!((1..=MAX_DESC_BYTES).contains(&desc.len));
        at += desc.len;
    }
    stage.side.lane.kill();
}
