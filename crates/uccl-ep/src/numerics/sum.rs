//! Sums of bf16 rows in f32: terms are added one after another, in the order of the calls, and the sum is rounded once.

use multiversion::multiversion;

use super::bf16;

/// `sum += row`.
#[multiversion(targets("x86_64+avx2+fma", "x86_64+avx512f+avx512bw+avx512vl+fma"))]
pub fn add(sum: &mut [f32], row: &[u16]) {
    for (sum, bits) in sum.iter_mut().zip(row) {
        *sum += bf16::to_f32(*bits);
    }
}

/// `sum += weight * row`, with one rounding (a fused multiply and add).
#[multiversion(targets("x86_64+avx2+fma", "x86_64+avx512f+avx512bw+avx512vl+fma"))]
pub fn add_weighted(sum: &mut [f32], weight: f32, row: &[u16]) {
    for (sum, bits) in sum.iter_mut().zip(row) {
        *sum = bf16::to_f32(*bits).mul_add(weight, *sum);
    }
}

/// The sum, rounded to bf16.
#[multiversion(targets("x86_64+avx2+fma", "x86_64+avx512f+avx512bw+avx512vl+fma"))]
pub fn round(sum: &[f32], row: &mut [u16]) {
    for (sum, bits) in sum.iter().zip(row) {
        *bits = bf16::from_f32(*sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_added_in_order_and_rounded_once() {
        let row = |value: f32| vec![bf16::from_f32(value); 40];
        let mut sum = vec![0.0; 40];
        for value in [16_777_216.0, 1.0, -16_777_216.0, 0.25] {
            add(&mut sum, &row(value));
        }
        let mut out = row(0.0);
        round(&sum, &mut out);
        assert_eq!(out, row(0.25), "f32 has no room for the 1 beside 2^24");
    }

    #[test]
    fn a_weighted_term_is_rounded_once() {
        let (weight, value) = (1.0 + f32::EPSILON, 1.0 + 1.0 / 128.0);
        let mut sum = vec![-1.0; 5];
        add_weighted(&mut sum, weight, &[bf16::from_f32(value); 5]);
        let exact = f64::from(weight) * f64::from(value) - 1.0;
        assert_eq!(sum, [exact as f32; 5]);
        assert_ne!(exact as f32, weight * value - 1.0, "two roundings would show");
    }
}
