//! LogFMT-10: bf16 values as a sign and nine bits of logarithm, for groups of 128 whose magnitudes are all below 1.
//!
//! A packed row is its groups' bounds (the largest and the smallest magnitude of each, two bf16) and then its groups'
//! values: 160 bytes where they are packed, 256 where they are bf16 as they were. Whether a group is packed follows from its bounds: the largest magnitude
//! is below 1 and above the smallest. Code 0 is zero; code `c` from 1 to 511 is `2^(low + (c - 1) * step)`, where `high` and `low` are the
//! base-2 logarithms of the bounds, `low` is at least `high - 32`, and `step` is `(high - low) / 510`.

use super::{bf16, quantise::GROUP};

/// Bytes of a group's bounds.
const BOUNDS: usize = 4;
/// Bytes of a group that is packed: ten bits for each value.
const PACKED: usize = GROUP * 10 / 8;
/// Bytes of a group that is not.
const PLAIN: usize = GROUP * 2;
const LARGEST_CODE: u16 = 511;
/// How far below the largest magnitude the smallest code is at most, as a power of two.
const REACH: f64 = 32.0;

/// The most bytes that a row of `hidden` values takes.
#[must_use]
pub fn max_len(hidden: usize) -> usize {
    hidden / GROUP * (BOUNDS + PLAIN)
}

/// The codes of a group.
struct Codes {
    low: f64,
    step: f64,
}

impl Codes {
    /// Those of a group with these bounds, if it is packed.
    fn of(largest: u16, smallest: u16) -> Option<Self> {
        let [largest, smallest] = [largest, smallest].map(|bits| f64::from(bf16::to_f32(bits)));
        // Not for a NaN either.
        let is_packed = largest < 1.0 && smallest < largest;
        is_packed.then(|| {
            let high = largest.log2();
            let low = smallest.log2().max(high - REACH);
            Self { low, step: (high - low) / f64::from(LARGEST_CODE - 1) }
        })
    }

    fn encode(&self, bits: u16) -> u16 {
        let magnitude = f64::from(bf16::to_f32(bits & 0x7fff));
        let code = if magnitude == 0.0 {
            0
        } else {
            // From here on it is within bounds: the cast saturates below.
            (((magnitude.log2() - self.low) / self.step).round() as u16 + 1).min(LARGEST_CODE)
        };
        (bits >> 15 << 9) | code
    }

    fn decode(&self, code: u16) -> u16 {
        let sign = code >> 9 << 15;
        let magnitude = match code & LARGEST_CODE {
            0 => 0.0,
            code => (self.low + f64::from(code - 1) * self.step).exp2(),
        };
        sign | bf16::from_f32(magnitude as f32)
    }
}

/// Packs a row, whose length is a multiple of [`GROUP`], into `out`, which has [`max_len`] bytes; returns how many it takes.
pub fn encode(row: &[u16], out: &mut [u8]) -> usize {
    let groups = row.as_chunks::<GROUP>().0;
    let (bounds, mut values) = out.split_at_mut(groups.len() * BOUNDS);
    let mut len = bounds.len();
    for (group, bounds) in groups.iter().zip(bounds.as_chunks_mut::<BOUNDS>().0) {
        let magnitudes = || group.iter().map(|bits| bits & 0x7fff);
        let (largest, smallest) =
            (magnitudes().max().unwrap_or(0), magnitudes().min().unwrap_or(0));
        *bounds = (u32::from(largest) | u32::from(smallest) << 16).to_le_bytes();
        let taken = match Codes::of(largest, smallest) {
            Some(codes) => pack(group, &codes, values),
            None => {
                for (out, bits) in values.as_chunks_mut::<2>().0.iter_mut().zip(group) {
                    *out = bits.to_le_bytes();
                }
                PLAIN
            }
        };
        values = &mut values[taken..];
        len += taken;
    }
    len
}

/// Four values in five bytes at a time.
fn pack(group: &[u16; GROUP], codes: &Codes, out: &mut [u8]) -> usize {
    for (four, out) in group.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<5>().0) {
        let all =
            four.iter().rev().fold(0u64, |all, bits| all << 10 | u64::from(codes.encode(*bits)));
        out.copy_from_slice(&all.to_le_bytes()[..5]);
    }
    PACKED
}

/// Unpacks what [`encode`] packed into `row`. Any bytes are read as some values; where there are too few, the rest is zero.
pub fn decode(packed: &[u8], row: &mut [u16]) {
    row.fill(0);
    let groups = row.as_chunks_mut::<GROUP>().0;
    let Some((bounds, mut values)) = packed.split_at_checked(groups.len() * BOUNDS) else { return };
    for (group, bounds) in groups.iter_mut().zip(bounds.as_chunks::<BOUNDS>().0) {
        let bounds = u32::from_le_bytes(*bounds);
        let codes = Codes::of(bounds as u16, (bounds >> 16) as u16);
        let len = if codes.is_some() { PACKED } else { PLAIN };
        let Some((own, rest)) = values.split_at_checked(len) else { return };
        match codes {
            Some(codes) => unpack(own, &codes, group),
            None => {
                for (bits, own) in group.iter_mut().zip(own.as_chunks::<2>().0) {
                    *bits = u16::from_le_bytes(*own);
                }
            }
        }
        values = rest;
    }
}

fn unpack(packed: &[u8], codes: &Codes, group: &mut [u16; GROUP]) {
    for (four, packed) in group.as_chunks_mut::<4>().0.iter_mut().zip(packed.as_chunks::<5>().0) {
        let [a, b, c, d, e] = *packed;
        let all = u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]);
        for (at, bits) in four.iter_mut().enumerate() {
            *bits = codes.decode((all >> (10 * at)) as u16 & 0x3ff);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(values: &[f32]) -> (usize, Vec<f32>) {
        let bits: Vec<_> = values.iter().map(|value| bf16::from_f32(*value)).collect();
        let mut packed = vec![0xee; max_len(bits.len())];
        let len = encode(&bits, &mut packed);
        let mut out = vec![0xffff; bits.len()];
        decode(&packed[..len], &mut out);
        (len, out.into_iter().map(bf16::to_f32).collect())
    }

    #[test]
    fn large_and_even_groups_stay_as_they_are() {
        for group in [vec![1.5; GROUP], vec![0.25; GROUP], (0..GROUP).map(|at| at as f32).collect()]
        {
            assert_eq!(through(&group), (BOUNDS + PLAIN, group));
        }
        let (_, spoilt) = through(&[f32::NAN; GROUP]);
        assert!(spoilt.iter().all(|value| value.is_nan()));
    }

    #[test]
    fn small_groups_are_packed_and_nearly_what_they_were() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut values: Vec<f32> = (0..4 * GROUP).map(|_| random.f32() * 1.8 - 0.9).collect();
        (values[0], values[1]) = (0.0, -0.0);
        values[GROUP..2 * GROUP].fill(3.0);
        let (len, back) = through(&values);
        assert_eq!(len, 4 * BOUNDS + 3 * PACKED + PLAIN);
        for (value, back) in values.iter().zip(&back) {
            // Half a step: the group reaches over 2^32 at most, in 510 steps, and a bf16 has eight bits.
            let bound = value.abs() * (32.0f32 / 510.0 / 2.0).exp2() * 1.01 + 1e-9;
            assert!(
                back.abs() <= bound && (value.abs() < 1e-6 || value.signum() == back.signum()),
                "{value} {back}"
            );
            assert!((value - back).abs() <= value.abs() * 0.03 + 1e-9, "{value} {back}");
        }
        assert_eq!((back[0].to_bits(), back[1].to_bits()), (0, 1 << 31));
    }

    #[test]
    fn the_bounds_of_a_group_survive() {
        let mut values = vec![0.1; GROUP];
        (values[9], values[77]) = (0.9375, 0.001_953_125);
        let (_, back) = through(&values);
        assert_eq!((back[9], back[77]), (0.9375, 0.001_953_125));
    }

    #[test]
    fn any_bytes_are_some_values() {
        let mut random = fastrand::Rng::with_seed(4);
        let mut row = vec![0; 3 * GROUP];
        for _ in 0..2_000 {
            let packed: Vec<u8> =
                (0..random.usize(..max_len(row.len()))).map(|_| random.u8(..)).collect();
            decode(&packed, &mut row);
        }
    }
}
