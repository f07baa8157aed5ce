//! A peer that keeps to no rules: raw bytes into the pipe of a lane.

mod support;

use std::ops::Range;

use fastrand::Rng;
use uccl_chaos::each_seed;
use uccl_device::MemoryKind;
use uccl_fabric::lane::{Lane, OpError, OpKind};
use uccl_fabric::mem::RemoteSpan;
use uccl_fabric::region::Rights;
use uccl_wire::checked::{Crc, seal};
use uccl_wire::frame::{Desc, HEADER_LEN, Header, Kind, Status, Trailer};
use uccl_wire::signal::{Change, SIGNAL_LEN};

use support::{
    Patch, ResultAndCopy,
    stage::{Stage, stage},
};

/// Memory of the peer that does not exist.
fn elsewhere(len: u64) -> RemoteSpan {
    RemoteSpan { addr: 4096, len, key: 1, slot: 0 }
}

#[test]
fn an_ack_does_not_end_a_write_that_is_still_being_sent() {
    let mut rng = Rng::with_seed(1);
    for answer in [Status::Ok, Status::Cut, Status::Denied] {
        let mut stage = stage(1000);
        let source = Patch::new(&mut rng, &[100_000]);
        let done = ResultAndCopy::watching(source.whole());
        let remote = [elsewhere(100_000)].into_iter().collect();
        let name = stage.side.post(OpKind::Write, source.spans(), remote, &done).expect("alive");
        stage.say(&Header::bare(Kind::Ack, name.0, answer as u64).encode());
        stage.assert_violation();
        assert_eq!(done.result(), None, "its memory is still in use");
        stage.side.lane.kill();
        assert_eq!(done.result(), Some(Err(OpError::LaneDown)));
    }
}

#[test]
fn a_read_without_data_ends_with_the_lane() {
    let mut rng = Rng::with_seed(2);
    let mut stage = stage(100_000);
    let dest = Patch::new(&mut rng, &[100]);
    let done = ResultAndCopy::watching(dest.whole());
    let remote = [elsewhere(100)].into_iter().collect();
    let name = stage.side.post(OpKind::Read, dest.spans(), remote, &done).expect("alive");
    stage.say(&Header::bare(Kind::Ack, name.0, 0).encode());
    stage.assert_violation();
    stage.side.lane.kill();
    assert_eq!(done.result(), Some(Err(OpError::LaneDown)));
}

#[test]
fn data_is_not_taken_before_it_was_asked_for() {
    let mut rng = Rng::with_seed(3);
    let mut stage = stage(1000);
    // The read waits behind a write that fills the pipe.
    let source = Patch::new(&mut rng, &[100_000]);
    let (dest, first) = (Patch::new(&mut rng, &[100]), ResultAndCopy::watching(source.whole()));
    let far = |len| [elsewhere(len)].into_iter().collect();
    stage.side.post(OpKind::Write, source.spans(), far(100_000), &first).expect("alive");
    let done = ResultAndCopy::watching(dest.whole());
    let name = stage.side.post(OpKind::Read, dest.spans(), far(100), &done).expect("alive");
    let header = Header { len: 100, ..Header::bare(Kind::Data, name.0, 0) };
    stage.say(
        &[&header.encode()[..], &[7; 100], &Trailer { crc: 0, status: Status::Ok }.encode()]
            .concat(),
    );
    stage.assert_violation();
    assert!(dest.now() == dest.before);
}

#[test]
fn no_more_data_is_taken_than_was_asked_for() {
    let mut rng = Rng::with_seed(5);
    let trailer = Trailer { crc: 0, status: Status::Ok }.encode();
    // One byte too many: at once, or behind data that is sound.
    for lens in [&[101][..], &[100, 1], &[60, 41], &[0, 101]] {
        let mut stage = stage(100_000);
        let dest = Patch::new(&mut rng, &[100]);
        let done = ResultAndCopy::watching(dest.whole());
        let far = [elsewhere(100)].into_iter().collect();
        let name = stage.side.post(OpKind::Read, dest.spans(), far, &done).expect("alive");
        stage.side.progress().expect("alive");
        let (more, sound) = lens.split_last().expect("some");
        for len in sound {
            let header = Header { len: *len, last: false, ..Header::bare(Kind::Data, name.0, 0) };
            stage.say(&[&header.encode()[..], &vec![7; *len as usize], &trailer].concat());
            stage.side.progress().expect("no more than was asked for");
        }
        let header = Header { len: *more, ..Header::bare(Kind::Data, name.0, 0) };
        stage.say(&[&header.encode()[..], &vec![7; *more as usize], &trailer].concat());
        stage.assert_violation();
        dest.assert_guards();
        assert_eq!(done.result(), None, "{lens:?}");
        stage.side.lane.kill();
        assert_eq!(done.result(), Some(Err(OpError::LaneDown)));
    }
}

#[test]
fn a_read_that_got_less_than_it_asked_for_does_not_end_well() {
    let mut rng = Rng::with_seed(6);
    let trailer = Trailer { crc: 0, status: Status::Ok }.encode();
    for lens in [&[99][..], &[0], &[60, 39], &[100]] {
        let mut stage = stage(100_000);
        let dest = Patch::new(&mut rng, &[100]);
        let done = ResultAndCopy::watching(dest.whole());
        let far = [elsewhere(100)].into_iter().collect();
        let name = stage.side.post(OpKind::Read, dest.spans(), far, &done).expect("alive");
        stage.side.progress().expect("alive");
        for (at, len) in lens.iter().enumerate() {
            let last = at + 1 == lens.len();
            let header = Header { len: *len, last, ..Header::bare(Kind::Data, name.0, 0) };
            stage.say(&[&header.encode()[..], &vec![7; *len as usize], &trailer].concat());
            assert_eq!(done.result(), None, "{lens:?}");
            stage.side.progress().expect("the lane lives");
        }
        let is_whole = lens.iter().sum::<u64>() == 100;
        let short = Err(OpError::Remote(Status::Protocol));
        assert_eq!(done.result(), Some(if is_whole { Ok(()) } else { short }), "{lens:?}");
        dest.assert_guards();
    }
}

/// A frame with checksums, as an honest peer sends it.
struct SealedFrame {
    bytes: Vec<u8>,
    descs: Range<usize>,
    payload: Range<usize>,
}

impl SealedFrame {
    fn new(header: Header, descs: &[Desc], payload: &[u8]) -> Self {
        let header = Header { checked: true, descs: descs.len() as u16, ..header };
        let mut bytes = seal(&header).to_vec();
        descs.iter().for_each(|desc| desc.encode_to(&mut bytes));
        let mut crc = Crc::new();
        crc.add(&bytes);
        let trailer = |crc: &Crc| Crc::trailer(Some(crc), Status::Ok).encode();
        let descs = HEADER_LEN..bytes.len();
        if !descs.is_empty() {
            bytes.extend(trailer(&crc));
        }
        let start = bytes.len();
        bytes.extend(payload);
        crc.add(payload);
        let payload = start..bytes.len();
        if header.kind.has_trailer() {
            bytes.extend(trailer(&crc));
        }
        Self { bytes, descs, payload }
    }

    /// The frame, of which one bit of this byte may be wrong.
    fn damaged(&self, at: Option<usize>) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        if let Some(at) = at {
            bytes[at] ^= 1;
        }
        bytes
    }

    /// No byte, those at both ends of the payload, and the first of the checksum behind it.
    fn of_payload(&self) -> [Option<usize>; 4] {
        let Range { start, end } = self.payload;
        [None, Some(start), Some(end - 1), Some(end)]
    }
}

/// The lane's only output: one answer.
fn answer(stage: &mut Stage) -> (u64, Status) {
    while stage.side.progress().expect("no violation") {}
    let said = stage.hear();
    let header = Header::decode(&said.try_into().expect("one header")).expect("a frame");
    assert_eq!(header.kind, Kind::Ack);
    (header.op, header.status())
}

/// Lengths that are received in the lane's own buffer, or straight into place.
const LENS: [usize; 2] = [3000, 100_000];

#[test]
fn a_write_that_was_damaged_is_not_answered_as_done() {
    for len in LENS {
        let dest = Patch::new(&mut Rng::with_seed(6), &[len]);
        let mut stage = stage(2 * len);
        let region = stage.side.register(dest.whole(), Rights::WRITE);
        let RemoteSpan { addr, len, key, slot } = dest.remote(&region)[0];
        let header = Header { len, ..Header::bare(Kind::Write, 7, 0) };
        let frame =
            SealedFrame::new(header, &[Desc { addr, len, key, slot }], &vec![9; len as usize]);
        for at in frame.of_payload() {
            stage.say(&frame.damaged(at));
            let status = if at.is_none() { Status::Ok } else { Status::Checksum };
            assert_eq!(answer(&mut stage), (7, status), "{len} bytes, byte {at:?}");
            dest.assert_guards();
        }
    }
}

#[test]
fn a_read_with_damaged_data_does_not_end_well() {
    for len in LENS {
        for n in 0..4 {
            let mut stage = stage(2 * len);
            let dest = Patch::new(&mut Rng::with_seed(7), &[len]);
            let done = ResultAndCopy::watching(dest.whole());
            let far = [elsewhere(len as u64)].into_iter().collect();
            let name = stage.side.post(OpKind::Read, dest.spans(), far, &done).expect("alive");
            stage.side.progress().expect("alive");
            let header = Header { len: len as u64, ..Header::bare(Kind::Data, name.0, 0) };
            let frame = SealedFrame::new(header, &[], &vec![9; len]);
            let at = frame.of_payload()[n];
            stage.say(&frame.damaged(at));
            while stage.side.progress().expect("no violation") {}
            let end = if at.is_none() { Ok(()) } else { Err(OpError::Checksum) };
            assert_eq!(done.result(), Some(end), "{len} bytes, byte {at:?}");
            dest.assert_guards();
        }
    }
}

#[test]
fn a_write_that_its_sender_could_not_read_is_not_answered_as_done() {
    let dest = Patch::new(&mut Rng::with_seed(11), &[100]);
    let mut stage = stage(10_000);
    let region = stage.side.register(dest.whole(), Rights::WRITE);
    let RemoteSpan { addr, len, key, slot } = dest.remote(&region)[0];
    let header = Header { len, descs: 1, ..Header::bare(Kind::Write, 7, 0) };
    for status in [Status::Fault, Status::Ok] {
        let mut frame = header.encode().to_vec();
        Desc { addr, len, key, slot }.encode_to(&mut frame);
        frame.extend([9; 100]);
        frame.extend(Trailer { crc: 0, status }.encode());
        stage.say(&frame);
        assert_eq!(answer(&mut stage), (7, status));
    }
}

#[test]
fn data_for_a_read_that_has_failed_are_not_placed() {
    let mut stage = stage(10_000);
    let dest = Patch::new(&mut Rng::with_seed(12), &[100]);
    let before = dest.now();
    let done = ResultAndCopy::watching(dest.whole());
    let far = [elsewhere(100)].into_iter().collect();
    let name = stage.side.post(OpKind::Read, dest.spans(), far, &done).expect("alive");
    stage.side.progress().expect("alive");
    for (len, last, status) in [(0, false, Status::Fault), (100, true, Status::Ok)] {
        let header = Header { len, last, ..Header::bare(Kind::Data, name.0, 0) };
        let trailer = Trailer { crc: 0, status }.encode();
        stage.say(&[&header.encode()[..], &vec![7; len as usize], &trailer].concat());
        while stage.side.progress().expect("no violation") {}
    }
    assert_eq!(done.result(), Some(Err(OpError::Remote(Status::Fault))));
    assert!(dest.now() == before, "its memory has changed");
}

#[test]
fn nothing_is_touched_where_a_damaged_descriptor_points() {
    let patch = Patch::new(&mut Rng::with_seed(8), &[1000]);
    let mut stage = stage(10_000);
    let region = stage.side.register(patch.whole(), Rights::ALL);
    let all = patch.remote(&region)[0];
    // In the region's middle, so that memory near it is in the region as well.
    let desc = Desc { addr: all.addr + 512, len: 64, key: all.key, slot: all.slot };
    let write = Header { len: desc.len, ..Header::bare(Kind::Write, 7, 0) };
    let read = Header::bare(Kind::Read, 7, desc.len);
    for (header, payload) in [(write, &[9; 64][..]), (read, &[])] {
        let frame = SealedFrame::new(header, &[desc], payload);
        // And the checksum behind it.
        for at in frame.descs.start..frame.descs.end + 4 {
            stage.say(&frame.damaged(Some(at)));
            assert_eq!(answer(&mut stage), (7, Status::Checksum), "{:?}, byte {at}", header.kind);
            assert!(patch.now() == patch.before, "{:?}, byte {at}", header.kind);
        }
    }
}

#[test]
fn a_message_that_was_damaged_ends_the_lane() {
    let header = Header { len: 1000, ..Header::bare(Kind::Message, 0, 0) };
    let frame = SealedFrame::new(header, &[], &[9; 1000]);
    for at in frame.of_payload() {
        // In one piece, and in two.
        for cut in [0, 500] {
            let mut stage = stage(10_000);
            let bytes = frame.damaged(at);
            stage.say(&bytes[..cut]);
            stage.side.progress().expect("it has not ended");
            stage.say(&bytes[cut..]);
            if at.is_some() {
                stage.assert_violation();
                assert!(stage.side.inbox.0.lock().is_empty(), "byte {at:?}");
            } else {
                stage.side.progress().expect("it is sound");
                assert_eq!(*stage.side.inbox.0.lock(), [[9; 1000]]);
            }
        }
    }
}

#[test]
fn lengths_of_a_posted_operation_must_add_up() {
    use uccl_fabric::lane::{Operation, PostOutcome};
    let mut rng = Rng::with_seed(4);
    let stage = stage(1000);
    let source = Patch::new(&mut rng, &[100]);
    for remote in [vec![elsewhere(99)], vec![elsewhere(101)], vec![elsewhere(u64::MAX); 3], {
        let mut many = vec![elsewhere(0); 1024];
        many.push(elsewhere(100));
        many
    }] {
        for kind in [OpKind::Read, OpKind::Write] {
            let (local, remote) = (source.spans(), remote.iter().copied().collect());
            let done = ResultAndCopy::watching(source.whole());
            // SAFETY: the patch lives until the end of the test.
            let posted = unsafe {
                stage.side.lane.post(Operation {
                    kind,
                    local,
                    memory: MemoryKind::Host,
                    remote,
                    done,
                })
            };
            assert!(matches!(
                posted,
                Ok(PostOutcome::Done(Err(OpError::Remote(Status::Protocol))))
            ));
        }
    }
}

#[test]
fn a_peer_that_asks_and_never_listens_is_made_to_wait() {
    for kind in [Kind::Ping, Kind::Read, Kind::Fence] {
        let mut stage = stage(1 << 20);
        let request = Header::bare(kind, 0, 0).encode().repeat(10_000);
        let (mut said, mut quiet) = (0u64, 0);
        while quiet < 10 {
            let n = stage.say(&request[said as usize % 32..]);
            said += n as u64;
            let moved = stage.side.progress().expect("asking is no violation");
            quiet = if moved || n > 0 { 0 } else { quiet + 1 };
        }
        assert!(said < 32 << 20, "{kind:?}: {said} bytes were taken without an answer leaving");
        assert!(stage.side.lane.arm(), "it sleeps until there is room");
        // It continues when the peer reads.
        while !stage.hear().is_empty() {
            stage.side.progress().expect("alive");
        }
        assert!(stage.say(&request) > 0);
    }
}

/// A frame that makes more or less sense.
fn some_frame(rng: &mut Rng, targets: &[RemoteSpan], op: u64) -> Vec<u8> {
    let kinds = [
        Kind::Write,
        Kind::Write,
        Kind::Read,
        Kind::Data,
        Kind::Ack,
        Kind::Message,
        Kind::Fence,
        Kind::Ping,
        Kind::Pong,
    ];
    let kind = kinds[rng.usize(0..kinds.len())];
    let descs = if matches!(kind, Kind::Write | Kind::Read) { rng.usize(0..4) } else { 0 };
    let mut sum = 0;
    let mut body = Vec::new();
    for _ in 0..descs {
        let RemoteSpan { mut addr, mut len, mut key, mut slot } =
            targets[rng.usize(0..targets.len())];
        match rng.u32(0..6) {
            0 => addr = addr.wrapping_add(rng.u64(0..200)).wrapping_sub(100),
            1 => len = rng.u64(0..1 << 40) >> rng.u32(0..40),
            2 => key ^= 1 << rng.u32(0..64),
            3 => slot ^= 1,
            _ => {}
        }
        sum += len;
        Desc { addr, len, key, slot }.encode_to(&mut body);
    }
    let len = match kind {
        Kind::Write => sum,
        Kind::Data | Kind::Message => rng.u64(0..3000),
        _ => 0,
    };
    let change = Change::Set(rng.u64(..));
    let signal = (kind == Kind::Write && rng.bool()).then_some(change);
    if signal.is_some() {
        let RemoteSpan { addr, key, slot, .. } = targets[rng.usize(0..targets.len())];
        let addr = addr.next_multiple_of(8).wrapping_add(rng.u64(0..200)).wrapping_sub(100);
        let addr = if rng.bool() { addr & !7 } else { addr };
        Desc { addr, len: SIGNAL_LEN, key, slot }.encode_to(&mut body);
    }
    let header = Header {
        last: rng.u32(0..5) > 0,
        checked: rng.u32(0..20) == 0,
        descs: descs as u16,
        len,
        signal,
        ..Header::bare(
            kind,
            if rng.bool() { op } else { rng.u64(0..5) },
            if kind == Kind::Read { sum } else { rng.u64(0..3) },
        )
    };
    let payload = usize::try_from(len).unwrap_or(0).min(100_000);
    let mut frame = [&header.encode()[..], &body, &vec![0xAB; payload]].concat();
    if kind.has_trailer() {
        frame.extend(Trailer { crc: rng.u32(..), status: Status::Ok }.encode());
    }
    frame
}

#[test]
fn nothing_a_peer_says_writes_beside_a_region() {
    each_seed(|seed| {
        for round in 0..100 {
            let mut rng = Rng::with_seed(seed << 8 | round);
            let mut stage = stage(200_000);
            // Memory, of which the peer may write and signal in one part, and read another.
            let patch = Patch::new(&mut rng, &[500, 300, 200]);
            let parts = patch.spans();
            let first = parts[0];
            let open = [(first, Rights::WRITE), (first, Rights::SIGNAL), (parts[1], Rights::READ)]
                .map(|(span, rights)| stage.side.register(span, rights).remote());
            let dest = Patch::new(&mut rng, &[700]);
            let done = ResultAndCopy::watching(dest.whole());
            let far = [elsewhere(700)].into_iter().collect();
            let name = stage.side.post(OpKind::Read, dest.spans(), far, &done).expect("alive");
            for _ in 0..rng.u32(1..30) {
                let mut frame = some_frame(&mut rng, &open, name.0);
                if rng.u32(0..10) == 0 {
                    let at = rng.usize(0..frame.len());
                    frame[at] = rng.u8(..);
                }
                stage.say(&frame);
                if stage.side.progress().is_err() {
                    break;
                }
                stage.hear();
            }
            stage.side.lane.kill();
            assert!(done.result().is_some());
            dest.assert_guards();
            patch.assert_guards();
            let now = patch.pieces_of(&patch.now());
            assert!(now[500..] == patch.pieces_of(&patch.before)[500..], "not for writing");
        }
    });
}
