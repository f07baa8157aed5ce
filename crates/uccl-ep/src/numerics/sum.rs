//! Sums of bf16 rows in f32: an element's terms are added one after another, in the order of the rows, and the sum is
//! rounded once. Terms may be in parts: each is summed by itself, and then added to those before it.

use multiversion::multiversion;

use super::bf16;
use crate::streaming;

/// Elements that are summed at a time: their sums stay in registers.
const BLOCK: usize = 64;
/// Elements of a row that are asked for before they are needed: rows that were written past the caches come from memory.
const AHEAD: usize = 16 * BLOCK;

/// `out = rows[0] + rows[1] + ...`; zeros if there are none.
///
/// # Panics
/// A row is shorter than `out`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub fn plain(rows: &[&[u16]], out: &mut [u16]) {
    in_blocks(rows, out, |sum, _, value| sum + value, |_| false);
}

/// `out = (weights[0] * rows[0] + ...) + (...) + ...`, where each row is multiplied and added with one rounding (fused). A part of the
/// sum begins with each row that has a weight whose flag is set.
///
/// # Panics
/// A row is shorter than `out`, or there are more rows than weights.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub fn weighted(rows: &[&[u16]], weights: &[(f32, bool)], out: &mut [u16]) {
    let add = |sum: f32, row: usize, value: f32| value.mul_add(weights[row].0, sum);
    in_blocks(rows, out, add, |row| weights[row].1);
}

/// Sums whole blocks, whose loops have a fixed length, and then the rest, value by value. `add(part, row, value)` adds a row's value to a
/// part of the sum, which begins with a row that `begins`, or with the first.
#[inline(always)]
fn in_blocks(
    rows: &[&[u16]],
    out: &mut [u16],
    add: impl Fn(f32, usize, f32) -> f32,
    begins: impl Fn(usize) -> bool,
) {
    let (blocks, rest) = out.as_chunks_mut::<BLOCK>();
    let start = blocks.len() * BLOCK;
    for (at, out) in blocks.iter_mut().enumerate() {
        let sums = sums_at::<BLOCK>(rows, at * BLOCK, &add, &begins);
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = bf16::from_f32(sum);
        }
    }
    for (at, out) in rest.iter_mut().enumerate() {
        let [sum] = sums_at(rows, start + at, &add, &begins);
        *out = bf16::from_f32(sum);
    }
}

/// The sums of `N` values of each row from `at` on.
#[inline(always)]
fn sums_at<const N: usize>(
    rows: &[&[u16]],
    at: usize,
    add: &impl Fn(f32, usize, f32) -> f32,
    begins: &impl Fn(usize) -> bool,
) -> [f32; N] {
    let (mut sums, mut nth) = ([0.0f32; N], 0);
    while nth < rows.len() {
        let mut part = [0.0f32; N];
        loop {
            let values = &rows[nth][at..][..N];
            // A block is two lines.
            let ahead = values.as_ptr().wrapping_add(AHEAD);
            streaming::prefetch(ahead);
            streaming::prefetch(ahead.wrapping_add(BLOCK / 2));
            for (part, bits) in part.iter_mut().zip(values) {
                *part = add(*part, nth, bf16::to_f32(*bits));
            }
            nth += 1;
            if nth == rows.len() || begins(nth) {
                break;
            }
        }
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
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
        // Of the product's bits, the first that f32 has no room for decides about the last of the bf16.
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
