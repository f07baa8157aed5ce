//! Sums of bf16 rows in f32: an element's terms are added one after another, in the order of the rows, and the sum is
//! rounded once.

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
    in_blocks(rows, out, |sum, _, value| sum + value);
}

/// `out = weights[0] * rows[0] + ...`, where each row is multiplied and added with one rounding (fused).
///
/// # Panics
/// A row is shorter than `out`, or there are more rows than weights.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub fn weighted(rows: &[&[u16]], weights: &[f32], out: &mut [u16]) {
    in_blocks(rows, out, |sum, row, value| value.mul_add(weights[row], sum));
}

/// Sums whole blocks, whose loops have a fixed length, and then the rest. `add(sum, row, value)` adds a row's value.
#[inline(always)]
fn in_blocks(rows: &[&[u16]], out: &mut [u16], add: impl Fn(f32, usize, f32) -> f32) {
    let (blocks, rest) = out.as_chunks_mut::<BLOCK>();
    let start = blocks.len() * BLOCK;
    for (at, out) in blocks.iter_mut().enumerate() {
        let mut sums = [0.0f32; BLOCK];
        for (nth, row) in rows.iter().enumerate() {
            let values = &row[at * BLOCK..][..BLOCK];
            // A block is two lines.
            let ahead = values.as_ptr().wrapping_add(AHEAD);
            streaming::prefetch(ahead);
            streaming::prefetch(ahead.wrapping_add(BLOCK / 2));
            for (sum, bits) in sums.iter_mut().zip(values) {
                *sum = add(*sum, nth, bf16::to_f32(*bits));
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = bf16::from_f32(sum);
        }
    }
    for (at, out) in rest.iter_mut().enumerate() {
        let values = rows.iter().map(|row| bf16::to_f32(row[start + at])).enumerate();
        *out = bf16::from_f32(values.fold(0.0, |sum, (nth, value)| add(sum, nth, value)));
    }
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
        weighted(&terms.each_ref().map(|term| &term[..]), &[-1.0, weight], &mut out);
        let exact = f64::from(weight) * f64::from(value) - 1.0;
        let twice = weight * value - 1.0;
        assert_eq!(out, row(exact as f32));
        assert_ne!(exact as f32, twice, "two roundings differ");
    }
}
