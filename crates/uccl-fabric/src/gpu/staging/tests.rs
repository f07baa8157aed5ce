//! Staging with copies that end in any order, late, with an error, or never.

use std::{collections::VecDeque, ptr, sync::Arc};

use parking_lot::Mutex;
use uccl_device::{MemoryKind, cuda::gather::Piece};

use super::*;
use crate::{
    gpu::{CHUNK, CopyBackend, CopyQueue, Slab},
    mem::Span,
};

const SLOT: u32 = 7;

#[derive(Default)]
struct Script {
    copies: Vec<Copy>,
    /// The copies that were released.
    released: Vec<usize>,
    /// Looks at copies so far.
    looks: u64,
    /// From this look on, all copies have ended.
    all_end_at: Option<u64>,
}

struct Copy {
    pieces: Vec<Piece>,
    result: Option<Result<(), GpuError>>,
}

impl Script {
    fn end(&mut self, name: usize, result: Result<(), GpuError>) {
        let copy = &mut self.copies[name];
        if copy.result.is_some() {
            return;
        }
        for piece in copy.pieces.iter().filter(|_| result.is_ok()) {
            let (from, to) = (piece.source as *const u8, piece.destination as *mut u8);
            // SAFETY: the test that started the copy keeps its memory until the copy has ended.
            unsafe { ptr::copy_nonoverlapping(from, to, piece.len_bytes as usize) };
        }
        copy.result = Some(result);
    }
}

/// Copies that end when the test says so.
struct Actor(Arc<Mutex<Script>>);

impl CopyQueue for Actor {
    fn chunk(&self, _device: u32) -> Result<Chunk, GpuError> {
        Ok(Chunk::plain())
    }

    unsafe fn start(
        &mut self,
        _device: u32,
        pieces: &[Piece],
        _direction: Direction,
    ) -> (Option<usize>, Result<(), GpuError>) {
        let mut script = self.0.lock();
        script.copies.push(Copy { pieces: pieces.to_vec(), result: None });
        (Some(script.copies.len() - 1), Ok(()))
    }

    fn ended(&mut self, name: usize) -> Option<Result<(), GpuError>> {
        let mut script = self.0.lock();
        script.looks += 1;
        if script.all_end_at.is_some_and(|at| at <= script.looks) {
            (0..script.copies.len()).for_each(|name| script.end(name, Ok(())));
        }
        script.copies[name].result.clone()
    }

    fn release(&mut self, name: usize) {
        self.0.lock().released.push(name);
    }
}

/// Makes actors that follow one script.
struct Stage(Arc<Mutex<Script>>);

impl CopyBackend for Stage {
    fn queue(&self) -> Box<dyn CopyQueue> {
        Box::new(Actor(Arc::clone(&self.0)))
    }

    fn slab(&self, _device: u32, chunks: usize) -> Result<Slab, GpuError> {
        Ok(Slab::plain(chunks))
    }

    fn copier_of(&self, _kind: MemoryKind) -> Option<u32> {
        Some(0)
    }
}

fn staging(direction: Direction) -> (Staging<usize>, Arc<Mutex<Script>>) {
    let script = Arc::new(Mutex::new(Script::default()));
    let by = CopyBy::of(Stage(Arc::clone(&script)));
    let staging = Staging::new(&by, direction);
    // Only the staging has an actor now.
    drop(by);
    (staging, script)
}

fn failure(name: usize) -> GpuError {
    GpuError::Unavailable { reason: name.to_string() }
}

fn located(memory: &mut [u8]) -> LocatedSpan {
    let span = Span { addr: memory.as_mut_ptr() as usize, len: memory.len() };
    LocatedSpan { span, device: Some(0) }
}

/// Starts to copy memory to a chunk.
fn start(staging: &mut Staging<usize>, what: usize, memory: &mut [u8]) {
    let chunk = staging.chunk(0).expect("memory");
    // SAFETY: the tests keep their memory for as long as a copy of it can run.
    unsafe { staging.start(what, chunk, &[located(memory)], [SLOT]) };
}

fn bytes_of(chunk: &Chunk, len: usize) -> Vec<u8> {
    // SAFETY: no copy of the chunk runs any more, and it is longer than this.
    unsafe { std::slice::from_raw_parts(chunk.addr() as *const u8, len).to_vec() }
}

/// The end that a test expects next.
enum ExpectedEnd {
    Copy(usize),
    Known(Result<(), GpuError>),
}

#[test]
fn host_memory_that_is_gone_fails_its_copy_and_no_other() {
    for direction in [Direction::DeviceToHost, Direction::HostToDevice] {
        let (mut staging, script) = staging(direction);
        let mut memory = [7; 16];
        // No page is mapped there.
        let gone = LocatedSpan { span: Span { addr: 64, len: 100 }, device: None };
        let chunk = staging.chunk(0).expect("memory");
        // SAFETY: memory of this test, and an address where no memory is mapped.
        unsafe { staging.start(0, chunk, &[gone, located(&mut memory)], [SLOT]) };
        start(&mut staging, 1, &mut memory);
        let ended = staging.ended().expect("no GPU copies it");
        assert!(ended.what == 0 && matches!(ended.result, Err(GpuError::System { .. })));
        assert!(staging.ended().is_none());
        script.lock().end(0, Ok(()));
        let ended = staging.ended().expect("it was made");
        assert!(ended.what == 1 && ended.result.is_ok());
    }
}

#[test]
fn ends_are_told_in_order_once_each_with_their_own_bytes_or_reason() {
    for seed in 0..300 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut memory: Vec<[u8; 16]> = (0..200).map(|i| [i as u8; 16]).collect();
        let (mut staging, script) = staging(Direction::DeviceToHost);
        let mut line: VecDeque<(usize, ExpectedEnd)> = VecDeque::new();
        let (mut begun, mut told) = (0, 0);
        while told < memory.len() {
            match rng.u32(0..10) {
                0..4 if begun < memory.len() && !staging.is_full() => {
                    line.push_back((begun, ExpectedEnd::Copy(script.lock().copies.len())));
                    start(&mut staging, begun, &mut memory[begun]);
                    begun += 1;
                }
                4 if begun < memory.len() => {
                    let result = if rng.bool() { Ok(()) } else { Err(failure(begun)) };
                    line.push_back((begun, ExpectedEnd::Known(result.clone())));
                    staging.follow(begun, result);
                    begun += 1;
                }
                5..8 => {
                    let mut script = script.lock();
                    if let Some(name) = rng.choice(0..script.copies.len()) {
                        let result = if rng.u32(0..4) > 0 { Ok(()) } else { Err(failure(name)) };
                        script.end(name, result);
                    }
                }
                _ => {
                    let expected = line.front().and_then(|(what, expected)| match expected {
                        ExpectedEnd::Copy(name) => {
                            Some((*what, script.lock().copies[*name].result.clone()?))
                        }
                        ExpectedEnd::Known(result) => Some((*what, result.clone())),
                    });
                    let Some(StepEnd { what, result }) = staging.ended() else {
                        assert!(expected.is_none(), "seed {seed}");
                        continue;
                    };
                    let (_, of) = line.pop_front().expect("something was started");
                    if let (ExpectedEnd::Copy(_), Ok(chunk)) = (&of, &result) {
                        let chunk = chunk.as_ref().expect("a copy has a chunk");
                        assert_eq!(bytes_of(chunk, 16), memory[what], "seed {seed}");
                    }
                    assert_eq!(Some((what, result.map(drop))), expected, "seed {seed}");
                    told += 1;
                }
            }
            assert!(staging.waiting().copied().eq(line.iter().map(|(what, _)| *what)));
        }
        assert!(staging.is_idle() && staging.ended().is_none());
    }
}

#[test]
fn bytes_go_from_chunks_to_pieces_in_their_order() {
    let (mut staging, script) = staging(Direction::HostToDevice);
    let mut memory = [[0_u8; 3], [0; 3]];
    let pieces = [1, 0].map(|at| located(&mut memory[at]));
    let chunk = staging.chunk(0).expect("memory");
    // SAFETY: the chunk is ours, and the memory outlives the copy.
    unsafe {
        ptr::copy_nonoverlapping([1_u8, 2, 3, 4, 5, 6].as_ptr(), chunk.addr() as *mut u8, 6);
        staging.start(0, chunk, &pieces, []);
    }
    script.lock().end(0, Ok(()));
    assert!(staging.ended().is_some_and(|ended| ended.result.is_ok()));
    assert_eq!(std::hint::black_box(&mut memory), &[[4, 5, 6], [1, 2, 3]]);
}

#[test]
fn no_more_than_four_chunks_are_ahead() {
    let (mut staging, script) = staging(Direction::DeviceToHost);
    let mut memory = [1; 4];
    for what in 0..AHEAD {
        assert!(!staging.is_full());
        start(&mut staging, what, &mut memory);
    }
    assert!(staging.is_full());
    script.lock().end(1, Ok(()));
    assert!(staging.ended().is_none() && staging.is_full(), "the first has not ended");
    script.lock().end(0, Ok(()));
    assert!(staging.ended().is_some() && !staging.is_full());
    script.lock().all_end_at = Some(0);
    staging.clear(PATIENCE).expect("they end");
}

#[test]
fn a_region_is_touched_until_its_copy_has_ended_even_if_that_is_not_told_yet() {
    let (mut staging, script) = staging(Direction::DeviceToHost);
    let mut memory = [1; 4];
    start(&mut staging, 0, &mut memory);
    assert!(staging.touches(SLOT) && !staging.touches(SLOT + 1));
    script.lock().end(0, Err(failure(0)));
    assert!(!staging.touches(SLOT) && !staging.is_idle());
}

#[test]
fn settling_waits_for_late_copies_and_their_ends_are_told_after_it() {
    let (mut staging, script) = staging(Direction::DeviceToHost);
    let mut memory = [3; 4];
    (0..3).for_each(|what| start(&mut staging, what, &mut memory));
    staging.follow(3, Ok(()));
    script.lock().all_end_at = Some(1000);
    staging.settle(PATIENCE).expect("they end");
    assert!(script.lock().copies.iter().all(|copy| copy.result.is_some()));
    let told = std::iter::from_fn(|| staging.ended()).map(|ended| ended.what);
    assert!(told.eq(0..4));
}

/// A queue keeps what belongs to a copy until then.
#[test]
fn every_copy_is_released_once_whether_its_end_is_reported_or_cleared() {
    let (mut staging, script) = staging(Direction::DeviceToHost);
    let mut memory = [3; 4];
    (0..3).for_each(|what| start(&mut staging, what, &mut memory));
    script.lock().all_end_at = Some(0);
    assert!(staging.ended().is_some());
    assert_eq!(script.lock().released, [0]);
    staging.clear(PATIENCE).expect("they end");
    assert_eq!(script.lock().released, [0, 1, 2]);
}

#[test]
fn a_copy_that_does_not_end_is_told_and_keeps_its_region_and_its_chunk() {
    let (mut staging, script) = staging(Direction::HostToDevice);
    let mut memory = vec![0_u8; CHUNK];
    start(&mut staging, 0, &mut memory);
    start(&mut staging, 1, &mut memory);
    script.lock().end(0, Ok(()));
    let why = staging.clear(Duration::from_millis(1)).expect_err("one never ends").to_string();
    assert!(why.contains("1 have not ended after 1ms"), "{why}");
    assert!(staging.touches(SLOT) && staging.waiting().count() == 2);
    drop(staging);
    assert_eq!(Arc::strong_count(&script), 2, "the actor is kept");
    // The chunk still exists, for a copy that ends late.
    script.lock().end(1, Ok(()));
}

#[test]
fn a_copy_that_cannot_be_started_ends_with_the_reason() {
    let mut staging = Staging::new(&CopyBy::default(), Direction::DeviceToHost);
    let mut memory = [1; 4];
    let nowhere = LocatedSpan { device: Some(1 << 20), ..located(&mut memory) };
    // SAFETY: there is no such GPU, so nothing is copied.
    unsafe { staging.start(5, Chunk::plain(), &[nowhere], [SLOT]) };
    assert!(!staging.touches(SLOT));
    let ended = staging.ended().expect("there is nothing to wait for");
    assert!(ended.what == 5 && ended.result.is_err());
}
