//! LogFMT-10: bf16 values as a sign and nine bits of logarithm, for groups of 128 in which every
//! magnitude is below 1.
//!
//! A packed row is its groups' bounds (the largest and the smallest magnitude of each, two bf16)
//! and then its groups' values: 160 bytes for a group that is packed, 256 for one of plain bf16.
//! Whether a group is packed follows from its bounds: the largest magnitude is below 1 and above
//! the smallest. Code 0 is zero; code `c` from 1 to 511 is `2^(low + (c - 1) * step)`, where `high`
//! and `low` are the base-2 logarithms of the bounds, `low` is at least `high - 32`, and `step` is
//! `(high - low) / 510`. A value becomes the nearest code by its logarithm; of two as near (to a
//! millionth of a step), the larger.
//!
//! Every operation is one that IEEE 754 defines, and none is a library's function, so that kernels
//! make the same bits (`kernels/ep/low_latency/logfmt.cuh`).

use multiversion::multiversion;

use super::{bf16, quantise::GROUP};

/// Bytes of a group's bounds.
const BOUNDS: usize = 4;
/// Bytes of a group that is packed: ten bits for each value.
const PACKED: usize = GROUP * 10 / 8;
/// Bytes of a group that is not.
const PLAIN: usize = GROUP * 2;
const LARGEST_CODE: u16 = 511;
/// From the smallest code that is not zero to the largest.
const STEPS: f64 = 510.0;
/// Half a step and a millionth, added before truncation: logarithms are rounded, so that of the
/// middle of two codes may lie a little below it.
const HALF: f64 = 0.5 + 1.0 / 1_048_576.0;
/// The largest distance of the smallest code below the largest magnitude, as a power of two.
const REACH: f64 = 32.0;
/// 1.0 as bf16; a group with such a magnitude, or a NaN, is not packed.
const ONE: u16 = 0x3f80;
/// The smallest normal bf16.
const SMALLEST_NORMAL: u16 = 0x80;

/// The most bytes that a row of `hidden` values takes.
#[must_use]
pub fn max_len(hidden: usize) -> usize {
    hidden / GROUP * (BOUNDS + PLAIN)
}

/// Bits of a logarithm behind the point. With the eight before it, f64 has room for all: sums and
/// differences are exact.
const FRACTION: u32 = 44;
/// Significands of a bf16.
const SIGNIFICANDS: usize = 128;
/// `log2(1 + at / 128)`, the nearest multiple of `2^-44`.
const LOGARITHMS: [f64; SIGNIFICANDS] = {
    let mut all = [0.0; SIGNIFICANDS];
    let mut at = 0;
    while at < SIGNIFICANDS {
        all[at] = fraction_of_log2(at) as f64 / (1u64 << FRACTION) as f64;
        at += 1;
    }
    all
};

/// Bit by bit: a number's square has twice its logarithm.
const fn fraction_of_log2(at: usize) -> u64 {
    const POINT: u32 = 62;
    let mut number = ((SIGNIFICANDS + at) as u64) << (POINT - 7);
    let (mut bits, mut left) = (0, FRACTION + 1);
    while left > 0 {
        let square = ((number as u128 * number as u128) >> POINT) as u64;
        let is_two = square >> (POINT + 1);
        number = square >> is_two;
        bits = bits << 1 | is_two;
        left -= 1;
    }
    (bits + 1) >> 1
}

/// The base-2 logarithm of a magnitude that is not 0.
#[inline(always)]
fn log2(magnitude: u16) -> f64 {
    let is_normal = magnitude >= SMALLEST_NORMAL;
    let normal = u32::from(magnitude) << 16;
    // A subnormal magnitude counts units of the smallest one.
    let subnormal = f32::from(magnitude).to_bits();
    let (bits, bias) = if is_normal { (normal, 127) } else { (subnormal, 127 + 133) };
    let exponent = (bits >> 23).cast_signed() - bias;
    f64::from(exponent) + LOGARITHMS[(bits >> 16) as usize % SIGNIFICANDS]
}

/// `ln(2)^k / k!`, from the tenth on down.
const EXP2: [f64; 11] = [
    7.054_911_620_801_123e-9,
    1.017_808_600_923_97e-7,
    1.321_548_679_014_431e-6,
    1.525_273_380_405_984_1e-5,
    1.540_353_039_338_161e-4,
    1.333_355_814_642_844_3e-3,
    9.618_129_107_628_477e-3,
    5.550_410_866_482_158e-2,
    2.402_265_069_591_007_2e-1,
    std::f64::consts::LN_2,
    1.0,
];

/// 2 to a power from -200 to 1, to some 42 bits.
#[inline(always)]
fn exp2(power: f64) -> f64 {
    // One unit in the last place of this is 1, and its last bits are 0.
    const UNITS: f64 = 6_755_399_441_055_744.0;
    let shifted = power + UNITS;
    let rest = power - (shifted - UNITS);
    let of_rest = EXP2.iter().fold(0.0, |sum: f64, factor| sum.mul_add(rest, *factor));
    // The last bits are now the nearest whole number: the exponent.
    of_rest * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52)
}

/// The codes of a group.
struct Codes {
    low: f64,
    /// The difference of the logarithms of two neighbours.
    step: f64,
    steps_of_one: f64,
}

impl Codes {
    /// The codes of a group with these bounds, if it is packed.
    #[inline(always)]
    fn of(largest: u16, smallest: u16) -> Option<Self> {
        (largest < ONE && smallest < largest).then(|| {
            let high = log2(largest);
            let least = high - REACH;
            let low = if smallest == 0 { least } else { log2(smallest).max(least) };
            let range = high - low;
            Self { low, step: range / STEPS, steps_of_one: STEPS / range }
        })
    }

    #[inline(always)]
    fn encode(&self, bits: u16) -> u16 {
        let magnitude = bits & 0x7fff;
        let steps = (log2(magnitude) - self.low) * self.steps_of_one;
        // A magnitude below `low` has the smallest code.
        let code = if magnitude == 0 { 0 } else { 1 + (steps.max(0.0) + HALF) as u16 };
        (bits >> 15 << 9) | code
    }

    #[inline(always)]
    fn decode(&self, code: u16) -> u16 {
        let sign = code >> 9 << 15;
        let magnitude = match code & LARGEST_CODE {
            0 => 0.0,
            code => exp2(self.low + f64::from(code - 1) * self.step),
        };
        sign | bf16::from_f32(magnitude as f32)
    }
}

/// Packs a row into `out`, which has [`max_len`] bytes, and returns the number of bytes used. The
/// row's length is a multiple of [`GROUP`].
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
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

/// Packs four values into five bytes at a time.
#[inline(always)]
fn pack(group: &[u16; GROUP], codes: &Codes, out: &mut [u8]) -> usize {
    for (four, out) in group.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<5>().0) {
        let all =
            four.iter().rev().fold(0u64, |all, bits| all << 10 | u64::from(codes.encode(*bits)));
        out.copy_from_slice(&all.to_le_bytes()[..5]);
    }
    PACKED
}

/// Unpacks the bytes of [`encode`] into `row`. Any bytes are some values; where bytes are missing,
/// the rest is zero.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
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

#[inline(always)]
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
    fn logarithms_and_powers_are_those_of_a_library_to_their_last_bits() {
        for magnitude in 1..ONE {
            let theirs = f64::from(bf16::to_f32(magnitude)).log2();
            let apart = (log2(magnitude) - theirs).abs();
            assert!(apart <= 0.51 * 2.0f64.powi(-44) + 2.0f64.powi(-46), "{magnitude}: {apart:e}");
        }
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..100_000 {
            let power = 1.0 - 201.0 * random.f64();
            let apart = (exp2(power) / power.exp2() - 1.0).abs();
            assert!(apart < 2.0f64.powi(-41), "{power}: {apart:e}");
        }
    }

    #[test]
    fn the_middle_of_two_codes_goes_to_the_larger() {
        // If the largest is the smallest times x^4, the smallest times x^3 is 382.5 of 510 steps
        // above it.
        for [smallest, largest, value] in
            [[1.0f32, 256.0, 64.0], [1.0, 81.0, 27.0], [81.0, 4096.0, 1536.0]]
        {
            let [smallest, largest, value] =
                [smallest, largest, value].map(|value| bf16::from_f32(value / 8192.0));
            let codes = Codes::of(largest, smallest).expect("it is packed");
            assert_eq!(codes.encode(value), 384, "{value:#x} of {smallest:#x} to {largest:#x}");
        }
    }

    #[test]
    fn values_become_the_nearest_code_and_of_two_the_larger() {
        let mut random = fastrand::Rng::with_seed(6);
        for _ in 0..2_000 {
            // Exponents from the subnormal values' on, and powers of two, which lie in the middle
            // of codes.
            let is_round = random.bool();
            let mut draw = || match is_round {
                true => random.u16(0..ONE >> 7) << 7,
                false => random.u16(0..ONE),
            };
            let group: [u16; GROUP] = std::array::from_fn(|_| draw());
            let (largest, smallest) = (group.iter().max().unwrap(), group.iter().min().unwrap());
            let Some(codes) = Codes::of(*largest, *smallest) else { continue };
            let [high, low] = [largest, smallest].map(|bits| f64::from(bf16::to_f32(*bits)).log2());
            let step = (high - low.max(high - 32.0)) / 510.0;
            for bits in group {
                let value = f64::from(bf16::to_f32(bits));
                let steps = ((value.log2() - low.max(high - 32.0)) / step).max(0.0);
                let code = if bits == 0 { 0 } else { 1 + (steps + HALF).floor() as u16 };
                assert_eq!(codes.encode(bits), code, "{value:e} of {low} to {high}");
                let back = (low.max(high - 32.0) + f64::from(code.max(1) - 1) * step).exp2();
                let back = if code == 0 { 0 } else { bf16::from_f32(back as f32) };
                assert_eq!(codes.decode(code), back, "code {code} of {low} to {high}");
            }
        }
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
    fn small_groups_are_packed_and_come_back_nearly_equal() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut values: Vec<f32> = (0..4 * GROUP).map(|_| random.f32() * 1.8 - 0.9).collect();
        (values[0], values[1]) = (0.0, -0.0);
        values[GROUP..2 * GROUP].fill(3.0);
        let (len, back) = through(&values);
        assert_eq!(len, 4 * BOUNDS + 3 * PACKED + PLAIN);
        for (value, back) in values.iter().zip(&back) {
            // Half a step: the group reaches over 2^32 at most, in 510 steps, and a bf16 has eight
            // bits.
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
