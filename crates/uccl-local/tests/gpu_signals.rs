//! Signals on the memory of GPUs: the GPU that makes the copies changes the word behind them.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
#[path = "support/gpus.rs"]
mod gpus;
mod support;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use uccl_device::cuda::DeviceBuffer;
use uccl_fabric::{
    lane::{HostLane, Lane, OpError, OpName, OpResult, PostOutcome},
    mem::RemoteSpan,
    region::{Region, Rights},
    signal::Word,
};
use uccl_wire::{
    frame::Status,
    signal::{Change, SIGNAL_LEN},
};

use self::{
    gpus::{ANY, Driver, GIB, Pair, SLICE, TURN, context, pair, register},
    support::End,
};

/// A pair, and words of the peer's on its GPU.
struct Scene {
    pair: Pair,
    words: DeviceBuffer,
    region: Region,
}

fn scene(len: usize, rights: Rights) -> Scene {
    let pair = pair(len);
    let words = DeviceBuffer::new(context(1), 64).expect("memory");
    let region = register(&pair.regions, &pair.theirs, &words, rights);
    // Opens the memory that the peer has offered.
    let (end, _) = pair.write(&[8]);
    assert_eq!(pair.result(&end), Ok(()));
    Scene { pair, words, region }
}

impl Scene {
    fn word(&self, change: Change) -> Word {
        let all = self.region.remote();
        Word { span: RemoteSpan { addr: all.addr + 8, len: SIGNAL_LEN, ..all }, change }
    }

    fn value(&self) -> u64 {
        // SAFETY: this driver's GPUs have the host's memory; the second word is in it.
        unsafe { AtomicU64::from_ptr((self.words.address() + 8) as *mut u64) }.load(SeqCst)
    }

    /// The other words, which nobody changes.
    fn words_beside(&self) -> Vec<u64> {
        let words = bytes(self.words.address(), 64).as_chunks::<8>().0.iter();
        words
            .enumerate()
            .filter(|(at, _)| *at != 1)
            .map(|(_, word)| u64::from_ne_bytes(*word))
            .collect()
    }

    fn begin(&self, lens: &[usize], word: Word) -> (Arc<End>, Result<OpName, OpResult>) {
        let (end, op) = self.pair.operation(lens);
        // SAFETY: the memory is dropped after the lanes.
        match unsafe { self.pair.ours.post_signalled_by_gpu(op, word) } {
            Ok(PostOutcome::Pending(name)) => (end, Ok(name)),
            Ok(PostOutcome::Done(result)) => (end, Err(result)),
            Err(e) => panic!("{e}"),
        }
    }

    /// Posts a write with a signal that adds one.
    fn post(&self, lens: &[usize]) -> (Arc<End>, OpName) {
        self.post_with(lens, Change::Add(1))
    }

    fn post_with(&self, lens: &[usize], change: Change) -> (Arc<End>, OpName) {
        let word = self.word(change);
        let (_, op) = self.pair.operation(lens);
        assert!(self.pair.ours.signals_by_gpu(op.memory, &op.remote, &word));
        let (end, posted) = self.begin(lens, word);
        (end, posted.expect("under way"))
    }
}

/// Sets up with copies that pass, and pauses them then.
fn paused(len: usize, rights: Rights) -> (Driver, Scene) {
    let driver = Driver::paused();
    driver.fake.pause(false);
    let scene = scene(len, rights);
    driver.fake.pause(true);
    (driver.anew(), scene)
}

fn bytes(address: u64, len: usize) -> &'static mut [u8] {
    // SAFETY: this driver's GPUs have the host's memory, which outlives the use; nothing is copied
    // meanwhile.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len) }
}

const MIB: usize = 1 << 20;
/// By one launch, by copy engines and a launch, by both beside each other, and in slices.
const WRITES: [&[usize]; 5] = [&[8], &[8, 0, 4096, 3], &[8 * MIB], &[MIB; 20], &[3 * SLICE + 5]];

/// Makes all writes piece by piece, and looks at the word meanwhile; the change of the n-th makes
/// it n.
#[track_caller]
fn check_that_words_follow_their_writes(driver: &Driver, scene: &Scene, change: fn(u64) -> Change) {
    for (before, lens) in (0..).zip(WRITES) {
        let (fill, len) = (before as u8 + 1, lens.iter().sum());
        bytes(scene.pair.here.address(), len).fill(fill);
        let (end, _) = scene.post_with(lens, change(before + 1));
        let mut works = 0;
        while end.result().is_none() {
            scene.pair.progress();
            if scene.value() == before {
                driver.fake.pass(1, ANY);
                works += 1;
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            if scene.value() != before {
                let there = bytes(scene.pair.region.span.addr as u64, len);
                assert!(there.iter().all(|byte| *byte == fill), "{lens:?}: too early");
            }
        }
        assert_eq!((end.result(), scene.value()), (Some(Ok(())), before + 1), "{lens:?}");
        assert!(works > 0);
        driver.fake.pause(true);
    }
    assert_eq!(scene.words_beside(), [0; 7]);
}

#[test]
fn a_word_is_added_to_once_and_only_when_all_bytes_are_there() {
    let (driver, scene) = paused(4 * SLICE, Rights::ALL);
    check_that_words_follow_their_writes(&driver, &scene, |_| Change::Add(1));
}

#[test]
fn a_word_is_set_once_and_only_when_all_bytes_are_there() {
    let (driver, scene) = paused(4 * SLICE, Rights::ALL);
    check_that_words_follow_their_writes(&driver, &scene, Change::Set);
}

#[test]
fn a_short_write_and_its_signal_are_one_launch() {
    let (driver, scene) = paused(4096, Rights::ALL);
    let (end, posted) = scene.begin(&[8], scene.word(Change::Set(7)));
    posted.expect("under way");
    driver.fake.pass(1, ANY);
    assert_eq!(scene.pair.result(&end), Ok(()));
    assert_eq!((scene.value(), driver.launched()), (7, 8));
}

#[test]
fn a_write_that_does_not_end_well_does_not_signal() {
    let (driver, scene) = paused(GIB, Rights::ALL);
    let (cancelled, name) = scene.post(&[GIB]);
    scene.pair.ours.cancel(name);
    driver.fake.pause(false);
    assert_eq!(scene.pair.result(&cancelled), Err(OpError::Cancelled));
    driver.fake.pause(true);
    for lens in [&[GIB][..], &[SLICE / 4, SLICE / 4]] {
        driver.fake.refuse_after(Some(1));
        let (refused, _) = scene.post(lens);
        driver.fake.refuse_after(None);
        driver.fake.pass(1, ANY);
        assert!(matches!(scene.pair.result(&refused), Err(OpError::Gpu(_))), "{lens:?}");
    }
    driver.fake.pause(false);
    let (revoked, _) = scene.post(&[8]);
    assert_eq!(scene.pair.result(&revoked), Ok(()));
    assert_eq!(scene.value(), 1, "this one's alone");
}

#[test]
fn an_owner_that_takes_a_word_back_waits_for_a_signal_under_way() {
    let (driver, scene) = paused(4096, Rights::ALL);
    let (end, _) = scene.post(&[8]);
    let slot = scene.region.slot;
    let _revoked = scene.pair.regions.revoke(slot, scene.region.key).expect("registered");
    assert!(scene.pair.theirs.touched_by_peer(slot));
    driver.fake.pause(false);
    assert_eq!(scene.pair.result(&end), Ok(()));
    assert!(!scene.pair.theirs.touched_by_peer(slot));
    let (_, posted) = scene.begin(&[8], scene.word(Change::Add(1)));
    assert_eq!(posted, Err(Err(OpError::Remote(Status::UnknownKey))));
    assert_eq!((scene.value(), driver.launched()), (1, 8), "nothing else moved");
}

#[test]
fn a_word_that_is_taken_back_fails_the_last_slice() {
    let (driver, scene) = paused(GIB, Rights::ALL);
    let (end, _) = scene.post(&[GIB]);
    assert_eq!(driver.launched(), TURN);
    let slot = scene.region.slot;
    let _revoked = scene.pair.regions.revoke(slot, scene.region.key).expect("registered");
    assert!(!scene.pair.theirs.touched_by_peer(slot), "its slice has not been given out");
    driver.fake.pause(false);
    assert_eq!(scene.pair.result(&end), Err(OpError::Remote(Status::UnknownKey)));
    assert_eq!(scene.value(), 0);
}

#[test]
fn a_word_is_changed_by_right_and_where_it_is_one() {
    let (driver, scene) = paused(4096, Rights::WRITE);
    let refused = |word: Word, why| {
        let (_, op) = scene.pair.operation(&[8]);
        assert!(!scene.pair.ours.signals_by_gpu(op.memory, &op.remote, &word), "{word:?}");
        let (_, posted) = scene.begin(&[8], word);
        assert_eq!(posted, Err(Err(OpError::Remote(why))), "{word:?}");
    };
    let word = scene.word(Change::Set(1));
    let moved =
        |by: u64| Word { span: RemoteSpan { addr: word.span.addr + by, ..word.span }, ..word };
    refused(word, Status::Denied);
    refused(moved(4), Status::Protocol);
    let all = register(&scene.pair.regions, &scene.pair.theirs, &scene.words, Rights::SIGNAL);
    let span = RemoteSpan { addr: all.remote().addr + 64, len: SIGNAL_LEN, ..all.remote() };
    refused(Word { span, ..word }, Status::OutOfBounds);
    assert_eq!((scene.value(), driver.launched()), (0, 0));
}

#[test]
fn signals_of_writes_at_the_same_time_add_up() {
    let (driver, scene) = paused(4096, Rights::ALL);
    driver.fake.pause(false);
    let ends: Vec<_> = (0..100).map(|_| scene.post(&[8]).0).collect();
    ends.iter().for_each(|end| assert_eq!(scene.pair.result(end), Ok(())));
    assert_eq!((scene.value(), driver.launched()), (100, 800));
}
