//! Sums of bf16 rows in f32: an element's terms are added one after another, in the order of the
//! rows, and the sum is rounded once. Weighted terms are in parts: each part is summed by itself,
//! rounded to 24 bits, and then added to the parts before it.

use multiversion::multiversion;

use super::bf16;
use crate::shared::streaming;

/// Elements that are summed at a time: their sums stay in registers.
const BLOCK: usize = 64;
/// The distance of prefetches in elements: rows that were written past the caches come from memory.
const AHEAD: usize = 16 * BLOCK;

/// `out = rows[0] + rows[1] + ...`; zeros if there are none.
///
/// # Panics
/// A row is shorter than `out`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub fn plain(rows: &[&[u16]], out: &mut [u16]) {
    in_blocks(rows, out, &PlainTerms);
}

/// `out = nearest_of_24_bits(weights[0] * rows[0] + ...) + nearest_of_24_bits(...) + ...`, where
/// each row is multiplied and added with one rounding (fused). A part of the sum begins with each
/// row that has a flag set beside its weight.
///
/// # Panics
/// A row is shorter than `out`, or there are more rows than weights.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub fn weighted(rows: &[&[u16]], weights: &[(f32, bool)], out: &mut [u16]) {
    in_blocks(rows, out, &WeightedTerms(weights));
}

/// The nearest number with the upper 24 bits of an f32, ties away from zero; subnormal ones are cut
/// off.
#[inline(always)]
fn nearest_of_24_bits(value: f32) -> f32 {
    /// Half of the last of these bits, of a number from 1 to 2.
    const HALF: f32 = 1.0 / 65536.0;
    let power = f32::from_bits(value.to_bits() & 0xff80_0000);
    f32::from_bits((value + power * HALF).to_bits() & 0xffff_ff00)
}

/// How terms are summed: in one part, unless an implementation overrides that.
trait Terms {
    /// Adds a row's value to a part.
    fn add(&self, part: f32, row: usize, value: f32) -> f32;

    /// Whether a part of the sum begins with a row, as it does with the first.
    #[inline(always)]
    fn begins(&self, _row: usize) -> bool {
        false
    }

    /// The amount that a complete part adds to the sum.
    #[inline(always)]
    fn end(&self, part: f32) -> f32 {
        part
    }
}

struct PlainTerms;

impl Terms for PlainTerms {
    #[inline(always)]
    fn add(&self, part: f32, _: usize, value: f32) -> f32 {
        part + value
    }
}

struct WeightedTerms<'a>(&'a [(f32, bool)]);

impl Terms for WeightedTerms<'_> {
    #[inline(always)]
    fn add(&self, part: f32, row: usize, value: f32) -> f32 {
        value.mul_add(self.0[row].0, part)
    }

    #[inline(always)]
    fn begins(&self, row: usize) -> bool {
        self.0[row].1
    }

    #[inline(always)]
    fn end(&self, part: f32) -> f32 {
        nearest_of_24_bits(part)
    }
}

/// Sums whole blocks, in loops of a fixed length, and then the rest, value by value.
#[inline(always)]
fn in_blocks(rows: &[&[u16]], out: &mut [u16], terms: &impl Terms) {
    let (blocks, rest) = out.as_chunks_mut::<BLOCK>();
    let start = blocks.len() * BLOCK;
    for (at, out) in blocks.iter_mut().enumerate() {
        let sums = sums_at::<BLOCK>(rows, at * BLOCK, terms);
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = bf16::from_f32(sum);
        }
    }
    for (at, out) in rest.iter_mut().enumerate() {
        let [sum] = sums_at(rows, start + at, terms);
        *out = bf16::from_f32(sum);
    }
}

/// The sums of `N` values of each row from `at` on.
#[inline(always)]
fn sums_at<const N: usize>(rows: &[&[u16]], at: usize, terms: &impl Terms) -> [f32; N] {
    let (mut sums, mut nth) = ([0.0f32; N], 0);
    while nth < rows.len() {
        let mut part = [0.0f32; N];
        loop {
            let values = &rows[nth][at..][..N];
            // A block is two cache lines.
            let ahead = values.as_ptr().wrapping_add(AHEAD);
            streaming::prefetch(ahead);
            streaming::prefetch(ahead.wrapping_add(BLOCK / 2));
            for (part, bits) in part.iter_mut().zip(values) {
                *part = terms.add(*part, nth, bf16::to_f32(*bits));
            }
            nth += 1;
            if nth == rows.len() || terms.begins(nth) {
                break;
            }
        }
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += terms.end(part));
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(value: f32) -> Vec<u16> {
        vec![bf16::from_f32(value); BLOCK + 7]
    }

    #[test]
    fn terms_are_added_in_order_and_rounded_once() {
        let terms = [16_777_216.0, 1.0, -16_777_216.0, 0.25].map(row);
        let mut out = row(7.0);
        plain(&terms.each_ref().map(|term| &term[..]), &mut out);
        assert_eq!(out, row(0.25), "f32 has no room for the 1 beside 2^24");
        plain(&[], &mut out);
        assert_eq!(out, row(0.0));
    }

    #[test]
    fn a_weighted_term_is_rounded_once() {
        // Of the product's bits, the first that f32 has no room for decides about the last of the
        // bf16.
        let (weight, value) = (1.0 + f32::EPSILON, 1.0 + 1.0 / 128.0);
        let terms = [row(1.0), row(value)];
        let mut out = row(0.0);
        let weights = [(-1.0, true), (weight, false)];
        weighted(&terms.each_ref().map(|term| &term[..]), &weights, &mut out);
        let exact = f64::from(weight) * f64::from(value) - 1.0;
        let twice = weight * value - 1.0;
        assert_eq!(out, row(exact as f32));
        assert_ne!(exact as f32, twice, "two roundings differ");
    }

    #[test]
    fn a_part_is_rounded_to_24_bits() {
        let nearest = |value: f32| {
            let spacing = 2f64.powi(value.abs().log2().floor() as i32 - 15);
            ((f64::from(value) / spacing).round() * spacing) as f32
        };
        let mut bits = 1u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Also ties, and numbers beside them.
            for bits in [bits, bits & !0xff | 0x80, bits & !0xff | 0x7f] {
                let value = f32::from_bits(bits);
                if value.is_normal() {
                    assert_eq!(nearest_of_24_bits(value), nearest(value), "{value:e}");
                }
            }
        }
        assert_eq!(nearest_of_24_bits(f32::MAX), f32::INFINITY);
        assert_eq!(nearest_of_24_bits(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert_eq!(nearest_of_24_bits(-0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(nearest_of_24_bits(f32::from_bits(0x1ff)).to_bits(), 0x100, "subnormal");
        for nan in [0x7fff_ffff, 0xffff_ffff, 0x7fc0_0000] {
            assert!(nearest_of_24_bits(f32::from_bits(nan)).is_nan());
        }

        // 2^-15 is the last of the bits of 1, and half of it is rounded up to it.
        let terms = [1.0, 1.0 / 65536.0, -1.0].map(row);
        let mut out = row(0.0);
        let weights = [(1.0, true), (1.0, false), (1.0, true)];
        weighted(&terms.each_ref().map(|term| &term[..]), &weights, &mut out);
        assert_eq!(out, row(1.0 / 32768.0));
    }

    #[test]
    fn a_part_is_summed_by_itself() {
        let terms = [16_777_216.0, 1.0, 1.0, -16_777_216.0].map(row);
        let rows = terms.each_ref().map(|term| &term[..]);
        let mut out = row(0.0);
        for (second, expected) in [(true, 2.0), (false, 0.0)] {
            weighted(&rows, &[(1.0, true), (1.0, second), (1.0, false), (1.0, true)], &mut out);
            assert_eq!(out, row(expected), "f32 has room for 2 beside 2^24, and none for 1");
        }
    }
}
