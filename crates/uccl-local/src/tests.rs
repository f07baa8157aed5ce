//! Two lanes of this process, one of which ends operations early.

use std::{
    os::unix::net::UnixStream,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use uccl_device::MemoryKind;
use uccl_fabric::{
    alloc::{SharedBuf, lookup},
    lane::{Completion, Handling, RemoteSpans, Spans},
    region::{RegionTable, Rights},
};

use super::{job::End, *};
use crate::fdpass::{FdSocket, Message};

/// How long the tests watch that a call that must wait does not return.
const WATCH: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough for a job.
const LONG: usize = (AT_ONCE as usize) * 2;

struct NoMessages;

impl MessageSink for NoMessages {
    fn message(&self, _: &[u8]) -> Result<Handling, String> {
        Err("nobody sends messages".into())
    }

    fn go_on(&self) -> Handling {
        Handling::Ended
    }

    fn signalled(&self) {}
}

struct ResultSender(mpsc::Sender<OpResult>);

impl Completion for ResultSender {
    fn complete(self: Arc<Self>, result: OpResult) {
        // A test that has dropped its receiver has seen all the results that it wanted.
        let _ = self.0.send(result);
    }
}

fn completion() -> (Arc<dyn Completion>, mpsc::Receiver<OpResult>) {
    let (sender, results) = mpsc::channel();
    (Arc::new(ResultSender(sender)), results)
}

struct Both {
    ours: LocalLane,
    theirs: LocalLane,
    /// The peer's regions.
    regions: Arc<RegionTable>,
}

fn next(socket: &mut FdSocket) -> Message {
    socket.recv().unwrap().expect("it was sent before")
}

/// Two connected lanes, without direct access to private memory.
fn lanes() -> Both {
    let (one, other) = UnixStream::pair().unwrap();
    let (mut one, mut other) = (FdSocket::new(one).unwrap(), FdSocket::new(other).unwrap());
    let table = || Arc::new(RegionTable::new().unwrap());
    let (own, regions) = (table(), table());
    let setup = |regions: &Arc<RegionTable>| Setup {
        regions: Arc::clone(regions),
        process: None,
        checksum: false,
    };
    let invitation = invite(&mut one, 7, &own).unwrap();
    let asked = next(&mut other);
    let theirs = accept(other, asked, setup(&regions)).unwrap();
    let answer = next(&mut one);
    let ours = invitation.accepted(one, answer, setup(&own)).unwrap();
    Both { ours, theirs, regions }
}

impl Both {
    /// A region of the peer's.
    fn region(&self, span: Span) -> RemoteSpan {
        let backing = lookup(span).map(|(backing, _)| backing);
        self.regions.insert(span, Rights::ALL, backing).unwrap().remote()
    }

    /// Shared memory of the peer's, which is mapped here, and its region.
    fn mapped(&self, len: usize) -> (Arc<SharedBuf>, RemoteSpan) {
        let buf = SharedBuf::new(len).unwrap();
        self.theirs.offer(&Shareable::Host(Arc::clone(&buf)));
        self.ours.bell.listen();
        let region = self.region(buf.span());
        assert_eq!(self.ours.path_to(&region), "mapped");
        (buf, region)
    }

    /// Has both lanes make progress until one of our operations has ended.
    fn run_until_told(&self, results: &mpsc::Receiver<OpResult>) -> OpResult {
        let begun = Instant::now();
        loop {
            if let Ok(result) = results.try_recv() {
                return result;
            }
            assert!(begun.elapsed() < PATIENCE, "it does not end");
            self.ours.progress(&NoMessages).unwrap();
            self.theirs.progress(&NoMessages).unwrap();
        }
    }
}

fn write(local: Spans, remote: RemoteSpans, done: Arc<dyn Completion>) -> Operation {
    Operation { kind: OpKind::Write, local, memory: MemoryKind::Host, remote, done }
}

fn span_of(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr() as usize, len: bytes.len() }
}

fn now(span: Span) -> Vec<u8> {
    let mut bytes = vec![0; span.len];
    // SAFETY: memory of the test's, which lives.
    unsafe { std::ptr::copy_nonoverlapping(span.addr as *const u8, bytes.as_mut_ptr(), span.len) };
    bytes
}

#[test]
fn a_killed_lane_has_left_its_copies_and_admits_no_more() {
    let both = lanes();
    let (buf, region) = both.mapped(LONG);
    let source = vec![7; LONG];
    let (done, results) = completion();
    let local: Spans = [span_of(&source)].into();
    // SAFETY: the source outlives the lanes' copies.
    let posted = unsafe { both.ours.post(write(local.clone(), [region].into(), done)) };
    assert!(matches!(posted, Ok(PostOutcome::Pending(_))));
    let chunk = both.ours.jobs.take(End::Front).expect("a job");
    let outlives = both.ours.direct.claim_owned(region.slot).expect("a word");
    thread::scope(|scope| {
        let killed = scope.spawn(|| both.ours.kill());
        thread::sleep(WATCH);
        assert!(!killed.is_finished(), "a thread copies a chunk");
        chunk.copied(Ok(()));
        thread::sleep(WATCH);
        assert!(!killed.is_finished(), "an access that outlives its call is under way");
        assert!(both.theirs.touched_by_peer(region.slot), "and its owner hears of it");
        drop(outlives);
    });
    assert_eq!(results.recv_timeout(PATIENCE), Ok(Err(OpError::LaneDown)));
    assert!(!both.theirs.touched_by_peer(region.slot));
    let before = now(buf.span());
    // SAFETY: as above.
    let at_once = unsafe {
        both.ours.try_now(OpKind::Write, span_of(&source[..64]), &RemoteSpan { len: 64, ..region })
    };
    assert!(!matches!(at_once, Some(Ok(()))));
    for len in [64, INLINE as usize + 1, LONG] {
        let (done, results) = completion();
        let remote = [RemoteSpan { len: len as u64, ..region }].into();
        // SAFETY: as above.
        let posted =
            unsafe { both.ours.post(write([span_of(&source[..len])].into(), remote, done)) };
        assert!(
            !matches!(posted, Ok(PostOutcome::Pending(_) | PostOutcome::Done(Ok(())))),
            "{posted:?}"
        );
        assert!(results.try_recv().is_err() && !both.ours.help());
    }
    assert!(now(buf.span()) == before);
}

/// A copy through the kernel can wait for the peer's pages without a limit.
#[test]
fn the_aftermath_of_a_kill_knows_a_copy_that_cannot_be_ended() {
    let both = lanes();
    let stuck = both.ours.direct.claim_owned(3).expect("a word");
    assert!(!both.ours.direct.close(Instant::now() + WATCH / 5, || ()));
    let left = both.ours.aftermath().expect("a peer that copies by itself");
    drop(both.theirs);
    assert!(left.touches(0) && left.touches(7) && !left.is_over());
    drop(stuck);
    assert!(!left.touches(0) && left.is_over());
}

/// A peer that sees the end of a lane frees its memory.
#[test]
fn a_peer_is_not_left_while_a_copy_to_its_memory_is_under_way() {
    let mut both = lanes();
    let (buf, region) = both.mapped(4096);
    let after_kill = both.theirs.aftermath().expect("a peer that copies by itself");
    let stuck = both.ours.direct.claim_owned(region.slot).expect("a word");
    both.ours.patience = Duration::ZERO;
    both.ours.kill();
    let left = both.ours.aftermath().expect("copies of its own");
    for _ in 0..3 {
        assert!(left.copies());
        both.theirs.bell.look();
        both.theirs.bell.listen();
        assert!(both.theirs.touched_by_peer(region.slot) && after_kill.touches(region.slot));
    }
    drop(stuck);
    assert!(!left.copies());
    assert!(!after_kill.touches(region.slot) && !both.theirs.touched_by_peer(region.slot));
    drop(buf);
}

#[test]
fn an_operation_in_the_rings_is_the_peers_and_a_copy_is_ours() {
    let both = lanes();
    let (_buf, mapped) = both.mapped(LONG);
    let private = vec![0u8; LONG];
    let private_region = both.region(span_of(&private));
    let source = vec![7; LONG];
    let post = |remote: RemoteSpans| {
        let (done, results) = completion();
        let local = remote.iter().map(|_| span_of(&source)).collect();
        // SAFETY: the source outlives the lanes' copies.
        let posted = unsafe { both.ours.post(write(local, remote, done)) };
        let Ok(PostOutcome::Pending(name)) = posted else { panic!("{posted:?}") };
        (name, results)
    };
    let (copied, copied_hears) = post([mapped].into());
    let (parted, parted_hears) = post([mapped, private_region].into());
    let (sent, sent_hears) = post([private_region].into());
    assert_eq!([copied, parted, sent].map(|name| both.ours.is_ours(name)), [true, false, false]);
    assert!(both.ours.is_ours(OpName(GPU)), "the first copy by a GPU");
    for results in [copied_hears, parted_hears, sent_hears] {
        assert_eq!(both.run_until_told(&results), Ok(()));
    }
}

/// A receiver, for instance one that was stopped, still finds bytes in the rings that came before
/// the peer left.
#[test]
fn bytes_in_the_rings_do_not_land_when_the_peer_has_given_them_up() {
    for begun in [false, true] {
        let both = lanes();
        let private = vec![0xEE_u8; LONG];
        let region = both.region(span_of(&private));
        let source = vec![7; LONG];
        let (done, results) = completion();
        // SAFETY: the source outlives the lanes' copies.
        let posted =
            unsafe { both.ours.post(write([span_of(&source)].into(), [region].into(), done)) };
        assert!(matches!(posted, Ok(PostOutcome::Pending(_))));
        while both.ours.progress(&NoMessages).unwrap() {}
        if begun {
            while now(span_of(&private[..1])) == [0xEE] {
                both.theirs.progress(&NoMessages).unwrap();
            }
            while both.ours.progress(&NoMessages).unwrap() {}
        }
        both.ours.kill();
        assert_eq!(results.recv_timeout(PATIENCE), Ok(Err(OpError::LaneDown)));
        // The receiver checks once in a tick of its clock.
        //
        thread::sleep(WATCH / 5);
        let held = now(span_of(&private));
        let lost = (0..1000).find_map(|_| both.theirs.progress(&NoMessages).err());
        assert!(matches!(lost, Some(LaneError::Ended | LaneError::Lost(_))), "{lost:?}");
        assert!(now(span_of(&private)) == held, "{begun}");
    }
}

#[test]
fn a_cancel_reaches_every_part_of_an_operation() {
    let both = lanes();
    let (buf, mapped) = both.mapped(LONG);
    // Two frames and more than the rings hold, so that it cannot all have been sent.
    let private = vec![0u8; LONG];
    let private_region = both.region(span_of(&private));
    let source = vec![7; LONG];
    let (done, results) = completion();
    let local = [span_of(&source), span_of(&source)].into();
    // SAFETY: the source outlives the lanes' copies.
    let posted = unsafe { both.ours.post(write(local, [mapped, private_region].into(), done)) };
    let Ok(PostOutcome::Pending(name)) = posted else { panic!("{posted:?}") };
    both.ours.cancel(name);
    assert_eq!(both.run_until_told(&results), Err(OpError::Cancelled));
    assert!(now(buf.span()).iter().all(|byte| *byte == 0), "the mapped part was copied");
    let landed = now(span_of(&private)).iter().filter(|byte| **byte != 0).count();
    assert!(landed < private.len(), "all of the private part was sent");
    assert!(both.ours.splits.parts_of(name).is_empty());
    assert_eq!(both.ours.load(), 0);
    // The lane still works.
    let (done, results) = completion();
    let piece = RemoteSpan { len: 3 << 20, ..private_region };
    let local = [span_of(&source[..3 << 20])].into();
    // SAFETY: as above.
    let posted = unsafe { both.ours.post(write(local, [piece].into(), done)) };
    assert!(matches!(posted, Ok(PostOutcome::Pending(_))));
    assert_eq!(both.run_until_told(&results), Ok(()));
    assert!(now(span_of(&private[..3 << 20])) == source[..3 << 20]);
}

#[test]
fn a_vector_of_too_many_pieces_for_a_frame_can_be_cancelled() {
    let both = lanes();
    let private = vec![0u8; 4 << 20];
    let region = both.region(span_of(&private));
    let most = both.ours.stream.caps().max_pieces;
    let len = private.len() / (2 * most);
    let source = vec![7; len];
    let remote: RemoteSpans = (0..2 * most as u64)
        .map(|i| RemoteSpan { addr: region.addr + i * len as u64, len: len as u64, ..region })
        .collect();
    let local: Spans = remote.iter().map(|_| span_of(&source)).collect();
    let (done, results) = completion();
    // SAFETY: the source outlives the lanes' copies.
    let posted = unsafe { both.ours.post(write(local, remote, done)) };
    let Ok(PostOutcome::Pending(name)) = posted else { panic!("{posted:?}") };
    both.ours.cancel(name);
    assert_eq!(both.run_until_told(&results), Err(OpError::Cancelled));
    assert!(now(span_of(&private)).contains(&0), "all of it was sent");
}
