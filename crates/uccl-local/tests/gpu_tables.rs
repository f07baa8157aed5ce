//! Lists that are posted again and again are copied with a table in the GPU's memory.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
#[path = "support/gpus.rs"]
mod gpus;
mod support;

use std::sync::Arc;

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{Completion, Lane, OpKind, OpResult, Operation, PostOutcome, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
};

use self::{
    gpus::{Driver, Pair, pair},
    support::End,
};

/// Bytes of a piece, and from one piece to the next.
const PIECE: usize = 64;
const STRIDE: usize = 100;

/// A lane that copies at once, and a list of pieces that is posted again and again.
struct Posts {
    driver: Driver,
    pair: Pair,
    local: Spans,
    remote: RemoteSpans,
}

impl Posts {
    fn of(count: usize) -> Self {
        let driver = Driver::paused();
        driver.fake.pause(false);
        let pair = pair(count * STRIDE);
        let (here, there) = (pair.here.address() as usize, pair.region.remote());
        let local: Spans =
            (0..count).map(|at| Span { addr: here + at * STRIDE, len: PIECE }).collect();
        let piece = |at: usize| RemoteSpan {
            addr: there.addr + (at * STRIDE) as u64,
            len: PIECE as u64,
            ..there
        };
        let remote: RemoteSpans = (0..count).map(piece).collect();
        Self { driver, pair, local: local.share(), remote: remote.share() }
    }

    fn count(&self) -> usize {
        self.local.len()
    }

    /// Has the same pieces in lists that nobody has posted. Returns those before.
    fn renew(&mut self) -> (Spans, RemoteSpans) {
        let (local, remote) = (self.local.iter().copied(), self.remote.iter().copied());
        let (local, remote): (Spans, RemoteSpans) = (local.collect(), remote.collect());
        let local = std::mem::replace(&mut self.local, local.share());
        (local, std::mem::replace(&mut self.remote, remote.share()))
    }

    /// Posts the list.
    fn begin(&self, kind: OpKind) -> (Arc<End>, PostOutcome) {
        let end = Arc::new(End::default());
        let op = Operation {
            kind,
            local: self.local.clone(),
            memory: MemoryKind::Cuda { device: 0 },
            remote: self.remote.clone(),
            done: Arc::clone(&end) as Arc<dyn Completion>,
        };
        // SAFETY: the memory is dropped after the lanes.
        let posted = unsafe { self.pair.ours.post(op) };
        (end, posted.expect("a living lane"))
    }

    /// Posts the list, and waits for its end.
    fn post(&self, kind: OpKind) -> OpResult {
        match self.begin(kind) {
            (end, PostOutcome::Pending(_)) => self.pair.result(&end),
            (_, PostOutcome::Done(result)) => result,
        }
    }

    /// Writes other bytes than before, and checks that they arrive between bytes that stay. Returns
    /// how many launches read a table in the GPU's memory.
    fn write(&self, byte: u8) -> u64 {
        let before = self.driver.fake.tables();
        let (here, there) = (self.pair.here.address(), self.pair.region.span.addr as u64);
        let len = self.count() * STRIDE;
        // SAFETY: this driver's GPUs have the host's memory; nothing is copied meanwhile.
        let bytes = |at: u64| unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) };
        bytes(here).fill(byte);
        bytes(there).fill(0xee);
        assert_eq!(self.post(OpKind::Write), Ok(()));
        let is_right = |piece: &[u8]| {
            piece[..PIECE] == [byte; PIECE] && piece[PIECE..] == [0xee; STRIDE - PIECE]
        };
        assert!(bytes(there).chunks(STRIDE).all(is_right), "{byte}");
        self.driver.fake.tables() - before
    }
}

#[test]
fn a_list_that_is_posted_again_has_a_table_in_the_gpus_memory() {
    // As many pieces as a table takes, and more.
    for (count, tables) in [(300, 1), (4096, 1), (5000, 2)] {
        let posts = Posts::of(count);
        let used: Vec<_> = (1..=4).map(|byte| posts.write(byte)).collect();
        assert_eq!(used, [0, 0, tables, tables], "{count} pieces");
        // The table is uploaded once: later posts move the pieces alone.
        let driver = &posts.driver;
        let before = driver.fake.launched();
        assert_eq!(posts.write(5), tables);
        assert_eq!(driver.fake.launched() - before, (count * PIECE) as u64);
    }
}

#[test]
fn short_lists_and_lists_of_another_operation_use_no_table() {
    let posts = Posts::of(256);
    assert_eq!((1..=4).map(|byte| posts.write(byte)).sum::<u64>(), 0, "the launch has room");
    drop(posts);
    let posts = Posts::of(300);
    assert_eq!((1..=3).map(|byte| posts.write(byte)).sum::<u64>(), 1);
    let before = posts.driver.fake.tables();
    assert_eq!(posts.post(OpKind::Read), Ok(()));
    assert_eq!(posts.driver.fake.tables(), before, "the table is that of the write");
}

#[test]
fn a_gpu_keeps_a_few_tables_and_another_when_a_list_is_dropped() {
    const MOST: usize = 16;
    let mut posts = Posts::of(300);
    let mut kept = Vec::new();
    for at in 0..=MOST {
        let used: u64 = (1..=3).map(|byte| posts.write(byte)).sum();
        assert_eq!(used, u64::from(at < MOST), "list {at}");
        kept.push(posts.renew());
    }
    kept.truncate(MOST - 1);
    assert_eq!((1..=3).map(|byte| posts.write(byte)).sum::<u64>(), 1);
}

#[test]
fn a_table_is_not_used_once_its_region_is_gone() {
    let posts = Posts::of(300);
    assert_eq!((1..=3).map(|byte| posts.write(byte)).sum::<u64>(), 1);
    let Pair { regions, region, .. } = &posts.pair;
    let before = posts.driver.fake.tables();
    let _revoked = regions.revoke(region.slot, region.key).expect("registered");
    // The peer has to refuse it: this end does not know why there is no region.
    assert_ne!(posts.begin(OpKind::Write).1, PostOutcome::Done(Ok(())));
    assert_eq!(posts.driver.fake.tables(), before);
}
