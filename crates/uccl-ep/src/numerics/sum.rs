//! Sums of bf16 rows in f32: an element's terms are added one after another, in the order of the rows, and the sum is
//! rounded once.

use multiversion::multiversion;

use super::bf16;

/// Elements that are summed at a time: their sums stay in registers.
const BLOCK: usize = 64;

/// `out = rows[0] + rows[1] + ...`; zeros if there are none.
///
/// # Panics
/// A row is shorter than `out`.
#[multiversion(targets("x86_64+avx2+fma", "x86_64+avx512f+avx512bw+avx512vl+fma"))]
pub fn plain(rows: &[&[u16]], out: &mut [u16]) {
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let mut sum = [0.0f32; BLOCK];
        for row in rows {
            for (sum, bits) in sum.iter_mut().zip(&row[block * BLOCK..][..out.len()]) {
                *sum += bf16::to_f32(*bits);
            }
        }
        for (sum, out) in sum.iter().zip(out) {
            *out = bf16::from_f32(*sum);
        }
    }
}

/// `out = weights[0] * rows[0] + ...`, where each row is multiplied and added with one rounding (fused).
///
/// # Panics
/// A row is shorter than `out`.
#[multiversion(targets("x86_64+avx2+fma", "x86_64+avx512f+avx512bw+avx512vl+fma"))]
pub fn weighted(rows: &[&[u16]], weights: &[f32], out: &mut [u16]) {
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let mut sum = [0.0f32; BLOCK];
        for (row, weight) in rows.iter().zip(weights) {
            for (sum, bits) in sum.iter_mut().zip(&row[block * BLOCK..][..out.len()]) {
                *sum = bf16::to_f32(*bits).mul_add(*weight, *sum);
            }
        }
        for (sum, out) in sum.iter().zip(out) {
            *out = bf16::from_f32(*sum);
        }
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
