//! A model of the kernel's indexing on the CPU: the same head, body, funnel and tail as
//! `kernels/copy.cu`, for every lane. Its memory notices a read or write outside a piece, and a
//! second write to a byte.

use std::{collections::HashMap, ops::Range};

use proptest::prelude::*;

use super::{
    params::{Cursor, LANES, Piece},
    partition::partition,
};

const ROUND: u64 = 8;
const SHIFTED_ROUND: u64 = 4;

/// Sources and destinations at any address.
struct Memory {
    readable: Vec<(Range<u64>, Vec<u8>)>,
    writable: Vec<Range<u64>>,
    written: HashMap<u64, u8>,
}

impl Memory {
    fn byte(&self, address: u64) -> u8 {
        let found = self.readable.iter().find(|(range, _)| range.contains(&address));
        let (range, bytes) = found.unwrap_or_else(|| panic!("read at {address}, in no source"));
        bytes[(address - range.start) as usize]
    }

    fn vector(&self, address: u64) -> [u32; 4] {
        assert_eq!(address % 16, 0);
        std::array::from_fn(|word| {
            let at = address + 4 * word as u64;
            u32::from_le_bytes(std::array::from_fn(|byte| self.byte(at + byte as u64)))
        })
    }

    fn set(&mut self, address: u64, byte: u8) {
        let inside = self.writable.iter().any(|range| range.contains(&address));
        assert!(inside, "written at {address}, in no destination");
        assert!(self.written.insert(address, byte).is_none(), "written twice at {address}");
    }

    fn set_vector(&mut self, address: u64, vector: [u32; 4]) {
        assert_eq!(address % 16, 0);
        for (index, byte) in vector.into_iter().flat_map(u32::to_le_bytes).enumerate() {
            self.set(address + index as u64, byte);
        }
    }

    fn copy_bytes(&mut self, dst: u64, src: u64, len: u64) {
        for i in 0..len {
            self.set(dst + i, self.byte(src + i));
        }
    }

    fn copy_aligned(&mut self, dst: u64, src: u64, count: u64) {
        for lane in 0..u64::from(LANES) {
            let lanes = u64::from(LANES);
            let mut v = lane;
            while v + lanes * (ROUND - 1) < count {
                for i in 0..ROUND {
                    let vector = self.vector(src + 16 * (v + lanes * i));
                    self.set_vector(dst + 16 * (v + lanes * i), vector);
                }
                v += lanes * ROUND;
            }
            for i in (0..ROUND).filter(|i| v + lanes * i < count) {
                let vector = self.vector(src + 16 * (v + lanes * i));
                self.set_vector(dst + 16 * (v + lanes * i), vector);
            }
        }
    }

    fn copy_shifted(&mut self, dst: u64, src: u64, count: u64, k: u32) {
        let lanes = u64::from(LANES);
        let mut first = 0;
        while first < count {
            let row = |memory: &Self, lane: u64, i: u64| {
                let at = first + lane + lanes * i;
                let mine = i < SHIFTED_ROUND || lane == 0;
                if mine && at <= count { memory.vector(src + 16 * at) } else { [0; 4] }
            };
            for lane in 0..lanes {
                for i in 0..SHIFTED_ROUND {
                    let from = (lane + 1) % lanes;
                    let next = row(self, from, if from == 0 { i + 1 } else { i });
                    let own = row(self, lane, i);
                    let at = first + lane + lanes * i;
                    if at < count {
                        self.set_vector(dst + 16 * at, funnel(own, next, k));
                    }
                }
            }
            first += lanes * SHIFTED_ROUND;
        }
    }

    fn copy_piece(&mut self, dst: u64, src: u64, len: u64) {
        let mut head = (16 - dst % 16) % 16;
        let k = (src + head) % 16;
        if k > head {
            head += 16;
        }
        head = head.min(len);
        let mut count = (len - head) / 16;
        if k != 0 {
            let whole = (len - head + k) / 16;
            count = if whole == 0 { 0 } else { count.min(whole - 1) };
        }
        let tail = head + 16 * count;
        self.copy_bytes(dst, src, head);
        if k == 0 {
            self.copy_aligned(dst + head, src + head, count);
        } else {
            self.copy_shifted(dst + head, (src + head).wrapping_sub(k), count, k as u32);
        }
        self.copy_bytes(dst + tail, src + tail, len - tail);
    }

    fn copy_share(&mut self, pieces: &[Piece], begin: Cursor, end: Cursor) {
        let stop = if end.offset == 0 { end.piece } else { end.piece + 1 };
        for mine in begin.piece..stop {
            let mut piece = pieces[mine as usize];
            if mine == end.piece {
                piece.len_bytes = end.offset;
            }
            let skip = if mine == begin.piece { begin.offset } else { 0 };
            let (dst, src) = (piece.destination + skip, piece.source + skip);
            self.copy_piece(dst, src, piece.len_bytes - skip);
        }
    }
}

fn funnel(a: [u32; 4], b: [u32; 4], k: u32) -> [u32; 4] {
    let (two, one, bits) = (k & 8 != 0, k & 4 != 0, (k & 3) * 8);
    let pick = |yes: bool, a: u32, b: u32| if yes { a } else { b };
    let p = [
        pick(two, a[2], a[0]),
        pick(two, a[3], a[1]),
        pick(two, b[0], a[2]),
        pick(two, b[1], a[3]),
        pick(two, b[2], b[0]),
        pick(two, b[3], b[1]),
    ];
    let q: [u32; 5] = std::array::from_fn(|i| pick(one, p[i + 1], p[i]));
    // __funnelshift_r(low, high, bits): the low half of both, shifted right.
    std::array::from_fn(|i| ((u64::from(q[i + 1]) << 32 | u64::from(q[i])) >> bits) as u32)
}

/// Pieces at these alignments and of these lengths, apart from each other.
fn layout(shapes: &[(u64, u64, u64)]) -> Vec<Piece> {
    let (mut destination, mut source) = (1 << 20, 1 << 40);
    let piece = |&(to, from, len_bytes): &(u64, u64, u64)| {
        let piece = Piece { destination: destination + to, source: source + from, len_bytes };
        destination += len_bytes.next_multiple_of(64) + 64;
        source += len_bytes.next_multiple_of(64) + 64;
        piece
    };
    shapes.iter().map(piece).collect()
}

fn run(pieces: &[Piece], most_warps: u32) -> Memory {
    let mut random = fastrand::Rng::with_seed(7);
    let source = |piece: &Piece| {
        let mut bytes = vec![0; piece.len_bytes as usize];
        random.fill(&mut bytes);
        (piece.source..piece.source + piece.len_bytes, bytes)
    };
    let mut memory = Memory {
        readable: pieces.iter().map(source).collect(),
        writable: pieces.iter().map(|p| p.destination..p.destination + p.len_bytes).collect(),
        written: HashMap::new(),
    };
    let mut cursors = vec![Cursor::default(); most_warps as usize + 1];
    let warps = partition(pieces, most_warps, &mut cursors) as usize;
    for warp in 0..warps {
        memory.copy_share(pieces, cursors[warp], cursors[warp + 1]);
    }
    memory
}

fn check(pieces: &[Piece], most_warps: u32) {
    let memory = run(pieces, most_warps);
    for piece in pieces {
        for i in 0..piece.len_bytes {
            let found = memory.written.get(&(piece.destination + i)).copied();
            assert_eq!(found, Some(memory.byte(piece.source + i)), "{piece:?} at {i}");
        }
    }
}

#[test]
fn every_pair_of_alignments_and_every_short_length() {
    for (to, from) in (0..16).flat_map(|to| (0..16).map(move |from| (to, from))) {
        let shapes: Vec<_> = (0..70).map(|len| (to, from, len)).collect();
        check(&layout(&shapes), 3);
        check(&layout(&[(to, from, 32 * 16 * 4 + 95)]), 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_byte_is_copied_once_and_no_other(
        shapes in proptest::collection::vec(
            (0..64_u64, 0..64_u64, prop_oneof![0..70_u64, 0..3000_u64, 0..40_000_u64]),
            1..12,
        ),
        most_warps in 1..64_u32,
    ) {
        check(&layout(&shapes), most_warps);
    }
}
