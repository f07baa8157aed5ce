//! Slices that a GPU has not been given yet can be taken back, and other operations pass them.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
#[path = "support/gpus.rs"]
mod gpus;
mod support;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use uccl_chaos::patiently;
use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{HostLane, Lane, OpError, OpKind, Operation, PostOutcome},
    mem::Span,
    region::Rights,
};
use uccl_wire::frame::Status;

use self::{
    gpus::{ANY, Driver, GIB, SLICE, TURN, pair, pair_between},
    support::End,
};

/// How long a test watches that something does not happen.
const WATCH: Duration = Duration::from_millis(100);

/// A slice while several GPUs are written to, each of which may have two.
const CROWDED_SLICE: usize = 128 << 20;

#[test]
fn a_cancelled_write_ends_with_the_part_that_the_gpu_has() {
    let driver = Driver::paused();
    let pair = pair(GIB);
    let (end, name) = pair.write(&[GIB]);
    assert_eq!(driver.launched(), TURN, "a turn's worth is enqueued");
    pair.ours.cancel(name);
    driver.fake.pass(1, ANY);
    pair.until_left(GIB - SLICE);
    assert_eq!(end.result(), None, "the GPU still copies");
    driver.fake.pass(1, ANY);
    assert_eq!(pair.result(&end), Err(OpError::Cancelled));
    assert_eq!((driver.launched(), pair.ours.load()), (TURN, 0));
    assert!(!pair.ours.has_work());
    // The lane still works.
    driver.fake.pause(false);
    for len in [64, 3 * SLICE + 5] {
        let (end, _) = pair.write(&[len]);
        assert_eq!(pair.result(&end), Ok(()));
    }
}

#[test]
fn all_of_a_long_vector_lands_where_it_should() {
    let driver = Driver::paused();
    driver.fake.pause(false);
    let pair = pair(6 * SLICE);
    let lens = [SLICE / 2 + 1, 0, 3 * SLICE, 7, SLICE, SLICE / 4 - 3];
    let len: usize = lens.iter().sum();
    let bytes = |address: u64| {
        // SAFETY: this driver's GPUs have the host's memory; nothing is copied while the test reads
        // it.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, 6 * SLICE) }
    };
    let source = bytes(pair.here.address());
    source.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i >> 3) as u8 ^ i as u8 | 1);
    let (end, _) = pair.write(&lens);
    assert_eq!(pair.result(&end), Ok(()));
    assert_eq!(driver.launched(), len);
    let there = bytes(pair.region.span.addr as u64);
    assert!(there[..len] == source[..len] && there[len..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_short_write_passes_a_long_one() {
    let driver = Driver::paused();
    let pair = pair(GIB);
    let (long, name) = pair.write(&[GIB]);
    let (short, _) = pair.write(&[64]);
    assert_eq!(driver.launched(), TURN + 64, "it is enqueued at once");
    // A kernel makes the short copy: a copy engine would first finish all slices that follow.
    driver.fake.pass(1, 0);
    assert_eq!(pair.result(&short), Ok(()));
    assert_eq!((long.result(), pair.ours.load()), (None, GIB as u64));
    pair.ours.cancel(name);
    driver.fake.pause(false);
    assert_eq!(pair.result(&long), Err(OpError::Cancelled));
}

#[test]
fn lanes_take_turns_and_the_progress_of_one_serves_all() {
    let driver = Driver::paused();
    let (one, other) = (pair(GIB), pair(GIB));
    let (first, first_name) = one.write(&[GIB]);
    let (second, second_name) = other.write(&[GIB]);
    assert_eq!(driver.launched(), TURN, "all of it the first lane's");
    for slices in 1..=4 {
        driver.fake.pass(1, ANY);
        patiently(|| {
            other.progress();
            (driver.launched() == TURN + slices * SLICE).then_some(())
        });
    }
    // Each lane has its own stream, so the driver decides which one copies first; but both have had
    // turns.
    let left = [one.ours.load(), other.ours.load()];
    assert!(left.iter().all(|left| *left < GIB as u64), "{left:?}");
    assert_eq!(left.iter().sum::<u64>(), (2 * GIB - 4 * SLICE) as u64);
    // Each lane has one of the two enqueued slices.
    other.ours.cancel(second_name);
    one.ours.cancel(first_name);
    assert_eq!((first.result(), second.result()), (None, None));
    driver.fake.pass(2, ANY);
    assert_eq!(one.result(&first), Err(OpError::Cancelled));
    assert_eq!(other.result(&second), Err(OpError::Cancelled));
    assert_eq!(driver.launched(), TURN + 4 * SLICE);
}

#[test]
fn several_gpus_are_written_to_at_once() {
    const LEN: usize = GIB / 2;
    let driver = Driver::paused();
    let pairs = [0, 3, 2].map(|there| pair_between((1, there), LEN));
    let launched = |at: usize, before: usize| (at, driver.launched() - before);
    // While nothing waits for another GPU, copy engines get two slices, which keep one link busy.
    let mut ends = vec![pairs[0].write(&[LEN]).0];
    assert_eq!(driver.launched(), TURN);
    for (at, pair) in pairs.iter().enumerate().skip(1) {
        let before = driver.launched();
        ends.push(pair.write(&[LEN]).0);
        // The first pair gets one more crowded slice, the first time.
        let more = if at == 1 { CROWDED_SLICE } else { 0 };
        assert_eq!(launched(at, before), (at, 2 * CROWDED_SLICE + more));
    }
    // The kernel copies these five, and not copy engines, which serve one GPU after the other.
    driver.fake.pass(5, 0);
    patiently(|| {
        pairs.iter().for_each(|pair| pair.progress());
        let left: u64 = pairs.iter().map(|pair| pair.ours.load()).sum();
        (left == (3 * LEN - 5 * CROWDED_SLICE) as u64).then_some(())
    });
    while ends.iter().any(|end| end.result().is_none()) {
        driver.fake.pass(1, ANY);
        pairs.iter().for_each(|pair| pair.progress());
    }
    for (end, pair) in ends.iter().zip(&pairs) {
        assert_eq!((end.result(), pair.ours.load()), (Some(Ok(())), 0));
    }
    // A GPU that was crowded begins again with the crowded limits: its first bytes are not limited
    // to a turn for one other GPU.
    let before = driver.launched();
    let (end, _) = pairs[0].write(&[LEN]);
    assert_eq!(driver.launched() - before, 2 * CROWDED_SLICE);
    while end.result().is_none() {
        driver.fake.pass(1, ANY);
        pairs[0].progress();
    }
}

#[test]
fn a_refused_slice_fails_its_operation_when_those_before_it_have_ended() {
    let driver = Driver::paused();
    let pair = pair(GIB);
    driver.fake.refuse_after(Some(1));
    let (end, _) = pair.write(&[GIB]);
    driver.fake.refuse_after(None);
    assert_eq!(driver.launched(), SLICE);
    pair.progress();
    assert_eq!(end.result(), None, "a slice moves still");
    driver.fake.pass(1, ANY);
    let told = pair.result(&end);
    assert!(matches!(told, Err(OpError::Gpu(_))), "{told:?}");
    assert_eq!((driver.launched(), pair.ours.load()), (SLICE, 0));
}

#[test]
fn a_short_write_that_is_refused_halfway_fails_when_its_first_half_has_ended() {
    let driver = Driver::paused();
    let pair = pair(SLICE);
    driver.fake.refuse_after(Some(1));
    let (end, _) = pair.write(&[SLICE / 4, SLICE / 4]);
    driver.fake.refuse_after(None);
    assert_eq!(driver.launched(), SLICE / 4);
    pair.progress();
    assert_eq!(end.result(), None);
    driver.fake.pass(1, ANY);
    let told = pair.result(&end);
    assert!(matches!(told, Err(OpError::Gpu(_))), "{told:?}");
}

#[test]
fn memory_that_its_owner_takes_back_is_left_by_the_slices_that_wait() {
    let driver = Driver::paused();
    let pair = pair(GIB);
    let (end, _) = pair.write(&[GIB]);
    let slot = pair.region.slot;
    let _revoked = pair.regions.revoke(slot, pair.region.key).expect("registered");
    assert!(pair.theirs.touched_by_peer(slot));
    driver.fake.pass(2, ANY);
    assert_eq!(pair.result(&end), Err(OpError::Remote(Status::UnknownKey)));
    assert_eq!(driver.launched(), TURN);
    assert!(!pair.theirs.touched_by_peer(slot));
}

#[test]
fn short_writes_beyond_the_hazard_words_wait_for_no_poster() {
    let driver = Driver::paused();
    let pair = pair(4096);
    let writes: Vec<_> = (0..100).map(|_| pair.write(&[64])).collect();
    let enqueued = driver.launched() / 64;
    assert!(enqueued < 100, "there are as many words");
    let (last, name) = writes.last().expect("100");
    pair.ours.cancel(*name);
    assert_eq!(pair.result(last), Err(OpError::Cancelled), "it has not been enqueued");
    driver.fake.pause(false);
    for (end, _) in &writes[..99] {
        assert_eq!(pair.result(end), Ok(()));
    }
    assert_eq!((driver.launched(), pair.ours.load()), (99 * 64, 0));
}

#[test]
fn a_kill_takes_back_waiting_slices_and_waits_for_the_rest() {
    let driver = Driver::paused();
    let pair = pair(GIB);
    let writes = [pair.write(&[GIB]).0, pair.write(&[SLICE]).0, pair.write(&[64]).0];
    thread::scope(|scope| {
        let killed = scope.spawn(|| pair.ours.kill());
        assert_eq!(patiently(|| writes[1].result()), Err(OpError::LaneDown));
        thread::sleep(WATCH);
        assert!(!killed.is_finished(), "the GPU still copies");
        assert!(pair.theirs.touched_by_peer(pair.region.slot), "and the owner hears of it");
        driver.fake.pause(false);
    });
    let told = writes.map(|end| end.result());
    assert_eq!(told, [Some(Err(OpError::LaneDown)), Some(Err(OpError::LaneDown)), Some(Ok(()))]);
    assert_eq!(driver.launched(), TURN + 64);
    assert!(!pair.theirs.touched_by_peer(pair.region.slot));
}

#[test]
fn a_kill_tells_of_a_copy_that_another_lane_has_seen_end() {
    let driver = Driver::paused();
    let (one, other) = (pair(SLICE), pair(GIB));
    let (end, _) = one.write(&[SLICE]);
    let (_, long) = other.write(&[GIB]);
    other.ours.cancel(long);
    driver.fake.pause(false);
    patiently(|| {
        other.progress();
        (one.ours.load() == 0).then_some(())
    });
    assert_eq!(end.result(), None);
    one.ours.kill();
    assert_eq!(end.result(), Some(Ok(())));
}

/// The posting thread has claimed the hazard words, and is in the driver.
#[test]
fn a_kill_waits_for_a_thread_that_enqueues() {
    for lens in [&[64][..], &[GIB]] {
        let driver = Driver::paused();
        driver.fake.pause(false);
        let pair = pair(GIB);
        driver.fake.stall(true);
        thread::scope(|scope| {
            let posted = scope.spawn(|| pair.write(lens));
            patiently(|| (driver.fake.stalled() > 0).then_some(()));
            let killed = scope.spawn(|| pair.ours.kill());
            thread::sleep(WATCH);
            assert!(!killed.is_finished() && !posted.is_finished());
            driver.fake.stall(false);
            killed.join().expect("killed");
            let launched = driver.launched();
            let (end, _) = posted.join().expect("posted");
            let told = end.result().expect("all are told before a kill returns");
            match lens {
                [64] => assert_eq!(told, Ok(())),
                _ => assert_eq!(told, Err(OpError::LaneDown)),
            }
            assert_eq!(driver.launched(), launched, "enqueued behind the lane's end");
        });
    }
}

#[test]
fn the_aftermath_of_a_kill_knows_a_copy_that_the_gpu_does_not_end() {
    let driver = Driver::paused();
    let pair = pair(GIB);
    let (long, _) = pair.write(&[GIB]);
    let (short, _) = pair.write(&[64]);
    let left = pair.ours.aftermath().expect("a peer that copies by itself");
    let begun = Instant::now();
    pair.ours.kill();
    assert!(begun.elapsed() < support::PATIENCE, "it waits for a bounded time");
    assert_eq!((long.result(), short.result()), (None, None), "the GPU still copies");
    drop(pair.theirs);
    assert!(left.touches(pair.region.slot) && !left.is_over());
    drop(pair.ours);
    assert!(left.touches(pair.region.slot) && !left.is_over());
    driver.fake.pause(false);
    patiently(|| (!left.touches(pair.region.slot)).then_some(()));
    assert!(!left.is_over(), "their posters do not know");
    left.look();
    assert!(left.is_over());
    assert_eq!(long.result(), Some(Err(OpError::LaneDown)));
    assert_eq!(short.result(), Some(Ok(())));
}

/// The name of the first copy by a GPU once stood for an operation with parts in the rings.
#[test]
fn a_copy_by_a_gpu_is_ended_by_its_own_lane_only() {
    let driver = Driver::paused();
    let pair = pair(GIB);
    let (_, name) = pair.write(&[GIB]);
    let private = vec![0u8; 4 << 20];
    let span = Span { addr: private.as_ptr() as usize, len: private.len() };
    let region = pair.regions.insert(span, Rights::ALL, None).expect("registered");
    let done = Arc::new(End::default());
    let through_rings = Operation {
        kind: OpKind::Write,
        local: [span].into(),
        memory: MemoryKind::Host,
        remote: [region.remote()].into(),
        done: Arc::clone(&done) as _,
    };
    // SAFETY: the lane is killed before the memory is freed.
    let posted = unsafe { pair.ours.post(through_rings) };
    let Ok(PostOutcome::Pending(rings)) = posted else { panic!("{posted:?}") };
    assert!(pair.ours.is_ours(name) && !pair.ours.is_ours(rings));
    driver.fake.pause(false);
    pair.ours.kill();
    pair.theirs.kill();
}
